"""Connects the workers of one run by an engine, for as long as the run lasts.

Horovod and process groups have background threads that slow everything else on the machine: they are made before
their own runs and taken down after them.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from scalebench.comm.native import NativeCommunicator
from scalebench.errors import EngineError
from scalebench.native.addresses import LOOPBACK, find_route, first_answering, listening_address, own_addresses
from scalebench.native.control import Control, StoreGroup
from scalebench.native.heartbeat import Heartbeat
from scalebench.system.clock import WallClock

if TYPE_CHECKING:
    from mpi4py import MPI


_BACKLOG = 4096  # connections that wait to be taken, as of thousands of ranks; the system may allow fewer
_OWN_REFERENCES = 3  # the caller's, the parameter's and that of the count itself


@contextmanager
def connected(
    engine: str,
    ranks: Control,
    clock: WallClock,
    *,
    one_node: bool,
    for_good: bool = False,
    waits_for: Callable[[int | None], None] = lambda _: None,
) -> Iterator[NativeCommunicator]:
    """The communicator of `engine` over `ranks`; of mpi and horovod these are an MPI communicator.

    `for_good` leaves Horovod up for the next run, which has to have the same ranks. `waits_for` hears which rank this
    one begins to wait for, or None: all.

    Raises:
        EngineError: an address of rank 0's host cannot be reached from here.
    """
    if engine == "mpi":
        from scalebench.comm.mpi import MpiCommunicator

        yield MpiCommunicator(cast("MPI.Comm", ranks), clock)
    elif engine == "horovod":
        import horovod.torch as hvd

        from scalebench.comm.horovod import HorovodCommunicator

        if not hvd.is_initialized():
            hvd.init(comm=ranks)
        try:
            yield HorovodCommunicator(clock)
        except BaseException:
            if ranks.size == 1:  # with others, shutting down would wait for them, and they wait for this rank
                hvd.shutdown()
            raise
        if not for_good:
            hvd.shutdown()
    else:
        yield from _process_group(engine, ranks, clock, one_node, waits_for)


def _process_group(
    engine: str, ranks: Control, clock: WallClock, one_node: bool, waits_for: Callable[[int | None], None]
) -> Iterator[NativeCommunicator]:
    import torch.distributed as dist

    from scalebench.comm.torch_dist import TorchCommunicator

    store: Any = _listen(listening_address(one_node=one_node)) if ranks.rank == 0 else None
    port = ranks.bcast(store.port if store is not None else None)
    waits_for(0 if ranks.rank else None)
    address, interface = (LOOPBACK, "lo") if one_node else find_route(ranks, port)
    if store is None:
        store = dist.TCPStore(address, port)  # type: ignore[attr-defined]
    waits_for(None)
    with _environment({"GLOO_SOCKET_IFNAME": interface} if engine == "gloo" and interface else {}):
        dist.init_process_group(engine, store=store, rank=ranks.rank, world_size=ranks.size)
    try:
        yield TorchCommunicator(clock)
    except BaseException:
        if ranks.size == 1:
            dist.destroy_process_group()
        raise
    ranks.Barrier()  # who leaves first would cut off the others' last messages
    group = dist.group.WORLD
    dist.destroy_process_group()
    _await_sole_owner(group)


def _listen(address: str, port: int = 0, timeout: timedelta = dist.default_pg_timeout) -> Any:
    """Return a store that listens at `address` (empty: at all of this host's), where torch's own listens at all.

    The operating system picks the port while rank 0 already listens on it: no other process can take it between.
    """
    listener = socket.create_server((address, port), backlog=_BACKLOG)
    port = listener.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        address or LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def _await_sole_owner(group: Any) -> None:
    """Wait, a second at most, until only the caller refers to `group`.

    A communication hook's callbacks (PowerSGD under DDP) are let go by the group's own thread, some time after their
    result is there. If that were the last reference the thread would join itself, and the process abort.
    """
    if sys.getrefcount(group) > _OWN_REFERENCES:
        gc.collect()  # the model wrapped for DDP goes in a cycle
    deadline = time.monotonic() + 1.0
    while sys.getrefcount(group) > _OWN_REFERENCES and time.monotonic() < deadline:
        time.sleep(1e-3)


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


FILE = "rendezvous.json"
_FOREVER = timedelta(days=365)  # a run's limit is the launching command's to keep
_LOOK_S = 0.05


def meet(folder: Path, heart: Heartbeat, rank: int, size: int, *, one_node: bool = False) -> StoreGroup:
    """Connect the `size` ranks of a launch, whose files lie in `folder`; `one_node`: all are known to be on one.

    Raises:
        EngineError: no address of rank 0's host can be reached from here, or rank 0 cannot listen at MASTER_PORT.
    """
    stated, port = os.environ.get("MASTER_ADDR"), int(os.environ.get("MASTER_PORT") or 0)
    heart.wait_for(0 if rank else None)
    path = folder / FILE
    if rank == 0:
        address = listening_address(one_node=one_node)
        try:
            store = _listen(address, port, _FOREVER)
        except OSError as error:
            raise EngineError(
                f"cannot listen at port {port} of {address or platform.node()}: {os.strerror(error.errno or 0)}; set "
                "MASTER_PORT to a free one, or to nothing for one that the system chooses"
            ) from None
        addresses = [address] if address else [stated] if stated else list(own_addresses())
        told: dict[str, Any] = {"host": platform.node(), "port": store.port, "addresses": addresses}
        told["on_all"] = not address
        told["key"] = secrets.token_hex()
        _write_for_this_user(path, json.dumps(told))
    else:
        while not path.exists():
            time.sleep(_LOOK_S)
        told = json.loads(path.read_text())
        is_here = told["host"] == platform.node()
        addresses = [LOOPBACK] if is_here and told["on_all"] else told["addresses"]
        address = first_answering(addresses, told["port"], told["host"])[0]
        store = dist.TCPStore(address, told["port"], timeout=_FOREVER)  # type: ignore[attr-defined]
    heart.wait_for(None)
    world = StoreGroup(store, bytes.fromhex(told["key"]), range(size), rank)
    world.Barrier()
    return world


def _write_for_this_user(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600, exist_ok=False)
    fresh.write_text(text)
    fresh.replace(path)
