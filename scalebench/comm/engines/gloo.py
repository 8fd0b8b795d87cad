"""gloo of torch.distributed, between CPUs, without any MPI."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from scalebench.comm.base import Capability
from scalebench.comm.engines.base import WITH_GROUPS, Engine, Place

if TYPE_CHECKING:
    from scalebench.comm.native import NativeCommunicator


class Gloo(Engine):
    """A process group of gloo, whose threads move bytes; also that of the real DistributedDataParallel."""

    name = "gloo"
    provides = WITH_GROUPS | {Capability.PROCESS_GROUP}
    elastic_launcher = "torchrun"
    progress_threads = 1
    is_measured = True

    def connect(self, place: Place) -> AbstractContextManager[NativeCommunicator]:
        """Make the process group, by the network on which rank 0 answers."""
        # Here, as it imports torch.
        from scalebench.comm.torch_dist import process_group

        return process_group(self.name, place)


ENGINE = Gloo()
