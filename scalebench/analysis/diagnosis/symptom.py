"""One symptom of a fault, and what rows hold of each worker."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pandas as pd

from scalebench.formatting import counted

NATIVE = "native"  # the execution in which nothing is stated: a slow worker is slow
# Name in the table of workers -> column of the rows.
_LISTS = {
    "node": "worker_nodes",
    "cores": "worker_cores",
    "step_s": "worker_step_s",
    "mhz_before": "worker_mhz_before",
    "mhz_after": "worker_mhz_after",
    "throttles": "worker_throttles",
    "gpu_mhz_before": "worker_gpu_mhz_before",
    "gpu_mhz_after": "worker_gpu_mhz_after",
    "gpu_slowdowns": "worker_gpu_slowdowns",
    "offset_s": "worker_clock_offset_s",
    "error_s": "worker_clock_error_s",
}


@dataclass(frozen=True)
class Symptom:
    """`what` is wrong `where`, as `measured` in the runs `rows`; its consequence for their times, and what ends it."""

    what: str
    where: str
    measured: str
    rows: tuple[str, ...]
    consequence: str
    remedy: str


def workers_of(runs: pd.DataFrame) -> pd.DataFrame:
    """One row for each worker of each of `runs`: `run_id`, `worker`, and the lists of the rows under short names.

    A value that was not measured is None or NaN.
    """
    rows = []
    for run in runs[["run_id", "workers", *_LISTS.values()]].to_dict("records"):
        unknown = [None] * int(run["workers"])
        lists = [unknown if pd.isna(run[column]) else json.loads(run[column]) for column in _LISTS.values()]
        rows += [(run["run_id"], worker, *own) for worker, own in enumerate(zip(*lists, strict=True))]
    return pd.DataFrame(rows, columns=["run_id", "worker", *_LISTS])


def in_runs(found: pd.DataFrame, looked_at: pd.DataFrame) -> str:
    """Return in how many of the runs that were looked at something was found: `in 3 of 4 runs`."""
    return f"in {found['run_id'].nunique()} of {counted(looked_at['run_id'].nunique(), 'run')}"


def run_ids(found: pd.DataFrame) -> tuple[str, ...]:
    """Return the names of the runs in `found`, each once, in their order."""
    return tuple(found["run_id"].unique())
