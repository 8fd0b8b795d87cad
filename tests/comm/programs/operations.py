"""Runs under mpirun: every operation of engines against numpy, on all ranks and on the first two.

Rank 0 prints a JSON line of what was checked, by the number of ranks and the engine.
"""

import gc
import json
import sys
import time

import numpy as np
import torch
from mpi4py import MPI

from scalebench.cluster.operation import Kind
from scalebench.comm.engines import named
from scalebench.comm.engines.base import Place
from scalebench.errors import EngineError
from scalebench.system.clock import Task, WallClock

WORLD = MPI.COMM_WORLD
torch.set_num_threads(1)


def values(who, n=1001, dtype=np.float64, seed=0):
    return np.random.default_rng(100 * seed + who).standard_normal(n).astype(dtype)


def check(engine, ranks):
    clock = WallClock()
    with named(engine).connect(Place(ranks, clock, one_node=True)) as comm:
        return check_operations(engine, comm, clock)


def check_operations(engine, comm, clock):
    rank, size = comm.rank, comm.size
    checked = []
    lacks = []  # what the engine says it has not

    def expect(name, tensor, wanted, tolerance=1e-12):
        wanted = np.asarray(wanted)
        got = tensor.double().numpy()
        error = float(np.abs(got - wanted).max()) if got.size else 0.0
        scale = max(1.0, float(np.abs(wanted).max()) if wanted.size else 1.0)
        assert got.shape == wanted.shape, (name, got.shape, wanted.shape)
        assert error <= tolerance * scale, (name, rank, error)
        checked.append(name)

    every = np.stack([values(who) for who in range(size)])

    def mine(dtype=torch.float64):
        return torch.from_numpy(values(rank)).to(dtype)

    reduced = {
        "sum": every.sum(0),
        "mean": every.mean(0),
        "max": every.max(0),
        "min": every.min(0),
    }
    weights = np.arange(1, size + 1, dtype=float)

    # allreduce: operations, weights, dtypes, the wire
    for op, wanted in reduced.items():
        tensor = mine()
        comm.allreduce_(tensor, op)
        expect(f"allreduce {op}", tensor, wanted)
        tensor = mine()
        request = comm.iallreduce_(tensor, op)
        request.wait()
        request.wait()
        assert request.done()
        expect(f"iallreduce {op}", tensor, wanted)
    # 1001 numbers then go in pieces of 100 for each rank, the last one shorter
    comm.share_bytes = 800
    tensor = mine()
    comm.allreduce_(tensor, "mean")
    expect("mean in pieces", tensor, reduced["mean"])
    weighted_mean = (weights[:, None] * every).sum(0) / weights.sum()
    for weight, wanted in (
        (None, reduced["mean"]),
        (float(weights[rank]), weighted_mean),
    ):
        several = [
            mine()[:3].clone(),
            mine(),
            2 * mine(),
        ]  # the first one whole, the others in pieces
        comm.mean_(several, weight)
        expect(
            "mean of several",
            torch.cat(several),
            np.concatenate([wanted[:3], wanted, 2 * wanted]),
        )
    del comm.share_bytes
    tensor = mine()
    comm.allreduce_(tensor, "mean", weight=float(weights[rank]))
    expect("weighted mean", tensor, (weights[:, None] * every).sum(0) / weights.sum())
    exact = 1e6 * weights + 1 / 3  # half precision knows none of these
    for wire, tolerance in (("float16", 3e-3), ("bfloat16", 2e-2)):
        if engine == "horovod" and wire == "bfloat16":
            continue
        equal = torch.full((5,), 1e-6, dtype=torch.float64)
        for average in (
            comm.allreduce_,
            lambda *args, **named: comm.iallreduce_(*args, **named).wait(),
        ):
            tensor = equal.clone()
            average(tensor, "mean", weight=float(exact[rank]), wire=wire)
            expect(f"weighted mean by {wire}", tensor, equal.numpy(), tolerance * 1e-6)
    tensor = mine()
    comm.allreduce_(tensor, "sum", weight=float(weights[rank]))
    expect("weighted sum", tensor, (weights[:, None] * every).sum(0))
    tensor = mine(torch.float32)
    comm.allreduce_(tensor, "mean")
    expect("float32", tensor, reduced["mean"], 1e-6)
    for dtype, tolerance in (
        (torch.float16, 3e-3),
        (torch.bfloat16, 2e-2),
    ):  # a few units of the last place
        if engine == "horovod" and dtype is torch.bfloat16:
            for attempt in (comm.allreduce_, comm.iallreduce_):
                try:
                    attempt(mine(dtype))
                    raise AssertionError("bfloat16 went through")
                except EngineError as error:
                    lacks.append(str(error))
            continue
        tensor = mine(dtype)
        comm.allreduce_(tensor, "mean")
        assert tensor.dtype == dtype
        expect(f"{dtype}", tensor, reduced["mean"], tolerance)
        tensor = mine(torch.float32)
        comm.allreduce_(tensor, "mean", wire=str(dtype).removeprefix("torch."))
        assert tensor.dtype == torch.float32
        expect(f"wire {dtype}", tensor, reduced["mean"], tolerance)
        tensor = mine(torch.float32)
        comm.iallreduce_(tensor, "mean", wire=str(dtype).removeprefix("torch.")).wait()
        expect(f"non-blocking wire {dtype}", tensor, reduced["mean"], tolerance)
    two = [mine(), 2 * mine()]
    requests = [comm.iallreduce_(tensor) for tensor in two]
    for request in reversed(requests):
        request.wait()
    expect("two in flight", two[1], 2 * reduced["sum"])
    expect("two in flight", two[0], reduced["sum"])
    scalar = torch.tensor(float(rank), dtype=torch.float64)
    comm.allreduce_(scalar)
    expect("scalar", scalar, sum(range(size)))
    counts = torch.tensor([rank, 1])
    comm.allreduce_(counts)
    expect("int64", counts, [sum(range(size)), size])
    for repeat in range(3):  # remembered buffers must follow the data
        again = torch.full((7,), float(repeat + rank), dtype=torch.float64)
        comm.allreduce_(again)
        expect("again", again, np.full(7, sum(repeat + r for r in range(size))))

    # to and from one rank
    root = size - 1
    tensor = mine()
    comm.reduce_(tensor, root)
    expect("reduce", tensor, reduced["sum"] if rank == root else values(rank))
    tensor = mine()
    comm.reduce_(tensor, root, "mean")
    expect("reduce mean", tensor, reduced["mean"] if rank == root else values(rank))
    tensor = mine()
    comm.broadcast_(tensor, root)
    expect("broadcast", tensor, values(root))
    in_order = sum(every[1:], every[0].copy())
    for master in {0, root}:
        tensor = mine()
        comm.reduce_(tensor, master, linear=True)
        expect("linear reduce", tensor, in_order if rank == master else values(rank), 0)
        tensor = mine()
        comm.reduce_(tensor, master, "mean", linear=True)
        expect(
            "linear mean",
            tensor,
            in_order / size if rank == master else values(rank),
            0,
        )
        comm.broadcast_(tensor, master, linear=True)
        expect("linear broadcast", tensor, in_order / size, 0)

    of_size = every[:, : 1000 // size * size]  # equal parts
    part = slice(rank * (1000 // size), (rank + 1) * (1000 // size))
    for op, wanted in {
        "sum": of_size.sum(0),
        "mean": of_size.mean(0),
        "max": of_size.max(0),
    }.items():
        own = torch.empty(1000 // size, dtype=torch.float64)
        comm.reduce_scatter_(own, torch.from_numpy(of_size[rank].copy()), op)
        expect(f"reduce-scatter {op}", own, wanted[part])

    # all to all
    gathered = comm.allgather(mine())
    assert len(gathered) == size
    expect("allgather", torch.stack(gathered), every)
    expect(
        "allgather scalar",
        torch.stack(comm.allgather(torch.tensor(float(rank)))),
        np.arange(size),
    )
    expect(
        "allgather combined",
        comm.allgather_combined(mine(), lambda each: torch.stack(each).sum(0)),
        every.sum(0),
    )
    flying = [
        comm.iallgather_combined(times * mine(), lambda each: torch.stack(each).sum(0))
        for times in (1, 2)
    ]
    expect("second allgather in flight", flying[1].result(), 2 * every.sum(0))
    expect("first allgather in flight", flying[0].result(), every.sum(0))
    # nothing travels: each computes its own
    expect("once", torch.tensor(comm.cached(lambda: float(rank))), rank)
    (own,) = comm.by_rows(lambda rows, times: [times * rows], [mine()], 2)
    expect("own row", own, 2 * mine())
    # rank 0 gives itself nothing
    give = [torch.full((rank + 2 * to, 3), 10.0 * rank + to) for to in range(size)]
    got = comm.alltoallv(give)
    for source, tensor in enumerate(got):
        expect(
            "alltoallv", tensor, np.full((source + 2 * rank, 3), 10.0 * source + rank)
        )
    labels = comm.alltoallv([torch.full((to,), rank) for to in range(size)])
    for source, tensor in enumerate(labels):
        assert tensor.dtype == torch.int64
        expect("alltoallv int64", tensor, np.full(rank, source))
    comm.barrier()

    # groups and messages, where the engine has them
    try:
        part = comm.split(lambda each: each % 2)
        members = [who for who in range(size) if who % 2 == rank % 2]
        assert (part.size, part.rank) == (len(members), members.index(rank))
        tensor = mine()
        part.allreduce_(tensor)
        expect("split", tensor, every[members].sum(0))
        tensor = mine()
        part.broadcast_(tensor, 0)
        expect("split broadcast", tensor, values(members[0]))
    except EngineError as error:
        lacks.append(str(error))
    try:
        after, before = (rank + 1) % size, (rank - 1) % size
        if rank == 0:
            comm.send(torch.arange(5.0), after, tag=3)
        tensor = torch.zeros(5)
        comm.recv_(tensor, before, tag=3)
        expect("message", tensor, np.arange(5) + before)
        if rank != 0:
            comm.send(torch.arange(5.0) + rank, after, tag=3)
        if size & (size - 1) == 0:
            tensor = torch.tensor([float(rank + 1)])
            comm.merge_(tensor, lambda a, b: a.mul_(10).add_(b))
            # ((1, 2), (3, 4)): 10 * 12 + 34
            expect("merge", tensor, [{1: 1, 2: 12, 4: 154}[size]])
    except EngineError as error:
        lacks.append(str(error))

    # nothing so far was counted, for the clock did not run
    assert (comm.collectives, comm.bytes_sent) == (0, 0)
    assert not any(
        (
            *comm.event_log.collectives.values(),
            *comm.event_log.sent.values(),
            *comm.event_log.received.values(),
        )
    )
    clock.start()
    comm.allreduce_(torch.ones(10))
    comm.allreduce_(torch.ones(10), "mean", wire="float16")
    comm.broadcast_(torch.ones(5), 0)
    with clock.paused():
        comm.allreduce_(torch.ones(10))
    comm.iallreduce_(torch.ones(10)).wait()
    comm.allgather(torch.ones(2))
    comm.iallgather_combined(torch.ones(3), lambda each: each[0]).result()
    assert comm.collectives == comm.calls == 6, (comm.collectives, comm.calls)
    assert comm.bytes_sent == 40 + 20 + (20 if rank == 0 else 0) + 40 + 8 + 12, (
        comm.bytes_sent
    )
    before = comm.bytes_sent
    comm.reduce_(torch.ones(10), 0, linear=True)  # each to the root
    comm.broadcast_(torch.ones(10), 0, linear=True)  # the root to each
    clock.did(Task.OTHER)
    assert comm.collectives == 8, comm.collectives
    # the others send messages
    assert comm.calls == (8 if engine == "horovod" else 6), comm.calls
    assert comm.bytes_sent - before == (40 * (size - 1) if rank == 0 else 40), (
        comm.bytes_sent
    )
    met = np.frombuffer(comm.event_log.collectives[()]).reshape(-1, 3)
    assert len(met) == 8, met
    assert (np.diff(met, axis=1) >= 0).all()  # came, stood still, left
    assert (met[:, 1] > met[:, 0]).tolist() == [
        *[False] * 3,
        True,
        False,
        True,
        False,
        False,
    ]  # non-blocking ones: later
    assert comm.event_log.complete
    ledger = clock.ledger
    assert ledger.comm_s > 0
    assert abs(ledger.comm_s + ledger.other_s - ledger.total_s) < 1e-12

    del met  # what it looks into grows

    # one synchronisation each, in so many calls of the engine
    def calls_of(average):
        before = comm.collectives, comm.calls
        average()
        assert comm.collectives == before[0] + 1
        return comm.calls - before[1]

    weighted = {"weight": float(rank + 1), "wire": "float16"}
    assert calls_of(lambda: comm.allreduce_(torch.ones(10), "mean", **weighted)) == 1
    assert (
        calls_of(lambda: comm.iallreduce_(torch.ones(10), "mean", **weighted).wait())
        == 1
    )
    comm.share_bytes = 800
    pieces = 2 if engine == "gloo" else -(-1001 // (100 * size))
    assert calls_of(lambda: comm.allreduce_(mine(), "mean")) == pieces
    # the first takes the weight along
    assert calls_of(lambda: comm.allreduce_(mine(), "mean", weight=1.0)) == pieces
    assert (
        calls_of(lambda: comm.mean_([torch.ones(3), mine(), mine()], 1.0))
        == 1 + 2 * pieces
    )
    # one more than MPI gathers at once
    large = torch.full(((1 << 20) // 2 // size + 1,), rank + 1.0)
    assert calls_of(lambda: comm.allreduce_(large, wire="float16")) == (
        2 if engine == "mpi" else 1
    )
    expect("many halves", large, np.full(len(large), size * (size + 1) / 2), 0)
    assert calls_of(lambda: comm.alltoallv([mine()] * size)) == (
        1 if engine == "horovod" else 2
    )
    comm.overlapped(comm.operation(Kind.ALLREDUCE, 8))
    assert comm.calls is None  # by something else, which did not tell

    return {"size": size, "checked": sorted(set(checked)), "lacks": lacks}


def wait_asleep():
    """Wait for all ranks without a core, which those that compute need."""
    request = WORLD.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


engines = sys.argv[1:]
found = {WORLD.size: {engine: check(engine, WORLD) for engine in engines}}
first = WORLD.Split(0 if WORLD.rank < 2 else MPI.UNDEFINED)
if first != MPI.COMM_NULL:
    found[2] = {engine: check(engine, first) for engine in engines}
wait_asleep()
if WORLD.rank == 0:
    print(json.dumps(found))
gc.freeze()  # or a search at the end looks through all that torch has made
