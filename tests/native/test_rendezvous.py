"""Addresses at which rank 0 listens for the others."""

from __future__ import annotations

import socket

import psutil
import pytest

from scalebench.comm.engines import named
from scalebench.comm.engines.base import Place
from scalebench.comm.torch_dist import listening_address, own_addresses
from scalebench.errors import EngineError
from scalebench.native.heartbeat import Heartbeat, create_heartbeats
from scalebench.native.rank import meet
from scalebench.system.clock import WallClock


def listened_at():
    connections = psutil.Process().net_connections(kind="inet")
    return {
        connection.laddr.ip
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.fixture
def heart(tmp_path):
    create_heartbeats(tmp_path / "heartbeats", 1)
    return Heartbeat(tmp_path / "heartbeats", 0)


def test_ranks_of_one_node_listen_on_loopback_alone(tmp_path, heart):
    before = listened_at()
    world = meet(tmp_path, heart, 0, 1, one_node=True)
    with named("gloo").connect(
        Place(world, WallClock(), one_node=True)
    ) as communicator:
        assert communicator.size == 1
        assert listened_at() - before <= {"127.0.0.1"}
        assert "127.0.0.1" in listened_at()
    world.close()


def test_port_in_use_is_named_with_its_variable(tmp_path, heart, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(
            EngineError,
            match=f"cannot listen at port {port} of 127.0.0.1: .* in use; set MASTER_PORT",
        ):
            meet(tmp_path, heart, 0, 1, one_node=True)


@pytest.mark.parametrize("variable", ["MASTER_ADDR", "GLOO_SOCKET_IFNAME"])
def test_ranks_of_several_nodes_listen_on_the_network_that_is_named(
    monkeypatch, variable
):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert listening_address(one_node=False) == ""
    for name, interface in psutil.net_if_addrs().items():
        for address in (
            each.address for each in interface if each.address in own_addresses()
        ):
            monkeypatch.setenv(
                variable, name if variable == "GLOO_SOCKET_IFNAME" else address
            )
            assert listening_address(one_node=False) in own_addresses()
            assert listening_address(one_node=True) == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert listening_address(one_node=False) == "127.0.0.1"
