"""Costs of MPI: collectives, one-sided access to a shared vector, and requests to a server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from scalebench.calibration.probes import probe_rounds
from scalebench.cluster.engine_costs import EngineCost
from scalebench.comm.engines.base import Engine
from scalebench.comm.mpi import MpiCommunicator
from scalebench.comm.server import OneSidedState, RankServer, ServerLoop
from scalebench.system.disturbance import Stopwatch

_COARSE_GRID = (4, 4 << 10, 64 << 10, 1 << 20, 4 << 20)  # bytes


def measure(
    engine: Engine, rounds: probe_rounds.ProbeRounds, source: str
) -> tuple[probe_rounds.Found, list[EngineCost]]:
    """Measure MPI's operations in reference steps of their round."""
    comm = MpiCommunicator(rounds.mpi, rounds.clock)
    operations: dict[str, tuple[Callable[[torch.Tensor], None], tuple[int, ...]]] = {
        "mpi": (partial(comm.allreduce_, op="mean"), probe_rounds.GRID),
        "mpi-broadcast": (comm.broadcast_, _COARSE_GRID),
        "mpi-reduce": (comm.reduce_, _COARSE_GRID),
        "mpi-linear-broadcast": (partial(comm.broadcast_, linear=True), _COARSE_GRID),
        "mpi-linear-reduce": (partial(comm.reduce_, linear=True), _COARSE_GRID),
    }
    buffers = {nbytes: torch.zeros(nbytes // 4) for nbytes in probe_rounds.GRID}
    states = {
        nbytes: OneSidedState(comm, torch.zeros(nbytes // 4)) for nbytes in _COARSE_GRID
    }

    def access(state: OneSidedState) -> None:
        with state.exclusive():
            pass

    def one_round() -> list[probe_rounds.Sample]:
        samples: list[probe_rounds.Sample] = []
        for name, (operation, grid) in operations.items():
            samples += [
                rounds.after_a_step((name, nbytes), partial(operation, buffers[nbytes]))
                for nbytes in grid
            ]
        for nbytes, state in states.items():
            if rounds.mpi.rank == rounds.mpi.size - 1:
                samples.append(
                    rounds.window(("mpi-onesided", nbytes), partial(access, state))
                )
            probe_rounds.sleep_until_all_arrive(
                rounds.mpi
            )  # outside MPI, as if the others computed
        samples += [
            rounds.after_sleeping(partial(comm.allreduce_, buffers[4 << 10])),
            rounds.window(
                ("at once", 4), partial(comm.allreduce_, buffers[4]), together=True
            ),
        ]
        return samples + _serve(rounds)

    found = rounds.measure(one_round, relative=True)
    message_s = found.least(("at once", 4))
    for state in states.values():
        state.close()
    pause_s = found.pause_s(engine.name, relative=True)
    made = partial(probe_rounds.entry, ranks=rounds.mpi.size, source=source)
    collectives = [
        made(name, found.curve(name, grid), message_s=message_s, pause_s=pause_s)
        for name, (_, grid) in operations.items()
    ]
    others = ("mpi-onesided", "mpi-server", "mpi-server-busy")
    return found, collectives + [
        made(name, found.curve(name, _COARSE_GRID)) for name in others
    ]


def _echo(
    worker: int, payload: torch.Tensor, now: float
) -> list[tuple[int, torch.Tensor]]:
    """A server's rule that replies with as many bytes as were sent."""
    return [(worker, payload.clone())]


def _serve(rounds: probe_rounds.ProbeRounds) -> list[probe_rounds.Sample]:
    """Time requests of n bytes from worker 0 to the last rank with their replies, and the server's part of each."""
    mpi = rounds.mpi
    serves = mpi.rank == mpi.size - 1
    group = mpi.Split(int(serves))
    samples = []
    for nbytes in _COARSE_GRID:
        if serves:
            loop = ServerLoop(mpi, torch.float32)
            stopwatch = Stopwatch(computes=False)
            handled = loop.serve()
            undisturbed = stopwatch.stop().undisturbed
            samples.append(
                probe_rounds.Sample(
                    ("mpi-server-busy", nbytes), loop.busy_s / handled, undisturbed
                )
            )
        else:
            server = RankServer(MpiCommunicator(group, rounds.clock), mpi, _echo)
            if group.rank == 0:
                request = partial(server.request, torch.zeros(nbytes // 4))
                samples.append(rounds.window(("mpi-server", nbytes), request, least=2))
            probe_rounds.sleep_until_all_arrive(group)
            server.close()
        probe_rounds.sleep_until_all_arrive(mpi)  # one server after the other
    # The number of communicators of an MPI is bounded.
    group.Free()
    return samples
