"""What an engine itself costs per operation: measured natively from synthetic buffers, read between the points."""

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
from scalebench.study.validation import explain

_NOISE = 1.05  # a cost that is this much lower than it can be is measured again
MARK = "scalebench-costs "  # begins the line in which a probe prints them: mpirun prints others


class EngineCost(BaseModel):
    """One engine's allreduce at one rank count, and what it adds besides moving bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str
    ranks: PositiveInt
    nodes: PositiveInt = Field(1, description="over which its ranks were spread evenly")
    alpha_s: NonNegativeFloat = Field(description="seconds of one operation on a few bytes")
    message_s: NonNegativeFloat | None = Field(
        None, description="the part of alpha_s that each further message costs: the least that was measured"
    )
    points: list[tuple[NonNegativeFloat, NonNegativeFloat]] = Field(
        default_factory=list, description="(bytes, seconds) of one blocking allreduce, ascending in bytes"
    )
    negotiation_s: NonNegativeFloat = Field(0.0, description="agreeing on what is ready, per operation (Horovod)")
    cycle_s: NonNegativeFloat = Field(0.0, description="pause between looks for ready tensors (Horovod)")
    per_step_s: NonNegativeFloat = Field(
        0.0, description="bookkeeping per training step, such as DDP's hooks and copies"
    )
    alone_s: NonNegativeFloat = Field(
        0.0, description="what its step takes beyond a plain one at one worker, who has nobody to talk to"
    )
    disturbed: bool = Field(False, description="other programs took the cores in nearly every window")
    source: str = Field(min_length=3, description="how, where and with which versions it was measured")

    @field_validator("points")
    @classmethod
    def _ascending(cls, points: list[tuple[float, float]]) -> list[tuple[float, float]]:
        sizes = [size for size, _ in points]
        if sizes != sorted(set(sizes)):
            raise ValueError("expected points in ascending order of bytes, each size once")
        return points

    def seconds(self, nbytes: float) -> float:
        """Cost of one allreduce of `nbytes`: straight lines between the points, never falling with `nbytes`.

        A point that lies below a smaller one (noise) counts as that one. Below the first point the cost is between
        alpha_s and it; above the last it goes on with the slope between the last two that differ by a factor of two
        or more, in bytes.
        """
        if not self.points:
            return self.alpha_s
        sizes, costs = self._curve()
        if nbytes >= sizes[-1]:
            return costs[-1] + (nbytes - sizes[-1]) * self._last_slope(sizes, costs)
        after = bisect_left(sizes, nbytes)
        left = (0.0, min(self.alpha_s, costs[0])) if after == 0 else (sizes[after - 1], costs[after - 1])
        share = (nbytes - left[0]) / (sizes[after] - left[0]) if sizes[after] > left[0] else 1.0
        return left[1] + share * (costs[after] - left[1])

    def small_s(self, messages: int) -> float:
        """Cost of one operation on a few bytes that takes so many messages one after the other, links left out."""
        each = self.alpha_s if self.message_s is None else min(self.message_s, self.alpha_s)
        return self.alpha_s + (messages - 1) * each if messages else 0.0

    def at(self, factor: float) -> EngineCost:
        """The same on a machine whose reference step takes `factor` times as long.

        Horovod's cycle is a timer, and collectives of gloo wait for the scheduler: these do not follow the machine's
        speed. Neither do links between nodes.
        """
        if self.nodes > 1:
            return self
        scaled: dict[str, object] = {
            name: getattr(self, name) * factor for name in ("negotiation_s", "per_step_s", "alone_s")
        }
        if self.engine != "gloo":
            points = [(nbytes, seconds * factor) for nbytes, seconds in self.points]
            message_s = None if self.message_s is None else self.message_s * factor
            scaled |= {"alpha_s": self.alpha_s * factor, "message_s": message_s, "points": points}
        return self.model_copy(update=scaled)

    def falls_below(self, fewer: EngineCost) -> bool:
        """Whether some message costs less among these ranks than among `fewer`: a contradiction, but for noise."""
        mine = dict(self.points)
        return any(mine.get(nbytes, seconds) < seconds / _NOISE for nbytes, seconds in fewer.points)

    def at_least(self, fewer: EngineCost) -> EngineCost:
        """The same, no message of it cheaper than among `fewer` ranks."""
        known = dict(fewer.points)
        points = [(nbytes, max(seconds, known.get(nbytes, 0.0))) for nbytes, seconds in self.points]
        return self.model_copy(update={"points": points, "alpha_s": max(self.alpha_s, fewer.alpha_s)})

    def _curve(self) -> tuple[list[float], list[float]]:
        costs: list[float] = []
        for _, cost in self.points:
            costs.append(max(cost, costs[-1] if costs else 0.0))
        return [size for size, _ in self.points], costs

    @staticmethod
    def _last_slope(sizes: list[float], costs: list[float]) -> float:
        for size, cost in zip(reversed(sizes), reversed(costs), strict=True):
            if 0 < size * 2 <= sizes[-1]:
                return (costs[-1] - cost) / (sizes[-1] - size)
        return costs[-1] / sizes[-1] if sizes[-1] else 0.0


class EngineCosts(BaseModel):
    """The engines' costs on one machine, one entry per engine and rank count."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    entries: list[EngineCost] = Field(default_factory=list)
    others_load: float | None = Field(None, description="share of the cores that other programs took meanwhile")
    reference_s: PositiveFloat | None = Field(
        None, description="seconds of the reference step while they were measured"
    )

    def of(self, engine: str, ranks: int = 2, nodes: int = 1) -> EngineCost:
        """The entry of `engine` measured nearest to `nodes`, then to `ranks`; one node and several are never mixed.

        Raises:
            ClusterError: the engine was not measured.
        """
        known = self._known(engine, nodes)
        if not known:
            names = {entry.engine for entry in self.entries}
            raise ClusterError(f"no measured costs of engine {engine!r}; {nearest(engine, names)}")
        return min(known, key=lambda entry: (abs(entry.nodes - nodes), abs(entry.ranks - ranks), entry.ranks))

    @property
    def disturbed(self) -> frozenset[str]:
        """The engines whose costs were measured beside programs that took the cores all the time."""
        return frozenset(entry.engine.partition("-")[0] for entry in self.entries if entry.disturbed)

    def has(self, engine: str, nodes: int = 1) -> bool:
        """Whether the engine was measured: on one node, or between several if `nodes` are several."""
        return bool(self._known(engine, nodes))

    def _known(self, engine: str, nodes: int) -> list[EngineCost]:
        return [entry for entry in self.entries if entry.engine == engine and (entry.nodes > 1) == (nodes > 1)]

    def at(self, reference_s: float) -> EngineCosts:
        """These costs at the machine speed at which the reference step takes `reference_s`."""
        if self.reference_s is None:
            return self
        factor = reference_s / self.reference_s
        entries = [entry.at(factor) for entry in self.entries]
        return self.model_copy(update={"entries": entries, "reference_s": reference_s})

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f"{path.suffix}.part")
        part.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> EngineCosts:
        """Read what `save` wrote.

        Raises:
            ClusterError: the file cannot be read or does not fit.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ClusterError(f"cannot read the engine costs {str(path)!r}: {error.strerror}") from None
        except ValidationError as error:
            raise ClusterError(f"{explain(error, cls, str(path))}; delete the file to measure again") from None


def joined(parts: list[EngineCosts]) -> EngineCosts:
    """The entries of several measurements, at the reference step of the first that has one."""
    known = [part.reference_s for part in parts if part.reference_s is not None]
    reference_s = known[0] if known else None
    entries = [entry for part in parts for entry in (part.at(reference_s) if reference_s else part).entries]
    return EngineCosts(entries=entries, reference_s=reference_s)


def falls_below(more: EngineCosts, fewer: EngineCosts) -> bool:
    """Whether an operation costs less among `more` ranks than among `fewer`, at one machine speed."""
    return any(own.falls_below(other) for own, other in _pairs(more, fewer))


def at_least(more: EngineCosts, fewer: EngineCosts) -> EngineCosts:
    """`more` with no operation cheaper than among `fewer` ranks, at one machine speed."""
    entries = [own.at_least(other) for own, other in _pairs(more, fewer)]
    return more.model_copy(update={"entries": entries})


def _pairs(more: EngineCosts, fewer: EngineCosts) -> list[tuple[EngineCost, EngineCost]]:
    """Entries of the same operations, `fewer` at the machine speed of `more`."""
    known = {entry.engine: entry for entry in (fewer.at(more.reference_s) if more.reference_s else fewer).entries}
    return [(entry, known.get(entry.engine, entry)) for entry in more.entries]
