"""Event engine of virtual runs: every worker a coroutine with its own clock, real arithmetic, modelled time.

`simulate` computes and times any run, event by event; `compute_and_time` computes one
replica for all where they stay equal, and prices its schedule. `compute` gives results
without times, for lock-step runs that share them (`lock_step.time`), and `model_time`
times without results.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, TypeVar

import torch

from scalebench.data.dataset import Dataset
from scalebench.data.shard import LaidOut, Rows
from scalebench.errors import RunError, TimeLimitError, in_one_line
from scalebench.pricing.charges import jitter_of
from scalebench.pricing.held_parts import cut_of, trainable_numbers
from scalebench.pricing.machine import Choice, Machine
from scalebench.pricing.price import NotLockStepError
from scalebench.pricing.recording import RecordingWorker
from scalebench.study.spec import Run
from scalebench.system.random_state import (
    drawn_since,
    put_back,
    random_state,
    seed_generators,
    worker_seed,
)
from scalebench.training.loop import EvaluationResult, Trainee, evaluate, train
from scalebench.training.outcome import Outcome, WorkerReport
from scalebench.training.replica import Replica, Snapshot
from scalebench.virtual import lock_step
from scalebench.virtual.arithmetic import (
    choose,
    drawn_in_a_step,
    equals_one_batch,
    holds_whole_models,
    train_one_for_all,
)
from scalebench.virtual.batched import Batched, BatchedReplica
from scalebench.virtual.communicator import VirtualCommunicator
from scalebench.virtual.lock_step import Prepared, Trace, Weights
from scalebench.virtual.recorded import RecordedReplica
from scalebench.virtual.scheduler import Group, Scheduler
from scalebench.virtual.shared import HostedState, Hosts
from scalebench.virtual.virtual_clock import (
    ModelledClock,
    RecordingVirtualClock,
    VirtualClock,
)

_T = TypeVar("_T")
_WORTH_RECORDING = 100  # steps, from which recording a gradient saves time
Generators = frozenset[str]  # names of `system.random_state`
Played = tuple[Outcome, Weights]


def compute(run: Run, dataset: Dataset, machine: Machine) -> Trace:
    """Return the results of a lock-step run: of every replica, or of one for all where they stay equal.

    Raises:
        RunError: training failed.
    """
    simulation = Simulation(run, dataset, machine)
    choice = simulation.choice_of_one_batch()
    return (
        Trace.of(*simulation.play())
        if choice is None
        else simulation.train_one(records=choice.records)
    )


def compute_and_time(run: Run, dataset: Dataset, machine: Machine) -> Played:
    """Do as `simulate`, by one replica for all where they stay equal: the program is then walked through for its time.

    A program that reads losses or values of tensors depends on its arithmetic, and is
    left to `simulate`.
    """

    def played() -> Played:
        simulation = Simulation(run, dataset, machine)
        choice = simulation.choice_of_one_batch()
        if choice is None:
            return simulation.play()
        trace = simulation.train_one(records=choice.records)
        try:
            outcome = _timed(run, dataset, machine, trace)
        except (NotLockStepError, RuntimeError):
            return Simulation(run, dataset, machine).play()
        outcome.eval_s = trace.eval_s
        return outcome, trace.weights

    return _judged(run, played)


def _timed(run: Run, dataset: Dataset, machine: Machine, trace: Trace) -> Outcome:
    """Return the outcome of a computed run: its schedule priced, or its program on the event engine."""
    # What adapts to measured times has another schedule than the one recorded without any.
    if not lock_step.strategy_of(run).traits.adapts:
        with suppress(NotLockStepError):
            return lock_step.time([run], dataset, machine, [trace])[0]
    return Simulation(run, dataset, machine).time(trace)


def simulate(run: Run, dataset: Dataset, machine: Machine) -> Played:
    """Compute and time `run` on the event engine, of whatever kind it is.

    What goes wrong in training becomes the outcome's status, not an exception. The
    weights are empty unless the run completed.
    """
    return _judged(run, lambda: Simulation(run, dataset, machine).play())


def model_time(run: Run, dataset: Dataset, machine: Machine) -> Outcome:
    """Return the times of `run` without its arithmetic: its schedule priced, or its program on the event engine."""

    def modelled() -> Played:
        trace = Trace.untrained(run)
        if run.trace:
            return Simulation(run, dataset, machine).time(trace), {}
        return _timed(run, dataset, machine, trace), {}

    return _judged(run, modelled)[0]


def _judged(run: Run, play: Callable[[], Played]) -> Played:
    try:
        return play()
    except RunError as error:
        return Outcome(run.run_id, error.status, in_one_line(error)), {}


class _Consensus:
    """The consensus of each epoch that is evaluated, formed once all workers have come to its end.

    Each takes part by a copy of itself, with its weights of that moment, which waits
    for those of the others while the worker goes on.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._strategy, self._costs = simulation.strategy, simulation.costs
        self._workers = simulation.run.workers
        # It never starts: all of this is outside the training time.
        self._clock = VirtualClock(simulation.charges.times[0])
        self._under_way: dict[int, tuple[Scheduler, Group]] = {}

    def form(self, replica: Replica, snapshot: Snapshot) -> None:
        """Take part in the consensus of the epoch of `snapshot`, which worker 0 keeps in its own."""
        ranks = tuple(range(self._workers))
        scheduler, group = self._under_way.setdefault(
            snapshot.epoch, (Scheduler(seed=0, ties="rank"), Group(ranks))
        )
        member = copy.copy(replica)
        member.clock = self._clock
        member.comm = member.world = VirtualCommunicator(
            scheduler, group, replica.rank, self._clock, self._costs
        )
        member._epoch = replica.epochs - 1  # as on engines that form it after training

        def program() -> None:
            vector = self._strategy.consensus(member)
            if replica.rank == 0:
                snapshot.vector = vector

        before = replica.parameters._version
        if not scheduler.join(replica.rank, program):
            del self._under_way[snapshot.epoch]
        if replica.parameters._version != before:
            raise RunError(
                f"strategy {self._strategy.name}: its consensus changed the weights in place, with which training goes "
                "on; let it change a copy"
            )

    def end(self) -> None:
        """Give up what is under way."""
        for scheduler, _ in self._under_way.values():
            scheduler.end()
        self._under_way.clear()


class Simulation(Prepared):
    """The workers of one run on the scheduler."""

    def __init__(
        self,
        run: Run,
        dataset: Dataset,
        machine: Machine,
        clock_kind: type[VirtualClock] | None = None,
    ) -> None:
        """Prepare the run; by default its clocks keep their laps if it is traced."""
        # Set before the preparation, which counts too.
        self._deadline = perf_counter() + run.time_limit_s
        super().__init__([run], dataset, machine)
        self.group = Group(tuple(range(run.workers)))
        self.hosts = Hosts(traced=run.trace)
        self.scheduler = Scheduler(seed=run.seed, ties=run.virtual.ties)
        self._clock_kind = clock_kind or (
            RecordingVirtualClock if run.trace else VirtualClock
        )
        self._laid_out: LaidOut | None = None
        # Rows move otherwise, or stay in one order, in the memory of a first epoch.
        if run.shuffle == "in_block":
            rows = Rows(dataset, getattr(torch, run.dtype), torch.device("cpu"))
            self._laid_out = LaidOut(rows, self.plan)
        self._pool: Batched | None = None
        self._records = False  # gradients of each replica
        self._original: Replica | None = None  # records for all
        self._consensus = _Consensus(self)

    def play(self, drawn: Generators = frozenset()) -> Played:
        """Compute the run; `drawn` are random generators that it is known to draw from."""
        whole = holds_whole_models(self.run, self.strategy)
        choice = self._choice() if whole else Choice()
        # batched gradients are rounded differently
        if self.strategy.traits.takes_signs:
            choice = choice.model_copy(update={"batched": False, "reason": ""})
        batched = choice.batched and not drawn
        steps = self.plan.steps(0) * self.run.epochs
        worth_recording = self.run.workers * steps >= _WORTH_RECORDING
        self._records = choice.records and not drawn and worth_recording
        if batched:
            self._pool = Batched(self.replica(0), self.run.workers, fills=choice.fills)
            self._pool.steps_together = lock_step.is_lock_step(self.run)
        elif self._records and steps < _WORTH_RECORDING:
            self._original = self.replica(0)
        why_single = "" if batched or self.run.workers == 1 else choice.reason
        replicas = [self.replica(rank) for rank in range(self.run.workers)]
        self.charge_gradients_of(replicas[0].model)
        if not batched:
            drawn |= drawn_in_a_step(replicas[0])
        return self._with_generators(
            drawn, lambda: self._played(replicas, why_single), Simulation.play
        )

    def _with_generators(
        self,
        drawn: Generators,
        attempt: Callable[[], _T],
        again: Callable[[Simulation, Generators], _T],
    ) -> _T:
        """Make `attempt` with states of the generators `drawn` for each worker.

        If it draws from others (a model that draws now and then, a user's strategy),
        workers have shared these, in the order of events: the run is then made `again`,
        anew, with them.
        """
        self.scheduler.drawn = drawn
        before, failure = random_state(), None
        try:
            made = attempt()
        except (Exception, SystemExit) as error:
            failure = error
        if missed := drawn_since(before) - drawn:
            put_back(before)
            return again(
                Simulation(self.run, self.dataset, self.machine), drawn | missed
            )
        if failure is not None:
            raise failure
        return made

    def _played(self, replicas: Sequence[Replica], why_single: str) -> Played:
        # of a whole model, from which a worker may take a part
        initial = replicas[0].initial
        try:
            reports = self.scheduler.run(
                {rank: self._training(replica) for rank, replica in enumerate(replicas)}
            )
        finally:
            self._consensus.end()
        # After training, as an evaluation is no part of the time of any worker.
        began = perf_counter()
        verdicts = self.scheduler.run(
            {rank: self._evaluation(replica) for rank, replica in enumerate(replicas)}
        )
        eval_s = perf_counter() - began
        found = [
            item for rank in sorted(verdicts) for item in verdicts[rank].evaluations
        ]
        final = verdicts[0].final
        weights = {"initial": initial, "final": final} if final is not None else {}
        arithmetic = {
            "arithmetic": "per_replica" if self._pool is None else "batched",
            "why_single": why_single,
        }
        facts = arithmetic | self._served()
        return self.outcome(
            self.run, reports, found, eval_s, initial.numel(), **facts
        ), weights

    def choice_of_one_batch(self) -> Choice | None:
        """Return how one replica computes in place of all; None if each has to, or if there is only one."""
        if not equals_one_batch(self.run, self.strategy):
            return None
        choice = self._choice()
        return choice if choice.one_batch else None

    def _choice(self) -> Choice:
        return choose(self.run, self.dataset, self.plan, self.machine)

    def train_one(self, *, records: bool) -> Trace:
        """Train one replica in place of all, which stay equal; every one if the model draws random numbers."""

        def attempt() -> Trace:
            at = (self.run, self.dataset, self.plan, self.mesh, self._watch_time)
            return train_one_for_all(*at, records=records)

        return self._with_generators(
            frozenset(), attempt, lambda other, drawn: Trace.of(*other.play(drawn))
        )

    def time(self, trace: Trace, drawn: Generators = frozenset()) -> Outcome:
        """Walk through the program of a run whose results are known, without its arithmetic.

        Raises:
            NotLockStepError: it depends on the training loss.
            RuntimeError: it reads values of tensors.
        """
        return self._with_generators(
            drawn,
            lambda: self._timed(trace),
            lambda other, drawn: other.time(trace, drawn),
        )

    def _timed(self, trace: Trace) -> Outcome:
        model = self.without_arithmetic()
        if not self.run.trace:
            self._clock_kind = ModelledClock
        cut = cut_of(self.run.model)
        workers = []
        for rank in range(self.run.workers):
            clock = self._clock(rank)
            comm = VirtualCommunicator(
                self.scheduler, self.group, rank, clock, self.costs, arithmetic=False
            )
            hosts, node = HostedState(self.hosts, comm), self.workers_per_node
            at = (
                self.run,
                self.plan,
                comm,
                clock,
                node,
                model,
                self.mesh,
                self.dataset.input_shape,
            )
            workers.append(RecordingWorker(*at, cut, hosts.shared, hosts.server))
        reports = self.scheduler.run(
            {rank: self._training(worker) for rank, worker in enumerate(workers)}
        )
        if trace.is_trained and any(worker.has_read_loss for worker in workers):
            raise NotLockStepError("its schedule depends on the training loss")
        reports = {rank: trace.with_losses(report) for rank, report in reports.items()}
        moments: dict[int, float] = {}
        # those of worker 0 count, where several have kept the model
        for worker in reversed(workers):
            moments.update(worker.moments)
        facts = trace.facts | self._served()
        return self.outcome(
            self.run,
            reports,
            trace.evaluations(moments),
            0.0,
            trainable_numbers(model),
            **facts,
        )

    def _served(self) -> dict[str, Any]:
        """Return the facts of a traced run's servers."""
        server = self.hosts.server
        return (
            {}
            if server is None or server.laps is None
            else {"servers": server.shards, "server_laps": [server.laps]}
        )

    def _training(self, worker: Trainee) -> Callable[[], WorkerReport]:
        def program() -> WorkerReport:
            seed_generators(
                worker_seed(self.run.seed, worker.world.rank), self.scheduler.drawn
            )
            report = train(worker, self.strategy, on_epoch=self._watch_time)
            if isinstance(worker.clock, VirtualClock):
                report.hidden_comm_s = worker.clock.hidden_comm_s
                report.bubble_s = worker.clock.ledger.bubble
            if isinstance(worker.clock, RecordingVirtualClock):
                report.laps = worker.clock.laps
            return report

        return program

    def _evaluation(self, replica: Replica) -> Callable[[], EvaluationResult]:
        return lambda: evaluate(replica, self.strategy, self.dataset)

    def _watch_time(self, epoch: int) -> None:
        if perf_counter() > self._deadline:
            raise TimeLimitError(
                f"the time limit of {self.run.time_limit_s:g} s was over in epoch {epoch + 1}"
            )

    def _clock(self, rank: int) -> VirtualClock:
        charges = self.charges
        return self._clock_kind(
            charges.times[0],
            speed=float(charges.speed[rank]),
            jitter=jitter_of(self.run, self.table, rank),
            slowness=charges.slowness.get(rank),
            operations=charges.operations,
        )

    def replica(self, rank: int) -> Replica:
        """Return the replica of a worker, which computes."""
        clock = self._clock(rank)
        comm = VirtualCommunicator(self.scheduler, self.group, rank, clock, self.costs)
        hosts = HostedState(self.hosts, comm)
        memory = None if self._pool is None else self._pool.memory(rank)
        replica = self._kind_of_replica()(
            self.run,
            self.dataset,
            self.plan,
            comm,
            clock,
            None,
            hosts.shared,
            hosts.server,
            self.workers_per_node,
            memory,
            mesh=self.mesh,
            laid_out=self._laid_out,
        )
        if isinstance(replica, RecordedReplica):
            replica.original = self._original
        if isinstance(replica, BatchedReplica):
            assert self._pool is not None
            replica.pool, replica.scheduler = self._pool, self.scheduler
            replica.form_consensus = self._consensus.form
            replica.state.parameter_shapes = self._pool.shapes
            # equal ones, kept once
            replica.initial = self._pool.initial
            replica.initial_buffers = self._pool.buffers.initial
        return replica

    def _kind_of_replica(self) -> type[Replica]:
        if self._pool is not None:
            return BatchedReplica
        return RecordedReplica if self._records else Replica
