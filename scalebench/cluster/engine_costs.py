"""What an engine itself costs per operation: measured natively from synthetic buffers, read between the points."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt, ValidationError, field_validator

from scalebench.errors import ClusterError, nearest
from scalebench.study.validation import explain


class EngineCost(BaseModel):
    """One engine's allreduce at one rank count, and what it adds besides moving bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str
    ranks: PositiveInt
    alpha_s: NonNegativeFloat = Field(description="seconds of one operation on a few bytes")
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

    def of(self, engine: str, ranks: int = 2) -> EngineCost:
        """The entry of `engine` measured nearest to `ranks`.

        Raises:
            ClusterError: the engine was not measured.
        """
        known = [entry for entry in self.entries if entry.engine == engine]
        if not known:
            names = {entry.engine for entry in self.entries}
            raise ClusterError(f"no measured costs of engine {engine!r}; {nearest(engine, names)}")
        return min(known, key=lambda entry: (abs(entry.ranks - ranks), entry.ranks))

    def has(self, engine: str) -> bool:
        """Whether the engine was measured."""
        return any(entry.engine == engine for entry in self.entries)

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
