"""The files by which a launcher and its ranks communicate: job, further runs, events, errors, nodes.

An event is the beginning of a run, with its `run_id`, or its end, with its `outcome`
too. Further runs follow the job's own, block by block; an empty block ends them. Each
node of the ranks describes itself once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from scalebench.cluster.mesh import Mesh
from scalebench.comm import base, control
from scalebench.records.provenance import describe_node, host_hash
from scalebench.strategies import registry
from scalebench.study.spec import Run

NODES = "nodes.json"
HEARTBEATS = "heartbeats"  # name of the file of a launch
CHECKPOINTS = "checkpoints"  # name of a folder of an elastic launch
# status of a launch of which no run is to blame, and none can be made
REFUSED = "refused"


class Job(BaseModel):
    """The runs of one launch in order, and the paths of its files."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    runs: list[Run]
    datasets: dict[int, Path]  # prepared data by worker count
    folder: Path  # of this launch
    launcher: str
    weights: Path | None = None  # where `save_weights` puts <run_id>.npz
    stays_open: bool = False  # after these runs others may follow
    # environment variables the engine reads once, when it is initialised
    settings: dict[str, str] = {}
    ranks: int = 0  # processes that are started
    rendezvous: bool = False  # without MPI
    binding: str = "none"
    host: str = ""  # hash of the node that launches

    @property
    def events(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def further(self) -> Path:
        return self.folder / "further.jsonl"

    @property
    def heartbeats(self) -> Path:
        return self.folder / HEARTBEATS

    def save(self) -> Path:
        """Write the job file into the launch's folder."""
        path = self.folder / "job.json"
        path.write_text(self.model_dump_json(), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: Path) -> Job:
        """Read what `save` wrote."""
        return cls.model_validate_json(path.read_bytes())


def settings_of(run: Run) -> dict[str, str]:
    """Environment variables of `run`'s engine that differ from the engine's defaults.

    Horovod 0.28.1 dies of a null pointer when it is initialised again in a process in
    which both its cycle time and its fusion threshold were ever set: defaults are not
    passed on, and runs with other settings get their own launch.
    """
    asked = registry.create(
        run.strategy.name, run.strategy.options, run.engine
    ).traits.environment
    if not asked:
        return {}
    defaults = registry.create(run.strategy.name, {}, run.engine).traits.environment
    return {name: value for name, value in asked.items() if defaults.get(name) != value}


def server_ranks(run: Run) -> int:
    """Number of ranks for servers that `run` needs after those of its workers."""
    strategy = registry.create(run.strategy.name, run.strategy.options, run.engine)
    least = int(base.Capability.SERVER in strategy.requires)
    return max(least, strategy.traits.server_ranks(run.workers))


def mesh_of(run: Run) -> Mesh:
    """Return how the workers of `run` divide into replicas of the model, and these into parts."""
    return registry.create(
        run.strategy.name, run.strategy.options, run.engine
    ).traits.mesh(run.workers)


class JsonLines:
    """A file of JSON lines that one process appends to and another reads, each complete line once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def append(self, content: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")

    def new(self) -> Iterator[Any]:
        """Yield the content of each line since the last call."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                yield json.loads(line)


@dataclass(frozen=True)
class Death:
    """The failure that ended a launch; `run_id` and `rank` if a rank reported it."""

    status: str
    error: str
    run_id: str = ""
    rank: int = -1

    def save(self, folder: Path) -> None:
        """Write the file of this rank, or print the failure where none can be written."""
        try:
            (folder / f"rank-{self.rank}.error").write_text(
                json.dumps(asdict(self)), encoding="utf-8"
            )
        except OSError as error:
            print(
                f"rank {self.rank}: {self.error} (not written: {error})",
                file=sys.stderr,
                flush=True,
            )

    @classmethod
    def reported(cls, folder: Path) -> Death | None:
        """The failure of the rank that failed first; those of others are usually its consequence."""
        files = sorted(
            folder.glob("rank-*.error"),
            key=lambda path: (path.stat().st_mtime_ns, path.name),
        )
        for file in files:
            with suppress(ValueError):  # killed while writing
                return cls(**json.loads(file.read_bytes()))
        return None


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
        path = folder / NODES
        return cls.model_validate_json(path.read_bytes()) if path.exists() else None


def keep_nodes(world: control.Control, launcher: str, folder: Path) -> None:
    """Gather the nodes of all ranks into the launch's `folder`, unless all are the `launcher`, known by its hash."""
    own = host_hash()
    hosts: list[str] = world.allgather(own)
    if set(hosts) == {launcher}:
        return
    describes = hosts.index(own) == world.rank
    # a rank itself is bound to a core
    told = world.gather(describe_node(pid=os.getppid()) if describes else None)
    if told is not None:
        nodes = Nodes(
            hosts=hosts, facts={facts["host_hash"]: facts for facts in told if facts}
        )
        (folder / NODES).write_text(nodes.model_dump_json(), encoding="utf-8")
