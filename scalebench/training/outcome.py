"""What one run brought, in plain numbers: made by a virtual or a native engine, turned into records by the launcher."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

_GROUPS = {"forward": "compute", "backward": "compute", "update": "compute", "shuffle": "data"}


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
    """One worker's epoch; seconds are of training time, empty (None) where not measured."""

    epoch: int
    elapsed_s: float  # since training began, at the end of the epoch
    epoch_s: float
    compute_s: float | None
    comm_s: float | None
    wait_s: float | None
    data_s: float | None
    train_loss: float | None  # None: this worker trained on nothing in this epoch
    syncs: int
    bytes_sent: int
    mean_staleness: float | None = None
    max_staleness: float | None = None


@dataclass
class WorkerReport:
    """One worker's run. compute_s + comm_s + data_s + other_s = train_s where they were measured."""

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
    collective_calls: int | None = None  # of the engine, for its synchronisations
    paced_overrun: float | None = None
    peak_rss_mib: float | None = None
    peak_device_mib: float | None = None
    histograms: dict[str, dict[str, int]] = field(default_factory=dict)  # what the strategy counted, such as staleness
    laps: list[Lap] = field(default_factory=list)  # of a traced run, in order


@dataclass
class Evaluation:
    """The consensus model's metric at one moment of training."""

    epoch: int  # 0-based; the moment is the end of this epoch (or its equivalent in merges)
    elapsed_s: float
    metric: float


@dataclass
class Outcome:
    """One run, whole. `status` is completed, failed, diverged, timeout or interrupted."""

    run_id: str
    status: str
    error: str = ""
    workers: list[WorkerReport] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    eval_s: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # parameters, n_train, steps_per_epoch, device, nodes ...

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        raw = json.loads(text)
        workers = [
            WorkerReport(
                **{
                    **worker,
                    "epochs": [EpochReport(**epoch) for epoch in worker["epochs"]],
                    "laps": [Lap(*lap) for lap in worker["laps"]],
                }
            )
            for worker in raw.pop("workers")
        ]
        evaluations = [Evaluation(**evaluation) for evaluation in raw.pop("evaluations")]
        return cls(workers=workers, evaluations=evaluations, **raw)
