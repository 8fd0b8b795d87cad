"""Faults of processes, hosts, links, disks, memory, limits and clocks, injected into studies.

    python benchmarks/faults.py OUTPUT [--only NAME ...] [--rounds 1] [--patience 20]

Places: this host; three hosts of a hostfile; three nodes of a Slurm cluster
(tests/hosts/machines.py; as root, and Slurm's where its programs are). Each fault of
`fault_table.py` hits one run of a study while its workers train, real processes or
virtual workers, or it is there before the command. Then

- the run, or the command, has to end within 60 s, by a row or a last line that names what `expected` says: rank, host
  and cause;
- no process of the study may be left on any host 20 s after the command;
- the same command, without the fault, has to complete all runs of the study, and keep those that were completed.

A study takes several faults, one after another, each in a launch of its own; one of
virtual workers takes one. Silence is waited for with `--patience`. Faults are appended
to OUTPUT/faults.jsonl, and what is there is not repeated; the table of all is printed
in Markdown. Without Horovod its faults are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from fault_scene import (
    LIMIT_S,
    ByName,
    Fault,
    Group,
    InJob,
    Place,
    Result,
    Scene,
    seconds_until,
    until,
)
from fault_table import GROUPS

from scalebench.comm import engines
from tests.hosts import slurm
from tests.hosts.conftest import reached_by_name
from tests.hosts.machines import Hosts, why_not
from tests.hosts.slurm import Slurm

ORPHANS_S, BEGIN_S, END_S = 20.0, 150.0, 240.0


def hit(scene: Scene, fault: Fault) -> Result:
    """Inject one fault into the next run, or before it, and look at its end."""
    result = Result(
        scene.group.place,
        scene.group.strategy,
        scene.group.engine,
        fault.name,
        None,
        "",
        named=False,
    )
    done = len(scene.rows())
    if fault.before or fault.afterwards:
        if fault.afterwards and len(scene.completed()) < scene.group.repetitions:
            scene.start()
            until(lambda: not scene.alive(), END_S)
            done = len(scene.rows())
        taken = fault.inject(scene)
        scene.start()
        result.ended_s = seconds_until(lambda: not scene.alive(), END_S)
    else:
        virtual = scene.group.engine == "virtual"
        if not virtual:
            (scene.folder / "hold").touch()
        if not scene.alive():
            scene.hit = scene.launch()  # of a command that was killed it is there still
            scene.start()
        if (
            not until(lambda: scene.training(done) or not scene.alive(), BEGIN_S)
            or not scene.alive()
        ):
            result.said = f"no run began: {scene.printed()[-300:]}"
            return result
        done = len(scene.rows())
        scene.hit = scene.launch()
        injected = time.monotonic()
        taken = fault.inject(scene)
        is_last = fault is scene.group.faults[-1]
        by_row = not (fault.ends or virtual or (fault.completes and is_last))
        injecting = time.monotonic() - injected
        waited = seconds_until(
            lambda: not scene.alive() or (by_row and len(scene.rows()) > done), END_S
        )
        result.ended_s = None if waited is None else injecting + waited
    if taken is not None:
        taken()
    if scene.rows() and scene.rows()[-1]["status"] in (
        "completed",
        "diverged",
    ):  # the launch goes on
        scene.hit = None
    (scene.folder / "busy").unlink(missing_ok=True)
    (scene.folder / "hold").unlink(missing_ok=True)
    judge(result, scene, fault, done)
    if not scene.alive():
        result.orphans = left_processes(scene)
    scene.prefix, scene.options, scene.variables = (), (), {}
    return result


def judge(result: Result, scene: Scene, fault: Fault, done: int) -> None:
    """Look for the `expected` text, in the row of the run or in the output of the command, after `done` rows."""
    rows, printed = scene.rows(), scene.printed()
    if fault.completes or scene.group.engine == "virtual":
        errors = "; ".join(row["error"] for row in rows[done:] if row["error"])
        found = (
            re.search(f"[^;:]*({fault.expected})", f"{errors} {printed}")
            if fault.expected
            else None
        )
        result.said = found[0].strip() if found else printed[-300:]
        result.named = (
            found is not None or not fault.expected
        ) and "Traceback" not in printed
        if fault.completes:
            result.named = (
                result.named and bool(rows) and rows[-1]["status"] == "completed"
            )
    elif fault.ends:
        result.said = printed[-300:]
        result.named = len(rows) == done and "Traceback" not in printed
    else:
        result.said = rows[-1]["error"] if len(rows) > done else printed[-300:]
        result.named = bool(re.search(fault.expected, result.said))


def left_processes(scene: Scene) -> list[str]:
    """The processes of the study that are there long after the command."""
    deadline = time.monotonic() + ORPHANS_S
    while (
        left := scene.place.processes(scene.folder / "results")
    ) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def run_group(
    group: Group, place: Place, folder: Path, patience: float
) -> Iterator[Result]:
    folder.mkdir(parents=True)
    scene = Scene(group, place, folder, patience)
    scene.write_study()
    results = []
    for fault in group.faults:
        results.append(hit(scene, fault))
        print(
            f"  {fault.name}: {results[-1].ended_s} s, {results[-1].said}", flush=True
        )
    (scene.folder / "hold").unlink(missing_ok=True)
    if not until(lambda: not scene.alive(), END_S) and scene.process is not None:
        scene.process.kill()
    left, completed = left_processes(scene), scene.completed()
    scene.start()
    resumed = until(lambda: not scene.alive(), END_S)
    rows = {row["run_id"]: row["status"] for row in scene.rows()}
    resumed = (
        resumed
        and len(rows) == group.repetitions
        and set(rows.values()) == {"completed"}
    )
    resumed = resumed and completed <= scene.completed()
    if not resumed:
        print(
            f"  did not go on: {len(rows)} of {group.repetitions} runs; {scene.printed()[-300:]}",
            flush=True,
        )
    for result in results:
        result.orphans, result.resumed = result.orphans or left, resumed
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
        good = sum(
            result.named and (result.ended_s or 1e9) <= LIMIT_S for result in each
        )
        longest = max(result.ended_s or float("inf") for result in each)
        clean, resumed = (
            sum(not result.orphans for result in each),
            sum(bool(result.resumed) for result in each),
        )
        how = ", ".join(
            dict.fromkeys(f"{result.strategy}/{result.engine}" for result in each)
        )
        lines.append(
            f"| {place} | {fault} ({how}) | {len(each)} | {good} | {longest:.1f} s | {clean} | {resumed} |"
        )
    return "\n".join(lines)


def with_faults(group: Group, only: Sequence[str]) -> Group | None:
    """Return `group` with the faults whose names, or its own, contain one of `only`; None without any."""
    if not only or any(name in group.name for name in only):
        return group
    faults = tuple(
        fault for fault in group.faults if any(name in fault.name for name in only)
    )
    return replace(group, faults=faults) if faults else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        metavar="NAME",
        help="groups or faults whose names contain one of these",
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--patience", type=float, default=20.0)
    arguments = parser.parse_args()
    for signum in (
        signal.SIGINT,
        signal.SIGHUP,
    ):  # ignored, and by its children, where a shell runs it behind nohup
        signal.signal(signum, lambda number, frame: sys.exit(128 + number))
    arguments.output.mkdir(parents=True, exist_ok=True)
    log = arguments.output.resolve() / "faults.jsonl"
    results = (
        [Result(**json.loads(line)) for line in log.read_text().splitlines()]
        if log.exists()
        else []
    )
    groups = [
        chosen
        for group in GROUPS
        if (chosen := with_faults(group, arguments.only)) is not None
    ]
    groups = [
        group
        for group in groups
        if group.engine == "virtual" or engines.available(group.engine) is None
    ]
    with tempfile.TemporaryDirectory(
        prefix="faults-hosts-", ignore_cleanup_errors=True
    ) as folder:
        Path(folder).chmod(0o755)
        with places(Path(folder) / "hosts", {group.place for group in groups}) as there:
            for number in range(arguments.rounds):
                for group in groups:
                    target = arguments.output.resolve() / f"{group.name}-{number}"
                    if group.place not in there or target.exists():
                        continue
                    print(group.name, flush=True)
                    for result in run_group(
                        group, there[group.place], target, arguments.patience
                    ):
                        results.append(result)
                        with log.open("a") as file:
                            file.write(json.dumps(asdict(result)) + "\n")
    print(
        f"{len({(each.place, each.strategy, each.engine, each.fault) for each in results})} faults"
    )
    print(table(results))
    for result in results:
        if not result.good:
            print(f"not as it should be: {asdict(result)}")


if __name__ == "__main__":
    main()
