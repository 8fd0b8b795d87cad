"""Runs one virtual run: every worker a coroutine with its own clock, real arithmetic, modelled time."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalebench.cluster.engine_costs import EngineCosts
from scalebench.cluster.network import Network
from scalebench.cluster.spec import Cluster
from scalebench.comm.base import ServerRule
from scalebench.data.dataset import Dataset
from scalebench.data.plan import Plan
from scalebench.errors import DivergedError, RunError
from scalebench.outcome import Evaluation, Outcome, WorkerReport
from scalebench.strategies import registry
from scalebench.strategies.base import Strategy
from scalebench.study.spec import Run
from scalebench.training import Verdict, evaluate, train
from scalebench.virtual.clock import VirtualClock
from scalebench.virtual.communicator import Group, VirtualCommunicator
from scalebench.virtual.costs import Costs, GradientTensor
from scalebench.virtual.scheduler import Scheduler
from scalebench.virtual.shared import ServerDesk, VirtualServer, VirtualShared, VirtualStore
from scalebench.virtual.step_times import StepTable, StepTimes, jitter_source
from scalebench.worker import Replica

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Scenery:
    """What a virtual run is charged by: the cluster, the engines' costs and the step times by load of a node."""

    cluster: Cluster
    engines: EngineCosts
    tables: list[StepTable]

    def table_for(self, workers: int) -> StepTable:
        """The step times measured under the load that `workers` put on a node."""
        busy = min(workers, self.cluster.node.workers_per_node)
        return min(self.tables, key=lambda table: (abs(table.busy_workers - busy), -table.busy_workers))


def simulate(run: Run, dataset: Dataset, scenery: Scenery) -> tuple[Outcome, Weights]:
    """Run `run` virtually; what goes wrong in training becomes the outcome's status, not an exception.

    The weights are the vectors `initial` and `final` (n,); empty unless the run completed.
    """
    began = time.perf_counter()
    torch.set_num_threads(run.threads_per_worker)
    strategy = registry.create(run.strategy.name, run.strategy.options, "virtual")
    try:
        stage = _Stage(run, dataset, scenery, strategy, deadline=began + run.time_limit_s)
        reports, verdicts, weights = stage.play()
    except DivergedError as error:
        return Outcome(run.run_id, "diverged", str(error)), {}
    except RunError as error:
        return Outcome(run.run_id, error.status, str(error)), {}
    evaluations: list[Evaluation] = [item for verdict in verdicts for item in verdict.evaluations]
    for report in reports:
        report.peak_rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    facts = {**stage.facts(), "wall_s": time.perf_counter() - began}
    outcome = Outcome(run.run_id, "completed", "", reports, evaluations, stage.eval_s, facts)
    return outcome, weights


class _TimeLimitError(RunError):
    status = "timeout"


class _Stage:
    """The scheduler with the workers of one run on it."""

    def __init__(self, run: Run, dataset: Dataset, scenery: Scenery, strategy: Strategy, deadline: float) -> None:
        self.run, self.dataset, self.scenery, self.strategy = run, dataset, scenery, strategy
        self.plan = Plan.of(run, run.workers, run.seed, dataset)
        self.table = scenery.table_for(run.workers)
        self.times = StepTimes(self.table, seed=run.seed - run.repetition, repetition=run.repetition)
        self.group = Group(tuple(range(run.workers)))
        self.scheduler: Scheduler | None = None
        self.store: VirtualStore | None = None
        self.desk: ServerDesk | None = None
        self.eval_s = 0.0
        self._deadline = deadline
        self._parameters = 0

    def play(self) -> tuple[list[WorkerReport], list[Verdict], Weights]:
        costs = self._costs()
        replicas = [self._replica(rank, costs) for rank in range(self.run.workers)]
        self._parameters = replicas[0].parameters.numel()
        costs.gradients = self._gradients(replicas[0])
        stochastic = _draws_random_numbers(replicas[0])
        options = self.run.virtual
        self.scheduler = Scheduler(seed=self.run.seed, ties=options.ties, stochastic=stochastic)
        for replica in replicas:
            replica.comm.scheduler = self.scheduler  # type: ignore[attr-defined]
        reports = self.scheduler.run({replica.rank: self._training(replica) for replica in replicas})
        began = time.perf_counter()
        verdicts = self.scheduler.run({replica.rank: self._evaluation(replica) for replica in replicas})
        self.eval_s = time.perf_counter() - began
        final = verdicts[0].final
        weights = {"initial": replicas[0].initial, "final": final} if final is not None else {}
        return [reports[rank] for rank in sorted(reports)], [verdicts[rank] for rank in sorted(verdicts)], weights

    def facts(self) -> dict[str, Any]:
        """What the record says of the run beside its times."""
        return {
            "parameters": self._parameters,
            "n_train": self.dataset.n_train,
            "n_test": self.dataset.n_test,
            "metric_name": self.dataset.metric_name,
            "dataset_sha256": self.dataset.sha256,
            "steps_per_epoch": self.plan.steps(0),
            "batch_per_worker": self.plan.batch_size,
            "nodes": self.scenery.cluster.nodes_for(self.run.workers),
            "workers_per_node": self.scenery.cluster.node.workers_per_node,
            "device": self.table.source,
            "launcher": "in-process",
            "binding": "none",
        }

    def _training(self, replica: Replica) -> Callable[[], WorkerReport]:
        def program() -> WorkerReport:
            torch.manual_seed(_worker_seed(self.run, replica.rank))
            return train(replica, self.strategy, on_epoch=self._watch_time)

        return program

    def _evaluation(self, replica: Replica) -> Callable[[], Verdict]:
        return lambda: evaluate(replica, self.strategy, self.dataset)

    def _watch_time(self, epoch: int) -> None:
        if time.perf_counter() > self._deadline:
            raise _TimeLimitError(f"the time limit of {self.run.time_limit_s:g} s was over in epoch {epoch + 1}")

    def _replica(self, rank: int, costs: Costs) -> Replica:
        options = self.run.virtual
        jitter = jitter_source(options.jitter, options.jitter_sigma, self.table, seed=self.run.seed, worker=rank)
        clock = VirtualClock(self.times, speed=options.slowdown.get(rank, 1.0), jitter=jitter)
        comm = VirtualCommunicator(Scheduler(seed=0), self.group, rank, clock, costs)

        def shared(initial: Tensor) -> VirtualShared:
            if self.store is None:
                self.store = VirtualStore(initial)
            return VirtualShared(self.store, comm)

        def server(rule: ServerRule) -> VirtualServer:
            if self.desk is None:
                self.desk = ServerDesk(rule)
            return VirtualServer(self.desk, comm)

        per_node = self.scenery.cluster.node.workers_per_node
        return Replica(self.run, self.dataset, self.plan, comm, clock, None, shared, server, per_node)

    def _costs(self) -> Costs:
        cluster, run = self.scenery.cluster, self.run
        network = Network(cluster, cluster.node.workers_per_node, run.virtual.collective)
        return Costs(network, self.scenery.engines, self.strategy.engines[0])

    def _gradients(self, replica: Replica) -> list[GradientTensor]:
        trainable = [parameter for parameter in replica.model.parameters() if parameter.requires_grad]
        release = self.table.release
        if len(release) != len(trainable):  # stated step times: released evenly, the last layer first
            release = [1.0 - index / len(trainable) for index in range(len(trainable))]
        return [GradientTensor(p.nbytes, share) for p, share in zip(trainable, release, strict=True)]


def _worker_seed(run: Run, rank: int) -> int:
    return (run.seed * 1_000_003 + rank + 1) % (1 << 63)


def _draws_random_numbers(replica: Replica) -> bool:
    """Whether a step of the model consumes random numbers (dropout): then every worker needs its own generator."""
    before = torch.get_rng_state()
    try:
        for batch in replica.batches(0):
            replica.gradient(batch)
            break
        return not torch.equal(before, torch.get_rng_state())
    finally:
        torch.set_rng_state(before)
        replica.reset()
