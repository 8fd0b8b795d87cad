"""torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from scalebench.comm.addresses import LOOPBACK, find_route, listening_address
from scalebench.comm.native import NativeCommunicator, Pending
from scalebench.comm.wire import concatenated, divide_
from scalebench.system.clock import WallClock

if TYPE_CHECKING:
    from scalebench.comm.engines.base import Place

_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # before torch 2.13
STORE: Any = vars(dist)["TCPStore"]  # of which mypy does not know
_BACKLOG = 4096  # connections that wait to be taken, as of thousands of ranks; the system may allow fewer
_OWN_REFERENCES = 3  # the caller's, the parameter's and that of the count itself
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class TorchCommunicator(NativeCommunicator):
    """The ranks of a process group, by default of the whole initialised world."""

    def __init__(
        self, clock: WallClock, group: dist.ProcessGroup | None = None, parent: NativeCommunicator | None = None
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), clock, parent)
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

    def _mean_of_pieces(self, pieces: Sequence[Tensor], weight: float | None, divisor: float) -> None:
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
        # A reduce leaves partial sums on intermediate ranks, which therefore use a copy.
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
        self.called(1)
        dist.all_to_all_single(coming, rows, group=self.group)
        expected = coming.tolist()
        incoming = outgoing.new_empty((sum(expected), *outgoing.shape[1:]))
        dist.all_to_all_single(incoming, outgoing, expected, lengths, group=self.group)
        return list(torch.split(incoming, expected))

    def _barrier(self) -> None:
        dist.barrier(self.group)

    def _split(self, color: int, ranks: list[int]) -> NativeCommunicator:
        world = [dist.get_global_rank(self.group, rank) for rank in ranks] if self.group else ranks
        group = dist.new_group(world, use_local_synchronization=True)  # by its members alone
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
    store: Any = listen(listening_address(one_node=one_node)) if ranks.rank == 0 else None
    port = ranks.bcast(store.port if store is not None else None)
    place.waits_for(0 if ranks.rank else None)
    address, interface = (LOOPBACK, "lo") if one_node else find_route(ranks, port)
    if store is None:
        store = STORE(address, port)
    place.waits_for(None)
    with _environment({"GLOO_SOCKET_IFNAME": interface} if interface else {}):
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size)
    try:
        yield TorchCommunicator(place.clock)
    except BaseException:
        if ranks.size == 1:
            dist.destroy_process_group()
        raise
    ranks.Barrier()  # who leaves first would cut off the others' last messages
    group = dist.group.WORLD
    dist.destroy_process_group()
    _await_sole_owner(group)


def listen(address: str, port: int = 0, timeout: timedelta = dist.default_pg_timeout) -> Any:
    """Return a store that listens at `address` (empty: at all of this host's), where torch's own listens at all.

    The operating system picks the port while rank 0 already listens on it: no other process can take it between.
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
