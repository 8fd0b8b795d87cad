"""One command at a time writes a study."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from scalebench.errors import ResultsError
from scalebench.records.lock import FILE, folder_lock, owner_of


@pytest.fixture
def write_lock(tmp_path):
    def write(**changes):
        owner = {
            "host": platform.node(),
            "pid": os.getpid(),
            "born": "long ago",
            "since_utc": "2026-01-01T03:00:00",
        }
        (tmp_path / FILE).write_text(json.dumps({**owner, **changes}))

    return write


def test_the_owner_is_named_and_the_lock_is_gone_afterwards(tmp_path):
    folder = tmp_path / "study"
    with folder_lock(folder):
        owner = owner_of(folder)
        assert owner is not None
        assert (owner.host, owner.pid) == (platform.node(), os.getpid())
        expected = re.escape(
            f"being written by process {os.getpid()} on {platform.node()}"
        )
        with pytest.raises(ResultsError, match=expected), folder_lock(folder):
            pass
    assert owner_of(folder) is None
    assert not (folder / FILE).exists()
    with folder_lock(folder):
        pass


def test_a_process_that_was_killed_leaves_a_lock_that_is_taken_over(tmp_path):
    program = (
        "import os, signal, sys, pathlib\n"
        "from scalebench.records.lock import folder_lock\n"
        "with folder_lock(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert (tmp_path / FILE).exists()
    assert owner_of(tmp_path) is None
    with folder_lock(tmp_path):
        pass


def test_a_later_process_with_the_same_number_does_not_hold_it(tmp_path, write_lock):
    write_lock(pid=os.getpid(), born="before this process began")
    with folder_lock(tmp_path):
        pass


def test_the_owner_counts_where_the_file_system_has_no_locks(
    tmp_path, write_lock, monkeypatch
):
    with folder_lock(tmp_path):
        held = json.loads((tmp_path / FILE).read_text())
    write_lock(**held)

    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(ResultsError, match="being written by"), folder_lock(tmp_path):
        pass


def test_of_another_host_nothing_is_known_and_the_way_out_is_said(tmp_path, write_lock):
    write_lock(host="node7", pid=1)
    with (
        pytest.raises(
            ResultsError,
            match=r"process 1 on node7.*if that command has ended, delete .*/lock",
        ),
        folder_lock(tmp_path),
    ):
        pass
    assert owner_of(tmp_path) is not None
    assert (tmp_path / FILE).exists()


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Slurm whose squeue does what is given, outside of a job."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)

    def does(body):
        (tmp_path / "squeue").write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "squeue").chmod(0o755)

    return does


@pytest.mark.parametrize(
    ("body", "may_live"),
    [
        ("echo RUNNING", True),
        ("echo COMPLETING", True),
        ("echo NODE_FAIL", False),
        ("echo CANCELLED", False),
        ("echo PENDING", False),  # queued again
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", False),
        (
            "echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1",
            True,
        ),
    ],
)
def test_a_lock_of_a_job_elsewhere_is_taken_over_once_slurm_says_that_it_ended(
    tmp_path, write_lock, squeue, body, may_live
):
    write_lock(host="node7", pid=1, job="17", restarts=0)
    squeue(body)
    assert (owner_of(tmp_path) is not None) == may_live
    if may_live:
        with (
            pytest.raises(ResultsError, match=r"process 1 on node7 in job 17"),
            folder_lock(tmp_path),
        ):
            pass
    else:
        with folder_lock(tmp_path):
            pass


def test_a_job_that_is_started_again_takes_over_the_lock_of_its_first_start(
    tmp_path, write_lock, squeue, monkeypatch
):
    squeue("echo RUNNING")
    write_lock(host="node7", pid=1, job="17", restarts=0)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert owner_of(tmp_path) is not None, (
        "another command in the same start of the job"
    )
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with folder_lock(tmp_path):
        held = json.loads((tmp_path / FILE).read_text())
    assert (held["job"], held["restarts"]) == ("17", 1)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"host": 1}', "\x00\xff"])
def test_a_torn_lock_holds_nobody(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with folder_lock(tmp_path):
        pass


def test_of_many_that_want_it_at_once_one_gets_it(tmp_path):
    inside, most = [], []

    def want(_):
        for _ in range(50):
            try:
                with folder_lock(tmp_path):
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()
                return True
            except ResultsError:
                continue
        return False

    with ThreadPoolExecutor(8) as threads:
        assert any(threads.map(want, range(8)))
    assert set(most) == {1}


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    taken = tmp_path / "taken"
    taken.touch()
    with (
        pytest.raises(ResultsError, match=r"cannot write .*taken.*--output"),
        folder_lock(taken),
    ):
        pass
