"""The table at the end of a study, and the format of its numbers."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from scalebench import analysis
from scalebench.analysis.methodology import Evidence, check
from scalebench.analysis.summary import summary, summary_notes
from scalebench.formatting import (
    deviation,
    digits,
    percent,
    percent_with_interval,
    seconds,
    seconds_with_interval,
)
from scalebench.tables.screen import Screen
from tests.analysis.test_comparing import run
from tests.conftest import some
from tests.facts import in_order


def text(results, width=140) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(Screen(summary(results)))
    return capture.get()


def row(page, heading, number=1):
    """The cells of a row below the heading of its strategy and execution."""
    lines = page.splitlines()
    return re.split("  +", lines[lines.index(heading) + number].strip())


def test_row_shows_time_speedup_reduction_metric_and_execution(study):
    rows = [
        run("serial", 1, 16.0),
        run("allreduce", 4, 8.0),
        run("epoch_average", 4, 4.0),
    ]
    page = text(study(rows=rows))
    assert row(page, "epoch_average, virtual") == [
        "4",
        "4.00 s",
        "4.00 s",
        "–",
        "4.00x",
        "+50 %",
        "0.970",
    ]


def test_rows_show_intervals_and_notes_show_warnings(study):
    speeds = (
        1.0,
        1.1,
        1.21,
    )  # spread exp(0.0953^2): 9.6 %; the ratio is 2 in every round
    rows = [
        run("allreduce", 2, 2 * t, "native", repetition=r, run_order=2 * r)
        for r, t in enumerate(speeds)
    ]
    rows += [
        run("epoch_average", 2, t, "native", repetition=r, run_order=2 * r + 1)
        for r, t in enumerate(speeds)
    ]
    cells = row(text(study(rows=rows)), "epoch_average, native mpi")
    assert cells[2:4] == ["1.10 s", "9.6 %"], "the median beside the spread"
    assert "+50 %" in cells, "a ratio that does not vary has no interval to show"
    rows += [run("epoch_average", 2, 5.0, "native", repetition=3)]
    notes = summary_notes(study(rows=rows))
    (note,) = [
        note for note in notes if "1 of 2 native cells vary by more than 10 %" in note
    ]
    assert note.endswith("; in epoch_average at 2 workers (native mpi)"), (
        "two places in a row would read as one"
    )


def test_time_to_target_has_a_column(study):
    aim = {"target_metric": 0.9}
    rows = [
        run("serial", 1, 4.0, repetition=r, time_to_target_s=t, **aim)
        for r, t in enumerate((1.0, 2.0, None))
    ]
    rows += [
        run("allreduce", 2, 4.0, repetition=r, time_to_target_s=t, **aim)
        for r, t in enumerate((1.0, None))
    ]
    page = text(study(rows=rows))
    assert "to target" in page
    assert row(page, "serial, virtual")[2] == "2.00 s*"
    assert row(page, "allreduce, virtual")[2] == "1 of 2"
    assert "to target" not in text(study(rows=[run("serial", 1, 4.0)]))


def test_notes_report_failures_agreement_and_oversubscription(study):
    rows = [
        run("serial", 1, 10.0, "native"),
        run("serial", 1, 9.0),
        run("allreduce", 4, 4.0, "native", oversubscribed=True),
        run(
            "allreduce",
            2,
            None,
            status="failed",
            error="rank 1 died: killed by signal 9",
        ),
        run("ddp", 2, None, status="diverged"),
    ]
    results = study(rows=rows)
    notes = summary_notes(results)
    assert notes[0].startswith("× more workers than the machine can feed")
    assert in_order(notes[1], "virtual", "native", "11 % (root mean square of 1 check)")
    assert in_order(notes[1], "most", "serial at 1 worker (9.00 s for 10.0 s)")
    assert in_order(notes[-1], "1 diverged, 1 failed of 5 runs", "not in the table")
    assert in_order(
        notes[-1], "virtual-virtual-allreduce-2-0-: rank 1 died", "signal 9"
    )
    assert row(text(results), "allreduce, native mpi")[0] == "4 ×"
    diverged = study(rows=[rows[0], run("ddp", 2, None, status="diverged", lr=0.05)])
    assert in_order(summary_notes(diverged)[-1], "lower --lr", "0.05", "--new")


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (
            [("paced", 1)],
            "× steps slower than the stated pace: shown, never a baseline",
        ),
        (
            [("native", 4)],
            "× more workers than the machine can feed: shown, never a baseline",
        ),
        (
            [("native", 4), ("paced", 1)],
            "× more workers than the machine can feed or steps slower than the stated pace: shown, never a baseline",
        ),
    ],
)
def test_note_distinguishes_missed_pace_from_too_many_workers(study, runs, said):
    rows = [
        run("allreduce", workers, 4.0, how, oversubscribed=True)
        for how, workers in runs
    ]
    assert summary_notes(study(rows=rows))[0] == said


def test_a_study_in_which_everything_failed_has_a_table_of_notes(study):
    results = study(rows=[run("serial", 1, None, status="failed", error="no mpirun")])
    assert "no mpirun" in text(results)


def test_markup_in_names_stays_text(study):
    assert "[red]x" in text(study(rows=[run("[red]x", 1, 1.0)]))


def test_reductions_against_horovod_and_ddp_have_columns(study):
    rows = [
        run(name, 4, 8.0 * slower)
        for name, slower in (("allreduce", 1), ("horovod", 2), ("ddp", 4))
    ]
    rows += [run("serial", 1, 16.0), run("epoch_average", 4, 4.0)]
    page = text(study(rows=rows))
    header = next(line for line in page.splitlines() if "workers" in line)
    assert re.split("  +", header)[5:8] == ["vs allreduce", "vs horovod", "vs ddp"]
    assert row(page, "epoch_average, virtual")[4:8] == [
        "4.00x",
        "+50 %",
        "+75 %",
        "+88 %",
    ]
    without = text(study(rows=[run("allreduce", 4, 8.0), run("epoch_average", 4, 4.0)]))
    assert "vs horovod" not in without, "a baseline that the study has not"


def test_narrow_table_keeps_the_speedup(study):
    page = text(study(), 80)
    header = next(line for line in page.splitlines() if line.startswith("workers"))
    assert header.split()[-3:] == ["vs", "allreduce", "accuracy"]
    assert "speedup" in header
    assert "no room for: median, spread" in page


@pytest.mark.parametrize("width", some([80, 100, 120, 140], 80, 140))
def test_the_default_study_fits_a_terminal(study, width):
    results = study()
    lines = text(results, width).splitlines()
    assert max(len(line) for line in lines) <= width
    assert not any("…" in line for line in lines), "nothing is cut short"
    times = [str(row[2].text) for row in summary(results).rows]
    assert [time for time in times if not any(time in line for line in lines)] == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0000123, "12.3 µs"),
        (0.0123, "12.3 ms"),
        (0.9999, "1.00 s"),
        (1.234, "1.23 s"),
        (59.96, "60.0 s"),
        (750, "12.5 min"),
        (36000, "10.0 h"),
        (math.nan, "–"),
        (math.inf, "never"),
    ],
)
def test_seconds_have_three_digits_and_a_fitting_unit(value, expected):
    assert seconds(value) == expected


def test_an_interval_has_the_unit_of_its_value():
    assert seconds_with_interval(0.0123, 0.0101, 0.0156) == "12.3 ms [10.1, 15.6]"
    assert seconds_with_interval(0.0123, math.nan, math.nan) == "12.3 ms"


def test_percentages_are_signed():
    assert [percent(x) for x in (0.4712, -0.031, 0.0996, -1e-9, math.nan)] == [
        "+47 %",
        "-3.1 %",
        "+10 %",
        "+0.0 %",
        "–",
    ]


def test_an_interval_of_a_share_follows_it():
    assert percent_with_interval(0.54, 0.508, -0.031) == "+54 % [51, -3.1]"
    assert percent_with_interval(0.54, math.nan, math.nan) == "+54 %"
    assert percent_with_interval(0.54, 0.54, 0.54) == "+54 %"
    assert percent_with_interval(0.0, 0.0, 0.0) == "equal"
    assert percent_with_interval(0.0, math.nan, math.nan) == "+0.0 %"


def test_digits_round_across_a_power_of_ten():
    assert [digits(x) for x in (9.996, 0.09996, 1234.5, 0)] == [
        "10.0",
        "0.100",
        "1,234",
        "0",
    ]


@given(st.floats(allow_nan=False), st.floats(-300, 300))
def test_no_number_is_written_out_to_its_last_digit(value, exponent):
    """Extreme numbers, such as the spread of 1e9 s and 1e-9 s, fit the width of a column."""
    for number in (value, 10**exponent, -(10**exponent)):
        said = (
            digits(number),
            percent(number),
            seconds(number),
            deviation(max(-600.0, min(number, 600.0))),
        )
        assert max(map(len, said)) <= len("a factor of 999,999,999"), said
    assert [digits(1e18), percent(1.5e31), digits(2e-19)] == [
        "1.00e+18",
        "+1.5e+33 %",
        "2.00e-19",
    ]


def test_large_deviations_are_factors():
    said = [
        deviation(math.log(ratio))
        for ratio in (1.03, 1.5, 1 / 1.5, 1.51, 3.09, 1 / 3.09, 1.0)
    ]
    assert said == [
        "3.0 %",
        "50 %",
        "50 %",
        "a factor of 1.5",
        "a factor of 3.1",
        "a factor of 3.1",
        "0.0 %",
    ]


def test_baselines_that_did_not_run_are_named_in_one_line_each(study):
    rows = [
        run("local_sgd", n, 4.0, execution)
        for n in (1, 2)
        for execution in ("native", "virtual")
    ]
    missing = [
        note
        for note in summary_notes(study(rows=rows))
        if note.startswith("no completed run of")
    ]
    assert missing == [
        "no completed run of allreduce at 1, 2 workers (native mpi); allreduce at 1, 2 workers (virtual)",
        "no completed run of serial at 1 worker (native); serial at 1 worker (virtual)",
    ]


def test_summary_table_holds_the_rows_under_their_header(study):
    results = study()
    table = analysis.summary_table(results)
    expected = summary(results)
    assert list(table.columns) == [column.name for column in expected.columns]
    assert table.to_numpy().tolist() == [
        [str(cell.text) for cell in row] for row in expected.rows
    ]


def test_warnings_are_counted_as_check_counts_them(study):
    results = study()
    report = check(Evidence(results))
    (line,) = [
        note
        for note in summary_notes(results, brief=True)
        if "on these numbers" in note
    ]
    assert report.count("warning") > 0
    assert f"{report.count('warning')} warning" in line
    assert ("error" in line) == (report.count("error") > 0)
