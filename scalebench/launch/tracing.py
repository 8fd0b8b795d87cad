"""What each worker did when: a timeline of one short run, of a virtual or of a real one.

Horovod keeps a timeline of its own where HOROVOD_TIMELINE names a file; it becomes lanes of the same timeline.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scalebench.data.dataset import open_dataset
from scalebench.errors import ResultsError, RunError, StudyError
from scalebench.launch.cost_model import cost_model_for
from scalebench.launch.model_check import look_at_model
from scalebench.launch.mpirun import launch
from scalebench.launch.planning import Plan
from scalebench.records.provenance import redact
from scalebench.study.spec import Run
from scalebench.training.outcome import Lap, Outcome
from scalebench.virtual.engine import simulate

VARIABLE = "HOROVOD_TIMELINE"


@dataclass(frozen=True)
class Lane:
    """One party's activities, in order, and the moments at which its epochs ended."""

    name: str
    laps: list[Lap]
    epochs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Timeline:
    """All lanes of one run; seconds count from the beginning of training."""

    title: str
    execution: str
    about: str
    lanes: list[Lane]


def trace(plan: Plan, folder: Path) -> Timeline:
    """Execute the only run of `plan` and keep every lap; calibration and logs go to `folder`.

    Raises:
        StudyError: the plan has several runs.
        RunError: the run did not complete.
    """
    if len(plan.sweep.runs) != 1:
        found = ", ".join(sorted({f"{run.strategy} at {run.workers} ({run.execution})" for run in plan.sweep.runs}))
        raise StudyError(
            f"a timeline is of one run, the study has {len(plan.sweep.runs)}: {found}; "
            "choose with --strategy, --workers and --execution"
        )
    look_at_model(plan)
    run = plan.sweep.runs[0].model_copy(update={"trace": True})
    recorded: list[Lane] = []
    if run.execution == "virtual":
        outcome = _virtual(run, plan, folder)
    else:
        with _horovod_timeline(run, folder) as path:
            outcome = _native(run, plan, folder)
        if path is not None and path.exists():
            recorded = read_horovod(path, began_unix_s=outcome.facts.began_unix_s)
    timeline = timeline_from(run, outcome)
    return replace(timeline, lanes=timeline.lanes + recorded)


def timeline_from(run: Run, outcome: Outcome, cluster: str = "") -> Timeline:
    """What a traced `run` left; `cluster` (default: the study's) says in words what a virtual one stands for."""
    lanes = [
        Lane(f"worker {worker.rank}", worker.laps, _epoch_ends(worker.laps, [e.elapsed_s for e in worker.epochs], run))
        for worker in outcome.workers
    ]
    lanes += _server_lanes(outcome)
    title = f"{run.strategy} at {run.workers} worker{'s' if run.workers > 1 else ''}"
    return Timeline(title, run.execution, _about(run, outcome, cluster or run.cluster), lanes)


def _server_lanes(outcome: Outcome) -> list[Lane]:
    """A lane for each server; virtual ones work side by side, so that one stands for all."""
    found = outcome.facts.server_laps
    shards = outcome.facts.servers or len(found)
    if len(found) == 1:
        return [Lane("server" if shards == 1 else f"each of {shards} servers", found[0])]
    return [Lane(f"server {place}", laps) for place, laps in enumerate(found)]


def _virtual(run: Run, plan: Plan, folder: Path) -> Outcome:
    cost_model = cost_model_for(plan, [run], folder)
    outcome, _ = simulate(run, open_dataset(plan.prepared.folders[run.workers]), cost_model)
    return _completed(outcome)


def _native(run: Run, plan: Plan, folder: Path) -> Outcome:
    outcomes: list[Outcome] = []
    launch(
        [run],
        plan.prepared.folders,
        ranks=run.workers,
        work_dir=folder / "logs",
        on_start=lambda run: None,
        on_outcome=lambda run, outcome: outcomes.append(outcome),
        log=lambda text: None,
    )
    return _completed(outcomes[0])


def _completed(outcome: Outcome) -> Outcome:
    if outcome.status != "completed":
        happened = {"timeout": "ran out of time", "interrupted": "was interrupted"}.get(outcome.status, outcome.status)
        raise RunError(f"the run {happened}: {outcome.error}")
    return outcome


@contextmanager
def _horovod_timeline(run: Run, folder: Path) -> Iterator[Path | None]:
    """Ask Horovod for its timeline, unless the user has done so."""
    named = os.environ.get(VARIABLE)
    if run.engine != "horovod" or run.workers == 1 or named:
        yield Path(named) if named and run.engine == "horovod" else None
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / "horovod-timeline.json").absolute()
    path.unlink(missing_ok=True)
    os.environ[VARIABLE] = str(path)
    try:
        yield path
    finally:
        del os.environ[VARIABLE]


def _about(run: Run, outcome: Outcome, cluster: str) -> str:
    where = f"virtual, on {cluster}" if run.execution == "virtual" else f"{run.execution}, {run.engine} on this machine"
    steps = outcome.facts.steps_per_epoch or 0
    epochs = f"{run.epochs} epoch{'s' if run.epochs > 1 else ''} of {steps} step{'s' if steps > 1 else ''}"
    uneven = [] if run.execution == "native" else run.virtual.in_words(run.workers)
    crowded = ""
    if outcome.facts.oversubscribed:  # of paced runs: more than 1 % of their steps were slower than the pace
        paced = run.execution == "paced"
        crowded = "; its steps took longer than paced" if paced else "; oversubscribed: more processes than cores"
    about = f"{where}{crowded}; {', '.join([f'{run.model} on {run.dataset}', epochs, *uneven])}"
    return redact(about, names=False)  # paths of a model or cluster of one's own


def _epoch_ends(laps: Sequence[Lap], elapsed: list[float], run: Run) -> list[float]:
    """Training time as time of the timeline: they differ by the pauses, which are gaps between laps."""
    if run.execution == "virtual" or not laps:
        return elapsed
    ends: list[float] = []
    spent = 0.0
    for lap in laps:
        spent += lap.end_s - lap.begin_s
        while len(ends) < len(elapsed) and spent >= elapsed[len(ends)] - 1e-6:
            ends.append(lap.end_s)
    return ends


def read_horovod(path: Path, began_unix_s: float | None = None) -> list[Lane]:
    """Horovod's timeline file as lanes, one for each tensor: negotiation (waiting for all ranks), then the operation.

    Rank 0 writes it, in microseconds since a moment the file names; with `began_unix_s` lanes count from that moment
    and what came before is left out. The file of a run that was killed has no end, and is read all the same.

    Raises:
        ResultsError: the file cannot be read or is no timeline.
    """
    try:
        text = path.read_text(encoding="utf-8").rstrip().rstrip(",")
        events = _events(json.loads(f"{text}]" if text.startswith("[") and not text.endswith("]") else text))
        names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e.get("args", {})}
        origin = next((e["args"].get("start_time_since_epoch_in_micros") for e in events if "args" in e), None)
        if not isinstance(origin, int | float | None):
            raise ValueError("the moment of its beginning is no number")
        return _lanes(events, names, origin, began_unix_s)
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ResultsError(f"{path} is no timeline of Horovod ({error}); expected the file of {VARIABLE}") from None


_HOLDS = {"ph": (str, "text"), "name": (str, "text"), "pid": (int, "a number"), "ts": (int | float, "a number")}
_KEYS = {"B": ("name", "ts"), "E": ("ts",)}  # what is read of events of these kinds


def _events(found: Any) -> list[dict[str, Any]]:
    """What a timeline's file holds. Raises ValueError: something else; which event, and what it lacks."""
    if not isinstance(found, list):
        raise ValueError("it is no list of events")
    if not found:
        raise ValueError("it holds no event")
    for place, event in enumerate(found):
        if not isinstance(event, dict):
            raise ValueError(f"event {place} is no object")
        if not isinstance(event.get("args", {}), dict):
            raise ValueError(f"event {place} has args that are no object")
        for key in ("ph", "pid", *_KEYS.get(str(event.get("ph")), ())):
            kind, word = _HOLDS[key]
            if not isinstance(event.get(key), kind):
                raise ValueError(f"event {place} has no {key} that is {word}")
    return found


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
            if not stack and begin >= 0:  # what is nested says by which library, and is left out
                activity = "waiting" if name.startswith("NEGOTIATE") else "communication"
                laps.setdefault(event["pid"], []).append(Lap(activity, begin, event["ts"] / 1e6 - shift))
    return [Lane(f"Horovod: {names.get(pid, pid)}", laps[pid]) for pid in sorted(laps)]
