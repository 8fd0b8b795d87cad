"""Runs one virtual run: every worker a coroutine with its own clock, real arithmetic, modelled time."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from scalebench.cluster.mesh import Mesh
from scalebench.comm.base import ServerRule
from scalebench.data.dataset import Dataset
from scalebench.data.plan import BatchPlan
from scalebench.errors import RunError, in_one_line
from scalebench.pricing.charges import Charges, carrier, gradients, jitter_of
from scalebench.pricing.machine import Machine
from scalebench.pricing.price import NotLockStepError, price
from scalebench.pricing.recording import RecordingWorker, batches_of, meta_model, record, record_each
from scalebench.pricing.schedule import Schedule
from scalebench.strategies import registry
from scalebench.strategies.allreduce import mean_of_gradients
from scalebench.strategies.base import Strategy
from scalebench.study.spec import Run
from scalebench.system.random_state import drawn_since, put_back, random_state, seed_generators, worker_seed
from scalebench.training.loop import EvaluationResult, Trainee, evaluate, train
from scalebench.training.outcome import Evaluation, Outcome, RunFacts, WorkerReport
from scalebench.training.replica import Replica
from scalebench.virtual.arithmetic import ONE_BATCH, Choice, choose, drawn_in_a_step, train_one_for_all
from scalebench.virtual.batched import Batched, BatchedReplica
from scalebench.virtual.clock import ModelledClock, RecordingVirtualClock, VirtualClock
from scalebench.virtual.communicator import VirtualCommunicator
from scalebench.virtual.recorded import RecordedReplica
from scalebench.virtual.replay import Trace
from scalebench.virtual.scheduler import Group, Scheduler
from scalebench.virtual.shared import HostedState, ServerState, VirtualServer, VirtualShared, VirtualStore

_WORTH_RECORDING = 100  # steps, from which recording a gradient saves time
Weights = dict[str, Tensor]
Generators = frozenset[str]  # names of `system.random_state`
Played = tuple[Outcome, Weights]


def simulate(run: Run, dataset: Dataset, machine: Machine) -> Played:
    """Run `run` virtually; what goes wrong in training becomes the outcome's status, not an exception.

    The weights are the vectors `initial` and `final` (n,); empty unless the run completed.
    """
    return _judged(run, dataset, machine, Simulation.play)


def simulate_alike(runs: Sequence[Run], dataset: Dataset, machine: Machine) -> Iterator[tuple[Run, Outcome, Weights]]:
    """Simulate runs of one `alike` key: the first is computed, the others are replays with their own time.

    Of a model with buffers, a strategy that sends them is computed for itself: workers would else have their own.
    """
    first: Played | None = None
    for run in runs:
        if run.execution == "modelled":
            yield run, _timed_without_jitter(run, model_time(run, dataset, machine), dataset, machine), {}
            continue
        sends_buffers = _virtual(run).traits.sends_buffers
        if len(runs) > 1 and run.workers > 1 and sends_buffers and _has_buffers(run, dataset):
            outcome, weights = simulate(run, dataset, machine)
            yield run, _timed_without_jitter(run, outcome, dataset, machine), weights
        elif first is None:
            shared = not run.trace and alike(run) != run.run_id
            first = _judged(run, dataset, machine, Simulation.play_or_train_one if shared else Simulation.play)
            outcome = first[0]
            if outcome.status == "completed" and shared and outcome.facts.arithmetic != ONE_BATCH:
                # Priced like its replays, bit for bit, whichever of them comes first in a continued study.
                outcome = replace(replay([run], dataset, machine, [Trace.of(outcome)])[0], eval_s=outcome.eval_s)
            yield run, _timed_without_jitter(run, outcome, dataset, machine), first[1]
        elif first[0].status == "completed":
            (outcome,) = replay([run], dataset, machine, [Trace.of(first[0])])
            yield run, _timed_without_jitter(run, outcome, dataset, machine), first[1]
        else:
            yield run, replace(first[0], run_id=run.run_id), {}


def model_time(run: Run, dataset: Dataset, machine: Machine) -> Outcome:
    """Return the times of `run` without its arithmetic: its schedule priced, or its program on the event engine."""
    return _judged(run, dataset, machine, Simulation.model)[0]


def replay(runs: Sequence[Run], dataset: Dataset, machine: Machine, traces: Sequence[Trace]) -> list[Outcome]:
    """Return the times of `runs`, equal up to seed and jitter, with the losses and metrics of `traces`.

    Nothing is computed. Schedules that do not depend on the seed are recorded and walked through once.

    Raises:
        NotLockStepError: they depend on time, or are not those of the trace.
        RuntimeError: the strategy reads values of tensors.
    """
    simulation = Simulation(runs, dataset, machine)
    schedules = simulation.record()
    drawn = any(schedule.reads_seed for schedule in schedules) or not simulation.same_batches()
    if drawn and len(runs) > 1:
        one_by_one = zip(runs, traces, strict=True)
        return [outcome for run, trace in one_by_one for outcome in replay([run], dataset, machine, [trace])]
    for trace in traces:
        trace.require_same_arithmetic(schedules, machine.cluster.node.workers_per_node)
    return simulation.priced(schedules, traces)


def replay_or_simulate(
    runs: Sequence[Run], dataset: Dataset, machine: Machine, traces: Sequence[Trace]
) -> Iterator[tuple[Run, Outcome, Weights]]:
    """Replay repetitions of a completed run, or compute them again if their schedules are not those of `traces`."""
    also = [place for place, run in enumerate(runs) if run.also_without_jitter]
    steady, their_traces = [_without_jitter(runs[place]) for place in also], [traces[place] for place in also]
    try:
        outcomes = replay([*runs, *steady], dataset, machine, [*traces, *their_traces])
    except (NotLockStepError, RuntimeError, RunError):
        for run in runs:
            yield from simulate_alike([run], dataset, machine)
        return
    for place, outcome in zip(also, outcomes[len(runs) :], strict=True):
        outcomes[place].add_facts(train_s_no_jitter=outcome.train_s)
    for run, outcome in zip(runs, outcomes, strict=False):
        yield run, outcome, {}


def replays(run: Run) -> bool:
    """Return True if the arithmetic of `run` does not depend on time and moves no rows: it is priced without it."""
    return _virtual(run).deterministic and run.shuffle in ("none", "in_block")


def _timed_without_jitter(run: Run, outcome: Outcome, dataset: Dataset, machine: Machine) -> Outcome:
    """`outcome` with the time that the run takes if no step takes longer than another, if it asks for that."""
    if not run.also_without_jitter or outcome.status != "completed" or not replays(run):
        return outcome
    try:
        (steady,) = replay([_without_jitter(run)], dataset, machine, [Trace.of(outcome)])
    except (NotLockStepError, RuntimeError, RunError):
        return outcome
    outcome.add_facts(train_s_no_jitter=steady.train_s)
    return outcome


def _without_jitter(run: Run) -> Run:
    return run.model_copy(update={"virtual": run.virtual.model_copy(update={"jitter": "none"})})


def _has_buffers(run: Run, dataset: Dataset) -> bool:
    return next(meta_model(run, dataset).buffers(), None) is not None


def _parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _virtual(run: Run) -> Strategy:
    return registry.create(run.strategy.name, run.strategy.options, "virtual")


def alike(run: Run) -> str:
    """A key that runs of one study share whose arithmetic is the same, whatever their time."""
    arithmetic = _virtual(run).arithmetic(run.workers)
    stays = run.shuffle in ("none", "in_block")  # rows that travel are charged from what they are
    shares = arithmetic and stays and run.execution == "virtual"
    return f"{arithmetic} {run.workers} {run.seed} {sorted(run.tuned.items())}" if shares else run.run_id


def _judged(run: Run, dataset: Dataset, machine: Machine, play: Callable[[Simulation], Played]) -> Played:
    try:
        return play(Simulation([run], dataset, machine))
    except RunError as error:
        return Outcome(run.run_id, error.status, in_one_line(error)), {}


class _TimeLimitError(RunError):
    status = "timeout"


class Simulation:
    """The scheduler with the workers of one run on it, or the recorded schedules of its repetitions."""

    clock_kind: type[VirtualClock] | None = None  # default: by whether the run is traced

    def __init__(self, runs: Sequence[Run], dataset: Dataset, machine: Machine) -> None:
        began, run = time.perf_counter(), runs[0]
        torch.set_num_threads(run.threads_per_worker)
        self.runs, self.run, self.dataset, self.machine, self.strategy = runs, run, dataset, machine, _virtual(run)
        self.mesh = self.strategy.traits.mesh(run.workers)
        self.plan = BatchPlan.of(run, run.workers, run.seed, dataset, self.mesh.parts)
        self.table = machine.table_for(run.workers)
        self.charges = Charges.of(runs, machine)
        self.costs = self.charges.costs
        self.group = Group(tuple(range(run.workers)))
        self.stores: list[VirtualStore] = []
        self.state: ServerState | None = None
        self.arithmetic: str | None = None  # of the gradients, once they are computed
        self._why_single = ""
        self._pool: Batched | None = None
        self._records = False  # gradients of each replica
        self.scheduler = Scheduler(seed=run.seed, ties=run.virtual.ties)
        self._deadline = began + run.time_limit_s
        self._per_node = machine.cluster.node.workers_per_node

    def play(self, drawn: Generators = frozenset()) -> Played:
        """Compute the run; `drawn` are random generators that it is known to draw from."""
        whole = self.mesh.parts == 1 and not self.strategy.traits.sharded  # models
        choice = choose(self.run, self.dataset, self.plan) if whole else Choice()
        if self.strategy.traits.takes_signs:  # batched gradients are rounded differently
            choice = replace(choice, batched=False, reason="")
        batched = choice.batched and not drawn
        self._records = choice.records and not drawn
        if batched:
            self._pool = Batched(self._replica(0), self.run.workers, fills=choice.fills)
        self.arithmetic = "batched" if batched else "per_replica"
        self._why_single = "" if batched or self.run.workers == 1 else choice.reason
        replicas = [self._replica(rank) for rank in range(self.run.workers)]
        self.costs.gradients = gradients(replicas[0].model, self.table.release_at(self.plan.batch_size))
        if not batched:
            drawn |= drawn_in_a_step(replicas[0])
        return self._with_generators(drawn, lambda: self._played(replicas), Simulation.play)

    def _with_generators(
        self, drawn: Generators, attempt: Callable[[], Played], again: Callable[[Simulation, Generators], Played]
    ) -> Played:
        """Make `attempt` with states of the generators `drawn` for each worker.

        If it draws from others (a model that draws now and then, a user's strategy), workers have shared these, in the
        order of events: the run is then made `again`, anew, with them.
        """
        self.scheduler.drawn = drawn
        before, failure = random_state(), None
        try:
            played = attempt()
        except (Exception, SystemExit) as error:
            failure = error
        if missed := drawn_since(before) - drawn:
            put_back(before)
            return again(Simulation([self.run], self.dataset, self.machine), drawn | missed)
        if failure is not None:
            raise failure
        return played

    def _played(self, replicas: Sequence[Replica]) -> Played:
        initial = replicas[0].initial  # of a whole model, from which a worker may take a part
        reports = self.scheduler.run({rank: self._training(replica) for rank, replica in enumerate(replicas)})
        began = time.perf_counter()
        verdicts = self.scheduler.run({rank: self._evaluation(replica) for rank, replica in enumerate(replicas)})
        eval_s = time.perf_counter() - began
        found = [item for rank in sorted(verdicts) for item in verdicts[rank].evaluations]
        final = verdicts[0].final
        weights = {"initial": initial, "final": final} if final is not None else {}
        return self._outcome(self.run, reports, found, eval_s, initial.numel()), weights

    def play_or_train_one(self) -> Played:
        """Compute a run whose arithmetic is shared: where replicas stay equal, on one of them, priced by schedule."""
        averages = self.strategy.arithmetic(self.run.workers) == mean_of_gradients(self.run.workers)
        choice = choose(self.run, self.dataset, self.plan)
        if not (averages and self.run.workers > 1 and choice.one_batch):
            return self.play()
        return self._with_generators(frozenset(), lambda: self._one_for_all(choice.records), Simulation.play)

    def _one_for_all(self, records: bool) -> Played:
        found = train_one_for_all(self.run, self.dataset, self.plan, self._watch_time, records=records)
        self.arithmetic = ONE_BATCH
        trace = Trace(found.losses, found.evaluated, arithmetic=ONE_BATCH)
        (outcome,) = self.priced(self.record(), [trace])
        return replace(outcome, eval_s=found.eval_s), dict(found.weights)

    def record(self) -> list[Schedule]:
        """Return the schedules of all workers."""
        model = self._without_arithmetic()
        return record(self.run, self.strategy, self.plan, model, self._per_node, self.dataset.input_shape)

    def same_batches(self) -> bool:
        """Return True if the workers take batches of the same sizes in all runs."""
        plans = [
            BatchPlan.of(run, run.workers, run.seed, self.dataset, self.mesh.parts)
            for run in self.runs
            if run.seed != self.run.seed
        ]
        return all(
            batches_of(plan, rank, self.run.epochs) == batches_of(self.plan, rank, self.run.epochs)
            for plan in plans
            for rank in range(self.mesh.data)
        )

    def priced(self, schedules: Sequence[Schedule], traces: Sequence[Trace]) -> list[Outcome]:
        """Price `schedules` for each run, with the results of its trace."""
        parameters = _parameters(meta_model(self.run, self.dataset))
        outcomes = []
        for run, trace, priced in zip(self.runs, traces, price(schedules, self.charges), strict=True):
            reports = {schedule.rank: trace.report(schedule, priced) for schedule in schedules}
            outcome = self._outcome(run, reports, trace.evaluations(priced), 0.0, parameters)
            outcome.add_facts(arithmetic=trace.arithmetic)
            outcomes.append(outcome)
        return outcomes

    def model(self, drawn: Generators = frozenset()) -> Played:
        """Price the schedule of the run, or walk through its program where the order depends on time."""
        return self._with_generators(drawn, self._modelled, Simulation.model)

    def _modelled(self) -> Played:
        model = self._without_arithmetic()
        shape = self.dataset.input_shape
        each = record_each(self.run, self.strategy, self.plan, model, self._per_node, input_shape=shape)
        first = next(each)
        if first.is_lock_step and not self.run.trace:
            return self.priced([first, *each], [Trace.untrained(self.run)])[0], {}
        self.clock_kind = RecordingVirtualClock if self.run.trace else ModelledClock
        workers = []
        for rank in range(self.run.workers):
            clock = self._clock(rank)
            comm = VirtualCommunicator(self.scheduler, self.group, rank, clock, self.costs, arithmetic=False)
            workers.append(
                ModelledWorker(
                    *(self.run, self.plan, comm, clock, self._per_node, model, self.mesh, shape),
                    HostedState(self, comm),
                )
            )
        reports = self.scheduler.run({rank: self._training(worker) for rank, worker in enumerate(workers)})
        return self._outcome(self.run, reports, [], 0.0, _parameters(model)), {}

    def _without_arithmetic(self) -> torch.nn.Module:
        model = meta_model(self.run, self.dataset)
        self.costs.gradients = gradients(model, self.table.release_at(self.plan.batch_size))
        return model

    def _outcome(
        self, run: Run, reports: dict[int, WorkerReport], found: list[Evaluation], eval_s: float, parameters: int
    ) -> Outcome:
        ordered = [reports[rank] for rank in sorted(reports)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        for report in ordered:
            report.peak_rss_mib = peak
        return Outcome(run.run_id, "completed", "", ordered, found, eval_s, self._facts(parameters))

    def _facts(self, parameters: int) -> RunFacts:
        cluster, state = self.machine.cluster, self.state
        loads = [load for load in (self.table.others_load, self.machine.engines.others_load) if load is not None]
        served = {} if state is None or state.laps is None else {"servers": state.shards, "server_laps": [state.laps]}
        return RunFacts.of(
            self.dataset,
            self.plan,
            parameters=parameters,
            nodes=cluster.nodes_for(self.run.workers),
            workers_per_node=min(self.run.workers, cluster.node.workers_per_node),
            device=self.table.source,
            gpus=self.run.workers if cluster.node.gpus else None,
            launcher="in-process",
            binding="none",
            reference_step_s=self.machine.reference_s,
            others_load=max(loads, default=None),
            calibration=self._calibration(),
            arithmetic=self.arithmetic,
            why_single=self._why_single,
            **served,
        )

    def _calibration(self) -> str | None:
        """How well the times that charge the run could be measured; None where nothing was measured."""
        if self.machine.cluster.compute != "this-machine":
            return None
        engine = carrier(self.run) if self.run.workers > 1 else ""
        return "disturbed" if self.table.disturbed or engine in self.machine.engines.disturbed else "quiet"

    def _training(self, worker: Trainee) -> Callable[[], WorkerReport]:
        def program() -> WorkerReport:
            seed_generators(worker_seed(self.run.seed, worker.world.rank), self.scheduler.drawn)
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
        if time.perf_counter() > self._deadline:
            raise _TimeLimitError(f"the time limit of {self.run.time_limit_s:g} s was over in epoch {epoch + 1}")

    def _clock(self, rank: int) -> VirtualClock:
        charges = self.charges
        kind = self.clock_kind or (RecordingVirtualClock if self.run.trace else VirtualClock)
        return kind(
            charges.times[0],
            speed=float(charges.speed[rank]),
            jitter=jitter_of(self.run, self.table, rank),
            slowness=charges.slowness.get(rank),
            operations=charges.operations,
        )

    def _replica(self, rank: int) -> Replica:
        clock = self._clock(rank)
        comm = VirtualCommunicator(self.scheduler, self.group, rank, clock, self.costs)
        hosts = HostedState(self, comm)
        memory = None if self._pool is None else self._pool.memory(rank)
        replica = self._kind_of_replica()(
            *(self.run, self.dataset, self.plan, comm, clock, None, hosts.shared, hosts.server, self._per_node, memory),
            mesh=self.mesh,
        )
        if isinstance(replica, BatchedReplica):
            assert self._pool is not None
            replica.pool, replica.scheduler = self._pool, self.scheduler
        return replica

    def _kind_of_replica(self) -> type[Replica]:
        if self._pool is not None:
            return BatchedReplica
        steps = self.plan.steps(0) * self.run.epochs
        return RecordedReplica if self._records and steps >= _WORTH_RECORDING else Replica


class ModelledWorker(RecordingWorker):
    """Implements `strategies.base.Worker` on the event engine, without arithmetic."""

    def __init__(
        self,
        run: Run,
        plan: BatchPlan,
        comm: VirtualCommunicator,
        clock: VirtualClock,
        workers_per_node: int,
        model: torch.nn.Module,
        mesh: Mesh,
        input_shape: tuple[int, ...],
        hosts: HostedState,
    ) -> None:
        super().__init__(run, plan, comm, clock, workers_per_node, model, mesh, input_shape)
        self._hosts = hosts

    def share(self, initial: Tensor, host: int = 0) -> VirtualShared:
        return self._hosts.shared(initial, host)

    def server(self, rule: ServerRule) -> VirtualServer:
        return self._hosts.server(rule)
