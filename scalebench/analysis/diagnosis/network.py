"""Communication that takes longer than the calibration, or the cluster file, of the study says."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from scalebench.analysis.diagnosis.symptom import NATIVE, Symptom, run_ids
from scalebench.analysis.environment import charged_engine, supposed
from scalebench.analysis.loading import Results, cells_in, is_representative
from scalebench.formatting import seconds, share
from scalebench.strategies.registry import preferred_engine
from scalebench.study.cell import in_words

SLOWER = 1.5  # ratio of transfers; virtual times are within some tenths of native ones (docs/measurements.md)
MATTERS = 0.05  # share of the training time that the difference has to take
_ALIKE = ["label", "workers", "batch_per_worker", "batch_global", "cluster"]


def slow_network(results: Results) -> Iterator[Symptom]:
    """Native cells whose communication takes longer than that of the virtual runs, which the calibration prices.

    Transfers alone are compared, without waiting for other workers, where that was measured: on one node.
    """
    runs = results.completed
    if supposed(results):
        return
    runs = runs[(runs["workers"] > 1) & is_representative(runs)]
    charged = charged_engine(results)
    engines = runs["strategy"].map(lambda name: charged or preferred_engine(str(name)))
    native = runs[(runs["execution"] == NATIVE) & (runs["engine"] == engines)]
    cells = _medians(native, [*_ALIKE, "engine"])
    cells = cells.merge(_medians(runs[runs["execution"] == "virtual"], _ALIKE), on=_ALIKE, suffixes=("", "_priced"))
    cells["apart"] = apart = cells["transfer_s"].notna() & cells["transfer_s_priced"].notna()
    cells["took_s"] = cells["transfer_s"].where(apart, cells["comm_s"])
    cells["priced_s"] = cells["transfer_s_priced"].where(apart, cells["comm_s_priced"])
    cells["more"] = (cells["took_s"] - cells["priced_s"]) / cells["train_s"]
    slow = cells[(cells["took_s"] > SLOWER * cells["priced_s"]) & (cells["more"] > MATTERS)]
    for engine, own in slow.groupby("engine"):
        rows = native[native["engine"] == engine].merge(own[_ALIKE], on=_ALIKE)
        worst = own.sort_values("more").iloc[-1]
        what = "transfers" if worst["apart"] else "communication, with waiting for others,"
        yield Symptom(
            "slow network",
            in_words(cells_in(rows)),
            f"{what} of {worst['label']} at {worst['workers']} workers took {seconds(worst['took_s'])}, and "
            f"{seconds(worst['priced_s'])} by the calibration: {share(worst['more'])} of its time",
            run_ids(rows),
            "virtual times and predictions of these strategies are too short by as much",
            "measure the costs of the engine again (scalebench recalibrate); where they stay, look for other traffic, "
            "a slower network card or a wrong interface (scalebench doctor)",
        )


def _medians(runs: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Medians of training time, communication, and transfers (communication without waiting) of each cell."""
    transfer = runs["comm_s"].astype(float) - runs["wait_s"].astype(float)
    table = runs.assign(transfer_s=transfer)
    return table.groupby(by, as_index=False)[["train_s", "comm_s", "transfer_s"]].median()
