"""Each number of a paper joined with ours, and the figure that shows both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from scalebench.analysis import Results
from scalebench.figures.drawing.styles import EXECUTION_WORDS, FILLS
from scalebench.figures.plotting import house_style
from scalebench.figures.style import REPORT
from scalebench.formatting import EMPTY, is_interval
from scalebench.papers.catalog import Paper
from scalebench.papers.laws import without_run
from scalebench.papers.obtained import Obtained, obtain
from scalebench.papers.published import NEVER, Published

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000")
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
        ours = math.nan if self.obtained is None else self.obtained.value
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


def with_interval(one: Obtained) -> str:
    """Return our value with its interval, if there is one."""
    bounds = f" [{number(one.low)}, {number(one.high)}]" if is_interval(one.low, one.high) else ""
    return number(one.value) + bounds


def draw(pairs: Sequence[Pair], picture: Path) -> bool:
    """Draw published and obtained values, a panel for each quantity: against workers, or by strategy at one count.

    Published values are crosses on a thick pale line, ours circles, filled where measured; triangles at the top were
    never reached. Writes the SVG `picture`; returns False if there is no such quantity.
    """
    panels: dict[str, list[Pair]] = {}
    for pair in pairs:
        if pair.published.workers and not math.isnan(pair.published.value) and pair.obtained is not None:
            panels.setdefault(pair.published.quantity, []).append(pair)
    panels = {name: own for name, own in panels.items() if len({_place(pair) for pair in own}) > 1}
    if not panels:
        return False
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    with house_style(REPORT):
        figure = Figure(figsize=(max(_LEAST_IN, 3.2 * columns), 2.5 * rows + 0.5), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        labels: dict[str, int] = {}
        variants = {pair.published.strategy for own in panels.values() for pair in own}
        for axis, (name, own) in zip(axes, panels.items(), strict=False):
            if len({pair.published.workers for pair in own}) == 1:
                _by_strategy(axis, name, own, labels)
            else:
                _panel(axis, name, own, labels, variants)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        handles = {
            label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
        figure.savefig(picture, metadata={"Date": None})
    return True


def _place(pair: Pair) -> tuple[str, int | None]:
    return pair.published.strategy, pair.published.workers


def _by_strategy(axis, name: str, own: Sequence[Pair], labels: dict[str, int]) -> None:  # type: ignore[no-untyped-def]
    colour = _COLOURS[labels.setdefault("", len(labels)) % len(_COLOURS)]
    strategies = list(dict.fromkeys(pair.published.strategy for pair in own))[::-1]
    for pair in own:
        if pair.obtained is not None:
            y, kind = strategies.index(pair.published.strategy), pair.obtained.execution.split()[0]
            axis.plot(pair.published.value, y, "x", color=colour, alpha=0.5, markeredgewidth=3, label="published")
            axis.plot(pair.obtained.value, y, "o", color=colour, fillstyle=FILLS.get(kind, "none"),
                      label=f"ours: {EXECUTION_WORDS.get(kind, kind)}")  # fmt: skip
            if is_interval(pair.obtained.low, pair.obtained.high):
                axis.hlines(y, pair.obtained.low, pair.obtained.high, color=colour, linewidth=1)
    axis.set_yticks(range(len(strategies)), strategies)
    axis.set_title(f"{name.replace('_', ' ').replace('@', ' ')}, {own[0].published.workers} workers")


def _never(axis, workers: Sequence[int], **look: object) -> None:  # type: ignore[no-untyped-def]
    """Mark what was never reached at the top of the panel."""
    if workers:
        axis.plot(workers, [0.96] * len(workers), "^", transform=axis.get_xaxis_transform(), linestyle="",
                  label="never reached", **look)  # fmt: skip


def _label(strategy: str, variants: Iterable[str], what: str) -> str:
    """Return the legend's text, with the options of `strategy` only where another of its `variants` is drawn."""
    bare = strategy.partition("(")[0]
    alone = sum(other.partition("(")[0] == bare for other in variants) == 1
    return ", ".join(filter(None, [bare if alone else strategy, what]))


def _panel(axis, name: str, own: Sequence[Pair], labels: dict[str, int], variants: Iterable[str]) -> None:  # type: ignore[no-untyped-def]
    for strategy in dict.fromkeys(pair.published.strategy for pair in own):
        pairs = [pair for pair in own if pair.published.strategy == strategy]
        colour = _COLOURS[labels.setdefault(strategy, len(labels)) % len(_COLOURS)]
        x = [pair.published.workers or 0 for pair in pairs]
        axis.plot(x, [pair.published.value for pair in pairs], "x-", color=colour, alpha=0.5, linewidth=3,
                  label=_label(strategy, variants, "published"))  # fmt: skip
        for execution in dict.fromkeys(pair.obtained.execution for pair in pairs if pair.obtained):
            some = [(pair.published.workers or 0, pair.obtained) for pair in pairs
                    if pair.obtained and pair.obtained.execution == execution]  # fmt: skip
            kind = execution.split()[0]
            axis.plot([at for at, _ in some], [one.value for _, one in some], "o:", color=colour,
                      fillstyle=FILLS.get(kind, "none"),
                      label=_label(strategy, variants, f"ours: {EXECUTION_WORDS.get(kind, kind)}"))  # fmt: skip
            for at, one in some:
                if is_interval(one.low, one.high):
                    axis.vlines(at, one.low, one.high, color=colour, linewidth=1)
            _never(axis, [at for at, one in some if one.value == math.inf], color=colour, fillstyle="none")
        _never(axis, [pair.published.workers or 0 for pair in pairs if pair.published.value == math.inf],
               color=colour, alpha=0.5)  # fmt: skip
    counts = sorted({pair.published.workers or 0 for pair in own})
    axis.set_xscale("log", base=2)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xticks(counts)
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.set_xlabel("workers")
    axis.set_title(name.replace("_", " ").replace("@", " "))
