"""Faults of processes, hosts, links, disks, memory and clocks, injected into studies of real processes.

    python benchmarks/faults.py OUTPUT [--only NAME ...] [--rounds 1] [--patience 20]

Places: this host; three hosts of a hostfile; three nodes of a Slurm cluster (tests/hosts/machines.py; as root, and
Slurm's where its programs are). Each fault hits one run of a study while its ranks train. Then

- the run, or the command, has to end within 60 s, by a row or a last line that names what `expected` says: rank, host
  and cause;
- no process of the study may be left on any host 20 s after the command;
- the same command, without the fault, has to complete all runs of the study.

A study takes several faults, one after another, each in a launch of its own; those that end the command come last.
Silence is waited for with `--patience`. Faults are appended to OUTPUT/faults.jsonl, and what is there is not repeated;
the table of all is printed in Markdown. Without Horovod its faults are left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the hosts of the tests

from scalebench.comm import engines
from scalebench.native.heartbeat import Beat, Phase, read_heartbeats
from tests.hosts import slurm
from tests.hosts.conftest import reached_by_name
from tests.hosts.machines import Hosts, why_not
from tests.hosts.slurm import Slurm

SCALEBENCH = Path(sys.executable).with_name("scalebench")
CLOCK = Path(__file__).parents[1] / "tests" / "faults" / "programs" / "clock_back.c"
LIMIT_S, ORPHANS_S, BEGIN_S, END_S = 60.0, 20.0, 150.0, 240.0
SILENCE = r"no worker showed a sign of life for \d+ s \(--patience\): .*"
_OURS = re.compile(r"\b(prted|prterun|mpirun|srun|scalebench run|scalebench\.native)\b")
KILLED = r"ended by signal 9 \(Killed"

# The model trains slowly while the file `hold` is there, and goes wrong on the rank that a file of this name holds.
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
        if self.training and (HERE / "hold").exists():
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
epochs: 150
evaluate_every: 0
repetitions: {repetitions}
workers: [{workers}]
batch_per_worker: 16
strategies: [{strategy}]
execution: native
engine: {engine}
warmup_steps: 1
patience: {patience}
"""


@dataclass(frozen=True)
class Fault:
    """What `inject` does to a run under way, and what its row, or the last line of the command, has to say.

    `completes`: the run itself is not to be harmed, and the text is looked for in the output of the command. `ends`:
    the command ends, too. `before`: the fault is there before the command. It is taken back by the function that
    `inject` returns, if any.
    """

    name: str
    inject: Callable[[Scene], Callable[[], object] | None]
    expected: str
    completes: bool = False
    ends: bool = False
    before: bool = False


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
        return f"{self.place}-{self.strategy}-{self.engine}"


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
    resumed: bool | None = None

    @property
    def good(self) -> bool:
        return self.named and not self.orphans and bool(self.resumed) and (self.ended_s or 1e9) <= LIMIT_S


class Place:
    """This host."""

    hosts: Hosts | None = None
    launcher = "mpirun"

    def start(self, folder: Path, words: Sequence[str]) -> subprocess.Popen[str]:
        log = (folder / "printed.txt").open("a")
        return subprocess.Popen(
            [str(SCALEBENCH), *words],
            cwd=folder,
            env=self.environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            text=True,
        )

    def environment(self, folder: Path) -> Mapping[str, str]:
        library = folder.parent / "clock_back.so"
        if not library.exists():
            subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, CLOCK, "-ldl"], check=True, timeout=60)
        return {**os.environ, "LD_PRELOAD": str(library), "CLOCK_BACK": str(folder / "later")}

    def call(self, host: str, command: Sequence[str]) -> str:
        """Run `command` on `host`; return its output, whatever its status."""
        if self.hosts is None:
            return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
        node = next(node for node in (*self.hosts.nodes, self.hosts.login) if node.name == host)
        with suppress(AssertionError):
            return node.call(command)
        return ""

    def processes(self, folder: Path) -> list[str]:
        """The processes that name `folder`; on hosts of their own, all of a launch: daemons name no folder."""
        names = [node.name for node in self.hosts.nodes] if self.hosts is not None else [""]
        found = []
        for name in names:
            for line in self.call(name, ["ps", "-ww", "-eo", "pid=,args="]).splitlines():
                ours = str(folder) in line or (self.hosts is not None and _OURS.search(line))
                if ours and "ps -ww" not in line:
                    found.append(f"{name} {line.strip()}"[:200])
        return found


class ByName(Place):
    """Three hosts of a hostfile; the command runs on the first."""

    def __init__(self, hosts: Hosts, environment: Mapping[str, str]) -> None:
        self.hosts, self._environment = hosts, environment

    def start(self, folder: Path, words: Sequence[str]) -> subprocess.Popen[str]:
        assert self.hosts is not None
        log = (folder / "printed.txt").open("a")
        pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "env": dict(self._environment)}
        return self.hosts.nodes[0].start([SCALEBENCH, *words], cwd=folder, **pipes)


class InJob(Place):
    """Three nodes of a Slurm cluster; each command is a job of its own."""

    launcher = "srun"

    def __init__(self, hosts: Hosts, cluster: Slurm) -> None:
        self.hosts, self.cluster = hosts, cluster
        self.job = 0
        self.variables: dict[str, str] = {}  # of the next command

    def start(self, folder: Path, words: Sequence[str]) -> subprocess.Popen[str]:
        command = " ".join([str(SCALEBENCH), *words, "--launcher", "srun"])
        script = f"#!/bin/bash\n{command} >>printed.txt 2>&1\necho ended with $? >>printed.txt\n"
        self.job = self.cluster.sbatch(script, folder, "--nodes=3", "--ntasks-per-node=1", **self.variables)
        return _Job(self.cluster, self.job)  # type: ignore[return-value]


class _Job:
    """A job with the methods of a process that are used here."""

    def __init__(self, cluster: Slurm, job: int) -> None:
        self._cluster, self._job = cluster, job

    def poll(self) -> int | None:
        state = self._cluster.state(self._job)
        return None if state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING") else int(state != "COMPLETED")

    def send_signal(self, signum: int) -> None:
        self._cluster.hosts.login.call(["scancel", str(self._job)], env=self._cluster.environment)

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

    @property
    def study(self) -> Path:
        return self.folder / "results" / "faults"

    def start(self) -> None:
        words = ["run", "study.yaml", "--output", str(self.folder / "results"), *self.group.options]
        self.process = self.place.start(self.folder, words)

    def launch(self) -> Path | None:
        """The folder of the newest launch."""
        folders = sorted(self.study.glob("logs/*/launch-*"), key=lambda path: (path.parent, int(path.name[7:])))
        return folders[-1] if folders else None

    def beats(self) -> list[Beat]:
        if (launch := self.launch()) is not None:
            with suppress(OSError):
                return read_heartbeats(launch / "heartbeats")
        return []

    def training(self, done: int) -> bool:
        """Whether all workers train in a launch that no fault has hit, in the run after `done` others."""
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
        return " ".join((self.folder / "printed.txt").read_text().split())

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
        subprocess.run([*enter, "ip", "link", "set", f"to-{host}", state], check=True, timeout=30)
        return lambda: subprocess.run([*enter, *up], check=True, timeout=30)


def let_go_on(scene: Scene) -> None:
    """Let the run train at its own speed."""
    (scene.folder / "hold").unlink(missing_ok=True)


def _stop_launcher(scene: Scene) -> None:
    scene.signal_parent(0, signal.SIGSTOP)
    let_go_on(scene)


def _stop_daemon(scene: Scene) -> None:
    scene.signal_parent(2, signal.SIGSTOP)
    let_go_on(scene)


def _thread(scene: Scene) -> None:
    scene.ask_model("thread")
    until(lambda: not (scene.folder / "thread").exists(), 30)
    let_go_on(scene)


def _clock(scene: Scene) -> Callable[[], object]:
    later = scene.folder / "later"
    later.touch()
    let_go_on(scene)
    return lambda: later.unlink(missing_ok=True)


def _memory(scene: Scene) -> Callable[[], object]:
    pid = scene.beats()[1].pid
    resource.prlimit(pid, resource.RLIMIT_AS, (8 << 30, 8 << 30))
    return scene.ask_model("allocate")


def _vanish(scene: Scene) -> Callable[[], object]:
    """Take the link of n2 down, then stop all its processes of the study: the others hear nothing of their end."""
    up = scene.link("n2", "down")
    scene.place.call("n2", ["sh", "-c", "pkill -STOP -x prted; pkill -STOP -f [s]calebench.native"])

    def take_back() -> None:
        scene.place.call("n2", ["sh", "-c", "pkill -KILL -f [s]calebench.native; pkill -KILL -x prted"])
        up()

    return take_back


def _cut(scene: Scene) -> Callable[[], object]:
    """Let n1 and n2 not reach each other."""
    scene.place.call("n2", ["ip", "route", "add", "blackhole", "10.78.0.2/32"])
    return lambda: scene.place.call("n2", ["ip", "route", "del", "blackhole", "10.78.0.2/32"])


def _take_port(scene: Scene) -> Callable[[], object]:
    """Listen on n0 on the port that the ranks are told to meet at."""
    assert isinstance(scene.place, InJob)
    program = "import socket, time; s = socket.create_server(('', 29555)); time.sleep(3600)"
    listener = scene.place.cluster.hosts.nodes[0].start([sys.executable, "-c", program])
    scene.place.variables = {"MASTER_PORT": "29555"}

    def take_back() -> None:
        scene.place.call("n0", ["pkill", "-f", "create_server"])
        listener.wait(30)
        assert isinstance(scene.place, InJob)
        scene.place.variables = {}

    return take_back


def _scancel(*options: str) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        assert isinstance(scene.place, InJob)
        cluster = scene.place.cluster
        cluster.hosts.login.call(["scancel", *options, str(scene.place.job)], env=cluster.environment)

    return inject


def kill(rank: int, expected: str) -> Fault:
    return Fault(f"rank {rank} killed", lambda scene: scene.signal_rank(rank, signal.SIGKILL), expected)


def stop(rank: int, expected: str) -> Fault:
    return Fault(f"rank {rank} stopped (SIGSTOP)", lambda scene: scene.signal_rank(rank, signal.SIGSTOP), expected)


def ask(what: str, text: str, expected: str) -> Fault:
    return Fault(text, lambda scene: scene.ask_model(what), expected)


INTERRUPTED = r"remain \(the same command goes on|signal|stopping"
HERE = (
    kill(1, rf"^rank 1 was {KILLED}"),
    stop(1, SILENCE + r"rank 1 had stopped while training, and the others waited in"),
    ask("raise", "exception in a model", r"^rank 1: ValueError: the layer is upset"),
    ask("exit", "rank exits without reporting", r"^rank 1 exited before reporting"),
    ask("sleep", "model that sleeps for ever", SILENCE + r"rank 1 had stopped while training"),
    Fault("memory limit (RLIMIT_AS)", _memory, r"^rank 1: .*(memory|alloc)"),
    Fault("mpirun killed", lambda scene: scene.signal_parent(0, signal.SIGKILL), rf"^mpirun was {KILLED}"),
)
COMMAND = (
    Fault("clock set back by an hour", _clock, "", completes=True),
    Fault("mpirun stopped until the last run is over", _stop_launcher, r"mpirun is stopped; they are killed", True),
)
GROUPS = (
    Group("one host", "allreduce", "mpi", HERE),
    Group("one host", "ddp", "gloo", (*HERE[:3], *HERE[4:5], HERE[6])),
    Group("one host", "asp", "mpi", (
        kill(2, rf"^rank 2 \(a server\) was {KILLED}"),
        stop(2, SILENCE + r"rank 2 \(a server\) had stopped"),
        kill(0, rf"^rank 0 was {KILLED}"),
    )),
    Group("one host", "epoch_average", "mpi", (kill(0, rf"^rank 0 was {KILLED}"), COMMAND[0])),
    Group("one host", "epoch_average", "gloo", (stop(0, SILENCE + "rank 0 had stopped"), COMMAND[1])),
    Group("one host", "local_sgd", "mpi", (
        Fault("thread that does not end", _thread, "a thread of rank 1 does not end; they are killed", True),
    )),
    Group("one host", "bmuf", "mpi", (
        Fault("command killed", lambda scene: scene.signal_command(signal.SIGKILL), "", ends=True),
    )),
    Group("one host", "easgd", "mpi", (
        Fault("command terminated", lambda scene: scene.signal_command(signal.SIGTERM), "", ends=True),
    )),
    Group("3 hosts", "allreduce", "mpi", (
        kill(2, rf"^rank 2 on n2 was {KILLED}"),
        stop(1, SILENCE + "rank 1 on n1 had stopped while training, and the others waited in allreduce"),
        Fault(
            "daemon killed",
            lambda scene: scene.signal_parent(2, signal.SIGKILL),
            "daemon on n2 with rank 2|daemon of mpirun .* on one of n0, n1, n2",
        ),
        Fault("link down", lambda scene: scene.link("n2", "down"), SILENCE + "n2 with rank 2 does not answer"),
    ), 3),
    Group("3 hosts", "ddp", "gloo", (
        kill(1, rf"^rank 1 on n1 was {KILLED}"),
        Fault("two hosts cut off from each other", _cut, SILENCE + "|rank [12] on n[12]: .*(closed|reset|timed out)"),
        Fault("link down", lambda scene: scene.link("n2", "down"), SILENCE + "n2 with rank 2 does not answer"),
    ), 3),
    Group("3 hosts", "epoch_average", "mpi", (
        Fault("host vanishes", _vanish, SILENCE + "n2 with rank 2 does not answer"),
    ), 3),
    Group("3 hosts", "local_sgd", "mpi", (
        Fault("daemon stopped until the last run is over", _stop_daemon, "stopped; they are killed", True),
    ), 3),
    Group("3 hosts", "bmuf", "mpi", (
        Fault("command killed", lambda scene: scene.signal_command(signal.SIGKILL), "", ends=True),
    ), 3),
    Group("3 Slurm nodes", "allreduce", "gloo", (
        kill(2, rf"^rank 2 on n2 was {KILLED}"),
        stop(1, SILENCE + "rank 1 on n1 had stopped"),
        Fault("TERM to the batch shell alone", _scancel("--batch", "--signal=TERM"), "", ends=True),
    ), 3),
    Group("3 Slurm nodes", "ddp", "gloo", (
        ask("raise", "exception in a model", "rank 1 on n1: ValueError: the layer is upset"),
        Fault("link down", lambda scene: scene.link("n2", "down"), SILENCE + "n2 with rank 2 does not answer"),
        Fault("job cancelled", _scancel(), "", ends=True),
    ), 3),
    Group("3 Slurm nodes", "epoch_average", "gloo", (
        Fault("port in use", _take_port, "rank 0 on n0: .*(in use|EADDRINUSE)", before=True),
    ), 3),
    Group("one host", "horovod", "horovod", (*HERE[:3], HERE[6])),
    Group("3 hosts", "horovod", "horovod", (
        kill(2, rf"^rank 2 on n2 was {KILLED}"),
        Fault("link down", lambda scene: scene.link("n2", "down"), SILENCE + "n2 with rank 2 does not answer"),
    ), 3),
)  # fmt: skip


def until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def hit(scene: Scene, fault: Fault, done: int) -> Result:
    """Inject one fault into the run after `done` others, and look at its end."""
    group = scene.group
    result = Result(group.place, group.strategy, group.engine, fault.name, None, "", named=False)
    (scene.folder / "hold").touch()
    if fault.before:
        taken = fault.inject(scene)
        time.sleep(1)
        scene.start()
        began = time.monotonic()
        if until(lambda: not scene.alive(), END_S):
            result.ended_s = time.monotonic() - began
        if taken is not None:
            taken()
        result.said = scene.rows()[-1]["error"] if scene.rows() else scene.printed()[-300:]
        result.named = bool(re.search(fault.expected, result.said))
        return result
    if not scene.alive():
        scene.start()
    if not until(lambda: scene.training(done) or not scene.alive(), BEGIN_S) or not scene.alive():
        result.said = f"no run began: {scene.printed()[-300:]}"
        return result
    scene.hit = scene.launch()
    injected = time.monotonic()
    take_back = fault.inject(scene)
    by_row = not (fault.ends or fault.completes)
    if until(lambda: not scene.alive() or (by_row and len(scene.rows()) > done), END_S):
        result.ended_s = time.monotonic() - injected
    if take_back is not None:
        take_back()
    rows = scene.rows()
    if fault.completes:
        found = re.search(f"[^;:]*{fault.expected}", scene.printed()) if fault.expected else None
        result.said = found[0] if found else scene.printed()[-300:]
        result.named = (found is not None or not fault.expected) and rows[-1]["status"] == "completed"
    elif fault.ends:
        result.said = scene.printed()[-300:]
        result.named = len(rows) == done and "Traceback" not in result.said
    else:
        result.said = rows[-1]["error"] if len(rows) > done else scene.printed()[-300:]
        result.named = bool(re.search(fault.expected, result.said))
    return result


def run_group(group: Group, place: Place, folder: Path, patience: float) -> Iterator[Result]:
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(MODEL)
    (folder / "printed.txt").touch()
    keys = {"strategy": group.strategy, "engine": group.engine, "workers": group.workers, "patience": patience}
    (folder / "study.yaml").write_text(
        STUDY.format(model=f"{folder}/model.py:build", repetitions=len(group.faults), **keys)
    )
    scene = Scene(group, place, folder, patience)
    results = []
    for done, fault in enumerate(group.faults):
        results.append(hit(scene, fault, done))
        print(f"  {fault.name}: {results[-1].ended_s} s, {results[-1].said}", flush=True)
    (scene.folder / "hold").unlink(missing_ok=True)
    if not until(lambda: not scene.alive(), END_S) and scene.process is not None:
        scene.process.kill()
    deadline = time.monotonic() + ORPHANS_S
    while (left := place.processes(folder / "results")) and time.monotonic() < deadline:
        time.sleep(0.5)
    scene.start()
    resumed = until(lambda: not scene.alive(), END_S)
    rows = {row["run_id"]: row["status"] for row in scene.rows()}
    resumed = resumed and len(rows) == len(group.faults) and set(rows.values()) == {"completed"}
    for result in results:
        result.orphans, result.resumed = left, resumed
        yield result


@contextmanager
def places(folder: Path, wanted: set[str]) -> Iterator[dict[str, Place]]:
    """The places that can be made here."""
    found: dict[str, Place] = {"one host": Place()}
    if wanted <= set(found) or (reason := why_not()):
        print(reason if not wanted <= set(found) else "")
        yield found
        return
    folder.mkdir()
    hosts = Hosts(folder, 3)
    try:
        found["3 hosts"] = ByName(hosts, reached_by_name(hosts))
        if "3 Slurm nodes" in wanted and not slurm.why_not():
            found["3 Slurm nodes"] = InJob(hosts, Slurm(hosts))
        yield found
    finally:
        hosts.close()


def table(results: Sequence[Result]) -> str:
    """The results by place and fault, in Markdown."""
    kinds: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        kinds[result.place, result.fault].append(result)
    lines = [
        "| place | fault | injected | ended within 60 s, named | longest | no orphans | went on |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for (place, fault), each in kinds.items():
        good = sum(result.named and (result.ended_s or 1e9) <= LIMIT_S for result in each)
        longest = max(result.ended_s or float("inf") for result in each)
        clean, resumed = sum(not result.orphans for result in each), sum(bool(result.resumed) for result in each)
        how = ", ".join(dict.fromkeys(f"{result.strategy}/{result.engine}" for result in each))
        lines.append(f"| {place} | {fault} ({how}) | {len(each)} | {good} | {longest:.1f} s | {clean} | {resumed} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="groups whose names contain one of these")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--patience", type=float, default=20.0)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    log = arguments.output.resolve() / "faults.jsonl"
    results = [Result(**json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []
    groups = [group for group in GROUPS if not arguments.only or any(name in group.name for name in arguments.only)]
    groups = [group for group in groups if engines.available(group.engine) is None]
    with tempfile.TemporaryDirectory(prefix="faults-hosts-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        with places(Path(folder) / "hosts", {group.place for group in groups}) as there:
            for number in range(arguments.rounds):
                for group in groups:
                    target = arguments.output.resolve() / f"{group.name.replace(' ', '-')}-{number}"
                    if group.place not in there or target.exists():
                        continue
                    print(group.name, flush=True)
                    for result in run_group(group, there[group.place], target, arguments.patience):
                        results.append(result)
                        with log.open("a") as file:
                            file.write(json.dumps(asdict(result)) + "\n")
    print(table(results))
    for result in results:
        if not result.good:
            print(f"not as it should be: {asdict(result)}")


if __name__ == "__main__":
    main()
