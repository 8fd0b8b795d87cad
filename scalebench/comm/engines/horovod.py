"""Horovod: its collectives and its own optimizer, over an MPI."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from scalebench.comm.base import Capability
from scalebench.comm.engines.base import WITHOUT_GROUPS, Engine, Place, folder_of
from scalebench.comm.launchers.horovodrun import ADD_HOROVOD

if TYPE_CHECKING:
    from scalebench.comm.native import NativeCommunicator


class Horovod(Engine):
    """Horovod for torch, built for MPI; a thread of each rank negotiates what is ready everywhere, and moves it."""

    name = "horovod"
    provides = WITHOUT_GROUPS | {Capability.HOROVOD_OPTIMIZER}
    elastic_launcher = "horovodrun"
    progress_threads = 1
    needs_mpi = True
    cannot_carry = frozenset({"bfloat16"})
    is_measured = True
    moves_by = "mpi"
    added_by = ADD_HOROVOD
    timeline_variable = "HOROVOD_TIMELINE"

    def lacks(self, *, here: bool = True) -> str | None:
        """Return None if Horovod is built for torch, too."""
        if reason := super().lacks(here=here):
            return reason
        horovod = folder_of("horovod")
        if horovod is None or not any((horovod / "torch").glob("mpi_lib_v2*.so")):
            return f"Horovod is not built for torch; add it with: {self.added_by}"
        return None

    @contextmanager
    def connect(self, place: Place) -> Iterator[NativeCommunicator]:
        """Start Horovod over the MPI communicator `ranks`, unless it is up."""
        import horovod.torch as hvd

        from scalebench.comm.horovod_communicator import HorovodCommunicator

        if not hvd.is_initialized():
            hvd.init(comm=place.ranks)
        try:
            yield HorovodCommunicator(place.clock)
        except BaseException:
            if (
                place.ranks.size == 1
                # with others, shutting down would wait for them, and they wait for this
                # rank
            ):
                hvd.shutdown()
            raise
        if not place.for_good:
            hvd.shutdown()


ENGINE = Horovod()
