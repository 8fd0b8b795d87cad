"""The numbers and claims of a paper beside ours: each number joined, the figure that shows both, verdicts on claims."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter
from pydantic import Field, model_validator

from scalebench import errors, formatting, measured
from scalebench.analysis import Results
from scalebench.figures import plotting, style
from scalebench.figures.drawing.series_style import EXECUTION_WORDS, FILLS
from scalebench.papers.obtained import Obtained, obtain, without_run
from scalebench.papers.paper_folder import CLAIMS, NEVER, Paper, Published
from scalebench.study.validation import StrictModel, read_as
from scalebench.system.file_access import open_own

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000")
_PHRASES = {
    "time_reduction": "time reduction against {}",
    "largest_time_reduction": "largest time reduction against {}",
    "target_time_reduction": "reduction of the time to the target against {}",
    "metric_difference": "metric minus that of {}",
    "speedup_over": "speedup over {} workers",
    "time_over": "time over that of {}",
    "target_time_over": "time to the target over that of {}",
    "fewer_syncs": "synchronisations to the target, {} over its own",
}
_LETTERS = 100  # of titles in a row of panels
_TICKS = 8  # that fit below a panel
# width in which titles, names of strategies and the legend of one panel fit
_LEAST_IN = 7.2

Verdict = Literal[
    "reproduced", "partly", "not reproduced", "not testable here", "not run"
]


@dataclass(frozen=True)
class Pair:
    """A published number and ours; without ours, the reason is in `absent`."""

    published: Published
    obtained: Obtained | None
    absent: str = ""

    @property
    def difference(self) -> float:
        """Ours minus the published value; NaN where either is missing or was never reached."""
        ours = math.nan if self.obtained is None else self.obtained.measured.value
        return (
            ours - self.published.value
            if math.isfinite(ours) and math.isfinite(self.published.value)
            else math.nan
        )


def pair_up(
    paper: Paper, rows: Iterable[Published], results: Mapping[str, Results]
) -> list[Pair]:
    """Join each published number with ours, from `results` by study; one pair for each execution of ours."""
    pairs = []
    for row in rows:
        if row.study == "":
            pairs.append(Pair(row, None, "no counterpart"))
        elif (
            law := without_run(paper.folder, row.study, row.quantity, row.workers)
        ) is not None:
            pairs.append(Pair(row, law))
        elif row.study not in results:
            pairs.append(Pair(row, None, "not run"))
        else:
            # One value for each execution and engine: each stands beside the published
            # one.
            found = obtain(results[row.study], row.quantity, row.strategy, row.workers)
            pairs += [Pair(row, one) for one in found] or [
                Pair(row, None, "not in this scale")
            ]
    return pairs


def number(value: float) -> str:
    """Return a value in three digits; `never` for an accuracy that was not reached."""
    if not math.isfinite(value):
        return NEVER if value == math.inf else formatting.EMPTY
    return (
        f"{value:.3f}"
        if abs(value) < 10 and value != int(value)
        else f"{value:.3g}"
        if abs(value) < 1000
        else f"{value:,.0f}"
    )


def with_interval(one: measured.Measured) -> str:
    """Return our value with its interval, if there is one."""
    bounds = (
        f" [{number(one.low)}, {number(one.high)}]"
        if formatting.is_interval(one.low, one.high)
        else ""
    )
    return number(one.value) + bounds


def in_words(quantity: str) -> str:
    """Return the name of a quantity with its argument in words: `time reduction against serial`."""
    name, _, argument = quantity.partition("@")
    phrase = _PHRASES.get(name, f"{name.replace('_', ' ')} {{}}")
    return phrase.format(argument).strip()


def draw(pairs: Sequence[Pair], picture: Path) -> bool:
    """Draw published and obtained values: a panel for each quantity that has several worker counts, or arguments in
    numbers; those at one place together, a line for each.

    Published values are crosses on a thick pale line, ours circles, filled where
    measured; triangles at the top were never reached. Writes the SVG `picture`; returns
    False if no number has ours beside it.
    """
    curves, single = _panels(pairs)
    if not (curves or single):
        return False
    columns = min(3, len(curves) + len(single))
    rows = -(-(len(curves) + len(single)) // columns)
    # Single numbers take a line each, curves a panel.
    height = 2.5 if curves else 1.2 + 0.25 * max(map(len, single.values()))
    with plotting.house_style(style.REPORT):
        figure = Figure(
            figsize=(max(_LEAST_IN, 3.2 * columns), height * rows + 0.5),
            layout="constrained",
        )
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        labels: dict[str, int] = {}
        variants = {pair.published.strategy for own in curves.values() for pair in own}
        for axis, (name, own) in zip(
            axes, [*curves.items(), *single.items()], strict=False
        ):
            if name in single:
                _lines(axis, own)
            else:
                _panel(axis, name, own, labels, variants)
        for axis in axes[len(curves) + len(single) :]:
            axis.set_visible(False)
        handles = {}  # by label: panels share their legend
        for axis in axes:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                handles[label] = handle
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=2
        )
        with open_own(picture, "wb") as file:
            # Without a date the same records give the same bytes.
            figure.savefig(file, format=picture.suffix[1:], metadata={"Date": None})
    return True


def _panels(
    pairs: Sequence[Pair],
) -> tuple[dict[str, list[Pair]], dict[str, list[Pair]]]:
    """Return the numbers with ours beside them by panel: those along a curve, and those at one place."""
    curves: dict[str, list[Pair]] = {}
    single: dict[str, list[Pair]] = {}
    for pair in pairs:
        if pair.obtained is not None and not math.isnan(pair.published.value):
            # Numbers without ours are in the table only: a picture compares.
            curves.setdefault(_curve(pair), []).append(pair)
    places = {name: {_x(pair) for pair in own} for name, own in curves.items()}
    for name in [name for name, own in places.items() if len(own) == 1]:
        for pair in curves.pop(name):
            single.setdefault(
                f"{name.partition('@')[0]} {pair.published.workers}", []
            ).append(pair)
    return curves, single


def _x(pair: Pair) -> float | None:
    """Place on a curve: the worker count, else the argument if it is a number."""
    argument = pair.published.quantity.partition("@")[2]
    # Where a paper varies something else, as the level of an accuracy, it is the
    # argument.
    return pair.published.workers or (float(argument) if argument.isdecimal() else None)


def _curve(pair: Pair) -> str:
    """Name of the curve's quantity: without the argument where that is the place on the curve."""
    quantity = pair.published.quantity
    return (
        quantity
        if pair.published.workers or _x(pair) is None
        else quantity.partition("@")[0]
    )


def _lines(axis: Any, own: Sequence[Pair]) -> None:
    """Draw a line for each strategy, and for each argument of the quantity where several are here."""
    first = own[0].published
    names = [pair.published.strategy for pair in own]
    what = in_words(own[0].published.quantity)
    arguments = [pair.published.quantity.partition("@")[2] for pair in own]
    if len(set(arguments)) > 1:
        names = [", ".join(both) for both in zip(names, arguments, strict=True)]
        what = first.quantity.partition("@")[0].replace("_", " ")
    lines = list(dict.fromkeys(names))[::-1]
    for line, pair in zip(names, own, strict=True):
        if pair.obtained is not None:
            y = lines.index(line)
            kind = pair.obtained.execution.split()[0]
            axis.plot(
                pair.published.value,
                y,
                "x",
                color="black",
                alpha=0.5,
                markeredgewidth=3,
                label="published",
            )
            value, low, high = pair.obtained.measured[:3]
            axis.plot(value, y, "o", color="black", fillstyle=FILLS.get(kind, "none"),
                      label=f"ours: {EXECUTION_WORDS.get(kind, kind)}")  # fmt: skip
            if formatting.is_interval(low, high):
                axis.hlines(y, low, high, color="black", linewidth=1)
    axis.set_yticks(range(len(lines)), lines)
    axis.set_ylim(-0.6, len(lines) - 0.4)
    axis.set_xlabel(first.unit)
    # the names of the lines take their room from the panel's width
    beside = max(map(len, names)) // 2
    _title(
        axis,
        f"{what}, {formatting.counted(first.workers, 'worker')}"
        if first.workers
        else what,
        beside,
    )


def _title(axis: Any, text: str, beside: int = 0) -> None:
    axis.set_title(
        fill(text, _LETTERS // axis.get_subplotspec().get_gridspec().ncols - beside)
    )


def _never(axis: Any, places: Sequence[float | None], **look: object) -> None:
    """Mark what was never reached at the top of the panel."""
    if places:
        axis.plot(places, [0.96] * len(places), "^", transform=axis.get_xaxis_transform(), linestyle="",
                  label="never reached", **look)  # fmt: skip


def _label(strategy: str, variants: Iterable[str], what: str) -> str:
    """Return the legend's text, with the options of `strategy` only where another of its `variants` is drawn."""
    bare = strategy.partition("(")[0]
    # Options matter only where they tell two lines apart.
    alone = sum(other.partition("(")[0] == bare for other in variants) == 1
    return ", ".join(filter(None, [bare if alone else strategy, what]))


def _panel(
    axis: Any,
    name: str,
    own: Sequence[Pair],
    labels: dict[str, int],
    variants: Iterable[str],
) -> None:
    for strategy in dict.fromkeys(pair.published.strategy for pair in own):
        pairs = [pair for pair in own if pair.published.strategy == strategy]
        colour = _COLOURS[labels.setdefault(strategy, len(labels)) % len(_COLOURS)]
        x = [_x(pair) for pair in pairs]
        axis.plot(x, [pair.published.value for pair in pairs], "x-", color=colour, alpha=0.5, linewidth=3,
                  label=_label(strategy, variants, "published"))  # fmt: skip
        for execution in dict.fromkeys(
            pair.obtained.execution for pair in pairs if pair.obtained
        ):
            some = [(_x(pair), pair.obtained.measured) for pair in pairs
                    if pair.obtained and pair.obtained.execution == execution]  # fmt: skip
            kind = execution.split()[0]
            axis.plot([at for at, _ in some], [one.value for _, one in some], "o:", color=colour,
                      fillstyle=FILLS.get(kind, "none"),
                      label=_label(strategy, variants, f"ours: {EXECUTION_WORDS.get(kind, kind)}"))  # fmt: skip
            for at, one in some:
                if formatting.is_interval(one.low, one.high):
                    axis.vlines(at, one.low, one.high, color=colour, linewidth=1)
            _never(
                axis,
                [at for at, one in some if one.value == math.inf],
                color=colour,
                fillstyle="none",
            )
        _never(axis, [_x(pair) for pair in pairs if pair.published.value == math.inf],
               color=colour, alpha=0.5)  # fmt: skip
    counts = sorted({_x(pair) or 0 for pair in own})
    axis.set_xscale("log", base=2)
    # A log axis has minor ticks with labels between few counts.
    axis.xaxis.set_minor_locator(NullLocator())
    if len(counts) <= _TICKS:
        axis.set_xticks(counts)
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.set_xlabel("workers" if own[0].published.workers else name.rpartition("_")[2])
    axis.set_ylabel(own[0].published.unit)
    _title(axis, in_words(name))


class Check(StrictModel):
    """Bounds on a quantity of a study or what-if; they hold where the whole interval, or a lone value, lies within."""

    study: str
    quantity: str
    strategy: str = ""
    workers: int | None = None
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _a_bound(self) -> Check:
        if self.at_least is None and self.at_most is None:
            raise ValueError("give at_least, at_most or both")
        return self

    def holds(self, one: Obtained) -> bool | None:
        """Return True if `one` keeps to the bounds, False if not, None if its interval contains one of them."""
        value, low, high = one.measured[:3]
        if not formatting.is_interval(low, high):
            # A lone value holds or not; it leaves nothing open.
            low = high = value
        least = -math.inf if self.at_least is None else self.at_least
        most = math.inf if self.at_most is None else self.at_most
        if least <= low and high <= most:
            return True
        return False if high < least or low > most else None

    @property
    def bound(self) -> str:
        """The bounds in words: `at least 0.95`, `0.85 to 0.95`."""
        if self.at_least is not None and self.at_most is not None:
            return f"{number(self.at_least)} to {number(self.at_most)}"
        return (
            f"at most {number(self.at_most or 0)}"
            if self.at_least is None
            else f"at least {number(self.at_least)}"
        )


class Claim(StrictModel):
    """A claim with its place in the paper, the checks that it stands for, and why ours may differ.

    Without checks it cannot be tested here; `why` says the reason.
    """

    claim: str
    source: str
    checks: list[Check] = Field([])
    why: str


class _Claims(StrictModel):
    claims: list[Claim]


@dataclass(frozen=True)
class Judged:
    """A claim, its verdict, and what was obtained for each check and execution."""

    claim: Claim
    verdict: Verdict
    obtained: list[tuple[Check, Obtained]]


def read_claims(path: Path) -> list[Claim]:
    """Read `claims.yaml`; no claims where there is no such file.

    Raises:
        StudyError: not a list of claims; one line that names file and key.
    """
    if not path.is_file():
        return []
    return read_as(path, _Claims, errors.StudyError, "file of claims").claims


def judge(
    claim: Claim, results: Mapping[str, Results], folder: Path | None = None
) -> Judged:
    """Return the verdict on `claim` by the `results` of studies, and by what follows from the paper's `folder` alone.

    Reproduced: all checks hold in every execution; not reproduced: none does; else
    partly. An interval that contains a bound leaves its check open, which is partly,
    too.
    """
    if not claim.checks:
        return Judged(claim, "not testable here", [])
    found = [
        (check, one)
        for check in claim.checks
        if check.study in results
        for one in obtain(
            results[check.study], check.quantity, check.strategy, check.workers
        )
    ]
    if folder is not None:
        for check in claim.checks:
            followed = without_run(folder, check.study, check.quantity, check.workers)
            if followed is not None:
                found.append((check, followed))
    tested = [check for check, _ in found]
    if not all(check in tested for check in claim.checks):
        return Judged(claim, "not run", found)
    answers = [check.holds(one) for check, one in found]
    if all(answers):
        return Judged(claim, "reproduced", found)
    return Judged(
        claim,
        "not reproduced" if not any(a is not False for a in answers) else "partly",
        found,
    )


def claims_page(papers: Iterable[Paper], scale: str, results: Path) -> str:
    """Return all claims of `papers` in Markdown, judged by the rows in the folder `results`."""
    lines = [
        "# Claims of papers, and what was obtained",
        "",
        f"Printed by `scalebench reproduce --claims --scale {scale}` from rows. A claim stands for the checks that "
        "`claims.yaml` of the paper has for it. Reproduced: all hold, with their whole interval; not reproduced: none "
        "does; partly: some do, or an interval contains the bound. The word behind a value is its execution.",
        "",
    ]
    for paper in papers:
        claims = read_claims(paper.folder / CLAIMS)
        loaded = paper.load(paper.studies, scale, results) if claims else {}
        for claim in claims:
            lines += _section(paper, judge(claim, loaded, paper.folder))
    return "\n".join(lines).rstrip() + "\n"


def _section(paper: Paper, judged: Judged) -> list[str]:
    claim = judged.claim
    lines = [
        f"## {paper.name}: {claim.claim}",
        "",
        f"**{judged.verdict.capitalize()}.** {claim.why}",
        "",
    ]
    lines += [f"Claimed in: {claim.source}.", ""]
    for check, one in judged.obtained:
        answer = {True: "holds", False: "does not hold", None: "open"}[check.holds(one)]
        at = (
            f" at {formatting.counted(check.workers, 'worker')}"
            if check.workers
            else ""
        )
        what = in_words(check.quantity)
        lines.append(
            f"- {', '.join(filter(None, [what, check.strategy]))}{at}: {with_interval(one.measured)} ({one.execution}, "
            f"{'study' if check.strategy else 'from'} {check.study}); "
            f"{check.bound}: {answer}"
        )
    return [*lines, ""] if judged.obtained else lines
