"""Published collectives: links fitted to base rows, and the row that a prediction becomes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from scalebench.cluster.fitting import LinkFit, Transfer, fit_links
from scalebench.cluster.network import Network
from scalebench.validation.measurements import message_bytes, records, stated_cluster, step_seconds

CONFIGURATION = ["source", "system", "model", "data", "batch_per_worker"]
_KEPT = ("source", "series", "system", "strategy", "model", "quantity", "unit")
_COLLECTIVE = "rabenseifner"  # of measured collectives: that of the network model for an MPI library, `auto`
_LEAST_SHARE = 0.4  # of a stated link, where the file has no base rows of collectives; an assumption


def fit_collectives(base: pd.DataFrame) -> LinkFit:
    """Fit latency and bandwidth to measured collectives of one system."""
    rows = [
        Transfer(int(row.workers), int(row.nodes), message_bytes(row), step_seconds(row, float(row.value)))
        for row in records(base)
    ]
    return fit_links(rows, _COLLECTIVE)


def least_share(collective: pd.DataFrame, fits: dict[str, LinkFit]) -> float:
    """Return the least share of a stated bandwidth that base rows of collectives reached."""
    shares = [_LEAST_SHARE] if not fits else []
    for key, group in by_system(collective[collective["split"] == "base"]):
        row = records(group)[0]
        stated = stated_cluster(row).links
        link = stated.intra if row.nodes == 1 else stated.inter
        shares.append(min(1.0, fits[key].pieces[-1].bandwidth.value / link.bandwidth_bytes_per_s))
    return min(shares)


def predict_collectives(group: pd.DataFrame, fit: LinkFit, least: float) -> list[dict[str, Any]]:
    """Predict by the fitted links; between nodes by the stated ones, if the base rows are of one node."""
    one_node = bool((group.loc[group["split"] == "base", "nodes"] == 1).all())
    base = {row.series: row for row in records(group[group["split"] == "base"])}
    rows = []
    for row in records(group[group["split"] == "hold"]):
        nbytes = message_bytes(row)
        before = base[row.series]
        centre, low, high = fit.seconds(int(row.workers), 1 if one_node else int(row.nodes), nbytes)
        if one_node and row.nodes > 1:
            network = [
                Network(stated_cluster(row, share), -(-int(row.workers) // int(row.nodes))) for share in (1.0, least)
            ]
            times = [one.allreduce(int(nbytes), range(int(row.workers)), _COLLECTIVE) for one in network]
            low, centre, high = max(low, times[0]), max(centre, times[0]), max(high, times[1])
        doublings = abs(math.log2(row.workers / before.workers))
        linear = step_seconds(before, float(before.value))
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
    bounds = sorted(step_seconds(row, value, back=True) for value in (low, high))
    return {
        **{name: getattr(row, name) for name in _KEPT},
        "execution": "published",
        "workers": int(row.workers),
        "nodes": int(row.nodes),
        "measured": float(row.value),
        "predicted": step_seconds(row, seconds, back=True),
        "low": bounds[0],
        "high": bounds[1],
        "linear": step_seconds(row, linear, back=True),
        "doublings": doublings,
        "configuration": " | ".join(str(getattr(row, name)) for name in CONFIGURATION),
        "seconds": step_seconds(row, float(row.value)),
        "predicted_s": seconds,
        "linear_s": linear,
    }
