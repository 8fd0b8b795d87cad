"""Native runs beside other programs: shown and marked, but no baseline, no check of a simulation, in no law."""

from __future__ import annotations

import math
import re

import pytest

from scalebench.analysis import (
    agreement,
    cells,
    differences,
    ratios,
    summary,
    virtual_error,
)
from scalebench.analysis.laws import scaling_laws
from scalebench.analysis.methodology import check
from scalebench.analysis.summary import summary_notes
from scalebench.analysis.verdicts import compare_studies
from scalebench.system.disturbance import SHARE
from tests.analysis.test_comparing import only, run

BUSY = {"others_load": 1.1 * SHARE}


def repeated(strategy, workers, seconds, execution="native", loads=(), **changes):
    loads = loads or [None] * len(seconds)
    return [
        run(
            strategy,
            workers,
            time,
            execution,
            repetition=r,
            seed=r,
            run_order=10 * r,
            others_load=load,
            final_metric=0.9 + 0.01 * r,
            **changes,
        )
        for r, (time, load) in enumerate(zip(seconds, loads, strict=True))
    ]


@pytest.mark.parametrize(
    ("load", "marked"),
    [(None, False), (SHARE, False), (1.01 * SHARE, True), (1.0, True)],
)
def test_native_run_is_disturbed_above_a_share_of_the_cores(study, load, marked):
    rows = [
        run("allreduce", 2, 1.0, execution, others_load=load)
        for execution in ("native", "virtual")
    ]
    table = cells(study(rows=rows))
    assert only(table, execution="native").disturbed == marked
    assert not only(table, execution="virtual").disturbed, (
        "there it is the load during the calibration"
    )


def test_times_of_a_cell_are_those_of_its_quiet_runs(study):
    results = study(
        rows=repeated("allreduce", 2, (1.0, 9.0, 1.1), loads=(0.1, 0.9, None))
    )
    (cell,) = cells(results).to_dict("records")
    assert (cell["n"], cell["disturbed"]) == (2, False)
    assert cell["train_s"] == pytest.approx(math.sqrt(1.1))
    assert cell["mean_s"] == pytest.approx(1.05)
    assert cell["metric"] == pytest.approx(0.91), "accuracy is not disturbed"
    assert (
        sum(
            note.startswith("1 disturbed run left out")
            for note in summary_notes(results)
        )
        == 1
    )


def test_disturbed_baseline_gives_no_ratio(study):
    rows = repeated("allreduce", 2, (8.0, 9.0), loads=(0.5, 0.6)) + repeated(
        "epoch_average", 2, (4.0, 4.4)
    )
    results = study(rows=rows)
    row = only(ratios(results), label="epoch_average", baseline="allreduce")
    assert math.isnan(row.ratio)
    assert re.match(r"allreduce .*mpi at 2 workers \(native\) is disturbed", row.note)
    (difference,) = differences(results, "epoch_average", "allreduce").to_dict(
        "records"
    )
    assert (math.isnan(difference["ratio"]), difference["disturbed"]) == (True, True)
    assert re.match(r"allreduce is disturbed at 2 workers", difference["note"])
    marked = [row for row in summary(results).rows if str(row[1].text).endswith(" †")]
    assert [row[0].text for row in marked] == ["allreduce"]
    (sign,) = [
        note for note in summary_notes(results) if note.startswith("† disturbed")
    ]
    assert re.search(r" 25 % of the cores.*never a baseline", sign)


def test_disturbed_runs_check_no_virtual_time(study):
    rows = []
    for workers in (1, 2, 4):
        busy = {} if workers < 4 else BUSY
        rows += [
            run(
                "allreduce",
                workers,
                8 / workers * (6.5 if busy else 1.1),
                "native",
                **busy,
            )
        ]
        rows += [run("allreduce", workers, 8 / workers)]
    results = study(rows=rows)
    assert only(agreement(results), workers=4).disturbed
    error = virtual_error(results)
    assert error.checks == 2
    assert math.exp(error.rms) == pytest.approx(1.1)


def test_laws_are_fitted_to_undisturbed_runs(study):
    rows = []
    for workers in (1, 2, 4, 8, 16):
        busy = BUSY if workers == 16 else {}
        rows += [
            run(
                "allreduce", workers, 10 / workers + 0.1, "native", repetition=r, **busy
            )
            for r in range(3)
        ]
    (law,) = scaling_laws(study(rows=rows))
    assert law.series.counts.tolist() == [1, 2, 4, 8]
    assert any(
        re.match(r"disturbed runs left out.* 16 workers", note)
        for note in law.series.notes
    )


def test_disturbed_cells_of_two_studies_are_not_compared(study):
    rows = repeated("allreduce", 2, (1.0, 1.1, 1.05))
    busy = study(rows=[row.model_copy(update=BUSY) for row in rows])
    (row,) = compare_studies(study(rows=rows), busy).table.to_dict("records")
    assert (row["verdict"], row["note"]) == ("not compared", "disturbed")


def test_check_names_disturbed_cells(study):
    rows = repeated("allreduce", 2, (1.0, 1.1), loads=(0.5, 0.5)) + repeated(
        "allreduce", 4, (1.0, 1.1)
    )
    (found,) = [
        one
        for one in check(study(rows=rows).folder).findings
        if one.rule == "disturbed"
    ]
    assert found.severity == "warning"
    assert found.what.startswith("1 cell disturbed in all runs")
    assert found.where == "allreduce at 2 workers (native mpi)"
