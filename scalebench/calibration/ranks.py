"""Programs of `probes/` on ranks of an MPI.

How ranks are started, `launch/` knows, which lies above this room: it hands over commands (`Placing`), and this room
says what runs on them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scalebench.cluster.engine_costs import MARK, EngineCosts
from scalebench.comm.launchers.choice import chosen
from scalebench.comm.mpi_match import apart, library
from scalebench.errors import EngineError
from scalebench.native.postmortem import telling_line
from scalebench.system.parent_watch import end_with_parent


@dataclass(frozen=True)
class Ranks:
    """Ranks that measure: `command` starts `count` of them, up to the program, bound as `binding` says."""

    count: int
    nodes: int
    binding: str
    command: Sequence[str]
    environment: Mapping[str, str]

    def printed(self, program: str, spec: Mapping[str, object], what: str, limit_s: float) -> str:
        """Run the module `program` of `probes/` with the argument `spec`; return what its first rank prints.

        Raises:
            EngineError: `what` could not be measured within `limit_s`; the message has the first line of the cause.
        """
        module = f"scalebench.calibration.probes.{program}"
        try:
            done = subprocess.run(
                [*self.command, sys.executable, "-m", module, json.dumps(spec)],
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit_s,
                preexec_fn=end_with_parent,
            )
        except subprocess.TimeoutExpired:
            raise EngineError(f"measuring {what} took more than {limit_s:.3g} s") from None
        lines = [line.partition(MARK)[2] for line in done.stdout.splitlines() if MARK in line]
        if len(lines) > 1:  # each rank took itself for the only one
            launcher = chosen()
            raise EngineError(apart(len(lines), 1, launcher.name, library(), without_mpi=launcher.without_mpi))
        if done.returncode != 0 or not lines:
            raise EngineError(f"measuring {what} failed: {telling_line(done.stderr)}; see scalebench doctor")
        return lines[-1]


@dataclass(frozen=True)
class Placing:
    """Where ranks that measure can be started: so many on this host; one on each slot of an allocation of several
    nodes, None where there is one node only. `tasks` measures the engine of that name, which has no ranks."""

    on_this_host: Callable[[int], Ranks]
    on_all_nodes: Callable[[], Ranks | None]
    tasks: Callable[[], EngineCosts]
