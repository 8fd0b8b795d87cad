"""torch.distributed: gloo between CPUs, NCCL between GPUs; and the address by which a rank reaches rank 0.

Address and network are tried, not taken from the resolution of names: Debian writes a
host's own name into /etc/hosts as 127.0.1.1, compute nodes may not know one another's
names, and a process group that is told such an address waits for ever.
"""

from __future__ import annotations

import gc
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from scalebench.comm.control import ObjectGroup
from scalebench.comm.native import NativeCommunicator, Pending
from scalebench.comm.wire import concatenated, divide_
from scalebench.errors import EngineError
from scalebench.system.clock import WallClock

if TYPE_CHECKING:
    from scalebench.comm.engines.base import Place

# before torch 2.13
_REDUCE_SCATTER: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
STORE: Any = vars(dist)["TCPStore"]  # of which mypy does not know
# connections that wait to be taken, as of thousands of ranks; the system may allow
# fewer
_BACKLOG = 4096
_OWN_REFERENCES = 3  # the caller's, the parameter's and that of the count itself
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
LOOPBACK = "127.0.0.1"
_TRY_S = 3.0  # seconds for each address


class TorchCommunicator(NativeCommunicator):
    """The ranks of a process group, by default of the whole initialised world."""

    def __init__(
        self,
        clock: WallClock,
        group: dist.ProcessGroup | None = None,
        parent: NativeCommunicator | None = None,
    ) -> None:
        super().__init__(
            dist.get_rank(group), dist.get_world_size(group), clock, parent
        )
        self.group = group
        self.engine = dist.get_backend(group)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Process group for DistributedDataParallel."""
        return self.group

    def _allreduce(self, tensor: Tensor, op: str) -> None:
        dist.all_reduce(tensor, _OPS[op], self.group)

    def _pieces(self, tensor: Tensor) -> Sequence[Tensor]:
        """Split large tensors into halves; smaller pieces cost gloo more than they save."""
        many = tensor.nbytes > self.share_bytes * self.size and not tensor.is_cuda
        return tensor.view(-1).chunk(2) if many else (tensor,)

    def _mean_of_pieces(
        self, pieces: Sequence[Tensor], weight: float | None, divisor: float
    ) -> None:
        """Average pieces; each is weighted and divided while another is in transit."""
        pending = []
        for piece in pieces:
            if weight is not None:
                piece.mul_(weight)
            pending.append(dist.all_reduce(piece, group=self.group, async_op=True))
        for piece, work in zip(pieces, pending, strict=True):
            work.wait()
            divide_(piece, divisor)

    def _start_allreduce(self, tensor: Tensor, op: str) -> Pending:
        work = dist.all_reduce(tensor, _OPS[op], self.group, async_op=True)
        return Pending(work.wait, work.is_completed)

    def _reduce(self, tensor: Tensor, root: int, op: str) -> None:
        # A reduce leaves partial sums on intermediate ranks, which therefore use a
        # copy.
        target = tensor if self.rank == root else tensor.clone()
        dist.reduce(target, op=_OPS[op], group=self.group, group_dst=root)

    def _reduce_scatter(self, own: Tensor, tensor: Tensor, op: str) -> None:
        _REDUCE_SCATTER(own, tensor, _OPS[op], self.group)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        dist.broadcast(tensor, group=self.group, group_src=root)

    def _allgather(self, tensor: Tensor) -> list[Tensor]:
        every = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(every, tensor, self.group)
        return every

    def _start_allgather(self, tensor: Tensor, every: Tensor) -> Pending:
        work = dist.all_gather(list(every.unbind()), tensor, self.group, async_op=True)
        return Pending(work.wait, work.is_completed)

    def _alltoallv(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        outgoing, lengths = concatenated(tensors)
        rows = torch.tensor(lengths, device=outgoing.device)
        coming = torch.empty_like(rows)
        # Numbers of rows first, so that each rank makes room for what comes.
        self.called(1)
        dist.all_to_all_single(coming, rows, group=self.group)
        expected = coming.tolist()
        incoming = outgoing.new_empty((sum(expected), *outgoing.shape[1:]))
        dist.all_to_all_single(incoming, outgoing, expected, lengths, group=self.group)
        return list(torch.split(incoming, expected))

    def _barrier(self) -> None:
        dist.barrier(self.group)

    def _split(self, color: int, ranks: list[int]) -> NativeCommunicator:
        world = (
            [dist.get_global_rank(self.group, rank) for rank in ranks]
            if self.group
            else ranks
        )
        # by its members alone
        group = dist.new_group(world, use_local_synchronization=True)
        return TorchCommunicator(self.clock, group, self)

    def _send(self, tensor: Tensor, to: int, tag: int) -> None:
        dist.send(tensor, group=self.group, group_dst=to, tag=tag)

    def _start_send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        work = dist.isend(tensor, group=self.group, group_dst=to, tag=tag)
        assert work is not None, "only a rank outside the group gets none"
        return Pending(work.wait, work.is_completed)

    def _recv(self, tensor: Tensor, source: int, tag: int) -> None:
        dist.recv(tensor, group=self.group, group_src=source, tag=tag)


@contextmanager
def process_group(backend: str, place: Place) -> Iterator[TorchCommunicator]:
    """Join the ranks of `place` in a process group, by the address of rank 0's host that answers here.

    Raises:
        EngineError: none answers.
    """
    ranks, one_node = place.ranks, place.one_node
    store: Any = (
        listen(listening_address(one_node=one_node)) if ranks.rank == 0 else None
    )
    port = ranks.bcast(store.port if store is not None else None)
    place.waits_for(0 if ranks.rank else None)
    address, interface = (LOOPBACK, "lo") if one_node else _find_route(ranks, port)
    if store is None:
        store = STORE(address, port)
    place.waits_for(None)
    with _environment({"GLOO_SOCKET_IFNAME": interface} if interface else {}):
        dist.init_process_group(
            backend, store=store, rank=ranks.rank, world_size=ranks.size
        )
    try:
        yield TorchCommunicator(place.clock)
    except BaseException:
        # With others, destroying the group would wait for them, and they wait for this
        # rank.
        if ranks.size == 1:
            dist.destroy_process_group()
        raise
    ranks.Barrier()  # who leaves first would cut off the others' last messages
    group = dist.group.WORLD
    dist.destroy_process_group()
    _await_sole_owner(group)


@contextmanager
def silent_group(size: int, clock: WallClock) -> Iterator[TorchCommunicator]:
    """Join this process with `size` - 1 ranks that are not there; communication ends at once, with any values."""
    # torch's own tests plan on it; nothing public has ranks without processes.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store: Any = FakeStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=size)
    try:
        yield TorchCommunicator(clock)
    finally:
        dist.destroy_process_group()


def listen(
    address: str, port: int = 0, timeout: timedelta = dist.default_pg_timeout
) -> Any:
    """Return a store that listens at `address` (empty: at all of this host's), where torch's own listens at all.

    The operating system picks the port while rank 0 already listens on it: no other
    process can take it between.
    """
    listener = socket.create_server((address, port), backlog=_BACKLOG)
    port = listener.getsockname()[1]
    return STORE(
        address or LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def _await_sole_owner(group: Any) -> None:
    """Wait, a second at most, until only the caller refers to `group`.

    A communication hook's callbacks (PowerSGD under DDP) are let go by the group's own
    thread, some time after their result is there. If that were the last reference the
    thread would join itself, and the process abort.
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


def _find_route(ranks: ObjectGroup, port: int) -> tuple[str, str]:
    """The first of rank 0's addresses whose `port` answers this rank, and this host's interface that leads there.

    The interface is empty if the user named one; rank 0's is the one that rank 1
    reached.

    Raises:
        EngineError: none answered; says what was tried, and what to check.
    """
    host, addresses = ranks.bcast(
        (platform.node(), own_addresses()) if ranks.rank == 0 else None
    )
    own = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if ranks.rank == 0:
        reached = ranks.gather(None)
        address = next(
            each for each in (*(reached or ()), "127.0.0.1") if each is not None
        )
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
        named = [
            str(entry[4][0])
            for entry in socket.getaddrinfo(platform.node(), None, socket.AF_INET)
        ]
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    bound = [
        address.address
        for name, interface in psutil.net_if_addrs().items()
        for address in interface
        if name in up and address.family is socket.AF_INET
    ]
    return [
        address
        for address in dict.fromkeys([*named, *bound])
        if address in bound and not address.startswith("127.")
    ]


def listening_address(*, one_node: bool) -> str:
    """The address at which rank 0 listens: loopback where all ranks are on its node, else on the network that is named.

    A network is named by MASTER_ADDR or GLOO_SOCKET_IFNAME. Empty, for all addresses,
    if none is: hosts may have several networks, and only the other ranks know which of
    them they reach.
    """
    if one_node:
        return LOOPBACK
    own = own_addresses()
    with suppress(OSError):
        stated = socket.gethostbyname(os.environ.get("MASTER_ADDR", ""))
        if stated in own or stated.startswith("127."):
            return stated
    named = psutil.net_if_addrs().get(os.environ.get("GLOO_SOCKET_IFNAME", ""), [])
    return next(
        (
            each.address
            for each in named
            if each.family is socket.AF_INET and each.address in own
        ),
        "",
    )


def _interface(address: str) -> str:
    """The name of the interface that has `address`."""
    known = {
        (each.family, each.address): name
        for name, all_of in psutil.net_if_addrs().items()
        for each in all_of
    }
    return known.get((socket.AF_INET, address), "")
