"""`mpirun -n P python -m scalebench.native.engine_probe SPEC.json`: what engines cost, from synthetic buffers only.

Nothing of a study is timed here, so a virtual run is never fitted to the real one it is compared with. Every number
comes from repetitions after a warm-up; all ranks take part in all of them, as busy as they are in training.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean, median

import torch
from mpi4py import MPI

from scalebench.clock import WallClock
from scalebench.cluster.engine_costs import EngineCost, EngineCosts
from scalebench.comm.mpi import MpiCommunicator
from scalebench.comm.server import RankServer, ServerLoop
from scalebench.comm.shared import OneSidedState
from scalebench.lifeline import end_with_parent
from scalebench.native.connection import connected
from scalebench.native.engine_steps import Step, ddp_step, horovod_step, plain_step, probed_network

GRID = (4, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)  # bytes
_COARSE_GRID = (4, 4 << 10, 64 << 10, 1 << 20, 4 << 20)
_SECONDS_PER_POINT = 0.015
_SMALL = 16 << 10  # bytes: up to here Horovod's negotiation can be told from its transport
_MOST, _LEAST = 1000, 3  # repetitions
_FAST_CYCLE_MS = "0.01"  # Horovod's loop then waits for nobody: what is left is negotiation and transport

Typical = Callable[[list[float]], float]


class Echo:
    """A server's rule that only answers, with as much as was sent."""

    def __call__(self, worker: int, payload: torch.Tensor, now: float) -> list[tuple[int, torch.Tensor]]:
        return [(worker, payload.clone())]


class Probe:
    """Measures one group of ranks; `source` says where and with what."""

    def __init__(self, mpi: MPI.Comm, source: str) -> None:
        self.mpi, self.source = mpi, source
        self.clock = WallClock()

    def measure(self, engine: str) -> list[EngineCost]:
        """The entries of one engine; the same on all ranks but for noise, rank 0's count."""
        return {"mpi": self._mpi, "horovod": self._horovod, "gloo": self._gloo}[engine]()

    def _mpi(self) -> list[EngineCost]:
        comm = MpiCommunicator(self.mpi, self.clock)
        spread, gather = partial(comm.broadcast_, linear=True), partial(comm.reduce_, linear=True)
        return [
            self._entry("mpi", self._curve(comm.allreduce_, GRID, fmean)),
            self._entry("mpi-broadcast", self._curve(comm.broadcast_, _COARSE_GRID, fmean)),
            self._entry("mpi-reduce", self._curve(comm.reduce_, _COARSE_GRID, fmean)),
            self._entry("mpi-linear-broadcast", self._curve(spread, _COARSE_GRID, fmean)),
            self._entry("mpi-linear-reduce", self._curve(gather, _COARSE_GRID, fmean)),
            self._entry("mpi-onesided", [self._one_sided(comm, nbytes) for nbytes in _COARSE_GRID]),
            *self._server(),
        ]

    def _one_sided(self, comm: MpiCommunicator, nbytes: int) -> tuple[int, float]:
        """Lock, fetch, store and unlock from the last rank, nobody else wanting it."""
        state = OneSidedState(comm, torch.zeros(nbytes // 4))

        def access() -> None:
            with state.exclusive():
                pass

        seconds = self._time_alone(access)
        state.close()
        return nbytes, seconds

    def _server(self) -> list[EngineCost]:
        """A request of n bytes and its reply, of one worker to the last rank, and what of that the server is busy."""
        serves = self.mpi.rank == self.mpi.size - 1
        group = self.mpi.Split(int(serves))
        whole, busy = [], []
        for nbytes in _COARSE_GRID:
            if serves:
                loop = ServerLoop(self.mpi, torch.float32)
                handled = loop.serve()
                busy.append((nbytes, loop.busy_s / handled))
            else:
                whole.append((nbytes, self._asked(MpiCommunicator(group, self.clock), nbytes)))
            _sleep_until_all_are_here(self.mpi)  # one server after the other
        group.Free()
        busy = self.mpi.bcast(busy, self.mpi.size - 1)
        return [self._entry("mpi-server", whole or busy), self._entry("mpi-server-busy", busy)]

    def _asked(self, workers: MpiCommunicator, nbytes: int) -> float:
        """Worker 0's mean; the others sleep meanwhile."""
        server, payload = RankServer(workers, self.mpi, Echo()), torch.zeros(nbytes // 4)
        laps: list[float] = []
        deadline = time.perf_counter() + _SECONDS_PER_POINT
        while workers.rank == 0 and len(laps) < _MOST and (len(laps) < _LEAST or time.perf_counter() < deadline):
            began = time.perf_counter()
            server.request(payload)
            laps.append(time.perf_counter() - began)
        _sleep_until_all_are_here(workers.mpi)
        server.close()
        return fmean(laps) if laps else 0.0

    def _horovod(self) -> list[EngineCost]:
        period = median(self._period() for _ in range(3))
        os.environ["HOROVOD_CYCLE_TIME"] = _FAST_CYCLE_MS
        with connected("horovod", self.mpi, self.clock, one_node=True) as comm:
            whole = self._curve(comm.allreduce_, GRID)
            enqueuing = self._enqueuing()
        del os.environ["HOROVOD_CYCLE_TIME"]
        with self._alone("horovod"):
            alone = self._overhead(horovod_step)
        # Horovod moves and adds bytes by this MPI's allreduce; what a small operation takes beyond it is negotiation.
        small = tuple(nbytes for nbytes in GRID if nbytes <= _SMALL)
        transport = dict(self._curve(MpiCommunicator(self.mpi, self.clock).allreduce_, small))
        negotiation = max(0.0, median(seconds - transport[nbytes] for nbytes, seconds in whole if nbytes in transport))
        points = [(nbytes, transport.get(nbytes, max(0.0, seconds - negotiation))) for nbytes, seconds in whole]
        return [self._entry("horovod", points, negotiation_s=negotiation, cycle_s=period,
                            per_step_s=enqueuing + alone, alone_s=alone)]  # fmt: skip

    def _period(self) -> float:
        """Of Horovod's loop: what one small operation after another takes."""
        with connected("horovod", self.mpi, self.clock, one_node=True) as comm:
            buffer = torch.zeros(1)
            return self._time(lambda: comm.allreduce_(buffer), 0.1)

    def _enqueuing(self) -> float:
        """Handing four tensors over to Horovod's thread, as the hooks of a model with two layers do in its backward."""
        import horovod.torch as hvd

        tensors = [torch.zeros(16) for _ in range(4)]
        laps = []
        for _ in range(30):
            began = time.perf_counter()
            handles = [hvd.allreduce_async_(tensor, name=f"probe.{i}") for i, tensor in enumerate(tensors)]
            laps.append(time.perf_counter() - began)
            for handle in handles:
                hvd.synchronize(handle)
        return median(laps[5:])

    def _gloo(self) -> list[EngineCost]:
        with connected("gloo", self.mpi, self.clock, one_node=True) as comm:
            points = self._curve(comm.allreduce_, GRID, fmean)
        with self._alone("gloo"):
            alone = self._overhead(ddp_step)
            bucket = torch.zeros(sum(parameter.numel() for parameter in probed_network().parameters()))
            reduce = self._time(lambda: torch.distributed.all_reduce(bucket))
        return [self._entry("gloo", points, per_step_s=max(0.0, alone - reduce), alone_s=alone)]

    @contextmanager
    def _alone(self, engine: str) -> Iterator[None]:
        """Every rank on its own, all at the same time."""
        group = self.mpi.Split(self.mpi.rank)
        with connected(engine, group, self.clock, one_node=True):
            yield
        group.Free()

    def _overhead(self, engine_step: Callable[[], Step]) -> float:
        """What an engine's own step takes beyond the plain one of a replica, at one worker: hooks, copies, wrappers."""
        plain, wrapped = plain_step(), engine_step()
        rounds = [(self._time(wrapped, 0.02), self._time(plain, 0.02)) for _ in range(9)]
        return max(0.0, median(own - bare for own, bare in rounds))

    def _curve(
        self, operation: Callable[[torch.Tensor], None], grid: tuple[int, ...], typical: Typical = median
    ) -> list[tuple[int, float]]:
        """(bytes, seconds) over the grid: the median of three rounds, each of them `typical` of its laps."""
        buffers = [torch.zeros(nbytes // 4) for nbytes in grid]
        rounds = [
            [self._time(lambda buffer=buffer: operation(buffer), typical=typical) for buffer in buffers]  # type: ignore[misc]
            for _ in range(3)
        ]
        return [(nbytes, median(seconds)) for nbytes, seconds in zip(grid, zip(*rounds, strict=True), strict=True)]

    def _time(
        self, operation: Callable[[], None], budget_s: float = _SECONDS_PER_POINT, typical: Typical = median
    ) -> float:
        """`typical` seconds of `operation`, which all ranks do together and equally often.

        What a run waits for as it is, is averaged: a run is a sum, and where gloo's thread waits for a core, one sum
        in three takes a scheduler's tick of 4 ms that a median of 0.3 ms does not know. What is told from others by
        subtraction, or measured at a cycle that no run has, is a median.
        """
        operation()
        began = time.perf_counter()
        operation()
        trial = time.perf_counter() - began
        repetitions = self.mpi.bcast(int(min(_MOST, max(_LEAST, budget_s / max(trial, 1e-7)))))
        laps = []
        for _ in range(repetitions):
            began = time.perf_counter()
            operation()
            laps.append(time.perf_counter() - began)
        return typical(laps)

    def _time_alone(self, operation: Callable[[], None]) -> float:
        """The last rank's median, while the others sleep, as they would compute: outside MPI."""
        laps: list[float] = []
        if self.mpi.rank == self.mpi.size - 1:
            deadline = time.perf_counter() + _SECONDS_PER_POINT
            while len(laps) < 3 + _LEAST or (time.perf_counter() < deadline and len(laps) < _MOST):
                began = time.perf_counter()
                operation()
                laps.append(time.perf_counter() - began)
        _sleep_until_all_are_here(self.mpi)
        return float(self.mpi.bcast(median(laps[3:]) if laps else None, self.mpi.size - 1))

    def _entry(self, name: str, points: list[tuple[int, float]], **others: float) -> EngineCost:
        return EngineCost(
            engine=name, ranks=self.mpi.size, alpha_s=points[0][1], points=points, source=self.source, **others
        )


def _sleep_until_all_are_here(group: MPI.Comm) -> None:
    """A barrier that leaves the core to those who still measure."""
    done = group.Ibarrier()
    while not done.Test():
        time.sleep(1e-3)


def main(path: Path) -> None:
    """Measure the engines the file names, at the rank counts it names, and write the costs where it says."""
    end_with_parent()
    spec = json.loads(path.read_text())
    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    entries: list[EngineCost] = []
    for ranks in spec["ranks"]:
        group = world.Split(0 if world.rank < ranks else MPI.UNDEFINED, world.rank)
        if world.rank < ranks:
            probe = Probe(group, spec["source"])
            for engine in spec["engines"]:
                entries += probe.measure(engine)
        _sleep_until_all_are_here(world)
    if world.rank == 0:
        EngineCosts(entries=entries).save(Path(spec["result"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
