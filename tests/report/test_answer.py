"""The answer of the report for every outcome of a study."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

from scalebench.formatting import metric_change, metric_with_interval
from scalebench.records.progress import Planned, keep_planned
from scalebench.records.schema import EpochRow
from scalebench.report.answer import answer, headline_so_far, spoken
from scalebench.report.comparison import as_text, comparisons, headline
from tests.facts import in_order, together
from tests.records_factory import epoch_row, run_row, study_rows

ORDER = ("serial", "allreduce", "horovod", "ddp", "epoch_average", "epoch_async")
SECONDS = {
    "allreduce": (1.0, 1.1, 0.9, 1.0, 1.05),
    "epoch_average": (0.5, 0.54, 0.46, 0.51, 0.52),
}
ACCURACY = {
    "allreduce": (0.97, 0.96, 0.975, 0.965, 0.97),
    "epoch_average": (0.95, 0.935, 0.955, 0.94, 0.95),
}


def cell(
    strategy,
    seconds=None,
    accuracy=None,
    *,
    workers=8,
    execution="native",
    engine="mpi",
    **changes,
):
    """Return the runs of one cell, one for each of `seconds`, with the metrics `accuracy`."""
    seconds = seconds or SECONDS[strategy]
    accuracy = accuracy or ACCURACY.get(strategy, (0.97,) * len(seconds))
    where = {
        "workers": workers,
        "batch_global": changes.pop("batch_global", 8 * workers),
        "execution": execution,
        "engine": engine,
    }
    runs = [
        run_row(
            run_id=f"{execution}-{engine}-{strategy}-{workers}-{number}",
            strategy=strategy,
            repetition=number,
            seed=number,
            run_order=1000 * number + 10 * workers + ORDER.index(strategy),
            train_s=time,
            final_metric=metric,
            **where,
            **changes,
        )
        for number, (time, metric) in enumerate(zip(seconds, accuracy, strict=False))
    ]
    return [
        (
            run,
            [epoch_row(run_id=run.run_id, epoch=epoch) for epoch in range(run.epochs)],
        )
        for run in runs
    ]


def said(keep, *cells):
    results = keep([run for cell in cells for run in cell])
    return answer(results, comparisons(results))


def sentence(keep, *cells):
    return as_text(said(keep, *cells).sentence)


def beside(keep, *cells):
    return [as_text(one) for one in said(keep, *cells).beside]


def test_answer_has_saving_and_metric_with_intervals(keep):
    text = sentence(keep, cell("allreduce"), cell("epoch_average"))
    assert together(
        text, "8 workers", "epoch_average", "50 % less time", "allreduce", "505 ms"
    )
    assert together(text, "95 % confidence interval", "5 runs", "measured")
    assert together(
        text, "accuracy", "worse", "2.2 points", "0.946", "0.968", "-2.5 to -1.9 points"
    )
    assert text.endswith("95 % confidence interval over 5 seeds).")


def test_answer_has_numbers_of_the_comparison(keep):
    results = keep([*cell("allreduce"), *cell("epoch_average")])
    (one,) = [one for one in comparisons(results) if one.answers]
    logs = [
        math.log(a / b)
        for a, b in zip(SECONDS["epoch_average"], SECONDS["allreduce"], strict=True)
    ]
    assert one.saved.value == pytest.approx(1 - math.exp(sum(logs) / 5))
    assert one.saved.low < one.saved.value < one.saved.high
    assert one.difference.value == pytest.approx(-0.022)


def test_loss_of_time_is_stated_as_more_time(keep):
    near = (0.97, 0.96, 0.975, 0.97, 0.965)
    slow = cell("epoch_average", [2 * time for time in SECONDS["allreduce"]], near)
    text = sentence(keep, cell("allreduce"), slow)
    assert in_order(
        text, "epoch_average", "100 % more", "allreduce", "100 to 100 % more"
    )
    assert in_order(text, "accuracy", "equal within 1 point", "0.968", "0.968", "-0.")


def test_overlapping_intervals_give_no_saving(keep):
    same = cell("epoch_average", (0.9, 1.2, 0.95, 1.1, 0.9), ACCURACY["allreduce"])
    text = sentence(keep, cell("allreduce"), same)
    assert in_order(
        text, "epoch_average took", "less time", "allreduce (", "holds zero"
    )
    assert " more to " in text.partition("less, 95 %")[0], (
        "the interval holds zero, so its ends lie on both sides"
    )


def test_equal_metrics_of_all_seeds_are_the_same(keep):
    alike = cell("epoch_average", accuracy=ACCURACY["allreduce"])
    text = sentence(keep, cell("allreduce"), alike)
    assert in_order(text, "accuracy", "equal (0.968", "5 seeds).")
    assert metric_with_interval(0.0, 0.0, 0.0, signed=True) == "equal"
    assert metric_change(-0.0003, "accuracy", 0.0077) == "-0.03 to +0.77 points"
    assert metric_change(-1e-9, "accuracy", 0.0) == "+0.0 to +0.0 points"


def test_narrow_interval_around_zero_is_about_as_long(keep):
    same = cell(
        "epoch_average", (0.995, 1.105, 0.9, 0.995, 1.055), ACCURACY["allreduce"]
    )
    text = sentence(keep, cell("allreduce"), same)
    assert in_order(text, "epoch_average", "about as long", "allreduce (")


def test_single_run_has_no_interval(keep):
    text = sentence(keep, cell("allreduce", (1.0,)), cell("epoch_average", (0.5,)))
    assert in_order(text, "epoch_average took 50 % less", "one run", "no interval")
    assert in_order(
        text, "accuracy", "undecided (0.950", "0.970", "one seed", "no interval)"
    )


def test_missing_metric_is_not_measured(keep):
    none = {"metric_name": None}
    silent = [
        [
            (run.model_copy(update={"final_metric": None}), [])
            for run, _ in cell(strategy, **none)
        ]
        for strategy in ("allreduce", "epoch_average")
    ]
    assert in_order(sentence(keep, *silent), "accuracy", "not measured.")


def test_r2_is_not_a_percentage(keep):
    one = said(
        keep,
        cell("allreduce", metric_name="r2"),
        cell("epoch_average", metric_name="r2"),
    )
    assert in_order(one.question, "R²?")
    assert in_order(as_text(one.sentence), "R²", "worse by 0.022")


def test_headline_takes_largest_worker_count(keep):
    best = cell(
        "epoch_average", [time / 10 for time in SECONDS["allreduce"]], workers=4
    )
    text = sentence(
        keep,
        cell("allreduce", workers=4),
        best,
        cell("allreduce"),
        cell("epoch_average"),
    )
    assert in_order(text, "At 8 workers", "epoch_average", "50 % less")
    assert "4 workers" not in text


def test_headline_prefers_measured_at_equal_counts(keep):
    virtual = {"execution": "virtual", "engine": "virtual"}
    native, simulated = (
        (cell("allreduce"), cell("epoch_average")),
        (
            cell("allreduce", **virtual),
            cell("epoch_average", **virtual),
        ),
    )
    assert "5 runs of each; measured)" in sentence(keep, *simulated, *native)
    assert any(
        text.startswith("Virtual, at 8 workers: ")
        for text in beside(keep, *simulated, *native)
    )
    further = (
        cell("allreduce", **virtual, workers=16),
        cell("epoch_average", **virtual, workers=16),
    )
    one = said(keep, *native, *further)
    assert as_text(one.sentence).startswith("At 16 workers")
    assert "virtual time, real training" in as_text(one.sentence)
    assert any(
        as_text(text).startswith("No native run checks the virtual times")
        for text in one.beside
    )


def test_answer_names_number_of_compared_strategies(keep):
    other = cell(
        "epoch_async",
        [0.8 * time for time in SECONDS["allreduce"]],
        ACCURACY["allreduce"],
    )
    texts = beside(keep, cell("allreduce"), cell("epoch_average"), other)
    assert any(
        in_order(text, "2 strategies", "8 workers", "epoch_average", "least time.")
        for text in texts
    )
    assert any(
        in_order(text, "Without a loss of accuracy", "epoch_async", "20 % less")
        for text in texts
    )


def test_tie_is_named(keep):
    """The means differ by a thousandth, the noise is some percent."""
    noise = (1.1, 0.9, 1.1, 0.9, 1.02)
    seconds = [
        1.001 * time * factor
        for time, factor in zip(SECONDS["epoch_average"], noise, strict=True)
    ]
    one = said(
        keep, cell("allreduce"), cell("epoch_average"), cell("epoch_async", seconds)
    )
    assert in_order(
        as_text(one.beside[0]),
        "2 strategies",
        "8 workers",
        "epoch_average ties",
        "epoch_async",
        "hold zero.",
    )


def test_two_seeds_give_no_metric_difference(keep):
    text = sentence(
        keep,
        cell("allreduce", (1.0, 1.1)),
        cell("epoch_average", (0.5, 0.54), (0.9, 0.95)),
    )
    assert in_order(text, "accuracy", "undecided (", "no interval", "2 seeds).")


def test_virtual_interval_counts_draws_not_runs(keep):
    virtual = {"execution": "virtual", "engine": "virtual"}
    text = sentence(
        keep, cell("allreduce", **virtual), cell("epoch_average", **virtual)
    )
    assert in_order(text, "calibration interval", "5 repetitions", "virtual time")


def test_single_check_withholds_virtual_interval(keep):
    virtual = {"execution": "virtual", "engine": "virtual"}
    cells = [cell(name, **virtual) for name in SECONDS] + [
        cell("allreduce", (4.0, 4.0), workers=1, **virtual)
    ]
    one = said(keep, *cells, cell("allreduce", (12.4, 12.4), workers=1))
    assert in_order(as_text(one.sentence), "no interval", "5 repetitions; virtual")
    assert any(
        in_order(
            as_text(text), "factor of 3.1", "root mean square", "1 check", "too few"
        )
        for text in one.beside
    )


def test_answer_names_worker_count_from_which_saving_holds(keep):
    none = (
        cell("allreduce", workers=2),
        cell("epoch_average", (0.9, 1.2, 0.95, 1.1, 0.9), workers=2),
    )
    some = [cell(strategy, workers=count) for strategy in SECONDS for count in (4, 8)]
    assert any(
        in_order(text, "epoch_average", "shown", "every worker count", "4 to 8.")
        for text in beside(keep, *none, *some)
    )


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ([cell("allreduce", (1.0,), status="failed")], "no run was completed"),
        ([cell("allreduce", status="failed")], "no run was completed"),
        (
            [cell("allreduce"), cell("horovod", (2.0,))],
            "less often than every batch",
        ),
        (
            [cell("epoch_average")],
            "no completed run of a per-batch baseline; add --strategy allreduce",
        ),
        (
            [cell("allreduce", workers=1), cell("epoch_average", workers=1)],
            "all runs have one worker",
        ),
        (
            [
                cell("allreduce", oversubscribed=True),
                cell("epoch_average", oversubscribed=True),
            ],
            "every run of several workers is oversubscribed",
        ),
        (
            [cell("allreduce"), cell("epoch_average", engine="gloo")],
            "no strategy ran beside its baseline on the same engine",
        ),
        (
            [cell("allreduce", workers=4), cell("epoch_average")],
            "no strategy ran beside its baseline on the same engine",
        ),
    ],
)
def test_missing_answer_has_a_reason(keep, cells, why):
    found = said(keep, *cells)
    text = " ".join(as_text(one) for one in (found.sentence, *found.target))
    assert in_order(text, why)
    several = [run for cell in cells for run, _ in cell if run.workers > 1]
    ranked = [run for run in several if run.status == "completed"]
    start = "At 8 workers" if ranked else "These records cannot answer it"
    assert text.startswith(start)


def test_order_by_time_and_speedup_over_serial_need_no_baseline(keep):
    """Two workers of gloo on two cores: the most common first day."""
    crowded = {"workers": 2, "engine": "gloo", "oversubscribed": True}
    rows = [
        *cell("serial", (1.2, 1.3, 1.1), workers=1),
        *cell("allreduce", (2.0, 2.1, 1.9), **crowded),
        *cell("epoch_average", (0.6, 0.65, 0.55), **crowded),
    ]
    results = keep(rows)
    (line, *_) = spoken(results)
    assert in_order(line, "At 2 workers, epoch_average took the least time", "599 ms ×")
    assert in_order(line, "then allreduce with 2.00 s ×", "speedup 2.00 over serial")
    assert in_order(
        line, "No saving is stated", "each of gloo with a thread that moves bytes"
    )
    assert in_order(line, "more cores", "--execution virtual")
    assert not any(one.answers for one in comparisons(results))


def test_disturbed_native_runs_are_ordered_beside_the_virtual_answer(keep):
    rows = [row for name in SECONDS for row in cell(name, **VIRTUAL)]
    for name, seconds in (("allreduce", (3.0, 3.1)), ("epoch_average", (1.0, 1.1))):
        rows += cell(name, seconds, workers=2, others_load=0.6)
    results = keep(rows)
    lines = spoken(results)
    page = map(as_text, answer(results, comparisons(results)).beside)
    assert lines[1] in page
    assert in_order(lines[0], "At 8 workers", "epoch_average takes 50 % less time")
    assert in_order(
        lines[1], "At 2 workers, epoch_average took the least time", "1.05 s †"
    )
    assert in_order(lines[1], "then allreduce with 3.05 s †", "measured")
    checked = (
        "No native run checks the virtual times of this study: every one is disturbed"
    )
    assert lines[2].startswith(checked)


def test_late_steps_of_the_only_baseline_are_the_reason(keep):
    paced = {"workers": 4, "execution": "paced", "engine": "gloo", "batch_global": 64}
    rows = [
        *cell("serial", (4.0, 4.1), workers=1, execution="paced", batch_global=64),
        *cell("ddp", (2.0, 2.1), paced_overrun=0.12, oversubscribed=True, **paced),
        *cell("epoch_average", (1.0, 1.1), paced_overrun=0.0, **paced),
    ]
    (line, *_) = spoken(keep(rows))
    assert in_order(line, "At 4 workers", "epoch_average took the least time", "1.05 s")
    assert in_order(
        line, "then ddp with 2.05 s ×", "over serial", "No saving is stated"
    )
    assert in_order(line, "every run of ddp of several workers", "12 % of them")
    assert in_order(line, "a longer device_step_time")


def test_disturbed_serial_gives_its_time_in_place_of_a_speedup(keep):
    rows = [
        *cell("serial", (1.0, 1.1), workers=1, others_load=0.6),
        *cell("epoch_average", (0.6, 0.7), workers=2, others_load=0.6),
    ]
    (line, *_) = spoken(keep(rows))
    assert in_order(line, "epoch_average took", "648 ms †", "serial took 1.05 s †")
    assert "speedup" not in line


def test_oversubscribed_runs_give_no_answer(keep):
    crowded = [cell(strategy, workers=16, oversubscribed=True) for strategy in SECONDS]
    assert sentence(
        keep, cell("allreduce"), cell("epoch_average"), *crowded
    ).startswith("At 8 workers")


def test_the_headline_is_of_counts_at_which_workers_synchronise_less_often_than_in_every_step(
    keep,
):
    """Two steps of an epoch at 8 workers, one at 16: there averaging every epoch is averaging every step."""
    steps = {8: {"optimizer_steps": 4}, 16: {"optimizer_steps": 2}}
    runs = [
        cell(
            name,
            workers=count,
            syncs=2 if name == "epoch_average" else made["optimizer_steps"],
            **made,
        )
        for count, made in steps.items()
        for name in ("allreduce", "epoch_average")
    ]
    assert sentence(keep, *runs).startswith("At 8 workers")
    assert sentence(keep, *runs[2:]).startswith("At 16 workers")


def test_default_study_has_an_answer(keep):
    results = keep(study_rows())
    found = [one for one in comparisons(results) if one.answers]
    assert {one.cell.label for one in found} == {"epoch_average", "epoch_async"}
    first = headline(found)
    assert (first.cell.workers, first.cell.execution) == (64, "virtual")
    assert first.saved.value == max(
        one.saved.value for one in found if one.cell.workers == 64
    )


def test_stated_step_times_have_no_interval(keep):
    said_of = [cell(name, (t,) * 3, execution="virtual", engine="virtual") for name, t in
               (("allreduce", 2.0), ("epoch_average", 1.0))]  # fmt: skip
    text = sentence(keep, *said_of)
    assert in_order(text, "epoch_average", "50 % less", "1.00 s", "2.00 s")
    assert in_order(text, "no interval", "nothing varies", "virtual time")


def test_deterministic_saving_is_not_called_shown(keep):
    """Stated step times without jitter have no interval."""
    virtual = {"execution": "virtual", "engine": "virtual"}
    times = {"allreduce": 2.0, "epoch_average": 1.0, "epoch_async": 1.0}
    cells = [
        cell(name, (t,) * 3, workers=count, **virtual)
        for name, t in times.items()
        for count in (4, 8)
    ]
    said_beside = beside(keep, *cells)
    assert any(
        in_order(text, "less time", "every worker count", "4 to 8.")
        for text in said_beside
    )
    assert not any("shown to save" in text for text in said_beside)
    assert any(re.search(r"epoch_a\w+ ties .* epoch_a", text) for text in said_beside)


def test_stated_step_times_have_no_calibration_draws(keep):
    stated = {"execution": "virtual", "engine": "virtual", "cluster": "juwels-booster"}
    text = sentence(keep, cell("allreduce", **stated), cell("epoch_average", **stated))
    assert in_order(text, "stated step times", "5 repetitions; virtual")
    assert "calibration" not in text


def spoken_of(keep, *cells):
    return spoken(keep([run for cell in cells for run in cell]))


UNCLEAR = (0.9, 1.2, 0.95, 1.1, 0.9)
VIRTUAL = {"execution": "virtual", "engine": "virtual"}


def brackets(line):
    return max(text.count("(") for text in re.split(r"(?<=[.)])\. (?=[A-Z])", line))


def test_first_sentence_is_the_one_that_is_shown(keep):
    """At the largest worker count nothing is shown, at four something is."""
    some = cell("allreduce", workers=4), cell("epoch_average", workers=4)
    unclear = cell("allreduce", workers=16), cell("epoch_average", UNCLEAR, workers=16)
    text = sentence(keep, *some, *unclear)
    assert in_order(text, "At 4 workers", "epoch_average", "50 % less")
    assert "16 workers" not in text


def test_largest_count_is_named_where_nothing_is_shown(keep):
    unclear = [cell(name, times, workers=n) for n in (4, 16) for name, times in
               (("allreduce", None), ("epoch_average", UNCLEAR))]  # fmt: skip
    text = sentence(keep, *unclear)
    assert in_order(text, "At 16 workers", "epoch_average took", "holds zero")


def test_what_was_measured_at_few_workers_comes_after_what_is_simulated_at_many(keep):
    native = cell("allreduce", workers=2), cell("epoch_average", UNCLEAR, workers=2)
    simulated = (
        cell("allreduce", workers=64, **VIRTUAL),
        cell("epoch_average", workers=64, **VIRTUAL),
    )
    lines = spoken_of(keep, *native, *simulated)
    assert in_order(lines[0], "At 64 workers", "epoch_average", "50 % less", "virtual")
    assert in_order(lines[0], "real training", "accuracy", "worse by 2.2 points (")
    assert in_order(
        lines[1], "natively", "2 workers", "epoch_average took", "holds zero"
    )
    assert all(brackets(line) <= 2 for line in lines)


def test_undecided_loss_is_not_softened(keep):
    losses = (0.45, 0.75, 0.70, 0.56, 0.71)
    even = (0.70, 0.71, 0.70, 0.70, 0.70)
    text = sentence(
        keep, cell("allreduce", accuracy=even), cell("epoch_average", accuracy=losses)
    )
    assert in_order(text, "accuracy", "undecided (0.634", "0.702;")


def test_calibration_beside_other_programs_is_named(keep):
    results = keep([run for name in SECONDS for run in cell(name, **VIRTUAL)])
    assert "other programs" not in " ".join(spoken(results))
    marked = dataclasses.replace(
        results, runs=results.runs.assign(calibration="disturbed")
    )
    assert in_order(spoken(marked)[0], "virtual time", "calibrated", "other programs)")


def test_disturbed_runs_give_no_answer(keep):
    busy = [cell(strategy, workers=16, others_load=0.9) for strategy in SECONDS]
    lines = spoken_of(keep, cell("allreduce"), cell("epoch_average"), *busy)
    assert lines[0].startswith("At 8 workers")
    assert any(
        in_order(line, "Beware", "2 cells", "disturbed", "other programs")
        for line in lines
    )


def test_headline_of_a_study_that_still_runs_is_the_first_line_without_advice(keep):
    results = keep([run for name in SECONDS for run in cell(name, **VIRTUAL)])
    assert in_order(headline_so_far(results), "At 8 workers", "epoch_average")
    assert spoken(results)[0].startswith(headline_so_far(results))
    assert headline_so_far(keep(cell("allreduce", **VIRTUAL))) == ""


def test_answer_carries_the_warning_of_few_runs(keep):
    few = cell("allreduce", (1.0, 1.1, 1.05)), cell("epoch_average", (0.5, 0.55, 0.52))
    assert any(
        in_order(line, "Beware", "2 native cells", "3 runs")
        for line in spoken_of(keep, *few)
    )


def test_crowded_engines_are_explained(keep):
    """Two cores: Horovod and DDP at two workers are oversubscribed; a step of 6 epochs of 449 takes 1.3 ms."""
    crowded = {"workers": 2, "oversubscribed": True}
    native = (
        cell("horovod", (4.0,), engine="horovod", **crowded),
        cell("ddp", (4.0,), engine="gloo", **crowded),
    )
    steps = {"steps_per_epoch": 449, **VIRTUAL, "workers": 2}
    simulated = (
        cell("horovod", (3.5,), **steps),
        cell("allreduce", (1.2,), **steps),
        cell("epoch_average", (0.8,), **steps),
    )
    text = " ".join(spoken_of(keep, *native, *simulated))
    assert in_order(text, "2 workers", "horovod", "ddp", "more cores", "×", "native")
    assert in_order(text, "several workers", "virtual ones alone.")
    assert in_order(text, "step of horovod", "1.30 ms", "2 workers (virtual)")
    assert in_order(text, "1.30 ms", "allreduce", "445 µs", "1.00 ms")


def test_study_that_is_not_complete_is_to_be_continued(keep):
    """Their epochs are there: runs that lost them are left, too."""
    rows = [
        row for row, _ in (*cell("allreduce", (1.0,)), *cell("epoch_average", (0.5,)))
    ]
    results = keep(
        [
            (
                row,
                [
                    EpochRow(run_id=row.run_id, attempt=1, epoch=n)
                    for n in range(row.epochs)
                ],
            )
            for row in rows
        ]
    )
    assert "--repetitions" in spoken(results)[0]
    rows = [Planned(run_id, config_hash, "native mpi") for run_id, config_hash in
            results.runs[["run_id", "config_hash"]].itertuples(index=False)]  # fmt: skip
    keep_planned(results.folder, [*rows, Planned("to-come", "c0ffee", "native mpi")])
    (line, *_) = spoken(results)
    assert in_order(line, "same command", "1 run")
    assert "--repetitions" not in line


def test_runs_that_are_left_come_before_advice_where_nothing_is_compared(keep):
    results = keep([*cell("allreduce", (1.0,)), *cell("allreduce", (1.0,), workers=1)])
    assert in_order(spoken(results)[0], "add one, as --strategy epoch_average")
    rows = [Planned(run_id, config_hash, "native mpi") for run_id, config_hash in
            results.runs[["run_id", "config_hash"]].itertuples(index=False)]  # fmt: skip
    keep_planned(results.folder, [*rows, Planned("to-come", "c0ffee", "native mpi")])
    (line, *_) = spoken(results)
    assert in_order(line, "At 8 workers", "allreduce took 1.00 s", "1 run is left")
    assert "add one" not in line
