"""Step times of one cluster in many placements: calibrated on some, mostly on fewer nodes, and predicted at the others.

T = c(b) (1 + s sqrt(2 ln p)) + e sync(p, m)

c(b) seconds of a step of b samples on one worker, linear between the measured batches;
sync from `cluster.fitting`, fitted to the measured synchronisations of one node and of
several; s (jitter) and e (share of a synchronisation that delays the step) fitted to
the steps. Held rows are those of split=hold, else those of the largest node count; none
of them takes part. Bytes are not stated: one size stands for all.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalebench.cluster.link_fit import PER_DOUBLING, LinkFit, Transfer, fit_links
from scalebench.errors import ResultsError
from scalebench.validation import measurements, prediction_errors

COLUMNS = (
    "model",
    "placement",
    "nodes",
    "replicas",
    "local_batch",
    "step_time_s",
    "sync_time_s",
)
_LEAST_PLACEMENTS = 3  # of which latency and bandwidth are fitted
_NBYTES = 1e8  # nominal; the fitted bandwidth is relative to it


class _Model(NamedTuple):
    """Parameters of a model, from its rows of fewer nodes."""

    one_worker: pd.Series[float]  # seconds by batch
    inside: LinkFit
    between: LinkFit
    unhidden: float
    jitter: float
    deviation: float  # of ln T


def is_placements(path: Path) -> bool:
    """Return True if the first line of `path` names the columns of placements."""
    return measurements.has_columns(path, COLUMNS)


def read_placements(path: Path) -> pd.DataFrame:
    """Read a CSV of placements; the column `held` marks the rows to predict.

    Raises:
        ResultsError: unreadable, non-positive numbers, or a model with too few rows to calibrate on.
    """
    table = measurements.read_csv(path)
    measurements.require_positive(table, COLUMNS[2:], path)
    split = table["split"] if "split" in table else pd.Series("base", index=table.index)
    most = table.groupby("model")["nodes"].transform("max")
    held = split == "hold" if (split == "hold").any() else table["nodes"] == most
    for model, group in table[~held].groupby("model"):
        several = group[group["replicas"] > 1]
        # 1: on one node, 2: on several.
        kinds = (
            several.drop_duplicates("placement")["nodes"].clip(upper=2).value_counts()
        )
        alone = (group["replicas"] == 1).any()
        # placements on one node, on several
        fewest = min(kinds.get(1, 0), kinds.get(2, 0))
        if not alone or fewest < _LEAST_PLACEMENTS:
            raise ResultsError(
                f"{path}: model {model}: to calibrate on, rows of one replica and {_LEAST_PLACEMENTS} placements each "
                "of more replicas on one node and on several are needed"
            )
    lonely = set(table["model"]) - set(table.loc[~held, "model"])
    if lonely:
        raise ResultsError(f"{path}: model {min(lonely)} has no rows to calibrate on")
    return table.assign(held=held)


def predict_placements(table: pd.DataFrame) -> pd.DataFrame:
    """Return the predictions of the held placements, by the others of their model."""
    rows: list[dict[str, Any]] = []
    for name, group in table.groupby("model"):
        base = group[~group["held"]]
        held = group[group["held"]]
        model = _calibrate(base)
        nodes = base["nodes"].max()
        predicted = _seconds(model, held)
        # Linear scaling: as if no synchronisation delayed a step.
        linear = _compute(model, held)
        replicas = base["replicas"].max()
        for row, seconds, alone in zip(
            measurements.records(held), predicted, linear, strict=True
        ):
            distance = model.between.distance(
                int(row.replicas), int(row.nodes), _NBYTES
            )
            margin = math.exp(
                1.96 * math.hypot(model.deviation, PER_DOUBLING * distance)
            )
            rows.append(
                {
                    "source": f"placements: {name}",
                    "series": f"{name} on {row.placement}",
                    "system": "",
                    "execution": "published",
                    "strategy": "data parallel",
                    "model": name,
                    "quantity": "step_time",
                    "workers": int(row.replicas),
                    "nodes": int(row.nodes),
                    "measured": float(row.step_time_s),
                    "predicted": seconds,
                    "low": seconds / margin,
                    "high": seconds * margin,
                    "linear": alone,
                    "doublings": max(
                        0.0,
                        math.log2(row.nodes / nodes),
                        math.log2(row.replicas / replicas),
                    ),
                    "configuration": f"{name} | {row.local_batch} | {row.placement}",
                }
            )
    return prediction_errors.predictions_of(rows)


def _calibrate(rows: pd.DataFrame) -> _Model:
    from scipy.optimize import nnls

    single = rows[(rows["nodes"] == 1) & (rows["replicas"] == 1)]
    one_worker = single.groupby("local_batch")["step_time_s"].median()
    several = rows[rows["replicas"] > 1]
    middle = several.groupby(["placement", "nodes", "replicas"], as_index=False)[
        "sync_time_s"
    ].median()
    inside = _links_of(middle[middle["nodes"] == 1])
    between = _links_of(middle[middle["nodes"] > 1])
    plain = _Model(one_worker, inside, between, 0.0, 0.0, 0.0)
    compute = _compute(plain, several)
    measured = several["step_time_s"].to_numpy()
    # Relative to the measured step, so that long steps do not decide alone; no part can
    # make a step shorter.
    parts = np.stack(
        [_synchronisation(plain, several), compute * _wait(several)], axis=1
    )
    (unhidden, jitter), _ = nnls(
        parts / measured[:, None], (measured - compute) / measured
    )
    fitted = plain._replace(unhidden=float(unhidden), jitter=float(jitter))
    residuals = np.log(_seconds(fitted, several) / measured)
    return fitted._replace(deviation=float(np.sqrt(np.mean(residuals**2))))


def _links_of(rows: pd.DataFrame) -> LinkFit:
    transfers = [
        Transfer(int(row.replicas), int(row.nodes), _NBYTES, row.sync_time_s)
        for row in measurements.records(rows)
    ]
    return fit_links(transfers)


def _seconds(model: _Model, rows: pd.DataFrame) -> NDArray[np.float64]:
    compute = _compute(model, rows) * (1 + model.jitter * _wait(rows))
    return compute + model.unhidden * _synchronisation(model, rows)


def _compute(model: _Model, rows: pd.DataFrame) -> NDArray[np.float64]:
    batches, seconds = (
        part.to_numpy(dtype=float)
        for part in (model.one_worker.index, model.one_worker)
    )
    return np.asarray(
        np.interp(rows["local_batch"].to_numpy(dtype=float), batches, seconds)
    )


def _synchronisation(model: _Model, rows: pd.DataFrame) -> NDArray[np.float64]:
    seconds = []
    for row in measurements.records(rows):
        # Inside a node other links are used than between nodes, with a fit of their
        # own.
        fit = model.inside if row.nodes == 1 else model.between
        seconds.append(fit.seconds(int(row.replicas), int(row.nodes), _NBYTES).value)
    return np.array(seconds)


def _wait(rows: pd.DataFrame) -> NDArray[np.float64]:
    return np.asarray(np.sqrt(2 * np.log(rows["replicas"].to_numpy(dtype=float))))
