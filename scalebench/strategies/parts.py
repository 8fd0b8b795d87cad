"""Base of the strategies whose replicas have several workers, each with a part of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from scalebench.cluster.mesh import Mesh
from scalebench.comm.base import Capability
from scalebench.errors import StudyError
from scalebench.strategies import registry
from scalebench.strategies.allreduce import Allreduce
from scalebench.strategies.base import Batch, Move, Setting, Strategy, Synchronisation, Worker
from scalebench.strategies.traits import Traits
from scalebench.study.spec import BY_LAYER, Study

if TYPE_CHECKING:
    from torch import Tensor

    from scalebench.models.parts import Layer


def whole_batch() -> Iterator[Move]:
    """Yield the moves of a stage that works on a whole batch."""
    yield Move(forward=True, micro_batch=0)
    yield Move(forward=False, micro_batch=0)


def with_forwards_ahead(ahead: int, micro_batches: int) -> Iterator[Move]:
    """Yield `ahead` forwards, then a backward and a forward in turn, then the other backwards."""
    for place in range(ahead):
        yield Move(forward=True, micro_batch=place)
    for place in range(micro_batches):
        yield Move(forward=False, micro_batch=place)
        if ahead + place < micro_batches:
            yield Move(forward=True, micro_batch=ahead + place)


def with_default_batch(study: Study) -> Study:
    """Return `study` with a global batch if it states none and has replicas of several workers.

    Speedups compare runs at one global batch, and such a replica takes that of as many workers. It is the default batch
    of a worker, for each of the most workers.
    """
    stated = study.model_fields_set & {"batch_per_worker", "batch_global"}
    strategies = (registry.create(each.name, each.options) for each in study.strategies)
    if stated or not any(isinstance(strategy, PartsOfModel) for strategy in strategies):
        return study
    assert study.batch_per_worker is not None
    batch = study.batch_per_worker * max(study.workers)
    return study.model_copy(update={"batch_per_worker": None, "batch_global": batch})


class PartsOfModel(Strategy):
    """Replicas of several workers, which do with each part what allreduce does with whole models.

    Strategies differ in where layers go (`place`) and in the order in which micro-batches move (`order`).
    """

    requires: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.COLLECTIVES, Capability.SPLIT, Capability.POINT_TO_POINT}
    )
    engines: ClassVar[tuple[str, ...]] = ("mpi", "gloo", "nccl")
    name: ClassVar[str]

    @property
    def rule(self) -> Strategy:
        """The strategy of the replicas, for each part."""
        return Allreduce()

    def replica(self) -> Mesh:
        """Return the mesh of one replica."""
        raise NotImplementedError

    def pieces(self) -> int:
        """Return the micro-batches of a replica's batch."""
        return 1

    def place(self, layers: int, stages: int) -> Sequence[int]:
        """Return the number of layers on each stage: as equal as possible, the first stages with one more."""
        whole, rest = divmod(layers, stages)
        return [whole + (stage < rest) for stage in range(stages)]

    def order(self, stage: int, stages: int, micro_batches: int) -> Iterable[Move]:
        """Return the moves of a stage in one step."""
        raise NotImplementedError

    # --- the life of a strategy -------------------------------------------------------------------------------

    def setup(self, worker: Worker) -> None:
        if worker.mesh.parts > 1:
            sizes = self.place(worker.layers, worker.mesh.pipeline)
            worker.take(sizes, self.order, self.pieces())
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
        return replace(self.rule.traits, pipeline=mesh.pipeline, tensor=mesh.tensor, micro_batches=self.pieces())

    @property
    def synchronisation(self) -> Synchronisation:
        return self.rule.synchronisation

    def check(self, setting: Setting) -> list[str]:
        workers, parts, pieces = setting.workers, self.replica().parts, self.pieces()
        if workers == 1:
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
            batch, of = together // mesh.data, f"a replica's share of batch_global {together},"
        if batch % pieces:
            raise StudyError(
                f"strategy {self.name}: {pieces} micro-batches do not divide {of} {batch}; use a divisor of {batch}"
            )
        optimizer = setting.training.optimizer.name
        if mesh.tensor > 1 and optimizer in BY_LAYER:
            raise StudyError(
                f"strategy {self.name}: optimizer {optimizer} takes the norms of whole layers, of which a worker holds "
                "a share; use sgd, adam or adamw"
            )
        if setting.layers is not None:
            self.require_layers(setting.layers, mesh)
        elif setting.layer_count is not None:
            self.require_count(setting.layer_count, mesh)
        if setting.training.batch_per_worker is None:
            return []
        return [
            f"{mesh.parts} workers hold a replica, which takes the batches of one worker: the base of its speedup is "
            f"serial at a global batch of {batch * mesh.data}; state batch_global, which all worker counts then share"
        ]

    def require_layers(self, layers: Sequence[Layer], mesh: Mesh) -> None:
        """Check that the layers of a model can be placed on the workers of a replica.

        Raises:
            StudyError: there are fewer than stages, or others than were stated.
            ModelError: one cannot be divided among the workers of a stage.
        """
        sizes = self.require_count(len(layers), mesh)
        from scalebench.models.sharding import held_by

        for part in range(0, mesh.parts, mesh.tensor):
            held_by(layers, sizes, mesh, part, "of the study")

    def require_count(self, count: int, mesh: Mesh) -> Sequence[int]:
        """Return the number of layers on each stage, of `count`.

        Raises:
            StudyError: there are fewer than stages, or others than were stated.
        """
        if count < mesh.pipeline:
            raise StudyError(
                f"strategy {self.name}: {mesh.pipeline} stages for a model of {count} layers with parameters; use at "
                f"most {count} stages"
            )
        sizes = self.place(count, mesh.pipeline)
        if sum(sizes) != count:
            raise StudyError(
                f"strategy {self.name}: option 'balance': {list(sizes)} places {sum(sizes)} layers, and the model has "
                f"{count} with parameters; the numbers have to add up to these"
            )
        return sizes
