"""Numbers of a paper that follow from its own tables by a fit, without any run."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pandas as pd

from scalebench.analysis.epochs_to_target import EpochsLaw, fit_epochs
from scalebench.papers.obtained import Obtained
from scalebench.papers.published import Published

ENTRIES = "entries"  # in the column `study`: ours follows from the paper's entries.csv
_FITTED_UP_TO = "1.0"  # MLPerf rounds that are fitted; later ones are held out


def fitted(folder: Path, row: Published) -> Obtained | None:
    """Return epochs to target at global batch B of `epochs_at_batch@B`, by the law fitted to the first rounds.

    The law is E0 (1 + B / B_crit) with a percentile interval over resampled entries. None for other quantities.
    """
    name, _, batch = row.quantity.partition("@")
    if row.study != ENTRIES or name != "epochs_at_batch":
        return None
    law, rows = _law(folder / f"{ENTRIES}.csv")
    low, high = law.interval(float(batch))
    return Obtained(float(law.epochs(float(batch))), float(low[0]), float(high[0]), "fitted", rows)


@lru_cache
def _law(entries: Path) -> tuple[EpochsLaw, int]:
    rows = pd.read_csv(entries, dtype={"round": str})
    early = rows[rows["round"] <= _FITTED_UP_TO]
    return fit_epochs(early["batch_global"], early["epochs"]), len(early)
