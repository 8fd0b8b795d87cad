"""Address and network by which a rank reaches rank 0's host: tried, not taken from the resolution of names.

Debian writes a host's own name into /etc/hosts as 127.0.1.1, compute nodes may not know one another's names, and a
process group that is told such an address waits for ever.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from contextlib import suppress

import psutil

from scalebench.comm.control import Control
from scalebench.errors import EngineError

LOOPBACK = "127.0.0.1"
_TRY_S = 3.0  # seconds for each address


def find_route(ranks: Control, port: int) -> tuple[str, str]:
    """The first of rank 0's addresses whose `port` answers this rank, and this host's interface that leads there.

    The interface is empty if the user named one; rank 0's is the one that rank 1 reached.

    Raises:
        EngineError: none answered; says what was tried, and what to check.
    """
    host, addresses = ranks.bcast((platform.node(), own_addresses()) if ranks.rank == 0 else None)
    own = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if ranks.rank == 0:
        reached = ranks.gather(None)
        address = next(each for each in (*(reached or ()), "127.0.0.1") if each is not None)
        return "127.0.0.1", "" if own else _interface(address)
    try:
        address, source = first_answering(addresses, port, host)
    except EngineError:
        ranks.gather(None)
        raise
    ranks.gather(address)
    return address, "" if own else _interface(source)


def first_answering(addresses: Sequence[str], port: int, host: str) -> tuple[str, str]:
    """Find the first of the `addresses` of rank 0's `host` that answers at `port`, and this host's own to reach it.

    Raises:
        EngineError: none answered; says what was tried, and what to check.
    """
    tried = []
    for address in addresses:
        try:
            with socket.create_connection((address, port), _TRY_S) as connection:
                return address, connection.getsockname()[0]
        except OSError as error:
            tried.append(f"{address}: {(error.strerror or str(error)).lower()}")
    raise EngineError(
        f"{platform.node()} reaches no address of rank 0's host {host} at TCP port {port} ({'; '.join(tried)}); "
        "check routes and firewalls between the hosts, or name the network that joins them: GLOO_SOCKET_IFNAME=..."
    )


def own_addresses() -> Sequence[str]:
    """This host's addresses on networks: what its name means first, then those of its other interfaces."""
    named: list[str] = []
    with suppress(OSError):
        named = [str(entry[4][0]) for entry in socket.getaddrinfo(platform.node(), None, socket.AF_INET)]
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    bound = [
        address.address
        for name, interface in psutil.net_if_addrs().items()
        for address in interface
        if name in up and address.family is socket.AF_INET
    ]
    return [
        address for address in dict.fromkeys([*named, *bound]) if address in bound and not address.startswith("127.")
    ]


def listening_address(*, one_node: bool) -> str:
    """The address at which rank 0 listens: loopback where all ranks are on its node, else on the network that is named.

    A network is named by MASTER_ADDR or GLOO_SOCKET_IFNAME. Empty, for all addresses, if none is: hosts may have
    several networks, and only the other ranks know which of them they reach.
    """
    if one_node:
        return LOOPBACK
    own = own_addresses()
    with suppress(OSError):
        stated = socket.gethostbyname(os.environ.get("MASTER_ADDR", ""))
        if stated in own or stated.startswith("127."):
            return stated
    named = psutil.net_if_addrs().get(os.environ.get("GLOO_SOCKET_IFNAME", ""), [])
    return next((each.address for each in named if each.family is socket.AF_INET and each.address in own), "")


def _interface(address: str) -> str:
    """The name of the interface that has `address`."""
    known = {(each.family, each.address): name for name, all_of in psutil.net_if_addrs().items() for each in all_of}
    return known.get((socket.AF_INET, address), "")
