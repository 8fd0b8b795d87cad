"""Published pipelines: throughputs predicted from a row of few devices, and plans found again from profiles of layers.

A row of split=base without recomputation says what a step takes on one device; its
layers share it as the device's roofline has them. Rows of split=hold are priced as
`predict` prices a pipeline with the stated balance, micro-batches and recomputation.
Beside them stands the textbook's bubble: the throughput of one device, with
recomputation where a row has that, times m u / (u + m - 1).

A series that nobody measured on one device has one row of split=base, a pipeline on the
fewest devices and with the fewest micro-batches. The step of one device is then that with
which this row, priced as the others, takes as long as was measured; and the bubble is
that of a row over that of the base row.

Plans have replicated stages. Workers divide among stages of consecutive layers; r
workers of a stage train replicas of it. A stage with T seconds of both passes, P bytes
of parameters, and X bytes of the larger activation at its ends (of the first stage: of
none) takes, over links of B bytes/s,

    max(T + 4 (r - 1) / r P / B,  2 X / B) / r

seconds a batch: compute and the average of gradients, or activations with their
gradients. The plan is that with the fastest slowest stage; it uses all workers, and of
equal plans that with the fewest workers on its last stage is taken. Source: Narayanan
et al., SOSP 2019 (PipeDream); the optimizer of its artifact as the README there runs
it, with the bandwidth that it takes by default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalebench.cluster.device import load_device
from scalebench.errors import ResultsError
from scalebench.measured import Measured
from scalebench.models.zoo.layers import load_layers
from scalebench.pricing import uncertainty
from scalebench.pricing.devices import Roofline, Scaled, Stated
from scalebench.pricing.platform import Platform
from scalebench.pricing.prediction import Case, Predictor
from scalebench.pricing.workload import Workload
from scalebench.study.spec import Component
from scalebench.validation import measurements, prediction_errors

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
_ROUNDS = 20  # of the search for the step of one device

PLAN_COLUMNS = ("model", "profile", "workers", "stages", "bandwidth_bytes_per_s")
PROFILE = ("layer", "forward_ms", "backward_ms", "activation_bytes", "parameter_bytes")
Floats = NDArray[np.float64]
# A missed plan is looked for over links of a tenth to ten times the stated bandwidth,
# in steps of 6 %.
_BANDWIDTHS = np.geomspace(0.1, 10, 81)


def is_pipelines(path: Path) -> bool:
    """Return True if the first line of `path` names the columns of pipelines."""
    return measurements.has_columns(path, COLUMNS)


def read_pipelines(path: Path) -> pd.DataFrame:
    """Read a CSV of pipelines.

    Raises:
        ResultsError: unreadable, numbers that are not positive, or a series with no base row, or several that fit.
    """
    table = measurements.read_csv(path)
    measurements.require_positive(
        table, ("stages", "micro_batches", "batch", "samples_per_s"), path
    )
    for series, group in table.groupby("series"):
        if len(base := _calibrating(group)) != 1:
            raise ResultsError(
                f"{path}: series {series}: expected a row of split=base, of one stage without recomputation or of "
                f"several stages, got {len(base)}"
            )
    return table


def predict_pipelines(table: pd.DataFrame) -> pd.DataFrame:
    """Return the predictions of the held rows, by the base row of their series."""
    rows: list[dict[str, Any]] = []
    for _, group in table.groupby("series"):
        (base,) = measurements.records(_calibrating(group))
        alone = _step_of_one(base)
        bases = {
            str(row.recompute): row
            for row in measurements.records(group[group["split"] == "base"])
        }
        for row in measurements.records(group[group["split"] == "hold"]):
            # The bubble is compared at equal recomputation where that was measured.
            alike = bases.get(str(row.recompute), base)
            rows.append(_prediction(alone, alike, row))
    return prediction_errors.predictions_of(rows)


def _calibrating(group: pd.DataFrame) -> pd.DataFrame:
    """Return the base rows of one device without recomputation; those of several stages if there are none."""
    bases = group[group["split"] == "base"]
    of_one = bases[(bases["stages"] == 1) & (bases["recompute"] == "none")]
    return bases[bases["stages"] > 1] if of_one.empty else of_one


def _step_of_one(base: Any) -> Stated:
    """Return the step of one device with which `base` takes as long as was measured."""
    measured_s = float(base.batch / base.samples_per_s)
    alone = Stated(measured_s, int(base.batch))
    if base.stages == 1:
        return alone
    # A pipeline's seconds are nearly in proportion to those of one device: each round
    # leaves less than a tenth of the error.
    for _ in range(_ROUNDS):
        predicted_s = _priced(alone, base).value
        alone = Stated(alone.step_s * measured_s / predicted_s, alone.batch)
    return alone


def _pipelined(rate: float, row: Any) -> float:
    """Return the throughput of a pipeline without communication, m u / (u + m - 1) times the `rate` of one device."""
    stages, pieces = int(row.stages), int(row.micro_batches)
    return rate * stages * pieces / (pieces + stages - 1)


def _priced(alone: Stated, row: Any) -> Measured:
    """Return the seconds of a step of `row` with their interval, where one device takes `alone`."""
    stages = int(row.stages)
    pieces = int(row.micro_batches)
    batch = int(row.batch)
    roofline = Roofline(load_device(str(row.device)))
    platform = Platform(
        measurements.linked(str(row.links), str(row.device), stages),
        Scaled(alone, roofline, roofline),
    )
    piece = -(-batch // pieces)  # all but the last are as large
    workload = Workload(
        load_layers(str(row.model)), _STEPS * piece * pieces, 1, piece * pieces
    )
    predictor = Predictor(workload, platform)
    sizes = [int(size) for size in str(row.balance).split("-")]
    options = {
        "stages": stages,
        "micro_batches": pieces,
        "schedule": row.schedule,
        "recompute": row.recompute,
    }
    strategy = Component(name="pipeline", options={**options, "balance": sizes})
    known = uncertainty.uncertainty_of(predictor, strategy, stages)
    cases = [
        Case(platform, workload.batch),
        *uncertainty.cases_at_ends(platform, known, workload.batch),
    ]
    times = predictor.times(strategy, stages, cases)
    scale = batch / (piece * pieces) / _STEPS
    time = uncertainty.with_interval(
        float(times.time[0]), uncertainty.seconds_at_ends(times, 1), known.margin
    )
    return time.map(lambda seconds: seconds * scale)


def _prediction(alone: Stated, alike: Any, row: Any) -> dict[str, Any]:
    """Return the prediction of a row, in seconds of a step; `alike` is the base row for the bubble."""
    stages = int(row.stages)
    batch = int(row.batch)
    rate_of_one = float(alike.samples_per_s) / _pipelined(1.0, alike)
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
        **_priced(alone, row).named("predicted", "low", "high"),
        "linear": batch / _pipelined(rate_of_one, row),
        "doublings": math.log2(stages / int(alike.stages)),
        "configuration": f"{row.series} | {row.micro_batches} | {batch}",
    }


class FoundPlan(NamedTuple):
    """A published plan beside the one that the rule finds, with the seconds a batch of the slowest stage of each."""

    model: str
    workers: int
    published: list[int]  # workers of each stage
    found: list[int]
    begins: list[str]  # first layer of each stage that was found
    published_s: float  # cut where it is fastest
    found_s: float
    # Bytes/s between which the rule finds the published plan: the widest range near the
    # bandwidth of the row. None if it is found at that bandwidth, or at none.
    elsewhere: tuple[float, float] | None


def is_plans(path: Path) -> bool:
    """Return True if the first line of `path` names the columns of plans."""
    return measurements.has_columns(path, PLAN_COLUMNS)


def read_plans(path: Path) -> pd.DataFrame:
    """Read a CSV of plans, whose profiles lie beside it.

    Raises:
        ResultsError: unreadable, numbers that are not positive, or stages that do not add up to the workers.
    """
    table = measurements.read_csv(path)
    measurements.require_positive(table, ("workers", "bandwidth_bytes_per_s"), path)
    for row in measurements.records(table):
        if sum(_stages(row.stages)) != row.workers:
            raise ResultsError(
                f"{path}: {row.model}: stages {row.stages} do not add up to {row.workers} workers"
            )
    return table


def read_profile(path: Path) -> pd.DataFrame:
    """Read a CSV of the layers of a model: milliseconds of both passes, bytes of output and parameters.

    Raises:
        ResultsError: unreadable, or a missing column.
    """
    table = measurements.read_csv(path)
    if missing := [name for name in PROFILE if name not in table]:
        raise ResultsError(
            f"{path}: column {missing[0]!r} is missing; expected {', '.join(PROFILE)}"
        )
    return table


def find_plans(table: pd.DataFrame, folder: Path) -> list[FoundPlan]:
    """Return each published plan beside the one that the rule finds from the profile in `folder`."""
    found = []
    for row in measurements.records(table):
        profile = read_profile(folder / str(row.profile))
        workers = int(row.workers)
        published = _stages(row.stages)
        bandwidth = float(row.bandwidth_bytes_per_s)
        costs = _costs(profile, workers, bandwidth)
        stages, found_s = _fastest_stages(costs)
        begins = [str(profile["layer"].iloc[first]) for first, _ in stages]
        replicas = [number for _, number in stages]
        published_s = _slowest_stage(costs, published)
        elsewhere = None
        if replicas != published:
            elsewhere = _widest_range(profile, published, bandwidth * _BANDWIDTHS)
        found.append(
            FoundPlan(
                str(row.model),
                workers,
                published,
                replicas,
                begins,
                published_s,
                found_s,
                elsewhere,
            )
        )
    return found


def _widest_range(
    profile: pd.DataFrame, published: Sequence[int], bandwidths: Floats
) -> tuple[float, float] | None:
    """Return the ends of the longest run of `bandwidths` at which the rule finds `published`; None if at none."""
    hits = []
    for bandwidth in bandwidths:
        stages, _ = _fastest_stages(_costs(profile, sum(published), float(bandwidth)))
        hits.append((float(bandwidth), [number for _, number in stages] == published))
    runs = [
        [bandwidth for bandwidth, _ in run]
        for hit, run in groupby(hits, itemgetter(1))
        if hit
    ]
    longest = max(runs, key=len, default=[])
    return (longest[0], longest[-1]) if longest else None


def _costs(profile: pd.DataFrame, workers: int, bandwidth: float) -> Floats:
    """Return seconds (workers, layers + 1, layers + 1) of a stage of layers i to j (exclusive) on 1, 2, ... workers."""
    seconds, parameters = (
        np.concatenate([[0.0], np.cumsum(values.to_numpy(dtype=float))])
        for values in (
            (profile["forward_ms"] + profile["backward_ms"]) / 1e3,
            profile["parameter_bytes"],
        )
    )
    outputs = profile["activation_bytes"].to_numpy(dtype=float)
    # at a border before layer 0, 1, ...
    crossing = 2 * np.concatenate([[0.0], outputs[:-1], [0.0]]) / bandwidth
    compute = seconds[None] - seconds[:, None]
    owned = parameters[None] - parameters[:, None]
    ends = np.maximum(crossing[:, None], crossing[None])
    ends[0] = 0.0  # the artifact charges the output of the first stage to the next one
    stages = []
    for replicas in range(1, workers + 1):
        average = 4 * (replicas - 1) / replicas * owned / bandwidth
        stages.append(np.maximum(compute + average, ends) / replicas)
    found = np.array(stages)
    found[:, np.tri(len(seconds), dtype=bool)] = math.inf  # no layers
    return found


def _fastest_stages(costs: Floats) -> tuple[list[tuple[int, int]], float]:
    """Return (first layer, workers) of each stage of the plan with the fastest slowest stage, and its seconds.

    Dynamic programming over the first j layers on w workers: L(j, w) = min over i < j
    and r <= w of max(L(i, w - r), stage of layers i to j on r workers).
    """
    workers, borders, _ = costs.shape
    least = np.full((workers + 1, borders), math.inf)
    least[0, 0] = 0.0
    # layers before the last stage, and its workers
    cut = np.zeros((workers + 1, borders, 2), dtype=int)
    for used in range(1, workers + 1):
        for replicas in range(1, used + 1):
            slowest = np.maximum(least[used - replicas][:, None], costs[replicas - 1])
            first = slowest.argmin(axis=0)
            value = slowest[first, np.arange(borders)]
            # Of equal plans the first stays: that with the fewest workers on its last
            # stage.
            better = value < least[used]
            least[used][better] = value[better]
            cut[used][better] = np.stack([first, np.full(borders, replicas)], axis=1)[
                better
            ]
    stages: list[tuple[int, int]] = []
    last, left = borders - 1, workers
    while last:
        last, replicas = (int(number) for number in cut[left, last])
        stages.insert(0, (last, replicas))
        left -= replicas
    return stages, float(least[workers, -1])


def _slowest_stage(costs: Floats, stages: Sequence[int]) -> float:
    """Return the seconds of the slowest of stages with so many workers, cut where these are least."""
    least = np.full(costs.shape[1], math.inf)
    least[0] = 0.0
    for replicas in stages:
        least = np.maximum(least[:, None], costs[replicas - 1]).min(axis=0)
    return float(least[-1])


def _stages(text: object) -> list[int]:
    return [int(each) for each in str(text).split("-")]
