"""The faults of `faults.py`: small functions that inject one, and the tables of places, engines and faults."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fault_scene import SCALEBENCH, Fault, Group, InJob, Scene, until

TakeBack = Callable[[], object] | None

SILENCE = r"no worker showed a sign of life for \d+ s \(patience\): .*"
KILLED = r"ended by signal 9 \(Killed"
TERMINATED = r"ended by signal 15 \(Terminated"
FOREVER = 3600


def let_go_on(scene: Scene) -> None:
    """Let the run train at its own speed."""
    (scene.folder / "hold").unlink(missing_ok=True)


# -- processes --


def kill(rank: int, expected: str) -> Fault:
    return to_rank(rank, signal.SIGKILL, "killed", expected)


def stop(rank: int, expected: str) -> Fault:
    return to_rank(rank, signal.SIGSTOP, "stopped (SIGSTOP)", expected)


def to_rank(rank: int, signum: int, name: str, expected: str) -> Fault:
    return Fault(
        f"rank {rank} {name}", lambda scene: scene.signal_rank(rank, signum), expected
    )


def to_launcher(signum: int, name: str, expected: str, rank: int = 0) -> Fault:
    """Signal mpirun, which is the parent of rank 0 on the host of the command, or the daemon of another rank."""
    return Fault(name, lambda scene: scene.signal_parent(rank, signum), expected)


def to_command(signum: int) -> Callable[[Scene], None]:
    """Signal the command; a run under way that is to be finished goes on at its own speed."""

    def inject(scene: Scene) -> None:
        scene.signal_command(signum)
        let_go_on(scene)

    return inject


def ask(what: str, text: str, expected: str, rank: int = 1) -> Fault:
    """Let the model of one rank do something."""
    return Fault(text, lambda scene: scene.ask_model(what, rank), expected)


def paused(rank: int) -> Fault:
    def inject(scene: Scene) -> None:
        scene.signal_rank(rank, signal.SIGSTOP)
        time.sleep(5)
        scene.signal_rank(rank, signal.SIGCONT)
        let_go_on(scene)

    return Fault(
        f"rank {rank} stopped for 5 s (SIGSTOP, SIGCONT)", inject, "", completes=True
    )


def _pause_command(scene: Scene) -> None:
    scene.signal_command(signal.SIGSTOP)
    time.sleep(5)
    scene.signal_command(signal.SIGCONT)
    let_go_on(scene)


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


def _kill_child(scene: Scene) -> None:
    """Kill the youngest process of the command: a virtual worker's, or the one that they are forked from."""
    assert scene.process is not None
    listed = scene.place.call(
        "", ["pgrep", "-g", str(os.getpgid(scene.process.pid))]
    ).split()
    for pid in sorted(map(int, listed))[-1:]:
        if pid != scene.process.pid:
            os.kill(pid, signal.SIGKILL)
    let_go_on(scene)


# -- clocks, memory and limits --


def clock(seconds: int, text: str) -> Fault:
    def inject(scene: Scene) -> TakeBack:
        later = scene.folder / "later"
        later.write_text(str(seconds))
        let_go_on(scene)
        return lambda: later.unlink(missing_ok=True)

    return Fault(f"clock set {text}", inject, "", completes=True)


def _memory(scene: Scene) -> TakeBack:
    pid = scene.beats()[1].pid
    resource.prlimit(pid, resource.RLIMIT_AS, (8 << 30, 8 << 30))
    return scene.ask_model("allocate")


def _files(scene: Scene) -> TakeBack:
    pid = scene.beats()[1].pid
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (256, 256))
    return scene.ask_model("open")


def before(
    name: str, expected: str, *prefix: str, completes: bool = False, **variables: str
) -> Fault:
    """A command that is started through `prefix` and with `variables`."""

    def inject(scene: Scene) -> None:
        scene.prefix, scene.variables = prefix, variables

    return Fault(name, inject, expected, completes=completes, before=True)


def shell(name: str, script: str, expected: str, *, completes: bool = False) -> Fault:
    """A command that a shell script starts as "$@"."""
    return before(name, expected, "sh", "-c", script, "-", completes=completes)


def option(name: str, expected: str, *options: str) -> Fault:
    """A command with further options."""

    def inject(scene: Scene) -> None:
        scene.options = options

    return Fault(name, inject, expected, before=True)


# -- disks and files --


def mounted(name: str, options: str, expected: str) -> Fault:
    """A file system for the results that is too small, or read-only."""

    def inject(scene: Scene) -> TakeBack:
        results = scene.folder / "results"
        results.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", results],
            check=True,
            timeout=30,
        )

        def take_back() -> None:
            shutil.copytree(results, scene.folder / "kept")
            subprocess.run(["umount", results], check=True, timeout=30)
            results.rmdir()
            (scene.folder / "kept").rename(results)

        return take_back

    return Fault(name, inject, expected, before=True)


def damaged(
    name: str,
    file: str,
    change: Callable[[bytes], bytes | None],
    expected: str,
    *,
    repaired: bool,
) -> Fault:
    """A file of a study that was made; one that the command does not repair is put back."""

    def inject(scene: Scene) -> TakeBack:
        path = scene.study / file
        content = path.read_bytes()
        path.unlink()
        if (changed := change(content)) is not None:
            path.write_bytes(changed)
        return None if repaired else lambda: path.write_bytes(content)

    return Fault(name, inject, expected, completes=repaired, afterwards=True)


def linked(file: str) -> Fault:
    """A symbolic link in place of a file that is written, to a file that is to be kept."""

    def inject(scene: Scene) -> TakeBack:
        target = scene.folder / "precious"
        target.write_text("kept")
        path = scene.study / file
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        if file.endswith(".partial"):  # there is something to be moved to it
            table = path.with_name(file.removesuffix(".partial"))
            table.write_bytes(table.read_bytes() + b"half a row")

        def take_back() -> None:
            path.unlink()
            if content is not None:
                path.write_bytes(content)
            assert target.read_text() == "kept", (
                "the target of the link was overwritten"
            )

        return take_back

    return Fault(
        f"symbolic link `{file}`",
        inject,
        f"{file}.*symbolic link|symbolic link.*{file}",
        afterwards=True,
    )


def in_place(
    name: str, path: str, make: Callable[[Path], object], expected: str
) -> Fault:
    """Something in place of a file or folder of the command."""

    def inject(scene: Scene) -> TakeBack:
        file = scene.folder / path
        away = file.with_name("away")
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            file.rename(away)
        make(file)

        def take_back() -> None:
            if file.is_dir() and not file.is_symlink():
                shutil.rmtree(file)
            else:
                file.unlink(missing_ok=True)
            if away.exists():
                away.rename(file)

        return take_back

    return Fault(name, inject, expected, before=True)


def _endless_data(scene: Scene) -> None:
    (scene.folder / "zero.csv").symlink_to("/dev/zero")
    scene.options = ["--dataset", "csv", "--data-dir", "."]


def _lock_elsewhere(file: Path) -> None:
    owner = {
        "host": "elsewhere",
        "pid": 7,
        "born": "",
        "since_utc": "2026-01-01T00:00:00+00:00",
    }
    file.write_text(json.dumps(owner))


def _second_command(scene: Scene) -> None:
    words = [
        str(SCALEBENCH),
        "run",
        "study.yaml",
        "--output",
        str(scene.folder / "results"),
    ]
    done = subprocess.run(
        words, cwd=scene.folder, capture_output=True, text=True, timeout=60, check=False
    )
    with (scene.folder / "printed.txt").open("a") as file:
        file.write(f"the second: {done.returncode} {done.stdout}{done.stderr}")
    let_go_on(scene)


def _delete_study(scene: Scene) -> None:
    shutil.rmtree(scene.study)
    let_go_on(scene)


def _delete_logs(scene: Scene) -> None:
    shutil.rmtree(scene.study / "logs")


def _change_model(scene: Scene) -> TakeBack:
    model = scene.folder / "model.py"
    content = model.read_text()
    model.write_text(content + "\n# another\n")
    return lambda: model.write_text(content)


def _heartbeats(scene: Scene) -> None:
    launch = scene.launch()
    assert launch is not None
    os.truncate(launch / "heartbeats", 0)


def _fill(scene: Scene) -> TakeBack:
    """Let no rank write a byte more, as on a full disk."""
    for beat in scene.beats():
        resource.prlimit(beat.pid, resource.RLIMIT_FSIZE, (0, 0))
    let_go_on(scene)
    return None


# -- hosts and links --


def _vanish(scene: Scene) -> TakeBack:
    """Take the link of n2 down, then stop all its processes of the study: the others hear nothing of their end."""
    up = scene.link("n2", "down")
    scene.place.call(
        "n2", ["sh", "-c", "pkill -STOP -x prted; pkill -STOP -f [s]calebench.native"]
    )

    def take_back() -> None:
        scene.place.call(
            "n2",
            ["sh", "-c", "pkill -KILL -f [s]calebench.native; pkill -KILL -x prted"],
        )
        up()

    return take_back


def _cut(scene: Scene) -> TakeBack:
    """Let n1 and n2 not reach each other."""
    scene.place.call("n2", ["ip", "route", "add", "blackhole", "10.78.0.2/32"])
    return lambda: scene.place.call(
        "n2", ["ip", "route", "del", "blackhole", "10.78.0.2/32"]
    )


def _flap(scene: Scene) -> None:
    up = scene.link("n2", "down")
    time.sleep(3)
    up()
    let_go_on(scene)


def _unmount(scene: Scene) -> TakeBack:
    """Let n2 not see the results: a shared file system that is gone there."""
    results = str(scene.folder / "results")
    scene.place.call("n2", ["mount", "-t", "tmpfs", "none", results])
    return lambda: scene.place.call("n2", ["umount", results])


def _take_port(scene: Scene) -> TakeBack:
    """Listen on n0 on the port that the ranks are told to meet at."""
    assert isinstance(scene.place, InJob)
    program = f"import socket, time; s = socket.create_server(('', 29555)); time.sleep({FOREVER})"
    listener = scene.place.cluster.hosts.nodes[0].start([sys.executable, "-c", program])
    scene.variables = {"MASTER_PORT": "29555"}
    time.sleep(1)

    def take_back() -> None:
        scene.place.call("n0", ["pkill", "-f", "create_server"])
        listener.wait(30)
        scene.variables = {}

    return take_back


def by_slurm(program: str, *options: str) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        assert isinstance(scene.place, InJob)
        cluster = scene.place.cluster
        words = [word.format(job=scene.place.job) for word in options]
        cluster.hosts.login.call([program, *words], env=cluster.environment)

    return inject


def _cancel_step(scene: Scene) -> None:
    """Cancel the step of the ranks: the newest one of the job, as each question to the nodes is a step of its own."""
    assert isinstance(scene.place, InJob)
    cluster = scene.place.cluster
    asked = [
        "squeue",
        "--steps",
        "--noheader",
        "--format=%i",
        f"--jobs={scene.place.job}",
    ]
    steps = cluster.hosts.login.call(asked, env=cluster.environment).split()
    numbers = [
        int(number) for step in steps if (number := step.partition(".")[2]).isdigit()
    ]
    by_slurm("scancel", f"{{job}}.{max(numbers)}")(scene)


def _suspend(scene: Scene) -> None:
    by_slurm("scontrol", "suspend", "{job}")(scene)
    time.sleep(5)
    by_slurm("scontrol", "resume", "{job}")(scene)
    let_go_on(scene)


def on_node(host: str, script: str) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        scene.place.call(host, ["sh", "-c", script])

    return inject


def ending(name: str, inject: Callable[[Scene], TakeBack]) -> Fault:
    return Fault(name, inject, "", ends=True)


# -- tables --

FINISHED = r"remain|is left|are left|stopping"
RANK = (
    kill(1, rf"^rank 1 was {KILLED}"),
    to_rank(1, signal.SIGTERM, "terminated", rf"^rank 1 was {TERMINATED}"),
    to_rank(
        1,
        signal.SIGSEGV,
        "of a segmentation fault",
        r"^rank 1 was ended by signal 11 \(Segmentation fault",
    ),
    stop(
        1,
        SILENCE
        + r"rank 1 had stopped while training(, in \w+)?, and the others waited in",
    ),
    ask("raise", "exception in a model", r"^rank 1: ValueError: the layer is upset"),
    ask("exit", "rank exits without reporting", r"^rank 1 exited before reporting"),
    ask(
        "sleep",
        "model that sleeps for ever",
        SILENCE + r"rank 1 had stopped while training",
    ),
    Fault("memory limit (RLIMIT_AS)", _memory, r"^rank 1: .*(memory|alloc)"),
    to_launcher(signal.SIGKILL, "mpirun killed", rf"^mpirun was {KILLED}"),
)
ENGINE = (
    paused(1),
    to_launcher(signal.SIGTERM, "mpirun terminated", rf"^mpirun was {TERMINATED}"),
    ending("command killed", lambda scene: scene.signal_command(signal.SIGKILL)),
    ending(
        "command hung up (SIGHUP)", lambda scene: scene.signal_command(signal.SIGHUP)
    ),
)
MPI = (
    to_rank(
        1,
        signal.SIGABRT,
        "aborted (SIGABRT)",
        r"^rank 1 was ended by signal 6 \(Aborted",
    ),
    to_rank(
        1, signal.SIGBUS, "of a bus error", r"^rank 1 was ended by signal 7 \(Bus error"
    ),
    ask(
        "leave",
        "SystemExit in a model",
        r"^rank 1: exited before reporting: the layer leaves",
    ),
    ask("nan", "model whose loss is not a number", r"training loss|nan|NaN|not finite"),
    Fault(
        "limit of open files (RLIMIT_NOFILE)", _files, r"^rank 1: .*Too many open files"
    ),
    Fault("no rank can write (RLIMIT_FSIZE)", _fill, r"could not write|File too large"),
    Fault("logs deleted while ranks write", _delete_logs, r"logs/\S+ was deleted"),
    Fault("heartbeats truncated", _heartbeats, r"ended by signal 7|heartbeats"),
)
COMMAND = (
    clock(-3600, "back by an hour"),
    clock(86400, "forward by a day"),
    Fault(
        "command stopped for 5 s (SIGSTOP, SIGCONT)", _pause_command, "", completes=True
    ),
    Fault(
        "study folder deleted during a run",
        _delete_study,
        r"deleted by something else|was deleted",
        completes=True,
    ),
)
LINK_DOWN = Fault(
    "link down",
    lambda scene: scene.link("n2", "down"),
    SILENCE + "n2 with rank 2 does not answer",
)
HOSTS = (
    kill(2, rf"^rank 2 on n2 was {KILLED}"),
    stop(
        1,
        SILENCE
        + r"rank 1 on n1 had stopped while training(, in \w+)?, and the others waited in",
    ),
    ask(
        "raise",
        "exception in a model",
        "rank 2 on n2: ValueError: the layer is upset",
        2,
    ),
)
DAEMON = to_launcher(
    signal.SIGKILL,
    "daemon killed",
    "daemon on n2 with rank 2|daemon of mpirun .* on one of n0, n1, n2",
    2,
)
SIGNALS = (
    Fault("command interrupted (SIGINT)", to_command(signal.SIGINT), FINISHED),
    Fault("command terminated (SIGTERM)", to_command(signal.SIGTERM), FINISHED),
    Fault("command warned (SIGUSR1)", to_command(signal.SIGUSR1), FINISHED),
    ending("command killed", to_command(signal.SIGKILL)),
    ending("command hung up (SIGHUP)", to_command(signal.SIGHUP)),
    ending("command quit (SIGQUIT)", to_command(signal.SIGQUIT)),
)
REFUSED = (
    before(
        "limit of open files (RLIMIT_NOFILE)",
        "Too many open files",
        "prlimit",
        "--nofile=12",
    ),
    before(
        "limit of file size (RLIMIT_FSIZE)", "File too large", "prlimit", "--fsize=2000"
    ),
    before("memory limit (RLIMIT_AS)", "memory|allocate", "prlimit", "--as=700000000"),
    before("limit of processor time (RLIMIT_CPU)", "", "prlimit", "--cpu=2:2"),
    before(
        "cache folder that is a device",
        "cannot be cached in /dev/null",
        XDG_CACHE_HOME="/dev/null",
    ),
    shell(
        "working folder deleted",
        'mkdir gone && cd gone && rmdir ../gone && exec "$@"',
        "folder|study.yaml",
    ),
    option(
        "endless calibration (/dev/zero)",
        "/dev/zero.*(larger than|MiB|cannot)",
        "--calibration",
        "/dev/zero",
    ),
    Fault(
        "endless data (a link to /dev/zero)",
        _endless_data,
        r"zero\.csv is no regular file",
        before=True,
    ),
    in_place(
        "endless study file (/dev/zero)",
        "study.yaml",
        lambda path: path.symlink_to("/dev/zero"),
        "larger than",
    ),
    in_place(
        "study file that is a folder",
        "study.yaml",
        lambda path: path.mkdir(),
        "study.yaml",
    ),
    in_place("model file gone", "model.py", lambda path: None, "model.py"),
    in_place(
        "results folder that is a file", "results", lambda path: path.touch(), "results"
    ),
    in_place(
        "results folder that is a broken link",
        "results",
        lambda path: path.symlink_to("no/where"),
        "results",
    ),
    in_place(
        "lock of another host",
        "results/faults/lock",
        _lock_elsewhere,
        "is being written by .*elsewhere",
    ),
)
UNHARMED = (
    *COMMAND,
    Fault(
        "process of virtual workers killed: its runs are made again",
        _kill_child,
        "",
        completes=True,
    ),
    Fault(
        "second command on one folder",
        _second_command,
        "is being written by",
        completes=True,
    ),
    before("home that is not there", "", HOME="/nonexistent", completes=True),
    before(
        "folder of temporary files that is not there",
        "",
        TMPDIR="/nonexistent",
        completes=True,
    ),
    shell("standard output full", 'exec "$@" >/dev/full', "", completes=True),
    shell(
        "standard output closed by its reader", '"$@" | head -c 1', "", completes=True
    ),
    shell("standard output closed", 'exec "$@" >&-', "", completes=True),
)
MOUNTED = (
    mounted("disk full", "size=20k", "No space left on device"),
    mounted("read-only file system", "ro", "Read-only file system"),
)
DAMAGED = (
    Fault("model changed between two commands", _change_model, "model_sha256 was", afterwards=True),
    damaged("runs.csv with a line of noise", "runs.csv", lambda data: data + bytes(range(128, 200)) + b"\n",
            r"runs.csv, line \d+", repaired=False),
    damaged("runs.csv of zeros", "runs.csv", lambda data: bytes(len(data)), "runs.csv", repaired=False),
    damaged("study.yaml garbled", "study.yaml", lambda data: b"\xff: [", "study.yaml", repaired=False),
    linked("lock"),
    linked("planned.json"),
    linked("planned.json.new"),
    linked("runs.csv.partial"),
    linked("epochs.csv"),
    damaged("planned.json garbled", "planned.json", lambda data: data[: len(data) // 2], "", repaired=True),
    damaged("runs.csv cut in a row", "runs.csv", lambda data: data[:-40], "half-written", repaired=True),
    damaged("runs.csv cut in the middle", "runs.csv", lambda data: data[: len(data) // 2], "half-written",
            repaired=True),
    damaged("runs.csv empty", "runs.csv", lambda data: b"", "half-written", repaired=True),
    damaged("runs.csv gone", "runs.csv", lambda data: None, "half-written", repaired=True),
    damaged("epochs.csv cut in the middle", "epochs.csv", lambda data: data[: len(data) // 2], "lacks epochs of",
            repaired=True),
    damaged("epochs.csv gone", "epochs.csv", lambda data: None, "lacks epochs of", repaired=True),
)  # fmt: skip
GROUPS = (
    *(Group("one host", "local_sgd", "virtual", faults) for faults in (SIGNALS, REFUSED, DAMAGED)),
    *(Group("one host", "local_sgd", "virtual", (fault,)) for fault in (*UNHARMED, *MOUNTED)),
    *(Group("one host", "allreduce", "mpi", faults) for faults in (RANK, MPI, ENGINE)),
    *(Group("one host", "ddp", "gloo", faults) for faults in (RANK, ENGINE)),
    *(Group("one host", "horovod", "horovod", faults) for faults in (RANK, ENGINE)),
    Group("one host", "asp", "mpi", (
        kill(2, rf"^rank 2 \(a server\) was {KILLED}"),
        stop(2, SILENCE + r"rank 2 \(a server\) had stopped"),
        kill(0, rf"^rank 0 was {KILLED}"),
        ask("raise", "exception in a model", r"^rank 1: ValueError: the layer is upset"),
    )),
    Group("one host", "epoch_average", "mpi", (kill(0, rf"^rank 0 was {KILLED}"), *COMMAND)),
    Group("one host", "epoch_average", "gloo", (
        stop(0, SILENCE + "rank 0 had stopped"),
        Fault("mpirun stopped until the last run is over", _stop_launcher, r"mpirun is stopped; they are killed", True),
    )),
    Group("one host", "local_sgd", "mpi", (
        Fault("thread that does not end", _thread, "a thread of rank 1 does not end; they are killed", True),
    )),
    Group("3 hosts", "allreduce", "mpi", (
        *HOSTS,
        to_rank(0, signal.SIGTERM, "terminated", rf"^rank 0 on n0 was {TERMINATED}"),
        DAEMON,
        Fault("results gone on one host", _unmount, "rank 2 on n2|n2"),
        Fault("link down for 3 s", _flap, "", completes=True),
        ending("command terminated", lambda scene: scene.signal_command(signal.SIGTERM)),
        ending("command killed", lambda scene: scene.signal_command(signal.SIGKILL)),
        LINK_DOWN,
    ), 3),
    Group("3 hosts", "ddp", "gloo", (
        *HOSTS,
        DAEMON,
        Fault("two hosts cut off from each other", _cut, SILENCE + "|rank [12] on n[12]: .*(closed|reset|timed out)"),
        LINK_DOWN,
    ), 3),
    Group("3 hosts", "horovod", "horovod", (*HOSTS, DAEMON, LINK_DOWN), 3),
    Group("3 hosts", "epoch_average", "mpi", (
        Fault("host vanishes", _vanish, SILENCE + "n2 with rank 2 does not answer"),
    ), 3),
    Group("3 hosts", "local_sgd", "mpi", (
        Fault("daemon stopped until the last run is over", _stop_daemon, "stopped; they are killed", True),
    ), 3),
    Group("3 Slurm nodes", "allreduce", "gloo", (
        *HOSTS,
        to_rank(2, signal.SIGTERM, "terminated", rf"^rank 2 on n2 was {TERMINATED}"),
        Fault("step daemon killed (slurmstepd)", lambda scene: scene.signal_parent(2, signal.SIGKILL), "n2|rank 2"),
        Fault("step cancelled", _cancel_step, "srun|cancel|signal"),
        Fault("job suspended for 5 s", _suspend, "", completes=True),
        ending("TERM to the batch shell alone", by_slurm("scancel", "--batch", "--signal=TERM", "{job}")),
        ending("job cancelled", by_slurm("scancel", "{job}")),
    ), 3),
    Group("3 Slurm nodes", "ddp", "gloo", (
        *HOSTS,
        Fault("srun killed", on_node("n0", "pkill -KILL -x srun"), rf"^srun was {KILLED}"),
        LINK_DOWN,
        ending("TERM to all of the job", by_slurm("scancel", "--full", "--signal=TERM", "{job}")),
    ), 3),
    Group("3 Slurm nodes", "epoch_average", "gloo", (
        Fault("port in use", _take_port, "rank 0 on n0: cannot listen at port 29555 .* in use", before=True),
    ), 3),
)  # fmt: skip
