"""The time-reduction figure: time saved against per-batch allreduce, and against Horovod and DDP in two parts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from scalebench.figures.base import FIGURES, Figure

if TYPE_CHECKING:
    import pandas as pd

    from scalebench.analysis import Results
    from scalebench.figures.drawing.canvas import Canvas
    from scalebench.figures.drawing.panel import Panel, Segment
    from scalebench.figures.drawing.styles import Look

_COLUMNS = 3


@FIGURES.add
class TimeReduction(Figure):
    name = "time-reduction"
    summary = (
        "signed time saved at the same worker count: against allreduce, and horovod and ddp, if there, in two parts"
    )

    def absent(self, results: Results) -> str:
        from scalebench.analysis.grouping import PER_BATCH

        none = results.completed["strategy"].isin(PER_BATCH).all()
        return super().absent(results) or ("no strategy synchronises less often than every batch" if none else "")

    def draw(self, results: Results, canvas: Canvas) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        from scalebench.analysis import cells, ratios
        from scalebench.analysis.grouping import PER_BATCH
        from scalebench.figures.drawing.caption import (
            describe_executions,
            describe_machines,
            describe_oversubscription,
            describe_study,
        )
        from scalebench.figures.drawing.styles import ENGINE_PART, NEUTRAL, looks, name_series

        times, compared = name_series(cells(results)), name_series(ratios(results))
        look = looks(list(times["series"]))
        compared = compared[~compared["strategy"].isin(PER_BATCH)]
        split = compared[compared["baseline"].isin(("horovod", "ddp")) & compared["reduction"].notna()]
        groups = [
            (baseline, [name for name in look if name in set(split.loc[split["baseline"] == baseline, "series"])])
            for baseline in ("horovod", "ddp")
        ]
        columns = min(_COLUMNS, max(1, *(len(names) for _, names in groups)))
        pairs: list[tuple[str, str]] = []  # baseline and strategy of each panel; ("", ""): an empty panel
        for baseline, names in groups:
            pairs += [(baseline, name) for name in names] + [("", "")] * (-len(names) % columns)
        panels = canvas.rows((3, 2.5), *[(columns, 1.95)] * (len(pairs) // columns))
        _draw_curves(panels[:3], times, compared, look)
        _draw_splits(panels[3:], split, pairs, look)
        shown = times[times["series"].isin([*compared["series"], "allreduce"])]
        canvas.legend_of_series(shown["series"], look)
        canvas.legend_of_executions(shown)
        if pairs:
            total = Line2D([], [], color=NEUTRAL, marker="D", markersize=4, linestyle="")
            canvas.legend(
                [
                    (Patch(facecolor=ENGINE_PART, edgecolor=ENGINE_PART), "part of the engine"),
                    (Patch(facecolor="#D55E00", edgecolor="#D55E00"), "part of the frequency (strategy's colour)"),
                    (total, "total, with interval"),
                ]
            )
        canvas.say(
            describe_study(results),
            describe_executions(results),
            describe_machines(results),
            "Reduction = 1 - T(strategy, N) / T(baseline, N), signed, within one execution, as geometric means of "
            "ratios paired by block. (a) Baseline: per-batch allreduce on the same engine; (b) the training times "
            "themselves; (c) baseline: serial on one worker.",
            "Below, baselines horovod and ddp in two parts: engine (T_base - T_allreduce) / T_base and frequency "
            "(T_allreduce - T_strategy) / T_base."
            if pairs
            else "",
            describe_oversubscription(shown),
            _missing(compared, results),
        )


def _draw_curves(panels: Sequence[Panel], times: pd.DataFrame, compared: pd.DataFrame, look: dict[str, Look]) -> None:
    counts = sorted(int(count) for count in compared["workers"].unique())
    saved, seconds, serial = panels
    for panel, letter, baseline in ((saved, "a", "allreduce"), (serial, "c", "serial")):
        panel.title(letter, f"reduction against {baseline}")
        own = compared[(compared["baseline"] == baseline) & compared["reduction"].notna()]
        if own.empty:
            reasons = compared.loc[compared["baseline"] == baseline, "note"]
            panel.empty("\n".join(sorted(set(reasons))[:2]))
            continue
        panel.curve(own, "reduction", look, low="reduction_low", high="reduction_high", scale=100)
        panel.reference([counts[0], counts[-1]], [0, 0], "no reduction")
        panel.ax.set_ylabel(f"time saved (% of {baseline})")
        panel.workers_axis(counts)
    seconds.title("b", "training time")
    own = times[times["series"].isin(compared["series"]) | (times["strategy"] == "allreduce")]
    seconds.curve(own, "train_s", look, low="low_s", high="high_s")
    seconds.seconds_axis()
    seconds.workers_axis(sorted({int(count) for count in own["workers"]}))


def _draw_splits(
    panels: Sequence[Panel], split: pd.DataFrame, pairs: Sequence[tuple[str, str]], look: dict[str, Look]
) -> None:
    from scalebench.figures.drawing.bars import counts_by_execution, draw_bars
    from scalebench.figures.drawing.panel import Segment, share_y
    from scalebench.figures.drawing.styles import ENGINE_PART, NEUTRAL

    counts = counts_by_execution(split)
    letters = iter("defghijklmnopqrstuvwxyz")
    for panel, (baseline, name) in zip(panels, pairs, strict=True):
        if not name:
            continue
        panel.title(next(letters, ""), name, f"{name} against {baseline}")
        own = split[(split["baseline"] == baseline) & (split["series"] == name)]

        def parts(cell: dict[Hashable, Any], color: str = look[name].color) -> list[Segment]:
            return [
                Segment("engine", 100 * cell["engine_part"], ENGINE_PART),
                Segment("frequency", 100 * cell["frequency_part"], color),
            ]

        for at, cell in draw_bars(panel, own, counts, parts, "reduction"):
            total, low, high = (100 * cell[key] for key in ("reduction", "reduction_low", "reduction_high"))
            panel.ax.plot(at, total, marker="D", markersize=3, color=NEUTRAL, zorder=5)
            panel.intervals([((at, low), (at, high))], [NEUTRAL])
            panel.keep([{"quantity": "reduction: total", "y": total, "low": low, "high": high}], **_key(cell))
        panel.ax.axhline(0, color="#555555", linewidth=0.8)
        panel.ax.set_ylabel(f"time saved (% of {baseline})", fontsize=7.5)
    drawn = [panel for panel, (_, name) in zip(panels, pairs, strict=True) if name]
    if drawn:
        share_y(drawn)
    for panel in panels:
        if panel not in drawn:
            panel.blank(drawn[0])


def _key(cell: dict[Hashable, Any]) -> dict[str, Any]:
    kept = ("series", "execution", "engine", "workers", "oversubscribed", "interval", "n", "baseline_s", "saved_s")
    return {name: cell[name] for name in kept}


def _missing(compared: pd.DataFrame, results: Results) -> str:
    """Caption: missing reductions with their reasons."""
    known = set(results.completed["strategy"])
    unknown = [name for name in ("serial", "allreduce", "horovod", "ddp") if name not in known]
    notes = sorted(set(compared.loc[(compared["note"] != "") & compared["baseline"].isin(known), "note"]))
    shown = [f"the study has no {' and no '.join(unknown)}"] if unknown else []
    shown += notes[:3] + ([f"{len(notes) - 3} more of this kind"] if len(notes) > 3 else [])
    return f"Not shown: {'; '.join(shown)}." if shown else ""
