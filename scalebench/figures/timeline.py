"""One run as lanes: what each worker did when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scalebench.errors import ResultsError
from scalebench.figures.plotting import FORMATS, write_figure
from scalebench.training.outcome import Lap

if TYPE_CHECKING:
    from scalebench.figures.drawing.canvas import Canvas
    from scalebench.launch.tracing import Lane, Timeline

_LANE_IN = 0.3
_MOST_LANES = 40
_EDGES_UP_TO = 600  # bars: beyond, white edges would hide them


def draw_timeline(
    timeline: Timeline,
    stem: Path,
    formats: Sequence[str] = FORMATS,
    window: tuple[float, float] | None = None,
) -> list[Path]:
    """Write `stem`.pdf, .svg, .png and the .csv of the drawn laps; `window`: these seconds only.

    Raises:
        ResultsError: nothing lies in the window, or the files cannot be written.
    """
    lanes = [(lane, list(_drawn(lane, window))) for lane in timeline.lanes[:_MOST_LANES]]
    if not any(bars for _, bars in lanes):
        raise ResultsError(f"{timeline.title}: nothing happened between {window[0]:g} and {window[1]:g} s") if window \
            else ResultsError(f"{timeline.title}: no worker did anything")  # fmt: skip
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        files = write_figure(stem.name, lambda canvas: _draw(timeline, lanes, canvas, window), stem, formats)
        data = stem.with_suffix(".csv")
        rows = [f"{lane.name},{lap.activity},{lap.begin_s!r},{lap.end_s!r}" for lane, bars in lanes for lap in bars]
        data.write_text("\n".join(["lane,activity,begin_s,end_s", *rows]) + "\n", encoding="utf-8")
    except OSError as error:
        raise ResultsError(
            f"cannot write {stem.parent}: {error.strerror}; choose another folder with --output"
        ) from None
    return [*files, data]


def _draw(
    timeline: Timeline, lanes: list[tuple[Lane, list[Lap]]], canvas: Canvas, window: tuple[float, float] | None
) -> None:
    from matplotlib.patches import Patch

    from scalebench.figures.drawing.styles import SERVING, TASKS

    colors = TASKS | {"serving": SERVING}
    (panel,) = canvas.rows((1, 0.62 + _LANE_IN * len(lanes)))
    panel.title("", timeline.title)
    ax, end = panel.ax, max(lap.end_s for _, bars in lanes for lap in bars)
    scale, unit = (1e3, "ms") if end < 1 else (1.0, "s")
    edged = sum(len(bars) for _, bars in lanes) <= _EDGES_UP_TO
    for place, (lane, bars) in enumerate(lanes):
        for group, color in colors.items():
            spans = [(lap.begin_s * scale, (lap.end_s - lap.begin_s) * scale) for lap in bars if lap.activity == group]
            edge = {"edgecolor": "white", "linewidth": 0.35} if edged and group == "compute" else {"linewidth": 0}
            ax.broken_barh(spans, (place - 0.38, 0.76), facecolor=color, zorder=2, **edge)
        inside = [at * scale for at in lane.epochs if window is None or window[0] <= at <= window[1]]
        ax.vlines(inside, place - 0.47, place + 0.47, color="#222222", linewidth=0.9, zorder=3)
    ax.set_yticks(range(len(lanes)), [_short(lane.name) for lane, _ in lanes])
    ax.set_ylim(len(lanes) - 0.4, -0.6)
    ax.set_xlim((window[0] if window else 0.0) * scale, min(end, window[1] if window else end) * scale)
    ax.set_xlabel(f"time since training began ({unit})")
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    shown = {lap.activity for _, bars in lanes for lap in bars}
    canvas.legend([(Patch(facecolor=color), group) for group, color in colors.items() if group in shown])
    left_out = len(timeline.lanes) - len(lanes)
    canvas.say(
        f"{timeline.about[:1].upper()}{timeline.about[1:]}.",
        "Communication is what compute does not hide, without the waiting for others, which is shown separately. A "
        "black line ends an epoch.",
        "A server's lane shows from when it takes a request up to its last reply to it." if "serving" in shown else "",
        _of_real_runs(lanes) if timeline.execution != "virtual" else "",
        f"{left_out} more lanes are in the trace file." if left_out else "",
    )


def _of_real_runs(lanes: list[tuple[Lane, list[Lap]]]) -> str:
    """What the lanes of real processes do not show, and what Horovod's own add."""
    workers = [lap.activity for lane, bars in lanes for lap in bars if lane.name.startswith("worker")]
    told = ["Gaps are pauses of the training time."] if workers else []
    if workers and "waiting" not in workers:
        told.append("Where communication lies in backward, or hosts differ, waiting is not told apart.")
    if any(lane.name.startswith("Horovod") for lane, _ in lanes):
        told.append("Horovod's lanes are rank 0's: waiting is negotiation, until every rank has the tensor.")
    return " ".join(told)


def _drawn(lane: Lane, window: tuple[float, float] | None) -> Iterator[Lap]:
    """The lane in the groups of the figure: laps that touch become one bar, but a step's compute stays a bar."""
    from scalebench.launch.tracing import GROUPS

    low, high = window or (float("-inf"), float("inf"))
    held: Lap | None = None
    for lap in lane.laps:
        group = GROUPS[lap.activity]
        begin, end = max(lap.begin_s, low), min(lap.end_s, high)
        if end <= begin:
            continue
        goes_on = held is not None and held.activity == group and begin - held.end_s < 1e-9
        if held is not None and goes_on and lap.activity != "forward":
            held = Lap(group, held.begin_s, end)
            continue
        if held is not None:
            yield held
        held = Lap(group, begin, end)
    if held is not None:
        yield held


def _short(name: str) -> str:
    return name if len(name) <= 32 else f"{name[:31]}…"
