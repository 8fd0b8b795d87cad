"""Published throughputs of pipelines, predicted from a row of one device.

A row of split=base without recomputation says what a step takes on one device; its layers share it as the device's
roofline has them. Rows of split=hold are priced as `predict` prices a pipeline with the stated balance, micro-batches
and recomputation. Beside them stands the textbook's bubble: the throughput of one device, with recomputation where a
row has that, times m u / (u + m - 1).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd

from scalebench.cluster.device import load_device
from scalebench.errors import ResultsError
from scalebench.models.layer_files import load_layers
from scalebench.pricing.devices import Roofline, Scaled, Stated
from scalebench.pricing.platform import Platform
from scalebench.pricing.prediction import Case, Predictor, Workload
from scalebench.pricing.uncertainty import cases_at_ends, interval, seconds_at_ends, uncertainty_of
from scalebench.study.spec import Component
from scalebench.validation.measurements import has_columns, linked, read_csv, records, require_positive
from scalebench.validation.prediction_errors import predictions_of

COLUMNS = (
    "series",
    "split",
    "device",
    "links",
    "model",
    "stages",
    "balance",
    "micro_batches",
    "batch",
    "samples_per_s",
)
_STEPS = 10  # of the priced training


def is_pipelines(path: Path) -> bool:
    """Return True if the first line of `path` names the columns of pipelines."""
    return has_columns(path, COLUMNS)


def read_pipelines(path: Path) -> pd.DataFrame:
    """Read a CSV of pipelines.

    Raises:
        ResultsError: unreadable, numbers that are not positive, or a series with no base row of one stage, or several.
    """
    table = read_csv(path)
    require_positive(table, ("stages", "micro_batches", "batch", "samples_per_s"), path)
    for series, group in table.groupby("series"):
        base = group[(group["split"] == "base") & (group["recompute"] == "none")]
        if len(base) != 1 or base["stages"].iloc[0] != 1:
            raise ResultsError(
                f"{path}: series {series}: expected a row of split=base, of one stage without recomputation, got "
                f"{len(base)}"
            )
    return table


def predict_pipelines(table: pd.DataFrame) -> pd.DataFrame:
    """Return the predictions of the held rows, by the base row of their series."""
    rows: list[dict[str, Any]] = []
    for _, group in table.groupby("series"):
        of_one = {str(row.recompute): row for row in records(group[group["split"] == "base"])}
        for row in records(group[group["split"] == "hold"]):
            alike = of_one.get(str(row.recompute), of_one["none"])
            rows.append(_prediction(of_one["none"], alike, row))
    return predictions_of(rows)


def _prediction(base: Any, alike: Any, row: Any) -> dict[str, Any]:
    """Return the prediction of a row, in seconds of a step; `alike` is the row of one device for the bubble."""
    stages, pieces, batch = int(row.stages), int(row.micro_batches), int(row.batch)
    roofline = Roofline(load_device(str(row.device)))
    alone = Stated(float(base.batch / base.samples_per_s), int(base.batch))
    platform = Platform(linked(str(row.links), stages), Scaled(alone, roofline, roofline))
    piece = -(-batch // pieces)  # all but the last are as large
    workload = Workload(load_layers(str(row.model)), _STEPS * piece * pieces, 1, piece * pieces)
    predictor = Predictor(workload, platform)
    sizes = [int(size) for size in str(row.balance).split("-")]
    options = {"stages": stages, "micro_batches": pieces, "schedule": row.schedule, "recompute": row.recompute}
    strategy = Component(name="pipeline", options={**options, "balance": sizes})
    known = uncertainty_of(predictor, strategy, stages)
    cases = [Case(platform, workload.batch), *cases_at_ends(platform, known, workload.batch)]
    times = predictor.times(strategy, stages, cases)
    scale = batch / (piece * pieces) / _STEPS
    predicted = float(times.time[0]) * scale
    low, high = interval(float(times.time[0]), seconds_at_ends(times, 1), known.margin)
    bubble = batch / (alike.samples_per_s * stages * pieces / (pieces + stages - 1))
    return {
        "source": str(row.source),
        "series": str(row.series),
        "system": f"{stages} {row.device}",
        "execution": "published",
        "strategy": f"pipeline {row.schedule}, {row.balance}",
        "model": str(row.model),
        "quantity": "step_time",
        "workers": stages,
        "nodes": 1,
        "measured": batch / float(row.samples_per_s),
        "predicted": predicted,
        "low": low * scale,
        "high": high * scale,
        "linear": bubble,
        "doublings": math.log2(stages),
        "configuration": f"{row.series} | {pieces} | {batch}",
    }
