"""Differences between workers and links, timing options of virtual runs, and the jitter of steps.

Factors on the compute of single steps are equal for virtual and paced workers.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    model_validator,
)

from scalebench.errors import StudyError
from scalebench.study.choices import Allreduce, EngineName
from scalebench.study.validation import StrictModel

# laws that can be injected; `measured` is the jitter of the machine
STATED = (
    "normal",
    "lognormal",
    "exponential",
)
# above it step times would be negative
_MOST_SIGMA = {
    "normal": 0.3,
    "exponential": 1.0,
}
# drawn together: a generator for each step would cost more than a short step
_CHUNK = 1024
_CUT = 3.0  # standard deviations at which the normal law is truncated on both sides
# standard deviation of the truncated law: sqrt(1 - 2 c phi(c) / (2 Phi(c) - 1))
_CUT_SIGMA = 0.98657839

Floats = NDArray[np.float64]
_JitterKind = Literal["measured", "none", "normal", "lognormal", "exponential"]


class SlowWindow(StrictModel):
    """A factor on the compute time of one worker between two moments of the training time."""

    rank: NonNegativeInt
    from_s: float = Field(0.0, ge=0, description="seconds after training began")
    until_s: PositiveFloat
    factor: PositiveFloat

    @model_validator(mode="after")
    def _has_a_length(self) -> SlowWindow:
        if self.until_s <= self.from_s:
            raise ValueError(
                f"a window from {self.from_s:g} s until {self.until_s:g} s is empty"
            )
        return self


def _link_name(key: Any) -> str:
    """Return the normalised key of a slow link: `3`, the cards of node 3; `0-2`, the path between two nodes."""
    ends = str(key).split("-")
    are_numbers = all(end.isdecimal() for end in ends)
    if len(ends) > 2 or not are_numbers or len(set(ends)) < len(ends):
        raise ValueError(
            f"expected a node, such as 3, or two of them, such as 0-2; got {key!r}"
        )
    # a path is the same from either end
    return "-".join(sorted(ends, key=int))


SlowLinks = dict[
    Annotated[str, BeforeValidator(_link_name)], Annotated[float, Field(ge=1)]
]


class Heterogeneity(StrictModel):
    """Differences between workers and links, of the runs of a study or of a cluster."""

    jitter: Literal["measured", "none", "normal", "lognormal", "exponential"] = (
        "measured"
    )
    jitter_sigma: float = Field(
        0.05,
        ge=0,
        le=10,
        description="standard deviation of a stated jitter, relative to a step's mean time",
    )
    slowdown: dict[NonNegativeInt, PositiveFloat] = Field(
        default_factory=dict, description="compute factor per worker rank"
    )
    slow_windows: list[SlowWindow] = Field(
        [], description="compute factors of workers for a while"
    )
    slow_links: SlowLinks = Field(
        {},
        description="node, or node-node: how many times slower its cards, or the way between them, are",
    )

    @model_validator(mode="after")
    def _steps_take_time(self) -> Heterogeneity:
        if problem := self.jitter_problem():
            raise ValueError(problem)
        return self

    def jitter_problem(self) -> str:
        """Return an error message if the jitter is so wide that step times would be negative, else an empty text."""
        most = _MOST_SIGMA.get(self.jitter, self.jitter_sigma)
        if self.jitter_sigma <= most:
            return ""
        return (
            f"jitter {self.jitter} takes a jitter_sigma of at most {most:g}, "
            f"got {self.jitter_sigma:g}; use lognormal"
        )

    def describe(self, workers: int) -> list[str]:
        """Return a phrase for each difference among `workers` workers; jitter only if its law is stated."""
        found = [
            f"worker {rank} {by:g} times as slow"
            for rank, by in sorted(self.slowdown.items())
            if rank < workers
        ]
        found += [
            f"worker {window.rank} {window.factor:g} times as slow from {window.from_s:g} to {window.until_s:g} s"
            for window in self.slow_windows
            if window.rank < workers
        ]
        for link, by in self.slow_links.items():
            one, _, other = link.partition("-")
            where = (
                f"the way between nodes {one} and {other}"
                if other
                else f"the cards of node {one}"
            )
            found.append(f"{where} {by:g} times as slow")
        if self.jitter in STATED and self.jitter_sigma:
            found.append(f"{self.jitter} jitter of {self.jitter_sigma:g}")
        return found

    def slowness(self, rank: int) -> Callable[[float], float] | None:
        """Return the factor on compute of worker `rank` as a function of its start (s); None without slow windows."""
        windows = [window for window in self.slow_windows if window.rank == rank]

        def factor(now: float) -> float:
            return math.prod(
                window.factor
                for window in windows
                if window.from_s <= now < window.until_s
            )

        return factor if windows else None


class VirtualOptions(Heterogeneity):
    """Timing options of virtual runs; paced runs use the differences and a stated jitter."""

    engine: EngineName | Literal["auto"] = Field(
        "auto",
        description="native engine by whose costs a strategy's collectives are charged; auto: its preferred one",
    )
    collective: Allreduce = Field(
        "auto",
        description="allreduce that the network model charges; auto: that of an MPI library",
    )
    ties: Literal["seeded", "rank"] = "seeded"

    def with_defaults(self, cluster: Heterogeneity) -> VirtualOptions:
        """Return these options with the values of `cluster` for options that are not set.

        Raises:
            StudyError: the two contradict each other.
        """
        # What the study sets wins, also where it sets the default.
        unset = {
            name: getattr(cluster, name)
            for name in cluster.model_fields_set - self.model_fields_set
        }
        both = self.model_copy(update=unset)
        if problem := both.jitter_problem() or self._unused_sigma(both.jitter):
            raise StudyError(f"virtual: {problem}")
        return both

    def _unused_sigma(self, jitter: str) -> str:
        """Return an error message for a jitter_sigma without a stated jitter; files with all defaults have 0.05."""
        sigma = self.jitter_sigma
        if jitter in STATED or sigma == type(self).model_fields["jitter_sigma"].default:
            return ""
        laws = " or ".join([", ".join(STATED[:-1]), STATED[-1]])
        return f"jitter_sigma {sigma:g} has no effect with jitter: {jitter}; write jitter: {laws}"


def jitter_source(
    kind: _JitterKind,
    sigma: float,
    *,
    seed: int,
    worker: int,
    measured: Sequence[float] = (),
) -> Jitter:
    """Return the factor on compute as a function of the step number, keyed by (seed, worker, step).

    `measured` resamples the measured steps. The other laws have mean 1 and standard
    deviation `sigma`, that of a step's time relative to its mean (z standard normal, e
    standard exponential):

        normal       1 + sigma z / 0.9866, z within +-3              sigma <= 0.3
        lognormal    exp(s z - s^2 / 2), s^2 = ln(1 + sigma^2)
        exponential  1 - sigma + sigma e                             sigma <= 1
    """
    sample = np.asarray(measured, dtype=np.float64)

    def chunk(index: int) -> Floats:
        # A generator with a counter: any chunk is drawn without those before it. Keys
        # differ up to a million workers.
        random = np.random.Generator(
            np.random.Philox(key=[(seed << 20) ^ worker, index])
        )
        if kind == "normal":
            drawn = random.standard_normal(2 * _CHUNK)  # 0.3 % are truncated
            return 1.0 + sigma / _CUT_SIGMA * drawn[np.abs(drawn) <= _CUT][:_CHUNK]
        if kind == "lognormal":
            variance = np.log1p(sigma**2)
            factors: Floats = np.exp(
                np.sqrt(variance) * random.standard_normal(_CHUNK) - variance / 2
            )
            return factors
        if kind == "exponential":
            return 1.0 - sigma + sigma * random.standard_exponential(_CHUNK)
        return sample[random.integers(len(sample), size=_CHUNK)]

    if kind == "none" or (kind == "measured" and len(sample) == 0):
        return Jitter(lambda index: np.ones(_CHUNK))
    return Jitter(chunk)


class Jitter:
    """Factor on compute by step number; `chunk(i)` are those of the i-th thousand of steps."""

    def __init__(self, chunk: Callable[[int], Floats]) -> None:
        self._chunk = chunk
        # The last thousand. Single numbers are faster out of an `array` than out of
        # numpy's, and a list of them would take five times its memory.
        self._held = -1, array("d")

    def __call__(self, step: int) -> float:
        index, place = divmod(step, _CHUNK)
        return self._of(index)[place]

    def span(self, low: int, high: int) -> Floats:
        """Return the factors of the steps from `low` to before `high`."""
        parts = []
        for index in range(low // _CHUNK, (high - 1) // _CHUNK + 1):
            begin = index * _CHUNK
            factors = np.frombuffer(self._of(index))
            parts.append(factors[max(low - begin, 0) : high - begin])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _of(self, index: int) -> array[float]:
        if self._held[0] != index:
            self._held = index, array("d", self._chunk(index).tobytes())
        return self._held[1]
