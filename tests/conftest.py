"""Fixtures: small data, runs, and virtual runs without calibration."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.engine_costs import EngineCost, EngineCosts
from scalebench.comm import engines
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.dataset import Dataset
from scalebench.models.registry import build_model
from scalebench.pricing.machine import BatchTimes, Machine, StepTable
from scalebench.pricing.recording import record
from scalebench.pricing.schedule import Schedule
from scalebench.strategies import registry
from scalebench.strategies.base import Setting
from scalebench.study.spec import Component, Run, Training
from scalebench.training.outcome import Outcome
from scalebench.virtual.engine import simulate

# How long an example takes says how busy the machine is, not whether the law holds; and
# a commit has one verdict: new examples are looked for with
# --hypothesis-profile=explore.
settings.register_profile(
    "explore", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "any machine", settings.get_profile("explore"), derandomize=True
)
settings.load_profile("any machine")


# Tests on several hosts, each with a name, network and shared memory of its own:
# nothing of a launch there meets one on this machine.
HOSTS = {"hosts"}

# Folders and files of tests/ whose tests start ranks on this machine, or kill what they
# start.
RANKS = {
    "faults", "install", "tasks",
    "test_ad_psgd.py", "test_buffers.py", "test_compression.py", "test_dislib_parity.py",
    "test_doctor.py", "test_elastic.py", "test_end_to_end.py", "test_energy.py", "test_engine_measurement.py",
    "test_engines.py", "test_heartbeat.py", "test_launchers.py", "test_mpirun.py", "test_native.py",
    "test_native_equality.py",
    "test_nodes.py", "test_own_strategy.py", "test_paced_ranks.py", "test_parts_on_gpus.py",
    "test_parts_on_ranks.py", "test_rank.py", "test_real_ranks.py", "test_real_runs.py", "test_slow_workers.py",
    "test_spread.py", "test_trace.py",
    "test_waits_of_runs.py",
}  # fmt: skip

# Those whose tests draw, pack, train or judge whole studies, some tenths of a second or
# more each.
STUDIES = {
    "artifact", "export", "figures", "laws", "validation",
    "test_artifact.py", "test_browser.py", "test_charging.py", "test_comparability.py", "test_compare.py",
    "test_compare_studies.py", "test_daso.py", "test_hostile.py", "test_layers.py", "test_operation_costs.py",
    "test_page.py", "test_pages.py", "test_paper_page.py", "test_parts_of_models.py", "test_pinning.py",
    "test_prediction.py", "test_python.py", "test_recalibrate.py", "test_reference.py", "test_rules.py",
    "test_smoke.py", "test_status.py", "test_summary.py", "test_validate.py",
}  # fmt: skip


# `required`: a test that skips itself fails, as in continuous integration
REQUIRED = "SCALEBENCH_TEST_ALL"
# Reasons that continuous integration accepts: it has no GPU, LaTeX or second MPI, and
# some cases do not exist.
ACCEPTED = ("no GPU here", "no pdflatex", "no MPI of the system's", "not applicable: ")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[Any]:
    """Fail tests that skip themselves for something missing (MPI, Slurm, hosts, a browser), if all is required."""
    report = yield
    if (
        report.skipped
        and not hasattr(report, "wasxfail")
        and os.environ.get(REQUIRED) == "required"
    ):
        reason = str(call.excinfo.value) if call.excinfo is not None else ""
        if not reason.startswith(ACCEPTED):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped ({reason}), but {REQUIRED}=required: install what it needs"
    return report


def _is_in(places: set[str], nodeid: str) -> bool:
    return not places.isdisjoint(nodeid.partition("::")[0].split("/"))


def _chain(nodeid: str) -> str:
    """Return what a test shares a process with: a chain of launches, or its file, whose tests share fixtures."""
    if _is_in(HOSTS, nodeid):
        return "hosts"
    return "ranks" if _is_in(RANKS, nodeid) else nodeid.partition("::")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Mark tests as slow that start ranks or take a second, so that `tox run -e fast` leaves them out.

    In a process of pytest-xdist, put the chains of launches first: files then fill up
    whichever process is free.
    """
    for item in items:
        if _is_in(HOSTS | RANKS | STUDIES, item.nodeid):
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):
        first = {"ranks": 0, "hosts": 1}
        items.sort(key=lambda item: first.get(_chain(item.nodeid), len(first)))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave imported modules and collected tests out of garbage collections: they stay, and each one walks them all."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With pytest-xdist, run launches on this machine one after another in one process, those on hosts in another.

    Two launches on this machine never share its cores: an mpirun has failed to start
    beside another one.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Chains(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _chain(nodeid)

    config.option.loadscopereorder = False  # keep the order of collection
    return Chains(config, log)


@pytest.fixture(scope="session", autouse=True)
def _quick_calibration() -> Iterator[None]:
    """Commands that tests start calibrate for a second, and make all of their real runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALEBENCH_CALIBRATION_BUDGET_S", "1")
        patch.setenv("SCALEBENCH_NATIVE_BUDGET_S", "3600")
        yield


@pytest.fixture(scope="session", autouse=True)
def _short_waits() -> Iterator[None]:
    """Commands in the process of a test look shortly at other programs, and do not wait for the disk.

    Tests kill processes, and no machine: files that are written are there.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scalebench.launch.study_run._SAMPLING_S", 0.02)
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def _steps_are_not_kept(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step times of one test, which may be invented, charge no other."""
    folders: list[Path] = []

    def folder(kind: str) -> Path:
        if not folders:
            folders.append(tmp_path_factory.mktemp("cache"))
        return folders[0] / kind

    monkeypatch.setattr("scalebench.calibration.cost_sources.cache_folder", folder)


@pytest.fixture(scope="session")
def blobs() -> Dataset:
    """Three overlapping clouds of points in the plane: 96 to train on, 48 to test."""
    random = np.random.default_rng(7)
    y = np.arange(144) % 3
    x = (
        random.standard_normal((144, 2))
        + 1.5 * np.stack([np.cos(2.1 * y), np.sin(2.1 * y)], 1)
    ).astype(np.float32)
    return Dataset(
        "blobs",
        "classification",
        3,
        x[:96],
        y[:96].astype(np.int64),
        x[96:],
        y[96:].astype(np.int64),
    )


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Run]:
    """A run with small defaults: `make_run("allreduce", 4, epochs=2)`."""

    def make(strategy: Any = "serial", workers: int = 1, **values: Any) -> Run:
        batch = {} if "batch_global" in values else {"batch_per_worker": 8}
        defaults: dict[str, Any] = {
            "model": Component(name="mlp", options={"hidden": [6]}),
            "dtype": "float64",
            "epochs": 2,
            "lr": 0.1,
            "study": "test",
            "run_id": "test-run",
            "config_hash": "0" * 16,
            "execution": "virtual",
            "engine": "virtual",
            "repetition": 0,
            "seed": 3,
        }
        return Run.model_validate(
            {**defaults, **batch, **values, "strategy": strategy, "workers": workers}
        )

    return make


def invented_machine() -> Machine:
    """A step of 1 ms (0.05 data, 0.3 forward, 0.6 backward, 0.05 update) at any batch size; no jitter."""
    times = {
        "data_s": [5e-5],
        "forward_s": [3e-4],
        "backward_s": [6e-4],
        "update_s": [5e-5],
    }
    batch = BatchTimes(samples=8, **times, release=[1.0, 0.8, 0.6, 0.5])
    table = StepTable(
        source="test",
        busy_workers=2,
        batches=[batch],
        shuffle_s_per_sample=0.0,
        jitter=[],
    )
    costs = [
        EngineCost(
            engine=name,
            ranks=2,
            alpha_s=1e-5,
            points=[(4, 1e-5), (1 << 20, 1e-3)],
            source="test",
        )
        for name in ("mpi", "horovod", "gloo", "mpi-onesided")
    ]
    cluster = load_cluster("this-machine")
    node = cluster.node.model_copy(update={"workers_per_node": 2, "cores": 2})
    return Machine(
        cluster.model_copy(update={"node": node}), EngineCosts(entries=costs), [table]
    )


@pytest.fixture
def machine() -> Machine:
    return invented_machine()


@pytest.fixture
def play(
    make_run: Callable[..., Run], blobs: Dataset, machine: Machine
) -> Callable[..., tuple[Outcome, dict[str, Any]]]:
    """Simulate a run on the blobs: `outcome, weights = play("epoch_average", 4, epochs=3)`."""

    def run(
        strategy: Any = "serial", workers: int = 1, **values: Any
    ) -> tuple[Outcome, dict[str, Any]]:
        dataset = values.pop("data", blobs)
        place = values.pop("machine", machine)
        outcome, weights = simulate(
            make_run(strategy, workers, **values), dataset, place
        )
        assert outcome.status == "completed", outcome.error
        return outcome, weights

    return run


@pytest.fixture
def recorded(
    make_run: Callable[..., Run], blobs: Dataset
) -> Callable[..., list[Schedule]]:
    """Record the schedules of a run on the blobs, two workers a node: `recorded("epoch_average", 4, epochs=3)`."""

    def record_run(
        strategy: Any = "serial", workers: int = 1, **values: Any
    ) -> list[Schedule]:
        dataset = values.pop("data", blobs)
        run = (
            strategy
            if isinstance(strategy, Run)
            else make_run(strategy, workers, **values)
        )
        rule = registry.create(run.strategy.name, run.strategy.options, "virtual")
        model = build_model(
            run.model,
            dataset.input_shape,
            dataset.outputs,
            dataset.task,
            getattr(torch, run.dtype),
            run.seed,
        ).to("meta")
        plan = BatchPlan.of(
            run, run.workers, run.seed, dataset, rule.traits.mesh(run.workers).parts
        )
        return record(run, rule, plan, model, 2, dataset.input_shape)

    return record_run


needs_mpi = pytest.mark.skipif(
    engines.available("mpi") is not None, reason="MPI is not installed"
)


def some(values: Sequence[Any], *always: Any) -> list[Any]:
    """Parameters of which only `always` run with every change; the others are thorough."""
    return [
        value if value in always else pytest.param(value, marks=pytest.mark.thorough)
        for value in values
    ]


def setting(workers: int, workers_per_node: int = 2, **training: Any) -> Setting:
    """A training at one worker count, as strategies check it."""
    return Setting(Training.model_validate(training), workers, workers_per_node)


def runs_made(output: str) -> tuple[int, int]:
    """Return how many runs a `scalebench run` completed and how many were there before, by its last line."""
    (counts,) = re.findall(
        r"^(\d+) runs? completed(?:, (\d+) (?:was|were) there before)?; results in ",
        output,
        re.MULTILINE,
    )
    completed, before = (int(count or 0) for count in counts)
    return completed, before


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Call `scalebench` with words, in this process; return its output if it ends with `code`."""
    from scalebench.cli.main import main

    def call(*words: object, code: int = 0) -> str:
        with pytest.raises(SystemExit) as end:
            main.main([str(word) for word in words], prog_name="scalebench")
        out, err = capsys.readouterr()
        assert int(end.value.code or 0) == code, err
        return out + err

    return call
