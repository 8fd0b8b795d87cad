"""The program of each real process: one launch serves a whole sweep.

Runs follow in the job's order. The first W ranks work on a run of W workers, and a
strategy's servers are the ranks after them; the others sleep until it is over, for a
spinning rank would take a core from those that compute. Rank 0 gathers the meters and
tells the launcher. Ranks of a launch that no MPI joins find rank 0 by a file in the
folder of the launch (`meet`).
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import platform
import secrets
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

import torch

from scalebench.comm import torch_dist
from scalebench.comm.control import Control, StoreGroup
from scalebench.comm.launchers import named
from scalebench.comm.launchers.mpirun import apart
from scalebench.errors import EngineError, RunError, in_one_line
from scalebench.native import job_files
from scalebench.native.heartbeat import Heartbeat, Phase, is_stopped
from scalebench.native.session import Session, slow_links_of
from scalebench.study.spec import Run
from scalebench.system.parent_watch import end_with_launcher
from scalebench.training.outcome import Outcome
from scalebench.training.reference_step import Gauge

# imported where it is used: it would initialise MPI, which a rendezvous does without
if TYPE_CHECKING:
    from mpi4py import MPI

RENDEZVOUS = "rendezvous.json"
_FOREVER = timedelta(days=365)  # a run's limit is the launching command's to keep
_LOOK_S = 0.05
_LEAVING_S = 30  # the launcher has given up by then
_NAP = 1e-3  # seconds between an idle rank's looks; longer where many share a core


def main(path: Path) -> None:
    """Take part in every run of the job; a failure ends the launch, and the launcher starts the rest again."""
    end_with_launcher()
    job = job_files.Job.load(path)
    launcher = named(job.launcher)
    if not job.rendezvous:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        if world.size != job.ranks:
            error = apart(
                job.ranks,
                world.size,
                launcher.name,
                MPI.Get_library_version(),
                without_mpi=launcher.without_mpi,
            )
            try:
                job_files.Death(job_files.REFUSED, error, rank=world.rank).save(
                    job.folder
                )
            finally:
                world.Abort(1)
        heart = Heartbeat(job.heartbeats, world.rank)
        heart.watch()
        collect_garbage()
        contact(world, heart)
        _serve(job, world, heart)
        return
    rank = launcher.rank()
    heart = Heartbeat(job.heartbeats, rank)
    heart.watch()
    collect_garbage()
    try:
        group = meet(
            job.folder, heart, rank, job.ranks, one_node=launcher.is_on_one_node()
        )
    except Exception as error:  # no route, a port in use
        job_files.Death("failed", in_one_line(error), rank=rank).save(job.folder)
        raise
    _serve(job, group, heart)
    group.close()  # rank 0, which holds the store, leaves last


def _serve(job: job_files.Job, world: Control, heart: Heartbeat) -> None:
    loop = RankLoop(job, world, heart)
    try:
        loop.serve()
    except BaseException as error:
        status = error.status if isinstance(error, RunError) else "failed"
        try:
            job_files.Death(status, in_one_line(error), loop.current, world.rank).save(
                job.folder
            )
        finally:  # whatever becomes of the reason: the others wait for this rank
            world.Abort(1)
    heart.enter(Phase.FINISHED)
    # called after the last thread of an own model has ended
    atexit.register(_leave, heart)


def _leave(heart: Heartbeat) -> None:
    """Say that only MPI's own end is left, and bound it: it waits for the daemon, which may be stopped.

    In MPI's end no thread of Python runs, so that a daemon that is stopped before is
    waited for here: the heartbeat's thread ends both once the launch is over.
    """
    heart.enter(Phase.LEAVING)
    while is_stopped(os.getppid()):
        time.sleep(_NAP)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LEAVING_S)


def meet(
    folder: Path, heart: Heartbeat, rank: int, size: int, *, one_node: bool = False
) -> StoreGroup:
    """Connect the `size` ranks of a launch, whose files lie in `folder`; `one_node`: all are known to be on one.

    Raises:
        EngineError: no address of rank 0's host can be reached from here, or rank 0 cannot listen at MASTER_PORT.
    """
    stated, port = (
        os.environ.get("MASTER_ADDR"),
        int(os.environ.get("MASTER_PORT") or 0),
    )
    heart.wait_for(0 if rank else None)
    path = folder / RENDEZVOUS
    if rank == 0:
        address = torch_dist.listening_address(one_node=one_node)
        try:
            store = torch_dist.listen(address, port, _FOREVER)
        except OSError as error:
            raise EngineError(
                f"cannot listen at port {port} of {address or platform.node()}: {os.strerror(error.errno or 0)}; set "
                "MASTER_PORT to a free one, or to nothing for one that the system chooses"
            ) from None
        addresses = (
            [address]
            if address
            else [stated]
            if stated
            else list(torch_dist.own_addresses())
        )
        told: dict[str, Any] = {
            "host": platform.node(),
            "port": store.port,
            "addresses": addresses,
        }
        told["on_all"] = not address
        told["key"] = secrets.token_hex()
        _write_for_this_user(path, json.dumps(told))
    else:
        while not path.exists():
            time.sleep(_LOOK_S)
        told = json.loads(path.read_text())
        is_here = told["host"] == platform.node()
        addresses = (
            [torch_dist.LOOPBACK] if is_here and told["on_all"] else told["addresses"]
        )
        address = torch_dist.first_answering(addresses, told["port"], told["host"])[0]
        store = torch_dist.STORE(address, told["port"], timeout=_FOREVER)
    heart.wait_for(None)
    world = StoreGroup(store, bytes.fromhex(told["key"]), range(size), rank)
    world.Barrier()
    return world


def _write_for_this_user(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600, exist_ok=False)
    fresh.write_text(text)
    fresh.replace(path)


def contact(world: MPI.Comm, heart: Heartbeat) -> None:
    """Exchange a message with the ranks 1, 2, 4 ... away, so that two hosts that cannot connect are known by name."""
    distance = 1
    while distance < world.size:
        to, source = (
            (world.rank + distance) % world.size,
            (world.rank - distance) % world.size,
        )
        heart.wait_for(source)
        sending = world.isend(None, to)
        world.recv(source=source)
        heart.wait_for(to)
        sending.wait()
        distance *= 2
    heart.wait_for(None)


class RankLoop:
    """The work of one rank in all runs of the job."""

    def __init__(self, job: job_files.Job, world: Control, heart: Heartbeat) -> None:
        self.job, self.world, self.heart = job, world, heart
        self.current = ""  # the run under way
        self._events, self._further = (
            job_files.JsonLines(job.events),
            job_files.JsonLines(job.further),
        )  # rank 0's alone
        self._groups: dict[int, Control] = {}
        self._gauge: Gauge | None = None  # of the first run
        ranks = world.allgather((platform.node(), os.getpid(), os.sched_getaffinity(0)))
        here = [pid for node, pid, _ in ranks if node == platform.node()]
        self._nap = _NAP * max(1.0, len(here) / len(os.sched_getaffinity(0)) / 8)
        self._family = (os.getppid(), *here)  # the launch's processes on this node
        if not named(job.launcher).binds_surely and _share_cores(
            [(node, cores) for node, _, cores in ranks]
        ):
            self.job = job.model_copy(update={"binding": "none"})

    def serve(self) -> None:
        job_files.keep_nodes(self.world, self.job.host, self.job.folder)
        runs = self.job.runs
        while runs:
            self._work_on(runs)
            runs = self._told_by_first() if self.job.stays_open else []

    def _work_on(self, runs: list[Run]) -> None:
        for run in runs:
            self.current = run.run_id
            workers = self._first(run.workers)
            servers = job_files.server_ranks(run)
            served = self._first(run.workers + servers) if servers else None
            if self.world.rank < run.workers:
                self._take_part(run, workers, served)
            elif served is not None and self.world.rank < run.workers + servers:
                self.heart.enter(Phase.TRAINING)
                torch.set_num_threads(run.threads_per_worker)
                dtype, slow = getattr(torch, run.dtype), slow_links_of(run)
                from scalebench.comm.server import ServerLoop

                loop = ServerLoop(
                    cast("MPI.Comm", served),
                    dtype,
                    servers,
                    beat=self.heart.beat,
                    traced=run.trace,
                    slow_links=slow,
                )
                loop.serve()
                served.gather((loop.served, loop.laps))
            self._rest()

    def _take_part(self, run: Run, workers: Control, served: Control | None) -> None:
        if self.world.rank == 0:
            self._events.append({"run_id": run.run_id})
        gc.collect()
        # Optimizers of torch's own make it import its compiler, 400,000 objects that no
        # later run has to look through.
        gc.freeze()
        references = self._references()
        try:
            outcome = Session(
                self.job, run, workers, self.heart, served, self._family
            ).execute()
        except Exception as error:
            if run.workers > 1 or served is not None:
                raise  # the others wait for this rank inside a collective
            status = error.status if isinstance(error, RunError) else "failed"
            outcome = Outcome(run.run_id, status, f"rank 0: {in_one_line(error)}")
        if outcome is not None:  # on rank 0
            references += self._references()
            outcome.add_facts(
                reference_step_s=fmean(references) if references else None
            )
            self._events.append({"run_id": run.run_id, "outcome": outcome.to_json()})

    def _references(self) -> list[float]:
        """Time the reference step on rank 0, which gives the machine speed beside the run; empty on other ranks."""
        if self.world.rank:
            return []
        if self._gauge is None:
            torch.set_num_threads(1)
            self._gauge = Gauge()
        return [self._gauge.seconds()]

    def _told_by_first(self) -> list[Run]:
        """Further runs: rank 0 gets them from the launcher, the others sleep until it broadcasts them."""
        block = None
        while (
            self.world.rank == 0 and (block := next(self._further.new(), None)) is None
        ):
            time.sleep(_NAP)
        self._rest()
        return [Run.model_validate(run) for run in self.world.bcast(block)]

    def _first(self, ranks: int) -> Control:
        """The group of the first `ranks` ranks, or of the others, created once by all ranks together."""
        if ranks not in self._groups:
            self._groups[ranks] = self.world.Split(
                int(self.world.rank >= ranks), self.world.rank
            )
        return self._groups[ranks]

    def _rest(self) -> None:
        """Sleep until every rank has arrived."""
        self.heart.enter(Phase.IDLE)
        barrier = self.world.Ibarrier()
        while not barrier.Test():
            time.sleep(self._nap)


def _share_cores(ranks: Sequence[tuple[str, set[int]]]) -> bool:
    """Return True if two ranks, of (node, cores) each, share a core: Slurm's configuration may ignore binding."""
    taken: set[tuple[str, int]] = set()
    for node, cores in ranks:
        own = {(node, core) for core in cores}
        if own & taken:
            return True
        taken |= own
    return False


def collect_garbage() -> None:
    """Collect garbage from here on, but not among the objects of the modules imported so far, which stay."""
    gc.freeze()
    gc.enable()
