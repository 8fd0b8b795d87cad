"""The timeline of one run: the activities of each worker, in order.

Horovod writes a timeline of its own where HOROVOD_TIMELINE names a file; its tensors become further lanes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalebench.errors import ResultsError
from scalebench.study.spec import Run
from scalebench.system.bounded_read import LARGE, read_text
from scalebench.training.outcome import Lap, Outcome


@dataclass(frozen=True)
class Lane:
    """Activities of one worker, server or tensor, in order, and the times at which its epochs ended."""

    name: str
    laps: list[Lap]
    epochs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Timeline:
    """All lanes of one run; seconds since training began."""

    title: str
    execution: str
    about: str
    lanes: list[Lane]


def timeline_from(run: Run, outcome: Outcome, cluster: str = "") -> Timeline:
    """The timeline of a traced `run`; `cluster` (default: the study's) describes the machine of a virtual one."""
    lanes = [
        Lane(f"worker {worker.rank}", worker.laps, _epoch_ends(worker.laps, [e.elapsed_s for e in worker.epochs], run))
        for worker in outcome.workers
    ]
    lanes += _server_lanes(outcome)
    title = f"{run.strategy} at {run.workers} worker{'s' if run.workers > 1 else ''}"
    return Timeline(title, run.execution, _about(run, outcome, cluster or run.cluster), lanes)


def _server_lanes(outcome: Outcome) -> list[Lane]:
    """A lane for each server; one for all virtual servers, which work side by side."""
    found = outcome.facts.server_laps
    shards = outcome.facts.servers or len(found)
    if len(found) == 1:
        return [Lane("server" if shards == 1 else f"each of {shards} servers", found[0])]
    return [Lane(f"server {place}", laps) for place, laps in enumerate(found)]


def _about(run: Run, outcome: Outcome, cluster: str) -> str:
    where = f"{run.execution}, on {cluster}" if run.is_virtual else f"{run.execution}, {run.engine} on this machine"
    steps = outcome.facts.steps_per_epoch or 0
    epochs = f"{run.epochs} epoch{'s' if run.epochs > 1 else ''} of {steps} step{'s' if steps > 1 else ''}"
    uneven = [] if run.execution == "native" else run.virtual.describe(run.workers)
    crowded = ""
    if outcome.facts.oversubscribed:  # of paced runs: more than 1 % of their steps were slower than the pace
        paced = run.execution == "paced"
        crowded = "; its steps took longer than paced" if paced else "; oversubscribed: more processes than cores"
    return f"{where}{crowded}; {', '.join([f'{run.model} on {run.dataset}', epochs, *uneven])}"


def _epoch_ends(laps: Sequence[Lap], elapsed: list[float], run: Run) -> list[float]:
    """Convert training times into times of the timeline, which includes the pauses between laps."""
    if run.is_virtual or not laps:
        return elapsed
    ends: list[float] = []
    spent = 0.0
    for lap in laps:
        spent += lap.end_s - lap.begin_s
        # The same seconds were added up in another order: they may differ in the last digits.
        while len(ends) < len(elapsed) and spent >= elapsed[len(ends)] - 1e-6:
            ends.append(lap.end_s)
    return ends


def read_horovod(path: Path, began_unix_s: float | None = None) -> list[Lane]:
    """Read Horovod's timeline as lanes, one per tensor: negotiation (waiting for all ranks), then the operation.

    Rank 0 writes microseconds since a start that the file names. With `began_unix_s` lanes count from that Unix time,
    without the events before it. The incomplete file of a killed run is read too.

    Raises:
        ResultsError: the file cannot be read or is not a timeline.
    """
    try:
        # Horovod closes the list only at its end: that of a killed run is closed here.
        text = read_text(path, LARGE).rstrip().rstrip(",")
        events = json.loads(f"{text}]" if text.startswith("[") and not text.endswith("]") else text)
        if not isinstance(events, list) or not events:
            raise ValueError("it holds no list of events")
        names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e.get("args", {})}
        origin = next((e["args"].get("start_time_since_epoch_in_micros") for e in events if "args" in e), None)
        return _lanes(events, names, origin, began_unix_s)
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ResultsError(
            f"{path} is no timeline of Horovod ({error}); expected the file of HOROVOD_TIMELINE"
        ) from None


def _lanes(
    events: list[dict[str, Any]], names: dict[int, str], origin: float | None, began_unix_s: float | None
) -> list[Lane]:
    shift = began_unix_s - origin / 1e6 if began_unix_s is not None and origin is not None else 0.0
    laps: dict[int, list[Lap]] = {}
    opened: dict[int, list[tuple[str, float]]] = {}
    for event in events:
        stack = opened.setdefault(event["pid"], [])
        if event["ph"] == "B":
            stack.append((event["name"], event["ts"] / 1e6 - shift))
        elif event["ph"] == "E" and stack:
            name, begin = stack.pop()
            if not stack and begin >= 0:  # nested events name the library, and are left out
                activity = "waiting" if name.startswith("NEGOTIATE") else "communication"
                laps.setdefault(event["pid"], []).append(Lap(activity, begin, event["ts"] / 1e6 - shift))
    return [Lane(f"Horovod: {names.get(pid, pid)}", laps[pid]) for pid in sorted(laps)]
