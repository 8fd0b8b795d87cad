from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.engine_costs import EngineCosts
from scalebench.cluster.network import Network
from scalebench.comm.native import NativeCommunicator
from scalebench.errors import RunError
from scalebench.pricing.costs import Costs
from scalebench.pricing.machine import BatchTimes, StepTable, StepTimes
from scalebench.system.clock import Task
from scalebench.virtual.communicator import VirtualCommunicator
from scalebench.virtual.scheduler import Group, Scheduler
from scalebench.virtual.shared import (
    ServerState,
    VirtualServer,
    VirtualShared,
    VirtualStore,
)
from scalebench.virtual.virtual_clock import VirtualClock
from tests.operations import allreduce, exclusive, message

TABLE = StepTable(
    source="test",
    busy_workers=1,
    batches=[
        BatchTimes(
            samples=1, data_s=[0.0], forward_s=[1.0], backward_s=[0.0], update_s=[0.0]
        )
    ],
    shuffle_s_per_sample=0.0,
    jitter=[],
)


class World:
    """Return communicators with clocks ahead by `ahead[rank]` seconds; `FORWARD` takes one second a sample."""

    def __init__(self, workers: int, ahead: list[float] | None = None) -> None:
        self.scheduler = Scheduler(seed=1, ties="rank")
        self.costs = Costs(
            Network(load_cluster("ethernet-10g"), 1), EngineCosts(), "mpi"
        )
        group = Group(tuple(range(workers)))
        times = StepTimes(TABLE, seed=0, repetition=0)
        self.clocks = [VirtualClock(times, speed=1.0) for _ in range(workers)]
        self.comms = [
            VirtualCommunicator(self.scheduler, group, r, self.clocks[r], self.costs)
            for r in range(workers)
        ]
        for clock, seconds in zip(self.clocks, ahead or [0.0] * workers, strict=True):
            clock.start()
            clock.now += seconds

    def run(self, program):
        return self.scheduler.run(
            {comm.rank: lambda comm=comm: program(comm) for comm in self.comms}
        )


@given(workers=st.integers(1, 9), size=st.integers(1, 20), seed=st.integers(0, 99))
def test_collectives_agree_with_numpy(workers, size, seed):
    values = np.random.default_rng(seed).standard_normal((workers, size))
    world = World(workers)

    def program(comm):
        mine = torch.tensor(values[comm.rank])
        results = {}
        for op in ("sum", "mean", "max", "min"):
            tensor = mine.clone()
            comm.allreduce_(tensor, op)
            results[op] = tensor.numpy()
        tensor = mine.clone()
        comm.allreduce_(tensor, "mean", weight=comm.rank + 1.0)
        results["weighted"] = tensor.numpy()
        tensor = mine.clone()
        comm.broadcast_(tensor, workers - 1)
        results["broadcast"] = tensor.numpy()
        tensor = mine.clone()
        comm.reduce_(tensor, 0)
        results["reduce"] = tensor.numpy()
        tensor = mine.clone()
        comm.reduce_(tensor, workers - 1, "mean", linear=True)
        comm.broadcast_(tensor, workers - 1, linear=True)
        results["through the last"] = tensor.numpy()
        results["gather"] = np.stack([each.numpy() for each in comm.allgather(mine)])
        given_to = [mine[: 1 + (comm.rank + to) % size] for to in range(workers)]
        results["alltoallv"] = [each.numpy() for each in comm.alltoallv(given_to)]
        return results

    weights = np.arange(1, workers + 1)[:, None]
    results = world.run(program)
    assert set(results) == set(range(workers))
    for rank, got in results.items():
        np.testing.assert_allclose(got["sum"], values.sum(0), atol=1e-12)
        np.testing.assert_allclose(got["mean"], values.mean(0), atol=1e-12)
        np.testing.assert_array_equal(got["max"], values.max(0))
        np.testing.assert_array_equal(got["min"], values.min(0))
        np.testing.assert_allclose(
            got["weighted"], (values * weights).sum(0) / weights.sum(), atol=1e-12
        )
        np.testing.assert_array_equal(got["broadcast"], values[-1])
        np.testing.assert_allclose(
            got["reduce"], values.sum(0) if rank == 0 else values[rank], atol=1e-12
        )
        in_order = sum(values[1:], values[0].copy()) / workers
        np.testing.assert_array_equal(got["through the last"], in_order)
        np.testing.assert_array_equal(got["gather"], values)
        for source in range(workers):
            np.testing.assert_array_equal(
                got["alltoallv"][source], values[source, : 1 + (source + rank) % size]
            )


def test_collective_ends_at_last_arrival_plus_cost():
    world = World(3, ahead=[0.0, 2.0, 1.0])
    world.run(lambda comm: comm.allreduce_(torch.ones(1000, dtype=torch.float32)))
    end = 2.0 + world.costs.time(allreduce(4000, (0, 1, 2)))
    assert [clock.now for clock in world.clocks] == pytest.approx([end] * 3)
    assert [clock.ledger.wait for clock in world.clocks] == pytest.approx(
        [2.0, 0.0, 1.0]
    )
    assert [clock.ledger.comm_s for clock in world.clocks] == pytest.approx(
        [end, end - 2.0, end - 1.0]
    )


@given(workers=st.integers(1, 9), root=st.integers(0, 8))
def test_linear_collectives_have_their_bytes_at_the_root(workers, root):
    root %= workers
    world = World(workers)  # one worker a node

    def program(comm):
        tensor = torch.ones(1000, dtype=torch.float32)
        comm.reduce_(tensor, root, linear=True)
        gathered = comm.bytes_sent
        comm.broadcast_(tensor, root, linear=True)
        return gathered, comm.bytes_sent - gathered

    sent = world.run(program)
    assert sent == {
        rank: (0, 4000 * (workers - 1)) if rank == root else (4000, 0)
        for rank in range(workers)
    }
    network = world.costs.network
    one, gamma = (
        network.time(message(4000, 0, 1)),
        network.cluster.reduction.seconds_per_byte,
    )
    seconds = (workers - 1) * (2 * one + 4000 * gamma)
    assert [clock.now for clock in world.clocks] == pytest.approx([seconds] * workers)


def test_nonblocking_allreduce_overlaps_with_compute():
    world = World(2)
    cost = world.costs.time(allreduce(4_000_000, (0, 1)))
    assert cost < 1.0

    def program(comm):
        tensor = torch.full((1_000_000,), float(comm.rank + 1))
        request = comm.iallreduce_(tensor)
        comm.clock.did(Task.FORWARD, 1)  # one second
        assert request.done()
        request.wait()
        return tensor[0].item(), comm.clock.now

    assert world.run(program) == {0: (3.0, 1.0), 1: (3.0, 1.0)}


def test_nonblocking_allgather_overlaps_with_compute_and_is_combined_once():
    world, made = World(2), []

    def combine(tensors):
        made.append(len(tensors))
        return torch.stack(tensors).sum(0)

    def program(comm):
        gathering = comm.iallgather_combined(
            torch.full((1_000_000,), float(comm.rank + 1)), combine
        )
        comm.clock.did(Task.FORWARD, 1)  # one second, longer than the transfer
        return gathering.result()[0].item(), comm.clock.now

    assert world.run(program) == {0: (3.0, 1.0), 1: (3.0, 1.0)}
    assert made == [2]


def test_exposed_part_of_a_nonblocking_allreduce_is_charged():
    world = World(2)
    cost = world.costs.time(allreduce(4_000_000, (0, 1)))

    def program(comm):
        request = comm.iallreduce_(torch.ones(1_000_000))
        request.wait()
        return comm.clock.ledger.comm_s

    assert world.run(program) == pytest.approx({0: cost, 1: cost})


def test_groups_split_by_color_in_order_of_rank():
    world = World(5)

    def program(comm):
        part = comm.split(lambda rank: rank % 2)
        tensor = torch.tensor([float(comm.rank)])
        part.allreduce_(tensor)
        return part.rank, part.size, tensor.item()

    assert world.run(program) == {
        0: (0, 3, 6.0),
        2: (1, 3, 6.0),
        4: (2, 3, 6.0),
        1: (0, 2, 4.0),
        3: (1, 2, 4.0),
    }


def test_message_arrives_after_its_transfer_time():
    world = World(2)
    travel = world.costs.time(message(8, 0, 1))

    def program(comm):
        tensor = torch.tensor([7.0], dtype=torch.float64)
        if comm.rank == 0:
            comm.clock.did(Task.FORWARD, 1)
            comm.send(tensor, 1)
        else:
            tensor.zero_()
            comm.recv_(tensor, 0)
        return tensor.item(), comm.clock.now

    assert world.run(program) == {0: (7.0, 1.0), 1: (7.0, pytest.approx(1.0 + travel))}


def test_a_received_message_is_a_copy_of_what_was_sent():
    def program(comm):
        tensor = torch.tensor([7.0 + comm.rank])
        if comm.rank == 0:
            comm.send(tensor, 1)
            return tensor.zero_()
        return comm.recv_like(tensor, 0)

    world = World(2)
    received = world.run(program)
    assert received[1].item() == 7.0
    assert received[1].data_ptr() != received[0].data_ptr()
    assert world.clocks[1].now == pytest.approx(world.costs.time(message(4, 0, 1)))


def test_mismatched_collectives_are_refused():
    world = World(2)

    def program(comm):
        comm.barrier() if comm.rank else comm.allreduce_(torch.ones(1))

    with pytest.raises(RunError, match="calls barrier while others call allreduce"):
        world.run(program)


def test_half_precision_halves_bytes_and_rounds():
    world = World(2)

    def program(comm):
        tensor = torch.tensor([1.0 + 2.0**-12], dtype=torch.float32)
        comm.allreduce_(tensor, "sum", wire="float16")
        return tensor.item(), comm.bytes_sent, comm.collectives

    assert world.run(program) == {0: (2.0, 2, 1), 1: (2.0, 2, 1)}


def test_counting_stops_in_a_pause():
    world = World(2)

    def program(comm):
        with comm.clock.paused():
            comm.allreduce_(torch.ones(4))
        return comm.collectives, comm.clock.now

    assert world.run(program) == {0: (0, 0.0), 1: (0, 0.0)}


def test_shared_state_is_accessed_in_order_of_arrival():
    world = World(3, ahead=[0.2, 0.0, 0.1])
    store = VirtualStore(torch.zeros(250_000))
    visit = world.costs.time(exclusive(1_000_000, 1, 0))

    def program(comm):
        shared = VirtualShared(store, comm)
        assert not hasattr(shared, "__dict__")  # of 100 bytes, a million times
        with shared.exclusive() as model:
            before = shared.merges
            model.add_(comm.rank)
        return before

    assert world.run(program) == {1: 0, 2: 1, 0: 2}
    assert store.merges == 3
    assert store.model[0].item() == 3.0
    assert world.clocks[1].now == pytest.approx(visit)
    assert world.clocks[1].ledger.wait == 0.0


def test_shared_state_stays_locked_while_its_holder_waits():
    """Worker 0 holds the first and waits for the second, held by 1; 2 and 3 get the first after 0 leaves both."""
    world = World(4, ahead=[0.001, 0.0, 0.002, 0.0015])
    first, second = (
        VirtualStore(torch.zeros(1), host=0),
        VirtualStore(torch.zeros(25_000_000), host=1),
    )
    order = []

    def program(comm):
        one, two = VirtualShared(first, comm), VirtualShared(second, comm)
        if comm.rank == 1:
            with two.exclusive(counted=False):
                return comm.clock.now, comm.collectives
        with one.exclusive() as model:
            if comm.rank == 0:
                with two.exclusive():
                    left = comm.clock.now
            order.append((comm.rank, one.merges))
            model.add_(1)
        return (left if comm.rank == 0 else comm.clock.now), comm.collectives

    ends = world.run(program)
    assert order == [(0, 0), (3, 1), (2, 2)]
    assert ends[1][0] < ends[0][0] < ends[3][0] < ends[2][0]
    assert ends[0][0] > 2 * world.costs.time(exclusive(100_000_000, 0, 0))
    assert [counted for _, counted in (ends[rank] for rank in range(4))] == [2, 0, 1, 1]
    assert not first.held
    assert not second.held


def test_server_replies_when_its_rule_releases():
    """The rule defers every reply until all three requests have arrived: a barrier."""
    world = World(3, ahead=[0.0, 1.0, 2.0])
    held: list[int] = []

    def rule(worker, payload, now):
        held.append(worker)
        return (
            [(rank, torch.tensor([float(now > 2.0)])) for rank in held]
            if len(held) == 3
            else []
        )

    state = ServerState(rule, host=0)
    answers = world.run(
        lambda comm: VirtualServer(state, comm).request(torch.ones(8)).item()
    )
    assert answers == {0: 1.0, 1: 1.0, 2: 1.0}
    assert held == [0, 1, 2]
    assert all(clock.now > 2.0 for clock in world.clocks)


@pytest.mark.parametrize("shards", [1, 4])
def test_server_round_follows_the_cost_model(shards):
    """K workers push and pull n bytes at once at S parallel servers: 2a + 2 K n / (S B)."""
    world = World(3)  # worker 0 is where the server is
    nbytes = 800_000

    class Rule:
        def __init__(self):
            self.shards, self.held = shards, []

        def __call__(self, worker, payload, now):
            self.held.append((worker, payload))
            return self.held if len(self.held) == 2 else []

    state = ServerState(Rule(), host=0)

    def program(comm):
        return (
            None
            if comm.rank == 0
            else VirtualServer(state, comm).request(torch.ones(nbytes // 4))
        )

    world.run(program)
    latency = world.costs.time(message(0, 1, 0))
    transfer = (world.costs.time(message(nbytes, 1, 0)) - latency) / shards
    ends = sorted(clock.now for clock in world.clocks)[1:]
    assert ends == pytest.approx(
        [2 * latency + 3 * transfer, 2 * latency + 4 * transfer]
    )


# --- arithmetic that is done once for all ---------------------------------------------------------------------------


@given(
    levels=st.integers(0, 4),
    size=st.integers(1, 20),
    ahead=st.lists(st.floats(0.0, 1e-3), min_size=16, max_size=16),
    seed=st.integers(0, 99),
)
def test_merge_equals_explicit_messages(levels, size, ahead, seed):
    """Vectors, clocks, ledgers and bytes are equal bit for bit; the merge is not associative, so order matters."""
    workers = 2**levels
    values = np.random.default_rng(seed).standard_normal((workers, size))
    merges = {"spelled": 0, "once": 0}
    found = {}
    for way in merges:
        world = World(workers, ahead[:workers])

        def merge(a, b, way=way):
            merges[way] += 1
            a.mul_(0.75).add_(b * b)

        def program(comm, way=way, merge=merge):
            vectors = []
            for _ in range(2):
                vector = torch.tensor(values[comm.rank])
                spelled = (
                    NativeCommunicator.merge_
                    if way == "spelled"
                    else VirtualCommunicator.merge_
                )
                spelled(comm, vector, merge)
                vectors.append(vector.tolist())
            return vectors

        vectors = world.run(program)
        meters = [
            (
                clock.now,
                clock.ledger.comm_s,
                clock.ledger.wait,
                comm.collectives,
                comm.bytes_sent,
            )
            for clock, comm in zip(world.clocks, world.comms, strict=True)
        ]
        found[way] = (vectors, meters)
    assert found["once"] == found["spelled"]
    assert merges == {"spelled": workers * levels, "once": 2 * (workers - 1)}


@given(workers=st.integers(1, 6), size=st.integers(1, 9))
def test_allgather_combined_combines_once_and_costs_an_allgather(workers, size):
    world, plain, made = World(workers), World(workers), []

    def combine(tensors):
        made.append([tensor.tolist() for tensor in tensors])
        return torch.stack(tensors).sum(0)

    def mine(comm):
        return torch.full((size,), float(comm.rank + 1))

    results = world.run(
        lambda comm: comm.allgather_combined(mine(comm), combine).tolist()
    )
    plain.run(lambda comm: comm.allgather(mine(comm)))
    assert made == [[[rank + 1.0] * size for rank in range(workers)]]
    assert set(map(tuple, results.values())) == {(workers * (workers + 1) / 2,) * size}
    assert [clock.now for clock in world.clocks] == [
        clock.now for clock in plain.clocks
    ]
    assert [comm.bytes_sent for comm in world.comms] == [
        comm.bytes_sent for comm in plain.comms
    ]


@given(
    workers=st.integers(1, 6),
    ahead=st.lists(st.floats(0.0, 1e-3), min_size=6, max_size=6),
)
def test_rows_are_computed_together_while_clocks_go_on(workers, ahead):
    """The sum and the product of two rows, (3,) and (3,), with a number that all have."""
    world, calls = World(workers, ahead[:workers]), []

    def compute(first, second, factor):
        calls.append(first.shape)
        return first + factor * second, first * second

    def program(comm):
        own = torch.arange(3.0) + comm.rank
        total, product = comm.by_rows(compute, [own, own + 1], 2.0)
        return total.tolist(), product.tolist(), comm.clock.now

    for rank, (total, product, now) in world.run(program).items():
        own = np.arange(3.0) + rank
        assert total == (own + 2 * (own + 1)).tolist()
        assert product == (own * (own + 1)).tolist()
        assert now == ahead[rank]
    assert calls == [(workers, 3)]


@given(
    workers=st.integers(1, 6),
    ahead=st.lists(st.floats(0.0, 1e-3), min_size=6, max_size=6),
)
def test_cached_computes_once_without_cost(workers, ahead):
    """Each call has its own result, also if a worker is a call ahead."""
    world, made = World(workers, ahead[:workers]), []

    def program(comm):
        taken = [
            comm.cached(lambda: made.append(1) or len(made)),
            comm.cached(lambda: made.append(2) or len(made)),
        ]
        comm.barrier()
        return [*taken, comm.cached(lambda: made.append(3) or len(made))]

    results = world.run(program)
    assert list(results.values()) == [[1, 2, 3]] * workers
    assert made == [1, 2, 3]
    assert all(
        not comm._group.results and comm.bytes_sent == comm.collectives == 0
        for comm in world.comms
    )
