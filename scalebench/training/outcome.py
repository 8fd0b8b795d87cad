"""The outcome of one run in plain numbers: made by a virtual or native engine, turned into records by the launcher.

`Meters` make the reports of a worker's epochs, from its clock and communicator. The
timeline of a run has the activities of each worker, in order; Horovod writes one of its
own where HOROVOD_TIMELINE names a file, whose tensors become further lanes.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import TypeAdapter

from scalebench.errors import DivergedError, ResultsError
from scalebench.study.choices import RESULTS_OF_A_TRIAL
from scalebench.system.clock import Clock, Ledger
from scalebench.system.file_access import LARGE, read_text

if TYPE_CHECKING:
    from scalebench.comm.base import Communicator
    from scalebench.data.batch_plan import BatchPlan
    from scalebench.data.dataset import Dataset
    from scalebench.study.spec import Run

_GROUPS = {
    "forward": "compute",
    "backward": "compute",
    "update": "compute",
    "shuffle": "data",
}


class Lap(NamedTuple):
    """One activity of a worker, in seconds since training began."""

    activity: str  # a clock.Task in lower case, `communication`, `waiting` or `serving`
    begin_s: float
    end_s: float

    @property
    def group(self) -> str:
        """`compute`, `communication`, `waiting`, `data`, `other` or `serving`: the activity's column of the records."""
        return _GROUPS.get(self.activity, self.activity)


@dataclass
class EpochReport:
    """One epoch of one worker; seconds are training time, None if not measured."""

    epoch: int
    elapsed_s: float  # since training began, at the end of the epoch
    epoch_s: float
    compute_s: float | None
    comm_s: float | None
    wait_s: float | None
    data_s: float | None
    train_loss: float | None  # None if this worker trained on no batch in this epoch
    syncs: int
    bytes_sent: int
    mean_staleness: float | None = None
    max_staleness: float | None = None


@dataclass
class WorkerReport:
    """One run of one worker. compute_s + comm_s + data_s + other_s = train_s if measured."""

    rank: int
    train_s: float
    compute_s: float | None
    comm_s: float | None
    wait_s: float | None
    data_s: float | None
    other_s: float | None
    optimizer_steps: int
    syncs: int
    bytes_sent: int
    epochs: list[EpochReport]
    samples: int = 0  # of its shard
    hidden_comm_s: float | None = None  # of a simulated run
    bubble_s: float | None = None  # waiting for other stages of the replica
    collective_calls: int | None = None  # of the engine, for its synchronisations
    paced_overrun: float | None = None
    peak_rss_mib: float | None = None
    peak_device_mib: float | None = None
    node: str | None = None  # of a real run: its host hash
    cores: str | None = None  # that the process may use, as `0-3,8`
    # clock rate of these cores before training, after the warm-up
    mhz_before: float | None = None
    mhz_after: float | None = None
    throttles: int | None = None  # of the most throttled of them, during training
    # clock rate of its GPU before training, after the warm-up
    gpu_mhz_before: int | None = None
    gpu_mhz_after: int | None = None
    # reasons for which its GPU was clocked down during training, or `none`
    gpu_slowdowns: str | None = None
    # of its node's time of day against that of worker 0, on several nodes
    clock_offset_s: float | None = None
    clock_error_s: float | None = None  # most that the offset can be wrong
    # counts by the strategy, such as staleness
    histograms: dict[str, dict[str, int]] = field(default_factory=dict)
    laps: list[Lap] = field(default_factory=list)  # of a traced run, in order


@dataclass
class Evaluation:
    """Metric of the consensus model at one moment of training."""

    # 0-based; the moment is the end of this epoch, or its equivalent in merges
    epoch: int
    elapsed_s: float
    metric: float
    # of training samples, as many as are held out; after the last epoch
    train_metric: float | None = None


@dataclass(frozen=True)
class RunFacts:
    """Facts of a whole run beside its times and metrics; None where unknown, as after a failure."""

    parameters: int | None = None
    n_train: int | None = None
    n_test: int | None = None
    metric_name: str | None = None
    chance_metric: float | None = None
    dataset_sha256: str | None = None
    steps_per_epoch: int | None = None
    batch_per_worker: int | None = None
    nodes: int | None = None
    workers_per_node: int | None = None
    device: str | None = None
    gpus: int | None = None  # that the workers held, one each; None without
    launcher: str | None = None
    blocks_retrained: int | None = None  # of tasks, as a process died
    # of tasks whose processes have such a threshold
    malloc_trim_bytes: int | None = None
    binding: str | None = None
    # a paced run: too many of its steps were slower than the pace
    oversubscribed: bool | None = None
    reference_step_s: float | None = None  # the speed of the machine beside the run
    others_load: float | None = None  # share of the cores that other programs took
    arithmetic: str | None = None  # of a virtual run: per_replica, batched or one_batch
    why_single: str = ""  # each virtual worker computes its own gradients
    # of a virtual run: quiet, or disturbed by other programs
    calibration: str | None = None
    energy_j: float | None = None
    energy_source: str | None = None
    # of a virtual run whose steps all take equally long
    train_s_no_jitter: float | None = None
    # description of each node, by host hash; None: this one alone
    machines: dict[str, dict[str, Any]] | None = None
    began_unix_s: float | None = None  # of a traced native run
    # of a traced virtual run; `server_laps` has one list for all of them
    servers: int | None = None
    server_laps: list[list[Lap]] = field(default_factory=list)  # of a traced run

    @classmethod
    def of(cls, dataset: Dataset, plan: BatchPlan, **others: Any) -> RunFacts:
        """The facts of the data, of their division among the workers, and `others`."""
        return cls(
            n_train=dataset.n_train,
            n_test=dataset.n_test,
            metric_name=dataset.metric_name,
            chance_metric=dataset.chance_metric,
            dataset_sha256=dataset.sha256,
            steps_per_epoch=plan.steps(0),
            batch_per_worker=plan.batch_size,
            **others,
        )


@dataclass
class Outcome:
    """Outcome of one run. `status` is completed, failed, diverged, timeout or interrupted."""

    run_id: str
    status: str
    error: str = ""
    workers: list[WorkerReport] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    eval_s: float | None = None
    facts: RunFacts = field(default_factory=RunFacts)

    def failed(self, run: Run) -> bool:
        """Return True unless `run` has its result; that of a trial can be that it diverged or took too long."""
        return self.status not in (
            ("completed",) if run.trial is None else RESULTS_OF_A_TRIAL
        )

    @property
    def train_s(self) -> float:
        """Seconds until the last worker has finished."""
        return max(report.train_s for report in self.workers)

    def add_facts(self, **facts: Any) -> None:
        """Set these fields of `facts`."""
        self.facts = replace(self.facts, **facts)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        return TypeAdapter(cls).validate_python(json.loads(text))


class Meters:
    """Reports of successive epochs; each has the differences to the previous one."""

    def __init__(self, rank: int, clock: Clock, comm: Communicator) -> None:
        self._rank = rank
        self._clock = clock
        self._comm = comm
        self.open()

    def open(self) -> None:
        """Reset all counts."""
        self.epochs: list[EpochReport] = []
        self._ledger = Ledger()
        self._counted = (0, 0)
        self._elapsed = 0.0
        self.histograms: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._stale: list[int] = []

    def observe(self, name: str, value: int) -> None:
        """Count `value` in the histogram `name`; `staleness` is also summarised for each epoch."""
        self.histograms[name][value] += 1
        if name == "staleness":
            self._stale.append(value)

    def close_epoch(
        self,
        epoch: int,
        elapsed_s: float,
        train_loss: float | None,
        *,
        poisoned_everywhere: bool = False,
    ) -> None:
        """Add the report of `epoch`, which ended after `elapsed_s` seconds of training.

        Raises:
            DivergedError: the loss is not finite, or the weights of all workers are not (`poisoned_everywhere`).
        """
        # Clocks and communicators only count up: an epoch is the difference of two
        # looks at them.
        ledger, before = self._clock.ledger.copy(), self._ledger
        counted = (self._comm.collectives, self._comm.bytes_sent)
        self.epochs.append(
            EpochReport(
                epoch=epoch,
                elapsed_s=elapsed_s,
                epoch_s=elapsed_s - self._elapsed,
                compute_s=ledger.compute_s - before.compute_s,
                comm_s=ledger.comm_s - before.comm_s,
                wait_s=ledger.wait - before.wait,
                data_s=ledger.data_s - before.data_s,
                train_loss=train_loss,
                syncs=counted[0] - self._counted[0],
                bytes_sent=counted[1] - self._counted[1],
                mean_staleness=sum(self._stale) / len(self._stale)
                if self._stale
                else None,
                max_staleness=max(self._stale, default=None),
            )
        )
        self._stale.clear()
        self._ledger = ledger
        self._counted = counted
        self._elapsed = elapsed_s
        if train_loss is not None and not math.isfinite(train_loss):
            message = f"worker {self._rank}: the training loss is {train_loss} in epoch {epoch + 1}"
            raise DivergedError(message, everywhere=poisoned_everywhere)
        if poisoned_everywhere:
            raise DivergedError(
                f"the weights are not finite after epoch {epoch + 1}", everywhere=True
            )


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
        Lane(
            f"worker {worker.rank}",
            worker.laps,
            _epoch_ends(worker.laps, [e.elapsed_s for e in worker.epochs], run),
        )
        for worker in outcome.workers
    ]
    lanes += _server_lanes(outcome)
    title = f"{run.strategy} at {run.workers} worker{'s' if run.workers > 1 else ''}"
    return Timeline(
        title, run.execution, _about(run, outcome, cluster or run.cluster), lanes
    )


def _server_lanes(outcome: Outcome) -> list[Lane]:
    """A lane for each server; one for all virtual servers, which work side by side."""
    found = outcome.facts.server_laps
    shards = outcome.facts.servers or len(found)
    if len(found) == 1:
        return [
            Lane("server" if shards == 1 else f"each of {shards} servers", found[0])
        ]
    return [Lane(f"server {place}", laps) for place, laps in enumerate(found)]


def _about(run: Run, outcome: Outcome, cluster: str) -> str:
    where = (
        f"{run.execution}, on {cluster}"
        if run.is_virtual
        else f"{run.execution}, {run.engine} on this machine"
    )
    steps = outcome.facts.steps_per_epoch or 0
    epochs = f"{run.epochs} epoch{'s' if run.epochs > 1 else ''} of {steps} step{'s' if steps > 1 else ''}"
    uneven = [] if run.execution == "native" else run.virtual.describe(run.workers)
    crowded = ""
    # of paced runs: more than 1 % of their steps were slower than the pace
    if outcome.facts.oversubscribed:
        paced = run.execution == "paced"
        crowded = (
            "; its steps took longer than paced"
            if paced
            else "; oversubscribed: more processes than cores"
        )
    return f"{where}{crowded}; {', '.join([f'{run.model} on {run.dataset}', epochs, *uneven])}"


def _epoch_ends(laps: Sequence[Lap], elapsed: list[float], run: Run) -> list[float]:
    """Convert training times into times of the timeline, which includes the pauses between laps."""
    if run.is_virtual or not laps:
        return elapsed
    ends: list[float] = []
    spent = 0.0
    for lap in laps:
        spent += lap.end_s - lap.begin_s
        # The same seconds were added up in another order: they may differ in the last
        # digits.
        while len(ends) < len(elapsed) and spent >= elapsed[len(ends)] - 1e-6:
            ends.append(lap.end_s)
    return ends


def read_horovod(path: Path, began_unix_s: float | None = None) -> list[Lane]:
    """Read Horovod's timeline as lanes, one per tensor: negotiation (waiting for all ranks), then the operation.

    Rank 0 writes microseconds since a start that the file names. With `began_unix_s`
    lanes count from that Unix time, without the events before it. The incomplete file
    of a killed run is read too.

    Raises:
        ResultsError: the file cannot be read or is not a timeline.
    """
    try:
        # Horovod closes the list only at its end: that of a killed run is closed here.
        text = read_text(path, LARGE).rstrip().rstrip(",")
        events = json.loads(
            f"{text}]" if text.startswith("[") and not text.endswith("]") else text
        )
        if not isinstance(events, list) or not events:
            raise ValueError("it holds no list of events")
        names = {}
        for event in events:
            # metadata, that name a lane
            if event["ph"] == "M" and "name" in event.get("args", {}):
                names[event["pid"]] = event["args"]["name"]
        first: dict[str, Any] = next(
            (event["args"] for event in events if "args" in event), {}
        )
        origin = first.get("start_time_since_epoch_in_micros")
        return _lanes(events, names, origin, began_unix_s)
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ResultsError(
            f"{path} is no timeline of Horovod ({error}); expected the file of HOROVOD_TIMELINE"
        ) from None


def _lanes(
    events: list[dict[str, Any]],
    names: dict[int, str],
    origin: float | None,
    began_unix_s: float | None,
) -> list[Lane]:
    shift = (
        began_unix_s - origin / 1e6
        if began_unix_s is not None and origin is not None
        else 0.0
    )
    laps: dict[int, list[Lap]] = {}
    opened: dict[int, list[tuple[str, float]]] = {}
    for event in events:
        stack = opened.setdefault(event["pid"], [])
        if event["ph"] == "B":
            stack.append((event["name"], event["ts"] / 1e6 - shift))
        elif event["ph"] == "E" and stack:
            name, begin = stack.pop()
            # nested events name the library, and are left out
            if not stack and begin >= 0:
                activity = (
                    "waiting" if name.startswith("NEGOTIATE") else "communication"
                )
                laps.setdefault(event["pid"], []).append(
                    Lap(activity, begin, event["ts"] / 1e6 - shift)
                )
    return [Lane(f"Horovod: {names.get(pid, pid)}", laps[pid]) for pid in sorted(laps)]
