"""Clocks: those of processors that slow down during a run, and those of nodes that tell another time."""

from __future__ import annotations

from collections.abc import Iterator

from scalebench.analysis.diagnosis.symptom import Symptom, in_runs, run_ids, workers_of
from scalebench.analysis.loading import Results
from scalebench.formatting import seconds
from scalebench.records.schema import NOT_SLOWED, POWER_CAP
from scalebench.study.spec import SIMULATED

DROP = 0.1  # of the clock rate between begin and end of training; turbo modes stay within it once cores are warm
APART_S = 1e-3  # offset that matters: log files have milliseconds


def throttled_cores(results: Results) -> Iterator[Symptom]:
    """Nodes on which the kernel throttled cores during training, or their clock rate fell."""
    runs = results.completed
    table = workers_of(runs[~runs["execution"].isin(SIMULATED)])
    numbers = ["mhz_before", "mhz_after", "throttles"]
    table = table.assign(**{name: table[name].astype(float) for name in numbers})
    table = table.assign(rate=table["mhz_after"] / table["mhz_before"])
    for node, own in table.dropna(subset=numbers, how="all").groupby("node"):
        slowed = own[own["rate"] < 1 - DROP]
        throttled = own[own["throttles"] > 0]
        if slowed.empty and throttled.empty:
            continue
        found = own[own.index.isin(slowed.index) | own.index.isin(throttled.index)]
        measured = []
        if len(slowed):
            worst = slowed.sort_values("rate").iloc[0]
            measured.append(f"from {worst['mhz_before']:,.0f} to {worst['mhz_after']:,.0f} MHz at worst")
        if len(throttled):
            measured.append(f"a core was throttled up to {throttled['throttles'].max():.0f} times in a run")
        yield Symptom(
            "throttled cores",
            f"node {node}",
            f"{'; '.join(measured)}, {in_runs(found, own)}",
            run_ids(found),
            "steps become slower while a run lasts, by up to the ratio of the clock rates",
            "look at cooling and power limits of the node, or set a rate that it can keep (cpupower frequency-set)",
        )


def throttled_gpus(results: Results) -> Iterator[Symptom]:
    """Nodes whose GPUs lost more than a tenth of their clock rate, or were clocked down by more than a power cap.

    Under load most GPUs run at their power cap, which is no fault as long as the rate stays.
    """
    table = workers_of(results.completed).dropna(subset=["gpu_mhz_before", "gpu_mhz_after", "gpu_slowdowns"], how="all")
    rate = table["gpu_mhz_after"].astype(float) / table["gpu_mhz_before"].astype(float)
    reasons = table["gpu_slowdowns"].fillna(NOT_SLOWED).str.split("+").map(frozenset)
    table = table.assign(rate=rate, reasons=reasons, faults=reasons.map(lambda each: each - {NOT_SLOWED, POWER_CAP}))
    for node, own in table.groupby("node"):
        slowed = own[own["rate"] < 1 - DROP]
        found = own[(own["rate"] < 1 - DROP) | own["faults"].map(bool)]
        if found.empty:
            continue
        measured = []
        if len(slowed):
            worst = slowed.sort_values("rate").iloc[0]
            measured.append(f"from {worst['gpu_mhz_before']:,.0f} to {worst['gpu_mhz_after']:,.0f} MHz at worst")
        if named := sorted(frozenset().union(*found["reasons"]) - {NOT_SLOWED}):
            measured.append(f"clocked down by {', '.join(named)}")
        yield Symptom(
            "throttled GPUs",
            f"node {node}",
            f"{'; '.join(measured)}, {in_runs(found, own)}",
            run_ids(found),
            "steps become slower while a run lasts, by up to the ratio of the clock rates",
            "look at cooling and power of the node (nvidia-smi -q -d PERFORMANCE,CLOCK,POWER), or set a rate that the "
            "GPUs can keep (nvidia-smi --lock-gpu-clocks)",
        )


def clocks_apart(results: Results) -> Iterator[Symptom]:
    """Nodes whose time of day is not that of worker 0's node, beyond the error of measuring it."""
    table = workers_of(results.completed)
    table = table.assign(offset_s=table["offset_s"].astype(float), error_s=table["error_s"].astype(float))
    known = table.dropna(subset=["offset_s", "error_s"])
    for node, own in known.groupby("node"):
        found = own[own["offset_s"].abs() - own["error_s"] > APART_S]
        if found.empty:
            continue
        offset = found["offset_s"].median()
        direction = "ahead of" if offset > 0 else "behind"
        yield Symptom(
            "clock offset",
            f"node {node}",
            f"its time of day is {seconds(abs(offset))} {direction} that of worker 0's node, to within "
            f"{seconds(found['error_s'].max())}, {in_runs(found, own)}",
            run_ids(found),
            "log files of these nodes cannot be put in order by their times; durations, and traces, are right",
            "start a time service on the node (chronyd), and see that it is synchronised (chronyc tracking)",
        )
