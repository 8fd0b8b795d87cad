"""Runs on the engine `tasks`: the programs of all workers in this process, their local steps as tasks elsewhere.

Each worker is a greenlet. The batches that its strategy trains on alone are put off
until it looks at the weights, so that they make one task; averages and merges are
computed here, from what the tasks have returned, in the order of the workers or of
their arrival. Times are those of the wall clock. `task_costs` measures what a round of
tasks takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from scalebench.cluster.engine_costs import EngineCost, EngineCosts
from scalebench.comm.base import SharedState
from scalebench.comm.engines import of_tasks
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.catalog import prepare
from scalebench.data.dataset import Dataset, open_dataset
from scalebench.data.shard import equal_batches
from scalebench.errors import EngineError, RunError, TimeLimitError, in_one_line
from scalebench.records.machine_facts import cpu_model
from scalebench.strategies import registry
from scalebench.strategies.base import Batch
from scalebench.study.choices import SERIAL
from scalebench.study.spec import Component, Run, TaskOptions
from scalebench.system import hardware
from scalebench.system.clock import Task, WallClock
from scalebench.system.disturbance import BackgroundLoad, disturbed, own_and_children_s
from scalebench.tasks import block
from scalebench.tasks.backends import BACKENDS, Backend, DeadWorkerError
from scalebench.training.initial_weights import save_weights
from scalebench.training.loop import evaluate, train
from scalebench.training.outcome import Lap, Outcome, RunFacts, WorkerReport
from scalebench.training.replica import Replica
from scalebench.training.state import State
from scalebench.virtual.arithmetic import changes_attributes
from scalebench.virtual.communicator import VirtualCommunicator
from scalebench.virtual.scheduler import Group, Scheduler
from scalebench.virtual.shared import HostedState, Hosts

_T = TypeVar("_T")
_POLL_S = 0.2  # between two looks at the time limit
# numbers of tasks, over all runs: a late result of an ended run is no other task's
_TICKETS = count()

# Of the runs that measure costs; epochs by hidden units, of 0.2 to 4,300 kB of float32:
_EPOCHS = {1: 24, 200: 24, 1000: 24, 25_000: 8}
_WARM = 2  # first epochs, which begin slower
_SAMPLES = 64  # an epoch of 4 steps
_BYTES = 4  # of a number in float32


class TaskClock(WallClock):
    """The wall clock of a worker whose steps are computed elsewhere; with the members that the communicator reads.

    Of the time until a task is back its own laps are compute and data, what is left is
    communication.
    """

    backward_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.laps: list[Lap] = []
        self._began = 0.0

    @property
    def now(self) -> float:
        return time.perf_counter()

    def start(self) -> None:
        super().start()
        self.laps, self._began = [], self.mark

    def did(self, task: Task, samples: int = 0, share: float = 1.0) -> None:
        before = self.mark
        super().did(task, samples, share)
        if self.running:
            self._lap(
                "communication" if task == Task.COMM else task.name.lower(),
                before,
                self.mark,
            )

    def took(self, seconds: Sequence[float], began: float) -> None:
        """Record the time since the last lap as that of a task with these laps of its own, which began at `began`.

        A moment before or after that time is one of another machine's clock: the task
        then ended now.
        """
        before, now, own = self.mark, time.perf_counter(), sum(seconds)
        self.mark = now
        for task, each in enumerate(seconds):
            self.ledger.seconds[task] += each
        self.ledger.seconds[Task.COMM] += now - before - own
        if not before <= began <= now - own:
            began = now - own
        self._lap("communication", before, began)
        self._lap("compute", began, began + own)
        self._lap("communication", began + own, now)

    def _lap(self, activity: str, begin: float, end: float) -> None:
        if end > begin:
            self.laps.append(Lap(activity, begin - self._began, end - self._began))

    def communicated(
        self, until: float, waited: float, cost: float | None = None
    ) -> None:
        self.did(Task.COMM)

    def execute(self, operation: Callable[..., _T], *arguments: object) -> _T:
        return operation(*arguments)

    def rehearse(
        self, operation: Callable[..., object], *arguments: object, times: int = 1
    ) -> None:
        """Nothing to measure."""

    def price(self, operation: Callable[..., Any], members: int = 2) -> float:
        return 0.0

    def charge(self, operation: Callable[..., Any], members: int = 2) -> None:
        """Nothing to charge: what an operation took has passed."""


class _Free:
    """Costs of communication whose time is measured."""

    def __getattr__(self, name: str) -> Callable[..., float]:
        return lambda *arguments: 0.0


class _Tasks(Scheduler):
    """Scheduler of the workers' programs that waits for tasks where no program can go on."""

    def __init__(self, seed: int, deadline: float) -> None:
        super().__init__(seed=seed, ties="rank")
        self._deadline = deadline
        self._of_ticket: dict[Hashable, int] = {}  # the worker of a task under way
        self._results: dict[int, Any] = {}
        self.backend: Backend | None = None
        self.retrained = 0  # blocks that were trained again, as their process died

    def is_busy(self) -> bool:
        """Return True if a task is under way."""
        return bool(self._of_ticket)

    def train(
        self, job: block.Job, worker: int, pieces: tuple[block.Piece, ...], state: State
    ) -> block.Trained:
        """Return the result of a block, suspending the calling worker; another process takes over from a dead one.

        Raises:
            RunError: the block cannot be trained, or two processes died of it.
        """
        for attempt in range(2):
            # In another place, so that another process takes over.
            result = self._computed(
                worker, worker + attempt, (job, worker, pieces, state)
            )
            if not isinstance(result, DeadWorkerError):
                break
            self.retrained += attempt == 0
        if isinstance(result, DeadWorkerError):
            raise RunError(
                f"worker {worker}: two processes died while they trained the same block: {result}"
            )
        if isinstance(result, block.Failed):
            raise RunError(f"worker {worker}: {result.error}")
        if isinstance(result, Exception):
            raise RunError(f"worker {worker}: {in_one_line(result)}")
        assert isinstance(result, block.Trained)
        return result

    def _computed(self, worker: int, place: int, arguments: tuple[Any, ...]) -> Any:
        assert self.backend is not None
        ticket = next(_TICKETS)
        self._of_ticket[ticket] = worker
        self.backend.submit(ticket, place, block.train_block, *arguments)
        self.block(worker, "a task")
        return self._results.pop(worker)

    def awaited(self) -> bool:
        if not self._of_ticket:
            return False
        assert self.backend is not None
        is_awaited = False
        while not is_awaited:
            for ticket, result in self.backend.ended(_POLL_S):
                if ticket in self._of_ticket:  # else of a run that was ended
                    worker = self._of_ticket.pop(ticket)
                    self._results[worker] = result
                    self.wake(worker, time.perf_counter())
                    is_awaited = True
            if time.perf_counter() > self._deadline:
                raise TimeLimitError(
                    "the time limit was over while a task was under way"
                )
        return True


class TaskReplica(Replica):
    """A worker whose local steps are put off, and become one task as soon as its state is looked at."""

    tasks: _Tasks
    job: block.Job
    _pieces: list[block.Piece]
    _generators: dict[str, Any] | None = None

    # The state that steps change; the base class sets and reads it as attributes.

    @property
    def parameters(self) -> Tensor:
        self.fetch()
        return self._parameters

    @parameters.setter
    def parameters(self, vector: Tensor) -> None:
        self._parameters = vector

    @property
    def model(self) -> torch.nn.Module:
        self.fetch()
        return self._model

    @model.setter
    def model(self, model: torch.nn.Module) -> None:
        self._model = model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        self.fetch()
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def fetch(self) -> None:
        """Have the steps that were put off trained, and take their result over."""
        # The base class looks at the state while it is built, before there are pieces.
        pieces, self._pieces = tuple(vars(self).get("_pieces", ())), []
        if not pieces:
            return
        self.clock.did(Task.OTHER)
        state = State.of(self, self.steps, self._generators)
        trained = self.tasks.train(self.job, self.rank, pieces, state)
        trained.state.put_into(self)
        self._generators, self.steps = trained.state.generators, trained.state.steps
        if trained.samples:
            self.computed_several(trained.losses.tensor(), trained.samples)
        assert isinstance(self.clock, TaskClock)
        self.clock.took(trained.seconds, trained.began)

    def batches(self, epoch: int) -> Iterator[Batch]:
        sizes, weights, firsts = self.plan.batches(epoch, self.rank)
        return self._named(epoch, False, len(sizes), weights, firsts)

    def block_batches(self, epoch: int) -> Iterator[Batch]:
        starts, samples = (
            self.plan.block_starts(epoch, self.rank),
            len(self.plan.indices(epoch, self.rank)),
        )
        slices, firsts = equal_batches(starts, samples, self.plan.batch_size)
        return self._named(epoch, True, len(slices), [1.0] * len(slices), firsts)

    def _named(
        self,
        epoch: int,
        by_block: bool,
        steps: int,
        weights: Sequence[float],
        firsts: Container[int],
    ) -> Iterator[Batch]:
        """Yield the numbers of batches, whose samples are where they are trained on."""
        self._epoch = epoch
        none = torch.empty(0)
        for step in range(steps):
            self._source = (epoch, by_block)
            yield Batch(none, none, weights[step], step, step in firsts)

    def local_step(self, batch: Batch) -> None:
        last = self._pieces[-1] if self._pieces else None
        if last is not None and (last.epoch, last.by_block, last.last) == (
            *self._source,
            batch.step,
        ):
            # Consecutive batches go as a range.
            self._pieces[-1] = last._replace(last=batch.step + 1)
        else:
            self._pieces.append(block.Steps(*self._source, batch.step, batch.step + 1))

    def gradient(self, batch: Batch, weight: float = 1.0, *, add: bool = False) -> None:
        raise RunError(
            "the strategy looks at single gradients, which tasks of whole blocks do not return; use mpi"
        )

    def reset_optimizer(self) -> None:
        if vars(self).get("_pieces"):
            self._pieces.append(block.RESET)
        else:
            super().reset_optimizer()

    def share(self, initial: Tensor, host: int = 0) -> SharedState:
        return _LockedOnceBack(super().share(initial, host), self.fetch)

    def epoch_done(self, epoch: int, agreed: bool | None) -> None:
        self.fetch()  # before the meters of the epoch are closed
        super().epoch_done(epoch, agreed)


class _LockedOnceBack:
    """A shared state that a worker locks once its block is back: others merge, and train on, meanwhile."""

    def __init__(self, state: SharedState, fetch: Callable[[], None]) -> None:
        self._state, self._fetch = state, fetch

    @property
    def merges(self) -> int:
        return self._state.merges

    @contextmanager
    def exclusive(self, *, counted: bool = True) -> Iterator[Tensor]:
        self._fetch()
        with self._state.exclusive(counted=counted) as model:
            yield model


class TaskRuns:
    """Executes runs one after another, by processes, or workers of a scheduler, that stay for all of them.

    There are as many as the largest run has workers, `most`.
    """

    def __init__(
        self, folders: Mapping[int, Path], most: int, weights_folder: Path | None = None
    ) -> None:
        self._folders, self._most, self._weights = folders, most, weights_folder
        self._backends: dict[TaskOptions, Backend] = {}
        self._tasks: _Tasks | None = None  # of the run under way

    def execute(self, run: Run) -> Outcome:
        """Execute `run`; what goes wrong in training becomes the outcome's status.

        Raises:
            EngineError: the backend cannot be started, or does not answer.
        """
        backend = self._backend(run)
        try:
            return self._played(run, backend)
        except RunError as error:
            return Outcome(run.run_id, error.status, in_one_line(error))
        except (
            Exception,
            SystemExit,
        ) as error:  # of any kind, raised by a user's strategy or model
            return Outcome(run.run_id, "failed", in_one_line(error))
        finally:
            if self._tasks is not None and self._tasks.is_busy():
                self.close()  # nothing waits for what is under way
            self._tasks = None

    def close(self) -> None:
        """End all processes."""
        for backend in self._backends.values():
            backend.close()
        self._backends.clear()

    def _backend(self, run: Run) -> Backend:
        options = run.tasks
        if options not in self._backends:
            self.close()
            self._backends[options] = BACKENDS[options.backend](options, self._most)
        return self._backends[options]

    def _played(self, run: Run, backend: Backend) -> Outcome:
        # Averages are small, and the cores are for the tasks.
        torch.set_num_threads(1)
        dataset, folder = (
            open_dataset(self._folders[run.workers]),
            self._folders[run.workers],
        )
        plan = BatchPlan.of(run, run.workers, run.seed, dataset)
        strategy = registry.create(run.strategy.name, run.strategy.options, run.engine)
        job = block.Job.of(run, folder)
        self._tasks = tasks = _Tasks(run.seed, time.perf_counter() + run.time_limit_s)
        tasks.backend = backend
        replicas = _replicas(run, dataset, plan, tasks, job)
        trimmed = [
            threshold
            for threshold in backend.everywhere(block.prepare, job)
            if threshold is not None
        ]
        initial = replicas[0].initial
        reports = tasks.run(
            {each.rank: partial(train, each, strategy) for each in replicas}
        )
        began = time.perf_counter()
        verdicts = tasks.run(
            {each.rank: partial(evaluate, each, strategy, dataset) for each in replicas}
        )
        eval_s = time.perf_counter() - began
        final = verdicts[0].final
        if run.save_weights and self._weights is not None and final is not None:
            save_weights(self._weights, run.run_id, initial, final)
        found = [
            evaluation
            for rank in sorted(verdicts)
            for evaluation in verdicts[rank].evaluations
        ]
        found.sort(key=lambda evaluation: (evaluation.epoch, evaluation.elapsed_s))
        facts = RunFacts.of(
            dataset,
            plan,
            parameters=initial.numel(),
            device="cpu",
            # workers of a scheduler may be on any nodes
            nodes=1 if run.tasks.scheduler is None else None,
            workers_per_node=run.workers if run.tasks.scheduler is None else None,
            launcher=run.tasks.backend,
            blocks_retrained=tasks.retrained + backend.repeated(),
            malloc_trim_bytes=min(trimmed, default=None),
            binding="none",
        )
        ordered = [_without_waiting(reports[rank]) for rank in sorted(reports)]
        if run.trace:
            for each in replicas:
                assert isinstance(each.clock, TaskClock)
                reports[each.rank].laps = each.clock.laps
        return Outcome(run.run_id, "completed", "", ordered, found, eval_s, facts)


def _replicas(
    run: Run, dataset: Dataset, plan: BatchPlan, tasks: _Tasks, job: block.Job
) -> list[TaskReplica]:
    """Return the workers of `run`.

    Raises:
        RunError: their model keeps a state that does not travel with blocks.
    """
    group = Group(tuple(range(run.workers)))
    hosts = Hosts()
    replicas = []
    for rank in range(run.workers):
        clock = TaskClock()
        comm = VirtualCommunicator(tasks, group, rank, clock, _Free())  # type: ignore[arg-type]
        replica = TaskReplica(
            run, dataset, plan, comm, clock, shared=HostedState(hosts, comm).shared
        )
        replica.tasks, replica.job = tasks, job
        replicas.append(replica)
    if changes_attributes(Replica(run, dataset, plan, replicas[0].comm, TaskClock())):
        raise RunError(
            "the model keeps a state that is no buffer, which does not travel with tasks; use --engine mpi"
        )
    return replicas


def _without_waiting(report: WorkerReport) -> WorkerReport:
    """Leave out how long a worker waited for others, which is part of its communication and not measured."""
    report.wait_s = None
    for epoch in report.epochs:
        epoch.wait_s = None
    return report


def task_costs(options: TaskOptions) -> EngineCosts:
    """Measure the rounds of tasks on the backend of `options`; takes some seconds, and as long as it takes to start.

    A round is a block of 1 and of 2 workers, beside its training, by bytes of weights.
    The block takes weights and momentum to its process and back; what else a round
    takes is in it too: putting state into a model and out of it, random generators, and
    the average. So rounds are made as in a run, of a synthetic data set and of models
    of a few sizes that no study trains.

    Raises:
        EngineError: a round failed.
    """
    return EngineCosts(entries=[_costs_among(options, workers) for workers in (1, 2)])


def _costs_among(options: TaskOptions, workers: int) -> EngineCost:
    """Measure the rounds of so many workers."""
    folder = prepare(_run_of_costs(options, workers, hidden=1), workers)
    with closing(TaskRuns({workers: folder}, workers)) as tasks:
        rounds = [
            _round(tasks, _run_of_costs(options, workers, hidden)) for hidden in _EPOCHS
        ]
    points = [(each.nbytes, each.seconds) for each in rounds]
    return EngineCost(
        engine=of_tasks(),
        ranks=workers,
        alpha_s=points[0][1],
        points=points,
        disturbed=any(each.disturbed for each in rounds),
        source=f"rounds of tasks on {options.backend}, {cpu_model()}, {hardware.cores()} cores",
    )


class _Round(NamedTuple):
    """Seconds of a round of tasks with `nbytes` of weights; `disturbed` if other programs took the cores meanwhile."""

    nbytes: int
    seconds: float
    disturbed: bool


def _round(tasks: TaskRuns, run: Run) -> _Round:
    """Measure the epochs of `run` beside their training, of the worker that waits least: their median.

    Other programs only add to a time: beside them it is the lower decile.
    """
    background = BackgroundLoad(own_and_children_s)
    outcome = tasks.execute(run)
    is_disturbed = disturbed(background.cores())
    if outcome.status != "completed":
        raise EngineError(
            f"tasks on {run.tasks.backend} could not be measured: {outcome.error}"
        )
    assert outcome.facts.parameters is not None
    epochs = list(zip(*(worker.epochs for worker in outcome.workers), strict=True))[
        _WARM:
    ]
    seconds = [
        min(each.epoch_s - (each.compute_s or 0.0) - each.data_s for each in epoch)
        for epoch in epochs
    ]
    typical = quantiles(seconds, n=10, method="inclusive")[0 if is_disturbed else 4]
    return _Round(_BYTES * outcome.facts.parameters, max(0.0, typical), is_disturbed)


def _run_of_costs(options: TaskOptions, workers: int, hidden: int) -> Run:
    engine = of_tasks()
    return Run(
        study=engine,
        run_id=f"{engine}-{workers}-{hidden}",
        config_hash="",
        execution="native",
        engine=engine,
        tasks=options,
        strategy=Component(name=SERIAL if workers == 1 else "epoch_average"),
        workers=workers,
        repetition=0,
        seed=0,
        epochs=_EPOCHS[hidden],
        dataset=Component(
            name="synthetic", options={"n_train": _SAMPLES * workers, "n_test": 8}
        ),
        model=Component(name="mlp", options={"hidden": [hidden]}),
        optimizer=Component(name="sgd", options={"momentum": 0.9}),
        batch_per_worker=16,
        dtype="float32",
        evaluate_every=0,
    )
