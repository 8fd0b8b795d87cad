"""Our values that follow without any run: by a fit to published rows, or from a priced what-if."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

import pandas as pd

from scalebench.analysis.epochs_to_target import EpochsLaw, fit_epochs
from scalebench.papers.catalog import WHAT_IFS
from scalebench.papers.obtained import Obtained
from scalebench.papers.what_ifs import in_plane, read_what_ifs
from scalebench.validation.errors import with_errors
from scalebench.validation.measurements import read_published
from scalebench.validation.prediction import predict_published

# In the column `study`: ours follows from the paper's entries.csv; from its rows.csv; from the rows of all sources.
ENTRIES, ROWS, PUBLISHED_ROWS = "entries", "rows", "published"
_FITTED_UP_TO = "1.0"  # MLPerf rounds that are fitted; later ones are held out


def sources(folder: Path) -> tuple[str, ...]:
    """Return the values of `study` that need no run in the paper of `folder`."""
    return (ENTRIES, ROWS, PUBLISHED_ROWS, *read_what_ifs(folder / WHAT_IFS))


def without_run(folder: Path, study: str, quantity: str, workers: int | None) -> Obtained | None:
    """Return `quantity` of the paper in `folder`, None if it takes runs of `study`.

    `epochs_at_batch@B`: by E0 (1 + B / B_crit), fitted to the first rounds of entries.csv. `prediction_accuracy`: 1 -
    mean error at the held rows of experiments/published/. `predicted_efficiency@MODEL`: of rows.csv, calibrated
    on its base row and on the base rows of experiments/published/. `share_bound_by@COMPONENT`: of a what-if.
    """
    name, _, argument = quantity.partition("@")
    published = folder.parent / "published" / "scaling.csv"
    if (study, name) == (ENTRIES, "epochs_at_batch"):
        law, rows = _law(folder / f"{ENTRIES}.csv")
        low, high = law.interval(float(argument))
        return Obtained(float(law.epochs(float(argument))), float(low[0]), float(high[0]), "fitted", rows)
    if (study, name) == (PUBLISHED_ROWS, "prediction_accuracy"):
        errors = _predicted(published, None)["error"].abs()
        return Obtained(1 - float(errors.mean()), math.nan, math.nan, "fitted", len(errors))
    if (study, name) == (ROWS, "predicted_efficiency"):
        return _efficiency(_predicted(published, folder / f"{ROWS}.csv"), argument, workers)
    if study in (what_ifs := read_what_ifs(folder / WHAT_IFS)):
        return in_plane(what_ifs[study].price(), quantity)
    return None


@lru_cache
def _law(entries: Path) -> tuple[EpochsLaw, int]:
    rows = pd.read_csv(entries, dtype={"round": str})
    early = rows[rows["round"] <= _FITTED_UP_TO]
    return fit_epochs(early["batch_global"], early["epochs"]), len(early)


@lru_cache
def _predicted(published: Path, own: Path | None) -> pd.DataFrame:
    """Return predictions at the held rows of `own`, else of `published`, calibrated on base rows of both."""
    table, _ = read_published(published)
    if own is not None:
        base, (rows, _) = table[table["split"] == "base"], read_published(own)
        table = pd.concat([base, rows], ignore_index=True)
    return with_errors(predict_published(table)[0])


def _efficiency(predictions: pd.DataFrame, model: str, workers: int | None) -> Obtained | None:
    """Return the predicted throughput over that of linear scaling from one worker."""
    found = predictions[(predictions["model"] == model) & (predictions["workers"] == workers)]
    if found.empty:
        return None
    row = found.iloc[0]
    value, low, high = (float(row[name] / row["linear"]) for name in ("predicted", "low", "high"))
    return Obtained(value, low, high, "fitted", len(found))
