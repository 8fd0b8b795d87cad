"""Tables as LaTeX: rows for booktabs, the columns that fit a page, and text that LaTeX prints as it is."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import takewhile

from scalebench.tables.printed import Print, Rounded, sentence
from scalebench.tables.table import COUNT, Table

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
    alignment = "".join("l" if table.columns[place].is_text else "r" for place in kept)
    notes = " ".join(map(sentence, table.notes))
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


def in_latex(cell: Rounded) -> str:
    r"""Return `$1.23 \pm 0.04$`, or both distances where they differ."""
    mark = to_latex(cell.mark.strip())
    if not cell.low:
        needs_math = cell.is_number and not cell.value.isdecimal()
        return f"${cell.value}${mark}" if needs_math else to_latex(cell.value) + mark
    down, up = cell.sides()
    # apart by rounding only
    alike = abs(float(up) - float(down)) < 1.5 * 10.0 ** -len(up.partition(".")[2])
    spread = f" \\pm {max(up, down, key=float)}" if alike else f"^{{+{up}}}_{{-{down}}}"
    return f"${cell.value}{spread}${mark}"


def latex_cells(table: Table) -> list[list[str]]:
    """Return headings and rows as LaTeX."""
    found = Print.of(table)
    header = [to_latex(head) for head in found.heads]
    rows = [[in_latex(cell) for cell in row] for row in found.cells]
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
