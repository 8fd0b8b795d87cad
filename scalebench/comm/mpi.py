"""MPI through mpi4py, without copies of tensors.

MPI has no bfloat16 and not everywhere float16. These are sent as 16-bit words and added
in float32. Small tensors are gathered in one call. Larger ones take two, as in a ring:
each rank receives and adds its chunk of all others, and the rounded chunks are
gathered: 2 (p-1)/p n/B on the wire. Tensors on a GPU are staged through host memory, as
not every MPI can read device memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from scalebench.comm.native import NativeCommunicator, Pending
from scalebench.comm.wire import HALVES, concatenated
from scalebench.system.clock import WallClock

_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.float16: MPI.UINT16_T,
    torch.bfloat16: MPI.UINT16_T,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
    torch.int16: MPI.INT16_T,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.bool: MPI.BOOL,
}
_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
# total bytes in half precision up to which one allgather is faster than two exchanges
_GATHERED = 1 << 20
_REMEMBERED = 256  # cached descriptions of buffers


class MpiCommunicator(NativeCommunicator):
    """Ranks of an mpi4py communicator; without a `clock` no time is recorded."""

    engine = "mpi"

    def __init__(
        self,
        mpi: MPI.Comm,
        clock: WallClock | None = None,
        parent: NativeCommunicator | None = None,
    ) -> None:
        super().__init__(mpi.rank, mpi.size, clock or WallClock(), parent)
        self.mpi = mpi
        self._specs: dict[tuple[int, int, torch.dtype], list[Any]] = {}

    def _buffer(self, tensor: Tensor) -> list[Any]:
        """Return the memory of `tensor` as a buffer of mpi4py: [address, count, type].

        Cached by address, which keeps no tensor alive and never becomes invalid.
        """
        if not tensor.is_contiguous():
            raise ValueError(
                "communicators carry contiguous tensors; call .contiguous() first"
            )
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype)
        spec = self._specs.get(key)
        if spec is None:
            # Buffers of new tensors, as of shuffled rows, would fill the memory of a
            # long run.
            if len(self._specs) >= _REMEMBERED:
                self._specs.clear()
            memory = MPI.buffer.fromaddress(key[0], key[1] * tensor.element_size())
            spec = self._specs[key] = [memory, key[1], _TYPES[tensor.dtype]]
        return spec

    def _allreduce(self, tensor: Tensor, op: str) -> None:
        if tensor.is_cuda:
            staged = tensor.cpu()
            self._allreduce(staged, op)
            tensor.copy_(staged)
        elif tensor.dtype in HALVES:
            self._allreduce_halves(tensor, op)
        else:
            self.mpi.Allreduce(MPI.IN_PLACE, self._buffer(tensor), _OPS[op])

    def _allreduce_halves(self, tensor: Tensor, op: str) -> None:
        if self.size == 1:
            return
        if tensor.nbytes * self.size <= _GATHERED:
            every = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
            self.mpi.Allgather(
                self._buffer(tensor), self._split_buffer(every, tensor.numel())
            )
            tensor.copy_(_combine(every, op))
            return
        self.called(1)
        # Rounded up: the last chunks are filled up with zeros.
        chunk = -(-tensor.numel() // self.size)
        sent = torch.zeros(self.size * chunk, dtype=tensor.dtype)
        sent[: tensor.numel()] = tensor.view(-1)
        received = torch.empty_like(sent)
        self.mpi.Alltoall(
            self._split_buffer(sent, chunk), self._split_buffer(received, chunk)
        )
        # Added in float32 and rounded once, so that the error does not grow with the
        # ranks.
        mine = _combine(received.view(self.size, chunk), op).contiguous()
        self.mpi.Allgather(self._buffer(mine), self._split_buffer(sent, chunk))
        tensor.view(-1).copy_(sent[: tensor.numel()])

    def _split_buffer(self, tensor: Tensor, chunk: int) -> list[Any]:
        memory, _, kind = self._buffer(tensor)
        return [memory, chunk, kind]

    def _start_allreduce(self, tensor: Tensor, op: str) -> Pending:
        if tensor.is_cuda:
            host = tensor.cpu()
            return self._start_allreduce(host, op).then(lambda: tensor.copy_(host))
        if tensor.dtype in HALVES:
            every = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
            raw = self.mpi.Iallgather(
                self._buffer(tensor), self._split_buffer(every, tensor.numel())
            )
            return Pending(raw.Wait, raw.Test).then(
                lambda: tensor.copy_(_combine(every, op))
            )
        raw = self.mpi.Iallreduce(MPI.IN_PLACE, self._buffer(tensor), _OPS[op])
        return Pending(raw.Wait, raw.Test)

    def _reduce(self, tensor: Tensor, root: int, op: str) -> None:
        if tensor.is_cuda or tensor.dtype in HALVES:
            staged = tensor.to(
                "cpu", torch.float32 if tensor.dtype in HALVES else tensor.dtype
            )
            self._reduce(staged, root, op)
            if self.rank == root:
                tensor.copy_(staged)
        elif self.rank == root:
            self.mpi.Reduce(MPI.IN_PLACE, self._buffer(tensor), _OPS[op], root)
        else:
            self.mpi.Reduce(self._buffer(tensor), None, _OPS[op], root)

    def _reduce_scatter(self, own: Tensor, tensor: Tensor, op: str) -> None:
        if tensor.is_cuda or tensor.dtype in HALVES:
            super()._reduce_scatter(own, tensor, op)
        else:
            self.mpi.Reduce_scatter_block(
                self._split_buffer(tensor, own.numel()), self._buffer(own), _OPS[op]
            )

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        staged = tensor.cpu() if tensor.is_cuda else tensor
        self.mpi.Bcast(self._buffer(staged), root)
        if staged is not tensor:
            tensor.copy_(staged)

    def _allgather(self, tensor: Tensor) -> list[Tensor]:
        mine = tensor.cpu()
        every = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
        self.mpi.Allgather(
            self._buffer(mine), self._split_buffer(every, tensor.numel())
        )
        return list(every.to(tensor.device).unbind())

    def _start_allgather(self, tensor: Tensor, every: Tensor) -> Pending:
        if tensor.is_cuda:
            staged = tensor.cpu()
            gathered = torch.empty_like(every, device="cpu")
            return self._start_allgather(staged, gathered).then(
                lambda: (every.copy_(gathered), staged)
            )
        raw = self.mpi.Iallgather(
            self._buffer(tensor), self._split_buffer(every, tensor.numel())
        )
        return Pending(raw.Wait, raw.Test)

    def _alltoallv(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        first = tensors[0]
        outgoing, lengths = concatenated(tensors)
        outgoing = outgoing.cpu()
        rows = torch.tensor(lengths)
        coming = torch.empty_like(rows)
        self.called(1)
        self.mpi.Alltoall(self._split_buffer(rows, 1), self._split_buffer(coming, 1))
        incoming = torch.empty((int(coming.sum()), *first.shape[1:]), dtype=first.dtype)
        send_memory, _, kind = self._buffer(outgoing)
        receive_memory, _, _ = self._buffer(incoming)
        # MPI's counts have 32 bits before MPI 4
        row = kind.Create_contiguous(math.prod(first.shape[1:])).Commit()
        self.mpi.Alltoallv(
            [send_memory, lengths, row], [receive_memory, coming.tolist(), row]
        )
        row.Free()
        return list(torch.split(incoming.to(first.device), coming.tolist()))

    def _barrier(self) -> None:
        self.mpi.Barrier()

    def _split(self, color: int, ranks: list[int]) -> NativeCommunicator:
        return MpiCommunicator(self.mpi.Split(color, self.rank), self.clock, self)

    def _send(self, tensor: Tensor, to: int, tag: int) -> None:
        self.mpi.Send(self._buffer(tensor.cpu()), to, tag)

    def _start_send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        staged = tensor.cpu()
        raw = self.mpi.Isend(self._buffer(staged), to, tag)
        # which lives as long as the operation
        return Pending(raw.Wait, raw.Test).then(lambda: staged)

    def _recv(self, tensor: Tensor, source: int, tag: int) -> None:
        staged = torch.empty_like(tensor, device="cpu") if tensor.is_cuda else tensor
        self.mpi.Recv(self._buffer(staged), source, tag)
        if staged is not tensor:
            tensor.copy_(staged)


def _combine(parts: Tensor, op: str) -> Tensor:
    if op == "sum":
        return parts.sum(0, dtype=torch.float32).to(parts.dtype)
    return parts.amax(0) if op == "max" else parts.amin(0)
