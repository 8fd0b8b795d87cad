"""The meaning of each signal inside the program; tests/faults sends them to whole commands."""

from __future__ import annotations

import io
import os
import signal
import time

import pytest

from scalebench.system.interruption import AbandonedError, Interruption


@pytest.fixture
def said(monkeypatch):
    monkeypatch.setattr("scalebench.system.interruption._ECHO_S", 0.0)
    # a shell's background jobs ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield []
    signal.signal(signal.SIGINT, before)


def send(signum):
    os.kill(os.getpid(), signum)
    time.sleep(0.001)


def send_all(*signals):
    """Send `signals` and wait for the end of a grace, which may come amid them on a busy machine."""
    for signum in signals:
        send(signum)
    time.sleep(60)


def wait_if(asked):
    if asked:
        time.sleep(60)


def test_nothing_under_way_is_left_at_once(said):
    with Interruption(say=said.append) as interruption:
        assert not interruption.asked()
        with pytest.raises(AbandonedError):
            send(signal.SIGTERM)
        assert interruption.signum == signal.SIGTERM
    assert said == []


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_asks_and_the_next_ctrl_c_abandons(said, first):
    with Interruption(say=said.append) as interruption, interruption.runs_under_way():
        send(first)
        assert interruption.signum == first
        assert interruption.asked()
        assert len(said) == 1
        assert "any run that has begun" in said[0], (
            "there may be none: ranks are starting"
        )
        with pytest.raises(AbandonedError):
            send(signal.SIGINT)
        assert interruption.signum == first


def test_sigterm_is_patient_for_its_grace(said):
    began = time.monotonic()
    timer = signal.getitimer(signal.ITIMER_REAL)
    with (
        Interruption(grace_s=0.2, say=said.append) as interruption,
        interruption.runs_under_way(),
    ):
        send(signal.SIGUSR1)
        with pytest.raises(AbandonedError):
            send_all(signal.SIGTERM, signal.SIGTERM)
        assert time.monotonic() - began >= 0.2
    again, passed = signal.getitimer(signal.ITIMER_REAL), time.monotonic() - began
    assert again[1] == timer[1]
    assert max(0.0, timer[0] - passed) - 0.01 <= again[0] <= timer[0]


def test_a_row_is_written_whole_before_its_run_is_abandoned(said):
    written = []

    def write_a_row():
        with (
            Interruption(say=said.append) as interruption,
            interruption.runs_under_way(),
            interruption.shielded(),
        ):
            send(signal.SIGINT)
            send(signal.SIGINT)
            written.append("row")

    with pytest.raises(AbandonedError):
        write_a_row()
    assert written == ["row"]


def test_abandoning_happens_once_so_that_nothing_disturbs_the_cleaning_up(said):
    with (
        Interruption(grace_s=0.05, say=said.append) as interruption,
        interruption.runs_under_way(),
    ):
        with pytest.raises(AbandonedError):
            send_all(signal.SIGTERM, signal.SIGINT)
        time.sleep(0.1)  # the grace is over too


def test_an_echo_of_the_signal_is_not_a_second_one(said, monkeypatch):
    monkeypatch.setattr("scalebench.system.interruption._ECHO_S", 10.0)
    with Interruption(say=said.append) as interruption, interruption.runs_under_way():
        for _ in range(5):
            send(signal.SIGINT)
        assert len(said) == 1


def test_the_signals_are_given_back_and_what_was_ignored_stays_ignored(said):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = signal.getsignal(signal.SIGTERM)
    with Interruption(say=said.append) as interruption:
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) != before
        assert not interruption.asked()
    assert signal.getsignal(signal.SIGTERM) is before


def test_end_of_the_shell_of_a_batch_job_is_a_sigterm(said, monkeypatch):
    with (
        Interruption(grace_s=0.2, say=said.append, in_job=True) as interruption,
        interruption.runs_under_way(),
    ):
        assert not interruption.asked()
        monkeypatch.setattr("scalebench.system.interruption.os.getppid", lambda: 1)
        with pytest.raises(AbandonedError):
            wait_if(interruption.asked())
        assert interruption.signum == signal.SIGTERM
        assert said == ["stopping: the job of the scheduler is ending"]


def test_end_of_the_parent_outside_of_a_job_ends_nothing(said, monkeypatch):
    with Interruption(say=said.append) as interruption:
        monkeypatch.setattr("scalebench.system.interruption.os.getppid", lambda: 1)
        assert not interruption.asked()


def test_message_in_a_terminal_takes_the_line_of_the_bar(monkeypatch, capfd):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with Interruption() as interruption, interruption.runs_under_way():
        send(signal.SIGUSR1)
    assert capfd.readouterr().err.startswith("\r\x1b[2Kstopping (SIGUSR1)")
