"""What a machine of few cores leaves of the engines that need more, in sentences of the answer."""

from __future__ import annotations

import pandas as pd

from scalebench.analysis import Results, cells
from scalebench.analysis.loading import is_representative
from scalebench.analysis.rounds import MEASURED
from scalebench.formatting import counted, listed, seconds
from scalebench.study.cell import EXECUTIONS
from scalebench.study.choices import HOROVOD, LIBRARY_BASELINES

_COMPARED = (HOROVOD, "allreduce")
_CYCLE_S = 1e-3  # of Horovod's thread, unless the option cycle_time_ms sets another


def crowded_engines(results: Results) -> str:
    """Return what is left of Horovod and DDP where all their measured runs of several workers are oversubscribed.

    With the reason for the length of Horovod's steps where they take a cycle and those of allreduce do not; empty where
    neither is so.
    """
    if results.completed.empty:
        return ""
    return " ".join([*_oversubscribed(results), *_cycle(cells(results), results)])


def _oversubscribed(results: Results) -> list[str]:
    table = cells(results)
    own = table[table["strategy"].isin(LIBRARY_BASELINES) & table["execution"].isin(MEASURED)]
    own = own[own["workers"] > 1]
    names = [str(name) for name, cells_of in own.groupby("strategy", sort=False) if cells_of["oversubscribed"].all()]
    if not names:
        return []
    workers = listed(sorted({int(count) for count in own.loc[own["strategy"].isin(names), "workers"]}))
    virtual = bool((results.completed["execution"] == "virtual").any())
    left = "their times at several workers are virtual ones alone" if virtual else "nothing is compared with them"
    wanting = f"{' and '.join(names)} {'want' if len(names) > 1 else 'wants'}"
    return [
        f"At {workers} workers {wanting} more cores than this machine has (×): these native times are no baseline, and "
        f"{left}."
    ]


def _cycle(table: pd.DataFrame, results: Results) -> list[str]:
    """Compare a step of plain Horovod with one of allreduce, at the smallest worker count that both have."""
    table = table[is_representative(table) & (table["workers"] > 1) & table["label"].isin(_COMPARED)]
    if table.empty:
        return []
    table = table.assign(step_s=table["train_s"] / table["steps_per_epoch"] / float(results.completed["epochs"].max()))
    for execution in EXECUTIONS:
        own = table[table["execution"] == execution].drop_duplicates(["label", "workers"])
        steps = own.pivot(index="workers", columns="label", values="step_s").astype(float)
        steps = steps.reindex(columns=list(_COMPARED)).dropna()
        steps = steps[(steps[HOROVOD] >= _CYCLE_S) & (steps["allreduce"] < _CYCLE_S)]
        if len(steps):
            workers, (of_horovod, other) = int(steps.index[0]), steps.iloc[0]
            return [
                f"A step of horovod takes {seconds(of_horovod)} at {counted(workers, 'worker')} ({execution}), where "
                f"one of allreduce takes {seconds(other)}: its thread looks for gradients once in a cycle of "
                f"{seconds(_CYCLE_S)}, and so short a step waits for the next."
            ]
    return []
