"""The ranks of an initialised Horovod, as they exchange tensors and objects.

Collectives have equal names in all steps, so that Horovod's response cache answers the
negotiation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from scalebench.comm.native import NativeCommunicator, Pending, add_in_order_
from scalebench.comm.wire import concatenated
from scalebench.errors import EngineError
from scalebench.system.clock import WallClock

_OPS = {"sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min}


class HorovodCommunicator(NativeCommunicator):
    """All ranks of an initialised Horovod, without sub-communicators and point-to-point messages."""

    engine = "horovod"
    linear_calls = 1

    def __init__(self, clock: WallClock) -> None:
        super().__init__(hvd.rank(), hvd.size(), clock)
        # names in use; freed in the order of the waits, equal on all ranks
        self._slots: set[int] = set()

    def _allreduce(self, tensor: Tensor, op: str) -> None:
        self._refuse_bfloat16(tensor)
        hvd.synchronize(
            hvd.allreduce_async_(tensor, name=_name(op, tensor), op=_OPS[op])
        )

    def _start_allreduce(self, tensor: Tensor, op: str) -> Pending:
        self._refuse_bfloat16(tensor)
        slot = self._free_slot()
        handle = hvd.allreduce_async_(
            tensor, name=f"{_name(op, tensor)}.{slot}", op=_OPS[op]
        )
        pending = Pending(lambda: hvd.synchronize(handle), lambda: hvd.poll(handle))
        return pending.then(lambda: self._slots.discard(slot))

    def _free_slot(self) -> int:
        # The lowest free one: names repeat, so that the response cache knows them.
        slot = next(
            slot for slot in range(len(self._slots) + 1) if slot not in self._slots
        )
        self._slots.add(slot)
        return slot

    def _refuse_bfloat16(self, tensor: Tensor) -> None:
        if tensor.dtype is torch.bfloat16:
            raise EngineError(
                "engine horovod cannot carry bfloat16; use float16 or float32, or --engine mpi or gloo"
            )

    def _reduce(self, tensor: Tensor, root: int, op: str) -> None:
        # Horovod has no reduce: all ranks compute the sum, only the root stores it.
        target = tensor if self.rank == root else tensor.clone()
        self._allreduce(target, op)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        hvd.broadcast_(tensor, root, name=_name(f"broadcast{root}", tensor))

    def _allgather(self, tensor: Tensor) -> list[Tensor]:
        return list(
            hvd.allgather(tensor.unsqueeze(0), name=_name("allgather", tensor)).unbind()
        )

    def _start_allgather(self, tensor: Tensor, every: Tensor) -> Pending:
        slot = self._free_slot()
        handle = hvd.allgather_async(
            tensor.unsqueeze(0), name=f"{_name('allgather', tensor)}.{slot}"
        )
        pending = Pending(
            lambda: every.copy_(hvd.synchronize(handle)), lambda: hvd.poll(handle)
        )
        return pending.then(lambda: self._slots.discard(slot))

    def _alltoallv(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        outgoing, lengths = concatenated(tensors)
        name = f"alltoall.{outgoing.dtype}.{tuple(outgoing.shape[1:])}"
        incoming, coming = hvd.alltoall(
            outgoing, torch.tensor(lengths, dtype=torch.int32), name=name
        )
        return list(incoming.split(coming.tolist()))

    def _barrier(self) -> None:
        hvd.barrier()

    # Horovod has no messages: an alltoall in which only the root receives, or sends.

    def _reduce_linear(self, tensor: Tensor, root: int) -> None:
        rows = tensor.reshape(1, -1)
        # Only the root receives; the others send it everything.
        gathered = self._alltoallv(
            [rows if rank == root else rows[:0] for rank in range(self.size)]
        )
        if self.rank == root:
            for rank, part in enumerate(gathered):
                add_in_order_(tensor, part.view_as(tensor), rank)

    def _broadcast_linear(self, tensor: Tensor, root: int) -> None:
        rows = tensor.reshape(1, -1)
        sends = self.rank == root
        received = self._alltoallv(
            [rows if sends and rank != root else rows[:0] for rank in range(self.size)]
        )
        if not sends:
            tensor.copy_(received[root].view_as(tensor))


def _name(what: str, tensor: Tensor) -> str:
    return f"{what}.{tensor.dtype}.{tuple(tensor.shape)}"


class HorovodGroup:
    """Objects between the ranks: one whose peer has died raises, where a store would wait.

    Implements `control.ObjectGroup`.
    """

    def __init__(self) -> None:
        self.rank, self.size = hvd.rank(), hvd.size()

    def bcast(self, obj: Any) -> Any:
        """Send `obj` of rank 0 to all ranks."""
        return hvd.broadcast_object(obj, root_rank=0)

    def gather(self, sendobj: Any) -> list[Any] | None:
        """Collect the objects of all ranks on rank 0; None on others."""
        every = self.allgather(sendobj)
        return every if self.rank == 0 else None

    def allgather(self, sendobj: Any) -> list[Any]:
        every: list[Any] = hvd.allgather_object(sendobj)
        return every

    def Barrier(self) -> None:  # noqa: N802
        hvd.barrier()
