"""Latency, bandwidth and congestion of a network, fitted to measured collectives.

T = (h(p) a + k(p) n/B) (1 + c lg(m/2)) + h'(p) a' + k'(p) n/B'

for p ranks on m nodes and n bytes: messages h and transfers k of an algorithm
(`collectives`) between nodes, h' and k' inside them, where a' and B' are those of the
rows of one node. a and B may differ below and above a size (eager and rendezvous); a
second piece has to pay for itself by AICc. Residuals are ln(T / measured): errors of a
network are relative to its times. c needs three node counts; with fewer it is 0, and
intervals reach up to that of MOST_GROWTH.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalebench.cluster.cluster_file import Cluster, Congestion, doublings
from scalebench.cluster.collectives import Level, Levels
from scalebench.cluster.engine_costs import EngineCosts
from scalebench.cluster.network import ALLREDUCE
from scalebench.errors import ClusterError
from scalebench.formatting import digits, seconds
from scalebench.measured import Measured
from scalebench.study.choices import NCCL

NODE_COUNTS = 3  # above one, of which congestion can be told from latency and bandwidth
# per doubling of nodes, in intervals where congestion is not fitted; an assumption
MOST_GROWTH = 0.2
# standard deviation of ln T for each doubling beyond the measured sizes and counts; an
# assumption
PER_DOUBLING = 0.05
# algorithms whose cost is linear in latency and seconds per byte
_LINEAR = sorted(set(ALLREDUCE) - {NCCL})
_OF_ENGINES = (
    "ring",
    "rabenseifner",
    "recursive_doubling",
    "tree",
)  # allreduce of MPI libraries and gloo
_FEWEST = 3  # rows of a fit

Array = NDArray[np.float64]


class Transfer(NamedTuple):
    """One measured collective."""

    ranks: int
    nodes: int
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class Piece:
    """Latency (s) and bandwidth (bytes/s) of messages up to `up_to` bytes."""

    up_to: float
    latency_s: Measured
    bandwidth: Measured


@dataclass(frozen=True)
class LinkFit:
    """Fitted links of one kind; `notes` say what could not be fitted and was assumed."""

    algorithm: str
    pieces: tuple[Piece, ...]
    congestion: Measured
    r2: float
    deviation: float  # of ln(T / measured)
    notes: tuple[str, ...]
    _measured: tuple[Transfer, ...]
    _inside: LinkFit | None
    _covariance: Array
    _quantile: float
    _fits_growth: bool

    def seconds(self, ranks: int, nodes: int, nbytes: float) -> Measured:
        """Return seconds of the collective with its 95 % prediction interval, which widens outside the measured."""
        row = Transfer(ranks, nodes, nbytes, 1.0)
        parameters = _parameters_of(self)
        logs = _log_model(
            [row], self.algorithm, self._inside, [piece.up_to for piece in self.pieces]
        )
        centre = float(logs(parameters)[0])
        gradient = _gradient(logs, parameters)[0]
        variance = float(gradient @ self._covariance @ gradient) + self.deviation**2
        variance += (PER_DOUBLING * self.distance(ranks, nodes, nbytes)) ** 2
        half = self._quantile * math.sqrt(variance)
        # Growth that was not fitted widens the interval upwards only: congestion never
        # makes a network faster.
        growth = (
            0.0
            if self._fits_growth
            else math.log1p(self.congestion.high * doublings(nodes))
        )
        low = centre - half
        high = centre + math.hypot(half, growth)
        return Measured(math.exp(centre), math.exp(low), math.exp(high))

    def __str__(self) -> str:
        """`ring, latency 0.5 ms, 4.4 MB/s, congestion 0.10 (0 to 0.2) for each doubling of nodes`."""
        piece, growth = self.pieces[-1], self.congestion
        return (
            f"{self.algorithm.replace('_', ' ')}, latency {seconds(piece.latency_s.value)}, "
            f"{digits(piece.bandwidth.value / 1e6)} MB/s, congestion {growth.value:.2f} ({growth.low:.2g} to "
            f"{growth.high:.2g}) for each doubling of nodes"
            + "".join(f"; {note}" for note in self.notes)
        )

    def distance(self, ranks: int, nodes: int, nbytes: float) -> float:
        """Return the doublings of ranks, nodes and bytes to the nearest measured ones, added."""
        asked = (ranks, nodes, max(nbytes, 1.0))
        seen = np.array(
            [(row.ranks, row.nodes, max(row.nbytes, 1.0)) for row in self._measured]
        )
        logs = np.log2(seen)
        at = np.log2(asked)
        below = logs.min(axis=0) - at
        above = at - logs.max(axis=0)
        return float(np.sum(np.maximum(0.0, np.maximum(below, above))))

    def as_congestion(self, source: str) -> Congestion:
        """Return the growth with nodes as an entry of a cluster file."""
        return Congestion(
            per_doubling=self.congestion.value, source="; ".join([source, *self.notes])
        )

    def on(self, cluster: Cluster, measured_on: Cluster | None = None) -> Cluster:
        """Return `cluster` with the fitted links between its nodes, those of the largest messages.

        Where the links of `cluster` differ from those of `measured_on`, the fitted ones
        differ as much.
        """
        latency = self.pieces[-1].latency_s.value
        bandwidth = self.pieces[-1].bandwidth.value
        if measured_on is not None:
            now, then = cluster.links.inter, measured_on.links.inter
            latency *= now.latency_s / then.latency_s if then.latency_s else 1.0
            bandwidth *= now.bandwidth_bytes_per_s / then.bandwidth_bytes_per_s
        source = f"fitted to measured collectives as {self.algorithm.replace('_', ' ')}"
        link = {
            "latency_s": latency,
            "bandwidth_bytes_per_s": bandwidth,
            "source": source,
        }
        links = {
            "inter": cluster.links.inter.model_copy(
                update=link
            ),  # of any speed, as in a what-if
            "congestion": self.as_congestion(source),
        }
        return cluster.model_copy(
            update={"links": cluster.links.model_copy(update=links)}
        )


def fit_engine(
    engines: EngineCosts, engine: str, *, inside: bool = False
) -> LinkFit | None:
    """Fit the links between nodes, or `inside` one, to the measured allreduce of `engine`, by the nearest algorithm.

    One latency and one bandwidth for all sizes; nodes count with one rank each. None
    where fewer than three collectives were measured.
    """
    rows = []
    for entry in engines.entries:
        of_links = entry.nodes == 1 if inside else entry.ranks == entry.nodes > 1
        if entry.engine == engine and of_links:
            rows += [
                Transfer(entry.ranks, entry.nodes, nbytes, seconds)
                for nbytes, seconds in entry.points
                if seconds > 0
            ]
    return _fit_nearest(tuple(rows)) if len(rows) >= _FEWEST else None


@lru_cache(maxsize=64)
def _fit_nearest(rows: tuple[Transfer, ...]) -> LinkFit:
    """Return the fit of the nearest algorithm; one number of ranks fits them all alike, and is taken for a ring."""
    fits = [fit_links(rows, algorithm, pieces=1) for algorithm in _OF_ENGINES]
    return min(fits, key=lambda fit: round(fit.deviation, 6))


def fit_links(
    rows: Sequence[Transfer],
    algorithm: str = "ring",
    inside: LinkFit | None = None,
    pieces: int = 2,
) -> LinkFit:
    """Fit the links of one kind to `rows` that are all of one node, or all of several, in at most so many pieces.

    `inside` are the fitted links of a node, whose part is charged besides; without it
    that part is neglected.

    Raises:
        ClusterError: fewer than three rows, rows of one and of several nodes, non-positive values, or an algorithm that
            is no sum of latencies and transfers.
    """
    from scipy import stats

    _refuse_unusable(rows, algorithm)
    measured = np.log([row.seconds for row in rows])
    fits = [
        _fit_pieces(rows, algorithm, inside, limits) for limits in _limits(rows, pieces)
    ]
    limits, parameters, covariance, residuals = min(
        fits, key=lambda fit: _aicc(fit[3], len(fit[1]))
    )
    congests = _congests(rows)
    # Without congestion its parameter is fixed, and no degree of freedom is lost.
    free = max(1, len(rows) - len(parameters) + (0 if congests else 1))
    quantile = float(stats.t.ppf(0.975, free))
    deviation = math.sqrt(float(residuals @ residuals) / free)
    spread = np.sqrt(np.diag(covariance)) * quantile
    growth, wide = float(parameters[-1]), float(spread[-1])
    notes = []
    counts = sorted({row.nodes for row in rows})
    if counts != [1] and not congests:
        wide = MOST_GROWTH
        notes.append(
            f"congestion is not fitted: {NODE_COUNTS} node counts from 2 on are needed, got "
            f"{', '.join(map(str, counts))}; none is assumed, intervals reach to {MOST_GROWTH:g} per doubling of nodes"
        )
    total = float(np.sum((measured - measured.mean()) ** 2))
    return LinkFit(
        algorithm=algorithm,
        pieces=_pieces(limits, parameters, spread),
        congestion=Measured(growth, max(0.0, growth - wide), growth + wide),
        r2=1 - float(residuals @ residuals) / total if total > 0 else math.nan,
        deviation=deviation,
        notes=tuple(notes),
        _measured=tuple(rows),
        _inside=inside,
        _covariance=covariance,
        _quantile=quantile,
        _fits_growth=congests,
    )


def _pieces(
    limits: Sequence[float],
    parameters: Array,
    spread: Array,
) -> tuple[Piece, ...]:
    """Return latency and bandwidth of each piece, from the logs that were fitted and half their intervals."""
    found = []
    for position, limit in enumerate(limits):
        a, b = parameters[2 * position :][:2]
        da, db = spread[2 * position :][:2]
        with np.errstate(over="ignore"):  # without end, where the rows do not show it
            latency = np.exp((a, a - da, a + da))
            bandwidth = np.exp((-b, -b - db, -b + db))
        found.append(
            Piece(limit, Measured(*latency.tolist()), Measured(*bandwidth.tolist()))
        )
    return tuple(found)


def _refuse_unusable(rows: Sequence[Transfer], algorithm: str) -> None:
    if algorithm not in _LINEAR:
        raise ClusterError(
            f"fit: expected one of {', '.join(_LINEAR)} as the algorithm, got {algorithm!r}"
        )
    if len(rows) < _FEWEST:
        raise ClusterError(
            f"fit: {len(rows)} measured collectives; at least {_FEWEST} of two sizes or counts needed"
        )
    if len({row.nodes == 1 for row in rows}) > 1:
        raise ClusterError(
            "fit: rows of one node and of several; fit the links inside a node first, then pass them"
        )
    for row in rows:
        is_group = row.ranks >= 2 and 1 <= row.nodes <= row.ranks
        if not is_group or row.nbytes < 0 or not 0 < row.seconds < math.inf:
            raise ClusterError(
                f"fit: expected ranks >= 2, 1 <= nodes <= ranks, bytes >= 0, seconds > 0, got {row}"
            )


def _congests(rows: Sequence[Transfer]) -> bool:
    return len({row.nodes for row in rows if row.nodes > 1}) >= NODE_COUNTS


def _limits(rows: Sequence[Transfer], pieces: int) -> list[list[float]]:
    """Candidate pieces: one, and two, if as many may be, with at least two sizes and three rows on either side."""
    sizes = sorted({row.nbytes for row in rows})
    candidates = [[math.inf]]
    # Two sizes at least on either side, or a piece would fit its rows exactly.
    for low in sizes[1:-2] if pieces > 1 else []:
        below = sum(row.nbytes <= low for row in rows)
        if min(below, len(rows) - below) >= 3:
            candidates.append([low, math.inf])
    return candidates


def _fit_pieces(
    rows: Sequence[Transfer],
    algorithm: str,
    inside: LinkFit | None,
    limits: list[float],
) -> tuple[list[float], Array, Array, Array]:
    """Return limits, parameters (ln a, ln 1/B of each piece; c), their covariance, and the residuals."""
    from scipy.optimize import least_squares

    measured = np.log([row.seconds for row in rows])
    logs = _log_model(rows, algorithm, inside, limits)
    fixed = not _congests(rows)

    def whole(free: Array) -> Array:
        return np.append(free, 0.0) if fixed else free

    # A start from the measured extremes; the bounds only keep the parameters finite.
    quickest = min(row.seconds for row in rows)
    rate = min(
        (row.seconds / row.nbytes for row in rows if row.nbytes > 0), default=1e-9
    )
    start = [math.log(quickest / 10), math.log(rate)] * len(limits) + (
        [] if fixed else [0.01]
    )
    low = [math.log(1e-9), math.log(1e-15)] * len(limits) + ([] if fixed else [0.0])
    high = [math.log(1e3), 0.0] * len(limits) + ([] if fixed else [5.0])

    def off(free: Array) -> Array:
        return logs(whole(free)) - measured

    found = least_squares(off, np.clip(start, low, high), bounds=(low, high))
    parameters = whole(found.x)
    residuals = logs(parameters) - measured
    noise = float(residuals @ residuals) / max(1, len(rows) - len(found.x))
    covariance = np.zeros((len(parameters), len(parameters)))
    size = len(found.x)
    # A ridge of one part in a million keeps a latency that the rows do not show from
    # making the matrix singular.
    covariance[:size, :size] = noise * np.linalg.pinv(
        found.jac.T @ found.jac + 1e-6 * np.eye(size)
    )
    return limits, parameters, covariance, residuals


def _log_model(
    rows: Sequence[Transfer],
    algorithm: str,
    inside: LinkFit | None,
    limits: Sequence[float],
) -> Callable[[Array], Array]:
    """Return ln T of `rows` as a function of the parameters."""
    coefficients = np.array([_coefficients(row, algorithm) for row in rows])
    bytes_of = np.array([row.nbytes for row in rows])
    piece = np.searchsorted(np.array(limits[:-1]), bytes_of)
    growing = np.array([doublings(row.nodes) for row in rows])
    within = np.array([_within(row, inside) for row in rows])

    def logs(parameters: Array) -> Array:
        latency = np.exp(parameters[2 * piece])
        per_byte = np.exp(parameters[2 * piece + 1])
        between = (
            coefficients[:, 0] * latency + coefficients[:, 1] * bytes_of * per_byte
        )
        found: Array = np.log(between * (1 + parameters[-1] * growing) + within)
        return found

    return logs


def _coefficients(row: Transfer, algorithm: str) -> tuple[float, float]:
    """Return messages h and transfers k of `row` on links of the fitted kind."""
    price, free = ALLREDUCE[algorithm], (0.0, math.inf)
    inside = -(-row.ranks // row.nodes)

    def levels(latency: float, bandwidth: float) -> Levels:
        if row.nodes == 1:
            return (
                Level(
                    row.ranks,
                    latency,
                    bandwidth,
                    bandwidth,
                    bandwidth * row.ranks,
                    across=False,
                ),
            )
        below = (
            (Level(inside, *free, math.inf, math.inf, across=False),)
            if inside > 1
            else ()
        )
        return (
            *below,
            Level(
                row.nodes,
                latency,
                bandwidth,
                bandwidth,
                bandwidth * row.nodes,
                across=True,
            ),
        )

    return price(0, levels(1.0, math.inf), 0.0), price(1, levels(0.0, 1.0), 0.0)


def _within(row: Transfer, inside: LinkFit | None) -> float:
    """Return seconds on the links of a node, in algorithms that climb levels; a ring crosses one kind at a time."""
    if (
        inside is None
        or row.nodes == 1
        or inside.algorithm == "ring"
        or row.ranks <= row.nodes
    ):
        return 0.0
    return float(inside.seconds(-(-row.ranks // row.nodes), 1, row.nbytes).value)


def _parameters_of(fit: LinkFit) -> Array:
    found = []
    for piece in fit.pieces:
        found += [math.log(piece.latency_s.value), -math.log(piece.bandwidth.value)]
    return np.array([*found, fit.congestion.value])


def _gradient(logs: Callable[[Array], Array], parameters: Array) -> Array:
    step = 1e-6
    # By differences: the model is a function of a handful of parameters.
    columns: list[Any] = []
    for position in range(len(parameters)):
        moved = parameters.copy()
        moved[position] += step
        columns.append((logs(moved) - logs(parameters)) / step)
    return np.stack(columns, axis=1)


def _aicc(residuals: Array, parameters: int) -> float:
    n = len(residuals)
    if n <= parameters + 1:
        return math.inf if parameters > 3 else 0.0
    # An exact fit has no logarithm.
    spread = max(float(residuals @ residuals) / n, 1e-12)
    return n * math.log(spread) + 2 * parameters * n / (n - parameters - 1)
