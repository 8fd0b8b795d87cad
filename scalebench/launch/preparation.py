"""Before anything runs: the data of each worker count, the plan of who trains on what, and what is odd about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from scalebench.data.catalog import prepare
from scalebench.data.dataset import Dataset, open_dataset
from scalebench.data.plan import BatchPlan
from scalebench.errors import DataError
from scalebench.models.registry import check_model
from scalebench.strategies import registry
from scalebench.strategies.averaging import Averaging
from scalebench.study.spec import Run, Study
from scalebench.training.optimizers import check_optimizer

FEW_STEPS = 8  # between synchronisations: fewer, and averaging can hardly show what it saves


@dataclass
class Preparation:
    """Data sets on disk and plans, by worker count."""

    folders: dict[int, Path] = field(default_factory=dict)
    datasets: dict[int, Dataset] = field(default_factory=dict)
    plans: dict[int, BatchPlan] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def batch_sizes(self, epochs: int, workers: set[int]) -> set[int]:
        """Every batch size that occurs at these worker counts."""
        return set().union(*(self.plans[count].all_batch_sizes(epochs) for count in workers))


def prepare_study(study: Study, runs: list[Run]) -> Preparation:
    """Fetch or build the data, and check that every worker count can be served.

    Raises:
        DataError, ModelError, StudyError: the data are missing or corrupt, there are more workers than samples or
            blocks, or the model or optimizer has a name or option that does not exist.
    """
    check_model(study.model)
    check_optimizer(study.optimizer)
    made = Preparation()
    for workers in sorted({run.workers for run in runs}):
        made.folders[workers] = prepare(study, workers)
        made.datasets[workers] = open_dataset(made.folders[workers])
        try:
            made.plans[workers] = BatchPlan.of(study, workers, study.seed, made.datasets[workers])
        except DataError as error:
            raise DataError(f"at {workers} worker{'s' if workers > 1 else ''}: {error}") from None
        for note in made.plans[workers].notes:
            made.notes.append(f"{workers} worker{'s' * (workers > 1)}: {note}")
    made.notes += _few_steps(study, made) + _long_steps(study)
    made.notes += _idle_schedule(study, made)
    return made


def _few_steps(study: Study, made: Preparation) -> list[str]:
    """Averaging every s steps can hide at most 1 - 1/s of the communication of averaging every step."""
    notes = []
    for component in study.strategies:
        synchronisation = registry.create(component.name, component.options).synchronisation
        if synchronisation.unit != "epoch":
            continue
        steps = {workers: synchronisation.every * plan.steps(0) for workers, plan in made.plans.items() if workers > 1}
        few = {workers: count for workers, count in steps.items() if count < FEW_STEPS}
        if few:
            worst = min(few.values())
            notes.append(
                f"{component}: fewer than {FEW_STEPS} steps between synchronisations at {_listed(few)} workers "
                f"(down to {worst}); there it can save at most {100 * (1 - 1 / worst):.0f} % of the communication"
            )
    return notes


def _listed(workers: Iterable[int]) -> str:
    return ", ".join(map(str, workers))


def _long_steps(study: Study) -> list[str]:
    """`lr_policy: linear` is a rule for one batch of all workers; replicas that step alone have a worker's batch."""
    most = max(study.workers)
    if study.lr_policy != "linear" or most == 1:
        return []
    made = [(component, registry.create(component.name, component.options)) for component in study.strategies]
    alone = [str(component) for component, strategy in made if isinstance(strategy, Averaging)]
    if not alone:
        return []
    return [
        f"{', '.join(alone)}: lr_policy linear multiplies the learning rate by up to {most}, for replicas whose "
        "batch does not grow: they may train badly or diverge; use lr_policy constant for them"
    ]


def _idle_schedule(study: Study, made: Preparation) -> list[str]:
    """Where training ends before the learning rate's schedule has done anything, or all of it."""
    epochs, every = study.epochs, study.lr_decay_every or 0
    trained = f"the training has {epochs} epoch{'s' * (epochs > 1)}"
    if study.lr_policy == "linear" and study.lr_warmup_epochs >= epochs and max(made.plans) > 1:
        return [f"lr_warmup_epochs {study.lr_warmup_epochs}, but {trained}: lr times the workers is never reached"]
    if study.lr_policy == "step" and every >= epochs:
        return [f"lr_decay_every {every}, in epochs, but {trained}: the learning rate never decays"]
    if study.lr_policy != "optimizer_steps":
        return []
    steps = {workers: epochs * plan.steps(0) for workers, plan in made.plans.items()}
    never = {workers: count for workers, count in steps.items() if every >= count}
    if not never:
        return []
    return [
        f"lr_decay_every {every}, in optimizer steps, but the training has at most {max(never.values())} at "
        f"{_listed(never)} worker{'s' * (list(never) != [1])}: the learning rate never decays there"
    ]
