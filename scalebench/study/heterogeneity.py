"""How workers and links differ from one another, and how virtual runs are timed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, model_validator

from scalebench.errors import StudyError
from scalebench.study.jitter import MOST_SIGMA, STATED
from scalebench.study.strict import StrictModel


class SlowWindow(StrictModel):
    """A worker computes `factor` times as long between two moments of the training time."""

    rank: NonNegativeInt
    from_s: float = Field(0.0, ge=0, description="seconds after training began")
    until_s: PositiveFloat
    factor: PositiveFloat

    @model_validator(mode="after")
    def _has_a_length(self) -> SlowWindow:
        if self.until_s <= self.from_s:
            raise ValueError(f"a window from {self.from_s:g} s until {self.until_s:g} s is empty")
        return self


def _link_name(key: Any) -> str:
    """`3`: the cards of node 3; `0-2`: the way between nodes 0 and 2, whichever is said first."""
    ends = str(key).split("-")
    if len(ends) > 2 or not all(end.isdecimal() for end in ends) or len(set(ends)) < len(ends):
        raise ValueError(f"expected a node, such as 3, or two of them, such as 0-2; got {key!r}")
    return "-".join(sorted(ends, key=int))


SlowLinks = dict[Annotated[str, BeforeValidator(_link_name)], Annotated[float, Field(ge=1)]]


class Heterogeneity(StrictModel):
    """How workers and links differ; a study says it of its runs, a cluster file of the cluster."""

    jitter: Literal["measured", "none", "normal", "lognormal", "exponential"] = "measured"
    jitter_sigma: float = Field(
        0.05, ge=0, le=10, description="standard deviation of a stated jitter, relative to a step's mean time"
    )
    slowdown: dict[NonNegativeInt, PositiveFloat] = Field(
        default_factory=dict, description="compute factor per worker rank"
    )
    slow_windows: list[SlowWindow] = Field([], description="compute factors of workers for a while")
    slow_links: SlowLinks = Field(
        {}, description="node, or node-node: how many times slower its cards, or the way between them, are"
    )

    @model_validator(mode="after")
    def _steps_take_time(self) -> Heterogeneity:
        if fault := self.too_wide():
            raise ValueError(fault)
        return self

    def too_wide(self) -> str:
        """What is wrong with a jitter so wide that steps would take less than no time; empty: nothing."""
        most = MOST_SIGMA.get(self.jitter, self.jitter_sigma)
        if self.jitter_sigma <= most:
            return ""
        return (
            f"jitter {self.jitter} takes a jitter_sigma of at most {most:g}, got {self.jitter_sigma:g}; use lognormal"
        )

    def in_words(self, workers: int) -> list[str]:
        """What is uneven at so many workers, a clause each; a jitter only where its law is stated."""
        said = [f"worker {rank} {by:g} times as slow" for rank, by in sorted(self.slowdown.items()) if rank < workers]
        said += [
            f"worker {window.rank} {window.factor:g} times as slow from {window.from_s:g} to {window.until_s:g} s"
            for window in self.slow_windows
            if window.rank < workers
        ]
        for link, by in self.slow_links.items():
            one, _, other = link.partition("-")
            where = f"the way between nodes {one} and {other}" if other else f"the cards of node {one}"
            said.append(f"{where} {by:g} times as slow")
        if self.jitter in STATED and self.jitter_sigma:
            said.append(f"{self.jitter} jitter of {self.jitter_sigma:g}")
        return said

    def slowness(self, rank: int) -> Callable[[float], float] | None:
        """The windows' factor on what worker `rank` begins to compute at a moment (s); None if it has no window."""
        windows = [window for window in self.slow_windows if window.rank == rank]

        def factor(now: float) -> float:
            return math.prod(window.factor for window in windows if window.from_s <= now < window.until_s)

        return factor if windows else None


class VirtualOptions(Heterogeneity):
    """How virtual runs are timed; of it paced runs have what is uneven too, and a jitter only if stated."""

    engine: Literal["auto", "mpi", "horovod", "gloo", "nccl"] = Field(
        "auto", description="native engine by whose costs a strategy's collectives are charged; auto: its preferred one"
    )
    collective: Literal["auto", "ring", "recursive_doubling", "rabenseifner", "tree", "hierarchical"] = "auto"
    ties: Literal["seeded", "rank"] = "seeded"

    def over(self, cluster: Heterogeneity) -> VirtualOptions:
        """These options, and of the `cluster` what they leave unsaid.

        Raises:
            StudyError: the two do not go together.
        """
        said = {name: getattr(cluster, name) for name in cluster.model_fields_set - self.model_fields_set}
        both = self.model_copy(update=said)
        if fault := both.too_wide() or self._of_no_jitter(both.jitter):
            raise StudyError(f"virtual: {fault}")
        return both

    def _of_no_jitter(self, jitter: str) -> str:
        """What is wrong with a deviation said beside a `jitter` that takes none; a file with all defaults says 0.05."""
        sigma = self.jitter_sigma
        if jitter in STATED or sigma == type(self).model_fields["jitter_sigma"].default:
            return ""
        laws = " or ".join([", ".join(STATED[:-1]), STATED[-1]])
        return f"jitter_sigma {sigma:g} has no effect with jitter: {jitter}; write jitter: {laws}"
