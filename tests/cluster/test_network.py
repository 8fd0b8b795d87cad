"""Network costs follow the closed forms, are monotone, and depend on node placement."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.cluster.cluster_file import (
    Cluster,
    Congestion,
    cluster_names,
    load_cluster,
)
from scalebench.cluster.collectives import SHORT_MESSAGE, Level, nccl_times, server
from scalebench.cluster.network import ALLREDUCE, Network, place
from scalebench.cluster.operation import Kind, Operation
from scalebench.errors import ClusterError
from tests.operations import (
    allreduce,
    barrier,
    broadcast,
    linear_broadcast,
    linear_reduce,
    message,
)

ALPHA, BANDWIDTH, GAMMA = (
    20e-6,
    1.25e9,
    6.6e-11,
)  # ethernet-10g: one worker per node, one kind of link
PRESETS = {name: load_cluster(name) for name in cluster_names()}
OTHERS = (
    Operation(Kind.BROADCAST, 0, ()),
    Operation(Kind.BROADCAST, 0, (), linear=True),
    Operation(Kind.REDUCE, 0, ()),
    Operation(Kind.REDUCE, 0, (), linear=True),
    Operation(Kind.REDUCE_SCATTER, 0, ()),
    Operation(Kind.ALLGATHER, 0, ()),
    Operation(Kind.ALLTOALL, 0, ()),
)
sizes = st.integers(0, 1 << 28)


def lg(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


FORMULAS = {
    "ring": lambda n, p: (
        2 * (p - 1) * ALPHA + 2 * (p - 1) / p * n / BANDWIDTH + (p - 1) / p * n * GAMMA
    ),
    "recursive_doubling": lambda n, p: lg(p) * (ALPHA + n / BANDWIDTH + n * GAMMA),
    "rabenseifner": lambda n, p: (
        2 * lg(p) * ALPHA + 2 * (p - 1) / p * n / BANDWIDTH + (p - 1) / p * n * GAMMA
    ),
    "recursive_halving": lambda n, p: (
        2 * lg(p) * ALPHA + (p - 1) / p * n * (2 / BANDWIDTH + GAMMA)
    ),
    "binomial": lambda n, p: 2 * lg(p) * (ALPHA + n / BANDWIDTH) + lg(p) * n * GAMMA,
    "server": lambda n, p: 2 * ALPHA + 2 * p * n / BANDWIDTH,
    "sharded_server": lambda n, p: 2 * ALPHA + 2 * n / BANDWIDTH,
    "flexible_server": lambda n, p: 2 * ALPHA + 2 * n / BANDWIDTH,
    "tree": lambda n, p: 2 * lg(p) * (ALPHA + n / BANDWIDTH) + lg(p) * n * GAMMA,
    "hierarchical": lambda n, p: (
        2 * (p - 1) * ALPHA + 2 * (p - 1) / p * n / BANDWIDTH + (p - 1) / p * n * GAMMA
    ),
}


@given(n=sizes, ranks=st.integers(2, 300), algorithm=st.sampled_from(sorted(FORMULAS)))
def test_one_worker_per_node_costs_the_closed_form(
    n: int, ranks: int, algorithm: str
) -> None:
    cost = Network(PRESETS["ethernet-10g"]).time(allreduce(n, range(ranks), algorithm))
    # same sum, another order
    assert cost == pytest.approx(FORMULAS[algorithm](n, ranks), rel=1e-12)


def test_hierarchical_costs_rings_inside_and_between_nodes() -> None:
    # as many cards as workers: every rank has a card to itself
    cluster = PRESETS["marenostrum5-acc"]
    intra, inter, gamma = (
        cluster.links.intra,
        cluster.links.inter,
        cluster.reduction.seconds_per_byte,
    )
    n, g, m = 80_000_000, 4, 8
    expected = (
        2 * (g - 1) * intra.latency_s
        + 2 * (g - 1) / g * n / intra.bandwidth_bytes_per_s
        + 2 * (m - 1) * inter.latency_s
        + 2 * (m - 1) / m * (n / g) / inter.bandwidth_bytes_per_s
        + (g * m - 1) / (g * m) * n * gamma
    )
    assert Network(cluster).time(
        allreduce(n, range(g * m), "hierarchical")
    ) == pytest.approx(expected, rel=1e-12)


@given(n=sizes, ranks=st.integers(1, 300))
def test_linear_collective_crosses_the_link_of_its_root(n: int, ranks: int) -> None:
    network = Network(PRESETS["ethernet-10g"])
    messages = (ranks - 1) * (ALPHA + n / BANDWIDTH)
    assert network.time(linear_broadcast(n, range(ranks))) == pytest.approx(
        messages, rel=1e-12
    )
    assert network.time(linear_reduce(n, range(ranks))) == pytest.approx(
        messages + (ranks - 1) * n * GAMMA, rel=1e-12
    )


def test_linear_collective_crosses_the_card_for_other_nodes_only() -> None:
    cluster = PRESETS["marenostrum5-acc"]
    intra, inter, n = cluster.links.intra, cluster.links.inter, 80_000_000
    inside = 3 * (intra.latency_s + n / intra.bandwidth_bytes_per_s)
    across = 12 * (inter.latency_s + n / inter.bandwidth_bytes_per_s)
    assert Network(cluster).time(linear_broadcast(n, range(16))) == pytest.approx(
        inside + across, rel=1e-12
    )
    other_root = (5, *range(5), *range(6, 16))
    assert Network(cluster).time(linear_broadcast(n, other_root)) == pytest.approx(
        inside + across, rel=1e-12
    )


@given(n=sizes, ranks=st.integers(2, 64), shards=st.integers(1, 8))
def test_server_is_bound_by_the_busier_end(n: int, ranks: int, shards: int) -> None:
    links = Level(ranks, ALPHA, BANDWIDTH, BANDWIDTH, ranks * BANDWIDTH, across=True)
    expected = 2 * ALPHA + max(2 * n / BANDWIDTH, 2 * ranks * n / (shards * BANDWIDTH))
    assert server(n, (links,), 0.0, shards) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("preset", sorted(PRESETS))
@given(
    small=sizes,
    more=sizes,
    ranks=st.integers(1, 200),
    operation=st.sampled_from(
        [*(allreduce(0, (), name) for name in ("auto", *ALLREDUCE)), *OTHERS]
    ),
)
def test_more_bytes_or_ranks_never_cost_less(
    preset: str, small: int, more: int, ranks: int, operation: Operation
) -> None:
    network = Network(PRESETS[preset])

    def cost(n: int, p: int) -> float:
        return network.time(operation._replace(nbytes=n, members=range(p)))

    slack = 1 + 1e-12  # sums in another order
    assert cost(small, ranks) <= cost(small + more, ranks) * slack
    assert cost(small, ranks) <= cost(small, ranks + 1) * slack


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_single_rank_costs_nothing(preset: str) -> None:
    network = Network(PRESETS[preset])
    costs = [
        network.time(allreduce(1000, [3])),
        network.time(broadcast(1000, [3])),
        network.time(barrier([3])),
        network.time(message(9, 3, 3)),
    ]
    assert costs == [0.0] * 4


def test_workers_fill_nodes_in_order() -> None:
    network = Network(PRESETS["juwels-booster"])
    assert network.same_node(0, 3)
    assert not network.same_node(3, 4)
    assert network.time(message(10**6, 0, 3)) < network.time(message(10**6, 3, 4))
    assert network.time(allreduce(10**6, range(4))) < network.time(
        allreduce(10**6, [0, 4, 8, 12])
    )
    assert Network(PRESETS["juwels-booster"], ranks_per_node=2).same_node(2, 3)


def test_concurrent_ranks_share_network_cards() -> None:
    one_card = PRESETS["juwels-booster"].model_copy(
        update={
            "node": PRESETS["juwels-booster"].node.model_copy(
                update={"network_cards": 1}
            )
        }
    )
    n, ranks = 100_000_000, range(8)
    many, one = Network(PRESETS["juwels-booster"]), Network(one_card)
    between = many.time(allreduce(n, ranks, "rabenseifner")) - many.time(
        allreduce(n, range(4), "rabenseifner")
    )
    assert (
        one.time(allreduce(n, ranks, "rabenseifner"))
        > many.time(allreduce(n, ranks, "rabenseifner")) + 2 * between
    )
    # one flow crosses each card
    assert one.time(allreduce(n, ranks, "ring")) == many.time(
        allreduce(n, ranks, "ring")
    )


def test_auto_switches_algorithm_like_mpich() -> None:
    network = Network(PRESETS["ethernet-10g"])
    for n, algorithm in (
        (SHORT_MESSAGE, "recursive_doubling"),
        (SHORT_MESSAGE + 1, "rabenseifner"),
    ):
        assert network.time(allreduce(n, range(16))) == network.time(
            allreduce(n, range(16), algorithm)
        )
    forced = Network(PRESETS["ethernet-10g"], collective="tree")
    assert forced.time(allreduce(10**6, range(16))) == network.time(
        allreduce(10**6, range(16), "tree")
    )


def test_unknown_collective_suggests_the_nearest() -> None:
    with pytest.raises(
        ClusterError, match="unknown collective 'rign'; did you mean 'ring'"
    ):
        Network(PRESETS["ethernet-10g"], collective="rign")


@given(st.lists(st.integers(0, 63), min_size=1, max_size=20, unique=True))
def test_cost_does_not_depend_on_the_sequence_type(group: list[int]) -> None:
    network = Network(PRESETS["this-machine"], ranks_per_node=2)
    assert network.time(allreduce(5000, group)) == network.time(
        allreduce(5000, tuple(reversed(group)))
    )


@pytest.mark.parametrize("preset", sorted(PRESETS))
@given(
    n=sizes, ranks=st.integers(2, 300), algorithm=st.sampled_from(["auto", *ALLREDUCE])
)
def test_no_allreduce_beats_the_bound_of_its_narrowest_link(
    preset: str, n: int, ranks: int, algorithm: str
) -> None:
    """2 (p-1)/p n/B, Patarasuk and Yuan 2009: p ranks inside a node, and nodes with all their cards."""
    cluster = PRESETS[preset]
    g = cluster.node.workers_per_node
    p, m = min(g, ranks), -(-ranks // g)
    bound = (
        2 * (p - 1) / p * n / cluster.links.intra.bandwidth_bytes_per_s
        if m == 1
        else 0.0
    )
    cards = cluster.node.network_cards
    bound = max(
        bound, 2 * (m - 1) / m * n / (cards * cluster.links.inter.bandwidth_bytes_per_s)
    )
    assert Network(cluster).time(allreduce(n, range(ranks), algorithm)) >= bound * (
        1 - 1e-12
    )


@given(
    start=st.integers(0, 100),
    count=st.integers(1, 300),
    step=st.integers(1, 20),
    per_node=st.integers(1, 12),
)
def test_placement_of_a_range_equals_that_of_its_ranks(
    start: int, count: int, step: int, per_node: int
) -> None:
    group = range(start, start + count * step, step)
    nodes = [rank // per_node for rank in group]
    found = place(group, per_node)
    assert list(found.nodes) == sorted(set(nodes))
    assert found.fullest == max(map(nodes.count, nodes))
    listed = place(tuple(group), per_node)
    assert (list(listed.nodes), listed.fullest) == (list(found.nodes), found.fullest)


def with_links(cluster: Cluster, **changes: object) -> Cluster:
    return cluster.model_copy(
        update={"links": cluster.links.model_copy(update=changes)}
    )


def test_placing_65536_ranks_takes_no_walk_over_them() -> None:
    network = Network(PRESETS["ethernet-10g"], ranks_per_node=8)
    assert place(range(65536), 8).fullest == 8
    assert len(place(range(0, 65536, 8), 8).nodes) == 8192
    assert network.nodes_of(range(65536)) == 8192
    assert network.time(linear_broadcast(1000, range(65536))) == pytest.approx(
        7 * network.time(message(1000, 0, 1))
        + 65528 * network.time(message(1000, 0, 8)),
        rel=1e-9,
    )


@given(ranks=st.integers(2, 64), root=st.integers(0, 63))
def test_linear_collective_adds_messages_of_slow_links(ranks: int, root: int) -> None:
    cluster = with_links(PRESETS["juwels-booster"], slow={"1": 4.0, "0-2": 2.0})
    network = Network(cluster)
    group = (root, *(rank for rank in range(ranks) if rank != root))
    expected = sum(network.time(message(10**6, root, rank)) for rank in group[1:])
    assert network.time(linear_broadcast(10**6, group)) == pytest.approx(
        expected, rel=1e-12
    )


@given(n=sizes, nodes=st.integers(1, 300), growth=st.floats(0, 1))
def test_congestion_stretches_transfers_from_three_nodes_on(
    n: int, nodes: int, growth: float
) -> None:
    plain = PRESETS["ethernet-10g"]
    crowded = with_links(
        plain, congestion=Congestion(per_doubling=growth, source="a test")
    )
    gamma_free = {
        "reduction": plain.reduction.model_copy(update={"seconds_per_byte": 1e-30})
    }
    costs = [
        Network(cluster.model_copy(update=gamma_free)).time(
            allreduce(n, range(nodes), "ring")
        )
        for cluster in (plain, crowded)
    ]
    factor = 1 + growth * math.log2(nodes / 2) if nodes > 2 else 1.0
    assert costs[1] == pytest.approx(costs[0] * factor, rel=1e-9)


def test_ranks_below_one_switch_share_its_link() -> None:
    own = PRESETS["dgx-h100"]
    shared = with_links(own, intra=own.links.intra.model_copy(update={"shared_by": 4}))
    n = 10**8
    at = {
        name: [Network(one).time(allreduce(n, range(8), name)) for one in (own, shared)]
        for name in ALLREDUCE
    }
    assert at["ring"][0] == at["ring"][1]  # one flow crosses each link
    assert at["rabenseifner"][1] > 3 * at["rabenseifner"][0]
    two, alone = (
        Network(one).time(allreduce(n, range(2), "rabenseifner"))
        for one in (shared, own)
    )
    # 2 (p-1)/p n/B once more
    assert two - alone == pytest.approx(
        n / own.links.intra.bandwidth_bytes_per_s, rel=1e-9
    )


def test_flexible_shards_relieve_the_slow_node() -> None:
    plain = PRESETS["juwels-booster"]  # four workers and four cards a node
    slow = with_links(plain, slow={"0": 3.0})
    n, ranks = 10**8, range(64)
    equal, flexible = (
        Network(slow).time(allreduce(n, ranks, name))
        for name in ("sharded_server", "flexible_server")
    )
    assert flexible < 0.6 * equal
    equal, flexible = (
        Network(plain).time(allreduce(n, ranks, name))
        for name in ("sharded_server", "flexible_server")
    )
    assert flexible == pytest.approx(equal, rel=1e-12)


def test_nccl_takes_trees_for_many_nodes_and_rings_for_many_bytes() -> None:
    def choice(n: int, ranks: int, preset: str = "dgx-h100") -> tuple[str, str]:
        times = nccl_times(n, Network(PRESETS[preset])._levels_of(range(ranks)))
        return min(times, key=times.__getitem__)

    assert choice(1024, 512) == ("tree", "LL")
    assert choice(10**9, 16) == ("ring", "Simple")
    assert choice(10**6, 512)[0] == "tree"
    protocols = {choice(1 << k, 64, "ethernet-10g")[1] for k in range(31)}
    assert protocols == {"LL", "Simple"}  # LL128 on NVLink only
