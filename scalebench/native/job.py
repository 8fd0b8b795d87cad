"""The files by which a launcher and its ranks communicate: job, further runs, events, and errors of ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from scalebench.comm.base import Capability
from scalebench.strategies import registry
from scalebench.study.spec import Run
from scalebench.training.outcome import Outcome

REFUSED = "refused"  # status of last words: no run is to blame, and none can be made


class Job(BaseModel):
    """The runs of one launch in order, and the paths of its files."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    runs: list[Run]
    datasets: dict[int, Path]  # prepared data by worker count
    folder: Path  # of this launch
    weights: Path | None = None  # where `save_weights` puts <run_id>.npz
    stays_open: bool = False  # after these runs others may follow, see `Further`
    settings: dict[str, str] = {}  # environment variables the engine reads once, when it is initialised
    ranks: int = 0  # processes that are started
    launcher: str = "mpirun"
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
        return self.folder / "heartbeats"

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

    Horovod 0.28.1 dies of a null pointer when it is initialised again in a process in which both its cycle time and
    its fusion threshold were ever set: defaults are not passed on, and runs with other settings get their own launch.
    """
    strategy: Any = registry.create(run.strategy.name, run.strategy.options, run.engine)
    if not hasattr(strategy, "environment"):
        return {}
    defaults = type(strategy)().environment()
    return {name: value for name, value in strategy.environment().items() if defaults.get(name) != value}


def server_ranks(run: Run) -> int:
    """Number of ranks for servers that `run` needs after those of its workers."""
    strategy: Any = registry.create(run.strategy.name, run.strategy.options, run.engine)
    return int(strategy.servers(run.workers)) if Capability.SERVER in strategy.requires else 0


class EventWriter:
    """Writes the events of rank 0, one JSON line each, flushed at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def started(self, run_id: str) -> None:
        self._say({"event": "start", "run_id": run_id})

    def ended(self, outcome: Outcome) -> None:
        self._say({"event": "outcome", "run_id": outcome.run_id, "outcome": outcome.to_json()})

    def _say(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()


class Further:
    """The runs that follow a job's own, block by block; an empty block ends them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def add(self, runs: Sequence[Run]) -> None:
        """Append a block of runs."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([run.model_dump(mode="json") for run in runs]) + "\n")

    def wait(self, nap_s: float) -> list[Run]:
        """Sleep until the next block is there, and read it."""
        while True:
            with suppress(FileNotFoundError), self._path.open("rb") as file:
                file.seek(self._read)
                line = file.readline()
                if line.endswith(b"\n"):
                    self._read += len(line)
                    return [Run.model_validate(run) for run in json.loads(line)]
            time.sleep(nap_s)


class EventReader:
    """Reads events in the launcher: complete lines only, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[tuple[str, str, Outcome | None]]:
        """Yield (event, run_id, outcome) of each line since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                event = json.loads(line)
                outcome = Outcome.from_json(event["outcome"]) if "outcome" in event else None
                yield event["event"], event["run_id"], outcome


class LastWords(BaseModel):
    """The error by which a rank ended its launch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int
    run_id: str
    status: str
    error: str

    def save(self, folder: Path) -> None:
        (folder / f"rank-{self.rank}.error").write_text(self.model_dump_json(), encoding="utf-8")

    @classmethod
    def first(cls, folder: Path) -> LastWords | None:
        """The error of the rank that failed first; those of others are usually its consequence."""
        files = sorted(folder.glob("rank-*.error"), key=lambda path: (path.stat().st_mtime_ns, path.name))
        for file in files:
            try:
                return cls.model_validate_json(file.read_bytes())
            except ValueError:  # killed while writing
                continue
        return None
