from __future__ import annotations

import pytest

from scalebench.cluster.engine_costs import EngineCost, EngineCosts
from scalebench.cluster.load import load_cluster
from scalebench.cluster.network import Network
from scalebench.virtual.costs import Costs

MIB = 1 << 20


def entry(engine: str, seconds_per_mib: float) -> EngineCost:
    points = [(0, 0.0), (MIB, seconds_per_mib)]
    return EngineCost(engine=engine, ranks=2, alpha_s=1e-5, points=points, source="test")


def costs(*entries: EngineCost, per_node: int = 4) -> Costs:
    return Costs(Network(load_cluster("this-machine"), per_node), EngineCosts(entries=list(entries)), "mpi")


def test_inside_a_node_two_ranks_cost_what_was_measured():
    prices = costs(entry("mpi", 7e-3), entry("mpi-broadcast", 3e-3), entry("mpi-reduce", 5e-3))
    assert prices.allreduce(MIB, (0, 1)) == pytest.approx(7e-3)
    assert prices.broadcast(MIB, (0, 1)) == pytest.approx(3e-3)
    assert prices.reduce(MIB, (0, 1)) == pytest.approx(5e-3)


def test_inside_a_node_more_ranks_cost_in_proportion_to_the_network_model():
    prices = costs(entry("mpi", 7e-3))
    network = prices.network
    ratio = network.allreduce(MIB, (0, 1, 2, 3)) / network.allreduce(MIB, (0, 1))
    assert ratio > 1
    assert prices.allreduce(MIB, (0, 1, 2, 3)) == pytest.approx(7e-3 * ratio)


def test_between_nodes_the_network_is_charged_and_what_the_engines_software_adds():
    prices = costs(entry("mpi", 7e-3), per_node=1)
    node = Network(load_cluster("this-machine"), 4)
    links = node.allreduce(MIB, (0, 1)) - node.allreduce(0, (0, 1))
    software = 2 * 1e-5 + (7e-3 - 1e-5 - links) * (3 / 4) / (1 / 2)
    assert prices.allreduce(MIB, (0, 1, 2, 3)) == pytest.approx(prices.network.allreduce(MIB, (0, 1, 2, 3)) + software)
    assert prices.barrier((0, 1, 2, 3)) == pytest.approx(prices.network.allreduce(0, (0, 1, 2, 3)) + 2 * 1e-5)


def test_an_engine_that_is_faster_than_the_links_adds_nothing_per_byte():
    prices = costs(entry("mpi", 2e-5), per_node=1)
    assert prices.allreduce(MIB, (0, 1)) == pytest.approx(prices.network.allreduce(MIB, (0, 1)) + 1e-5)


def test_without_measurements_the_network_model_is_all():
    prices = costs()
    assert prices.allreduce(MIB, (0, 5)) == prices.network.allreduce(MIB, (0, 5))
    assert prices.broadcast(MIB, (0, 5)) == pytest.approx(prices.network.broadcast(MIB, (0, 5)))
    assert prices.exclusive(MIB, 0, 0) >= 0


def test_an_exchange_costs_what_the_busiest_sends_or_receives():
    prices = costs()
    even = prices.alltoallv([[0, 10], [10, 0]], (0, 5))
    assert prices.alltoallv([[0, MIB], [0, 0]], (0, 5)) > even
    assert prices.alltoallv([[0, MIB], [0, 0]], (0, 5)) == prices.alltoallv([[0, 0], [MIB, 0]], (0, 5))


def test_a_shared_state_far_away_costs_two_crossings():
    prices = costs(entry("mpi-onesided", 1e-3), per_node=2)
    assert prices.exclusive(MIB, 1, 0) == pytest.approx(1e-3)
    assert prices.exclusive(MIB, 2, 0) > 2 * prices.message(MIB, 2, 0)


def test_an_idle_server_in_the_node_takes_what_a_request_was_measured_to_take():
    """Half of it there, half back; its busy part is what K requests at once queue for."""
    prices = costs(entry("mpi-server", 3e-3), entry("mpi-server-busy", 2e-3))
    assert prices.occupancy(MIB, 1, 0) == pytest.approx(1e-3)
    assert prices.under_way(MIB, 1, 0) == pytest.approx(0.5e-3)
    one_way = prices.occupancy(MIB, 1, 0) + prices.under_way(MIB, 1, 0)
    assert 2 * one_way == pytest.approx(3e-3)


def test_a_server_far_away_adds_its_software_to_the_network():
    """2a + 2n/B of the cost model for one worker, and the measured seconds of a few bytes."""
    far = costs(entry("mpi-server", 3e-3), entry("mpi-server-busy", 2e-3), per_node=1)
    bare = costs(per_node=1)
    network = 2 * (bare.occupancy(MIB, 1, 0) + bare.under_way(MIB, 1, 0))
    assert network == pytest.approx(2 * bare.message(MIB, 1, 0))
    assert 2 * (far.occupancy(MIB, 1, 0) + far.under_way(MIB, 1, 0)) == pytest.approx(network + 1e-5)


def between(engine: str, ranks: int, nodes: int, seconds_per_mib: float) -> EngineCost:
    return entry(engine, seconds_per_mib).model_copy(update={"ranks": ranks, "nodes": nodes})


def test_between_as_many_nodes_as_were_measured_the_measurement_is_charged():
    """Not the network model and its algorithm; inside a node, what was measured there."""
    measured = [entry("mpi", 7e-3), between("mpi", 2, 2, 0.3), between("mpi", 3, 3, 0.8)]
    apart = costs(*measured, per_node=1)
    assert apart.allreduce(MIB, (0, 1)) == pytest.approx(0.3)
    assert apart.allreduce(MIB, (0, 1, 2)) == pytest.approx(0.8)
    assert apart.allreduce(MIB // 2, (4, 5, 6)) == pytest.approx(0.4)
    assert costs(*measured).allreduce(MIB, (0, 1)) == pytest.approx(7e-3)


def test_between_more_nodes_the_measurement_grows_as_the_network_model_says():
    prices = costs(entry("mpi", 7e-3), between("mpi", 3, 3, 0.8), per_node=1)
    ratio = prices.network.allreduce(MIB, range(8)) / prices.network.allreduce(MIB, range(3))
    assert ratio > 1
    assert prices.allreduce(MIB, tuple(range(8))) == pytest.approx(0.8 * ratio)


def test_a_measurement_of_two_ranks_a_node_is_of_that_place():
    prices = costs(between("mpi", 6, 3, 0.8), per_node=2)
    assert prices.allreduce(MIB, tuple(range(6))) == pytest.approx(0.8)
    crowded = costs(between("mpi", 3, 3, 0.8), per_node=2)
    alike = Network(load_cluster("this-machine"), 1).allreduce(MIB, range(3))
    expected = 0.8 * crowded.network.allreduce(MIB, range(6)) / alike
    assert crowded.allreduce(MIB, tuple(range(6))) == pytest.approx(expected)


def test_links_that_a_study_slows_down_slow_what_was_measured_between_nodes():
    cluster = load_cluster("this-machine").with_slow_links({"1": 2.0})
    slow = Costs(Network(cluster, 1), EngineCosts(entries=[between("mpi", 2, 2, 0.3)]), "mpi")
    assert 0.5 < slow.allreduce(MIB, (0, 1)) < 0.61


def test_an_operation_that_was_not_measured_costs_in_proportion_to_the_measured_allreduce():
    prices = costs(between("gloo", 3, 3, 0.8), per_node=1)
    prices.engine = "gloo"
    ratio = prices.network.broadcast(MIB, range(3)) / prices.network.allreduce(MIB, range(3))
    assert prices.broadcast(MIB, (0, 1, 2)) == pytest.approx(0.8 * ratio)


def test_links_between_nodes_do_not_follow_the_speed_of_the_cores():
    before = EngineCosts(entries=[entry("mpi", 7e-3), between("mpi", 2, 2, 0.3)], reference_s=1e-3)
    after = before.at(2e-3)
    assert after.of("mpi", 2).seconds(MIB) == pytest.approx(14e-3)
    assert after.of("mpi", 2, 2).seconds(MIB) == pytest.approx(0.3)
