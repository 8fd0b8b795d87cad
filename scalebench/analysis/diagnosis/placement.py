"""Workers without cores of their own: more of them than cores, other programs beside them, or none of them bound."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from scalebench.analysis.diagnosis.symptom import NATIVE, Symptom, run_ids, workers_of
from scalebench.analysis.loading import Results, cells_in
from scalebench.formatting import counted, listed, share
from scalebench.study.cell import in_words
from scalebench.system.hardware import core_list, cores_in

_SHOWN = 3  # placements in a sentence
_UNBOUND = "none"  # in the column `binding`


def oversubscribed_cores(results: Results) -> Iterator[Symptom]:
    """Native runs with more workers times threads than cores."""
    runs = results.completed
    crowded = runs[(runs["execution"] == NATIVE) & runs["oversubscribed"].astype(bool)]
    if len(crowded):
        yield Symptom(
            "oversubscription",
            in_words(cells_in(crowded)),
            _placements(crowded),
            run_ids(crowded),
            "workers, the threads that move their bytes and servers take turns on the cores: times are those of fewer "
            "cores, and no baseline of others",
            "at most as many of these as cores (--workers), more nodes, or virtual runs of the larger counts",
        )


def busy_cores(results: Results) -> Iterator[Symptom]:
    """Native runs beside which other programs took so much of the cores that they are no baseline."""
    runs = results.completed
    beside = runs[(runs["execution"] == NATIVE) & runs["disturbed"].astype(bool)]
    if len(beside):
        ends = dict.fromkeys(map(share, (beside["others_load"].min(), beside["others_load"].max())))
        taken = " to ".join(ends).replace(" %", "", len(ends) - 1)
        yield Symptom(
            "busy cores",
            in_words(cells_in(beside)),
            f"other programs took {taken} of the cores of the busiest node",
            run_ids(beside),
            "times are those of a part of the machine, vary from run to run, and are no baseline of others",
            "end the other programs, or ask the scheduler for whole nodes (--exclusive), and make these runs anew with "
            "run --new",
        )


def unbound_workers(results: Results) -> Iterator[Symptom]:
    """Native runs of several workers on a node that were not bound to cores, although there are enough."""
    runs = results.completed
    native = (runs["execution"] == NATIVE) & (runs["engine"] != "tasks") & ~runs["oversubscribed"].astype(bool)
    unbound = runs[native & (runs["workers_per_node"] > 1) & (runs["binding"] == _UNBOUND)]
    if len(unbound):
        yield Symptom(
            "missing binding",
            in_words(cells_in(unbound)),
            _placements(unbound),
            run_ids(unbound),
            "the kernel moves workers between cores, away from their caches, and may put two on one: times vary more",
            "run counts that need more than all cores, which keep a launch from binding, as a study of their own; or "
            "start with mpirun or srun, which bind (--launcher)",
        )


def _placements(runs: pd.DataFrame) -> str:
    """Return `4 workers on 2 cores (0-1)` for each placement of the workers of `runs` on the fullest node."""
    found = []
    for _, own in workers_of(runs).groupby("run_id", sort=False):
        node = own["node"].mode()
        on_it = own[own["node"] == node.iloc[0]] if len(node) else own
        cores = frozenset[int]().union(*map(cores_in, on_it["cores"].dropna()))
        on = f" on {counted(len(cores), 'core')} ({core_list(cores)})" if cores else ""
        found.append(f"{counted(len(on_it), 'worker')}{on}")
    return listed(dict.fromkeys(found), _SHOWN)
