"""Faults of machine and set-up that a study's rows show: slow workers and nodes, clocks, cores, the network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalebench.analysis.environment import charged_engine, supposed
from scalebench.analysis.loading import Results, cells_in, is_representative
from scalebench.comm import engines
from scalebench.formatting import counted, listed, seconds, share
from scalebench.records.schema import NOT_SLOWED, POWER_CAP
from scalebench.strategies.registry import preferred_engine
from scalebench.study.cell import columns_without, in_words
from scalebench.study.spec import SIMULATED
from scalebench.system.disturbance import SHARE
from scalebench.system.hardware import core_list, cores_in

_NATIVE = "native"  # the execution in which nothing is stated: a slow worker is slow
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

# ratio of step times; a tenth is also what `check` warns of as the spread of
# repetitions
_SLOW_STEPS = 1.1
# share of its runs in which a place has to be slow: a single delay is none of the place
_OFTEN = 0.75
_WAITED_FOR = "strategies in lockstep wait for it at every synchronisation; asynchronous ones merge older steps of it"

# of the clock rate between begin and end of training; turbo modes stay within it once
# cores are warm
_DROP = 0.1
_APART_S = 1e-3  # offset that matters: log files have milliseconds

_SHOWN = 3  # placements in a sentence
_UNBOUND = "none"  # in the column `binding`

# ratio of transfers; virtual times are within some tenths of native ones
# (docs/measurements.md)
_SLOW_TRANSFERS = 1.5
_NOTICED = 0.05  # share of the training time that the difference has to take
# what native cells and their virtual counterparts share
_ALIKE = [*columns_without("execution", "engine"), "cluster"]


@dataclass(frozen=True)
class Symptom:
    """`what` is wrong `where`, as `measured` in the runs `rows`; its consequence for their times, and what ends it."""

    what: str
    where: str
    measured: str
    rows: tuple[str, ...]
    consequence: str
    remedy: str


def _workers_of(runs: pd.DataFrame) -> pd.DataFrame:
    """One row for each worker of each of `runs`: `run_id`, `worker`, and the lists of the rows under short names.

    A value that was not measured is None or NaN.
    """
    rows = []
    for run in runs[["run_id", "workers", *_LISTS.values()]].to_dict("records"):
        unknown = [None] * int(run["workers"])
        lists = []
        for column in _LISTS.values():
            measured = not pd.isna(run[column])
            # A row has one list for all its workers, as it has the same columns at any
            # number of them.
            lists.append(json.loads(run[column]) if measured else unknown)
        rows += [
            (run["run_id"], worker, *own)
            for worker, own in enumerate(zip(*lists, strict=True))
        ]
    return pd.DataFrame(rows, columns=["run_id", "worker", *_LISTS])


def _in_runs(found: pd.DataFrame, looked_at: pd.DataFrame) -> str:
    """Return in how many of the runs that were looked at something was found: `in 3 of 4 runs`."""
    return f"in {found['run_id'].nunique()} of {counted(looked_at['run_id'].nunique(), 'run')}"


def _run_ids(found: pd.DataFrame) -> tuple[str, ...]:
    """Return the names of the runs in `found`, each once, in their order."""
    return tuple(found["run_id"].unique())


def slow_workers(results: Results) -> Iterator[Symptom]:
    """Workers that take longer for a step than the others on their node, by place: worker, node and cores."""
    table = _steps(results.completed)
    # Within a node: nodes may differ, which is a symptom of its own.
    beside = table.groupby(["run_id", "node"])["step_s"]
    table = table.assign(ratio=beside.transform(_over_others))
    busy = results.completed.set_index("run_id")["others_load"]
    for (worker, node, cores), own in table.dropna(subset="ratio").groupby(
        ["worker", "node", "cores"]
    ):
        if not _is_slow(own["ratio"]):
            continue
        slow = own[own["ratio"] > _SLOW_STEPS]
        load = busy[slow["run_id"]].median()
        beside_programs = (
            f", while other programs took {share(load)} of the cores"
            if load > SHARE
            else ""
        )
        yield Symptom(
            "slow worker",
            f"worker {worker} (cores {cores} of node {node})",
            f"its step takes {own['ratio'].median():.2f} times that of the node's others, {_in_runs(slow, own)}"
            f"{beside_programs}",
            _run_ids(slow),
            _WAITED_FOR,
            "end other programs on its cores, or bind it to others; where there are none, have these cores examined",
        )


def slow_nodes(results: Results) -> Iterator[Symptom]:
    """Nodes of which even the fastest worker takes longer for a step than the fastest of the other nodes."""
    steps = (
        _steps(results.completed)
        .groupby(["run_id", "node"], as_index=False)["step_s"]
        # The fastest worker: a single slow one is no fault of the node.
        .min()
    )
    steps = steps.assign(
        ratio=steps.groupby("run_id")["step_s"].transform(_over_others)
    )
    for node, own in steps.dropna(subset="ratio").groupby("node"):
        if not _is_slow(own["ratio"]):
            continue
        slow = own[own["ratio"] > _SLOW_STEPS]
        yield Symptom(
            "slow node",
            f"node {node}",
            f"steps on it take {own['ratio'].median():.2f} times those on the other nodes, {_in_runs(slow, own)}",
            _run_ids(slow),
            _WAITED_FOR,
            "leave it out (srun --exclude), and have its memory, cooling and clock rates compared with another's",
        )


def _steps(runs: pd.DataFrame) -> pd.DataFrame:
    """Workers with a measured step in native runs in which all have equal work, and cores of their own."""
    # Stages and shares of a model differ in their work.
    whole_models = runs["data_parallel"].fillna(runs["workers"]) == runs["workers"]
    fair = (
        (runs["execution"] == _NATIVE)
        & ~runs["oversubscribed"].astype(bool)
        & whole_models
    )
    table = _workers_of(runs[fair])
    return table.assign(step_s=table["step_s"].astype(float)).dropna(
        subset=["step_s", "node", "cores"]
    )


def _over_others(steps: pd.Series[float]) -> NDArray[np.float64]:
    """Return each step time over the median of the others; NaN where there are none."""
    values = steps.to_numpy(dtype=np.float64)
    # Alone on its node there is nobody to compare with.
    if len(values) < 2:
        return np.full(len(values), np.nan)
    return np.array(
        # Without its own: of two workers the slow one would hide in the median.
        [own / np.median(np.delete(values, place)) for place, own in enumerate(values)]
    )


def _is_slow(ratios: pd.Series[float]) -> bool:
    return bool((ratios > _SLOW_STEPS).mean() >= _OFTEN)


def throttled_cores(results: Results) -> Iterator[Symptom]:
    """Nodes on which the kernel throttled cores during training, or their clock rate fell."""
    runs = results.completed
    table = _workers_of(runs[~runs["execution"].isin(SIMULATED)])
    numbers = ["mhz_before", "mhz_after", "throttles"]
    table = table.assign(**{name: table[name].astype(float) for name in numbers})
    table = table.assign(rate=table["mhz_after"] / table["mhz_before"])
    for node, own in table.dropna(subset=numbers, how="all").groupby("node"):
        slowed = own[own["rate"] < 1 - _DROP]
        throttled = own[own["throttles"] > 0]
        if slowed.empty and throttled.empty:
            continue
        found = own[own.index.isin(slowed.index) | own.index.isin(throttled.index)]
        measured = []
        if len(slowed):
            worst = slowed.sort_values("rate").iloc[0]
            measured.append(
                f"from {worst['mhz_before']:,.0f} to {worst['mhz_after']:,.0f} MHz at worst"
            )
        if len(throttled):
            measured.append(
                f"a core was throttled up to {throttled['throttles'].max():.0f} times in a run"
            )
        yield Symptom(
            "throttled cores",
            f"node {node}",
            f"{'; '.join(measured)}, {_in_runs(found, own)}",
            _run_ids(found),
            "steps become slower while a run lasts, by up to the ratio of the clock rates",
            "look at cooling and power limits of the node, or set a rate that it can keep (cpupower frequency-set)",
        )


def throttled_gpus(results: Results) -> Iterator[Symptom]:
    """Nodes whose GPUs lost more than a tenth of their clock rate, or were clocked down by more than a power cap.

    Under load most GPUs run at their power cap, which is no fault as long as the rate
    stays.
    """
    table = _workers_of(results.completed).dropna(
        subset=["gpu_mhz_before", "gpu_mhz_after", "gpu_slowdowns"], how="all"
    )
    rate = table["gpu_mhz_after"].astype(float) / table["gpu_mhz_before"].astype(float)
    reasons = table["gpu_slowdowns"].fillna(NOT_SLOWED).str.split("+").map(frozenset)
    table = table.assign(
        rate=rate,
        reasons=reasons,
        faults=reasons.map(lambda each: each - {NOT_SLOWED, POWER_CAP}),
    )
    for node, own in table.groupby("node"):
        slowed = own[own["rate"] < 1 - _DROP]
        found = own[(own["rate"] < 1 - _DROP) | own["faults"].map(bool)]
        if found.empty:
            continue
        measured = []
        if len(slowed):
            worst = slowed.sort_values("rate").iloc[0]
            measured.append(
                f"from {worst['gpu_mhz_before']:,.0f} to {worst['gpu_mhz_after']:,.0f} MHz at worst"
            )
        if named := sorted(frozenset().union(*found["reasons"]) - {NOT_SLOWED}):
            measured.append(f"clocked down by {', '.join(named)}")
        yield Symptom(
            "throttled GPUs",
            f"node {node}",
            f"{'; '.join(measured)}, {_in_runs(found, own)}",
            _run_ids(found),
            "steps become slower while a run lasts, by up to the ratio of the clock rates",
            "look at cooling and power of the node (nvidia-smi -q -d PERFORMANCE,CLOCK,POWER), or set a rate that the "
            "GPUs can keep (nvidia-smi --lock-gpu-clocks)",
        )


def clocks_apart(results: Results) -> Iterator[Symptom]:
    """Nodes whose time of day is not that of worker 0's node, beyond the error of measuring it."""
    table = _workers_of(results.completed)
    table = table.assign(
        offset_s=table["offset_s"].astype(float), error_s=table["error_s"].astype(float)
    )
    known = table.dropna(subset=["offset_s", "error_s"])
    for node, own in known.groupby("node"):
        # Certainly apart, by the least that the measurement allows.
        found = own[own["offset_s"].abs() - own["error_s"] > _APART_S]
        if found.empty:
            continue
        offset = found["offset_s"].median()
        direction = "ahead of" if offset > 0 else "behind"
        yield Symptom(
            "clock offset",
            f"node {node}",
            f"its time of day is {seconds(abs(offset))} {direction} that of worker 0's node, to within "
            f"{seconds(found['error_s'].max())}, {_in_runs(found, own)}",
            _run_ids(found),
            "log files of these nodes cannot be put in order by their times; durations, and traces, are right",
            "start a time service on the node (chronyd), and see that it is synchronised (chronyc tracking)",
        )


def oversubscribed_cores(results: Results) -> Iterator[Symptom]:
    """Native runs with more workers times threads than cores."""
    runs = results.completed
    crowded = runs[(runs["execution"] == _NATIVE) & runs["oversubscribed"].astype(bool)]
    if len(crowded):
        yield Symptom(
            "oversubscription",
            in_words(cells_in(crowded)),
            _placements(crowded),
            _run_ids(crowded),
            "workers, the threads that move their bytes and servers take turns on the cores: times are those of fewer "
            "cores, and no baseline of others",
            "at most as many of these as cores (--workers), more nodes, or virtual runs of the larger counts",
        )


def busy_cores(results: Results) -> Iterator[Symptom]:
    """Native runs beside which other programs took so much of the cores that they are no baseline."""
    runs = results.completed
    beside = runs[(runs["execution"] == _NATIVE) & runs["disturbed"].astype(bool)]
    if len(beside):
        ends = dict.fromkeys(
            map(share, (beside["others_load"].min(), beside["others_load"].max()))
        )
        taken = " to ".join(ends).replace(" %", "", len(ends) - 1)
        yield Symptom(
            "busy cores",
            in_words(cells_in(beside)),
            f"other programs took {taken} of the cores of the busiest node",
            _run_ids(beside),
            "times are those of a part of the machine, vary from run to run, and are no baseline of others",
            "end the other programs, or ask the scheduler for whole nodes (--exclusive), and make these runs anew with "
            "run --new",
        )


def unbound_workers(results: Results) -> Iterator[Symptom]:
    """Native runs of several workers on a node that were not bound to cores, although there are enough."""
    runs = results.completed
    native = (
        (runs["execution"] == _NATIVE)
        # Only ranks are bound by a launcher.
        & runs["engine"].map(_has_ranks).astype(bool)
        & ~runs["oversubscribed"].astype(bool)
    )
    unbound = runs[
        native & (runs["workers_per_node"] > 1) & (runs["binding"] == _UNBOUND)
    ]
    if len(unbound):
        yield Symptom(
            "missing binding",
            in_words(cells_in(unbound)),
            _placements(unbound),
            _run_ids(unbound),
            "the kernel moves workers between cores, away from their caches, and may put two on one: times vary more",
            "run counts that need more than all cores, which keep a launch from binding, as a study of their own; or "
            "start with mpirun or srun, which bind (--launcher)",
        )


def _has_ranks(engine: object) -> bool:
    return engines.named(str(engine)).has_ranks


def _placements(runs: pd.DataFrame) -> str:
    """Return `4 workers on 2 cores (0-1)` for each placement of the workers of `runs` on the fullest node."""
    found = []
    for _, own in _workers_of(runs).groupby("run_id", sort=False):
        node = own["node"].mode()
        on_it = own[own["node"] == node.iloc[0]] if len(node) else own
        cores = frozenset[int]().union(*map(cores_in, on_it["cores"].dropna()))
        on = f" on {counted(len(cores), 'core')} ({core_list(cores)})" if cores else ""
        found.append(f"{counted(len(on_it), 'worker')}{on}")
    return listed(dict.fromkeys(found), _SHOWN)


def slow_network(results: Results) -> Iterator[Symptom]:
    """Native cells whose communication takes longer than that of the virtual runs, which the calibration prices.

    Transfers alone are compared, without waiting for other workers, where that was
    measured: on one node.
    """
    runs = results.completed
    if supposed(results):
        return
    runs = runs[(runs["workers"] > 1) & is_representative(runs)]
    charged = charged_engine(results)
    engines = runs["strategy"].map(lambda name: charged or preferred_engine(str(name)))
    native = runs[(runs["execution"] == _NATIVE) & (runs["engine"] == engines)]
    cells = _medians(native, [*_ALIKE, "engine"])
    priced = _medians(runs[runs["execution"] == "virtual"], _ALIKE)
    cells = cells.merge(priced, on=_ALIKE, suffixes=("", "_priced"))
    cells["apart"] = apart = (
        cells["transfer_s"].notna() & cells["transfer_s_priced"].notna()
    )
    # Waiting is a matter of the workers, not of the network; engines that do not
    # measure it have only the sum.
    cells["took_s"] = cells["transfer_s"].where(apart, cells["comm_s"])
    cells["priced_s"] = cells["transfer_s_priced"].where(apart, cells["comm_s_priced"])
    cells["more"] = (cells["took_s"] - cells["priced_s"]) / cells["train_s"]
    slow = cells[
        (cells["took_s"] > _SLOW_TRANSFERS * cells["priced_s"])
        & (cells["more"] > _NOTICED)
    ]
    for engine, own in slow.groupby("engine"):
        rows = native[native["engine"] == engine].merge(own[_ALIKE], on=_ALIKE)
        worst = own.sort_values("more").iloc[-1]
        what = (
            "transfers" if worst["apart"] else "communication, with waiting for others,"
        )
        yield Symptom(
            "slow network",
            in_words(cells_in(rows)),
            f"{what} of {worst['label']} at {counted(worst['workers'], 'worker')} took {seconds(worst['took_s'])}, and "
            f"{seconds(worst['priced_s'])} by the calibration: {share(worst['more'])} of its time",
            _run_ids(rows),
            "virtual times and predictions of these strategies are too short by as much",
            "measure the costs of the engine again (scalebench recalibrate); where they stay, look for other traffic, "
            "a slower network card or a wrong interface (scalebench doctor)",
        )


def _medians(runs: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Medians of training time, communication, and transfers (communication without waiting) of each cell."""
    transfer = runs["comm_s"].astype(float) - runs["wait_s"].astype(float)
    table = runs.assign(transfer_s=transfer)
    return table.groupby(by, as_index=False)[
        ["train_s", "comm_s", "transfer_s"]
    ].median()


LOOKS = (
    slow_nodes,
    slow_workers,
    throttled_cores,
    throttled_gpus,
    oversubscribed_cores,
    busy_cores,
    unbound_workers,
    slow_network,
    clocks_apart,
)


def diagnose(results: Results) -> list[Symptom]:
    """Return the symptoms in the completed runs of `results`."""
    return [found for look in LOOKS for found in look(results)]
