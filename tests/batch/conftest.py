"""Clients of a scheduler that keep what they were called with, and a study that is submitted to them."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from scalebench.batch.shards import folder_of
from scalebench.batch.submission import (
    Submission,
    read_submission,
)
from scalebench.cli.main import main
from scalebench.records.store import Store
from tests.records_factory import epoch_row, run_row

STUDY = """\
name: mine
dataset: wine
model: {mlp: {hidden: [4]}}
workers: [1, 2, 4]
strategies: [serial, allreduce]
epochs: 1
repetitions: 2
execution: native
engine: gloo
"""
SITE = "scheduler: slurm\ncores_per_node: 2\nnodes: 2\n"


class Clients:
    """sbatch, squeue and sinfo on PATH; `answer` is what squeue prints, `calls` what each was called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write(
            "sbatch",
            'n=$(($(cat N 2>/dev/null || echo 10) + 1)); echo $n > N; echo "sbatch $*" >> calls; echo $n',
        )
        self.write("squeue", 'echo "squeue $*" >> calls; cat answer 2>/dev/null')
        self.write("sinfo", 'echo "p*|3|2|(null)|1-00:00:00"')

    def write(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\ncd {self.folder}\n{body}\n")
        path.chmod(0o755)

    def answer(self, *lines: str) -> None:
        (self.folder / "answer").write_text("".join(f"{line}\n" for line in lines))

    def calls(self, name: str) -> list[str]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(f"{name} ")]


@pytest.fixture
def clients(monkeypatch, tmp_path_factory) -> Clients:
    made = Clients(tmp_path_factory.mktemp("clients"))
    monkeypatch.setenv(
        "PATH", f"{made.folder}:{Path(sys.executable).parent}:/usr/bin:/bin"
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(made.folder))
    return made


@pytest.fixture
def place(clients, tmp_path, monkeypatch) -> Path:
    """A folder with a study and the facts of a site, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text(STUDY)
    (tmp_path / "site.yaml").write_text(SITE)
    return tmp_path


def scalebench(*words: str) -> int:
    """Run a command in this process; return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def submitted(*options: str) -> Submission:
    """Submit the study of `place`."""
    assert scalebench("submit", "study.yaml", "--time", "01:00:00", *options) == 0
    return read_submission(Path("results/mine"))


def facts_of(printed: str) -> dict[int, dict[str, object]]:
    """Return the shards of `status --json` by number."""
    return {shard["shard"]: shard for shard in json.loads(printed)["shards"]}


def make(
    number: int,
    *,
    status: str = "completed",
    count: int | None = None,
    root: Path = Path("results/mine"),
) -> None:
    """Write the records that the job of a shard would have left: rows of its first `count` runs."""
    submission = read_submission(root)
    place = folder_of(root, number)
    place.mkdir(parents=True, exist_ok=True)
    shutil.copy(root / "study.yaml", place)
    error = None if status == "completed" else "rank 1 was ended by signal 9"
    with Store(place, fsync=False) as store:
        for order, run_id in enumerate(submission.shard(number).run_ids[:count]):
            attempt = store.next_attempt(run_id)
            started = f"2026-11-26T08:{number:02d}:{order:02d}.{attempt:03d}+00:00"
            facts = {
                "run_id": run_id,
                "attempt": attempt,
                "status": status,
                "error": error,
                "started_utc": started,
            }
            row = run_row(
                study="mine",
                execution="native",
                engine="gloo",
                run_order=order,
                epochs=1,
                **facts,
            )
            store.append(row, [epoch_row(run_id=run_id, attempt=attempt)])
        store.keep_provenance({"host_hash": f"node{number}"})
