"""The answer names the runs that would show an effect where none is shown."""

from __future__ import annotations

import pytest

from scalebench.report.answer import answer, spoken
from scalebench.report.comparison import as_text, comparisons
from tests.facts import in_order, together
from tests.report.test_answer import ACCURACY, SECONDS, cell

VIRTUAL = {"execution": "virtual", "engine": "virtual"}
AIM = {"target_metric": 0.9, "epochs": 6}


def lines(keep, *cells):
    return " ".join(spoken(keep([run for cell in cells for run in cell])))


def test_number_of_runs_that_would_show_a_saving_is_named(keep):
    text = lines(
        keep,
        cell("allreduce"),
        cell("epoch_average", (0.9, 1.2, 0.95, 1.1, 0.9), ACCURACY["allreduce"]),
    )
    assert in_order(text, "epoch_average took 0.5 % less time", "holds zero")
    assert "would show which is faster" in text
    runs = int(text.partition("(--repetitions ")[2].partition(")")[0])
    assert in_order(text, f"{runs} runs", f"--repetitions {runs}")
    assert 5 < runs <= 100


def test_quieter_machine_is_advised_where_times_vary(keep):
    text = lines(
        keep,
        cell("allreduce"),
        cell("epoch_average", (0.3, 2.0, 0.4, 1.6, 0.5), ACCURACY["allreduce"]),
    )
    assert "on a quieter machine" in text


def test_single_runs_need_repetitions(keep):
    text = lines(keep, cell("allreduce", (1.0,)), cell("epoch_average", (0.5,)))
    assert in_order(text, "would show both", "--repetitions 6")


def test_two_seeds_need_a_third_for_the_metric(keep):
    text = lines(
        keep, cell("allreduce", (1.0, 1.1)), cell("epoch_average", (0.5, 0.55))
    )
    assert in_order(text, "--repetitions 6", "metric", "interval")


def test_shown_saving_needs_nothing(keep):
    text = lines(keep, cell("allreduce"), cell("epoch_average"))
    assert "would show" not in text


def test_simulated_saving_needs_a_quieter_calibration(keep):
    rows = (
        cell("allreduce", (1.0, 1.4, 0.8), **VIRTUAL),
        cell("epoch_average", (1.0, 0.9, 1.2), **VIRTUAL),
    )
    text = lines(keep, *rows)
    assert in_order(text, "calibration", "quieter machine", "scalebench recalibrate")


def test_horovod_is_the_baseline_of_a_study_without_allreduce(keep):
    results = keep(
        [
            *cell("horovod", (1.0, 1.1, 0.9), engine="horovod"),
            *cell("epoch_average", (0.5, 0.55, 0.45)),
        ]
    )
    found = answer(results, comparisons(results))
    text = as_text(found.sentence)
    assert in_order(text, "epoch_average", "50 % less", "horovod")
    besides = [as_text(sentence) for sentence in found.beside]
    assert any(
        in_order(text, "horovod", "engine", "allreduce did not run") for text in besides
    )


@pytest.mark.parametrize(
    ("allreduce", "average", "expected"),
    [
        ((0.5,) * 5, (0.2, 0.2, 0.21, 0.2, 0.19), ("epoch_average", "60 % less", "accuracy 0.9", "allreduce")),
        ((0.5,) * 5, (None,) * 5, ("0 of 5", "epoch_average", "5 of 5", "allreduce", "6 epochs")),
        ((None,) * 5, (0.2,) * 5, ("5 of 5", "epoch_average", "0 of 5", "allreduce", "6 epochs")),
        ((None,) * 5, (0.2, None, None, None, None), ("1 of 5", "epoch_average", "0 of 5", "allreduce")),
        ((0.5,) * 5, (0.2, 0.3, 0.25, 0.2, None), ("Kaplan-Meier", "4 of 5", "epoch_average")),
    ],
)  # fmt: skip
def test_time_to_target_is_a_second_headline(keep, allreduce, average, expected):
    rows = [
        (
            run.model_copy(
                update={"time_to_target_s": time, "epochs_to_target": time and 3} | AIM
            ),
            [],
        )
        for name, times in (("allreduce", allreduce), ("epoch_average", average))
        for (run, _), time in zip(cell(name), times, strict=True)
    ]
    results = keep(rows)
    found = answer(results, comparisons(results))
    text = " ".join(as_text(sentence) for sentence in (found.sentence, *found.target))
    assert in_order(text, *expected)
    assert in_order(" ".join(spoken(results)), *expected)


def _reached(run, share):
    return {
        "time_to_target_s": share and share * run.train_s,
        "epochs_to_target": share and 2,
    }


def aimed(name, share, **where):
    """Runs of a cell that reach the target after this share of their time; None: they do not."""
    return [
        (run.model_copy(update=AIM | _reached(run, share)), [])
        for run, _ in cell(name, **where)
    ]


def test_headline_ranks_by_time_to_target_where_a_run_reaches_it(keep):
    """One strategy is the fastest at 64 workers, where nothing reaches the target; another sooner there at 8."""
    rows = [
        *aimed("allreduce", 0.5, workers=8),
        *aimed("epoch_async", 0.46, workers=8, seconds=SECONDS["allreduce"]),
    ]
    rows += [*aimed("epoch_average", None, workers=8)]
    for name in ("allreduce", "epoch_average"):
        rows += aimed(name, None, workers=64)
    lines = spoken(keep(rows))
    assert together(lines[0], "8 workers", "epoch_async", "8.0 % less time")
    later = ("64 workers", "no run", "epoch_average", "50 % less", "allreduce", "all 6")
    assert in_order(lines[0], "accuracy 0.9", "allreduce", *later)
    assert in_order(lines[0], *later, "accuracy", "worse by 2.2 points (0.946", "0.968")


def test_target_that_is_reached_at_the_largest_count_is_the_headline(keep):
    rows = [*aimed("allreduce", 0.5), *aimed("epoch_average", 0.6)]
    lines = spoken(keep(rows))
    assert together(lines[0], "8 workers", "epoch_average", "40 % less time")
    assert in_order(
        lines[0],
        "accuracy 0.9",
        "6 epochs",
        "epoch_average",
        "50 % less",
        "allreduce (",
    )


def test_largest_count_at_which_both_reach_it_is_named(keep):
    rows = []
    for workers, reached in ((4, 0.3), (8, None)):
        for name, factor in (("allreduce", 1.0), ("epoch_average", 0.5)):
            for run, _ in cell(name, workers=workers):
                time = reached and factor * reached * run.train_s
                rows.append(
                    (
                        run.model_copy(
                            update={
                                "time_to_target_s": time,
                                "epochs_to_target": time and 2,
                            }
                            | AIM
                        ),
                        [],
                    )
                )
    text = " ".join(spoken(keep(rows)))
    reached = (
        "At 4 workers",
        "epoch_average",
        "75 % less",
        "accuracy 0.9",
        "allreduce",
    )
    assert in_order(text, *reached)
    assert in_order(text, *reached, "8 workers", "no run", "epoch_average", "50 % less")
