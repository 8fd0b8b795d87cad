"""Programs of trainings, recorded without training: of worker counts, batches and strategies, as far as they repeat."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import cast

import torch

from scalebench.cluster.mesh import Mesh
from scalebench.data.batch_plan import BatchPlan
from scalebench.errors import ModelError, StudyError
from scalebench.models.flat import to_meta
from scalebench.models.registry import build_model
from scalebench.models.zoo.layers import without_values
from scalebench.pricing import program
from scalebench.pricing.exchanges import Serving
from scalebench.pricing.held_parts import TableCut
from scalebench.pricing.platform import Platform
from scalebench.pricing.recording import record_each
from scalebench.pricing.schedule import RankGroups, Schedule
from scalebench.pricing.workload import SERIAL, Workload
from scalebench.strategies import registry
from scalebench.strategies.base import Setting, Strategy
from scalebench.strategies.traits import Traits
from scalebench.study.spec import Component, Run

_SAMPLED_RANKS = 16  # recorded where ranks differ by chance, as clients that are drawn
_MOST_STEPS = 5_000_000  # of a program that is recorded whole: about a minute and 3 GB


@dataclass(frozen=True, eq=False)
class Recorded:
    """The programs of the recorded workers in an excerpt, for each length of an epoch, and their schedules of one."""

    excerpt: program.Excerpt
    programs: list[list[program.Program]]
    workers: int
    serving: Serving | None
    schedules: list[Schedule]

    @property
    def schedule(self) -> Schedule:
        return self.schedules[0]


class RecordedTrainings:
    """The recorded programs of trainings of one workload, by strategy and worker count; kept between calls.

    Of the `platform` its nodes count, and its device where a model is cut by times.
    """

    def __init__(self, workload: Workload, platform: Platform) -> None:
        self.workload, self.platform = workload, platform
        self._programs: dict[object, Recorded] = {}
        self._strategies: dict[str, Strategy] = {}
        self._cuts: dict[int, TableCut] = {}

    def strategy(self, component: Component) -> Strategy:
        """Return the strategy of that name with these options."""
        key = str(component)
        if key not in self._strategies:
            self._strategies[key] = registry.create(
                component.name, component.options, "virtual"
            )
        return self._strategies[key]

    def schedule(self, strategy: Component, workers: int) -> Schedule:
        """Return a schedule of the excerpt, which has the memory of the whole."""
        return self.schedules(strategy, workers)[0]

    def schedules(
        self, strategy: Component, workers: int, batch: int | None = None
    ) -> list[Schedule]:
        """Return a schedule for each part of a replica, or one for whole replicas."""
        return self.recorded(
            strategy, workers, *self.batches(strategy, workers, batch)
        ).schedules

    def mesh(self, strategy: Component, workers: int) -> Mesh:
        """Return how the workers divide into replicas and parts of these.

        Raises:
            StudyError: they do not.
        """
        parts = self.strategy(strategy).traits
        of_replica = parts.pipeline * parts.tensor
        if workers > 1 and workers % of_replica:
            raise StudyError(
                f"strategy {strategy.name}: {of_replica} workers hold a replica, and {workers} are no multiple of "
                f"{of_replica}; use other options, or other worker counts"
            )
        return parts.mesh(workers)

    def batches(
        self, strategy: Component, workers: int, batch: int | None = None
    ) -> tuple[int, float]:
        """Return the steps of an epoch, and the mean samples of the batch of a replica.

        Raises:
            UsageError: the strategy, or the batch, does not suit this number of workers.
        """
        return self.workload.batches(self.mesh(strategy, workers).data, batch)

    def micro_batches(self, strategy: Component, workers: int) -> int:
        """Return the number of pieces into which a replica cuts its batch."""
        traits = self.strategy(strategy).traits
        return traits.micro_batches if traits.mesh(workers).parts > 1 else 1

    def recorded(
        self, component: Component, workers: int, steps: int, samples: float
    ) -> Recorded:
        """Return the programs of a training with so many steps of an epoch, and samples of a batch."""
        strategy = self.strategy(component)
        traits = strategy.traits
        mesh = traits.mesh(workers)
        excerpt = program.excerpt_of(traits.stretches, self.workload.epochs, steps)
        # Messages between parts are as large as the batch; others are not.
        pieces = self.micro_batches(component, workers)
        batch = max(pieces, round(samples)) if mesh.parts > 1 or traits.mixed else 1
        by_layer = traits.cuts_model(workers)
        cut = self.cut(samples / pieces) if by_layer else None
        # By the excerpt: cells of a what-if that differ in their steps have the same
        # one.
        key = (str(component), workers, excerpt, batch)
        if key not in self._programs:
            self._require_valid(component, workers, steps, cut)
            run = self._run(component, workers, excerpt.epochs)
            serving = _serving(component, traits, workers)
            # One object for all recordings of this strategy: they share the groups that
            # are split from it.
            everyone = RankGroups.of_all(workers)
            *shorter, longest = excerpt.plans(mesh.data, batch)
            last = self._schedules(
                run, strategy, longest, everyone, cut, whole=excerpt.whole
            )
            # The shorter one may have no group yet: as many workers are recorded as of
            # the longer one.
            schedules = [
                self._schedules(run, strategy, plan, everyone, cut, len(last))
                for plan in shorter
            ]
            schedules.append(last)
            priced = (
                [[program.in_batches(one, batch) for one in each] for each in schedules]
                if traits.mixed
                else schedules
            )
            programs = [program.programs_of(each) for each in priced]
            self._programs[key] = Recorded(
                excerpt, programs, workers, serving, schedules[0]
            )
        return self._programs[key]

    def _require_valid(
        self, component: Component, workers: int, steps: int, cut: TableCut | None
    ) -> None:
        """Check a training as before a run: what no run accepts has no time.

        Raises:
            UsageError: the strategy does not suit the workload at this number of workers.
        """
        strategy = self.strategy(component)
        asked = {"batch_per_worker": None, "batch_global": self.workload.batch}
        if not self.workload.in_all:
            asked = {
                "batch_per_worker": self.workload.batch if cut else 1,
                "batch_global": None,
            }
        setting = Setting(
            self._run(component, 1, 1).model_copy(update=asked),
            workers,
            min(workers, self.platform.cluster.node.workers_per_node),
            steps,
            self._shapes,
            layer_work=cut.work if cut else None,
        )
        strategy.check(setting)
        if workers > 1 and not strategy.requires:
            raise StudyError(
                f"strategy {component.name} at {workers} workers: it runs at one worker only"
            )

    def _schedules(
        self,
        run: Run,
        strategy: Strategy,
        plan: program.EvenPlan,
        everyone: RankGroups,
        cut: TableCut | None = None,
        workers: int | None = None,
        *,
        whole: bool = False,
    ) -> list[Schedule]:
        """Record worker 0, and the others of its node where they may do something else; of a whole program all.

        `workers` are so many where that is known.
        """
        per_node = self.platform.cluster.node.workers_per_node
        if whole:
            _require_few_steps(strategy, sum(map(plan.steps, range(run.epochs))))
        each = record_each(
            run,
            strategy,
            cast(BatchPlan, plan),
            self._model,
            per_node,
            everyone,
            cut=cut,
        )
        first, count = next(each), 1
        if workers is not None:
            count = workers
        elif (parts := strategy.traits.mesh(run.workers).parts) > 1:
            count = parts  # one replica stands for all
        elif whole:
            count = run.workers if first.reads_rank else 1
            _require_few_steps(
                strategy, count * sum(map(plan.steps, range(run.epochs)))
            )
        elif strategy.traits.fraction < 1:
            count = min(run.workers, max(_SAMPLED_RANKS, per_node))
        # Where groups are smaller than all, workers of a node may have different roles.
        elif any(
            event.partition is not None and len(event.partition.sizes) > 1
            for event in first.events
        ):
            count = min(run.workers, per_node)
        return [first, *islice(each, count - 1)]

    def _run(self, strategy: Component, workers: int, epochs: int) -> Run:
        update = {"strategy": strategy, "workers": workers, "epochs": epochs}
        return self._any_run.model_copy(update=update)

    @cached_property
    def _any_run(self) -> Run:
        return Run(
            study="prediction",
            run_id="prediction",
            config_hash="prediction",
            execution="modelled",
            engine="virtual",
            strategy=SERIAL,
            workers=1,
            repetition=0,
            seed=0,
            batch_per_worker=1,
            optimizer=self.workload.optimizer,
            dtype=self.workload.dtype,
        )

    @cached_property
    def _model(self) -> torch.nn.Module:
        """Parameters of the layers, without memory."""
        trained, dtype = self.workload.trained, getattr(torch, self.workload.dtype)
        # Strategies see single parameters, of which a layer table has sums.
        if trained is not None:
            built = build_model(
                trained.model,
                trained.input_shape,
                trained.outputs,
                trained.task,
                dtype,
                0,
            )
            return to_meta(built)
        return without_values(self.workload.layers).to(dtype)

    @cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        return [tuple(parameter.shape) for parameter in self._model.parameters()]

    def cut(self, samples: float) -> TableCut:
        """Return the layers, between which a model can be cut, with shares of a step of so many samples.

        Raises:
            ModelError: the model cannot be divided.
        """
        if self.workload.uncut:
            raise ModelError(self.workload.uncut)
        size = max(1, round(samples))
        if size not in self._cuts:
            times = self.platform.device.times(self.workload.layers, size)
            self._cuts[size] = TableCut(
                self.workload.layers, times.forward, times.backward
            )
        return self._cuts[size]


def _serving(component: Component, traits: Traits, workers: int) -> Serving | None:
    """Return how the strategy's servers answer; None where it has none.

    Raises:
        StudyError: it does not state when they do.
    """
    if not traits.servers:
        return None
    if traits.in_rounds is None:
        raise StudyError(
            f"strategy {component.name}: it does not state when its server answers, which a prediction "
            "depends on; give the class `traits` with in_rounds (docs/prediction.md), or run it with "
            "--execution modelled"
        )
    return Serving(traits.server_ranks(workers), traits.in_rounds)


def _require_few_steps(strategy: Strategy, steps: int) -> None:
    """Refuse to record a program whose steps, of all workers that differ, take minutes and memory.

    Raises:
        StudyError: there are more than `_MOST_STEPS`.
    """
    if steps > _MOST_STEPS:
        raise StudyError(
            f"strategy {strategy.name}: it does not state what repeats, and {steps:,} steps are too many to record; "
            f"give the class `traits` with stretches (docs/prediction.md), or ask for at most {_MOST_STEPS:,} steps of "
            "all workers: fewer epochs, or larger batches"
        )
