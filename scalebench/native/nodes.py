"""The nodes of the ranks of a launch; each node describes itself once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from scalebench.comm.control import Control
from scalebench.records.provenance import describe_node, host_hash

FILE = "nodes.json"


class Nodes(BaseModel):
    """`hosts` are the nodes of the ranks, by hash; `facts` the description of each node."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hosts: list[str]
    facts: dict[str, dict[str, Any]]

    def of(self, ranks: int) -> dict[str, dict[str, Any]]:
        """The nodes of the first `ranks` ranks."""
        return {host: self.facts[host] for host in sorted(set(self.hosts[:ranks]))}

    @classmethod
    def of_launch(cls, folder: Path) -> Nodes | None:
        """Read what `keep_nodes` wrote; None if all ranks are on the launching node."""
        path = folder / FILE
        return cls.model_validate_json(path.read_bytes()) if path.exists() else None


def keep_nodes(world: Control, launcher: str, folder: Path) -> None:
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
