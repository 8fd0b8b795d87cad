"""One run on one rank: connect, train, evaluate, gather."""

from __future__ import annotations

import gc
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.mesh import Mesh
from scalebench.comm.base import Capability, Server, ServerRule, SharedState
from scalebench.comm.control import Control, ObjectGroup
from scalebench.comm.counters import EventLog, SlowLinks
from scalebench.comm.engines import named
from scalebench.comm.engines.base import Place
from scalebench.comm.native import NativeCommunicator
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.dataset import Dataset, open_dataset
from scalebench.errors import ClusterError, DivergedError, EngineError
from scalebench.native import heartbeat, job_files, sensors, timeline
from scalebench.records.provenance import host_hash
from scalebench.strategies import registry
from scalebench.strategies.base import Strategy
from scalebench.study.spec import Run
from scalebench.system import disturbance, hardware, random_state
from scalebench.system.clock import DeviceClock, DeviceEvent, WallClock
from scalebench.training import initial_weights, loop
from scalebench.training.outcome import Evaluation, Outcome, RunFacts, WorkerReport
from scalebench.training.pacing import PacedClock, PacedStep, jitter_of, slowness_of
from scalebench.training.replica import Replica

# imported where they are used: they would initialise MPI, which a rendezvous does
# without
if TYPE_CHECKING:
    from mpi4py import MPI

    from scalebench.comm.server import OneSidedState, RankServer


class Commits(Protocol):
    """What an elastic run goes on from, kept at the end of its epochs."""

    def resume(self, replica: Replica) -> None:
        """Give `replica` the last committed state, if there is one, and say that training begins. Collective."""

    def commit(self, replica: Replica, epoch: int, *, agreed: bool) -> None:
        """Keep the state of `replica` at the end of `epoch`, if possible; `agreed`: replicas are equal. Collective."""


class Session:
    """A run on one of its workers; `mpi` joins the run's workers, `served` them and their servers.

    `family` are the launch's processes on this node; the first, unlike the ranks, is
    bound to no core. An elastic run begins with what its `commits` hold, and commits
    each epoch.
    """

    def __init__(
        self,
        job: job_files.Job,
        run: Run,
        mpi: ObjectGroup,
        heart: heartbeat.Heartbeat,
        served: Control | None = None,
        family: Sequence[int] = (),
        commits: Commits | None = None,
    ) -> None:
        self.job, self.run, self.mpi, self.heart, self.served = (
            job,
            run,
            mpi,
            heart,
            served,
        )
        self._family, self._commits = family, commits
        heart.wait_for(None)
        places = mpi.allgather(platform.node())
        held = Counter(places)
        # By host names: each launcher calls the variable otherwise.
        self.local_rank = places[: mpi.rank].count(platform.node())
        self.workers_per_node, self.nodes = max(held.values()), len(held)
        self.engine = named(run.engine)
        self.device = self._choose_device()

    def execute(self) -> Outcome | None:
        """Execute the whole run; rank 0 gets the outcome, the others None.

        Raises:
            DivergedError: the training became NaN or infinite on this worker alone.
        """
        self.heart.enter(heartbeat.Phase.PREPARING)
        run = self.run
        self._elsewhere = self._listen()
        torch.set_num_threads(run.threads_per_worker)
        seed = random_state.worker_seed(
            run.seed, self.mpi.rank
        )  # as virtual workers are seeded
        random_state.seed_generators(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        strategy = registry.create(run.strategy.name, run.strategy.options, run.engine)
        dataset = open_dataset(self.job.datasets[run.workers])
        clock = self._clock()
        # Horovod with settings of its own dies when it is initialised again
        # (`settings_of`), and that of an elastic run is for `hvd.elastic` to end.
        alone, for_good = (
            self.nodes == 1,
            bool(self.job.settings) or self._commits is not None,
        )
        waits_for = self.heart.wait_for
        waits_for(None)
        place = Place(self.mpi, clock, alone, for_good, waits_for)
        with self.engine.connect(place) as comm:
            comm.slow_links = slow_links_of(run)
            return self._train(strategy, dataset, clock, comm)

    def _train(
        self,
        strategy: Strategy,
        dataset: Dataset,
        clock: WallClock,
        comm: NativeCommunicator,
    ) -> Outcome | None:
        mesh = strategy.traits.mesh(self.run.workers)
        plan = BatchPlan.of(
            self.run, self.run.workers, self.run.seed, dataset, mesh.parts
        )
        opened = _Opened(comm, self.served, getattr(torch, self.run.dtype))
        replica = self._replica(dataset, plan, comm, clock, mesh, opened)
        # of a whole model, from which a worker may take a part
        parameters = replica.parameters.numel()
        initial = (
            # not on a GPU, whose memory is measured
            replica.initial.cpu()
            if self.run.save_weights and self.mpi.rank == 0
            else None
        )
        # Hooks hold gradients back until their share of one pass over the model is over;
        # where there is no such pass, each layer's lap is stretched.
        if isinstance(clock, PacedClock) and _goes_back_at_once(
            strategy, self.run.workers
        ):
            clock.attach(
                replica.model, waits_in_backward=not strategy.traits.split_is_measured
            )
        # Ranks of one node read one clock.
        offsets = timeline.clock_offsets(self.mpi) if self.nodes > 1 else None
        try:
            report, ends, energy = self._measure(replica, strategy, clock)
        except DivergedError as error:
            if not error.everywhere:
                raise  # the others are inside a collective: this ends the launch
            return self._diverged(str(error), opened)
        events = comm.event_log.dated(clock.moments)  # evaluation communicates too
        self.heart.enter(heartbeat.Phase.EVALUATING)
        began = time.perf_counter()
        verdict = loop.evaluate(replica, strategy, dataset)
        eval_s = time.perf_counter() - began
        others = self._elsewhere.share() if self._elsewhere is not None else None
        # Servers leave their loops once all workers have closed, and join in this.
        told = self._close(opened)
        shares = self.mpi.gather(
            _Share(report, verdict.evaluations, events, ends, others, energy)
        )
        if shares is None:
            return None
        self._save_weights(initial, verdict)
        facts = self._facts(dataset, plan, parameters, shares)
        return self._outcome(strategy, shares, told, offsets, eval_s, facts)

    def _replica(
        self,
        dataset: Dataset,
        plan: BatchPlan,
        comm: NativeCommunicator,
        clock: WallClock,
        mesh: Mesh,
        opened: _Opened,
    ) -> Replica:
        """Return the worker, which can open a shared state or a server where the run has them."""
        return Replica(
            self.run,
            dataset,
            plan,
            comm,
            clock,
            self.device,
            opened.state if Capability.SHARED_STATE in self.engine.provides else None,
            opened.server if self.served is not None else None,
            self.workers_per_node,
            mesh=mesh,
        )

    def _outcome(
        self,
        strategy: Strategy,
        shares: Sequence[_Share],
        told: list[Any],
        offsets: Sequence[timeline.ClockOffset] | None,
        eval_s: float,
        facts: RunFacts,
    ) -> Outcome:
        """Join the `shares` of all workers, and the waiting times that follow from all of them."""
        waited = None
        # Moments of different workers are compared, which takes one clock.
        if strategy.traits.split_is_measured and self.nodes == 1:
            waited = timeline.waits(
                [share.events for share in shares], [meter for meter, _ in told]
            )
        _set_offsets(shares, offsets)
        _set_waiting(shares, waited)
        found = sorted(
            chain(*(share.evaluations for share in shares)),
            key=lambda each: (each.epoch, each.elapsed_s),
        )
        reports = [share.report for share in shares]
        outcome = Outcome(
            self.run.run_id, "completed", "", reports, found, eval_s, facts
        )
        if self.run.trace:
            timeline.align(
                outcome,
                waited,
                [busy for _, busy in told] if self.nodes == 1 else (),
                offsets,
            )
        return outcome

    def _measure(
        self, replica: Replica, strategy: Strategy, clock: WallClock
    ) -> tuple[WorkerReport, list[float], sensors.Joules]:
        """Train: return the report of this worker, the ends of its epochs, and its node's or device's energy.

        Raises:
            DivergedError: the training became NaN or infinite.
        """
        ends: list[float] = []
        gpu = self._gpu()
        meter, before = self._meter(gpu), sensors.Cores.now()
        clocks = sensors.GpuClocks(gpu) if gpu is not None else None

        def on_begin() -> None:
            nonlocal before
            if self._commits is not None:
                self._commits.resume(replica)
            if isinstance(clock, PacedClock):
                clock.agree(self.mpi.allgather(clock.step_time))
            gc.collect()  # after what setting up has imported, or it is due in training
            # Before it took its part, this worker held the whole model.
            sensors.forget_peak_memory(self.device)
            before = sensors.Cores.now()
            if clocks is not None:
                clocks.begin()
            meter.begin()

        def on_epoch(epoch: int) -> None:
            ends.append(clock.mark)
            meter.look()
            if clocks is not None:
                clocks.look()
            if self._commits is not None:
                self._commits.commit(
                    replica, epoch, agreed=strategy.in_agreement(replica, epoch) is True
                )

        self.heart.enter(heartbeat.Phase.TRAINING)
        replica.on_batch = self.heart.begin_batch
        report = loop.train(
            replica,
            strategy,
            warm=self.run.warmup_steps > 0,
            measured_split=strategy.traits.split_is_measured,
            on_begin=on_begin,
            on_epoch=on_epoch,
        )
        # The evaluation needs whole models.
        report.peak_rss_mib, report.peak_device_mib = sensors.peak_memory(self.device)
        if isinstance(clock, timeline.TracedClock):
            report.laps = clock.timed_laps()
        report.paced_overrun = clock.overrun if isinstance(clock, PacedClock) else None
        _set_cores(report, before, sensors.Cores.now())
        if clocks is not None:
            clocks.end()
            _set_gpu_clocks(report, clocks)
        self.mpi.Barrier()  # the energy is that up to the last worker's end
        return report, list(clock.moments(ends)), meter.end()

    def _facts(
        self,
        dataset: Dataset,
        plan: BatchPlan,
        parameters: int,
        shares: Sequence[_Share],
    ) -> RunFacts:
        """Return what is one for all workers of the run, from what each of them has told."""
        energy_j, energy_source = sensors.total_energy(
            [share.energy for share in shares]
        ) or (
            None,
            None,
        )
        return RunFacts.of(
            dataset,
            plan,
            parameters=parameters,
            nodes=self.nodes,
            workers_per_node=self.workers_per_node,
            device=sensors.device_name(self.device),
            gpus=self.run.workers if self.device.type == "cuda" else None,
            launcher=self.job.launcher,
            binding=self.job.binding,
            others_load=max(
                (
                    share.others_load
                    for share in shares
                    if share.others_load is not None
                ),
                default=None,
            ),
            energy_j=energy_j,
            energy_source=energy_source,
        )

    def _listen(self) -> disturbance.BackgroundLoad | None:
        """Count on one worker per node what other programs take of its cores, until the end of the evaluation."""
        if self.local_rank or not self._family:
            return None
        return disturbance.BackgroundLoad(
            disturbance.taken_by(self._family), of=self._family[0]
        )

    def _gpu(self) -> sensors.Gpu | None:
        """The GPU of this worker as its driver knows it; None without one, and in a paced run, which sleeps."""
        if self.run.execution != "native" or self.device.type != "cuda":
            return None
        return sensors.Gpu(sensors.gpu_name(self.device))

    def _meter(self, gpu: sensors.Gpu | None) -> sensors.EnergyMeter:
        """The energy meter; without counters in a paced run, which sleeps while a device would work."""
        counts = self.run.execution == "native"
        return sensors.EnergyMeter(
            first_on_node=counts and self.local_rank == 0,
            first=counts and self.mpi.rank == 0,
            gpu=gpu,
        )

    def _diverged(self, said: str, opened: _Opened) -> Outcome | None:
        """The outcome of a run in which all workers stopped together; the launch continues with the next run."""
        self._close(opened)
        told = self.mpi.gather(said)
        if told is None:
            return None
        # The worker whose loss it was says more than those whose weights it spoiled.
        where = next((text for text in told if "training loss" in text), told[0])
        return Outcome(self.run.run_id, "diverged", where)

    def _close(self, opened: _Opened) -> list[Any]:
        """Close what the run shared; rank 0 gets the event log and laps of each server."""
        opened.close()
        self.heart.enter(heartbeat.Phase.REPORTING)
        told = self.served.gather(None) if self.served is not None else None
        return [said for said in told or () if said is not None]

    def _save_weights(
        self, initial: Tensor | None, verdict: loop.EvaluationResult
    ) -> None:
        if (
            initial is not None
            and self.job.weights is not None
            and verdict.final is not None
        ):
            initial_weights.save_weights(
                self.job.weights, self.run.run_id, initial, verdict.final
            )

    def _choose_device(self) -> torch.device:
        if self.engine.on_gpus:
            if not torch.cuda.is_available():
                raise EngineError(
                    f"engine {self.engine.name} needs a CUDA GPU on every node; use --engine gloo"
                )
            device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
            # NCCL joins the current devices of its ranks.
            torch.cuda.set_device(device)
            sensors.require_gpus_of_their_own(
                self.mpi.allgather(sensors.gpu_name(device))
            )
            return device
        return torch.device("cpu")

    def _clock(self) -> WallClock:
        """The clock of the run; every lap is a heartbeat."""
        beat, on_gpu = self.heart.beat, self.device.type == "cuda"
        if self.run.execution != "paced":
            if on_gpu:
                # Kernels run on after their call: a lap would end before its work.
                queued = timeline.TracedDeviceClock if self.run.trace else DeviceClock
                return queued(beat, _event)
            return (timeline.TracedClock if self.run.trace else WallClock)(beat)

        def synchronise() -> None:
            if on_gpu:
                # Not the whole device, on which a message may wait for its receiver.
                torch.cuda.current_stream().synchronize()
            beat()

        paced = timeline.TracedPacedClock if self.run.trace else PacedClock
        rank = self.mpi.rank
        target, samples = _pace(self.run)
        return paced(
            target,
            synchronise,
            slowness_of(self.run, rank),
            jitter_of(self.run, rank),
            samples,
        )


def _event() -> DeviceEvent:
    """Put an event into the queue of this rank's GPU."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class _Share(NamedTuple):
    """What a worker tells rank 0 of a run: its report and evaluations, and what these are completed from."""

    report: WorkerReport
    evaluations: list[Evaluation]
    events: EventLog
    ends: list[float]
    others_load: float | None
    energy: sensors.Joules


class _Opened:
    """The states and servers that a run has opened on its ranks, `served`."""

    def __init__(
        self, comm: NativeCommunicator, served: Control | None, dtype: torch.dtype
    ) -> None:
        self._comm, self._served, self._dtype = comm, served, dtype
        self._kept: list[OneSidedState | RankServer] = []

    def state(self, initial: Tensor, host: int) -> SharedState:
        """Open a state that all ranks read and write, in the memory of the rank `host`."""
        from scalebench.comm.mpi import MpiCommunicator
        from scalebench.comm.server import OneSidedState

        assert isinstance(self._comm, MpiCommunicator)
        state = OneSidedState(self._comm, initial, host)
        self._kept.append(state)
        return state

    def server(self, make: Callable[[], ServerRule]) -> Server:
        """Open the server that answers by the rule that `make` returns."""
        from scalebench.comm.mpi import MpiCommunicator
        from scalebench.comm.server import RankServer

        assert isinstance(self._comm, MpiCommunicator)
        assert self._served is not None
        server = RankServer(
            self._comm, cast("MPI.Comm", self._served), make(), self._dtype
        )
        self._kept.append(server)
        return server

    def close(self) -> None:
        """Close all of them."""
        for each in self._kept:
            each.close()


def _set_waiting(
    shares: Sequence[_Share], waited: Sequence[timeline.Waits] | None
) -> None:
    """Set the waiting times, and the bubbles of pipelines, in the reports of `shares`; None if they are unknown."""
    for worker, share in enumerate(shares):
        report = share.report
        report.wait_s = (
            float(np.diff(waited[worker]).sum()) if waited is not None else None
        )
        of_epochs = (
            timeline.by_epoch(waited[worker], share.ends)
            if waited is not None
            else [None] * len(report.epochs)
        )
        for epoch, seconds in zip(report.epochs, of_epochs, strict=True):
            epoch.wait_s = seconds
    if waited is not None:
        for share, seconds in zip(
            shares, timeline.bubbles([share.events for share in shares]), strict=True
        ):
            share.report.bubble_s = seconds


def _set_cores(
    report: WorkerReport, before: sensors.Cores, after: sensors.Cores
) -> None:
    """Set the place of a worker in its `report`, and how its cores were clocked before and after training."""
    report.node = host_hash()
    report.cores = hardware.core_list(after.usable)
    report.mhz_before, report.mhz_after = before.mhz, after.mhz
    report.throttles = after.throttled_since(before)


def _set_gpu_clocks(report: WorkerReport, clocks: sensors.GpuClocks) -> None:
    """Set in a worker's `report` how its GPU was clocked before and after training, and what slowed it."""
    report.gpu_mhz_before, report.gpu_mhz_after = clocks.mhz_before, clocks.mhz_after
    report.gpu_slowdowns = clocks.slowdowns


def _set_offsets(
    shares: Sequence[_Share], offsets: Sequence[timeline.ClockOffset] | None
) -> None:
    """Set the clock offsets in the reports; None are known where all workers have the clock of one node."""
    for share, offset in zip(shares, offsets or (), strict=False):
        share.report.clock_offset_s, share.report.clock_error_s = (
            offset.wall_s,
            offset.error_s,
        )


def _goes_back_at_once(strategy: Strategy, workers: int) -> bool:
    """Return True if the backward pass goes through the whole model, and not through layers with exchanges between."""
    traits = strategy.traits
    if traits.mesh(workers).parts > 1:
        return False
    # Where exchanges are not measured apart, a library makes them inside of the pass.
    return not traits.cuts_model(workers) or not traits.split_is_measured


def _pace(run: Run) -> tuple[PacedStep | float, int]:
    """The step time of the stated device, the study's or else the cluster's, and the samples of the step.

    `device_step_time` is the time of a worker's batch; with `batch_global`, that of the
    global batch, of which a replica takes its share. The times of a cluster are those
    of one batch size, and no samples are returned.
    """
    batch = run.batch_per_worker
    if batch is None:
        strategy = registry.create(run.strategy.name, run.strategy.options, run.engine)
        batch = (run.batch_global or 0) // strategy.traits.mesh(run.workers).data
    if (seconds := run.device_step_time) is not None:
        return (
            seconds * batch / run.batch_global if run.batch_global else seconds,
            batch,
        )
    known = load_cluster(run.cluster).step_times_of(str(run.model), run.dtype)
    if batch not in known:
        raise ClusterError(
            f"cluster {run.cluster}: no step time for {run.model} in {run.dtype} at batch {batch}; "
            "state the seconds of one step with --device-step-time"
        )
    entry = known[batch]
    return PacedStep(entry.forward_s, entry.backward_s, entry.update_s), 0


def slow_links_of(run: Run) -> SlowLinks | None:
    """The delays of the slow links of a paced run; None without any."""
    if run.execution != "paced" or not run.virtual.slow_links:
        return None
    return SlowLinks(load_cluster(run.cluster), run.virtual.slow_links)
