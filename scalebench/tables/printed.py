"""Tables in print and in files: Markdown, LaTeX, CSV and JSON.

In print the numbers of a column have one unit and the digits that their intervals
support. Files have them unrounded: CSV in the unit of its heading, JSON in SI units.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from typing import Any

from scalebench.formatting import (
    BETWEEN,
    EMPTY,
    bounds_alone,
    in_cell,
    is_interval,
    reduction_bounds_alone,
)
from scalebench.tables.table import COUNT, Column, Entry, Form, Table

_PLAIN_DIGITS = 3  # of a number without an interval
# interval worth its digits, of the number: simulated times can differ by rounding alone
_NARROWEST = 1e-4
_TWO_DIGITS_UP_TO = 354  # of the three leading digits of a half-width
COLUMN_PT = 241  # the narrowest column of a two-column page, ACM's
PAGE_PT = 505  # both columns of that page
_FONT_PT = 8.5  # of footnotesize, with room for the wider digits of math
_SEP_PT = 3  # on each side of a column

_TEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "µ": r"\ensuremath{\mu}",
    "×": r"\ensuremath{\times}",
    "†": r"\ensuremath{\dagger}",
    "±": r"\ensuremath{\pm}",
    "→": r"\ensuremath{\rightarrow}",
    "∞": r"\ensuremath{\infty}",
    "Δ": r"\ensuremath{\Delta}",
    "²": r"\textsuperscript{2}",
    "–": "--",
    "—": "---",
    "£": r"\pounds{}",
    "§": r"\S{}",
    "…": r"\dots{}",
    "“": "``",
    "”": "''",
    "‘": "`",
    "’": "'",
}
# two hyphens are a dash, two apostrophes a closing quote
_LIGATURES = re.compile(r"([-,'])(?=\1)")
# the letters from À to ſ that stop LaTeX with T1 fonts, found by trying each
_NOT_IN_T1 = "ĦħĸĿŀŉŦŧſ"
_LINE = 110


@dataclass(frozen=True)
class Rounded:
    """A number and its bounds as text with equally many decimals; the bounds are empty without an interval.

    `mark` stands behind a number, such as a time to target that some runs did not
    reach.
    """

    value: str
    low: str = ""
    high: str = ""
    mark: str = ""

    @property
    def is_number(self) -> bool:
        """Return False for words in place of a number, such as `never` or `1 of 3`, or a dash."""
        return re.fullmatch(r"-?\d+(\.\d+)?", self.value) is not None

    @property
    def bounds(self) -> tuple[str, str]:
        """Both bounds, also those that stand in place of the number; empty without an interval."""
        low, between, high = self.value.partition(BETWEEN)
        return (low, high) if between else (self.low, self.high)

    def sides(self) -> tuple[str, str]:
        """Distances from the value down to the lower and up to the upper bound."""
        decimals = len(self.value.partition(".")[2])
        value, low, high = (float(text) for text in (self.value, self.low, self.high))
        return f"{value - low:.{decimals}f}", f"{high - value:.{decimals}f}"

    def in_brackets(self) -> str:
        """Return `1.23 [1.20, 1.26]`."""
        bounds = f" [{self.low}, {self.high}]" if self.low else ""
        return f"{self.value}{self.mark}{bounds}"

    def in_latex(self) -> str:
        r"""Return `$1.23 \pm 0.04$`, or both distances where they differ."""
        mark = to_latex(self.mark.strip())
        if not self.low:
            needs_math = self.is_number and not self.value.isdecimal()
            return (
                f"${self.value}${mark}" if needs_math else to_latex(self.value) + mark
            )
        down, up = self.sides()
        # apart by rounding only
        alike = abs(float(up) - float(down)) < 1.5 * 10.0 ** -len(up.partition(".")[2])
        spread = (
            f" \\pm {max(up, down, key=float)}" if alike else f"^{{+{up}}}_{{-{down}}}"
        )
        return f"${self.value}{spread}${mark}"


@dataclass(frozen=True)
class Print:
    """A table with its columns each in one unit, by a factor from that of its numbers, and its cells rounded."""

    heads: tuple[str, ...]
    cells: tuple[tuple[Rounded, ...], ...]
    columns: tuple[Column[Any], ...]
    factors: tuple[float, ...]

    @classmethod
    def of(cls, table: Table) -> Print:
        """Round the cells of `table`."""
        heads, columns, factors = [], [], []
        for place, column in enumerate(table.columns):
            own = [row[place] for row in table.rows]
            factor, unit = _unit(column.form, own) if column.form else (1.0, "")
            heads.append(f"{column.heading} ({unit})" if unit else column.heading)
            columns.append([rounded(cell, column.form, factor) for cell in own])
            factors.append(factor)
        return cls(
            tuple(heads),
            tuple(zip(*columns, strict=True)),
            tuple(table.columns),
            tuple(factors),
        )


def render(table: Table, to: str, label: str = "") -> str:
    """Return `table` in one of FORMATS; in LaTeX with a `label`."""
    return FORMATS[to](table, label)


def round_to_interval(
    value: float, low: float, high: float, decimals: int | None = None
) -> Rounded:
    """Round a number to two digits of its interval's half-width, one if that begins with 355 or more.

    Rule of the Particle Data Group, Review of Particle Physics, section 5.3. The
    distance to the nearer bound keeps one digit at least: 1.98 between 0.04 and 108 is
    2, not 0. Without an interval: `decimals`, or three significant digits.
    """
    if not math.isfinite(value):
        return Rounded("never" if value == math.inf else EMPTY)
    # Without an interval nothing says how many digits hold.
    if not is_interval(low, high):
        places = max(0, _places(value, _PLAIN_DIGITS)) if decimals is None else decimals
        return Rounded(_fixed(value, places))
    half = (high - low) / 2
    leading = round(half / 10 ** (math.floor(math.log10(half)) - 2))
    places = _places(half, 2 if leading <= _TWO_DIGITS_UP_TO or leading >= 950 else 1)
    # The shorter side of an interval that is not even needs a digit, too.
    if (nearer := min(value - low, high - value)) > 0:
        places = max(places, _places(nearer, 1))
    return Rounded(*(_fixed(number, places) for number in (value, low, high)))


def rounded(cell: Entry, form: Form | None, factor: float) -> Rounded:
    """Return the number of a cell in its unit, or its text where it has none."""
    if cell.number is None or form is None:
        return Rounded(str(cell.text))
    (value, low, high), mark = cell.number[:3], cell.mark
    if mark and not math.isfinite(value):
        return Rounded(mark)
    if not form.supported(value, low, high):
        if form.is_share:
            return Rounded(reduction_bounds_alone(low, high).removesuffix(" %"))
        return Rounded(bounds_alone(factor * low, factor * high))
    # Such an interval would ask for digits that nobody reads.
    if high - low < _NARROWEST * (1.0 if form.is_share else abs(value)):
        low = high = math.nan
    found = round_to_interval(
        factor * value, factor * low, factor * high, form.decimals
    )
    return replace(found, mark=mark)


def as_markdown(table: Table, label: str = "") -> str:
    """Return a table with title and notes below."""
    found = Print.of(table)
    rules = ["---" if _is_text(column) else "---:" for column in found.columns]
    rows = [[cell.in_brackets() for cell in row] for row in found.cells]
    lines = []
    for row in (found.heads, rules, *rows):
        # A bar would end the cell.
        cells = [cell.replace("|", r"\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    below = [_sentence(text) for text in (table.title, *table.notes) if text]
    # A blank line ends the table.
    return "\n".join([*lines, "", " ".join(below), ""])


def as_csv(table: Table, label: str = "") -> str:
    """Return unrounded numbers, each with its bounds, and its mark, in columns of their own where any row has some.

    Bounds stand alone where a number is not supported by its interval, as in print.
    """
    # The digits of print decide what is supported; the numbers are the whole ones.
    printed = Print.of(table)
    bounded = []
    marked = []
    for place in range(len(printed.heads)):
        column = [row[place] for row in printed.cells]
        bounded.append(any(cell.bounds[0] for cell in column))
        marked.append(any(cell.mark for cell in column))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    header: list[str] = []
    for head, has_bounds, has_marks in zip(printed.heads, bounded, marked, strict=True):
        header.append(head)
        if has_bounds:
            header += [f"{head} low", f"{head} high"]
        if has_marks:
            header.append(f"{head} mark")
    writer.writerow(header)
    for row, rounded_row in zip(table.rows, printed.cells, strict=True):
        cells: list[str] = []
        columns = zip(row, rounded_row, printed.factors, bounded, marked, strict=True)
        for cell, shown, factor, has_bounds, has_marks in columns:
            number = _unrounded(cell, shown, factor)
            cells.append(number.value)
            if has_bounds:
                cells += [number.low, number.high]
            if has_marks:
                cells.append(number.mark.strip())
        writer.writerow(cells)
    return text.getvalue()


def _unrounded(cell: Entry, shown: Rounded, factor: float) -> Rounded:
    """Return the numbers of a cell in its unit with all their digits, or its text for a cell of a file.

    The number is left out where its bounds stand alone in print, and bounds where it
    has none there.
    """
    if cell.number is None or not (shown.is_number or shown.bounds[0]):
        return replace(
            shown, value="" if shown.value == EMPTY else in_cell(shown.value)
        )
    # a product is exact to so many
    value, low, high = (f"{factor * number:.15g}" for number in cell.number[:3])
    has_bounds = bool(shown.bounds[0])
    return Rounded(
        value if shown.is_number else "",
        low if has_bounds else "",
        high if has_bounds else "",
        shown.mark,
    )


def as_json(table: Table, label: str = "") -> str:
    """Return title, notes and rows; a number is unrounded, in its SI unit, with its bounds where it has some."""
    content = {
        "title": table.title,
        "rows": records(table),
        "notes": list(table.notes),
    }
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def records(table: Table) -> list[dict[str, Any]]:
    """Return the values of each row by column: unrounded numbers in SI units, their bounds where they have some."""
    rows = []
    for row in table.rows:
        named: dict[str, Any] = {}
        for column, cell in zip(table.columns, row, strict=True):
            key = f"{column.over} {column.name}".strip()
            if cell.number is None:
                named[key] = str(cell.text)
                continue
            value, low, high = cell.number[:3]
            named[key] = _finite(value)
            if is_interval(low, high):
                named |= {f"{key} low": low, f"{key} high": high}
            if cell.mark:
                named[f"{key} mark"] = cell.mark.strip()
        rows.append(named)
    return rows


def as_latex(table: Table, label: str = "") -> str:
    """Return a float with a table for booktabs; over two columns where one is too narrow.

    The title stands above the table, where journals set it, and the notes below.
    """
    shared = [place for place, column in enumerate(table.columns) if column.shared]
    apart = names_stand_apart(table)
    header, *rows = latex_cells(table)
    kept = [place for place in range(len(header)) if not (apart and place in shared)]
    kind = "table" if sum(widths_pt(table, apart=apart)) <= COLUMN_PT else "table*"
    # Distances one above the other touch those of the next row.
    stretch = 1.4 if any("^{+" in cell for row in rows for cell in row) else 1.0
    alignment = "".join(
        "l" if _is_text(table.columns[place]) else "r" for place in kept
    )
    notes = " ".join(map(_sentence, table.notes))
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            rf"\begin{{{kind}}}[t]",
            r"  \centering",
            rf"  \caption{{{latex_lines(table.title)}}}",
            *([rf"  \label{{tab:{label}}}"] if label else []),
            r"  \smallskip",
            r"  \footnotesize",
            rf"  \setlength{{\tabcolsep}}{{{_SEP_PT}pt}}",
            *(
                [rf"  \renewcommand{{\arraystretch}}{{{stretch}}}"]
                if stretch > 1
                else []
            ),
            rf"  \begin{{tabular}}{{@{{}}{alignment}@{{}}}}",
            r"    \toprule",
            f"    {' & '.join(header[place] for place in kept)} \\\\",
            r"    \midrule",
            *_latex_rows(rows, shared, kept, apart=apart),
            r"    \bottomrule",
            r"  \end{tabular}",
            *(
                [
                    rf"  \par\smallskip\parbox{{\linewidth}}{{\scriptsize {latex_lines(notes)}}}"
                ]
                if notes
                else []
            ),
            rf"\end{{{kind}}}",
            "",
        ]
    )


def _latex_rows(
    rows: Sequence[Sequence[str]],
    shared: Sequence[int],
    kept: Sequence[int],
    *,
    apart: bool,
) -> Iterator[str]:
    """Yield the rows, whose columns `shared` stand once for all equal rows: `apart` above them, or in the first."""
    before: list[str] | None = None
    for row in rows:
        group = [row[place] for place in shared]
        first = group != before
        if first and before:
            yield r"    \addlinespace"
        if first and apart:
            yield rf"    \multicolumn{{{len(kept)}}}{{@{{}}l}}{{{', '.join(group)}}} \\"
        cells = [row[place] if first or place not in shared else "" for place in kept]
        yield f"    {' & '.join(cells)} \\\\"
        before = group


FORMATS: dict[str, Callable[[Table, str], str]] = {
    "latex": as_latex,
    "markdown": as_markdown,
    "csv": as_csv,
    "json": as_json,
}


def latex_cells(table: Table) -> list[list[str]]:
    """Return headings and rows as LaTeX."""
    found = Print.of(table)
    header = [to_latex(head) for head in found.heads]
    rows = [[cell.in_latex() for cell in row] for row in found.cells]
    return [header, *rows]


def widths_pt(table: Table, *, apart: bool = False) -> list[float]:
    """Return how wide the columns are in print, in points, with what separates them.

    Shared columns are left out if their values stand `apart`, in rows of their own.
    """
    places = [
        place
        for place, column in enumerate(table.columns)
        if not (apart and column.shared)
    ]
    cells = latex_cells(table)
    widths = [max(_printed_pt(row[place]) for row in cells) for place in places]
    return [width + 2 * _SEP_PT * (place > 0) for place, width in enumerate(widths)]


def names_stand_apart(table: Table) -> bool:
    """Return True if shared values stand in rows of their own: beside them no column fits a column of a page."""
    widths = widths_pt(table)
    keys = _keys(table)
    shared = sum(
        width
        for width, column in zip(widths, table.columns, strict=True)
        if column.shared
    )
    return 0 < shared <= COLUMN_PT < sum(widths[:keys]) + min(widths[keys:], default=0)


def fitting(table: Table, most_telling: Sequence[str]) -> Table:
    """Return `table` with those columns, the `most_telling` names first, that fit one column of a page with its keys.

    Where the keys leave no room for any there, the columns fit the width of the page;
    one is kept in any case.
    """
    widths = widths_pt(table)
    number = _keys(table)
    keys = sum(widths[:number])
    if names_stand_apart(table):
        shared = sum(column.shared for column in table.columns)
        keys = sum(widths_pt(table, apart=True)[: number - shared])
    rank = {name: place for place, name in enumerate(most_telling)}
    places = range(number, len(widths))
    order = sorted(
        places, key=lambda place: rank.get(table.columns[place].name, len(rank))
    )
    limit = (
        COLUMN_PT if keys + min(widths[number:], default=0) <= COLUMN_PT else PAGE_PT
    )
    kept: list[int] = []
    for place in order:
        if not kept or keys + sum(widths[n] for n in [*kept, place]) <= limit:
            kept.append(place)
    kept = [*range(number), *sorted(kept)]
    rows = [[row[place] for place in kept] for row in table.rows]
    return replace(table, columns=[table.columns[place] for place in kept], rows=rows)


def _keys(table: Table) -> int:
    """Return the number of leading columns that tell rows apart: texts and counts."""
    return sum(
        1 for _ in takewhile(lambda column: column.form in (None, COUNT), table.columns)
    )


def _is_text(column: Column[Any]) -> bool:
    return column.left or column.shared


def _sentence(text: str) -> str:
    return text if text.endswith((".", ":", ";")) else f"{text}."


def _unit(form: Form, cells: Sequence[Entry]) -> tuple[float, str]:
    """Return the factor to the unit that suits the largest number, and the unit."""
    known = [
        cell.number.value
        for cell in cells
        if cell.number is not None and math.isfinite(cell.number.value)
    ]
    longest = max(known, default=math.nan)
    return next(
        (factor, unit) for limit, factor, unit in form.units if not longest >= limit
    )


def _finite(value: float) -> float | str | None:
    """Return a number as JSON has it: infinity, a time that is never over, is a word."""
    if value == math.inf:
        return "never"
    return value if math.isfinite(value) else None


def _printed_pt(latex: str) -> float:
    """Return the width of a cell in print, in points; both distances of an interval stand one above the other."""

    def width(text: str, size: float) -> float:
        plain = (
            text.replace(r"\dots{}", "…")
            .replace(r"\pm", "±")
            .replace(r"\ensuremath{\times}", "×")
        )
        return printed_width(re.sub(r"\\(?=\W)|[${}]", "", plain), size, "STIXGeneral")

    value, *sides = re.split(r"[\^_](?=\{[+-])", latex)
    return width(value, _FONT_PT) + max(
        (width(side, 0.75 * _FONT_PT) for side in sides), default=0.0
    )


def _places(number: float, significant: int) -> int:
    """Return the decimals that show `significant` digits of a number; negative: to tens, hundreds."""
    if number == 0:
        return 0
    # first: 9.99 with two digits is 10, of another order
    rounded = float(f"{number:.{significant - 1}e}")
    return significant - 1 - math.floor(math.log10(abs(rounded)))


def _fixed(number: float, places: int) -> str:
    return f"{round(number, places) + 0.0:.{max(0, places)}f}"


def escape_latex(text: str) -> str:
    """Escape `text` for LaTeX with T1 fonts: special characters escaped, ligatures broken.

    Accented Latin letters stay, other letters lose their accents, and characters
    without a Latin form become their code point, as an unknown character stops LaTeX.
    """
    # A NUL marks where a ligature is broken, as no text has one.
    pieces = _LIGATURES.sub("\\1\0", text.replace("\0", ""))
    return "".join(
        "{}" if piece == "\0" else _TEX.get(piece) or _letter(piece) for piece in pieces
    )


def _letter(character: str) -> str:
    if character.isspace():
        return " "
    code = ord(character)
    if 0x20 <= code < 0x7F or (
        0xC0 <= code <= 0x17F and character.isalpha() and character not in _NOT_IN_T1
    ):
        return character
    if unicodedata.category(character)[0] == "C":
        return "" if code < 0x20 or 0x7F <= code < 0xA0 else f"U+{code:04X}"
    bare = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return "".join(_TEX.get(plain, plain) for plain in bare) or f"U+{code:04X}"


def to_latex(text: str) -> str:
    """Return `escape_latex(text)` with minus signs, and numbers on one line with their unit."""
    return escape_latex(text).replace(r" \%", r"\,\%").replace(" - ", " $-$ ")


def latex_lines(text: str) -> str:
    """Return `to_latex(text)` in lines of a LaTeX file."""
    return textwrap.fill(
        to_latex(text), _LINE, break_long_words=False, break_on_hyphens=False
    )


def printed_width(text: str, size: float, family: str) -> float:
    """Return the width of a line in print, in points, without kerning."""
    return size * sum(_advance_em(letter, family) for letter in text)


@cache
def _advance_em(letter: str, family: str) -> float:
    """Return how far a letter moves the next one, in ems; 1 for one that the font does not have."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    size = 100
    font = get_font(findfont(FontProperties(family=[family])))
    if not font.get_char_index(ord(letter)):
        return 1.0
    font.set_size(size, 72)
    # fixed point: 16 bits behind the point
    return float(font.load_char(ord(letter)).linearHoriAdvance) / 65536 / size
