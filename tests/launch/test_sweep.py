from __future__ import annotations

import re
from dataclasses import replace

import pytest

from scalebench.cluster.cluster_file import load_cluster
from scalebench.comm import engines
from scalebench.errors import ClusterError, EngineError, StudyError
from scalebench.launch.hosts import Allocation, Host
from scalebench.launch.sweep import expand
from scalebench.study.spec import Study
from scalebench.system import hardware


@pytest.fixture(autouse=True)
def _all_engines_but_nccl(monkeypatch):
    monkeypatch.setattr(
        engines,
        "available",
        lambda name, **_: "no GPU here" if name == "nccl" else None,
    )


FOUR_CORES = Allocation((Host("here", 4, 4, 4),))


def sweep(hosts: Allocation = FOUR_CORES, **values):
    study = Study(**values)
    return expand(study, load_cluster(study.cluster), hosts)


def points(runs):
    return {(run.execution, run.engine, run.strategy.name, run.workers) for run in runs}


def test_auto_adds_native_points_that_fit_the_cores():
    found = points(
        sweep(workers="1..64", strategies=["allreduce", "horovod", "ddp"]).runs
    )
    counts = [1, 2, 4, 8, 16, 32, 64]
    virtual = {
        ("virtual", "virtual", name, n)
        for name in ("allreduce", "horovod", "ddp")
        for n in counts
    }
    engine = {"allreduce": "mpi", "horovod": "horovod", "ddp": "gloo"}
    native = {("native", engine[name], name, n) for name in engine for n in (1, 2, 4)}
    assert found == virtual | native


def test_serial_runs_once_at_one_worker():
    found = points(sweep(workers="4,8", strategies=["serial"]).runs)
    assert found == {
        ("virtual", "virtual", "serial", 1),
        ("native", "mpi", "serial", 1),
    }


def test_counts_at_which_a_strategy_cannot_work_are_left_out():
    virtual = {
        "execution": "virtual",
        "cluster": "juwels-booster",
        "device_step_time": 1e-3,
    }
    found = sweep(
        workers="1..8", strategies=["allreduce", "gossip", "daso-fixed"], **virtual
    )
    alone = {(name, n) for _, _, name, n in points(found.runs) if name != "allreduce"}
    assert alone == {("gossip", 2), ("gossip", 4), ("gossip", 8), ("daso-fixed", 8)}
    (note,) = [
        note
        for note in found.notes
        if note.startswith("gossip is left out at 1 worker: ")
    ]
    assert "start at 2 workers" in note
    assert any(
        note.startswith("daso-fixed is left out at 1, 2, 4 workers: ")
        for note in found.notes
    )


def test_a_strategy_that_works_at_no_count_is_left_out_beside_others():
    values = {"workers": "2,4", "execution": "native"}
    found = sweep(strategies=["serial", "allreduce", "daso-fixed"], **values)
    names = {name for _, _, name, _ in points(found.runs)}
    assert names == {"serial", "allreduce"}
    assert any(
        note.startswith("daso-fixed is left out at 2, 4 workers: ")
        for note in found.notes
    )
    for strategies in (["daso-fixed"], ["serial", "daso-fixed"]):
        with pytest.raises(StudyError, match="do not fill 2 or more whole nodes"):
            sweep(strategies=strategies, **values)


def test_order_is_random_within_each_repetition():
    runs = sweep(workers="1..64", execution="virtual", repetitions=3).runs
    assert [run.run_order for run in runs] == list(range(len(runs)))
    assert [run.repetition for run in runs] == sorted(run.repetition for run in runs)
    orders = [
        [(run.strategy.name, run.workers) for run in runs if run.repetition == r]
        for r in range(3)
    ]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1]
    assert [run.run_id for run in runs] == [
        run.run_id for run in sweep(workers="1..64", execution="virtual").runs
    ]


def test_runs_that_are_no_baseline_come_last():
    """On 4 cores gloo at 4 workers is one: a budget of time leaves those that answers rest on for last."""
    runs = sweep(workers="2,4", strategies=["allreduce", "ddp"], repetitions=2).runs
    kinds = [
        "virtual" if run.engine == "virtual" else (run.engine, run.workers)
        for run in runs
    ]
    assert kinds[:8] == ["virtual"] * 8
    assert set(kinds[8:14]) == {("mpi", 2), ("mpi", 4), ("gloo", 2)}
    assert kinds[14:] == [("gloo", 4)] * 2


def test_run_ids_and_hashes_follow_the_configuration():
    runs = sweep(
        workers="1,2", strategies=["epoch_average", {"epoch_average": {"every": 2}}]
    ).runs
    assert (
        len({run.run_id for run in runs})
        == len({run.config_hash for run in runs})
        == len(runs)
    )
    before = {
        run.config_hash for run in sweep(workers="2", strategies=["allreduce"]).runs
    }
    assert before == {
        run.config_hash
        for run in sweep(workers="2", strategies=["allreduce"], time_limit_s=9).runs
    }
    assert not before & {
        run.config_hash
        for run in sweep(workers="2", strategies=["allreduce"], lr=0.2).runs
    }


def test_native_hashes_ignore_virtual_options():
    def native(**values):
        return {
            r.config_hash
            for r in sweep(workers="2", strategies=["allreduce"], **values).runs
            if r.engine == "mpi"
        }

    assert native() == native(virtual={"jitter": "none"})
    slow = {"virtual": {"slowdown": {1: 2.0}}}
    assert native() == native(**slow)
    assert native(partition={"iid": {"balance": "speed"}}, **slow) != native(
        partition={"iid": {"balance": "speed"}}
    )


def test_native_shards_follow_stated_speeds():
    runs = sweep(
        workers="2",
        strategies=["allreduce"],
        partition={"iid": {"balance": "speed"}},
        virtual={"slowdown": {1: 2.0}},
    ).runs
    assert {run.execution: run.virtual.slowdown for run in runs} == {
        "native": {1: 2.0},
        "virtual": {1: 2.0},
    }


def test_repetition_has_one_seed_for_all_points():
    runs = sweep(workers="1,2", seed=5, repetitions=2).runs
    assert {(run.repetition, run.seed) for run in runs} == {(0, 5), (1, 6)}


def test_missing_engine_leaves_virtual_runs_with_a_note(monkeypatch):
    monkeypatch.setattr(
        engines,
        "available",
        lambda name, **_: "not built" if name == "horovod" else None,
    )
    found = sweep(strategies=["horovod"], workers="1,2")
    assert {run.execution for run in found.runs} == {"virtual"}
    (note,) = found.notes
    assert re.match(r"horovod: no native runs.*not built", note)
    with pytest.raises(EngineError, match=r"engine horovod .*not built"):
        sweep(strategies=["horovod"], workers="1,2", execution="native")


def test_engine_without_required_capabilities_is_refused():
    with pytest.raises(
        EngineError,
        match=r"epoch_async .*engine gloo, .*no shared_state; use --engine mpi",
    ):
        sweep(strategies=["epoch_async"], engine="gloo", execution="native")
    with pytest.raises(EngineError, match="horovod cannot run on engine mpi"):
        sweep(strategies=["horovod"], engine="mpi")


@pytest.mark.parametrize("engine", ["gloo", "nccl"])
def test_adasum_is_refused_on_engines_without_it(monkeypatch, engine):
    monkeypatch.setattr(engines, "available", lambda name, **_: None)
    said = f"adasum cannot run on engine {engine}, which has no adasum; use --engine (mpi or horovod|horovod or mpi),"
    with pytest.raises(EngineError, match=said):
        sweep(strategies=["adasum"], engine=engine, workers="2", execution="native")
    for able in ("mpi", "horovod"):
        runs = sweep(
            strategies=["adasum"], engine=able, workers="2", execution="native"
        ).runs
        assert {run.engine for run in runs} == {able}


def test_named_engine_is_used():
    runs = sweep(
        strategies=["allreduce", "epoch_average"],
        engine="gloo",
        workers="2",
        execution="native",
    ).runs
    assert {run.engine for run in runs} == {"gloo"}


def test_virtual_runs_are_charged_by_the_named_engine_if_able():
    names = ["allreduce", "gossip", "epoch_async", "horovod"]
    told = sweep(strategies=names, workers="2", virtual={"engine": "gloo"})
    charged = {
        run.strategy.name: run.virtual.engine
        for run in told.runs
        if run.execution == "virtual"
    }
    assert charged == {
        "allreduce": "gloo",
        "gossip": "gloo",
        "epoch_async": "auto",
        "horovod": "auto",
    }
    native = {
        run.strategy.name: run.engine for run in told.runs if run.execution == "native"
    }
    assert native == {
        "allreduce": "gloo",
        "gossip": "gloo",
        "epoch_async": "mpi",
        "horovod": "horovod",
    }
    assert any(
        re.match(r"epoch_async: charged .*mpi, .*gloo has no shared_state", note)
        for note in told.notes
    )
    plain = sweep(strategies=names, workers="2")
    assert {run.virtual.engine for run in plain.runs} == {"auto"}
    assert not {
        run.config_hash for run in plain.runs if run.strategy.name == "allreduce"
    } & {run.config_hash for run in told.runs}


def test_virtual_runs_are_charged_by_the_engine_of_native_ones_unless_another_is_named():
    for virtual, charged in (({}, "gloo"), ({"engine": "mpi"}, "mpi")):
        told = sweep(
            strategies=["allreduce"],
            workers="2",
            engine="gloo",
            execution="virtual",
            virtual=virtual,
        )
        assert {run.virtual.engine for run in told.runs} == {charged}


def test_nccl_needs_one_gpu_per_worker(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(engines, "available", lambda name, **_: None)
    monkeypatch.setattr(hardware, "gpus", lambda: 4)
    four = Allocation(tuple(replace(host, gpus=4) for host in FOUR_CORES.hosts))
    study = {"strategies": ["allreduce", "ddp", "asp"], "workers": "1,2,4,8"}
    native = {
        point[1:]
        for point in points(sweep(four, **study, execution="auto").runs)
        if point[0] == "native"
    }
    assert {point for point in native if point[1] == "ddp"} == {
        ("nccl", "ddp", n) for n in (1, 2, 4)
    }
    assert {engine for engine, strategy, _ in native if strategy == "asp"} == {"mpi"}
    with pytest.raises(EngineError, match=r"ddp: engine nccl .*GPU .*4 for 8; use"):
        sweep(**study | {"strategies": ["ddp"]}, execution="native")
    monkeypatch.setattr(hardware, "gpus", lambda: 1)
    assert "nccl" not in {
        point[1] for point in points(sweep(**study, execution="auto").runs)
    }, "it would be alone"
    with pytest.raises(
        EngineError, match=r"1 for 8; use --workers 1\.\.1, .*--engine gloo"
    ):
        sweep(**study | {"strategies": ["ddp"]}, execution="native", engine="nccl")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    on_nodes = points(sweep(**study | {"strategies": ["ddp"]}, execution="native").runs)
    assert on_nodes == {("native", "nccl", "ddp", n) for n in (1, 2, 4, 8)}, (
        "other nodes have others"
    )


def test_daso_is_checked_with_workers_per_node(monkeypatch):
    """Virtually those of the cluster; real ranks are all on this machine, unless a scheduler spreads them."""
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        monkeypatch.delenv(name, raising=False)
    values = {"cluster": "ethernet-10g", "workers": "8", "device_step_time": 1e-3}
    four = {**values, "strategies": [{"daso-fixed": {"devices_per_node": 4}}]}
    with pytest.raises(StudyError, match=r"devices_per_node 4 .*more groups"):
        sweep(**four, execution="virtual")
    assert points(sweep(**four, execution="native").runs) == {
        ("native", "mpi", "daso-fixed", 8)
    }
    with pytest.raises(StudyError, match="whole nodes of 8 devices"):
        sweep(**values, strategies=["daso-fixed"], execution="native")
    nodes = Allocation(tuple(Host(name, 2, 2, 2) for name in ("n0", "n1", "n2", "n3")))
    assert sweep(nodes, **values, strategies=["daso-fixed"], execution="native").runs
    with pytest.raises(StudyError, match=r"devices_per_node 4 .*more groups"):
        sweep(nodes, **four, execution="native")


def test_virtual_runs_of_another_machine_need_step_times():
    with pytest.raises(ClusterError, match="--device-step-time"):
        sweep(cluster="dgx-h100", strategies=["allreduce"])
    assert sweep(
        cluster="dgx-h100", strategies=["allreduce"], device_step_time=1e-3
    ).runs


def test_paced_runs_need_step_times():
    with pytest.raises(StudyError, match="--device-step-time"):
        sweep(execution="paced", strategies=["allreduce"])
    runs = sweep(
        execution="paced", strategies=["allreduce"], workers="8", device_step_time=1e-2
    ).runs
    assert points(runs) == {("paced", "mpi", "allreduce", 8)}


POINTS = {"workers": "1,2", "strategies": ["allreduce", "epoch_average"]}
BEFORE = {**POINTS, "repetitions": 2}
EXTENDED = [
    {"repetitions": 4},
    {"workers": "1,2,4"},
    {"strategies": ["allreduce", "epoch_average", "local_sgd"]},
]


def recorded(runs):
    return [(run.run_id, run.run_order) for run in runs]


def carried_on(study, rows, upto=None):
    """Return the rows after a command on `study` beside `rows`: these, and those of its first `upto` runs."""
    known = {run_id for run_id, _ in rows}
    return rows + recorded(
        [run for run in study.continued(rows).runs if run.run_id not in known][:upto]
    )


@pytest.mark.parametrize("more", EXTENDED, ids=["repetitions", "workers", "strategies"])
@pytest.mark.parametrize("done", [0, 1, 5, 16])
@pytest.mark.parametrize("upto", [0, 1, 7])
def test_extended_study_continues_the_numbers_after_interruptions(more, done, upto):
    rows = carried_on(sweep(**BEFORE), [], done)
    extended = sweep(**{**BEFORE, **more})
    whole = carried_on(extended, rows)
    assert len({order for _, order in whole}) == len(whole) == len(extended.runs)
    assert [order for _, order in whole] == sorted(order for _, order in whole)
    assert carried_on(extended, carried_on(extended, rows, upto)) == whole


def test_interrupted_study_keeps_its_numbers():
    study = sweep(**BEFORE)
    rows = recorded(study.runs)
    assert study.continued(rows[:5]) is study
    assert study.continued([*rows[:9], rows[3], rows[4]]) is study
    shuffled = [rows[n] for n in (3, 0, 2, 5)]
    assert study.continued(shuffled) is study, (
        "virtual runs that end in another order than they began"
    )


def test_further_runs_continue_the_numbers():
    until = {"ci_width": "5%", "at_least": 3, "at_most": 5}
    study = sweep(**POINTS, until=until)
    on = study.continued([("of another study", 7)])
    both = [*study.runs, *study.further], [*on.runs, *on.further]
    assert [run.run_order + 8 for run in both[0]] == [run.run_order for run in both[1]]
    assert on.further


def test_until_notes_the_limits_of_repeated_virtual_points():
    until = {"ci_width": "5%", "at_least": 3, "at_most": 5}
    said = sweep(**POINTS, until=until).notes
    assert sum("no repetition narrows that" in note for note in said) == 1
    assert not any(
        "narrows" in note
        for note in sweep(**POINTS, execution="native", until=until).notes
    )
    assert not any("narrows" in note for note in sweep(**BEFORE).notes)
