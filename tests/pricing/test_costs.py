from __future__ import annotations

import math

import pytest

from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.engine_costs import EngineCost, EngineCosts
from scalebench.cluster.network import Network
from scalebench.cluster.operation import busiest
from scalebench.comm.engines import named
from scalebench.pricing.costs import Costs
from scalebench.pricing.devices import Stated
from scalebench.pricing.platform import Platform
from scalebench.study.choices import Backend
from scalebench.study.spec import TaskOptions
from tests.operations import (
    allreduce,
    alltoallv,
    barrier,
    broadcast,
    exclusive,
    message,
    occupancy,
    reduce,
    under_way,
)

MIB = 1 << 20


def entry(engine: str, seconds_per_mib: float) -> EngineCost:
    points = [(0, 0.0), (MIB, seconds_per_mib)]
    return EngineCost(
        engine=engine, ranks=2, alpha_s=1e-5, points=points, source="test"
    )


def costs(*entries: EngineCost, per_node: int = 4) -> Costs:
    return Costs(
        Network(load_cluster("this-machine"), per_node),
        EngineCosts(entries=list(entries)),
        "mpi",
    )


def test_two_ranks_inside_a_node_have_the_measured_cost():
    prices = costs(
        entry("mpi", 7e-3), entry("mpi-broadcast", 3e-3), entry("mpi-reduce", 5e-3)
    )
    assert prices.time(allreduce(MIB, (0, 1))) == pytest.approx(7e-3)
    assert prices.time(broadcast(MIB, (0, 1))) == pytest.approx(3e-3)
    assert prices.time(reduce(MIB, (0, 1))) == pytest.approx(5e-3)


def test_a_message_has_the_measured_cost_of_its_engine():
    prices, others = costs(entry("mpi-send", 2e-3)), costs(entry("gloo-send", 2e-3))
    network = prices.network
    assert prices.time(message(MIB, 0, 1)) == pytest.approx(2e-3)
    assert others.time(message(MIB, 0, 1)) == network.time(message(MIB, 0, 1)) < 1e-3
    between = costs(entry("mpi-send", 2e-3), per_node=1)
    assert between.time(message(MIB, 0, 1)) > between.network.time(
        message(MIB, 0, 1)
    ), "and that of its software"


def test_more_ranks_inside_a_node_scale_by_the_network_model():
    prices = costs(entry("mpi", 7e-3))
    network = prices.network
    ratio = network.time(allreduce(MIB, (0, 1, 2, 3))) / network.time(
        allreduce(MIB, (0, 1))
    )
    assert ratio > 1
    assert prices.time(allreduce(MIB, (0, 1, 2, 3))) == pytest.approx(7e-3 * ratio)


def test_cost_between_nodes_is_network_plus_engine_software():
    prices = costs(entry("mpi", 7e-3), per_node=1)
    node = Network(load_cluster("this-machine"), 4)
    links = node.time(allreduce(MIB, (0, 1))) - node.time(allreduce(0, (0, 1)))
    software = 2 * 1e-5 + (7e-3 - 1e-5 - links) * (3 / 4) / (1 / 2)
    assert prices.time(allreduce(MIB, (0, 1, 2, 3))) == pytest.approx(
        prices.network.time(allreduce(MIB, (0, 1, 2, 3))) + software
    )
    assert prices.time(barrier((0, 1, 2, 3))) == pytest.approx(
        prices.network.time(allreduce(0, (0, 1, 2, 3))) + 2 * 1e-5
    )


def tasks(alone_s, two_s):
    entries = [
        EngineCost(
            engine="tasks",
            ranks=ranks,
            alpha_s=1e-3,
            points=[(0, 1e-3), (MIB, seconds)],
            source="test",
        )
        for ranks, seconds in ((1, alone_s), (2, two_s))
    ]
    return Costs(
        Network(load_cluster("this-machine"), 4), EngineCosts(entries=entries), "tasks"
    )


def test_blocks_of_tasks_pass_through_the_command_one_after_the_other():
    prices = tasks(5e-3, 7e-3)
    assert prices.time(allreduce(MIB, (0, 1))) == pytest.approx(7e-3)
    assert prices.time(allreduce(MIB, range(4))) == pytest.approx(5e-3 + 3 * 2e-3)
    assert prices.time(exclusive(MIB, 3, 0)) == pytest.approx(5e-3), (
        "a merge waits for its own block alone"
    )


def test_blocks_of_workers_on_other_nodes_travel_to_them_and_back():
    prices = tasks(5e-3, 7e-3)
    there = prices.network.time(message(MIB, 0, 4))
    assert prices.time(allreduce(MIB, range(6))) == pytest.approx(
        5e-3 + 5 * 2e-3 + 2 * 2 * there
    )
    assert prices.time(exclusive(MIB, 5, 0)) == pytest.approx(5e-3 + 2 * there)


def typical(known: EngineCosts, backend: Backend) -> EngineCosts:
    """`known` with the typical cost of tasks on `backend`."""
    entry = named("tasks").typical_cost(TaskOptions(backend=backend))
    assert entry is not None
    return known.with_stated(entry)


@pytest.mark.parametrize(
    ("backend", "seconds"), [("processes", 1.6e-3), ("ray", 3.2e-3), ("dask", 35e-3)]
)
def test_typical_cost_of_tasks_counts_once_in_a_round_beside_all_links(
    backend, seconds
):
    network = Network(load_cluster("juwels-booster"), 4)
    prices = Costs(network, typical(EngineCosts(), backend), "tasks")
    near, there = network.time(message(MIB, 0, 1)), network.time(message(MIB, 0, 4))
    assert prices.time(allreduce(MIB, range(6))) == pytest.approx(
        seconds + 2 * (4 * near + 2 * there)
    )
    assert prices.time(exclusive(MIB, 0, 0)) == pytest.approx(seconds + 2 * near)
    assert prices.time(barrier((0, 1))) == 0


def test_typical_cost_takes_the_place_of_measured_ones():
    measured = tasks(5e-3, 7e-3).engines
    (entry,) = typical(measured, "dask").entries
    assert (entry.stated, entry.alpha_s) == (True, 35e-3)
    assert measured.measured("tasks") == measured.entries
    assert typical(measured, "dask").measured("tasks") == []


def test_what_lies_in_the_command_of_tasks_costs_no_more():
    prices = tasks(5e-3, 7e-3)
    assert prices.time(barrier((0, 1))) == 0
    assert prices.time(reduce(MIB, (0, 1))) + prices.time(
        broadcast(MIB, (0, 1))
    ) == pytest.approx(7e-3)


def test_tasks_that_were_not_measured_are_charged_by_the_network_model():
    network = Network(load_cluster("this-machine"), 4)
    assert Costs(network, EngineCosts(), "tasks").time(
        allreduce(MIB, (0, 1))
    ) == network.time(allreduce(MIB, (0, 1)))


def test_engine_faster_than_links_adds_nothing_per_byte():
    prices = costs(entry("mpi", 2e-5), per_node=1)
    assert prices.time(allreduce(MIB, (0, 1))) == pytest.approx(
        prices.network.time(allreduce(MIB, (0, 1))) + 1e-5
    )


def test_cost_without_measurements_is_the_network_model():
    prices = costs()
    assert prices.time(allreduce(MIB, (0, 5))) == prices.network.time(
        allreduce(MIB, (0, 5))
    )
    assert prices.time(broadcast(MIB, (0, 5))) == pytest.approx(
        prices.network.time(broadcast(MIB, (0, 5)))
    )
    assert prices.time(exclusive(MIB, 0, 0)) >= 0


def test_alltoallv_costs_the_traffic_of_the_busiest_worker():
    prices = costs()
    # nothing is sent to oneself
    assert busiest([[0, 10], [10, 0]]) == busiest([[7, 10], [10, 7]]) == 10
    assert busiest([[0, MIB, 5], [0, 0, 0], [0, MIB, 0]]) == 2 * MIB
    assert prices.time(alltoallv(MIB, (0, 5))) > prices.time(alltoallv(10, (0, 5))) > 0


def test_remote_shared_state_costs_two_crossings():
    prices = costs(entry("mpi-onesided", 1e-3), per_node=2)
    assert prices.time(exclusive(MIB, 1, 0)) == pytest.approx(1e-3)
    assert prices.time(exclusive(MIB, 2, 0)) > 2 * prices.time(message(MIB, 2, 0))


def test_request_to_an_idle_server_has_the_measured_time():
    """Half for the request, half for the reply; K concurrent requests queue for the busy part."""
    prices = costs(entry("mpi-server", 3e-3), entry("mpi-server-busy", 2e-3))
    assert prices.time(occupancy(MIB, 1, 0)) == pytest.approx(1e-3)
    assert prices.time(under_way(MIB, 1, 0)) == pytest.approx(0.5e-3)
    one_way = prices.time(occupancy(MIB, 1, 0)) + prices.time(under_way(MIB, 1, 0))
    assert 2 * one_way == pytest.approx(3e-3)


def test_remote_server_adds_its_software_to_the_network():
    """2a + 2n/B of the cost model for one worker, and the measured seconds of a few bytes."""
    far = costs(entry("mpi-server", 3e-3), entry("mpi-server-busy", 2e-3), per_node=1)
    bare = costs(per_node=1)
    network = 2 * (bare.time(occupancy(MIB, 1, 0)) + bare.time(under_way(MIB, 1, 0)))
    assert network == pytest.approx(2 * bare.time(message(MIB, 1, 0)))
    assert 2 * (
        far.time(occupancy(MIB, 1, 0)) + far.time(under_way(MIB, 1, 0))
    ) == pytest.approx(network + 1e-5)


def between(engine: str, ranks: int, nodes: int, seconds_per_mib: float) -> EngineCost:
    return entry(engine, seconds_per_mib).model_copy(
        update={"ranks": ranks, "nodes": nodes}
    )


def test_measured_node_count_has_the_measured_cost():
    """The network model is not used; inside a node its own measurement applies."""
    measured = [
        entry("mpi", 7e-3),
        between("mpi", 2, 2, 0.3),
        between("mpi", 3, 3, 0.8),
    ]
    apart = costs(*measured, per_node=1)
    assert apart.time(allreduce(MIB, (0, 1))) == pytest.approx(0.3)
    assert apart.time(allreduce(MIB, (0, 1, 2))) == pytest.approx(0.8)
    assert apart.time(allreduce(MIB // 2, (4, 5, 6))) == pytest.approx(0.4)
    assert costs(*measured).time(allreduce(MIB, (0, 1))) == pytest.approx(7e-3)


def test_more_nodes_scale_the_measurement_by_the_network_model():
    prices = costs(entry("mpi", 7e-3), between("mpi", 3, 3, 0.8), per_node=1)
    ratio = prices.network.time(allreduce(MIB, range(8))) / prices.network.time(
        allreduce(MIB, range(3))
    )
    assert ratio > 1
    assert prices.time(allreduce(MIB, tuple(range(8)))) == pytest.approx(0.8 * ratio)


@pytest.mark.parametrize(("growth", "counts"), [(0.0, (2, 3, 4)), (0.3, (2, 3, 4))])
def test_nodes_and_bytes_beyond_the_measured_cost_what_the_fitted_links_do(
    growth, counts
):
    """A ring on links of 37 Mbit/s, where the cluster states 10 Gbit/s; to 1 %, where the fit of congestion ends."""

    def ring(nodes, nbytes):
        crowd = 1 + growth * math.log2(nodes / 2) if nodes > 2 else 1.0
        return crowd * (
            2 * (nodes - 1) * 5e-3 + 2 * (nodes - 1) / nodes * nbytes / 4.6e6
        )

    sizes = [1 << power for power in range(12, 21, 2)]
    entries = [
        EngineCost(
            engine="mpi",
            ranks=p,
            nodes=p,
            alpha_s=1e-2,
            points=[(n, ring(p, n)) for n in sizes],
            source="test",
        )
        for p in counts
    ]
    prices = costs(entry("mpi", 7e-3), *entries, per_node=1)
    for nbytes in (1 << 16, 1 << 20, 1 << 22):
        assert prices.time(allreduce(nbytes, range(16))) == pytest.approx(
            ring(16, nbytes), rel=0.01
        )
    assert prices.time(message(MIB, 0, 1)) == pytest.approx(
        5e-3 + MIB / 4.6e6, rel=0.01
    )


def test_faster_links_shorten_measured_collectives_between_nodes():
    """Of a what-if: the fitted links change as those of the cluster, and what was measured on them with them."""
    ring = Network(load_cluster("this-machine"), 1, "ring")
    points = {
        p: [
            (n, 3e-3 * p + ring.time(allreduce(n, range(p)))) for n in (4, MIB, 4 * MIB)
        ]
        for p in (2, 3, 4)
    }
    entries = [
        EngineCost(
            engine="mpi", ranks=p, nodes=p, alpha_s=own[0][1], points=own, source="test"
        )
        for p, own in points.items()
    ]
    known, own = EngineCosts(entries=entries), load_cluster("this-machine")
    platform = Platform(own, Stated(0.1, 8), known)
    cases = {
        1.0: platform,
        10.0: platform.changed("network bandwidth", 10.0),
        0.1: platform.between_nodes(0.1),
    }
    for ranks in (range(4), range(8)):
        seconds = {
            factor: Costs(Network(case.cluster, 1), known, "mpi", (), own).time(
                allreduce(4 * MIB, ranks)
            )
            for factor, case in cases.items()
        }
        assert seconds[10.0] < 0.9 * seconds[1.0]
        assert seconds[0.1] > 2 * seconds[1.0]
    unchanged = Costs(Network(own, 1), known, "mpi", (), own)
    assert unchanged.time(allreduce(MIB, range(4))) == pytest.approx(
        dict(points[4])[MIB]
    )
    latency = platform.changed("network latency", 0.1)
    assert (
        Costs(Network(latency.cluster, 1), known, "mpi", (), own).time(
            allreduce(4, range(4))
        )
        < 0.5 * points[4][0][1]
    )


def test_measurement_applies_to_its_ranks_per_node():
    prices = costs(between("mpi", 6, 3, 0.8), per_node=2)
    assert prices.time(allreduce(MIB, tuple(range(6)))) == pytest.approx(0.8)
    crowded = costs(between("mpi", 3, 3, 0.8), per_node=2)
    alike = Network(load_cluster("this-machine"), 1).time(allreduce(MIB, range(3)))
    expected = 0.8 * crowded.network.time(allreduce(MIB, range(6))) / alike
    assert crowded.time(allreduce(MIB, tuple(range(6)))) == pytest.approx(expected)


def test_slow_links_scale_measured_costs_between_nodes():
    cluster = load_cluster("this-machine").with_slow_links({"1": 2.0})
    slow = Costs(
        Network(cluster, 1), EngineCosts(entries=[between("mpi", 2, 2, 0.3)]), "mpi"
    )
    assert 0.5 < slow.time(allreduce(MIB, (0, 1))) < 0.61


def test_unmeasured_operation_scales_with_the_allreduce():
    prices = costs(between("gloo", 3, 3, 0.8), per_node=1)
    prices.engine = "gloo"
    ratio = prices.network.time(broadcast(MIB, range(3))) / prices.network.time(
        allreduce(MIB, range(3))
    )
    assert prices.time(broadcast(MIB, (0, 1, 2))) == pytest.approx(0.8 * ratio)


def test_costs_between_nodes_do_not_scale_with_machine_speed():
    before = EngineCosts(
        entries=[entry("mpi", 7e-3), between("mpi", 2, 2, 0.3)], reference_s=1e-3
    )
    after = before.at(2e-3)
    assert after.of("mpi", 2).seconds(MIB) == pytest.approx(14e-3)
    assert after.of("mpi", 2, 2).seconds(MIB) == pytest.approx(0.3)
