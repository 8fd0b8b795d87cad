"""`scalebench submit` and `status`, with clients of Slurm that keep what they were called with."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from scalebench.batch.submission import read_submission
from tests.batch.conftest import SITE, facts_of, make, scalebench, submitted
from tests.conftest import needs_mpi
from tests.facts import together

pytestmark = needs_mpi
RESULTS = Path("results/mine")


def test_a_study_is_submitted_largest_first_with_a_collection_that_depends_on_all(
    clients, place, capsys
):
    made = submitted()
    assert [job.job for job in made.jobs] == ["11", "12", "13"]
    assert [job.shards for job in made.jobs] == [[1], [2], []]
    assert [shard.nodes for shard in made.shards] == [2, 1]
    said = capsys.readouterr().out
    assert together(said, "job 11", "shard 1", "4 workers", "native", "2 nodes")
    assert clients.calls("sbatch")[-1].split()[2:] == [
        "--dependency=afterany:11:12",
        "results/mine/jobs/collect.sh",
    ]
    text = (RESULTS / "jobs" / "shard-1.sh").read_text()
    assert "scalebench run results/mine --shard 1 &" in text
    assert "#SBATCH --time=01:00:00" in text
    assert (RESULTS / "runs.csv").read_text().count("\n") == 1, (
        "the study is there, and nothing of it is done"
    )


def test_an_array_has_a_task_for_each_repetition_and_a_limit(clients, place):
    made = submitted("--array", "--limit", "1", "--no-collect")
    assert [(job.shards, job.array) for job in made.jobs] == [
        ([1, 2], True),
        ([3, 4], True),
    ]
    assert "#SBATCH --array=3-4%1" in (RESULTS / "jobs" / "array-3.sh").read_text()
    assert len(clients.calls("sbatch")) == 2


def test_dry_run_prints_the_scripts_and_writes_nothing(clients, place, capsys):
    assert scalebench("submit", "study.yaml", "--dry-run", "--time", "01:00:00") == 0
    out, err = capsys.readouterr()
    assert [line for line in out.splitlines() if line.startswith("# ")] == [
        "# results/mine/jobs/shard-1.sh: shard 1 (4 workers, native, 2 nodes)",
        "# results/mine/jobs/shard-2.sh: shard 2 (1, 2 workers, native, 1 node)",
        "# results/mine/jobs/collect.sh: collects them when they have ended",
    ]
    assert "note: time limits of 3.17 node-hours in all" in err.splitlines()
    assert not Path("results").exists()
    assert clients.calls("sbatch") == []


def test_records_decide_and_the_scheduler_explains_by_one_query_in_a_while(
    clients, place, capsys
):
    submitted()
    clients.answer("11|RUNNING|2026-11-26T08:00:00|None", "12|PENDING|N/A|Resources")
    make(1, count=1)
    capsys.readouterr()
    for _ in range(3):
        assert scalebench("status", "results/mine", "--json") == 0
        shards = facts_of(capsys.readouterr().out)
        assert (shards[1]["state"], shards[1]["done"], shards[1]["why"]) == (
            "running",
            1,
            "since 2026-11-26T08:00:00",
        )
        assert (shards[2]["state"], shards[2]["why"]) == ("pending", "Resources")
    (query,) = clients.calls("squeue")
    assert "--jobs=11,12" in query
    make(1)
    make(2)
    assert scalebench("status", "results/mine", "--watch") == 0
    assert "8 of 8 runs done" in capsys.readouterr().out
    assert len(clients.calls("squeue")) == 1, "rows say it already"


def test_an_old_answer_of_the_scheduler_is_asked_for_again(clients, place, capsys):
    submitted()
    assert scalebench("status", "results/mine") == 0
    kept = RESULTS / "jobs" / "queue.json"
    content = json.loads(kept.read_text())
    for asked_at in (time.time() - 100, time.time() + 1000):
        kept.write_text(json.dumps(content | {"asked_at": asked_at}))
        scalebench("status", "results/mine")
    kept.write_text("{")
    scalebench("status", "results/mine")
    assert len(clients.calls("squeue")) == 4


def test_a_job_that_ended_without_runs_is_explained_by_the_last_line_that_it_printed(
    clients, place, capsys
):
    submitted("--array")
    clients.answer(
        "11_1|FAILED|N/A|NonZeroExitCode", "11_2|FAILED|N/A|JobLaunchFailure"
    )
    jobs = RESULTS / "jobs"
    (jobs / "mine-array-1.11_1.txt").write_text("x" * 9000 + "\napptainer: gone\n\n")
    (jobs / "mine-array-1.11_12.txt").write_text("of another task")
    capsys.readouterr()
    scalebench("status", "results/mine", "--json")
    first, second, *_ = facts_of(capsys.readouterr().out).values()
    assert (first["state"], first["why"]) == ("stopped", "FAILED: apptainer: gone")
    assert second["why"] == (
        "FAILED: it printed nothing; its nodes have to see and write results/mine/jobs"
    )


@pytest.mark.parametrize(
    ("answer", "state", "why"),
    [
        ("11|TIMEOUT|2026-11-26T08:00:00|TimeLimit", "stopped", "TIMEOUT"),
        ("", "stopped", "its job has ended"),
        ("11|CANCELLED|N/A|None", "stopped", "CANCELLED"),
    ],
)
def test_a_shard_whose_job_ended_with_runs_left_is_stopped(
    clients, place, capsys, answer, state, why
):
    submitted()
    clients.answer(answer)
    make(1, count=1)
    capsys.readouterr()
    scalebench("status", "results/mine", "--json")
    shard = facts_of(capsys.readouterr().out)[1]
    assert (shard["state"], shard["why"]) == (state, why)


def test_while_the_controller_is_down_nothing_is_submitted_again(
    clients, place, capsys
):
    submitted()
    clients.write(
        "squeue",
        "echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1",
    )
    capsys.readouterr()
    assert scalebench("status", "results/mine", "--json") == 0
    assert facts_of(capsys.readouterr().out)[1]["state"] == "unknown"
    assert scalebench("submit", "results/mine") == 2
    assert "Unable to contact slurm controller" in capsys.readouterr().err
    assert len(clients.calls("sbatch")) == 3


def test_tasks_of_an_array_have_states_of_their_own(clients, place, capsys):
    submitted("--array")
    clients.answer(
        "11_1|RUNNING|2026-11-26T08:00:00|None",
        "11_[2%1]|PENDING|N/A|JobArrayTaskLimit",
    )
    make(3)
    capsys.readouterr()
    scalebench("status", "results/mine", "--json")
    shards = facts_of(capsys.readouterr().out)
    assert {number: shard["state"] for number, shard in shards.items()} == {
        1: "running", 2: "pending", 3: "done", 4: "stopped",
    }  # fmt: skip


@pytest.mark.parametrize(
    "words", [("retry", "results/mine", "--submit"), ("submit", "results/mine")]
)
def test_what_failed_and_what_never_began_is_submitted_again(
    clients, place, capsys, words
):
    submitted()
    make(1, status="failed", count=1)
    assert scalebench("status", "results/mine") == 0
    printed = capsys.readouterr().out
    assert together(printed, "failed", "rank 1", "signal 9")
    assert "scalebench submit results/mine" in printed
    assert scalebench(*words) == 0
    said = capsys.readouterr().out
    assert together(said, "again", "1 run", "failed", "7 without")
    assert [job.shards for job in read_submission(RESULTS).jobs[-3:]] == [[1], [2], []]
    make(2)
    clients.answer("14|PENDING|N/A|Resources")
    assert scalebench(*words) == 0
    assert "every shard is done or queued" in capsys.readouterr().out
    clients.answer()
    make(1, count=1)
    assert scalebench(*words) == 0
    assert together(capsys.readouterr().out, "again", "0 runs", "failed", "1 without")
    assert [job.shards for job in read_submission(RESULTS).jobs[-2:]] == [[1], []], (
        "of shard 2 nothing is left"
    )


def test_shards_in_the_queue_are_not_submitted_again_and_edited_scripts_are_kept(
    clients, place, capsys
):
    submitted()
    clients.answer("11|PENDING|N/A|Resources")
    edited = RESULTS / "jobs" / "shard-2.sh"
    edited.write_text("#!/bin/bash\n# mine\n")
    assert scalebench("submit", "results/mine") == 0
    assert [job.shards for job in read_submission(RESULTS).jobs] == [
        [1],
        [2],
        [],
        [2],
        [],
    ]
    assert edited.read_text() == "#!/bin/bash\n# mine\n"
    assert "--dependency=afterany:14:11" in clients.calls("sbatch")[-1]
    assert scalebench("submit", "study.yaml", "--time", "01:00:00") == 0, (
        "the same study: as with its folder"
    )


def test_another_time_limit_is_that_of_the_jobs_submitted_again_and_of_those_after_them(
    clients, place, capsys
):
    submitted()
    script = RESULTS / "jobs" / "shard-1.sh"
    script.write_text(script.read_text() + "# edited\n")
    again = ("submit", "results/mine", "--shard", "1")
    assert scalebench(*again, "--time", "02:00:00") == 0
    assert "--time=02:00:00" in script.read_text()
    assert "# edited" in (RESULTS / "jobs" / "shard-1.sh.old").read_text()
    assert "--time=01:00:00" in (RESULTS / "jobs" / "shard-2.sh").read_text()
    assert [shard.limit_s for shard in read_submission(RESULTS).shards] == [7200, 3600]
    script.unlink()
    assert scalebench(*again) == 0
    assert "--time=02:00:00" in script.read_text()


def test_named_facts_of_the_site_and_the_launcher_replace_those_in_the_scripts(
    clients, place, monkeypatch
):
    monkeypatch.setenv("SCALEBENCH_LAUNCHER", "local")
    submitted()
    script = RESULTS / "jobs" / "shard-1.sh"
    assert "export SCALEBENCH_LAUNCHER=local" in script.read_text()
    (place / "site.yaml").write_text(SITE + "account: second\nlauncher: mpirun\n")
    again = ("submit", "results/mine", "--shard", "1")
    assert scalebench(*again) == 0
    assert "second" not in script.read_text()
    assert scalebench(*again, "--site", "site.yaml", "--launcher", "srun") == 0
    assert "--account=second" in script.read_text()
    assert "export SCALEBENCH_LAUNCHER=srun" in script.read_text(), "of the command"


def test_a_study_is_submitted_again_from_where_it_was_submitted_first(
    clients, place, monkeypatch
):
    submitted()
    (place / "mine.yaml").write_text(SITE + "account: second\n")
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    again = ("submit", "../results/mine", "--shard", "1", "--site", "../mine.yaml")
    assert scalebench(*again) == 0
    assert Path.cwd() == place
    assert clients.calls("sbatch")[-2].endswith(" results/mine/jobs/shard-1.sh")
    text = (RESULTS / "jobs" / "shard-1.sh").read_text()
    assert "--account=second" in text
    assert "scalebench run results/mine --shard 1" in text


def test_options_that_would_divide_a_submitted_study_anew_are_refused(
    clients, place, capsys
):
    submitted()
    for words in (("--group", "all"), ("--nodes", "1"), ("--set", "lr=1")):
        capsys.readouterr()
        assert scalebench("submit", "results/mine", *words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert together(line, f"{words[0]}: the jobs of a submitted study keep")


def test_a_changed_study_of_a_name_that_was_submitted_has_a_folder_of_its_own(
    clients, place, capsys
):
    submitted()
    changed = ("submit", "study.yaml", "--time", "01:00:00", "--lr", "0.5")
    assert scalebench(*changed) == 2
    assert "use --new, --name or --output" in capsys.readouterr().err
    assert scalebench(*changed, "--new") == 0
    assert [job.job for job in read_submission(Path("results/mine-2")).jobs] == [
        "14", "15", "16",
    ]  # fmt: skip


def test_of_two_commands_at_a_time_the_second_sees_the_jobs_of_the_first(
    clients, place
):
    submitted()
    clients.write(
        "sbatch",
        'sleep 0.5; n=$(($(cat N) + 1)); echo $n > N; echo "sbatch $*" >> calls; echo $n',
    )
    clients.write(
        "squeue",
        'for job in 14 15; do [ $job -gt $(cat N) ] || echo "$job|PENDING|N/A|Resources"; done',
    )
    both = [
        subprocess.Popen(
            ["scalebench", "submit", "results/mine"], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    printed = "".join(process.communicate()[0] for process in both)
    assert "nothing to submit" in printed
    assert [job.job for job in read_submission(RESULTS).jobs] == [
        "11",
        "12",
        "13",
        "14",
        "15",
        "16",
    ]


def test_a_refused_job_is_one_line_and_those_before_it_are_known(
    clients, place, capsys
):
    clients.write(
        "sbatch",
        '[ -e N ] && { echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }; echo 11 | tee N',
    )
    assert scalebench("submit", "study.yaml", "--time", "01:00:00") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert together(
        line, "sbatch", "results/mine/jobs/shard-2.sh", "QOSMaxSubmitJobPerUserLimit"
    )
    assert line.endswith(
        "submit the study again with --site site.yaml; 1 job of it taken: "
        "scalebench submit results/mine submits the others, later too"
    )
    assert [job.shards for job in read_submission(RESULTS).jobs] == [[1]]


def test_a_study_of_which_no_job_was_taken_is_divided_as_asked_the_next_time(
    clients, place, capsys
):
    taken = (clients.folder / "sbatch").read_text()
    clients.write("sbatch", "echo 'sbatch: error: Invalid account' >&2; exit 1")
    assert scalebench("submit", "study.yaml", "--time", "01:00:00") == 2
    (clients.folder / "sbatch").write_text(taken)
    again = ("submit", "study.yaml", "--time", "02:00:00", "--group", "all")
    assert scalebench(*again) == 0
    made = read_submission(RESULTS)
    assert [job.shards for job in made.jobs] == [[1], []]
    assert [shard.workers for shard in made.shards] == [[1, 2, 4]]
    text = (RESULTS / "jobs" / "shard-1.sh").read_text()
    assert "#SBATCH --time=02:00:00" in text
    assert scalebench("submit", "study.yaml", "--group", "nodes") == 2
    assert "was submitted with other runs, on other nodes" in capsys.readouterr().err


def test_more_repetitions_and_worker_counts_of_a_submitted_study_are_shards_of_their_own(
    clients, place, capsys
):
    before = submitted()
    make(1)
    more = ("submit", "study.yaml", "--time", "01:00:00", "--repetitions", "3")
    assert scalebench(*more, "--dry-run") == 0
    assert read_submission(RESULTS) == before
    assert "--shard 4" in capsys.readouterr().out
    assert scalebench(*more) == 0
    made = read_submission(RESULTS)
    assert made.shards[:2] == before.shards
    assert [len(shard.run_ids) for shard in made.shards] == [2, 6, 1, 3]
    assert all("-r2-" in name for each in made.shards[2:] for name in each.run_ids)
    assert [job.shards for job in made.jobs[3:]] == [[3], [4], []]
    make(2)
    make(3)
    make(4)
    assert scalebench("collect", "results/mine") == 0
    assert scalebench(*more) == 0
    assert "every shard is done" in capsys.readouterr().out
    capsys.readouterr()
    assert scalebench(*more[:-1], "2") == 2, "jobs could not tell their runs any more"
    assert scalebench(*more[:-1], "4", "--tasks-per-node", "4") == 2
    assert capsys.readouterr().err.count("was submitted with other runs, on other") == 2


def test_a_scheduler_that_cannot_be_reached_is_not_for_site_yaml_to_mend(
    clients, place, capsys
):
    clients.write(
        "sbatch",
        "echo 'sbatch: error: Batch job submission failed: "
        "Unable to contact slurm controller (connect failure)' >&2; exit 1",
    )
    assert scalebench("submit", "study.yaml", "--time", "01:00:00") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "could not reach its scheduler" in line
    assert line.endswith("submit the study again once it answers")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("submit", "results/none", "--shard", "1"),
            "--shard: expected the folder of a submitted study",
        ),
        (("retry", "results/none", "--submit"), "holds no submitted study"),
        (("submit", "."), "holds no submitted study"),
        (
            ("submit", "study.yaml", "--limit", "2"),
            "--limit bounds the tasks of an array",
        ),
        (
            ("submit", "study.yaml", "--time", "soon"),
            "expected a time such as 02:30:00",
        ),
        (
            ("submit", "study.yaml", "--workers", "64"),
            "a job has at most 2 nodes of 2 workers, and 64 workers do not",
        ),
        (("submit", "study.yaml", "--site", "none.yaml"), "cannot read the site file"),
        (("submit", "study.yaml", "--set", "tune={over: {lr: [0.1]}}"), "tune"),
        (("run", "study.yaml", "--shard", "1"), "holds no submitted study"),
        (("run", "--shard", "1"), "--shard: expected the folder of a submitted study"),
        (("collect", "results/none"), "holds no submitted study"),
    ],
)
def test_bad_requests_are_one_line(clients, place, capsys, words, said):
    assert scalebench(*words) == 2
    (line,) = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("scalebench: error:")
    ]
    assert said in line


@pytest.mark.parametrize(
    ("text", "said"), [("{", "not JSON"), ("{}", "is missing"), ("[]", "expected")]
)
def test_a_damaged_record_of_the_submission_is_one_line(
    clients, place, capsys, text, said
):
    submitted()
    (RESULTS / "jobs" / "submission.json").write_text(text)
    assert scalebench("status", "results/mine") == 2
    assert said in capsys.readouterr().err


def test_no_scheduler_here_is_one_line(place, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert scalebench("submit", "study.yaml") == 2
    assert "scheduler slurm: no sbatch on PATH" in capsys.readouterr().err
