"""The command that starts ranks, the environment they start in, how all of them are ended, and their logs.

Each launch has a folder of logs in that of its study, which stays where a run failed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from scalebench.comm.launchers import chosen
from scalebench.comm.launchers.base import Placement
from scalebench.launch.hosts import SPEAK_OF_HOSTS, Allocation, reachable, this_host
from scalebench.native.job_files import HEARTBEATS
from scalebench.records.provenance import TIMING, redact
from scalebench.system.parent_watch import end_with_parent

_GRACE_S = 5.0  # between asking processes to end and ending them
# a rank that lost a peer waits so long, in which mpirun notices the peer's death and
# names it
_ABORT_DELAY_S = 1
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# what a run says, not the user's shell
_OURS = {
    *_THREADS,
    "HOROVOD_CYCLE_TIME",
    "HOROVOD_FUSION_THRESHOLD",
}
# What ranks on other hosts get by name: an agent such as ssh passes nothing on. mpirun
# itself passes OMPI_ and PRTE_.
_PASSED = re.compile(rf"{TIMING}|(TORCH|SCALEBENCH|XDG|PYTHON)_\w+|PYTHONPATH")
_SCHEDULERS = re.compile(r"(SLURM|PBS|LSB|PE)_\w+")


def launch_command(
    ranks: int,
    threads: int = 1,
    progress_threads: int = 0,
    *,
    bind: bool = True,
    alone: bool = False,
    mpi: bool = True,
    settings: Iterable[str] = (),
    on: Allocation | None = None,
    restarts: int | None = None,
) -> tuple[list[str], str]:
    """The command of the launcher that starts `ranks` processes, up to the program, and how it binds them.

    `alone`: all of them on one host, in the environment for that. Without `mpi`, they
    may be joined by none. Ranks on other hosts are given by name what they need of this
    process's environment, threads, and `settings`. `on`: hosts with equally many slots
    each, which are filled (`Allocation.with_at_most`). `restarts`: ranks that may die;
    the launch is elastic, and without binding.

    Raises:
        EngineError: the launcher cannot start them.
    """
    launcher = chosen()
    # a launcher that names hosts in its command places ranks on this one by that
    stays_here = alone and not launcher.names_hosts
    hosts = on or (this_host() if stays_here else reachable())
    if alone:
        hosts = replace(hosts, hosts=hosts.hosts[:1])
    widths = (threads + progress_threads, threads)
    bind = bind and launcher.binds and restarts is None
    # a rank and its progress thread get a core each where there are so many, else share
    # one, else are not bound
    width = next(
        (cores for cores in widths if bind and hosts.can_bind(ranks, cores)), 0
    )
    binding = {0: "none", 1: "core"}.get(width, f"core:{width}")
    held = zip(hosts.hosts, hosts.ranks_on(ranks), strict=True)
    passed: set[str] = set()
    # ranks of this host inherit the environment as it is
    if len(hosts.hosts) > 1:
        passed = {name for name in os.environ if _PASSED.fullmatch(name)} - _OURS | {
            *_THREADS,
            *settings,
        }
    placement = Placement(
        hosts=tuple(host.name for host, count in held for _ in range(count)),
        width=width,
        # srun counts hardware threads where a launch means cores
        cpus_per_core=max(
            1, *(host.cores // host.physical_cores for host in hosts.hosts)
        ),
        by_mpi=mpi,
        beyond_slots=ranks > hosts.slots,
        per_host=None if on is None else on.hosts[0].slots,
        passed=tuple(sorted(passed)),
        restarts=restarts,
    )
    return launcher.command(placement), binding


def environment(
    threads: int, *, oversubscribed: bool = False, alone: bool = False
) -> dict[str, str]:
    """This process's environment, with what the launcher and ranks need, such as threads.

    `alone`: without what speaks of other hosts.
    """
    additions = {
        **dict.fromkeys(_THREADS, str(threads)),
        "OMPI_MCA_mpi_abort_delay": str(_ABORT_DELAY_S),
    }
    if oversubscribed:
        # a spinning rank would keep the others from computing
        additions["OMPI_MCA_mpi_yield_when_idle"] = "1"
    kept = {name: value for name, value in os.environ.items() if name not in _OURS}
    launcher = chosen()
    if alone and not launcher.names_hosts:
        kept = {
            name: kept[name]
            for name in kept
            if name not in SPEAK_OF_HOSTS and not _SCHEDULERS.fullmatch(name)
        }
    if not launcher.names_hosts and (alone or len(reachable().hosts) == 1):
        # it complains where there is no such network
        additions["OMPI_MCA_osc"] = "^ucx"
    return launcher.environment(additions | kept)


def start(
    command: Sequence[str], variables: Mapping[str, str], logs: Path
) -> subprocess.Popen[bytes]:
    """Start a launcher in an environment of these `variables`; all that is printed goes to files in `logs`."""
    with (
        (logs / "stdout.txt").open("wb") as out,
        (logs / "stderr.txt").open("wb") as err,
    ):
        return subprocess.Popen(
            command,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            # Ctrl-C of the terminal is for this process alone, which lets the run
            # under way end
            start_new_session=True,
            # even SIGKILL of this process leaves no ranks behind
            preexec_fn=end_with_parent,
        )


def stop(process: subprocess.Popen[bytes], ranks: Sequence[int]) -> None:
    """End the launcher, which ends its ranks; then whatever is left of both."""
    # a launcher that ended well has seen all of its ranks end
    if process.poll() is not None and process.returncode == 0:
        return
    with suppress(ProcessLookupError):
        # asked first, as a launcher takes its ranks on other hosts with it
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    with suppress(ProcessLookupError, PermissionError):
        # the launcher leads a session of its own, so that the group holds nothing else
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # mpirun gives each rank a group of its own, and daemons start some
    for pid in ranks:
        if _is_rank(pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _is_rank(pid: int) -> bool:
    """Return True if `pid` is still a process of ours, and its number was not given to another."""
    try:
        return b"scalebench.native" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def new_logs(study: Path) -> Path:
    """Return a folder for the logs of a launch that begins now, which is not made yet."""
    return study / "logs" / datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")


def remove_logs(logs: Path) -> None:
    """Remove the logs of a launch."""
    shutil.rmtree(logs, ignore_errors=True)
    with suppress(OSError):  # the folder holds logs of earlier commands
        logs.parent.rmdir()


def redact_logs(logs: Path) -> None:
    """Take names and secrets out of all files that the processes of failed launches left."""
    for path in sorted(logs.rglob("*")):
        with suppress(OSError):
            if path.name == HEARTBEATS:
                # no text: names of hosts between numbers, which a rank that has not
                # ended yet may write
                path.unlink()
            elif path.is_file() and not path.is_symlink():
                text = path.read_bytes().decode(errors="surrogateescape")
                if (known := redact(text)) != text:
                    path.write_bytes(known.encode(errors="surrogateescape"))
