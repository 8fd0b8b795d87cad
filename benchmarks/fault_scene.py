"""A study under way in which a fault is injected: its place, its command, its processes and its rows."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the hosts of the tests

from scalebench.native.heartbeat import Beat, Phase, read_heartbeats
from tests.hosts.machines import Hosts
from tests.hosts.slurm import Slurm

SCALEBENCH = Path(sys.executable).with_name("scalebench")
CLOCK = Path(__file__).parents[1] / "tests" / "faults" / "programs" / "clock_back.c"
LIMIT_S = 60.0
_OURS = re.compile(r"\b(prted|prterun|mpirun|srun|scalebench run|scalebench\.native)\b")

# The model trains slowly while the file `hold` is there, and goes wrong on the rank
# that a file of this name holds.
MODEL = """
import os, threading, time
from pathlib import Path
import torch

HERE = Path(__file__).parent
RANK = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("SLURM_PROCID")

def asked(what):
    file = HERE / what
    return file.exists() and file.read_text() == RANK

class Model(torch.nn.Linear):
    def forward(self, x):
        x[0, 0].item()  # virtual workers repeat what they have recorded, and this keeps them from it
        if self.training and (HERE / "hold").exists():
            (HERE / "busy").touch()
            time.sleep(0.05)
            if asked("raise"):
                raise ValueError("the layer is upset")
            if asked("exit"):
                os._exit(0)
            if asked("sleep"):
                time.sleep(3600)
            if asked("nan"):
                return super().forward(x) * float("nan")
            if asked("allocate"):
                torch.zeros(1 << 31)
            if asked("open"):
                kept = [open(os.devnull) for _ in range(100000)]
            if asked("leave"):
                raise SystemExit("the layer leaves")
            if asked("thread"):
                threading.Thread(target=time.sleep, args=(3600,)).start()
                (HERE / "thread").unlink()
        return super().forward(x)

def build(input_shape, outputs):
    return Model(input_shape[0], outputs)
"""
STUDY = """\
name: faults
dataset: wine
model: {model}
epochs: {epochs}
evaluate_every: 0
repetitions: {repetitions}
workers: [{workers}]
batch_per_worker: 16
strategies: [{strategy}]
warmup_steps: 1
patience: {patience}
"""
NATIVE = "execution: native\nengine: {engine}\n"
VIRTUAL = "execution: virtual\ncluster: juwels-booster\ndevice_step_time: 0.001\n"


@dataclass(frozen=True)
class Fault:
    """What `inject` does to a run under way, and what its row, or the last line of the command, has to say.

    `completes`: the run itself is not to be harmed, and the text is looked for in the
    output of the command. `ends`: the command ends, too. `before`: the fault is there
    before the command. `afterwards`: and after another command has made the study. It
    is taken back by the function that `inject` returns, if any.
    """

    name: str
    inject: Callable[[Scene], Callable[[], object] | None]
    expected: str
    completes: bool = False
    ends: bool = False
    before: bool = False
    afterwards: bool = False


@dataclass(frozen=True)
class Group:
    """Faults of one study, in their order; those that end the command come last."""

    place: str
    strategy: str
    engine: str
    faults: tuple[Fault, ...]
    workers: int = 2
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        parts = (self.place, self.strategy, self.engine, self.faults[0].name)
        return re.sub(r"\W+", "-", "-".join(parts)).strip("-")

    @property
    def repetitions(self) -> int:
        """As many as end by a fault, and some that no fault hits; a signal to virtual workers hits several."""
        if self.engine == "virtual":
            return 9 + 5 * sum(
                not (fault.before or fault.afterwards) for fault in self.faults
            )
        return 1 + sum(not fault.ends for fault in self.faults)


@dataclass
class Result:
    place: str
    strategy: str
    engine: str
    fault: str
    ended_s: float | None
    said: str
    named: bool
    orphans: list[str] = field(default_factory=list)
    # all runs are completed, and those that were before are there
    resumed: bool | None = None

    @property
    def good(self) -> bool:
        return (
            self.named
            and not self.orphans
            and bool(self.resumed)
            and (self.ended_s or 1e9) <= LIMIT_S
        )


class Place:
    """This host."""

    hosts: Hosts | None = None
    launcher = "mpirun"

    def start(
        self,
        folder: Path,
        words: Sequence[str],
        prefix: Sequence[str] = (),
        **variables: str,
    ) -> subprocess.Popen[str]:
        log = (folder / "printed.txt").open("a")
        return subprocess.Popen(
            [*prefix, str(SCALEBENCH), *words],
            cwd=folder,
            env={**self.environment(folder), **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            text=True,
        )

    def environment(self, folder: Path) -> Mapping[str, str]:
        library = folder.parent / "clock_back.so"
        if not library.exists():
            subprocess.run(
                ["gcc", "-shared", "-fPIC", "-o", library, CLOCK, "-ldl"],
                check=True,
                timeout=60,
            )
        return {
            **os.environ,
            "LD_PRELOAD": str(library),
            "CLOCK_BACK": str(folder / "later"),
        }

    def call(self, host: str, command: Sequence[str]) -> str:
        """Run `command` on `host`; return its output, whatever its status."""
        if self.hosts is None:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=30, check=False
            ).stdout
        node = next(
            node for node in (*self.hosts.nodes, self.hosts.login) if node.name == host
        )
        with suppress(AssertionError):
            return node.call(command)
        return ""

    def processes(self, folder: Path) -> list[str]:
        """The processes that name `folder`; on hosts of their own, all of a launch: daemons name no folder."""
        names = (
            [node.name for node in self.hosts.nodes] if self.hosts is not None else [""]
        )
        found = []
        for name in names:
            for line in self.call(
                name, ["ps", "-ww", "-eo", "pid=,args="]
            ).splitlines():
                ours = str(folder) in line or (
                    self.hosts is not None and _OURS.search(line)
                )
                if ours and "ps -ww" not in line:
                    found.append(f"{name} {line.strip()}"[:200])
        return found


class ByName(Place):
    """Three hosts of a hostfile; the command runs on the first."""

    def __init__(self, hosts: Hosts, environment: Mapping[str, str]) -> None:
        self.hosts, self._environment = hosts, environment

    def start(
        self,
        folder: Path,
        words: Sequence[str],
        prefix: Sequence[str] = (),
        **variables: str,
    ) -> subprocess.Popen[str]:
        assert self.hosts is not None
        words = [*prefix, str(SCALEBENCH), *words]
        log = (folder / "printed.txt").open("a")
        pipes = {
            "stdin": subprocess.DEVNULL,
            "stdout": log,
            "stderr": log,
            "env": {**self._environment, **variables},
        }
        return self.hosts.nodes[0].start(words, cwd=folder, **pipes)


class InJob(Place):
    """Three nodes of a Slurm cluster; each command is a job of its own."""

    launcher = "srun"

    def __init__(self, hosts: Hosts, cluster: Slurm) -> None:
        self.hosts, self.cluster = hosts, cluster
        self.job = 0

    def start(
        self,
        folder: Path,
        words: Sequence[str],
        prefix: Sequence[str] = (),
        **variables: str,
    ) -> subprocess.Popen[str]:
        command = " ".join([*prefix, str(SCALEBENCH), *words, "--launcher", "srun"])
        script = f"#!/bin/bash\n{command} >>printed.txt 2>&1\necho ended with $? >>printed.txt\n"
        self.job = self.cluster.sbatch(
            script, folder, "--nodes=3", "--ntasks-per-node=1", **variables
        )
        return _Job(self.cluster, self.job)  # type: ignore[return-value]


class _Job:
    """A job with the methods of a process that are used here."""

    def __init__(self, cluster: Slurm, job: int) -> None:
        self._cluster, self._job = cluster, job

    def poll(self) -> int | None:
        state = self._cluster.state(self._job)
        return (
            None
            if state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
            else int(state != "COMPLETED")
        )

    def send_signal(self, signum: int) -> None:
        self._cluster.hosts.login.call(
            ["scancel", str(self._job)], env=self._cluster.environment
        )

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass
class Scene:
    """A study under way: its folder, its place and the command."""

    group: Group
    place: Place
    folder: Path
    patience: float
    process: subprocess.Popen[str] | None = None
    hit: Path | None = None  # the folder of the launch that the last fault hit
    prefix: Sequence[str] = ()  # before the command
    options: Sequence[str] = ()  # after it
    variables: Mapping[str, str] = field(default_factory=dict)
    said: int = 0  # length of what was printed before the command

    @property
    def study(self) -> Path:
        return self.folder / "results" / "faults"

    def start(self) -> None:
        self.said = (self.folder / "printed.txt").stat().st_size
        words = [
            "run",
            "study.yaml",
            "--output",
            str(self.folder / "results"),
            *self.group.options,
            *self.options,
        ]
        self.process = self.place.start(
            self.folder, words, self.prefix, **self.variables
        )

    def write_study(self) -> None:
        """Write model and study."""
        group = self.group
        (self.folder / "model.py").write_text(MODEL)
        (self.folder / "printed.txt").touch()
        virtual = group.engine == "virtual"
        keys = {
            "strategy": group.strategy,
            "workers": group.workers,
            "patience": self.patience,
        }
        keys["epochs"] = 20 if virtual else 150
        text = STUDY + (VIRTUAL if virtual else NATIVE.format(engine=group.engine))
        text = text.format(
            model=f"{self.folder}/model.py:build", repetitions=group.repetitions, **keys
        )
        (self.folder / "study.yaml").write_text(text)

    def launch(self) -> Path | None:
        """The folder of the newest launch."""
        folders = sorted(
            self.study.glob("logs/*/launch-*"),
            key=lambda path: (path.parent, int(path.name[7:])),
        )
        return folders[-1] if folders else None

    def beats(self) -> list[Beat]:
        if (launch := self.launch()) is not None:
            with suppress(OSError):
                return read_heartbeats(launch / "heartbeats")
        return []

    def training(self, done: int) -> bool:
        """Whether all workers train in a launch that no fault has hit, in the run after `done` others.

        Of virtual workers: in any run after the first of the command.
        """
        if self.group.engine == "virtual":
            if len(self.rows()) > done:
                (self.folder / "hold").touch()
            return (self.folder / "busy").exists()
        if self.launch() == self.hit:
            return False
        beats = self.beats()[: self.group.workers]
        return (
            len(self.rows()) == done
            and bool(beats)
            and all(beat.phase == Phase.TRAINING and beat.batches > 5 for beat in beats)
        )

    def rows(self) -> list[dict[str, str]]:
        path = self.study / "runs.csv"
        if not path.exists():
            return []
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    def printed(self) -> str:
        """What the last command printed, in one line."""
        return " ".join(
            (self.folder / "printed.txt")
            .read_bytes()[self.said :]
            .decode(errors="replace")
            .split()
        )

    def completed(self) -> set[tuple[str, str]]:
        """The completed attempts."""
        return {
            (row["run_id"], row["attempt"])
            for row in self.rows()
            if row["status"] == "completed"
        }

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    # -- what faults do --

    def signal_rank(self, rank: int, signum: int) -> None:
        beat = self.beats()[rank]
        self.place.call(beat.host, ["kill", f"-{int(signum)}", str(beat.pid)])

    def signal_parent(self, rank: int, signum: int) -> None:
        """Signal mpirun, its daemon, or Slurm's, of a rank."""
        beat = self.beats()[rank]
        script = f"kill -{int(signum)} $(ps -o ppid= -p {beat.pid})"
        self.place.call(beat.host, ["sh", "-c", script])

    def ask_model(self, what: str, rank: int = 1) -> Callable[[], object]:
        file = self.folder / what
        file.write_text(str(rank))
        return lambda: file.unlink(missing_ok=True)

    def signal_command(self, signum: int) -> None:
        assert self.process is not None
        if self.place.hosts is None:
            self.process.send_signal(signum)
        else:  # `nsenter` is its parent
            script = f"kill -{int(signum)} $(pgrep -f '[s]calebench run study.yaml')"
            self.place.call("n0", ["sh", "-c", script])

    def link(self, host: str, state: str) -> Callable[[], object]:
        """Set the link of `host` down; the function returned sets it up again."""
        assert self.place.hosts is not None
        pid, up = self.place.hosts.login.pid, ["ip", "link", "set", f"to-{host}", "up"]
        enter = ["nsenter", "--net", f"--target={pid}"]
        subprocess.run(
            [*enter, "ip", "link", "set", f"to-{host}", state], check=True, timeout=30
        )
        return lambda: subprocess.run([*enter, *up], check=True, timeout=30)


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until `condition` holds, for at most `seconds`; return whether it does."""
    return seconds_until(condition, seconds) is not None


def seconds_until(condition: Callable[[], bool], most: float) -> float | None:
    """Wait until `condition` holds; return the seconds that took, None past `most`.

    Of a longer pause between two looks, in which this process or the machine was
    stopped, one second counts.
    """
    waited, looked = 0.0, time.monotonic()
    while not condition():
        if waited > most:
            return None
        time.sleep(0.05)
        before, looked = looked, time.monotonic()
        waited += min(looked - before, 1.0)
    return waited
