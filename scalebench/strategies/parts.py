"""Base of the strategies whose replicas have several workers, each with a part of the model.

`dividing` and `sharding` name the strategy that divides a model as a layout asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveInt

from scalebench.cluster.mesh import Mesh
from scalebench.comm.base import Capability
from scalebench.comm.engines import providing
from scalebench.errors import StudyError
from scalebench.formatting import counted
from scalebench.strategies import registry
from scalebench.strategies.allreduce import Allreduce
from scalebench.strategies.base import (
    Batch,
    Move,
    Recompute,
    Setting,
    Strategy,
    Synchronisation,
    Worker,
)
from scalebench.strategies.traits import Traits, Varied
from scalebench.study.spec import BY_LAYER, Component, Study

if TYPE_CHECKING:
    from torch import Tensor

    from scalebench.models.parts import Layer

Balance = Literal["even", "times"] | list[PositiveInt]
# Without a calibration a run counts operations, so that all ranks, and all machines, cut alike.
BALANCE = (
    "layers on each stage: equally many (even), as equal as can be (times) in the seconds of a calibration that the "
    "study names, else in counted operations, or a list of their numbers, as `plan` finds them"
)
Schedule = Literal["gpipe", "1f1b", "interleaved"]
SCHEDULE = "order of the micro-batches on a stage"
CHUNKS = "v: with schedule interleaved, groups of consecutive layers on each stage; `balance` is of all of them"


def whole_batch() -> Iterator[Move]:
    """Yield the moves of a stage that works on a whole batch."""
    yield Move(forward=True, micro_batch=0)
    yield Move(forward=False, micro_batch=0)


def scheduled(
    schedule: Schedule, stage: int, stages: int, micro_batches: int, chunks: int
) -> Iterator[Move]:
    """Yield the moves of a stage: forwards ahead, then a backward and a forward in turn, then the other backwards.

    With `chunks` of layers on each stage, as many micro-batches as there are stages go
    through all chunks of a stage before the next ones do; they come back in the same
    order, last chunks first (Megatron-LM, torch's Interleaved1F1B).
    """
    passes = []
    for first in range(0, micro_batches, stages):
        several = range(first, min(first + stages, micro_batches))
        passes += [(chunk, place) for chunk in range(chunks) for place in several]
    ahead = {
        "gpipe": micro_batches,
        "1f1b": stages - stage,
        # Megatron-LM's forwards ahead, and the first of those in turn
        "interleaved": (chunks - 1) * stages + 2 * (stages - stage) - 1,
    }[schedule]
    forwards = [Move(True, place, chunk) for chunk, place in passes]
    backwards = [Move(False, place, chunks - 1 - chunk) for chunk, place in passes]
    # of a smaller last batch: others could wait for ever
    if schedule == "interleaved" and micro_batches % stages:
        ahead = len(forwards)
    yield from forwards[:ahead]
    for number, backward in enumerate(backwards):
        yield backward
        yield from forwards[ahead + number : ahead + number + 1]


def require_balance(balance: Balance, stages: int, groups: int) -> None:
    """Check that a stated balance has a number for each group of layers.

    Raises:
        ValueError: it has others.
    """
    if isinstance(balance, list) and len(balance) != groups:
        chunks = f" of {groups // stages} chunks" if groups > stages else ""
        raise ValueError(
            f"balance: {len(balance)} numbers of layers for {stages} stages{chunks}; give one for each"
        )


def require_schedule(
    schedule: Schedule, stages: int, micro_batches: int, stated: Collection[str]
) -> None:
    """Check that there are micro-batches for a schedule, and that options of another one are not `stated`.

    Raises:
        ValueError: there are too few, they do not come in groups of as many as there are stages, or they are.
    """
    if schedule != "interleaved" and "chunks" in stated:
        raise ValueError(
            f"chunks has no effect with schedule {schedule}; write schedule: interleaved, or leave chunks out"
        )
    if schedule == "interleaved" and stages == 1:
        raise ValueError(
            "schedule interleaved needs 2 stages or more; use another schedule"
        )
    if schedule == "1f1b" and micro_batches < stages:
        raise ValueError(
            f"micro_batches: {micro_batches} for {stages} stages; schedule 1f1b needs at least as many, gpipe takes "
            "any number"
        )
    if schedule == "interleaved" and micro_batches % stages:
        raise ValueError(
            f"micro_batches: {micro_batches} for {stages} stages; schedule interleaved needs a multiple of them, 1f1b "
            "takes any number from there on"
        )


def balanced(work: Sequence[float], stages: int) -> list[int]:
    """Return how many of consecutive layers each stage gets, for the least work of the stage with most.

    Dynamic programming over the first j layers and k stages: L(j, k) = min_i max(L(i, k
    - 1), work of layers i to j). There are at least as many layers as stages.
    """
    layers, until = len(work), [0.0, *accumulate(work)]
    least = until  # of one stage, by the number of layers
    # layers before the last of two stages or more, by the number of layers
    cuts: list[list[int]] = []
    for before in range(1, stages):
        # of `before` + 1 stages, by the number of layers that these hold
        best, cut = [math.inf] * (layers + 1), [0] * (layers + 1)
        for last in range(before + 1, layers + 1):
            for first in range(before, last):
                most = max(least[first], until[last] - until[first])
                if most < best[last]:
                    best[last], cut[last] = most, first
        least = best
        cuts.append(cut)
    sizes, last = [], layers
    for cut in reversed(cuts):
        sizes.append(last - cut[last])
        last = cut[last]
    return [last, *reversed(sizes)]


def placed(work: Sequence[float], stages: int, balance: Balance) -> Sequence[int]:
    """Return the number of layers on each stage, of layers that take `work` of a step.

    `even` ones are as equal as possible, the first stages with one more.
    """
    if balance == "times":
        return balanced(work, stages)
    if balance == "even":
        whole, rest = divmod(len(work), stages)
        return [whole + (stage < rest) for stage in range(stages)]
    return balance


def with_default_batch(study: Study) -> Study:
    """Return `study` with a global batch if it states none and has replicas of several workers.

    Speedups compare runs at one global batch, and such a replica takes that of as many
    workers. It is the default batch of a worker, for each of the most workers.
    """
    # The default is no statement: a study that leaves it may get another batch.
    stated = study.model_fields_set & {"batch_per_worker", "batch_global"}
    strategies = (registry.create(each.name, each.options) for each in study.strategies)
    if stated or not any(
        isinstance(strategy, PartsOfModel) and strategy.replica().parts > 1
        for strategy in strategies
    ):
        return study
    assert study.batch_per_worker is not None
    batch = study.batch_per_worker * max(study.workers)
    return study.model_copy(update={"batch_per_worker": None, "batch_global": batch})


def with_measured_stages(
    study: Study, layer_seconds: Callable[[float], Sequence[float]]
) -> Study:
    """Return `study` with the numbers of layers in place of `balance: times`.

    `layer_seconds` gives the seconds of each layer at so many samples: those of a
    micro-batch among the most workers, so that all worker counts have the same stages.
    """
    workers, strategies = max(study.workers), []
    for each in study.strategies:
        strategy = registry.create(each.name, each.options)
        # Workers that do not divide into replicas are refused by `check`.
        if (
            isinstance(strategy, PartsOfModel)
            and each.options.get("balance") == "times"
            and strategy.replica().pipeline > 1
            and workers % strategy.replica().parts == 0
        ):
            replicas = workers // strategy.replica().parts
            batch = study.batch_per_worker or (study.batch_global or 1) / replicas
            work = layer_seconds(max(1.0, batch / strategy.pieces()))
            sizes = strategy.sizes_of(work)
            each = each.with_option("balance", list(sizes))
        strategies.append(each)
    return study.model_copy(update={"strategies": strategies})


def dividing(
    mesh: Mesh,
    micro_batches: int,
    schedule: Schedule | None,
    chunks: int,
    recompute: Recompute,
) -> Component:
    """Return the strategy of replicas as in `mesh`, whose stages, or chunks of layers on these, are cut by times.

    That is `tensor` without stages, `model_parallel` without a schedule, `pipeline`
    where each stage has one worker, else `hybrid`.
    """
    again: dict[str, object] = {"recompute": recompute} if recompute != "none" else {}
    if mesh.pipeline == 1:
        return Component(name="tensor", options={"degree": mesh.tensor, **again})
    by_times = {"balance": "times", **again}
    if schedule is None:
        options = {"stages": mesh.pipeline, **by_times}
        return Component(name="model_parallel", options=options)
    moves = {"micro_batches": micro_batches, **by_times}
    if schedule != "1f1b":
        moves["schedule"] = schedule
    if schedule == "interleaved":
        moves["chunks"] = chunks
    if mesh.tensor == 1:
        return Component(name="pipeline", options={"stages": mesh.pipeline, **moves})
    parts = {"pipeline": mesh.pipeline, "tensor": mesh.tensor}
    return Component(name="hybrid", options={**parts, **moves})


def sharding(shard: int) -> Component:
    """Return the strategy that divides optimizer states (1), gradients (2) and parameters (3), as option `shard`."""
    return Component(name="fsdp", options={"shard": shard})


class PartsOfModel(Strategy):
    """Replicas of several workers, which do with each part what allreduce does with whole models.

    Strategies differ in where layers go (`place`) and in the order in which
    micro-batches move (`order`).
    """

    requires = frozenset(
        {Capability.COLLECTIVES, Capability.SPLIT, Capability.POINT_TO_POINT}
    )
    engines = providing(Capability.SPLIT)
    name: ClassVar[str]

    recompute: Recompute = Field(
        "none",
        description="activations that are given up after a forward pass and computed again before the backward pass: "
        "none, those inside layers, or all but the input of a stage",
    )

    @property
    def rule(self) -> Strategy:
        """The strategy of the replicas, for each part."""
        return Allreduce()

    def replica(self) -> Mesh:
        """Return the mesh of one replica."""
        raise NotImplementedError

    # those that set its mesh, micro-batches and places, as `Traits.options`
    divides_by: ClassVar[tuple[tuple[Varied, str], ...]] = ()

    def pieces(self) -> int:
        """Return the micro-batches of a replica's batch."""
        return 1

    def groups(self) -> int:
        """Return the number of groups of consecutive layers that are dealt to the stages in turn."""
        return self.replica().pipeline

    def place(self, work: Sequence[float], groups: int) -> Sequence[int]:
        """Return the number of layers of each group, of layers that take `work` of a step, in any unit."""
        return placed(work, groups, "even")

    def order(self, stage: int, stages: int, micro_batches: int) -> Iterable[Move]:
        """Return the moves of a stage in one step."""
        raise NotImplementedError

    # --- the life of a strategy -------------------------------------------------------------------------------

    def setup(self, worker: Worker) -> None:
        if worker.mesh.parts > 1:
            # A lone worker, the base of a speedup, holds the whole model.
            sizes = self.place(worker.layer_work, self.groups())
            worker.take(sizes, self.order, self.pieces(), self.recompute)
        self.rule.setup(worker)

    def warm_up(self, worker: Worker, batch: Batch) -> None:
        self.rule.warm_up(worker, batch)

    def train(self, worker: Worker) -> None:
        self.rule.train(worker)

    def finish(self, worker: Worker) -> None:
        self.rule.finish(worker)

    def in_agreement(self, worker: Worker, epoch: int) -> bool | None:
        return self.rule.in_agreement(worker, epoch)

    def consensus(self, worker: Worker) -> Tensor:
        return self.rule.consensus(worker)

    # --- what others may rely on ------------------------------------------------------------------------------

    @property
    def traits(self) -> Traits:
        """Those of a strategy that changes the life above; one whose `place` and `order` are others repeats (below)."""
        return replace(self.repeated(), stretches=None)

    def repeated(self) -> Traits:
        """Return the traits of replicas that do with each part what `rule` does, whatever moves a step consists of."""
        mesh = self.replica()
        return replace(
            self.rule.traits,
            pipeline=mesh.pipeline,
            tensor=mesh.tensor,
            folded=mesh.folded,
            micro_batches=self.pieces(),
            # an interval of the rule is no option of this strategy
            options=dict(self.divides_by),
            # a part that is lost is held by no other worker of its replica
            resumes=mesh.parts == 1 and self.rule.traits.resumes,
        )

    @property
    def synchronisation(self) -> Synchronisation:
        return self.rule.synchronisation

    def check(self, setting: Setting) -> list[str]:
        workers, parts, pieces = setting.workers, self.replica().parts, self.pieces()
        if workers == 1 or parts == 1:
            return []
        if workers % parts:
            raise StudyError(
                f"strategy {self.name}: {parts} workers hold a replica, and {workers} are no multiple of {parts}; use "
                "other options, or other worker counts"
            )
        mesh = self.traits.mesh(workers)
        batch, of = setting.training.batch_per_worker, "batch_per_worker"
        if batch is None:
            together = setting.training.batch_global or 0
            batch, of = (
                together // mesh.data,
                f"a replica's share of batch_global {together},",
            )
        if batch % pieces:
            raise StudyError(
                f"strategy {self.name}: {pieces} micro-batches do not divide {of} {batch}; use a divisor of {batch}"
            )
        optimizer = setting.training.optimizer.name
        if mesh.tensor > 1 and optimizer in BY_LAYER:
            raise StudyError(
                f"strategy {self.name}: optimizer {optimizer} needs whole layers, of which a worker holds a "
                "share; use sgd, adam or adamw"
            )
        # Known once the model has been built, behind the first checks.
        if setting.layer_work is not None:
            sizes = self.sizes_of(setting.layer_work)
            if setting.layers is not None:
                self.require_shares(setting.layers, sizes, mesh)
        if setting.training.batch_per_worker is None:
            return []
        return [
            f"{mesh.parts} workers hold a replica, which takes the batches of one worker: the base of its speedup is "
            f"serial at a global batch of {batch * mesh.data}; state batch_global, which all worker counts then share"
        ]

    def require_shares(
        self, layers: Sequence[Layer], sizes: Sequence[int], mesh: Mesh
    ) -> None:
        """Check that the workers of each stage can share its layers, in groups of `sizes`.

        Raises:
            ModelError: one cannot be divided among them.
        """
        from scalebench.models.sharding import held_by

        # One of each stage: the shares of its workers are equal.
        for part in range(0, mesh.parts, mesh.tensor):
            held_by(layers, sizes, mesh, part, "of the study")

    def sizes_of(self, work: Sequence[float]) -> Sequence[int]:
        """Return the number of layers of each group, of layers that take `work` of a step.

        Raises:
            StudyError: there are fewer than groups, or others than were stated.
        """
        count, groups, stages = len(work), self.groups(), self.replica().pipeline
        if count < groups:
            chunks = f" of {groups // stages} chunks" if groups > stages else ""
            most = counted(count, "chunk" if chunks else "stage")
            # a module that is one piece to scalebench may have many inside
            listed = (
                ""
                if count > 1
                else ", or let a method layers() of it return its modules"
            )
            raise StudyError(
                f"strategy {self.name}: {stages} stages{chunks} for a model of {counted(count, 'layer')} with "
                f"parameters; use at most {most}{' in all' * bool(chunks)}{listed}"
            )
        sizes = self.place(work, groups)
        if sum(sizes) != count:
            raise StudyError(
                f"strategy {self.name}: option 'balance': {list(sizes)} places {sum(sizes)} layers, and the model has "
                f"{count} with parameters; the numbers have to add up to these"
            )
        return sizes
