"""The choice of what charges virtual runs: nothing is measured, no process starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scalebench.calibration import cost_sources
from scalebench.calibration.calibration_file import Calibration
from scalebench.calibration.charging import machine_of
from scalebench.calibration.cost_sources import (
    GivenCosts,
    KeptCosts,
    KeptSteps,
    MeasuredCosts,
    Place,
    Request,
    StatedCosts,
    choose_source,
    notes_on,
)
from scalebench.calibration.engine_measurement import Placing
from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.engine_costs import EngineCosts
from scalebench.errors import ClusterError, ResultsError
from scalebench.formatting import Detail
from scalebench.study.spec import Study
from tests.facts import in_order

NO_RANKS = Placing(*3 * [lambda *_: pytest.fail("nothing is measured")])


@pytest.fixture
def wanted(machine, make_run, blobs):
    """Runs of batches of 8 samples at two workers."""
    runs = [
        make_run(strategy, workers)
        for strategy in ("allreduce", "adasum")
        for workers in (1, 2)
    ]
    cluster, sizes = machine.cluster, {8}
    return Request(
        Study(),
        cluster,
        "cpu",
        runs,
        blobs,
        {},
        lambda: sizes,
        8,
        beside_real=False,
        placing=NO_RANKS,
    )


@pytest.fixture
def calibration(wanted, machine):
    """What was measured for the request, alone and beside another worker, in an undisturbed second."""
    (table,) = machine.tables
    tables = [table.model_copy(update={"busy_workers": busy}) for busy in (1, 2)]
    return Calibration(
        key=wanted.key,
        measured=wanted.measurement,
        tables=tables,
        engines=machine.engines,
        reference_s=1e-3,
    )


def stating(request, **options):
    return replace(request, study=request.study.model_copy(update=options))


def with_sizes(request, *sizes):
    return replace(request, sizes=lambda: set(sizes))


def test_cluster_that_states_its_steps_needs_nothing(wanted, calibration, tmp_path):
    elsewhere = replace(
        stating(wanted, device_step_time=2e-3), cluster=load_cluster("juwels-booster")
    )
    source = choose_source(elsewhere, tmp_path)
    assert source == StatedCosts()
    (note,) = notes_on(source, elsewhere)
    assert note.startswith("steps take the stated time")
    alone = replace(elsewhere, runs=[run for run in elsewhere.runs if run.workers == 1])
    assert notes_on(source, alone) == []
    calibration.save(tmp_path / "given.json")
    with pytest.raises(
        ClusterError, match="of which cluster juwels-booster has nothing"
    ):
        choose_source(stating(elsewhere, calibration=tmp_path / "given.json"), tmp_path)


def test_file_that_the_study_names_comes_before_the_kept_one(
    wanted, calibration, tmp_path
):
    given = calibration.model_copy(update={"key": "another"})
    given.save(tmp_path / "given.json")
    calibration.save(tmp_path / "calibration.json")
    asked = stating(wanted, calibration=tmp_path / "given.json")
    source = choose_source(asked, tmp_path)
    assert source == GivenCosts(tmp_path / "given.json", given)
    without = [note for note in notes_on(source, asked) if "does not say what" in note]
    assert [note.split(" computes ")[0].split()[-1] for note in without] == [
        "adasum",
        "allreduce",
    ]
    with pytest.raises(
        ResultsError, match="has changed since it charged the virtual runs"
    ):
        choose_source(asked, tmp_path, charged=True)


def test_differences_of_a_given_file_are_named(wanted, calibration, tmp_path):
    measured = calibration.measured.model_copy(
        update={"cpu": "Z80", "optimizer": "adamw"}
    )
    operations = {"adasum": {}, "allreduce": {}}
    calibration.model_copy(
        update={"measured": measured, "operations": operations}
    ).save(tmp_path / "given.json")
    asked = stating(wanted, calibration=tmp_path / "given.json")
    (note,) = notes_on(choose_source(asked, tmp_path), asked)
    assert in_order(note, "not of this machine", "cpu Z80, not")
    assert "optimizer adamw, not " in note


def test_kept_file_of_this_machine_is_taken(wanted, calibration, tmp_path):
    calibration.save(tmp_path / "calibration.json")
    for charged in (False, True):
        source = choose_source(wanted, tmp_path, charged=charged)
        assert source == KeptCosts(calibration)
        assert notes_on(source, wanted) == []


@pytest.mark.parametrize("charged", [False, True])
def test_kept_file_of_another_machine_counts_for_runs_that_it_charged(
    wanted, calibration, tmp_path, charged
):
    other = calibration.model_copy(update={"key": "another"})
    other.save(tmp_path / "calibration.json")
    source = choose_source(wanted, tmp_path, charged=charged)
    assert source == (
        KeptCosts(other, Place.ANOTHER_MACHINE) if charged else MeasuredCosts()
    )
    assert (
        any("another machine" in note for note in notes_on(source, wanted)) == charged
    )


def test_machine_that_has_charged_runs_is_not_completed_by_another(
    wanted, calibration, tmp_path
):
    calibration.model_copy(update={"key": "another"}).save(
        tmp_path / "calibration.json"
    )
    more = with_sizes(wanted, 8, 16)
    with pytest.raises(
        ResultsError, match=r"has no step times for batches of 16 samples: go on there"
    ):
        choose_source(more, tmp_path, charged=True)
    assert choose_source(more, tmp_path) == MeasuredCosts()


def test_what_runs_lack_is_measured_beside_what_charged_earlier_ones(
    wanted, calibration, tmp_path
):
    calibration.save(tmp_path / "calibration.json")
    more = with_sizes(wanted, 8, 16)
    source = choose_source(more, tmp_path, charged=True)
    assert source == MeasuredCosts(calibration, "batches of 16 samples")
    (note,) = notes_on(source, more)
    assert in_order(note, "calibration.json lacked", "16 samples", "measured now")
    assert choose_source(more, tmp_path) == MeasuredCosts(), (
        "where nothing was charged, all is of one measurement"
    )


def test_steps_of_an_earlier_study_are_taken_unless_all_is_measured_anew(
    wanted, calibration, tmp_path
):
    KeptSteps(wanted.key, wanted.runs[0]).keep(calibration)
    source = choose_source(wanted, tmp_path)
    assert isinstance(source, KeptCosts)
    assert (source.place, source.calibration.tables) == (
        Place.CACHE,
        calibration.tables,
    )
    (note,) = notes_on(source, wanted)
    assert isinstance(note, Detail)
    assert choose_source(wanted, tmp_path, anew=True) == MeasuredCosts()
    assert choose_source(with_sizes(wanted, 16), tmp_path) == MeasuredCosts()
    assert (
        choose_source(stating(wanted, device_step_time=2e-3), tmp_path)
        == MeasuredCosts()
    ), "of engines alone"


def test_what_was_kept_with_another_meaning_is_measured_anew(
    wanted, calibration, tmp_path, monkeypatch
):
    KeptSteps(wanted.key, wanted.runs[0]).keep(calibration)
    assert isinstance(choose_source(wanted, tmp_path), KeptCosts)
    monkeypatch.setattr(cost_sources, "_KEPT", cost_sources._KEPT + 1)
    assert choose_source(wanted, tmp_path) == MeasuredCosts()


def test_lost_file_of_charged_runs_is_not_measured_again(wanted, tmp_path):
    with pytest.raises(
        ResultsError, match=r"holds virtual runs but not calibration\.json"
    ):
        choose_source(wanted, tmp_path, charged=True)


def test_ranks_that_sleep_until_a_stated_step_ends_pay_for_waking(wanted, calibration):
    paused = [
        entry.model_copy(update={"pause_s": 1e-3})
        for entry in calibration.engines.entries
    ]
    kept = calibration.model_copy(
        update={"engines": EngineCosts(entries=paused, reference_s=1e-3)}
    )
    stated = stating(wanted, device_step_time=2e-3)
    added = [
        machine_of(kept, request).engines.of("mpi").alpha_s
        - calibration.engines.of("mpi").alpha_s
        for request in (wanted, stated)
    ]
    assert added == pytest.approx([0.0, 1e-3])


def test_engines_alone_count_where_the_study_states_its_steps(
    wanted, calibration, tmp_path
):
    stated = stating(wanted, device_step_time=2e-3)
    kept = calibration.model_copy(update={"tables": []})
    kept.save(tmp_path / "calibration.json")
    assert choose_source(stated, tmp_path, charged=True) == KeptCosts(kept)
    calibration.save(tmp_path / "given.json")
    named = stating(stated, calibration=Path(tmp_path / "given.json"))
    source = choose_source(named, tmp_path, charged=True)
    assert source == GivenCosts(tmp_path / "given.json", kept)
    assert [note[:26] for note in notes_on(source, named)] == [
        "steps take the stated time"
    ]
