"""A Slurm cluster on the hosts of `machines`: slurmctld on the host `login`, a slurmd on each other."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from tests.hosts.machines import CORES, Host, Hosts, until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
GPUS = 2  # of each host: Slurm counts them, and there are none
_NVIDIA = 195  # major number of devices
_CONF = """\
ClusterName=test
SlurmctldHost=login(10.78.0.254)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
MpiDefault=none
KillWait=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
GresTypes=gpu
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def why_not() -> str:
    """Return the reason why no Slurm cluster can be started here; empty if one can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"no {', '.join(missing)} (Debian's slurm-wlm and munge)" if missing else ""


class Slurm:
    """A cluster; calls of its clients have time limits, as they would wait for nodes that are down."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self.folder = hosts, hosts.folder / "slurm"
        (self.folder / "state").mkdir(parents=True)
        conf = self.folder / "slurm.conf"
        self.environment = {**on_a_host(os.environ), "SLURM_CONF": str(conf)}
        nodes = [
            f"NodeName={node.name} NodeHostname={node.name} NodeAddr={node.address} CPUs={CORES} Gres=gpu:{GPUS} "
            "State=UNKNOWN\n"
            for node in hosts.nodes
        ]
        conf.write_text(_CONF.format(folder=self.folder) + "".join(nodes))
        # the hosts have /tmp in common
        (self.folder / "mpi.conf").write_text("PMIxCliTmpDirBase=/dev/shm\n")
        for number in range(GPUS):
            os.mknod(
                self.folder / f"gpu{number}",
                stat.S_IFCHR,
                os.makedev(_NVIDIA, 200 + number),
            )
        (self.folder / "gres.conf").write_text(
            f"Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n"
        )
        self._authenticate()
        self.start_controller()
        for node in hosts.nodes:
            (self.folder / f"spool.{node.name}").mkdir()
            self._start_daemon(node)
        until(
            lambda: self._idle() == len(hosts.nodes),
            f"nodes are idle; see {self.folder}",
        )

    def _authenticate(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = [
            f"--{name}-file={self.folder}/munge.{name}"
            for name in ("key", "pid", "log", "seed")
        ]
        socket = self.folder / "munge.socket"
        self.hosts.login.daemon(
            ["munged", "--foreground", "--force", f"--socket={socket}", *files]
        )
        until(socket.exists, f"munged listens; see {self.folder}")

    def start_controller(self) -> None:
        """Start slurmctld, with the state in which another one left the cluster."""
        self.hosts.login.daemon(
            ["slurmctld", "-D", "-f", self.environment["SLURM_CONF"]]
        )

    def stop_controller(self) -> None:
        """Kill slurmctld."""
        self.hosts.login.call(["pkill", "-KILL", "-x", "slurmctld"])
        until(lambda: not self._answers(), "slurmctld has ended")

    def lose(self, node: Host) -> None:
        """Kill all processes of a node, as a power failure does, and let Slurm know at once that it is down."""
        node.start(["sh", "-c", "rm -rf /dev/shm/*; kill -KILL -1"]).wait(30)
        update = [
            "scontrol",
            "update",
            f"NodeName={node.name}",
            "State=DOWN",
            "Reason=lost",
        ]
        self.hosts.login.call(update, env=self.environment)

    def bring_back(self, node: Host) -> None:
        """Start the daemon of a node that was lost; Slurm uses it again."""
        self._start_daemon(node)

    def _start_daemon(self, node: Host) -> None:
        node.daemon(
            ["slurmd", "-D", "-N", node.name, "-f", self.environment["SLURM_CONF"]]
        )

    def _answers(self) -> bool:
        try:
            self.hosts.login.call(
                ["scontrol", "ping"], env=self.environment, timeout=60
            )
        except AssertionError:
            return False
        return True

    def _idle(self) -> int:
        try:
            states = self.hosts.login.call(
                ["sinfo", "-hN", "-o", "%t"], env=self.environment, timeout=60
            )
        except AssertionError:  # slurmctld is not up yet
            return 0
        return states.split().count("idle")

    def sbatch(
        self, script: str, folder: Path, *options: str, **environment: str
    ) -> int:
        """Submit `script`, whose output goes to `folder`/job.txt; return the job number, 0 with --test-only."""
        (folder / "job.sh").write_text(script)
        command = [
            "sbatch",
            "--parsable",
            f"--chdir={folder}",
            "--output=job.txt",
            *options,
            str(folder / "job.sh"),
        ]
        return int(
            self.hosts.login.call(command, env=self.environment | environment) or 0
        )

    def wait(self, job: int, seconds: float = 1000.0) -> str:
        """Return the state in which the job ended; cancel it after `seconds`."""
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) not in _ENDED:
            if time.monotonic() > deadline:
                self.hosts.login.call(["scancel", str(job)], env=self.environment)
                return "CANCELLED"
            time.sleep(0.2)
        return state

    def state(self, job: int) -> str:
        return next(
            word.partition("=")[2]
            for word in self.shown(job).split()
            if word.startswith("JobState=")
        )

    def shown(self, job: int) -> str:
        """Return the facts of the job that `scontrol show job` prints, in one line."""
        return self.hosts.login.call(
            ["scontrol", "show", "job", "-o", str(job)], env=self.environment
        )


def on_a_host(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the variables of an outer Slurm, with temporary files in the host's own memory."""
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(("SLURM_", "SBATCH_"))
    }
    # daemons' folders have process ids as names, and hosts have these in common
    return kept | {"TMPDIR": "/dev/shm"}
