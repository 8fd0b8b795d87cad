"""On which nodes the ranks of a launch lie, and what these are: each node describes itself, once."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from scalebench.records.provenance import describe_node, host_hash

if TYPE_CHECKING:  # the launching command reads `Nodes`; importing mpi4py.MPI would initialise MPI in it
    from mpi4py import MPI

FILE = "nodes.json"


class Nodes(BaseModel):
    """`hosts` is each rank's node, by its hash; `facts` what each node says of itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hosts: list[str]
    facts: dict[str, dict[str, Any]]

    def of(self, ranks: int) -> dict[str, dict[str, Any]]:
        """The nodes of the first `ranks` ranks."""
        return {host: self.facts[host] for host in sorted(set(self.hosts[:ranks]))}

    def cores_of(self, ranks: int) -> list[tuple[int, int]]:
        """Of each node of the first `ranks` ranks: how many of them it holds, and its usable cores."""
        held = Counter(self.hosts[:ranks])
        return [(count, int(self.facts[host]["cpu"]["usable_cores"])) for host, count in held.items()]

    @classmethod
    def of_launch(cls, folder: Path) -> Nodes | None:
        """What `keep_nodes` wrote; None where all ranks lie on the node that launched them."""
        path = folder / FILE
        return cls.model_validate_json(path.read_bytes()) if path.exists() else None


def keep_nodes(world: MPI.Comm, launcher: str, folder: Path) -> None:
    """Gather the nodes of all ranks into the launch's `folder`, unless all are the `launcher`, known by its hash."""
    own = host_hash()
    hosts: list[str] = world.allgather(own)
    if set(hosts) == {launcher}:
        return
    describes = hosts.index(own) == world.rank
    told = world.gather(describe_node(pid=os.getppid()) if describes else None)  # a rank itself is bound to a core
    if told is not None:
        nodes = Nodes(hosts=hosts, facts={facts["host_hash"]: facts for facts in told if facts})
        (folder / FILE).write_text(nodes.model_dump_json(), encoding="utf-8")
