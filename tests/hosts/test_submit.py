"""Studies submitted by `scalebench submit` to a real Slurm on three nodes, watched and collected."""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.facts import together
from tests.hosts.machines import until
from tests.hosts.studies import SCALEBENCH, study

PAGE = Path(__file__).parents[2] / "docs" / "login-node.md"
COMMANDS = re.compile(r"(<!-- not run[^>]*-->\n)?```sh\n(.*?)```", re.DOTALL)
ONE_EACH = ["--tasks-per-node", "1", "--time", "00:10:00"]  # a worker on each node
WATCHED = """
import time
from pathlib import Path
import torch

class Model(torch.nn.Linear):
    batches = 0

    def forward(self, x):
        if self.training and Path(__file__).with_name("hold").exists():
            time.sleep(0.1)
        self.batches += self.training
        if self.batches > 20 and Path(__file__).with_name("broken").exists():  # the command tries a few
            raise RuntimeError("broken")
        return super().forward(x)

def build(input_shape, outputs):
    return Model(input_shape[0], outputs)
"""


@pytest.fixture
def site(cluster, tmp_path):
    """A user's folder on the login node; return the function that runs a command there."""
    (tmp_path / "site.yaml").write_text("partition: p\n")

    def call(*words, codes=(0,)):
        command = ["bash", "-c", '"$@"; echo "exit $?"', "-", *words]
        printed = cluster.hosts.login.call(
            command, cwd=tmp_path, env=cluster.environment, timeout=1000
        )
        body, _, code = printed.rstrip().rpartition("exit ")
        assert int(code) in codes, printed
        return body

    return call


def write_study(folder, name, *strategies, workers="1, 2, 3", **values):
    text = study(3, *strategies, **values).replace(
        "workers: [3]", f"workers: [{workers}]"
    )
    text = text.replace("nodes\n", f"{name}\n")
    (folder / "study.yaml").write_text(text)
    return folder / "results" / name


def rows(results, table="runs"):
    with (results / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def jobs_of(results):
    return json.loads((results / "jobs" / "submission.json").read_text())["jobs"]


def output_of(results):
    return "\n".join(
        path.read_text() for path in sorted((results / "jobs").glob("*.txt"))
    )


def set_limit(cluster, job, minutes):
    cluster.hosts.login.call(
        ["scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}"],
        env=cluster.environment,
    )


def start_again(cluster, job):
    """Begin a job that is queued again in 2 s: nodes refuse what starts in the second in which the job ended there."""
    cluster.hosts.login.call(
        ["scontrol", "update", f"JobId={job}", "StartTime=now+2seconds"],
        env=cluster.environment,
    )


def made_by_shard(results, number):
    """Return the number of rows that the job of a shard has written so far."""
    table = results / "shards" / str(number) / results.name / "runs.csv"
    return max(0, table.read_text().count("\n") - 1) if table.exists() else 0


def test_every_command_of_the_page_runs_on_a_login_node(cluster, site, tmp_path):
    (tmp_path / "site.yaml").unlink()  # written by the page
    results = write_study(
        tmp_path, "scaling", "serial", "allreduce", workers="1, 3", repetitions=2
    )
    commands = [
        line
        for skipped, block in COMMANDS.findall(PAGE.read_text())
        for line in block.splitlines()
        if not skipped
    ]
    assert len(commands) >= 7
    for command in commands:
        wanted = (
            f"{command} {' '.join(ONE_EACH)}"
            if "submit study.yaml" in command
            else command
        )
        site("bash", "-c", wanted)
    made = rows(results)
    assert Counter((row["strategy"], row["workers"], row["nodes"]) for row in made) == {
        ("serial", "1", "1"): 2, ("allreduce", "1", "1"): 2, ("allreduce", "3", "3"): 2,
    }, output_of(results)  # fmt: skip
    assert {row["status"] for row in made} == {"completed"}
    assert sorted(int(row["run_order"]) for row in made) == list(range(6)), (
        "as if it had run in one piece"
    )
    assert len({row["scheduler_job_id"] for row in made}) == 2
    assert len(rows(results, "epochs")) == 12
    first, *_, collection = jobs_of(results)
    assert "NumNodes=3" in cluster.shown(int(first["job"]))
    assert cluster.wait(int(collection["job"])) == "COMPLETED"
    assert list(tmp_path.rglob("strong-scaling*.png"))
    assert "partition: p" in (tmp_path / "site.yaml").read_text()


@pytest.mark.thorough
def test_an_array_cancelled_in_the_middle_ends_with_the_rows_of_an_undisturbed_study(
    cluster, site, tmp_path
):
    results = write_study(tmp_path, "cancelled", "allreduce", repetitions=2, epochs=150)
    site(
        SCALEBENCH,
        "submit",
        "study.yaml",
        *ONE_EACH,
        "--array",
        "--limit",
        "1",
        "--no-collect",
    )
    arrays = jobs_of(results)
    assert [job["shards"] for job in arrays] == [[1, 2], [3, 4], [5, 6]]
    state = json.loads(site(SCALEBENCH, "status", str(results), "--json"))["shards"]
    assert [shard["job"] for shard in state[:2]] == [
        f"{arrays[0]['job']}_1",
        f"{arrays[0]['job']}_2",
    ]
    until(
        lambda: any(made_by_shard(results, number) for number in range(1, 7)),
        "a run is done",
    )
    for job in arrays:
        cluster.hosts.login.call(["scancel", job["job"]], env=cluster.environment)
    until(lambda: cluster._idle() == 3, "all nodes are free")
    until(
        lambda: not list(results.glob("shards/*/cancelled/lock")),
        "all commands have ended",
    )
    assert site(SCALEBENCH, "collect", str(results), codes=(3,)).count(
        "1 run left"
    ) == sum(not made_by_shard(results, number) for number in range(1, 7))
    printed = site(SCALEBENCH, "status", str(results), "--poll", "1")
    assert "CANCELLED" in printed or "its job has ended" in printed
    site(SCALEBENCH, "submit", str(results))
    collection = jobs_of(results)[-1]
    assert cluster.wait(int(collection["job"])) == "COMPLETED", output_of(results)
    made = rows(results)
    assert Counter(row["workers"] for row in made) == {"1": 2, "2": 2, "3": 2}
    assert len({row["run_id"] for row in made}) == len(made) == 6, "none twice"
    assert len(rows(results, "epochs")) == 6 * 150


@pytest.mark.thorough
def test_jobs_that_were_cancelled_in_the_queue_are_submitted_by_a_retry(
    cluster, site, tmp_path
):
    """One run failed, two never began."""
    (tmp_path / "model.py").write_text(WATCHED)
    results = write_study(
        tmp_path, "queued", "allreduce", model="model.py:build", epochs=40
    )
    site(SCALEBENCH, "submit", "study.yaml", *ONE_EACH, "--no-collect")
    (tmp_path / "broken").touch()
    three, two, one = (int(job["job"]) for job in jobs_of(results))
    cluster.hosts.login.call(["scancel", str(two), str(one)], env=cluster.environment)
    cluster.wait(three)
    assert [row["status"] for row in rows(results / "shards" / "1" / "queued")] == [
        "failed"
    ], output_of(results)
    (tmp_path / "broken").unlink()
    assert together(
        site(SCALEBENCH, "retry", str(results), "--submit"),
        "again",
        "1 run",
        "failed",
        "2 without",
    )
    assert cluster.wait(int(jobs_of(results)[-1]["job"])) == "COMPLETED", output_of(
        results
    )
    made = [row for row in rows(results) if row["status"] == "completed"]
    assert Counter(row["workers"] for row in made) == {"1": 1, "2": 1, "3": 1}


@pytest.mark.thorough
def test_a_job_that_nears_its_limit_goes_back_into_the_queue_with_what_is_left(
    cluster, site, tmp_path
):
    """Slurm warns it at once, as the limit is nearer than the margin; the test has it start again soon."""
    results = write_study(tmp_path, "warned", "allreduce", repetitions=6, epochs=60)
    site(SCALEBENCH, "submit", "study.yaml", *ONE_EACH, "--group", "all")
    first, _ = jobs_of(results)
    job = int(first["job"])
    until(lambda: made_by_shard(results, 1) > 0, "a run is done")
    set_limit(cluster, job, 2)
    until(lambda: "Restarts=1" in cluster.shown(job), "the job is queued again")
    until(
        lambda: cluster.state(job) == "PENDING",
        "the first start has ended on all nodes",
    )
    done = made_by_shard(results, 1)
    assert 0 < done < 18
    set_limit(cluster, job, 10)
    start_again(cluster, job)
    assert cluster.wait(job) == "COMPLETED", output_of(results)
    # Slurm begins the collection at the end of the first start, or not: then it has
    # submitted another one.
    until(
        lambda: cluster.state(int(jobs_of(results)[-1]["job"])) == "COMPLETED",
        "the last collection is done",
    )
    made = rows(results)
    assert len({row["run_id"] for row in made}) == len(made) == 18, "none twice"
    assert {row["status"] for row in made} == {"completed"}


@pytest.mark.thorough
def test_a_job_that_slurm_ends_at_its_limit_is_submitted_again(cluster, site, tmp_path):
    """The run under way does not end before the limit, as its steps take time while the file `hold` is there."""
    (tmp_path / "model.py").write_text(WATCHED)
    values = {
        "name": "ended",
        "repetitions": 2,
        "epochs": 300,
        "model": "model.py:build",
    }
    (tmp_path / "study.yaml").write_text(study(1, "allreduce", **values))
    results = tmp_path / "results" / "ended"
    site(SCALEBENCH, "submit", "study.yaml", *ONE_EACH, "--no-collect")
    (first,) = jobs_of(results)
    job = int(first["job"])
    until(lambda: made_by_shard(results, 1) == 1, "the first run is done")
    (tmp_path / "hold").touch()
    set_limit(cluster, job, 1)
    assert cluster.wait(job) == "TIMEOUT", output_of(results)
    (tmp_path / "hold").unlink()
    until(lambda: cluster._idle() == 3, "all nodes are free")
    (shard,) = json.loads(
        site(SCALEBENCH, "status", str(results), "--json", "--poll", "1")
    )["shards"]
    assert (shard["state"], shard["done"]) == ("stopped", 1), shard
    site(SCALEBENCH, "submit", str(results))
    assert cluster.wait(int(jobs_of(results)[-1]["job"])) == "COMPLETED", output_of(
        results
    )
    site(SCALEBENCH, "collect", str(results))
    made = rows(results)
    assert len({row["run_id"] for row in made}) == len(made) == 2, "none twice"
    assert {row["status"] for row in made} == {"completed"}


@pytest.mark.thorough
def test_a_full_disk_of_all_nodes_ends_a_job_and_room_lets_it_go_on(
    cluster, site, disk
):
    (disk / "site.yaml").write_text("partition: p\n")
    (disk / "study.yaml").write_text(
        study(1, "allreduce", name="full", repetitions=4, epochs=300)
    )
    results = disk / "results" / "full"

    def there(*words):
        return site("bash", "-c", 'cd "$0" && "$@"', str(disk), SCALEBENCH, *words)

    there("submit", "study.yaml", *ONE_EACH, "--no-collect")
    (first,) = jobs_of(results)
    until(lambda: made_by_shard(results, 1) > 0, "a run is done")
    free = os.statvfs(disk)
    with (disk / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, free.f_bavail * free.f_bsize)
    assert cluster.wait(int(first["job"])) == "FAILED", output_of(results)
    assert 0 < made_by_shard(results, 1) < 4
    (disk / "filler").unlink()
    there("retry", str(results), "--submit")  # what failed, and what never began
    cluster.wait(int(jobs_of(results)[-1]["job"]))
    made = [row for row in rows(results) if row["status"] == "completed"]
    assert len({row["run_id"] for row in made}) == len(made) == 4, output_of(results)
    kept = Counter((row["run_id"], row["attempt"]) for row in rows(results, "epochs"))
    assert all(kept[row["run_id"], row["attempt"]] == 300 for row in made), (
        "no epoch is torn or there twice"
    )


@pytest.mark.thorough
def test_a_job_whose_node_is_lost_goes_on_with_the_lock_that_was_left_there(
    cluster, site, tmp_path
):
    text = study(1, "allreduce", name="lost", repetitions=5, epochs=300)
    (tmp_path / "study.yaml").write_text(text)
    results = tmp_path / "results" / "lost"
    site(SCALEBENCH, "submit", "study.yaml", *ONE_EACH)
    job = int(jobs_of(results)[0]["job"])
    until(lambda: made_by_shard(results, 1) > 0, "a run is done")
    name = re.search(r" NodeList=(n\d)", cluster.shown(job))[1]
    node = next(each for each in cluster.hosts.nodes if each.name == name)
    cluster.lose(node)
    try:
        left = json.loads((results / "shards" / "1" / "lost" / "lock").read_text())
        assert (left["host"], left["job"], left["restarts"]) == (name, str(job), 0)
        until(lambda: "Restarts=1" in cluster.shown(job), "the job is queued again")
        start_again(cluster, job)
        assert cluster.wait(job) == "COMPLETED", output_of(results)
        assert f" NodeList={name}" not in cluster.shown(job)
    finally:
        cluster.bring_back(node)
        until(lambda: cluster._idle() == 3, "all nodes are free")
    site(SCALEBENCH, "collect", str(results))
    made = rows(results)
    assert len({row["run_id"] for row in made}) == len(made) == 5, "none twice"
    assert {row["status"] for row in made} == {"completed"}
    assert len(rows(results, "epochs")) == 5 * 300


@pytest.mark.thorough
def test_a_controller_that_is_killed_costs_no_run_and_submits_none_twice(
    cluster, site, tmp_path
):
    results = write_study(tmp_path, "restarted", "allreduce", repetitions=3, epochs=150)
    site(SCALEBENCH, "submit", "study.yaml", *ONE_EACH)
    until(lambda: made_by_shard(results, 1) > 0, "a run is done")
    cluster.stop_controller()
    try:
        standing = json.loads(
            site(SCALEBENCH, "status", str(results), "--json", "--poll", "1")
        )
        assert {shard["state"] for shard in standing["shards"]} <= {"unknown", "done"}
        site(SCALEBENCH, "submit", str(results), codes=(2,))
    finally:
        cluster.start_controller()
    first, second, third, collection = jobs_of(results)
    assert cluster.wait(int(collection["job"])) == "COMPLETED", output_of(results)
    made = rows(results)
    assert len({row["run_id"] for row in made}) == len(made) == 9, "none twice"
    assert {row["scheduler_job_id"] for row in made} == {
        job["job"] for job in (first, second, third)
    }
