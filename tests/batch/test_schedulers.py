"""The contract of all schedulers: scripts, submission, identifiers, states; and a body that ends in time.

The scripts in `scripts/` are what each scheduler gets. `SCALEBENCH_TEST_GOLDEN=write`
writes them again.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from scalebench.batch.job import (
    BatchJob,
    JobState,
    Partition,
    SchedulerError,
    ask,
    call,
    script,
    submit,
)
from scalebench.batch.schedulers import SCHEDULERS, scheduler_for
from scalebench.batch.schedulers.slurm import Slurm
from scalebench.batch.site import Site
from tests.facts import naming
from tests.hosts.machines import until

SCRIPTS = Path(__file__).with_name("scripts")
SITE = Site(
    account="proj",
    partition="fast",
    modules=["gcc", "openmpi"],
    launcher="mpirun",
    options=["--exclusive"],
)
JOB = BatchJob(
    name="mine-shard-1",
    command="scalebench run results/mine --shard {number}",
    folder="results/mine/jobs",
    nodes=2,
    tasks_per_node=64,
    limit_s=5400,
    goes_on=True,
    again="scalebench submit results/mine --shard {number}",
    site=SITE,
    path="$HOME/venv/bin",
)


def as_one_shard(job):
    return replace(
        job,
        command=job.command.replace("{number}", "1"),
        again=job.again.replace("{number}", "1"),
    )


def cases():
    return {
        "job": as_one_shard(JOB),
        "array": replace(JOB, name="mine-array-2", tasks=(2, 3, 4), at_once=2, gpus_per_node=4, cpus_per_task=2),
        "collect": BatchJob("mine-collect", "scalebench collect results/mine", "results/mine/jobs", site=Site(
            container="apptainer exec scalebench.sif", setup=["source site.sh"])),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["job", "array", "collect"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_script_is_the_golden_one_and_valid_shell(name, kind):
    text = script(SCHEDULERS[name], cases()[kind])
    path = SCRIPTS / f"{name}-{kind}.sh"
    if os.environ.get("SCALEBENCH_TEST_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(("status", "requeued"), [(0, False), (3, False), (138, True)])
def test_body_passes_the_signal_on_and_goes_on_only_with_runs_left(
    tmp_path, name, status, requeued
):
    """The study waits for the signal; what each scheduler does to go on is a command, or its own matter by the code."""
    scheduler = SCHEDULERS[name]
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "again $*" >> said\n')
    (tmp_path / "scalebench").write_text(
        '#!/bin/bash\n[ "$1" = submit ] && { echo "again $*" >> said; exit 0; }\n'
        f"trap 'echo warned >> said; exit {status}' USR1\necho \"$*\" >> said\n"
        "for _ in {1..600}; do sleep 0.1; done\n"
    )
    for program in ("scontrol", "scalebench"):
        (tmp_path / program).chmod(0o755)
    text = script(scheduler, as_one_shard(JOB)).replace("module load gcc openmpi", ":")
    short = text.replace(
        f"sleep {JOB.limit_s - JOB.warned_s}", "until [ -e said ]; do sleep 0.1; done"
    )
    assert (short != text) is (not scheduler.warns)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "HOME": str(tmp_path),
    }
    job = subprocess.Popen(["bash", "-c", short], cwd=tmp_path, env=environment)
    if scheduler.warns:
        until((tmp_path / "said").exists, "the study runs")
        job.send_signal(10)  # SIGUSR1, to the script alone
    assert job.wait() == status
    said = (tmp_path / "said").read_text().splitlines()
    assert said[:2] == ["run results/mine --shard 1", "warned"]
    by_itself = name == "lsf"  # -Q 138
    assert any(line.startswith("again") for line in said) is (
        requeued and not by_itself
    )


@pytest.mark.parametrize(
    ("name", "printed", "job", "task"),
    [
        ("slurm", "17\n", "17", "17_3"),
        ("slurm", "warning: soon\n17;cluster\n", "17", "17_3"),
        ("pbs", "17.server\n", "17.server", "17.server"),
        ("pbs", "17[].server\n", "17[].server", "17[3].server"),
        ("lsf", "Job <17> is submitted to queue <normal>.\n", "17", "17[3]"),
    ],
)
def test_jobs_and_tasks_have_the_schedulers_own_names(name, printed, job, task):
    scheduler = SCHEDULERS[name]
    assert scheduler.job_id(printed) == job
    assert scheduler.task_id(job, 3) == task
    assert scheduler.job_id("") == ""


@pytest.mark.parametrize(
    ("name", "task", "end"),
    [
        ("slurm", "17_3", ".17_3.txt"),
        ("pbs", "17[3].server", "17[3].server.OU"),
        ("lsf", "17", ".17.txt"),
        ("lsf", "17[3]", ".17_3.txt"),
    ],
)
def test_what_a_job_printed_is_found_by_its_identifier(name, task, end):
    assert SCHEDULERS[name].output_name(task) == end


PBS = """{"Jobs": {
 "17.s": {"job_state": "Q", "comment": "Not Running: Insufficient amount of resource: ncpus"},
 "18[].s": {"job_state": "B"},
 "18[1].s": {"job_state": "R", "stime": "Thu Nov 26 08:00:00 2026"},
 "19.s": {"job_state": "F", "Exit_status": 271},
 "20.s": {"job_state": "F", "Exit_status": 0}}}"""
LSF = """\
17|0|PEND|-|Job dependency condition not satisfied;
18|1|RUN|Nov 26 08:00|-
18|2|PEND|-|The job array has reached its job slot limit;
19|0|EXIT|Nov 26 08:00|-
"""
SLURM = """\
17|PENDING|N/A|Resources
18_1|RUNNING|2026-11-26T08:00:00|None
18_[2-3,5%2]|PENDING|N/A|JobArrayTaskLimit
19|TIMEOUT|2026-11-26T08:00:00|TimeLimit
20|COMPLETED|2026-11-26T08:00:00|None
"""


@pytest.mark.parametrize(
    ("name", "printed", "kinds"),
    [
        ("slurm", SLURM, {"17": "pending", "18_1": "running", "18_2": "pending", "18_3": "pending", "18_5": "pending",
                          "19": "ended", "20": "ended"}),
        ("pbs", PBS, {"17.s": "pending", "18[].s": "running", "18[1].s": "running", "19.s": "ended", "20.s": "ended"}),
        ("lsf", LSF, {"17": "pending", "18[1]": "running", "18[2]": "pending", "19": "ended"}),
    ],
)  # fmt: skip
def test_states_of_jobs_and_of_tasks_of_arrays_are_read(name, printed, kinds):
    states = SCHEDULERS[name].states(printed)
    assert {job: state.kind for job, state in states.items()} == kinds
    assert all(state.reason for state in states.values() if state.kind == "pending")
    assert SCHEDULERS[name].states("nonsense\n\n") == {}
    assert len(SCHEDULERS[name].query(["17", "18"])) < 12, "one query for all"


def test_states_say_since_when_and_why():
    states = Slurm().states(SLURM)
    assert states["18_1"] == JobState("running", since="2026-11-26T08:00:00")
    assert states["17"] == JobState("pending", reason="Resources")
    assert states["19"].reason == "TIMEOUT"


def test_dependent_jobs_wait_for_the_end_of_all_others(tmp_path):
    (tmp_path / "x.sh").write_text("#!/bin/bash\n#BSUB -n 1\n")
    script = str(tmp_path / "x.sh")
    assert (
        SCHEDULERS["slurm"].submission(script, ["1", "2"])[0][2]
        == "--dependency=afterany:1:2"
    )
    assert SCHEDULERS["pbs"].submission(script, ["1.s", "2[].s"])[0] == [
        "qsub",
        "-W",
        "depend=afterany:1.s:2[].s",
        script,
    ]
    assert SCHEDULERS["lsf"].submission(script, ["1", "2"]) == (
        ["bsub", "-w", "ended(1) && ended(2)"],
        "#!/bin/bash\n#BSUB -n 1\n",
    )


def test_a_refused_job_is_refused_in_the_schedulers_own_words(clients):
    clients.write(
        "sbatch", 'echo "sbatch: error: invalid partition specified: fast" >&2; exit 1'
    )
    with pytest.raises(
        SchedulerError,
        match=naming("sbatch", "x.sh", "invalid partition specified: fast"),
    ):
        submit(Slurm(), "x.sh")


def test_a_scheduler_that_does_not_answer_is_given_up(clients, monkeypatch):
    clients.write("squeue", "exec sleep 20")
    monkeypatch.setitem(call.__kwdefaults__, "limit_s", 0.5)
    with pytest.raises(SchedulerError, match=r"squeue did not answer within 0\.5 s"):
        ask(Slurm(), ["1"])


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=list(SCHEDULERS))
def test_a_failed_query_says_nothing_of_the_jobs_unless_they_are_forgotten(
    clients, scheduler
):
    client = scheduler.query(["17"])[0]
    clients.write(client, "echo cannot reach the controller >&2; exit 1")
    with pytest.raises(
        SchedulerError,
        match=f"{client} failed: cannot reach the controller; try again later",
    ):
        ask(scheduler, ["17"])
    clients.write(client, f'echo "error: 17 {scheduler.forgotten}" >&2; exit 1')
    assert ask(scheduler, ["17"]) == {}


def test_no_scheduler_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SchedulerError,
        match=r"no scheduler here: none of sbatch, qsub, bsub is on PATH",
    ):
        scheduler_for(None)
    with pytest.raises(SchedulerError, match="scheduler pbs: no qsub on PATH"):
        scheduler_for("pbs")
    assert scheduler_for("pbs", submits=False).name == "pbs"


def test_partition_is_read_and_an_unknown_one_refused(clients):
    found = Slurm().partition(None)
    assert found is not None
    assert (found.name, found.nodes, found.cores_per_node, found.max_time_s) == (
        "p",
        3,
        2,
        86400,
    )
    with pytest.raises(SchedulerError, match="no partition 'q'; known: p"):
        Slurm().partition("q")


def test_of_several_partitions_the_most_nodes_and_the_shortest_limit_count(clients):
    clients.write(
        "sinfo",
        'printf "%s\\n" "fast*|2|64|gpu:4|1:00:00" "long|1|48|(null)|2-00:00:00" "long|3|128|gpu:a100:8|2-00:00:00"',
    )
    found = Slurm().partition("fast,long")
    assert found == Partition("fast,long", 4, 48, 0, 3600)
    assert Slurm().partition(None) == Partition("fast", 2, 64, 4, 3600)
    with pytest.raises(SchedulerError, match="no partition 'slow'; known: fast, long"):
        Slurm().partition("fast,slow")
