"""Workers and nodes whose steps take longer than those of others in the same run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalebench.analysis.diagnosis.symptom import NATIVE, Symptom, in_runs, run_ids, workers_of
from scalebench.analysis.loading import Results
from scalebench.formatting import share
from scalebench.system.background_load import SHARE

SLOWER = 1.1  # ratio of step times; a tenth is also what `check` warns of as the spread of repetitions
OFTEN = 0.75  # share of its runs in which a place has to be slow: a single delay is none of the place
_WAITED_FOR = "strategies in lockstep wait for it at every synchronisation; asynchronous ones merge older steps of it"


def slow_workers(results: Results) -> Iterator[Symptom]:
    """Workers that take longer for a step than the others on their node, by place: worker, node and cores."""
    table = _steps(results.completed)
    beside = table.groupby(["run_id", "node"])["step_s"]
    table = table.assign(ratio=beside.transform(_over_others))
    busy = results.completed.set_index("run_id")["others_load"]
    for (worker, node, cores), own in table.dropna(subset="ratio").groupby(["worker", "node", "cores"]):
        if not _is_slow(own["ratio"]):
            continue
        slow = own[own["ratio"] > SLOWER]
        load = busy[slow["run_id"]].median()
        beside_programs = f", while other programs took {share(load)} of the cores" if load > SHARE else ""
        yield Symptom(
            "slow worker",
            f"worker {worker} (cores {cores} of node {node})",
            f"its step takes {own['ratio'].median():.2f} times that of the node's others, {in_runs(slow, own)}"
            f"{beside_programs}",
            run_ids(slow),
            _WAITED_FOR,
            "end other programs on its cores, or bind it to others; where there are none, have these cores examined",
        )


def slow_nodes(results: Results) -> Iterator[Symptom]:
    """Nodes of which even the fastest worker takes longer for a step than the fastest of the other nodes."""
    steps = _steps(results.completed).groupby(["run_id", "node"], as_index=False)["step_s"].min()
    steps = steps.assign(ratio=steps.groupby("run_id")["step_s"].transform(_over_others))
    for node, own in steps.dropna(subset="ratio").groupby("node"):
        if not _is_slow(own["ratio"]):
            continue
        slow = own[own["ratio"] > SLOWER]
        yield Symptom(
            "slow node",
            f"node {node}",
            f"steps on it take {own['ratio'].median():.2f} times those on the other nodes, {in_runs(slow, own)}",
            run_ids(slow),
            _WAITED_FOR,
            "leave it out (srun --exclude), and have its memory, cooling and clock rates compared with another's",
        )


def _steps(runs: pd.DataFrame) -> pd.DataFrame:
    """Workers with a measured step in native runs in which all have equal work, and cores of their own."""
    whole_models = runs["data_parallel"].fillna(runs["workers"]) == runs["workers"]
    fair = (runs["execution"] == NATIVE) & ~runs["oversubscribed"].astype(bool) & whole_models
    table = workers_of(runs[fair])
    return table.assign(step_s=table["step_s"].astype(float)).dropna(subset=["step_s", "node", "cores"])


def _over_others(steps: pd.Series[float]) -> NDArray[np.float64]:
    """Return each step time over the median of the others; NaN where there are none."""
    values = steps.to_numpy(dtype=np.float64)
    if len(values) < 2:
        return np.full(len(values), np.nan)
    return np.array([own / np.median(np.delete(values, place)) for place, own in enumerate(values)])


def _is_slow(ratios: pd.Series[float]) -> bool:
    return bool((ratios > SLOWER).mean() >= OFTEN)
