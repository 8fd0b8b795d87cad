"""Published measurements, calibrated on the rows of split=base and predicted at those of split=hold.

Step times of data-parallel training on p workers of m nodes, weak scaling:

T(p) = c (1 + s sqrt(2 ln p)) + ideal + e (whole - ideal)

c seconds of compute, from the base row of the series and the rows of its configuration that are not held: of each row
the compute with which its step takes as long as it was measured, in proportion to its batch, and of these the median;
sqrt(2 ln p) waiting for the slowest of p workers; `whole`
seconds of communication by the network model (`cluster.network`) on the stated links; `ideal` what is left of it if
buckets overlap with backward, fwd + max(t, done) + update, each released as `scalebench predict` does at a stated step
time: by the layers' shares of the backward pass, or evenly where no layer table is of the model. s (jitter) and e
(share of the hidden part that delays the step all the same) are fitted to configurations with base rows at one worker
and at several, over the whole file. No row of split=hold takes part.

Compute is in proportion to the batch of a worker, as in strong scaling at a fixed
global batch, where that of the base row is another. Linear scaling keeps the step of
the base row with the same calibrated compute.

An interval spans e from 0 to 1, links from all (many TCP flows) to the least share of
their stated speed that base rows of collectives reached, s over its range among the
base rows, and widens with the square root of the doublings from the base. It reaches
the least and the most compute among the rows that calibrate it. It is wider where the
base row does not carry the prediction: at another batch, and on real data with more
workers on a node, which share its input pipeline. Compute lies between the proportional
and the unchanged time there, and the interval reaches the middle of both on a log
scale. Where no base row of the series crosses nodes, a single TCP flow may reach no
more than the least share of its limit, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from scalebench.cluster import link_fit, network, operation
from scalebench.comm.base import Overlap
from scalebench.pricing import devices, overlap
from scalebench.system.clock import BACKWARD_SHARE
from scalebench.validation import measurements, prediction_errors

_BUCKET = 25e6  # bytes; DDP's default
_UNEXPLAINED = 0.01  # least standard deviation of ln T for a doubling
_ASSUMED = (
    0.5,
    0.02,
    (0.0, 0.05),
    0.03,
)  # e, s, its range, deviation: without configurations to fit them to
_LEAST_CONFIGURATIONS = 3
# share of the bytes, share of the backward pass
Buckets = tuple[tuple[float, float], ...]


class Overheads(NamedTuple):
    """Parameters of all series by base rows: e, s with its range, and the standard deviation of ln T for a doubling."""

    unhidden: float
    jitter: float
    jitter_range: tuple[float, float]
    per_doubling: float
    quantile: float  # of t, for a 95 % interval
    least_share: float
    configurations: int

    @property
    def fitted(self) -> bool:
        """Return True if there are enough configurations to fit e and s."""
        return self.configurations >= _LEAST_CONFIGURATIONS


@lru_cache(maxsize=64)
def buckets_of(model: str, nbytes: float) -> Buckets:
    """Return the buckets of a model's gradients in the order in which they are complete."""
    layers = measurements.layer_table_of(model)
    if layers is None:
        # Without layers, buckets are complete at even distances.
        count = max(1, round(nbytes / _BUCKET))
        return tuple((1 / count, bucket / count) for bucket in range(1, count + 1))
    release = devices.step_table(devices.Stated(1.0, 1), layers, [1]).release_at(1)
    gradients = tuple(devices.gradients_of(layers, release))
    own = sum(gradient.nbytes for gradient in gradients)
    # a stated size of the model is not that of its layer table to the byte
    size = round(_BUCKET * own / nbytes)
    plan = overlap.bucket_plan(
        gradients, Overlap("", bucket_bytes=size, first_bucket_bytes=size)
    )
    return tuple((part / own, share) for part, share in plan)


class _Assumed(NamedTuple):
    """Parameters of a prediction: e, s, the share of stated bandwidths, and the limit of one TCP flow and its share."""

    unhidden: float
    jitter: float
    share: float = 1.0
    one_flow: bool = True
    flow_share: float = 1.0


def predict_published(table: pd.DataFrame) -> tuple[pd.DataFrame, Overheads]:
    """Return the predictions of held measurements, and what was calibrated on the base rows."""
    collective = table["strategy"].map(
        lambda name: measurements.family(str(name)) == "collective"
    )
    fits = {
        key: fit_collectives(group)
        for key, group in by_system(table[collective & (table["split"] == "base")])
    }
    steps = table[~collective]
    steps = steps.assign(
        seconds=[
            measurements.step_seconds(row, float(row.value))
            for row in measurements.records(steps)
        ]
    )
    overheads = _fit_overheads(
        steps[steps["split"] == "base"], least_share(table[collective], fits)
    )
    rows: list[dict[str, Any]] = []
    for _, group in steps.groupby("series", sort=False):
        rows += _predict_steps(group, steps, overheads)
    for key, group in by_system(table[collective]):
        rows += predict_collectives(group, fits[key], overheads.least_share)
    return prediction_errors.predictions_of(rows), overheads


def _fit_overheads(base: pd.DataFrame, least: float) -> Overheads:
    """Fit e and s to the base rows of several workers whose configuration has one of one worker, too."""
    from scipy import stats
    from scipy.optimize import least_squares

    pairs = list(_pairs(base))
    # Two pairs would be met by two parameters, without a deviation to know.
    if len(pairs) < _LEAST_CONFIGURATIONS:
        unhidden, jitter, spread, deviation = _ASSUMED
        return Overheads(unhidden, jitter, spread, deviation, 2.0, least, len(pairs))

    def residuals(parameters: Any) -> Any:
        assumed = _Assumed(*parameters)
        return [
            math.log(_step(several, assumed)(_compute(one, assumed)) / several.seconds)
            for one, several in pairs
        ]

    # No more than all of the hidden communication can delay a step.
    found = least_squares(residuals, [0.5, 0.02], bounds=([0.0, 0.0], [1.0, 0.5]))
    unhidden, jitter = (float(value) for value in found.x)
    own, still = [], _Assumed(unhidden, 0.0)
    for one, several in pairs:
        compute = _compute(one, still)
        own.append(
            (several.seconds - _step(several, still)(compute))
            / (compute * _wait(several.workers))
        )
    doublings = [math.log2(several.workers / one.workers) for one, several in pairs]
    free = len(pairs) - 2
    # Errors add up like steps of a random walk: variance in proportion to doublings.
    scaled = np.square(found.fun) / doublings
    return Overheads(
        unhidden,
        jitter,
        (max(0.0, min(own)), max(own)),
        max(_UNEXPLAINED, math.sqrt(float(scaled.sum()) / free)),
        float(stats.t.ppf(0.975, free)),
        least,
        len(pairs),
    )


def _pairs(base: pd.DataFrame) -> Iterator[tuple[Any, Any]]:
    """Yield base rows of one worker and of several, of one configuration and preferably one strategy."""
    known = base.assign(family=base["strategy"].astype(str).map(measurements.family))
    for _, group in known.groupby([*CONFIGURATION, "family"], dropna=False):
        ones = list(measurements.records(group[group["workers"] == 1]))
        for several in measurements.records(group[group["workers"] > 1]):
            if ones and measurements.gradient_bytes(several) > 0:
                yield (
                    min(ones, key=lambda one: one.strategy != several.strategy),
                    several,
                )


def _step(row: Any, assumed: _Assumed) -> Callable[[float], float]:
    """Return the seconds of the step of `row` as a function of the seconds of compute."""
    whole = measurements.communication_s(
        row, assumed.share, one_flow=assumed.one_flow, flow_share=assumed.flow_share
    )
    buckets = buckets_of(str(row.model), measurements.gradient_bytes(row))

    def seconds(compute: float) -> float:
        backward, done = BACKWARD_SHARE * compute, 0.0
        for part, release in buckets:
            done = max(backward * release, done) + whole * part
        ideal = done - backward if whole > 0 else 0.0  # communication after backward
        return (
            compute * (1 + assumed.jitter * _wait(row.workers))
            + ideal
            + assumed.unhidden * (whole - ideal)
        )

    return seconds


def _compute(base: Any, assumed: _Assumed) -> float:
    """Return seconds of compute with which the step of `base` takes as long as it was measured."""
    from scipy.optimize import brentq

    step = _step(base, assumed)
    measured = float(base.seconds)
    least = measured / 20  # where a slow link would leave no time for compute
    if step(least) >= measured:
        return least
    return float(
        brentq(lambda compute: step(compute) - measured, least, measured, xtol=1e-12)
    )


def _calibrated(
    base: Any, rows: Sequence[Any], cases: Sequence[_Assumed]
) -> tuple[float, float, float]:
    """Return seconds of compute of `base` by `rows`: the least in the first case, the median, the most in the last."""
    found = []
    for row in rows:
        samples, least, most = _compute_range(base, row)
        factors = samples * least, samples, samples * most
        found.append(
            [
                _compute(row, case) * factor
                for case, factor in zip(cases, factors, strict=True)
            ]
        )
    low, centre, high = zip(*found, strict=True)
    return min(low), median(centre), max(high)


def _predict_steps(
    series: pd.DataFrame, steps: pd.DataFrame, overheads: Overheads
) -> list[dict[str, Any]]:
    """Predict the held rows of a series by its base row and those of `steps` with the same configuration."""
    # A prediction goes out from the most workers that were measured.
    base = max(
        measurements.records(series[series["split"] == "base"]),
        key=lambda row: row.workers,
    )
    quiet, busy = overheads.jitter_range
    # The fast end, the prediction itself, and the slow end.
    seen = [
        _Assumed(0.0, quiet, one_flow=False),
        _Assumed(overheads.unhidden, overheads.jitter),
        _Assumed(1.0, busy, overheads.least_share),
    ]
    unseen = [*seen[:2], seen[2]._replace(flow_share=overheads.least_share)]
    computes = _calibrated(base, measurements.calibrating_rows(base, steps), seen)
    base_s = _step(base, seen[1])(computes[1])
    rows = []
    for row in measurements.records(series[series["split"] == "hold"]):
        doublings = abs(math.log2(row.workers / base.workers))
        margin = math.exp(
            overheads.quantile * overheads.per_doubling * math.sqrt(doublings)
        )
        cases = unseen if row.nodes > 1 == base.nodes else seen
        samples, least, most = _compute_range(row, base)
        factors = (samples * least, samples, samples * most)
        low, centre, high = (
            _step(row, case)(own * factor)
            for own, case, factor in zip(computes, cases, factors, strict=True)
        )
        rows.append(
            prediction_row(
                row,
                centre,
                min(low / margin, centre),
                max(high * margin, centre),
                base_s * samples,
                doublings,
            )
        )
    return rows


def _compute_range(row: Any, base: Any) -> tuple[float, float, float]:
    """Return the compute of `row` relative to that of its base, and the least and the most of it relative to that."""
    samples = float(row.batch_per_worker) / float(base.batch_per_worker)
    samples = samples if math.isfinite(samples) else 1.0
    least = math.sqrt(min(1.0, 1 / samples))
    most = math.sqrt(max(1.0, 1 / samples))
    # Real samples are read and decoded by processors that a node's workers share.
    if pd.notna(row.data) and not str(row.data).startswith("synthetic"):
        inside = [one.workers / one.nodes for one in (base, row)]
        most *= math.sqrt(max(1.0, inside[1] / inside[0]))
    return samples, least, most


def _wait(workers: float) -> float:
    """Return the mean of the longest of `workers` normal deviates, sqrt(2 ln p)."""
    return math.sqrt(2 * math.log(workers)) if workers > 1 else 0.0


CONFIGURATION = ["source", "system", "model", "data", "batch_per_worker"]
_KEPT = ("source", "series", "system", "strategy", "model", "quantity", "unit")
# of measured collectives: that of the network model for an MPI library, `auto`
_COLLECTIVE = "rabenseifner"
# of a stated link, where the file has no base rows of collectives; an assumption
_LEAST_SHARE = 0.4


def fit_collectives(base: pd.DataFrame) -> link_fit.LinkFit:
    """Fit latency and bandwidth to measured collectives of one system."""
    rows = []
    for row in measurements.records(base):
        seconds = measurements.step_seconds(row, float(row.value))
        rows.append(
            link_fit.Transfer(
                int(row.workers),
                int(row.nodes),
                measurements.message_bytes(row),
                seconds,
            )
        )
    return link_fit.fit_links(rows, _COLLECTIVE)


def least_share(collective: pd.DataFrame, fits: dict[str, link_fit.LinkFit]) -> float:
    """Return the least share of a stated bandwidth that base rows of collectives reached."""
    shares = [_LEAST_SHARE] if not fits else []
    for key, group in by_system(collective[collective["split"] == "base"]):
        row = measurements.records(group)[0]
        stated = measurements.stated_cluster(row).links
        link = stated.intra if row.nodes == 1 else stated.inter
        shares.append(
            min(1.0, fits[key].pieces[-1].bandwidth.value / link.bandwidth_bytes_per_s)
        )
    return min(shares)


def predict_collectives(
    group: pd.DataFrame, fit: link_fit.LinkFit, least: float
) -> list[dict[str, Any]]:
    """Predict by the fitted links; between nodes by the stated ones, if the base rows are of one node."""
    one_node = bool((group.loc[group["split"] == "base", "nodes"] == 1).all())
    base = {
        row.series: row for row in measurements.records(group[group["split"] == "base"])
    }
    rows = []
    for row in measurements.records(group[group["split"] == "hold"]):
        nbytes = measurements.message_bytes(row)
        before = base[row.series]
        centre, low, high, *_ = fit.seconds(
            int(row.workers), 1 if one_node else int(row.nodes), nbytes
        )
        if one_node and row.nodes > 1:
            mean = operation.Operation(
                operation.Kind.ALLREDUCE,
                int(nbytes),
                range(int(row.workers)),
                algorithm=_COLLECTIVE,
            )
            on_a_node = -(-int(row.workers) // int(row.nodes))
            # At the stated speed of the links, and at the least share of it that was
            # measured.
            times = [
                network.Network(
                    measurements.stated_cluster(row, share), on_a_node
                ).time(mean)
                for share in (1.0, least)
            ]
            low = max(low, times[0])
            centre = max(centre, times[0])
            high = max(high, times[1])
        doublings = abs(math.log2(row.workers / before.workers))
        linear = measurements.step_seconds(before, float(before.value))
        rows.append(prediction_row(row, centre, low, high, linear, doublings))
    return rows


def by_system(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the rows of each system of each source."""
    for key, group in rows.groupby(["source", "system"], dropna=False, sort=False):
        yield " | ".join(map(str, key)), group


def prediction_row(
    row: Any, seconds: float, low: float, high: float, linear: float, doublings: float
) -> dict[str, Any]:
    """Return a prediction in the published quantity; a throughput is least where the time is longest."""
    bounds = sorted(
        measurements.step_seconds(row, value, back=True) for value in (low, high)
    )
    return {
        **{name: getattr(row, name) for name in _KEPT},
        "execution": "published",
        "workers": int(row.workers),
        "nodes": int(row.nodes),
        "measured": float(row.value),
        "predicted": measurements.step_seconds(row, seconds, back=True),
        "low": bounds[0],
        "high": bounds[1],
        "linear": measurements.step_seconds(row, linear, back=True),
        "doublings": doublings,
        "configuration": " | ".join(str(getattr(row, name)) for name in CONFIGURATION),
        "seconds": measurements.step_seconds(row, float(row.value)),
        "predicted_s": seconds,
        "linear_s": linear,
    }
