"""Several hosts on one machine, each with its own network, host name, /etc/hosts, /dev/shm and process ids.

Nothing of them is visible outside: the bridge lies in the network namespace of the host
`login`, names are resolved by files bound over /etc/hosts, and all processes of a host
are children of one, which ends when this process does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

CORES = 2  # of each host
LOGIN = "login"
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "tc")
_UNSHARE = (
    "unshare",
    "--net",
    "--uts",
    "--ipc",
    "--pid",
    "--mount",
    "--mount-proc",
    "--fork",
    "--kill-child",
)
_END_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
_INIT = """
hostname {name}
mount -t tmpfs none /dev/shm
mount --bind {folder}/hosts /etc/hosts
ip link set lo up
echo $$ > {folder}/up
while :; do sleep infinity & wait $!; done
"""


def why_not() -> str:
    """Return the reason why hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "several hosts on one machine need root"
    if missing := [name for name in TOOLS if shutil.which(name) is None]:
        return f"several hosts on one machine need {', '.join(missing)} (Debian's iproute2 and util-linux)"
    tried = subprocess.run(
        [*_UNSHARE, "mount", "-t", "tmpfs", "none", "/dev/shm"],
        capture_output=True,
        text=True,
    )
    return (
        f"no namespaces may be made here: {tried.stderr.strip()}"
        if tried.returncode
        else ""
    )


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` holds, as long as a test may take; print then what never came: `what`."""
    try:
        while not condition():
            time.sleep(0.05)
    except BaseException:
        print(f"{what}: never")
        raise


class Host:
    """One host of two cores; `folder` holds its /etc/hosts and the output of its daemons."""

    def __init__(self, name: str, address: str, folder: Path, first_core: int) -> None:
        self.name, self.address, self.folder = name, address, folder
        folder.mkdir()
        (folder / "hosts").touch()
        allowed = sorted(os.sched_getaffinity(0))
        cores = {
            allowed[core % len(allowed)]
            for core in range(first_core, first_core + CORES)
        }

        self._holder = subprocess.Popen(
            [
                *_END_WITH_PARENT,
                *_UNSHARE,
                "bash",
                "-c",
                _INIT.format(name=name, folder=folder),
            ],
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        self._daemons: list[subprocess.Popen[str]] = []
        until((folder / "up").exists, f"host {name} is up")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        # of its first process, as seen from here
        self.pid = int(children.read_text().split()[0])

    def resolve(self, names: Mapping[str, str]) -> None:
        """Write this host's /etc/hosts: `names` by address."""
        lines = [
            "127.0.0.1 localhost",
            *(f"{address} {name}" for name, address in names.items()),
        ]
        # in place: it is bound over /etc/hosts
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")

    def start(
        self, command: Sequence[str | Path], *, cwd: Path = Path("/"), **options: object
    ) -> subprocess.Popen[str]:
        """Start a process on this host, which ends with the calling process."""
        enter = [
            *_END_WITH_PARENT,
            "nsenter",
            "--all",
            f"--target={self.pid}",
            f"--wd={cwd}",
        ]
        return subprocess.Popen([*enter, *map(str, command)], text=True, **options)

    def daemon(
        self,
        command: Sequence[str | Path],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a process that runs on this host until the host is closed."""
        with (self.folder / f"{Path(command[0]).name}.txt").open("w") as out:
            options = {
                "stdin": subprocess.DEVNULL,
                "stdout": out,
                "stderr": out,
                "env": environment,
            }
            self._daemons.append(self.start(command, **options))

    def call(
        self,
        command: Sequence[str | Path],
        *,
        timeout: float = 300.0,
        **options: object,
    ) -> str:
        """Run a command on this host and return its standard output.

        Raises:
            AssertionError: the command failed, or took longer than `timeout` seconds.
        """
        pipes = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        process = self.start(
            ["timeout", "--kill-after=5", f"{timeout:g}", *command], **pipes, **options
        )
        out, err = process.communicate()
        assert process.returncode == 0, (
            f"{self.name}: {command} ended with {process.returncode}: {out}{err}"
        )
        return out

    def close(self) -> None:
        """End all its processes; its namespaces, links and mounts go with them."""
        for process in (self._holder, *self._daemons):
            process.kill()
            process.wait()


class Hosts:
    """`count` hosts n0, n1 ... and `login`, on one network; links of `rate` (as tc writes it) if given."""

    def __init__(self, folder: Path, count: int, rate: str | None = None) -> None:
        self.folder = folder
        self.login = Host(LOGIN, "10.78.0.254", folder / LOGIN, 0)
        self.nodes = [
            Host(f"n{i}", f"10.78.0.{i + 1}", folder / f"n{i}", CORES * i)
            for i in range(count)
        ]
        self.login.call(["ip", "link", "add", "hosts", "type", "bridge"])
        self.login.call(
            ["ip", "addr", "add", f"{self.login.address}/24", "dev", "hosts"]
        )
        self.login.call(["ip", "link", "set", "hosts", "up"])
        for node in self.nodes:
            self._connect(node, rate)
        self.resolve_all()

    def _connect(self, node: Host, rate: str | None) -> None:
        enter = [
            "nsenter",
            "--net",
            f"--target={self.login.pid}",
        ]  # where the other's process id is known
        link = f"to-{node.name}"
        pair = ["type", "veth", "peer", "name", "eth0", "netns", str(node.pid)]
        subprocess.run([*enter, "ip", "link", "add", link, *pair], check=True)
        self.login.call(["ip", "link", "set", link, "master", "hosts", "up"])
        node.call(["ip", "addr", "add", f"{node.address}/24", "dev", "eth0"])
        node.call(["ip", "link", "set", "eth0", "up"])
        if rate:
            shape = ["root", "tbf", "rate", rate, "burst", "32kb", "latency", "200ms"]
            node.call(["tc", "qdisc", "add", "dev", "eth0", *shape])
            self.login.call(["tc", "qdisc", "add", "dev", link, *shape])

    def resolve_all(self) -> None:
        """Write every name into every host's /etc/hosts."""
        names = {host.name: host.address for host in (self.login, *self.nodes)}
        for host in (self.login, *self.nodes):
            host.resolve(names)

    def close(self) -> None:
        for host in (*self.nodes, self.login):
            host.close()
