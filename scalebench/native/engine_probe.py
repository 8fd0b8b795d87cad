"""`mpirun -n P python -m scalebench.native.engine_probe SPEC`: costs of the engines, from synthetic buffers only.

No run of a study is timed here, so a virtual run is never fitted to the real one it is compared with. All ranks take
part in every operation, in rounds: a look at the reference step by rank 0 while the others sleep, then one window of
each operation. A cost is the median of its undisturbed windows. Costs of MPI are measured in reference steps of their
round; those of engines with a thread of their own, which wait for timers and for the scheduler, in seconds.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from scipy.optimize import isotonic_regression

from scalebench.cluster.engine_costs import MARK, EngineCost, EngineCosts, at_least, falls_below, joined
from scalebench.comm.mpi import MpiCommunicator
from scalebench.comm.native import NativeCommunicator
from scalebench.comm.server import RankServer, ServerLoop
from scalebench.comm.shared import OneSidedState
from scalebench.native.connection import connected
from scalebench.native.engine_steps import ddp_step, horovod_step
from scalebench.system.background_load import BackgroundLoad, taken_by
from scalebench.system.clock import WallClock
from scalebench.system.parent_watch import end_with_parent
from scalebench.system.stopwatch import FEWEST, Stopwatch, typical
from scalebench.training.reference_step import Gauge, reference_network

GRID = (4, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)  # bytes
_COARSE_GRID = (4, 4 << 10, 64 << 10, 1 << 20, 4 << 20)
_WINDOW_S = {"mpi": 3e-3, "horovod": 10e-3, "gloo": 20e-3}  # aimed at; at least one operation
_MOST = 100  # operations of a window
_ROUNDS = 5  # at least
_SMALL = 16 << 10  # bytes: up to here Horovod's negotiation can be told from its transport
_CYCLE_S = 1e-3  # Horovod's default; it keeps the cycle of its last start where none is stated
_OTHERS = 0.2  # share of the cores that others may take in a round of engines with threads of their own
_UNDISTURBED = 0.1  # share of the windows, below which an engine's costs are not believed
_LARGE, _FEW, _SOME = 1 << 20, 2, 8  # bytes, and operations of a window with more and with less
_PAIRS, _STEPS = 12, 4  # windows of an engine's step in a round, and steps of each
_PAUSES = 12  # operations of a window that each follow some computing, from none to a cycle long

Operation = Callable[[], object]
Key = tuple[str, int]  # an operation's name, and bytes


class Sample(NamedTuple):
    """Seconds of one operation in one window, and whether the window was undisturbed."""

    key: Key
    seconds: float
    undisturbed: bool


Measure = Callable[[], list[Sample]]


class Echo:
    """A server's rule that only answers, with as much as was sent."""

    def __call__(self, worker: int, payload: torch.Tensor, now: float) -> list[tuple[int, torch.Tensor]]:
        return [(worker, payload.clone())]


class Found:
    """The windows of all rounds so far, and the reference step of each round."""

    def __init__(self) -> None:
        self.references: list[float] = []
        self._windows: dict[Key, list[tuple[int, float, bool]]] = {}

    def add(self, samples: Sequence[Sequence[Sample]]) -> None:
        """One round's samples of all ranks: the first rank's time counts, undisturbed if it was on every rank."""
        together: dict[tuple[Key, int], list[Sample]] = {}
        for of_rank in samples:
            seen: Counter[Key] = Counter()
            for sample in of_rank:
                together.setdefault((sample.key, seen[sample.key]), []).append(sample)
                seen[sample.key] += 1
        for (key, _), own in together.items():
            undisturbed = all(sample.undisturbed for sample in own)
            self._windows.setdefault(key, []).append((len(self.references) - 1, own[0].seconds, undisturbed))

    @property
    def reference_s(self) -> float:
        """Mean reference step of all rounds: a shared machine changes between two speeds, and a run takes the mean."""
        known = [value for value in self.references if math.isfinite(value)]
        return fmean(known) if known else math.nan

    def values(self, key: Key, *, relative: bool) -> list[float]:
        """Seconds of the undisturbed windows, at the mean reference step if `relative`.

        Where fewer than FEWEST were undisturbed, the shortest quarter of all stands for them: noise only adds.
        """
        windows = self._windows[key]
        found = []
        for number, seconds, undisturbed in windows:
            reference = self.references[number]
            scale = self.reference_s / reference if relative and math.isfinite(reference) else 1.0
            found.append((seconds * scale, undisturbed))
        kept = [seconds for seconds, undisturbed in found if undisturbed]
        if len(kept) < min(FEWEST, len(windows)):
            kept = sorted(seconds for seconds, _ in found)[: max(1, len(found) // 4)]
        return kept

    def seconds(self, key: Key, *, relative: bool = True) -> float:
        """The cost of an operation."""
        return typical(self.values(key, relative=relative)).value

    def least(self, key: Key, *, relative: bool = True) -> float:
        """A tenth of the windows took less: the cost without the wait for a core of the operation's own threads."""
        return float(np.quantile(self.values(key, relative=relative), 0.1))

    def share_undisturbed(self) -> float:
        """Share of all windows that were undisturbed."""
        flags = [undisturbed for windows in self._windows.values() for _, _, undisturbed in windows]
        return sum(flags) / len(flags) if flags else 1.0

    def precise(self, *, relative: bool) -> bool:
        """Whether each cost is known precisely and no larger message costs less than a smaller one."""
        if not all(typical(self.values(key, relative=relative)).precise for key in self._windows):
            return False
        curves: dict[str, list[float]] = {}
        for name, nbytes in sorted(self._windows):
            curves.setdefault(name, []).append(self.seconds((name, nbytes), relative=relative))
        return all(a <= b * 1.02 for curve in curves.values() for a, b in pairwise(curve))


class Probe:
    """Measures one group of ranks; `source` says where and with what, `seconds` how long for each engine at most."""

    def __init__(self, mpi: MPI.Comm, source: str, seconds: float) -> None:
        self.mpi, self.source, self._seconds = mpi, source, seconds
        self.clock = WallClock()
        self._gauge = Gauge()
        self._repetitions: dict[Key, int] = {}
        self._family = (os.getppid(), *mpi.allgather(os.getpid()))  # mpirun, bound to no core, and the ranks

    def measure(self, engine: str) -> EngineCosts:
        """The entries of one engine, the same on all ranks."""
        found, entries = {"mpi": self._mpi, "horovod": self._horovod, "gloo": self._gloo}[engine]()
        if not math.isfinite(found.reference_s) or found.share_undisturbed() < _UNDISTURBED:
            entries = [entry.model_copy(update={"disturbed": True}) for entry in entries]
        reference_s = found.reference_s if math.isfinite(found.reference_s) else None
        return EngineCosts(entries=entries, reference_s=reference_s)

    # --- rounds -----------------------------------------------------------------------------------------------

    def _rounds(self, one_round: Callable[[], list[Sample]], *, relative: bool) -> Found:
        """Rounds until all costs are precise or the time is over."""
        found = Found()
        end = time.perf_counter() + self._seconds
        going = True
        while going:
            found.references.append(self._reference())
            background = BackgroundLoad(taken_by(self._family), of=self._family[0])
            samples = self.mpi.allgather(one_round())
            if not relative and (background.share() or 0.0) > _OTHERS:
                samples = [[sample._replace(undisturbed=False) for sample in own] for own in samples]
            found.add(samples)
            rounds = len(found.references)
            more = rounds < _ROUNDS or (time.perf_counter() < end and not found.precise(relative=relative))
            going = self.mpi.bcast(more)
        return found

    def _reference(self) -> float:
        """The reference step on rank 0 while the others sleep, NaN where it was disturbed."""
        _sleep_until_all_are_here(self.mpi)
        seconds = (self._gauge.seconds() or math.nan) if self.mpi.rank == 0 else None
        _sleep_until_all_are_here(self.mpi)
        return float(self.mpi.bcast(seconds))

    def _together(self, key: Key, operation: Operation, engine: str = "mpi") -> list[Sample]:
        """A window of `operation`, which all ranks do together and equally often."""
        operation()
        if key not in self._repetitions:
            began = time.perf_counter()
            operation()
            trial = time.perf_counter() - began
            self._repetitions[key] = self.mpi.bcast(int(min(_MOST, max(1, _WINDOW_S[engine] / max(trial, 1e-7)))))
        return [self._window(key, operation, self._repetitions[key], engine)]

    def _after_a_step(self, key: Key, operation: Operation) -> list[Sample]:
        """A window of operations, each after a reference step, with the caches as they are in training.

        A barrier lies between the two: waiting for other ranks is not a part of what an operation costs.
        """
        operation()
        steps = _FEW if key[1] > _LARGE else _SOME
        stopwatch, seconds = Stopwatch(computes=False), 0.0
        for _ in range(steps):
            self._gauge.steps(1)
            self.mpi.Barrier()
            began = time.perf_counter()
            operation()
            seconds += time.perf_counter() - began
        return [Sample(key, seconds / steps, stopwatch.stop().undisturbed)]

    def _after_computing(self, key: Key, operation: Operation) -> list[Sample]:
        """A window of operations, each after some computing: from none to a cycle, so that it comes at any moment."""
        operation()
        stopwatch = Stopwatch(computes=False, shares_cores=True)
        seconds = 0.0
        for place in range(_PAUSES):
            ready = time.perf_counter() + (place + 0.5) / _PAUSES * _CYCLE_S
            while (began := time.perf_counter()) < ready:
                pass
            operation()
            seconds += time.perf_counter() - began
        return [Sample(key, seconds / _PAUSES, stopwatch.stop().undisturbed)]

    def _by_one(self, rank: int, key: Key, operation: Operation, engine: str = "mpi") -> list[Sample]:
        """A window on one rank, while the others sleep, as they would compute: outside MPI."""
        samples = []
        if self.mpi.rank == rank:
            operation()
            began = time.perf_counter()
            operation()
            trial = time.perf_counter() - began
            repetitions = int(min(_MOST, max(1, _WINDOW_S[engine] / max(trial, 1e-7))))
            samples.append(self._window(key, operation, repetitions, engine))
        _sleep_until_all_are_here(self.mpi)
        return samples

    def _window(self, key: Key, operation: Operation, repetitions: int, engine: str) -> Sample:
        stopwatch = Stopwatch(computes=False, shares_cores=engine != "mpi")
        stopwatch.start()
        for _ in range(repetitions):
            operation()
        seconds, undisturbed = stopwatch.stop()
        return Sample(key, seconds / repetitions, undisturbed)

    # --- engines ----------------------------------------------------------------------------------------------

    def _mpi(self) -> tuple[Found, list[EngineCost]]:
        comm = MpiCommunicator(self.mpi, self.clock)
        spread, gather = partial(comm.broadcast_, linear=True), partial(comm.reduce_, linear=True)
        operations: dict[str, tuple[Callable[[torch.Tensor], None], tuple[int, ...]]] = {
            "mpi": (partial(comm.allreduce_, op="mean"), GRID),
            "mpi-broadcast": (comm.broadcast_, _COARSE_GRID),
            "mpi-reduce": (comm.reduce_, _COARSE_GRID),
            "mpi-linear-broadcast": (spread, _COARSE_GRID),
            "mpi-linear-reduce": (gather, _COARSE_GRID),
        }
        buffers = {nbytes: torch.zeros(nbytes // 4) for nbytes in GRID}
        states = {nbytes: OneSidedState(comm, torch.zeros(nbytes // 4)) for nbytes in _COARSE_GRID}

        def access(state: OneSidedState) -> None:
            with state.exclusive():
                pass

        def one_round() -> list[Sample]:
            samples: list[Sample] = []
            for name, (operation, grid) in operations.items():
                for nbytes in grid:
                    samples += self._after_a_step((name, nbytes), partial(operation, buffers[nbytes]))
            for nbytes, state in states.items():
                samples += self._by_one(self.mpi.size - 1, ("mpi-onesided", nbytes), partial(access, state))
            samples += self._together(("at once", 4), partial(comm.allreduce_, buffers[4]))
            return samples + self._served()

        found = self._rounds(one_round, relative=True)
        message_s = found.least(("at once", 4))
        for state in states.values():
            state.close()
        return found, [
            *(
                self._entry(name, self._curve(found, name, grid), message_s=message_s)
                for name, (_, grid) in operations.items()
            ),
            *(
                self._entry(name, self._curve(found, name, _COARSE_GRID))
                for name in ("mpi-onesided", "mpi-server", "mpi-server-busy")
            ),
        ]

    def _served(self) -> list[Sample]:
        """Requests of n bytes and their replies, of one worker to the last rank, and the server's part of each."""
        serves = self.mpi.rank == self.mpi.size - 1
        group = self.mpi.Split(int(serves))
        samples = []
        for nbytes in _COARSE_GRID:
            if serves:
                loop = ServerLoop(self.mpi, torch.float32)
                stopwatch = Stopwatch(computes=False)
                handled = loop.serve()
                undisturbed = stopwatch.stop().undisturbed
                samples.append(Sample(("mpi-server-busy", nbytes), loop.busy_s / handled, undisturbed))
            else:
                samples += self._asked(MpiCommunicator(group, self.clock), nbytes)
            _sleep_until_all_are_here(self.mpi)  # one server after the other
        group.Free()
        return samples

    def _asked(self, workers: MpiCommunicator, nbytes: int) -> list[Sample]:
        """A window of worker 0; the others sleep meanwhile."""
        server, payload = RankServer(workers, self.mpi, Echo()), torch.zeros(nbytes // 4)
        samples = []
        if workers.rank == 0:
            ask = partial(server.request, payload)
            began = time.perf_counter()
            ask()
            repetitions = int(min(_MOST, max(2, _WINDOW_S["mpi"] / (time.perf_counter() - began))))
            samples.append(self._window(("mpi-server", nbytes), ask, repetitions, "mpi"))
        _sleep_until_all_are_here(workers.mpi)
        server.close()
        return samples

    def _horovod(self) -> tuple[Found, list[EngineCost]]:
        import horovod.torch as hvd

        buffers = {nbytes: torch.zeros(nbytes // 4) for nbytes in GRID}
        hooked = [torch.zeros(16) for _ in range(4)]  # as many as a model with two layers hands over
        transport = MpiCommunicator(self.mpi, self.clock)

        def one_round() -> list[Sample]:
            samples: list[Sample] = []
            for nbytes in GRID:
                if nbytes <= _SMALL:
                    samples += self._after_a_step(("transport", nbytes), partial(transport.allreduce_, buffers[nbytes]))
            samples += self._together(("at once", 4), partial(transport.allreduce_, buffers[4]))
            with self._engine("horovod", self.mpi) as comm:
                samples += self._together(("cycle", 4), partial(comm.allreduce_, buffers[4]), "horovod")
                for nbytes in GRID:
                    samples += self._after_computing(("horovod", nbytes), partial(comm.allreduce_, buffers[nbytes]))
                began = time.perf_counter()
                handles = [hvd.allreduce_async_(tensor, name=f"probe.{i}") for i, tensor in enumerate(hooked)]
                samples.append(Sample(("enqueue", 0), time.perf_counter() - began, undisturbed=True))
                for handle in handles:
                    hvd.synchronize(handle)
            return samples + self._alone("horovod", horovod_step)

        found = self._rounds(one_round, relative=False)
        cycle_s = found.seconds(("cycle", 4), relative=False)
        moved = {nbytes: found.seconds(("transport", nbytes)) for nbytes in GRID if nbytes <= _SMALL}
        # A tensor that is ready at any moment waits for half a cycle on average.
        whole = {nbytes: found.seconds(("horovod", nbytes), relative=False) - cycle_s / 2 for nbytes in GRID}
        # Horovod moves and adds bytes by this MPI's allreduce; the rest of a small operation's time is negotiation.
        negotiation = max(0.0, median(whole[nbytes] - seconds for nbytes, seconds in moved.items()))
        points = [(nbytes, moved.get(nbytes, max(0.0, seconds - negotiation))) for nbytes, seconds in whole.items()]
        alone_s, together_s = self._added(found)
        return found, [
            self._entry(
                "horovod",
                points,
                negotiation_s=negotiation,
                message_s=found.least(("at once", 4)),
                cycle_s=cycle_s,
                per_step_s=found.seconds(("enqueue", 0)) + together_s,
                alone_s=alone_s,
            )
        ]

    def _gloo(self) -> tuple[Found, list[EngineCost]]:
        buffers = {nbytes: torch.zeros(nbytes // 4) for nbytes in GRID}

        def one_round() -> list[Sample]:
            samples: list[Sample] = []
            with self._engine("gloo", self.mpi) as comm:
                for nbytes in GRID:
                    samples += self._after_computing(("gloo", nbytes), partial(comm.allreduce_, buffers[nbytes]))
            return samples + self._alone("gloo", ddp_step)

        found = self._rounds(one_round, relative=False)
        alone_s, together_s = self._added(found)
        reduced_s = found.seconds(("reduce alone", 0))  # of a lone worker's bucket, which others are charged for
        curve = self._curve(found, "gloo", GRID, relative=False)
        per_step_s, message_s = max(0.0, together_s - reduced_s), found.least(("gloo", 4), relative=False)
        return found, [self._entry("gloo", curve, message_s=message_s, per_step_s=per_step_s, alone_s=alone_s)]

    @contextmanager
    def _engine(self, engine: str, group: MPI.Comm) -> Iterator[NativeCommunicator]:
        """The engine on `group`, Horovod with its default cycle."""
        os.environ["HOROVOD_CYCLE_TIME"] = str(1e3 * _CYCLE_S)
        try:
            with connected(engine, group, self.clock, one_node=True) as comm:
                yield comm
        finally:
            del os.environ["HOROVOD_CYCLE_TIME"]

    def _alone(self, engine: str, engine_step: Callable[[], Operation]) -> list[Sample]:
        """Steps of a lone worker with the engine's hooks and wrappers, over reference steps of the same moment.

        Of rank 0 while the others sleep, and of all ranks at the same time.
        """
        group = self.mpi.Split(self.mpi.rank)
        samples = []
        with self._engine(engine, group):
            wrapped = engine_step()
            if self.mpi.rank == 0:
                samples += self._over_reference(("alone", 0), wrapped)
            _sleep_until_all_are_here(self.mpi)
            samples += self._over_reference(("together", 0), wrapped)
            if engine == "gloo":
                bucket = torch.zeros(sum(parameter.numel() for parameter in reference_network().parameters()))
                reduce = partial(torch.distributed.all_reduce, bucket)
                samples += self._together(("reduce alone", 0), reduce, engine)
            del wrapped
        group.Free()
        return samples

    def _over_reference(self, key: Key, step: Operation) -> list[Sample]:
        """Windows of `step`, whose number is not seconds but times the reference step of the window."""
        samples = []
        for _ in range(_PAIRS):
            stopwatch = Stopwatch()
            self._gauge.steps(_STEPS)  # reading the counters cools the caches
            reference_s = self._gauge.steps(_STEPS)
            step()
            began = time.perf_counter()
            for _ in range(_STEPS):
                step()
            seconds = (time.perf_counter() - began) / _STEPS
            samples.append(Sample(key, seconds / reference_s, stopwatch.stop().undisturbed))
        return samples

    def _added(self, found: Found) -> tuple[float, float]:
        """Seconds that the engine's step takes beyond the reference step: of one worker, and of all at once.

        A cost that can only be added is at least zero.
        """
        alone, together = (found.seconds((name, 0), relative=False) - 1.0 for name in ("alone", "together"))
        return max(0.0, alone) * found.reference_s, max(0.0, together) * found.reference_s

    # --- entries ----------------------------------------------------------------------------------------------

    def _curve(
        self, found: Found, name: str, grid: tuple[int, ...], *, relative: bool = True
    ) -> list[tuple[int, float]]:
        return [(nbytes, found.seconds((name, nbytes), relative=relative)) for nbytes in grid]

    def _entry(self, name: str, points: list[tuple[int, float]], **others: float) -> EngineCost:
        """The costs of `points`, nearest to what was measured among those that never fall with the bytes."""
        costs = isotonic_regression([seconds for _, seconds in points]).x.tolist()
        curve = [(nbytes, seconds) for (nbytes, _), seconds in zip(points, costs, strict=True)]
        return EngineCost(
            engine=name, ranks=self.mpi.size, alpha_s=costs[0], points=curve, source=self.source, **others
        )


def _sleep_until_all_are_here(group: MPI.Comm) -> None:
    """A barrier that leaves the core to those who still measure."""
    done = group.Ibarrier()
    while not done.Test():
        time.sleep(1e-3)


def main(text: str) -> None:
    """Measure the engines that the JSON `text` names, at its rank counts, and print the costs."""
    end_with_parent()
    spec = json.loads(text)
    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    found: list[EngineCosts] = []
    before: dict[str, EngineCosts] = {}  # among fewer ranks
    for ranks in spec["ranks"]:
        group = world.Split(0 if world.rank < ranks else MPI.UNDEFINED, world.rank)
        if world.rank < ranks:
            probe = Probe(group, spec["source"], spec["seconds"] / len(spec["ranks"]) / len(spec["engines"]))
            for engine in spec["engines"]:
                measured = probe.measure(engine)
                fewer = before.get(engine)  # known to the ranks that were there
                if group.bcast(fewer is not None and falls_below(measured, fewer)):
                    measured = probe.measure(engine)
                before[engine] = measured if fewer is None else at_least(measured, fewer)
                found.append(before[engine])
        _sleep_until_all_are_here(world)
    if world.rank == 0:
        print(f"{MARK}{joined(found).model_dump_json()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
