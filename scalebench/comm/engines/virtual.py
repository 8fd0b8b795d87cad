"""The engine of virtual runs: workers of one process, whose communication is priced, by scalebench.virtual."""

from __future__ import annotations

from scalebench.comm.base import Capability
from scalebench.comm.engines.base import Engine
from scalebench.study.choices import VIRTUAL


class Virtual(Engine):
    """All that strategies ask for, except the libraries themselves."""

    name = VIRTUAL
    provides = frozenset(Capability) - {
        Capability.HOROVOD_OPTIMIZER,
        Capability.PROCESS_GROUP,
    }
    has_ranks = False

    def lacks(self, *, here: bool = True) -> str | None:
        """Return None: virtual runs need nothing else."""
        return None


ENGINE = Virtual()
