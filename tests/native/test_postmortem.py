"""The failure found in the files of a launch."""

from __future__ import annotations

import errno
import re
from functools import partial

import pytest

from scalebench.cluster.mesh import Mesh
from scalebench.native import postmortem
from scalebench.native.job_files import Death
from scalebench.native.postmortem import telling_line

cause_of_death = partial(postmortem.cause_of_death, launcher="mpirun")
SLOTS = """--------------------------------------------------------------------------
There are not enough slots available in the system to satisfy the 64
slots that were requested by the application:

  python

Either request fewer procs for your application, or make more slots
available for use.
--------------------------------------------------------------------------
"""
TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1\nImportError: no such thing\nmpirun: ended\n'


def test_death_of_a_daemon_that_mpirun_reports_by_its_code_names_the_hosts(tmp_path):
    (tmp_path / "stderr.txt").write_text("Killed\n")
    assert re.search(
        r"signal 9.* n0, n1\b", cause_of_death(tmp_path, 137, ["n0", "n1", "n1"]).error
    )
    assert re.match(r"mpirun .*code 137: Killed", cause_of_death(tmp_path, 137).error)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            SLOTS,
            "There are not enough slots available in the system to satisfy the 64 slots that were requested by the "
            "application; see",
        ),
        (TRACE, "ImportError: no such thing; see"),
        ("word " * 400, "word ...; see"),
    ],
)
def test_mpirun_is_quoted_by_an_exception_or_its_first_paragraph(said, told, tmp_path):
    (tmp_path / "stderr.txt").write_text(said)
    death = cause_of_death(tmp_path, 1)
    assert death.status == "failed"
    assert re.match(r"mpirun .*code 1: ", death.error)
    assert told in death.error
    assert len(death.error.partition("; see")[0]) < 340


LOST = [
    """------------------------------------------------------------
A daemon failed to report back after being spawned. This could
be due to several factors, including inability to find the
daemon executable.

  Local host:    n0
  Remote host:   n2
  Daemon exit status: 137
------------------------------------------------------------
""",
    """--------------------------------------------------------------------------
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-n0-84@0,0] on node n0
  Remote daemon: [prterun-n0-84@0,2] on node n2

This is usually due to either a failure of the TCP network.
--------------------------------------------------------------------------
""",
]


@pytest.mark.parametrize("said", LOST)
def test_lost_daemon_is_named_with_host_and_ranks(said, tmp_path):
    (tmp_path / "stderr.txt").write_text(said)
    death = cause_of_death(tmp_path, 1, ["n0", "n1", "n2", "n2"])
    assert re.match(r"mpirun .*daemon on n2 with ranks 2, 3: check", death.error)


@pytest.mark.parametrize("said", LOST)
def test_daemon_that_mpirun_names_on_its_standard_output_precedes_broken_connections(
    said, tmp_path
):
    (tmp_path / "stdout.txt").write_text(said)
    (tmp_path / "stderr.txt").write_text(HUNG_UP)
    BROKEN.save(tmp_path)
    told = cause_of_death(tmp_path, 1, ["n0", "n1", "n2.cluster"]).error
    assert re.match(r"mpirun .*daemon on n2 with rank 2: check", told)


def test_killed_launcher_is_named_with_its_signal(tmp_path):
    assert re.fullmatch(
        r"mpirun .*signal 9 \(Killed.* memory\)", cause_of_death(tmp_path, -9).error
    )
    assert re.fullmatch(
        r"srun .*signal 15 \(Terminated\)",
        cause_of_death(tmp_path, -15, launcher="srun").error,
    )


@pytest.mark.parametrize("said", ["", "\n---\n\n"])
def test_launcher_that_ends_without_a_word_was_ended_by_a_signal_that_it_handles(
    said, tmp_path
):
    (tmp_path / "stderr.txt").write_text(said)
    assert re.match(
        r"mpirun .*signal 15 \(Terminated\), or by 2 or 1",
        cause_of_death(tmp_path, 1).error,
    )
    assert re.match(
        r"mpirun .*code 213: .*nothing; see", cause_of_death(tmp_path, 213).error
    )
    assert re.match(
        r"srun .*code 1: .*nothing", cause_of_death(tmp_path, 1, launcher="srun").error
    )


def test_rank_after_the_workers_is_called_a_server(tmp_path):
    (tmp_path / "stderr.txt").write_text(SIGNALLED)
    assert re.match(
        r"rank 2 \(a server\) .*signal 9",
        cause_of_death(tmp_path, 1, mesh=Mesh(2)).error,
    )
    assert re.match(
        r"rank 2 on n1 \(a server\) .*signal 9",
        cause_of_death(tmp_path, 1, HOSTS, mesh=Mesh(2)).error,
    )
    assert re.match(
        r"rank 2 was .*signal 9", cause_of_death(tmp_path, 1, mesh=Mesh(3)).error
    )


def test_rank_that_holds_a_stage_is_named_with_it(tmp_path):
    (tmp_path / "stderr.txt").write_text(SIGNALLED)
    stages, replicas = Mesh(pipeline=2, tensor=2), Mesh(data=2, pipeline=2)
    assert re.match(
        r"rank 2 \(stage 1\) was .*signal 9",
        cause_of_death(tmp_path, 1, mesh=stages).error,
    )
    assert re.match(
        r"rank 2 \(stage 0 of replica 1\) was",
        cause_of_death(tmp_path, 1, mesh=replicas).error,
    )


def test_ranks_that_could_not_report_are_explained_by_what_keeps_this_process_from_writing(
    tmp_path, monkeypatch
):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    assert re.match(
        r"the ranks could not write .*: No space left on device, in ",
        cause_of_death(tmp_path, 1).error,
    )


def test_reason_that_cannot_be_written_is_printed(tmp_path, capsys):
    Death("failed", "ValueError: upset", "r", 2).save(tmp_path / "gone")
    assert "rank 2: ValueError: upset (not" in capsys.readouterr().err


def test_killed_rank_is_named_with_its_host_among_several(tmp_path):
    said = "prterun noticed that process rank 4 with PID 518 on node n2 exited on\nsignal 9 (Killed).\n"
    (tmp_path / "stderr.txt").write_text(said)
    hosts = ["n0", "n0", "n1", "n1", "n2", "n2"]
    killed = "was ended by signal 9 (Killed, perhaps for want of memory)"
    assert cause_of_death(tmp_path, 1, hosts).error == f"rank 4 on n2 {killed}"
    assert cause_of_death(tmp_path, 1).error == f"rank 4 {killed}"


HOSTS = ["n0", "n1", "n1", "n2"]
SIGNALLED = "prterun noticed that process rank 2 with PID 51 on node n1 exited on\nsignal 9 (Killed).\n"
IMPROPER = "prterun has exited due to process rank 2 with PID 0 on node n1 exiting\nimproperly. There are three\n"
BROKEN = Death("failed", "RuntimeError: Connection closed by peer", "r", 0)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (SIGNALLED, "rank 2 on n1 was ended by signal 9 (Killed"),
        (IMPROPER, "rank 2 on n1 exited before reporting"),
        (LOST[0], "mpirun lost its daemon on n2 with rank 3: check that host"),
        (
            'prterun has exited due to process rank 0 with PID 0 on node n0 calling\n"abort".\n',
            "rank 0 on n0: Runtime",
        ),
    ],
)
def test_rank_killed_without_error_file_precedes_broken_connections(
    said, told, tmp_path
):
    (tmp_path / "stderr.txt").write_text(said)
    BROKEN.save(tmp_path)
    death = cause_of_death(tmp_path, 1, HOSTS)
    assert death.error.startswith(told)
    assert death.run_id == "r"


@pytest.mark.parametrize("said", [SIGNALLED, IMPROPER])
def test_error_file_explains_how_its_rank_ended(said, tmp_path):
    (tmp_path / "stderr.txt").write_text(said)
    Death("failed", "ValueError: upset", "r", 2).save(tmp_path)
    assert cause_of_death(tmp_path, 1, HOSTS).error == "rank 2 on n1: ValueError: upset"


HUNG_UP = """[n0:00000] *** An error occurred in Socket closed
An MPI communication peer process has unexpectedly disconnected.  This
usually indicates a failure in the peer process.

  Local host: n0
  Local PID:  77
  Peer host:  n1
"""


def test_broken_connection_is_named_with_both_hosts(tmp_path):
    (tmp_path / "stderr.txt").write_text(HUNG_UP)
    told = "a process on n0 lost its connection to n1, where ranks 1, 2 ran: check that host"
    assert cause_of_death(tmp_path, 14, HOSTS).error == told


def test_error_behind_the_rank_that_torch_names_is_told():
    output = "[rank0]: [rank0]: Traceback (most recent call last):\n[rank0]: [rank0]:   File ...\n"
    assert (
        telling_line(output + "[rank0]: [rank0]: ValueError: too few")
        == "ValueError: too few"
    )
