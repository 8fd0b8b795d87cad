"""Cost of each operation of an engine, measured natively with synthetic buffers and interpolated."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
)

from scalebench.errors import ClusterError, nearest
from scalebench.study.choices import SCHEDULED
from scalebench.study.validation import explain
from scalebench.system.file_access import read_bytes, write_atomic

_NOISE = 1.05  # factor below the lower bound from which a cost is measured again
# prefix of the output line of a probe, among other lines of mpirun
MARK = "scalebench-costs "


class EngineCost(BaseModel):
    """Costs of one engine at one rank count: allreduce, and overheads besides moving bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    engine: str
    ranks: PositiveInt
    nodes: PositiveInt = Field(1, description="nodes with an equal number of ranks")
    alpha_s: NonNegativeFloat = Field(
        description="seconds of one operation on a few bytes"
    )
    message_s: NonNegativeFloat | None = Field(
        None,
        description="part of alpha_s for each further message: the least measured value",
    )
    points: list[tuple[NonNegativeFloat, NonNegativeFloat]] = Field(
        default_factory=list,
        description="(bytes, seconds) of one blocking allreduce, ascending in bytes",
    )
    negotiation_s: NonNegativeFloat = Field(
        0.0,
        description="one worker's part of a turn that reduces: waking up, queues, copies (Horovod)",
    )
    cycle_s: NonNegativeFloat = Field(
        0.0, description="cycle time between checks for ready tensors (Horovod)"
    )
    cycle_spread_s: NonNegativeFloat = Field(
        0.0, description="standard deviation of a cycle's length (Horovod)"
    )
    per_step_s: NonNegativeFloat = Field(
        0.0, description="bookkeeping per training step, such as DDP's hooks and copies"
    )
    alone_s: NonNegativeFloat = Field(
        0.0,
        description="excess of its step over a plain step at one worker, without communication",
    )
    pause_s: NonNegativeFloat = Field(
        0.0,
        description="excess of an operation before which its ranks slept, as in steps of a stated device",
    )
    stated: bool = Field(
        False,
        description="of few bytes, typical elsewhere: links are charged for what is sent",
    )
    disturbed: bool = Field(
        False, description="other programs took the cores in nearly every window"
    )
    source: str = Field(
        min_length=3,
        description="method, place and versions of the measurement; or who states it",
    )

    @field_validator("points")
    @classmethod
    def _ascending(cls, points: list[tuple[float, float]]) -> list[tuple[float, float]]:
        # Interpolation looks a size up by bisection.
        sizes = [size for size, _ in points]
        if sizes != sorted(set(sizes)):
            raise ValueError(
                "expected points in ascending order of bytes, each size once"
            )
        return points

    def seconds(self, nbytes: float) -> float:
        """Return the cost of one allreduce of `nbytes`, interpolated linearly and monotone in `nbytes`.

        A point with a lower cost than a smaller one (noise) is raised to it. Below the
        first point the cost lies between alpha_s and that point; above the last it
        continues with the slope between the last two points that differ by a factor of
        two or more in bytes.
        """
        if not self.points:
            return self.alpha_s
        sizes, costs = self._curve()
        if nbytes >= sizes[-1]:
            return costs[-1] + (nbytes - sizes[-1]) * self._last_slope(sizes, costs)
        after = bisect_left(sizes, nbytes)
        if after == 0:
            size, cost = 0.0, min(self.alpha_s, costs[0])
        else:
            size, cost = sizes[after - 1], costs[after - 1]
        share = (nbytes - size) / (sizes[after] - size) if sizes[after] > size else 1.0
        return cost + share * (costs[after] - cost)

    def small_s(self, messages: int) -> float:
        """Return the cost of one operation on a few bytes with `messages` sequential messages, without links."""
        each = (
            self.alpha_s
            if self.message_s is None
            # A message is a part of an operation, though the two were measured apart.
            else min(self.message_s, self.alpha_s)
        )
        return self.alpha_s + (messages - 1) * each if messages else 0.0

    def after_a_pause(self) -> EngineCost:
        """Return the costs of operations before which their ranks slept; messages within one are not delayed again."""
        points = [(nbytes, seconds + self.pause_s) for nbytes, seconds in self.points]
        message_s = self.alpha_s if self.message_s is None else self.message_s
        return self.model_copy(
            update={
                "alpha_s": self.alpha_s + self.pause_s,
                "message_s": message_s,
                "points": points,
                "pause_s": 0.0,
            }
        )

    def at(self, factor: float) -> EngineCost:
        """Return the costs on a machine whose reference step takes `factor` times as long.

        Horovod's cycle is a timer, operations of gloo (`SCHEDULED`) wait for the
        scheduler, and links between nodes have their own speed: these do not scale with
        the speed of the machine.
        """
        if self.nodes > 1:
            return self
        scaled: dict[str, object] = {
            name: getattr(self, name) * factor
            for name in ("negotiation_s", "per_step_s", "alone_s")
        }
        # Entries as `gloo-send` are of the engine before the dash.
        if self.engine.partition("-")[0] not in SCHEDULED:
            points = [(nbytes, seconds * factor) for nbytes, seconds in self.points]
            message_s = None if self.message_s is None else self.message_s * factor
            scaled |= {
                "alpha_s": self.alpha_s * factor,
                "message_s": message_s,
                "points": points,
            }
        return self.model_copy(update=scaled)

    def falls_below(self, fewer: EngineCost) -> bool:
        """Return True if a message costs less than among `fewer` ranks by more than noise."""
        mine = dict(self.points)
        return any(
            mine.get(nbytes, seconds) < seconds / _NOISE
            for nbytes, seconds in fewer.points
        )

    def at_least(self, fewer: EngineCost) -> EngineCost:
        """Return the costs, each raised to that among `fewer` ranks."""
        known = dict(fewer.points)
        points = [
            (nbytes, max(seconds, known.get(nbytes, 0.0)))
            for nbytes, seconds in self.points
        ]
        return self.model_copy(
            update={"points": points, "alpha_s": max(self.alpha_s, fewer.alpha_s)}
        )

    def _curve(self) -> tuple[list[float], list[float]]:
        costs: list[float] = []
        for _, cost in self.points:
            costs.append(max(cost, costs[-1] if costs else 0.0))
        return [size for size, _ in self.points], costs

    @staticmethod
    def _last_slope(sizes: list[float], costs: list[float]) -> float:
        for size, cost in zip(reversed(sizes), reversed(costs), strict=True):
            # Sizes nearer to each other would give the slope of their noise.
            if 0 < size * 2 <= sizes[-1]:
                return (costs[-1] - cost) / (sizes[-1] - size)
        return costs[-1] / sizes[-1] if sizes[-1] else 0.0


class EngineCosts(BaseModel):
    """Costs of engines on one machine, one entry per engine and rank count."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    entries: list[EngineCost] = Field(default_factory=list)
    others_load: float | None = Field(
        None, description="share of cores used by other programs meanwhile"
    )
    reference_s: PositiveFloat | None = Field(
        None, description="seconds of the reference step during the measurement"
    )

    def of(self, engine: str, ranks: int = 2, nodes: int = 1) -> EngineCost:
        """Return the entry of `engine` nearest to `nodes`, then to `ranks`; one node and several are never mixed.

        Raises:
            ClusterError: the engine was not measured.
        """
        known = self._known(engine, nodes)
        if not known:
            names = {entry.engine for entry in self.entries}
            raise ClusterError(
                f"no measured costs of engine {engine!r}; {nearest(engine, names)}"
            )

        def distance(entry: EngineCost) -> tuple[int, int, int]:
            # Of two that are equally near the smaller, whatever the order of entries.
            return abs(entry.nodes - nodes), abs(entry.ranks - ranks), entry.ranks

        return min(known, key=distance)

    def after_pauses(self) -> EngineCosts:
        """Return the costs among ranks that sleep until the steps of a stated device would end."""
        entries = [entry.after_a_pause() for entry in self.entries]
        return self.model_copy(update={"entries": entries})

    @property
    def disturbed(self) -> frozenset[str]:
        """Engines measured while other programs used the cores all the time."""
        return frozenset(
            entry.engine.partition("-")[0] for entry in self.entries if entry.disturbed
        )

    def measured(self, engine: str) -> list[EngineCost]:
        """Return the entries of an engine that were measured, which may be none."""
        return [
            entry
            for entry in self.entries
            if entry.engine == engine and not entry.stated
        ]

    def has(self, engine: str, nodes: int = 1) -> bool:
        """Return True if the cost of the engine is known on one node or, for `nodes` > 1, on several."""
        return bool(self._known(engine, nodes))

    def _known(self, engine: str, nodes: int) -> list[EngineCost]:
        return [
            entry
            for entry in self.entries
            # Shared memory says nothing of a network, nor the reverse.
            if entry.engine == engine and (entry.nodes > 1) == (nodes > 1)
        ]

    def with_stated(self, entry: EngineCost) -> EngineCosts:
        """Return these costs with `entry` as the only one of its engine."""
        others = [each for each in self.entries if each.engine != entry.engine]
        return self.model_copy(update={"entries": [*others, entry]})

    def at(self, reference_s: float) -> EngineCosts:
        """Return the costs at the machine speed at which the reference step takes `reference_s`."""
        if self.reference_s is None:
            return self
        factor = reference_s / self.reference_s
        entries = [entry.at(factor) for entry in self.entries]
        return self.model_copy(update={"entries": entries, "reference_s": reference_s})

    def save(self, path: Path) -> None:
        """Write the costs atomically as JSON."""
        write_atomic(path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> EngineCosts:
        """Read a file written by `save`.

        Raises:
            ClusterError: the file cannot be read or is invalid.
        """
        try:
            return cls.model_validate_json(read_bytes(path))
        except OSError as error:
            raise ClusterError(
                f"cannot read the engine costs {str(path)!r}: {error.strerror}"
            ) from None
        except ValidationError as error:
            raise ClusterError(
                f"{explain(error, cls, str(path))}; delete the file to measure again"
            ) from None


def joined(parts: list[EngineCosts]) -> EngineCosts:
    """Return the entries of several measurements at the reference step of the first that has one."""
    known = [part.reference_s for part in parts if part.reference_s is not None]
    reference_s = known[0] if known else None
    entries = [
        entry
        for part in parts
        for entry in (part.at(reference_s) if reference_s else part).entries
    ]
    return EngineCosts(entries=entries, reference_s=reference_s)


def falls_below(more: EngineCosts, fewer: EngineCosts) -> bool:
    """Return True if an operation costs less among `more` ranks than among `fewer`, at one machine speed."""
    return any(own.falls_below(other) for own, other in _pairs(more, fewer))


def at_least(more: EngineCosts, fewer: EngineCosts) -> EngineCosts:
    """Return `more` with each cost raised to that among `fewer` ranks, at one machine speed."""
    entries = [own.at_least(other) for own, other in _pairs(more, fewer)]
    return more.model_copy(update={"entries": entries})


def _pairs(
    more: EngineCosts, fewer: EngineCosts
) -> list[tuple[EngineCost, EngineCost]]:
    """Return pairs of entries of one engine, `fewer` at the machine speed of `more`."""
    # At one speed of the machine, or a faster moment would look like cheaper messages.
    known = {
        entry.engine: entry
        for entry in (fewer.at(more.reference_s) if more.reference_s else fewer).entries
    }
    return [(entry, known.get(entry.engine, entry)) for entry in more.entries]
