"""How long each worker waited for the others, from when all of them came to each collective."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass
class Attendance:
    """One worker's arrivals at, and departures from, the collectives of its world; `epochs[e]` came before e's end."""

    arrivals: list[float]
    departures: list[float]
    epochs: list[int]


def waits(attendances: list[Attendance]) -> list[list[float]] | None:
    """Seconds worker i waited in each epoch e: sum over its collectives k of min(max_j a_jk, d_ik) - a_ik.

    Nobody waits for the last one in an operation left before (a broadcast's root). What lies after the last epoch
    counts to it. None where it cannot be known: no collectives, or not the same number on every worker. All moments
    must be of one clock, so all workers of one host.
    """
    counts = {len(each.arrivals) for each in attendances}
    if counts == {0} or len(counts) != 1:
        return None
    arrivals = np.array([each.arrivals for each in attendances])
    until = np.broadcast_to(arrivals.max(axis=0), arrivals.shape)
    if all(len(each.departures) == len(each.arrivals) for each in attendances):
        until = np.minimum(until, np.array([each.departures for each in attendances]))
    waited = np.maximum(until - arrivals, 0.0)
    return [
        [float(row[low:high].sum()) for low, high in pairwise([0, *each.epochs[:-1], arrivals.shape[1]])]
        for row, each in zip(waited, attendances, strict=True)
    ]
