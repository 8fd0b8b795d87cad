"""Studies by real `sbatch` on three nodes."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

STUDY = """\
name: nodes
dataset: wine
model: {mlp: {hidden: [4]}}
epochs: 2
repetitions: 1
workers: [3]
execution: native
warmup_steps: 2
time_limit_s: 60
strategies: [allreduce]
"""
SCALEBENCH = Path(sys.executable).with_name("scalebench")


def script(study: str) -> str:
    return f"#!/bin/bash\ncat >study.yaml <<'YAML'\n{study}YAML\n{SCALEBENCH} run study.yaml\n"


def rows_in(folder: Path) -> list[dict[str, str]]:
    with (folder / "results" / "nodes" / "runs.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_study_on_three_nodes_of_one_task(cluster, tmp_path):
    job = cluster.sbatch(script(STUDY), tmp_path, "--nodes=3", "--ntasks-per-node=1")
    state = cluster.wait(job)
    said = (tmp_path / "job.txt").read_text()
    assert state == "COMPLETED", said
    (row,) = rows_in(tmp_path)
    assert (row["status"], row["workers"], row["nodes"], row["workers_per_node"]) == ("completed", "3", "3", "1"), said
