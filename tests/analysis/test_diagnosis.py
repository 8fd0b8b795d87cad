"""Symptoms in synthetic results folders: each fault is found with the runs that show it, and nothing else is."""

from __future__ import annotations

import re

import pytest

from scalebench.analysis.diagnosis import diagnose
from scalebench.errors import ResultsError
from scalebench.records.limits import WORKER_LISTS, is_worker_list
from tests.records_factory import run_row

NODES = {"worker_nodes": ["ab", "ab", "cd", "cd"], "worker_cores": ["0", "1", "0", "1"]}


def native(repetition=0, **changes):
    """A run of four workers on two nodes, each bound to a core, of equal step times."""
    values = {
        "run_id": f"run-{repetition}",
        "repetition": repetition,
        "seed": repetition,
        "run_order": repetition,
        "execution": "native",
        "engine": "mpi",
        "binding": "core",
        "launcher": "mpirun",
        "workers": 4,
        "nodes": 2,
        "workers_per_node": 2,
        "batch_global": 32,
        "train_s": 1.0,
        "worker_step_s": [1e-3, 1e-3, 1e-3, 1e-3],
        "worker_mhz_before": [2600.0] * 4,
        "worker_mhz_after": [2590.0] * 4,
        "worker_throttles": [0] * 4,
        "worker_clock_offset_s": [0.0, 0.0, 2e-4, 2e-4],
        "worker_clock_error_s": [0.0, 0.0, 1e-4, 1e-4],
        **NODES,
    }
    return run_row(**(values | changes))


def repeated(**changes):
    return [native(repetition, **changes) for repetition in range(4)]


def found_in(study, rows):
    return [(each.what, each.where, each.rows) for each in diagnose(study(rows=rows))]


ALL = ("run-0", "run-1", "run-2", "run-3")


def test_nothing_is_found_in_a_sound_study(study):
    assert found_in(study, repeated()) == []


def test_rows_without_lists_of_workers_show_nothing(study):
    assert found_in(study, [native(**dict.fromkeys(WORKER_LISTS))]) == []


def test_a_slow_worker_is_named_with_its_cores(study):
    (found,) = diagnose(
        study(rows=repeated(worker_step_s=[1e-3, 1e-3, 1e-3, 1.5e-3], others_load=0.1))
    )
    assert found.where == "worker 3 (cores 1 of node cd)"
    assert re.match(r"its step takes 1\.50 times .*4 of 4 runs$", found.measured)
    assert found.rows == ALL


def test_programs_beside_a_slow_worker_are_named(study):
    slow, busy = diagnose(
        study(rows=repeated(worker_step_s=[1e-3, 2e-3, None, None], others_load=0.5))
    )
    assert re.search(
        r"4 of 4 runs, .*other programs .*50 % of the cores$", slow.measured
    )
    assert (busy.what, busy.measured[:39]) == (
        "busy cores",
        "other programs took 50 % of the cores o",
    )


def test_a_worker_that_is_slow_in_half_of_its_runs_is_not(study):
    slow = [native(n, worker_step_s=[1e-3, 1e-3, 1e-3, 1.5e-3]) for n in range(2)]
    assert found_in(study, [*slow, native(2), native(3)]) == []


def test_a_slow_node_is_one_symptom_and_its_workers_none(study):
    rows = repeated(worker_step_s=[1e-3, 1e-3, 1.3e-3, 1.3e-3])
    assert found_in(study, rows) == [("slow node", "node cd", ALL)]


@pytest.mark.parametrize(
    "changes",
    [
        {"oversubscribed": True, "binding": "none"},
        {"execution": "paced"},
        {"data_parallel": 2, "pipeline_parallel": 2},
    ],
)
def test_steps_that_need_not_be_equal_are_not_compared(study, changes):
    rows = repeated(worker_step_s=[1e-3, 2e-3, 1e-3, 5e-3], **changes)
    assert not {"slow worker", "slow node"} & {
        what for what, _, _ in found_in(study, rows)
    }


def test_a_clock_rate_that_falls_is_throttling(study):
    (found,) = diagnose(
        study(
            rows=[
                native(0),
                native(1, worker_mhz_after=[2590.0, 2590.0, 1900.0, 2300.0]),
            ]
        )
    )
    assert (found.what, found.where, found.rows) == (
        "throttled cores",
        "node cd",
        ("run-1",),
    )
    assert re.fullmatch(r"from 2,600 to 1,900 MHz.* 1 of 2 runs", found.measured)


def test_the_kernels_counters_are_throttling(study):
    rows = [
        native(0),
        native(
            1,
            worker_throttles=[12, 0, None, None],
            worker_mhz_after=None,
            worker_mhz_before=None,
        ),
    ]
    (found,) = diagnose(study(rows=rows))
    assert (found.what, found.where, found.rows) == (
        "throttled cores",
        "node ab",
        ("run-1",),
    )
    assert re.fullmatch(r".*12 times .*1 of 2 runs", found.measured)


ON_GPUS = {"worker_gpu_mhz_before": [1980] * 4, "worker_gpu_mhz_after": [1965] * 4}


def test_a_gpu_at_its_power_cap_with_its_clock_rate_is_sound(study):
    assert (
        found_in(
            study,
            [
                native(
                    0,
                    **ON_GPUS,
                    worker_gpu_slowdowns=["power-cap", "none", None, "power-cap"],
                )
            ],
        )
        == []
    )


def test_a_gpu_that_is_too_hot_is_throttled(study):
    calm = native(0, **ON_GPUS, worker_gpu_slowdowns=["power-cap"] * 4)
    hot = native(
        1,
        **ON_GPUS,
        worker_gpu_slowdowns=["power-cap", "none", "none", "power-cap+thermal"],
    )
    (found,) = diagnose(study(rows=[calm, hot]))
    assert (found.what, found.where, found.rows) == (
        "throttled GPUs",
        "node cd",
        ("run-1",),
    )
    assert found.measured == "clocked down by power-cap, thermal, in 1 of 2 runs"


def test_a_gpu_whose_clock_rate_falls_is_throttled(study):
    slowed = ON_GPUS | {"worker_gpu_mhz_after": [1965, 1200, None, 1965]}
    (found,) = diagnose(
        study(
            rows=[
                native(
                    0,
                    **slowed,
                    worker_gpu_slowdowns=["none", "power-cap", None, "none"],
                )
            ]
        )
    )
    assert (found.what, found.where) == ("throttled GPUs", "node ab")
    assert re.fullmatch(
        r"from 1,980 to 1,200 MHz at worst; clocked down by power-cap, .*1 run",
        found.measured,
    )


def test_a_clock_is_apart_beyond_the_error_of_measuring_it(study):
    near = native(
        0,
        worker_clock_offset_s=[0.0, 0.0, 5e-3, 5e-3],
        worker_clock_error_s=[0.0, 0.0, 6e-3, 6e-3],
    )
    far = native(1, worker_clock_offset_s=[0.0, 0.0, -5e-3, -5e-3])
    (found,) = diagnose(study(rows=[near, far]))
    assert (found.what, found.where, found.rows) == (
        "clock offset",
        "node cd",
        ("run-1",),
    )
    assert re.search(
        r"5\.00 ms behind .*worker 0's node.* 100 µs, .*1 of 2 runs", found.measured
    )


def test_oversubscription_gives_workers_and_cores(study):
    crowded = {
        "oversubscribed": True,
        "binding": "none",
        "workers_per_node": 4,
        "nodes": 1,
    }
    places = {"worker_nodes": ["ab"] * 4, "worker_cores": ["0-1"] * 4}
    (found,) = diagnose(study(rows=[native(0, **crowded, **places)]))
    assert (found.what, found.measured, found.rows) == (
        "oversubscription",
        "4 workers on 2 cores (0-1)",
        ("run-0",),
    )


def test_other_programs_on_the_cores_are_named_with_their_share(study):
    loads = {0: 0.1, 1: 0.4, 2: 0.9, 3: 0.0}
    rows = [native(repetition, others_load=load) for repetition, load in loads.items()]
    (found,) = diagnose(study(rows=rows))
    assert (found.what, found.rows) == ("busy cores", ("run-1", "run-2"))
    assert "40 to 90 % of the cores" in found.measured


def test_missing_binding_is_found_where_there_are_enough_cores(study):
    loose = native(0, binding="none", worker_cores=["0-7"] * 4)
    (found,) = diagnose(study(rows=[loose, native(1)]))
    assert (found.what, found.rows) == ("missing binding", ("run-0",))
    assert found.measured == "2 workers on 8 cores (0-7)", "of one node"
    alone = native(
        0,
        binding="none",
        workers_per_node=1,
        nodes=4,
        worker_nodes=["a", "b", "c", "d"],
    )
    assert found_in(study, [alone]) == []


def priced(**changes):
    """The virtual run of the same cell: 0.1 s of transfers in 1 s."""
    values = {
        "run_id": "virtual",
        "workers": 4,
        "batch_global": 32,
        "train_s": 1.0,
        "comm_s": 0.2,
        "wait_s": 0.1,
    }
    return run_row(**(values | changes))


def test_a_network_below_its_calibration_is_found(study):
    (found,) = diagnose(
        study(rows=[priced(), *repeated(train_s=1.3, comm_s=0.5, wait_s=0.1)])
    )
    assert (found.what, found.rows) == ("slow network", ALL)
    assert re.match(
        r"transfers of allreduce at 4 workers .*400 ms, .*100 ms .*calibration: 23 %",
        found.measured,
    )


def test_on_several_nodes_waiting_is_compared_with_waiting(study):
    (found,) = diagnose(study(rows=[priced(), *repeated(train_s=1.3, comm_s=0.5)]))
    assert re.match(
        r"communication, with waiting .*allreduce at 4 workers .*500 ms", found.measured
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"comm_s": 0.24, "wait_s": 0.1},
        {"comm_s": 0.5, "wait_s": 0.4},
        {"train_s": 20.0, "comm_s": 0.5, "wait_s": 0.1},
        {"comm_s": 0.5, "wait_s": 0.1, "others_load": 0.9},
    ],
    ids=["as calibrated", "waiting", "matters little", "disturbed"],
)
def test_a_network_is_not_blamed_for(study, changes):
    assert "slow network" not in {
        what for what, *_ in found_in(study, [priced(), *repeated(**changes)])
    }


def test_every_symptom_has_its_consequence_and_remedy(study):
    rows = repeated(
        worker_step_s=[1e-3, 1e-3, 1e-3, 1.5e-3],
        worker_throttles=[3] * 4,
        binding="none",
    )
    found = diagnose(study(rows=rows))
    assert len(found) == 4
    assert all(each.consequence and each.remedy and each.rows for each in found)


@pytest.mark.parametrize(
    ("name", "text", "holds"),
    [
        ("worker_step_s", "[1e-3, null]", True),
        ("worker_step_s", "[1e-3]", False),
        ("worker_step_s", "[1e-3, NaN]", False),
        ("worker_step_s", '["1", "2"]', False),
        ("worker_step_s", '{"0": 1}', False),
        ("worker_cores", '["0-3,8", null]', True),
        ("worker_cores", '["0-99999999", "1"]', False),
        ("worker_nodes", '["ab", "cd"]', True),
        ("worker_nodes", "[1, 2]", False),
        ("worker_nodes", "[" * 100_000, False),
    ],
)
def test_lists_of_workers(name, text, holds):
    assert is_worker_list(name, text, 2) is holds


def test_a_damaged_list_is_refused_by_line_and_column(study):
    with pytest.raises(ResultsError, match=r"line 2: worker_cores .*JSON list"):
        study(rows=[native(worker_cores='["0", "1"]')])
