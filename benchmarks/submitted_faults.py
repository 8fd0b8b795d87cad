"""Faults of a cluster while studies submitted to it run: are the rows those of an undisturbed study, and none twice?

    python benchmarks/submitted_faults.py OUTPUT [--faults 50] [--seed 0] [--only NAME ...]

A Slurm of three nodes is started on this machine (as root; tests/hosts), with the
results on a small file system that the nodes have in common. One study of real
processes and one of virtual workers are submitted, run undisturbed and collected. The
same studies are then submitted again and again, in one of several divisions into jobs.
Each is hit by `PER_STUDY` faults, at moments and of kinds that the seed chooses, and is
completed as a user would do it: `scalebench status`, `scalebench submit RESULTS` or
`retry --submit` once no job runs or waits, `scalebench collect`.

A study is good if the row of each completed run equals the undisturbed one (of real
runs in what was trained and with which result, of virtual ones in everything but
`ENVIRONMENT_COLUMNS`), no run is completed twice, no epoch is missing or there twice,
no process is left on a node, and no command failed but by a refusal of one line.
Attempts that a fault ended by a failure keep their rows.

Faults and studies are appended to OUTPUT/faults.jsonl and OUTPUT/studies.jsonl; tables
of both are printed in Markdown. A study that is not good is kept in OUTPUT.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from submitted_scene import ONE_EACH, STUDIES, Scene, completed

from scalebench.records.schema import ENVIRONMENT_COLUMNS
from tests.hosts.machines import Host, Hosts
from tests.hosts.slurm import Slurm

PER_STUDY = 4
DISK = "size=64m"
MOUNTED = "SUBMITTED_FAULTS_DISK"
PAUSE_S = 12.0  # at most, before each fault
RUN_S = 60.0  # in which a job begins, and ends a run
DIVISIONS = (
    (),
    ("--group", "count"),
    ("--group", "all"),
    ("--array",),
    ("--array", "--limit", "1"),
)
DECIDED = (  # by the study: columns of real runs that no fault may change
    *(
        "study",
        "run_id",
        "config_hash",
        "status",
        "strategy",
        "model",
        "dataset_sha256",
        "workers",
        "nodes",
    ),
    *(
        "batch_global",
        "steps_per_epoch",
        "seed",
        "repetition",
        "run_order",
        "optimizer_steps",
        "syncs",
    ),
    *("bytes_sent_per_worker", "final_train_loss", "final_metric", "best_metric"),
)


@dataclass
class Injected:
    """A fault, and what it met."""

    study: int
    kind: str
    after_s: float
    done: int  # rows of completed runs at that moment
    jobs: str  # states of the study's jobs


@dataclass
class Outcome:
    """What became of a study."""

    study: int
    what: str
    division: str
    faults: list[str] = field(default_factory=list)
    rounds: int = 0  # of submissions after the first
    failed_rows: int = 0
    seconds: float = 0.0
    refusals: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


# -- faults: each is injected for a while, and returns when it is over --

Fault = Callable[[Scene, random.Random], object]


def cancel(scene: Scene, chance: random.Random) -> None:
    """scancel of one of the jobs, whatever its state."""
    if jobs := sorted(scene.jobs() or {}):
        scene.slurm("scancel", chance.choice(jobs))


def cancel_all(scene: Scene, chance: random.Random) -> None:
    scene.slurm("scancel", "--user=root")


def lose_node(scene: Scene, chance: random.Random) -> None:
    """All processes of a node are gone at once, and Slurm finds it down; it is back later."""
    node = _busy_node(scene, chance)
    scene.cluster.lose(node)
    time.sleep(chance.uniform(2, 20))
    scene.cluster.bring_back(node)


def set_node_down(scene: Scene, chance: random.Random) -> None:
    """An operator sets a node down whose daemon lives: Slurm ends what runs there."""
    node = _busy_node(scene, chance)
    scene.slurm(
        "scontrol", "update", f"NodeName={node.name}", "State=DOWN", "Reason=fault"
    )
    time.sleep(chance.uniform(2, 10))
    scene.slurm("scontrol", "update", f"NodeName={node.name}", "State=RESUME")


def cut_node_off(scene: Scene, chance: random.Random) -> None:
    """A node's link is down while its processes live; Slurm gives its jobs to others, and the node comes back."""
    node = _busy_node(scene, chance)
    _link(scene, node, "down")
    scene.slurm(
        "scontrol", "update", f"NodeName={node.name}", "State=DOWN", "Reason=fault"
    )
    time.sleep(chance.uniform(5, 25))
    _link(scene, node, "up")
    scene.slurm("scontrol", "update", f"NodeName={node.name}", "State=RESUME")


def reach_limit(scene: Scene, chance: random.Random) -> None:
    """A job's time limit is reached: of two cases, the run under way can end in time, or is killed."""
    (scene.folder / "hold").touch()
    end = time.monotonic() + 150
    while (
        (job := scene.job_in("RUNNING")) is None
        and time.monotonic() < end
        and scene.jobs() != {}
    ):
        scene.start_again()
        time.sleep(0.5)
    if job is not None:
        scene.slurm("scontrol", "update", f"JobId={job}", "TimeLimit=1")
        ends_in_time = chance.random() < 0.5
        end = time.monotonic() + (chance.uniform(5, 15) if ends_in_time else 150)
        while (
            time.monotonic() < end
            and (scene.jobs() or {}).get(job, ("", ""))[0] == "RUNNING"
        ):
            time.sleep(0.5)
    (scene.folder / "hold").unlink()


def fill_disk(scene: Scene, chance: random.Random) -> None:
    """The file system of the results is full for a while."""
    filler = scene.folder.parent / "filler"
    free = os.statvfs(scene.folder)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_bsize)
    time.sleep(chance.uniform(3, 20))
    filler.unlink()


def restart_controller(scene: Scene, chance: random.Random) -> None:
    """slurmctld is killed, and started again."""
    scene.cluster.stop_controller()
    time.sleep(chance.uniform(1, 20))
    scene.cluster.start_controller()


def submit_twice(scene: Scene, chance: random.Random) -> None:
    """Two commands at the same time submit what is left, from two shells."""
    for process in [scene.start("submit", str(scene.results)) for _ in range(2)]:
        process.communicate(timeout=300)


FAULTS: dict[str, Fault] = {
    "job cancelled (scancel)": cancel,
    "all jobs cancelled (scancel --user)": cancel_all,
    "node lost, and back": lose_node,
    "node set down": set_node_down,
    "node cut off, and back": cut_node_off,
    "time limit": reach_limit,
    "disk full": fill_disk,
    "controller killed, and restarted": restart_controller,
    "what is left submitted twice at a time": submit_twice,
}


def _busy_node(scene: Scene, chance: random.Random) -> Host:
    """Return a node on which a job runs, if there is one."""
    printed = scene.slurm("sinfo", "--noheader", "--Node", "--format=%N %t") or ""
    states = dict(line.split() for line in printed.splitlines())
    nodes = scene.cluster.hosts.nodes
    return chance.choice(
        [node for node in nodes if states.get(node.name) in ("alloc", "mix")] or nodes
    )


def _link(scene: Scene, node: Host, state: str) -> None:
    """Set the link of a node, at its end on the login node."""
    enter = ["nsenter", "--net", f"--target={scene.cluster.hosts.login.pid}"]
    subprocess.run(
        [*enter, "ip", "link", "set", f"to-{node.name}", state], check=True, timeout=30
    )


# -- studies --


def undisturbed(cluster: Slurm, disk: Path, name: str, study: str) -> Scene:
    """Submit a study, and let it end."""
    scene = Scene(cluster, disk / f"undisturbed-{name.replace(' ', '-')}", study)
    scene.user("submit", "study.yaml", *ONE_EACH)
    scene.finish()
    if scene.wrong or not completed(scene.rows()):
        raise SystemExit(f"the undisturbed study failed: {scene.wrong}")
    return scene


def disturbed(
    cluster: Slurm,
    disk: Path,
    number: int,
    chance: random.Random,
    kinds: list[str],
    base: Scene,
    what: str,
) -> tuple[Outcome, list[Injected]]:
    """Submit a study, inject the first faults of `kinds`, which are taken out, complete it, and compare it with `base`.

    Of a study that is complete before as many faults as `PER_STUDY` hit it, the others
    are left to the next one.
    """
    scene = Scene(cluster, disk / f"study-{number}", STUDIES[what])
    division = chance.choice(DIVISIONS)
    outcome = Outcome(number, what, " ".join(division) or "--group nodes")
    injected: list[Injected] = []
    began = time.monotonic()
    scene.user("submit", "study.yaml", *ONE_EACH, *division)
    while kinds and len(injected) < PER_STUDY:
        if scene.job_in("RUNNING", "PENDING") is None:
            scene.wait_until_idle()
            scene.user("submit", str(scene.results))
            outcome.rounds += 1
        scene.start_again()
        wait_for_a_moment(scene, chance)
        if injected and scene.job_in("RUNNING", "PENDING") is None:
            break
        name = kinds.pop(0)
        states = Counter(state for state, _ in (scene.jobs() or {}).values())
        jobs = ", ".join(f"{count} {state.lower()}" for state, count in states.items())
        injected.append(
            Injected(
                number, name, round(time.monotonic() - began, 1), scene.done(), jobs
            )
        )
        print(f"  {name}: {injected[-1].done} runs done, jobs {jobs}", flush=True)
        FAULTS[name](scene, chance)
    outcome.rounds += scene.finish()
    outcome.seconds = round(time.monotonic() - began, 1)
    outcome.failed_rows = sum(row["status"] != "completed" for row in scene.rows())
    outcome.faults = [fault.kind for fault in injected]
    outcome.refusals = scene.refusals
    outcome.wrong = [
        *scene.wrong,
        *differences(scene, base, what),
        *scene.left_processes(),
    ]
    return outcome, injected


def wait_for_a_moment(scene: Scene, chance: random.Random) -> None:
    """Wait for a moment by chance, or, as often, until a run has ended and others train."""
    if chance.random() < 0.5:
        done, end = scene.done(), time.monotonic() + RUN_S
        while (
            scene.done() == done
            and time.monotonic() < end
            and scene.job_in("RUNNING", "PENDING")
        ):
            time.sleep(0.2)
        time.sleep(chance.uniform(0, 2))
    else:
        time.sleep(chance.uniform(0, PAUSE_S))


def differences(scene: Scene, base: Scene, what: str) -> list[str]:
    """Return how the completed runs differ from those of the undisturbed study."""
    found = []
    made = completed(scene.rows())
    wanted = {row["run_id"]: row for row in completed(base.rows())}
    counts = Counter(row["run_id"] for row in made)
    found += [
        f"{name} is completed {count} times"
        for name, count in counts.items()
        if count > 1
    ]
    found += [f"{name} is missing" for name in wanted.keys() - counts.keys()]
    found += [f"{name} is not of the study" for name in counts.keys() - wanted.keys()]
    free = {*ENVIRONMENT_COLUMNS, "attempt"}
    for row in made:
        other = wanted.get(row["run_id"], row)
        names = (
            DECIDED
            if what == "real processes"
            else [name for name in row if name not in free]
        )
        for name in names:
            if row[name] != other[name]:
                found.append(
                    f"{row['run_id']}: {name} is {row[name]}, undisturbed {other[name]}"
                )
    epochs = Counter((row["run_id"], row["attempt"]) for row in scene.rows("epochs"))
    expected = {(row["run_id"], row["attempt"]): int(row["epochs"]) for row in made}
    found += [
        f"{key}: {epochs[key]} of {count} epochs"
        for key, count in expected.items()
        if epochs[key] != count
    ]
    return found


def kinds_for(chance: random.Random, count: int, only: Sequence[str]) -> list[str]:
    """Return `count` kinds of faults: each as often as the others, in an order by chance."""
    known = [name for name in FAULTS if not only or any(word in name for word in only)]
    drawn = [known[index % len(known)] for index in range(count)]
    chance.shuffle(drawn)
    return drawn


def study_after_study(
    cluster: Slurm, disk: Path, output: Path, chance: random.Random, kinds: list[str]
) -> tuple[list[Injected], list[Outcome]]:
    """Inject faults of `kinds` into one study after another; keep what became of them in `output`."""
    injected: list[Injected] = []
    outcomes: list[Outcome] = []
    bases = {
        what: undisturbed(cluster, disk, what, study) for what, study in STUDIES.items()
    }
    while kinds:
        number = len(outcomes) + 1
        what = "virtual workers" if number % 4 == 0 else "real processes"
        print(f"study {number}, {what}", flush=True)
        outcome, hit = disturbed(
            cluster, disk, number, chance, kinds, bases[what], what
        )
        outcomes.append(outcome)
        injected += hit
        append(output / "studies.jsonl", outcome)
        for fault in hit:
            append(output / "faults.jsonl", fault)
        print(
            f"  {outcome.seconds} s, {outcome.rounds} further submissions, {outcome.failed_rows} failed rows"
        )
        print(f"  {outcome.wrong or 'good'} {outcome.refusals}", flush=True)
        folder = disk / f"study-{number}"
        if outcome.wrong:
            shutil.copytree(folder, output / folder.name, symlinks=True)
        shutil.rmtree(folder, ignore_errors=True)
    return injected, outcomes


def on_one_disk(output: Path) -> None:
    """Start this program again in a mount namespace of its own, where OUTPUT/disk is a small file system."""
    disk = output / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    script = f'mount -t tmpfs -o {DISK} tmpfs "$0" && exec "$@"'
    os.environ[MOUNTED] = str(disk)
    os.execvp(
        "unshare",
        [
            "unshare",
            "--mount",
            "sh",
            "-c",
            script,
            str(disk),
            sys.executable,
            *sys.argv,
        ],
    )


def append(path: Path, result: Injected | Outcome) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def tables(injected: Sequence[Injected], outcomes: Sequence[Outcome]) -> str:
    """Return the faults by kind in Markdown: in how many studies all was well."""
    good = {outcome.study for outcome in outcomes if not outcome.wrong}
    lines = [
        "| fault | injected | into studies with the undisturbed rows, none twice |",
        "|---|---:|---:|",
    ]
    for kind in FAULTS:
        studies = [fault.study for fault in injected if fault.kind == kind]
        lines.append(
            f"| {kind} | {len(studies)} | {sum(study in good for study in studies)} |"
        )
    rounds = sum(outcome.rounds for outcome in outcomes)
    lines.append(
        f"\n{len(injected)} faults in {len(outcomes)} studies, {rounds} further submissions"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        metavar="NAME",
        help="faults whose names contain one of these",
    )
    arguments = parser.parse_args()
    output = arguments.output.resolve()
    if MOUNTED not in os.environ:
        on_one_disk(output)
    for signum in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # ignored where a shell runs it in the background
        signal.signal(signum, lambda number, frame: sys.exit(128 + number))
    disk = Path(os.environ[MOUNTED])
    with tempfile.TemporaryDirectory(
        prefix="faults-hosts-", ignore_cleanup_errors=True
    ) as name:
        Path(name).chmod(0o755)
        hosts = Hosts(Path(name), 3)
        try:
            chance = random.Random(arguments.seed)
            kinds = kinds_for(chance, arguments.faults, arguments.only)
            injected, outcomes = study_after_study(
                Slurm(hosts), disk, output, chance, kinds
            )
        finally:
            shutil.copytree(disk, output / "kept", symlinks=True, dirs_exist_ok=True)
            hosts.close()
    print(tables(injected, outcomes))


if __name__ == "__main__":
    main()
