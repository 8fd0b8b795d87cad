"""A timeline as a Chrome trace file, which ui.perfetto.dev and chrome://tracing open.

Viewers count in whole nanoseconds and drop an event that overlaps the next one of its lane by one: times are rounded,
and durations are differences of rounded times, so that adjacent laps stay adjacent. Shorter laps, as in Horovod's own
timeline (microseconds), are left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scalebench.errors import writing
from scalebench.system.atomic_write import open_own
from scalebench.training.timeline import Timeline

_PROCESS = 1  # 0 is the idle process of viewers


def write_chrome(timeline: Timeline, path: Path) -> None:
    """Write `timeline` to `path` as JSON trace events: a lane is a thread, a lap a complete event in microseconds.

    Raises:
        ResultsError: the file cannot be written.
    """
    events = [_event("M", "process_name", 1, args={"name": timeline.title})]
    for number, lane in enumerate(timeline.lanes, start=1):
        events.append(_event("M", "thread_name", number, args={"name": lane.name}))
        events.append(_event("M", "thread_sort_index", number, args={"sort_index": number}))
        for lap in lane.laps:
            begin, end = _nanoseconds(lap.begin_s), _nanoseconds(lap.end_s)
            if begin != end:
                times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
                events.append(_event("X", lap.activity, number, cat=lap.group, **times))
        for epoch, end_s in enumerate(lane.epochs, start=1):
            events.append(_event("i", f"end of epoch {epoch}", number, s="t", ts=_nanoseconds(end_s) / 1000))
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"about": timeline.about}}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_own(path, "w") as file:
            file.write(json.dumps(document) + "\n")


def _event(kind: str, name: str, lane_number: int, **values: Any) -> dict[str, Any]:
    return {"ph": kind, "name": name, "pid": _PROCESS, "tid": lane_number, **values}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
