"""Objects between the ranks of an initialised Horovod: a rank whose peer has died raises, where a store would wait."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd


class HorovodGroup:
    """Implements `control.ObjectGroup`."""

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
