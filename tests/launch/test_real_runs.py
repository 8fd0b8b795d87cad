"""Real launches whose ranks die, hang, exit and diverge: every run gets an outcome, no process is left."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from scalebench.comm import engines
from scalebench.comm.launchers import mpirun
from scalebench.data.catalog import prepare
from scalebench.errors import EngineError
from scalebench.launch.hosts import reachable
from scalebench.launch.processes import environment, launch_command
from scalebench.launch.real_runs import RealRuns
from scalebench.launch.sweep import is_oversubscribed
from scalebench.launch.work import in_new_processes
from scalebench.native.heartbeat import Phase, read_heartbeats
from scalebench.study.spec import Component, Run
from scalebench.system import hardware
from tests.conftest import needs_mpi
from tests.facts import in_order

FAULTY = Path(__file__).parent / "models" / "faulty.py"


def make_run(run_id, workers=2, strategy="allreduce", engine="mpi", **changes):
    options = {
        "study": "test",
        "run_id": run_id,
        "config_hash": run_id,
        "execution": "native",
        "engine": engine,
        "strategy": Component(name=strategy),
        "workers": workers,
        "repetition": 0,
        "seed": 3,
        "epochs": 2,
        "dataset": Component(name="wine"),
        "model": Component(name="mlp", options={"hidden": [4]}),
        "warmup_steps": 2,
    }
    return Run(**(options | changes))


def faulty(run_id, fault, **changes):
    model = Component(
        name=f"{FAULTY}:build", options={"fault": fault, "rank": changes.pop("rank", 1)}
    )
    return make_run(run_id, model=model, epochs=6, **changes)


LIMIT_S = 1000.0  # of a run that hangs: its end comes when the rank has stopped


class Clock:
    """The launcher's clock, on which a limit is over once a rank has stopped, however slowly its run began."""

    ahead_s = 0.0
    sleep = staticmethod(time.sleep)

    def monotonic(self):
        return time.monotonic() + self.ahead_s

    def end_limit(self):
        time.sleep(5.0)  # the launcher notices the silence
        self.ahead_s += 2 * LIMIT_S


class Recorder:
    def __init__(self, runs, tmp_path, ranks=2, **options):
        self.started, self.outcomes, self.messages, self.folder = [], {}, [], tmp_path
        self.clock = Clock()
        folders = {
            workers: prepare(runs[0], workers)
            for workers in {run.workers for run in runs}
        }
        launches = RealRuns(
            folders,
            ranks=ranks,
            work_dir=tmp_path / "work",
            weights_folder=tmp_path / "weights",
            on_start=self.started_one,
            on_outcome=self.note,
            log=self.messages.append,
            **options,
        )
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("scalebench.launch.real_runs.time", self.clock)
            launches.launch(runs)

    def started_one(self, run):
        self.started.append(run.run_id)

    def note(self, run, outcome):
        assert run.run_id == outcome.run_id
        assert run.run_id not in self.outcomes, "one outcome per run"
        self.outcomes[run.run_id] = outcome


class Swept(Recorder):
    """Launches whose limit ends, whose logs are deleted or whose mpirun is killed, in runs of these names."""

    def started_one(self, run):
        super().started_one(run)
        if run.run_id == "hung":
            in_background(self.end_limit_of, heartbeats_in(self.folder))
        elif run.run_id == "purged":
            shutil.rmtree(self.folder / "work")
        elif run.run_id == "struck":
            strike_soon(self.folder, 0, signal.SIGKILL, parent=True)

    def end_limit_of(self, heartbeats):
        while read_heartbeats(heartbeats)[1].operation != "go_wrong":
            time.sleep(0.01)
        self.clock.end_limit()


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep in which five runs end their launch, each in a way of its own, and the last one leaves a thread."""
    if reason := engines.available("mpi"):
        pytest.skip(reason)
    runs = [
        make_run("before"),
        faulty("killed", "kill"),
        make_run("alone", workers=1, strategy="serial"),
        faulty("hung", "hang", time_limit_s=LIMIT_S),
        faulty("raised", "raise"),
        faulty("purged", "hang"),
        make_run("struck", epochs=10**5),
        faulty("raised alone", "raise", workers=1, rank=0),
        faulty("diverged alone", "nan", workers=1, rank=0),
        make_run("after"),
        faulty("threaded", "thread"),
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("scalebench.launch.real_runs._ENDING_LIMIT_S", 3.0)
        return Swept(runs, tmp_path_factory.mktemp("swept"))


def test_every_run_gets_an_outcome_in_order(swept):
    assert list(swept.outcomes) == swept.started
    assert len(swept.outcomes) == 11
    for run_id in ("before", "alone", "after"):
        assert swept.outcomes[run_id].status == "completed"
    # a launch for each run that took its launch down, and the end of the last one
    assert len(swept.messages) == 6


@pytest.mark.thorough
def test_ranks_that_exit_early_or_diverge_apart_end_their_launch(tmp_path):
    """Asynchronous workers learn of a loss of NaN at different moments, so that the first to do so ends the launch."""
    runs = [
        faulty("left", "leave"),
        faulty("exited", "exit"),
        faulty("diverged", "nan", strategy="epoch_async"),
        make_run("after"),
    ]
    found = Recorder(runs, tmp_path)
    for run_id, status, error in (
        ("left", "failed", "rank 1 exited before reporting"),
        ("exited", "failed", "rank 1: exited with code 0 before reporting"),
        ("diverged", "diverged", "the training loss is nan"),
    ):
        assert found.outcomes[run_id].status == status
        assert error in found.outcomes[run_id].error
    assert found.outcomes["after"].status == "completed"
    assert len(found.messages) == 3


@needs_mpi
def test_silent_run_is_ended_and_one_that_computes_goes_on(tmp_path):
    """Rank 1 computes for longer than the patience, which is a sign of life; then it sleeps."""
    runs = [faulty("computes", "compute"), faulty("silent", "hang")]
    found = Recorder(runs, tmp_path, patience_s=5)
    computes, silent = found.outcomes["computes"], found.outcomes["silent"]
    assert computes.status == "completed", computes.error
    assert silent.status == "failed"
    assert in_order(silent.error, "(patience)", "rank 1", "training", "in go_wrong")
    assert in_order(silent.error, "in go_wrong", "others waited", "allreduce")


def test_processes_that_do_not_end_after_the_last_run_are_killed(swept):
    assert swept.outcomes["threaded"].status == "completed"
    message = swept.messages[-1]
    assert in_order(message, "thread of rank 1", "does not end", "killed")
    assert not [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(swept.folder) in " ".join(p.info["cmdline"] or ())
    ]


def test_killed_mpirun_is_named(swept):
    assert swept.outcomes["struck"].status == "failed"
    assert swept.outcomes["struck"].error.startswith(
        "mpirun was ended by signal 9 (Killed, perhaps for want of memory)"
    )


@pytest.mark.thorough
@needs_mpi
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGSTOP])
def test_terminated_mpirun_is_named_and_a_stopped_one_is_killed(
    tmp_path, monkeypatch, signum
):
    """A stopped mpirun passes nothing on, and the run is made; only its end never comes."""
    monkeypatch.setattr("scalebench.launch.real_runs._ENDING_LIMIT_S", 3.0)

    class Struck(Recorder):
        def started_one(self, run):
            super().started_one(run)
            if run.run_id == "struck":
                strike_soon(tmp_path, 0, signum, parent=True)

    ended = signum == signal.SIGTERM
    found = Struck(
        [
            make_run("struck", epochs=10**5 if ended else 400),
            *[make_run("after")] * ended,
        ],
        tmp_path,
    )
    if ended:
        assert found.outcomes["struck"].status == "failed"
        assert found.outcomes["struck"].error.startswith(
            "mpirun was ended by signal 15 (Terminated)"
        )
        assert found.outcomes["after"].status == "completed"
        return
    assert found.outcomes["struck"].status == "completed"
    (message,) = found.messages
    assert in_order(message, "last run", "mpirun is stopped", "killed")


def test_deleted_logs_end_their_launch_only(swept):
    """As by a purge of old files: the run under way cannot report any more, the next one gets another folder."""
    purged = swept.outcomes["purged"]
    assert purged.status == "failed"
    assert in_order(purged.error, "launch-4", "deleted", "ranks wrote")


# Strategy, rank, signal, and the outcome: a server in CI, a client and a worker without
# server in thorough tests.
STRUCK_SERVERS = {
    "killed server": (
        "asp",
        2,
        signal.SIGKILL,
        "failed",
        r"rank 2 \(a server\) was ended by signal 9 \(Killed.*",
    ),
    "hung server": (
        "ssp",
        2,
        signal.SIGSTOP,
        "timeout",
        r"exceeded .*; rank 2 \(a server\) had stopped .* s before",
    ),
}
STRUCK_WORKERS = {
    "hung client": (
        "ssp",
        1,
        signal.SIGSTOP,
        "timeout",
        r"exceeded .*; rank 1 had stopped .* while training",
    ),
    "killed gossiper": (
        "ad_psgd",
        1,
        signal.SIGKILL,
        "failed",
        r"rank 1 was ended by signal 9 \(Killed.*",
    ),
    "killed stage": (
        "pipeline",
        1,
        signal.SIGKILL,
        "failed",
        r"rank 1 \(stage 1\) was ended by signal 9 \(Killed.*",
    ),
}
STRUCK = STRUCK_SERVERS | STRUCK_WORKERS


class Striking(Recorder):
    """Launches in which one rank gets a signal while it trains, or serves."""

    def started_one(self, run):
        super().started_one(run)
        if run.run_id in STRUCK:
            in_background(
                self.strike, heartbeats_in(self.folder), *STRUCK[run.run_id][1:4]
            )

    def strike(self, heartbeats, rank, signum, status):
        strike(heartbeats, rank, signum, parent=False)
        if status == "timeout":
            self.clock.end_limit()


def in_background(function, *arguments):
    threading.Thread(target=function, args=arguments, daemon=True).start()


def heartbeats_in(folder):
    """The heartbeats of the latest launch."""
    latest = max((folder / "work").iterdir(), key=lambda path: path.stat().st_mtime)
    return latest / "heartbeats"


def strike_soon(folder, rank, signum, parent=False):
    """Send a signal to a rank of the latest launch as soon as it trains, or to the process that started it."""
    in_background(strike, heartbeats_in(folder), rank, signum, parent)


def strike(heartbeats, rank, signum, parent):
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        beat = read_heartbeats(heartbeats)[rank]
        # a server has no batches
        if beat.phase == Phase.TRAINING and (beat.batches > 20 or beat.beats > 200):
            os.kill(psutil.Process(beat.pid).ppid() if parent else beat.pid, signum)
            return
        time.sleep(0.01)


@needs_mpi
@pytest.mark.parametrize(
    "struck",
    [STRUCK_SERVERS, pytest.param(STRUCK_WORKERS, marks=pytest.mark.thorough)],
    ids=["servers", "workers"],
)
def test_killed_or_stopped_rank_is_named_and_the_next_run_completes(tmp_path, struck):
    runs = []
    for name, (strategy, *_) in struck.items():
        runs.append(
            make_run(name, strategy=strategy, epochs=10**5, time_limit_s=LIMIT_S)
        )
    found = Striking([*runs, make_run("after", strategy="asp")], tmp_path, ranks=3)
    for name, (*_, status, error) in struck.items():
        outcome = found.outcomes[name]
        assert outcome.status == status
        assert re.fullmatch(error, outcome.error), outcome.error
    assert found.outcomes["after"].status == "completed"
    assert len(found.messages) == len(struck)


@pytest.mark.thorough
def test_background_load_is_recorded(tmp_path):
    """A stranger on every core, which shares it with a rank; the ranks' own work is none of theirs."""
    if reason := engines.available("mpi"):
        pytest.skip(reason)
    spin = [sys.executable, "-c", "while True: pass"]
    strangers = [subprocess.Popen(spin) for _ in range(hardware.cores())]
    try:
        found = Recorder([make_run("beside strangers", epochs=60)], tmp_path)
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()
    load = found.outcomes["beside strangers"].facts.others_load
    assert 0.2 < load < 0.995


@pytest.mark.parametrize(
    ("run_id", "status", "error"),
    [
        ("killed", "failed", "rank 1 was ended by signal 9 (Killed"),
        (
            "raised",
            "failed",
            "rank 1: ValueError: the third layer is upset (faulty.py:",
        ),
        (
            "raised alone",
            "failed",
            "rank 0: ValueError: the third layer is upset (faulty.py:",
        ),
        ("diverged alone", "diverged", "the training loss is nan in epoch"),
    ],
)
def test_failed_run_names_rank_and_cause(swept, run_id, status, error):
    outcome = swept.outcomes[run_id]
    assert outcome.status == status
    assert error in outcome.error
    assert "\n" not in outcome.error


@pytest.mark.thorough
def test_divergence_of_all_workers_keeps_the_launch_alive(tmp_path):
    """The model of rank 1 gives NaN, which reaches the others by averaging at the end of the epoch."""
    kinds = [
        ("allreduce", "mpi"),
        ("epoch_average", "mpi"),
        ("allreduce", "gloo"),
        ("ddp", "gloo"),
    ]
    if not engines.available("horovod"):
        kinds += [("horovod", "horovod"), ("epoch_average", "horovod")]
    runs = [
        faulty(f"{strategy} {engine}", "nan", strategy=strategy, engine=engine)
        for strategy, engine in kinds
    ]
    explosive = {
        "epochs": 1,
        "batch_per_worker": 71,
        "lr": 1e30,
        "optimizer": {"sgd": {"weight_decay": 1e30}},
    }
    ends = [
        make_run(f"end of {name}", strategy=name, **explosive)
        for name in ("asp", "epoch_async")
    ]
    last = Recorder([*runs, *ends, make_run("after")], tmp_path)
    assert last.outcomes.pop("after").status == "completed"
    for run in ends:
        outcome = last.outcomes.pop(run.run_id)
        assert outcome.status == "diverged"
        assert in_order(outcome.error, "worker", "weights are not finite", "end")
    assert len(last.outcomes) == len(kinds)
    for outcome in last.outcomes.values():
        assert outcome.status == "diverged"
        assert re.fullmatch(r"worker [01]: .*loss is nan in epoch \d", outcome.error)
        assert outcome.workers == outcome.evaluations == []
    assert last.outcomes["epoch_average mpi"].error.startswith("worker 1: ")
    assert last.messages == []  # no other launch


def test_timeout_names_the_stopped_rank_and_not_the_waiting_ones(swept):
    outcome = swept.outcomes["hung"]
    assert outcome.status == "timeout"
    assert in_order(outcome.error, "limit of 1000 s", "rank 1 had stopped", "training")
    assert "rank 0" not in outcome.error


def test_completed_run_has_all_times_and_counts(swept):
    outcome = swept.outcomes["before"]
    assert [worker.rank for worker in outcome.workers] == [0, 1]
    for worker in outcome.workers:
        parts = worker.compute_s + worker.comm_s + worker.data_s + worker.other_s
        # the clock's last reading comes a moment later
        assert parts == pytest.approx(worker.train_s, rel=0.02)
        assert 0 <= worker.wait_s <= worker.comm_s
        assert worker.wait_s == pytest.approx(
            sum(epoch.wait_s for epoch in worker.epochs)
        )
        assert (
            worker.optimizer_steps == 2 * outcome.facts.steps_per_epoch == worker.syncs
        )
        assert worker.bytes_sent == worker.syncs * 4 * outcome.facts.parameters
        assert worker.peak_rss_mib > 50
    assert (
        min(worker.wait_s for worker in outcome.workers)
        < max(worker.train_s for worker in outcome.workers) / 2
    )
    assert [evaluation.epoch for evaluation in outcome.evaluations] == [0, 1]
    assert outcome.facts.nodes == 1
    assert is_oversubscribed(make_run("before"), reachable()) is (hardware.cores() < 2)
    assert swept.outcomes["alone"].workers[0].wait_s == 0.0


@needs_mpi
def test_launch_that_never_begins_is_tried_twice(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "scalebench").mkdir()
    (tmp_path / "scalebench" / "__init__.py").write_text(
        "raise ImportError('a shadow')"
    )
    monkeypatch.chdir(tmp_path)
    recorder = Recorder([make_run("one"), make_run("two")], tmp_path)
    assert [outcome.status for outcome in recorder.outcomes.values()] == [
        "failed",
        "failed",
    ]
    for outcome in recorder.outcomes.values():
        assert in_order(outcome.error, "launch failed", "ImportError: a shadow")
        assert re.search("rank [01] exited before reporting", outcome.error)
    assert len(list((tmp_path / "work").iterdir())) == 2


def test_missing_mpirun_names_the_command_that_adds_it(tmp_path, monkeypatch):
    monkeypatch.setattr(mpirun, "find", lambda: None)
    with pytest.raises(
        EngineError, match=r'no mpirun .* pip install "scalebench\[mpi\]"'
    ):
        Recorder([make_run("one")], tmp_path)
    with pytest.raises(
        EngineError, match=r'no mpirun .* pip install "scalebench\[mpi\]"'
    ):
        launch_command(2)


def test_ranks_are_bound_while_cores_suffice(monkeypatch):
    monkeypatch.setattr(hardware, "physical_cores", lambda: 4)
    assert launch_command(4)[1] == "core"
    assert launch_command(2, threads=2)[1] == "core:2"
    # room for the thread that moves bytes
    assert launch_command(2, progress_threads=1)[1] == "core:2"
    assert launch_command(4, progress_threads=1)[1] == "core"
    command, binding = launch_command(5)
    assert (binding, command[command.index("--bind-to") + 1]) == ("none", "none")
    assert launch_command(2, bind=False)[1] == "none"


def test_shell_variables_do_not_change_a_run(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "50")
    monkeypatch.setenv("OMPI_MCA_btl", "self,sm")
    given = environment(2)
    assert given["OMP_NUM_THREADS"] == "2"
    assert "HOROVOD_CYCLE_TIME" not in given
    assert given["OMPI_MCA_btl"] == "self,sm"


@pytest.mark.parametrize(
    "sent", [pytest.param(signal.SIGINT, marks=pytest.mark.thorough), signal.SIGKILL]
)
def test_no_process_is_left_after_an_interrupted_or_killed_launcher(tmp_path, sent):
    if reason := engines.available("mpi"):
        pytest.skip(reason)
    program = tmp_path / "program.py"
    program.write_text(
        f"import signal, sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from pathlib import Path\n"
        "from tests.launch.test_real_runs import Recorder, faulty\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it\n"
        f"Recorder([faulty('hung', 'hang')], Path({str(tmp_path)!r}))\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(program)], stderr=subprocess.DEVNULL
    )
    events = tmp_path / "work" / "launch-1" / "events.jsonl"
    family: list[psutil.Process] = []
    try:
        while not (events.exists() and events.stat().st_size):
            assert process.poll() is None, "the launcher ended before its run began"
            time.sleep(0.05)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 3  # mpirun and two ranks
        os.kill(process.pid, sent)
        process.wait()
        psutil.wait_procs(family)
    finally:
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.kill()


@pytest.mark.thorough
def test_horovod_settings_get_their_own_launches(tmp_path):
    if reason := engines.available("horovod"):
        pytest.skip(reason)
    slow = Component(
        name="horovod", options={"cycle_time_ms": 20.0, "fusion_threshold_mib": 1.0}
    )
    runs = [
        make_run("plain one", workers=1, strategy="horovod", engine="horovod"),
        make_run("slow two", engine="horovod").model_copy(update={"strategy": slow}),
        make_run("plain two", strategy="horovod", engine="horovod"),
        make_run("slow again", engine="horovod").model_copy(update={"strategy": slow}),
        make_run("plain again", workers=1, strategy="horovod", engine="horovod"),
    ]
    outcomes = Recorder(runs, tmp_path).outcomes
    assert {outcome.status for outcome in outcomes.values()} == {"completed"}
    steps = outcomes["slow two"].workers[0].optimizer_steps
    # A step waits for a cycle of 20 ms, less what it had waited already when its
    # gradients were ready.
    assert outcomes["slow two"].workers[0].comm_s > 0.010 * steps
    jobs = [
        json.loads(file.read_text())
        for file in sorted((tmp_path / "work").glob("*/job.json"))
    ]
    assert [[run["run_id"] for run in job["runs"]] for job in jobs] == [
        ["plain one", "plain two", "plain again"],
        ["slow two", "slow again"],
    ]
    assert [sorted(job["settings"]) for job in jobs] == [
        [],
        ["HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD"],
    ]


def test_launch_begins_with_warmups_and_takes_further_runs(tmp_path):
    if reason := engines.available("mpi"):
        pytest.skip(reason)
    blocks = [
        [
            make_run("second", strategy="epoch_average"),
            make_run("too large", workers=3),
        ],
        [make_run("third")],
        [],
    ]
    found = Recorder(
        [make_run("first")], tmp_path, more=lambda: blocks.pop(0), warmup_runs=2
    )
    assert found.started == [
        "warmup0-first",
        "warmup1-first",
        "first",
        "second",
        "third",
    ]
    assert {outcome.status for outcome in found.outcomes.values()} == {"completed"}
    assert blocks == []
    assert len(list((tmp_path / "work").iterdir())) == 1, "one launch"


@pytest.mark.thorough
def test_failed_warmup_is_not_repeated(tmp_path):
    if reason := engines.available("mpi"):
        pytest.skip(reason)
    found = Recorder(
        [faulty("broken", "kill"), make_run("sound", workers=1)],
        tmp_path,
        warmup_runs=1,
    )
    assert {run_id: outcome.status for run_id, outcome in found.outcomes.items()} == {
        "warmup0-broken": "failed",
        "broken": "failed",
        "sound": "completed",
    } | {"warmup0-sound": "completed"}


def test_warmups_use_the_largest_worker_count_of_each_engine():
    runs = [
        make_run("a", 1),
        make_run("b", 4),
        make_run("c", 4),
        make_run("d", 2, engine="gloo", save_weights=True),
    ]
    made, timed = in_new_processes(runs, 2)
    assert timed.runs == tuple(runs)
    assert [run.run_id for run in made.runs] == [
        "warmup0-b",
        "warmup1-b",
        "warmup0-d",
        "warmup1-d",
    ]
    assert all(run.warmup and not run.save_weights for run in made.runs)
    assert in_new_processes(runs, 0)[0].runs == ()
    warm, _ = in_new_processes(runs, 1, in_vain={"warmup0-b"})
    assert [run.run_id for run in warm.runs] == ["warmup0-d"]
