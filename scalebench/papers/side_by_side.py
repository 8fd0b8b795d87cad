"""Each number of a paper joined with ours, and the figure that shows both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from scalebench.analysis import Results
from scalebench.figures.drawing.styles import EXECUTION_WORDS, FILLS
from scalebench.figures.plotting import house_style
from scalebench.figures.style import REPORT
from scalebench.formatting import EMPTY, is_interval
from scalebench.measured import Measured
from scalebench.papers.obtained import Obtained, obtain, without_run
from scalebench.papers.paper_folder import NEVER, Paper, Published
from scalebench.system.atomic_write import open_own

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
_LEAST_IN = 7.2  # width in which titles, names of strategies and the legend of one panel fit


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
        return ours - self.published.value if math.isfinite(ours) and math.isfinite(self.published.value) else math.nan


def pair_up(paper: Paper, rows: Iterable[Published], results: Mapping[str, Results]) -> list[Pair]:
    """Join each published number with ours, from `results` by study; one pair for each execution of ours."""
    pairs = []
    for row in rows:
        if row.study == "":
            pairs.append(Pair(row, None, "no counterpart"))
        elif (law := without_run(paper.folder, row.study, row.quantity, row.workers)) is not None:
            pairs.append(Pair(row, law))
        elif row.study not in results:
            pairs.append(Pair(row, None, "not run"))
        else:
            found = obtain(results[row.study], row.quantity, row.strategy, row.workers)
            pairs += [Pair(row, one) for one in found] or [Pair(row, None, "not in this scale")]
    return pairs


def number(value: float) -> str:
    """Return a value in three digits; `never` for an accuracy that was not reached."""
    if not math.isfinite(value):
        return NEVER if value == math.inf else EMPTY
    return (
        f"{value:.3f}"
        if abs(value) < 10 and value != int(value)
        else f"{value:.3g}"
        if abs(value) < 1000
        else f"{value:,.0f}"
    )


def with_interval(one: Measured) -> str:
    """Return our value with its interval, if there is one."""
    bounds = f" [{number(one.low)}, {number(one.high)}]" if is_interval(one.low, one.high) else ""
    return number(one.value) + bounds


def in_words(quantity: str) -> str:
    """Return the name of a quantity with its argument in words: `time reduction against serial`."""
    name, _, argument = quantity.partition("@")
    phrase = _PHRASES.get(name, f"{name.replace('_', ' ')} {{}}")
    return phrase.format(argument).strip()


def draw(pairs: Sequence[Pair], picture: Path) -> bool:
    """Draw published and obtained values: a panel for each quantity that has several worker counts, or arguments in
    numbers; those at one place together, a line for each.

    Published values are crosses on a thick pale line, ours circles, filled where measured; triangles at the top were
    never reached. Writes the SVG `picture`; returns False if no number has ours beside it.
    """
    curves, single = _panels(pairs)
    if not (curves or single):
        return False
    columns = min(3, len(curves) + len(single))
    rows = -(-(len(curves) + len(single)) // columns)
    height = 2.5 if curves else 1.2 + 0.25 * max(map(len, single.values()))
    with house_style(REPORT):
        figure = Figure(figsize=(max(_LEAST_IN, 3.2 * columns), height * rows + 0.5), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        labels: dict[str, int] = {}
        variants = {pair.published.strategy for own in curves.values() for pair in own}
        for axis, (name, own) in zip(axes, [*curves.items(), *single.items()], strict=False):
            if name in single:
                _lines(axis, own)
            else:
                _panel(axis, name, own, labels, variants)
        for axis in axes[len(curves) + len(single) :]:
            axis.set_visible(False)
        handles = {
            label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
        with open_own(picture, "wb") as file:
            figure.savefig(file, format=picture.suffix[1:], metadata={"Date": None})
    return True


def _panels(pairs: Sequence[Pair]) -> tuple[dict[str, list[Pair]], dict[str, list[Pair]]]:
    """Return the numbers with ours beside them by panel: those along a curve, and those at one place."""
    curves: dict[str, list[Pair]] = {}
    single: dict[str, list[Pair]] = {}
    for pair in pairs:
        if pair.obtained is not None and not math.isnan(pair.published.value):
            curves.setdefault(_curve(pair), []).append(pair)
    for name in [name for name, own in curves.items() if len({_x(pair) for pair in own}) == 1]:
        for pair in curves.pop(name):
            single.setdefault(f"{name.partition('@')[0]} {pair.published.workers}", []).append(pair)
    return curves, single


def _x(pair: Pair) -> float | None:
    """Place on a curve: the worker count, else the argument if it is a number."""
    argument = pair.published.quantity.partition("@")[2]
    return pair.published.workers or (float(argument) if argument.isdecimal() else None)


def _curve(pair: Pair) -> str:
    """Name of the curve's quantity: without the argument where that is the place on the curve."""
    quantity = pair.published.quantity
    return quantity if pair.published.workers or _x(pair) is None else quantity.partition("@")[0]


def _lines(axis: Any, own: Sequence[Pair]) -> None:
    """Draw a line for each strategy, and for each argument of the quantity where several are here."""
    first, names, what = (
        own[0].published,
        [pair.published.strategy for pair in own],
        in_words(own[0].published.quantity),
    )
    arguments = [pair.published.quantity.partition("@")[2] for pair in own]
    if len(set(arguments)) > 1:
        names = [", ".join(both) for both in zip(names, arguments, strict=True)]
        what = first.quantity.partition("@")[0].replace("_", " ")
    lines = list(dict.fromkeys(names))[::-1]
    for line, pair in zip(names, own, strict=True):
        if pair.obtained is not None:
            y, kind = lines.index(line), pair.obtained.execution.split()[0]
            axis.plot(pair.published.value, y, "x", color="black", alpha=0.5, markeredgewidth=3, label="published")
            value, low, high = pair.obtained.measured[:3]
            axis.plot(value, y, "o", color="black", fillstyle=FILLS.get(kind, "none"),
                      label=f"ours: {EXECUTION_WORDS.get(kind, kind)}")  # fmt: skip
            if is_interval(low, high):
                axis.hlines(y, low, high, color="black", linewidth=1)
    axis.set_yticks(range(len(lines)), lines)
    axis.set_ylim(-0.6, len(lines) - 0.4)
    axis.set_xlabel(first.unit)
    beside = max(map(len, names)) // 2  # the names of the lines take their room from the panel's width
    _title(axis, f"{what}, {first.workers} workers" if first.workers else what, beside)


def _title(axis: Any, text: str, beside: int = 0) -> None:
    axis.set_title(fill(text, _LETTERS // axis.get_subplotspec().get_gridspec().ncols - beside))


def _never(axis: Any, places: Sequence[float | None], **look: object) -> None:
    """Mark what was never reached at the top of the panel."""
    if places:
        axis.plot(places, [0.96] * len(places), "^", transform=axis.get_xaxis_transform(), linestyle="",
                  label="never reached", **look)  # fmt: skip


def _label(strategy: str, variants: Iterable[str], what: str) -> str:
    """Return the legend's text, with the options of `strategy` only where another of its `variants` is drawn."""
    bare = strategy.partition("(")[0]
    alone = sum(other.partition("(")[0] == bare for other in variants) == 1
    return ", ".join(filter(None, [bare if alone else strategy, what]))


def _panel(axis: Any, name: str, own: Sequence[Pair], labels: dict[str, int], variants: Iterable[str]) -> None:
    for strategy in dict.fromkeys(pair.published.strategy for pair in own):
        pairs = [pair for pair in own if pair.published.strategy == strategy]
        colour = _COLOURS[labels.setdefault(strategy, len(labels)) % len(_COLOURS)]
        x = [_x(pair) for pair in pairs]
        axis.plot(x, [pair.published.value for pair in pairs], "x-", color=colour, alpha=0.5, linewidth=3,
                  label=_label(strategy, variants, "published"))  # fmt: skip
        for execution in dict.fromkeys(pair.obtained.execution for pair in pairs if pair.obtained):
            some = [(_x(pair), pair.obtained.measured) for pair in pairs
                    if pair.obtained and pair.obtained.execution == execution]  # fmt: skip
            kind = execution.split()[0]
            axis.plot([at for at, _ in some], [one.value for _, one in some], "o:", color=colour,
                      fillstyle=FILLS.get(kind, "none"),
                      label=_label(strategy, variants, f"ours: {EXECUTION_WORDS.get(kind, kind)}"))  # fmt: skip
            for at, one in some:
                if is_interval(one.low, one.high):
                    axis.vlines(at, one.low, one.high, color=colour, linewidth=1)
            _never(axis, [at for at, one in some if one.value == math.inf], color=colour, fillstyle="none")
        _never(axis, [_x(pair) for pair in pairs if pair.published.value == math.inf],
               color=colour, alpha=0.5)  # fmt: skip
    counts = sorted({_x(pair) or 0 for pair in own})
    axis.set_xscale("log", base=2)
    axis.xaxis.set_minor_locator(NullLocator())
    if len(counts) <= _TICKS:
        axis.set_xticks(counts)
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.set_xlabel("workers" if own[0].published.workers else name.rpartition("_")[2])
    axis.set_ylabel(own[0].published.unit)
    _title(axis, in_words(name))
