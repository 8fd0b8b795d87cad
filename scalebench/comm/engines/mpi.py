"""MPI: all that strategies ask for, without a thread of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from scalebench.comm.base import Capability
from scalebench.comm.engines.base import WITH_GROUPS, Engine, Place

if TYPE_CHECKING:
    from mpi4py import MPI

    from scalebench.comm.native import NativeCommunicator


class Mpi(Engine):
    """The MPI of mpi4py."""

    name = "mpi"
    provides = WITH_GROUPS | {
        Capability.ADASUM,
        Capability.SHARED_STATE,
        Capability.SERVER,
    }
    needs_mpi = True
    is_measured = True
    computes_apart = True

    @contextmanager
    def connect(self, place: Place) -> Iterator[NativeCommunicator]:
        """Use the MPI communicator `ranks`."""
        from scalebench.comm.mpi import MpiCommunicator

        # Ranks were started by an MPI (`needs_mpi`), so that their group is its
        # communicator.
        yield MpiCommunicator(cast("MPI.Comm", place.ranks), place.clock)


ENGINE = Mpi()
