"""The table below the answer: rows strategies, columns worker counts, as small as a screen."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from scalebench.analysis.summary import answer_table
from scalebench.errors import UsageError
from scalebench.formatting import BETWEEN_MEANS
from scalebench.tables.screen import Screen
from tests.analysis.conftest import study  # noqa: F401
from tests.analysis.test_comparing import run
from tests.analysis.test_target import cell
from tests.facts import together


def lines(results, width=80, against=()):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(Screen(answer_table(results, against)))
    return [line.rstrip() for line in capture.get().splitlines()]


def below(page, heading, label):
    """The cells of the first row `label` after the line `heading`."""
    start = page.index(heading)
    return (
        next(line for line in page[start:] if line.startswith(label))
        .removeprefix(label)
        .split("  ")
    )


def test_rows_are_strategies_and_columns_worker_counts(study):  # noqa: F811
    rows = [run("serial", 1, 16.0), run("allreduce", 2, 8.0), run("allreduce", 4, 4.0)]
    page = lines(
        study(rows=[*rows, run("epoch_average", 2, 6.0), run("epoch_average", 4, 2.0)])
    )
    assert page[2].split() == ["workers", "1", "2", "4"]
    assert page[3] == "time of 6 epochs"
    assert page[6].split("  ")[0] == "epoch_average"
    assert page[6].split()[1:] == ["6.00", "s", "2.00", "s"]
    assert page[7].split() == ["vs", "allreduce", "(+25", "%)", "(+50", "%)"], (
        "without an interval nothing is shown"
    )
    assert any(
        line.startswith("( ): the interval of the reduction holds zero")
        for line in page
    )


def test_equal_times_are_named_so(study):  # noqa: F811
    """One worker averages with no other: what is computed repeats exactly."""
    times = [("allreduce", 1, 4.0), ("epoch_average", 1, 4.0)]
    rows = [
        run(name, workers, time, "virtual", repetition=number)
        for name, workers, time in times
        for number in range(3)
    ]
    page = lines(study(rows=rows))
    assert any(line.split() == ["vs", "allreduce", "equal"] for line in page), page


def test_reductions_are_against_the_baselines_asked_for(study):  # noqa: F811
    rows = [
        run("allreduce", 4, 8.0),
        run("horovod", 4, 16.0),
        run("epoch_average", 4, 4.0),
    ]
    page = lines(study(rows=rows), against=["horovod", "allreduce"])
    assert [line.strip() for line in page if line.startswith(" vs")] == [
        "vs horovod    (+50 %)",
        "vs horovod    (+75 %)",
        "vs allreduce  (+50 %)",
    ]
    without = study(rows=[run("horovod", 4, 16.0), run("epoch_average", 4, 4.0)])
    assert any("vs horovod" in line for line in lines(without)), (
        "the baseline that the study has"
    )
    with pytest.raises(
        UsageError, match="--against ddp: the study has no completed run of ddp"
    ):
        answer_table(without, ["ddp"])


def test_a_strategy_at_two_batches_has_a_line_for_each(study):  # noqa: F811
    rows = []
    for batch, factor in ((16, 1.0), (32, 0.5)):
        own = [run("serial", 1, 16.0 * factor), run("allreduce", 2, 8.0 * factor)]
        own += [run("epoch_average", 2, 6.0 * factor**2)]
        at_batch = {"batch_per_worker": batch}
        rows += [
            row.model_copy(update={**at_batch, "run_id": f"{row.run_id}-{batch}"})
            for row in own
        ]
    page = lines(study(rows=rows))
    assert (
        below(page, "time of 6 epochs", "serial, batch 16 per worker")[-1].strip()
        == "16.0 s"
    )
    assert (
        below(page, "time of 6 epochs", "serial, batch 32 per worker")[-1].strip()
        == "8.00 s"
    )
    small, large = (
        page.index(line)
        for line in page
        if line.startswith("epoch_average, batch") and " s" in line
    )
    assert (page[small].split()[-2], page[small + 1].split()[-2]) == ("6.00", "(+25")
    assert (page[large].split()[-2], page[large + 1].split()[-2]) == ("1.50", "(+62")


def test_metric_stands_below_times_where_no_target_is_stated(study):  # noqa: F811
    rows = [
        run("allreduce", 4, 8.0, final_metric=0.9),
        run("epoch_average", 4, 4.0, final_metric=0.8),
    ]
    page = lines(study(rows=rows))
    assert below(page, "test accuracy", "allreduce")[-1].strip() == "0.900"
    assert below(page, "test accuracy", "epoch_average")[-1].strip() == "0.800"


def test_target_has_time_epochs_and_what_never_reaches_it(study):  # noqa: F811
    rows = cell("serial", 1, (1.0, 1.0, 1.0)) + cell("allreduce", 2, (1.0, 2.0, None))
    rows += cell("epoch_average", 2, (None, None, None)) + cell(
        "epoch_async", 2, (1.0, None, None)
    )
    page = lines(study(rows=rows))
    start = page.index("time/epochs to accuracy 0.9")
    target = {
        line.split()[0]: line.split(maxsplit=1)[1]
        for line in page[start + 1 : start + 6]
    }
    assert target["serial"] == "1.00 s/2"
    assert target["allreduce"] == "2.00 s/3*"
    assert target["epoch_average"] == "never"
    assert target["epoch_async"] == "1 of 3"
    assert together(" ".join(page), "median", "Kaplan-Meier")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_default_study_fits_a_screen(study, width):  # noqa: F811
    results = study()
    page = lines(results, width)
    counts = next(line for line in page if line.startswith("workers")).split()[1:]
    table = page[
        : next(
            n
            for n, line in enumerate(page)
            if line.startswith(("no room", "( )", "virtual against"))
        )
    ]
    assert max(map(len, page)) <= width
    assert len(table) <= 24
    assert str(max(results.runs["workers"])) in counts, (
        "the largest count is never left out"
    )
    hidden = set(map(str, results.runs["workers"])) - set(counts)
    text = " ".join(page)
    assert all(re.search(rf"no room for: .*\b{count}\b", text) for count in hidden)


def test_oversubscribed_times_are_marked(study):  # noqa: F811
    page = lines(study(rows=[run("allreduce", 4, 8.0, "native", oversubscribed=True)]))
    assert any("8.00 s ×" in line for line in page)


def test_study_without_a_strategy_that_the_reader_left_out_does_not_miss_it(study):  # noqa: F811
    results = study(rows=[run("allreduce", 4, 8.0), run("epoch_average", 4, 4.0)])
    assert any("no completed run of serial" in line for line in lines(results)), (
        "what was chosen is unknown"
    )
    results.study["strategies"] = ["allreduce", {"epoch_average": {}}]
    assert not any("no completed run" in line for line in lines(results))


def test_bounds_stand_in_place_of_a_number_that_nothing_supports(study):  # noqa: F811
    rows = [
        run("allreduce", 4, 8.0 + r / 10, "native", repetition=r, run_order=2 * r)
        for r in range(3)
    ]
    rows += [
        run("epoch_average", 4, 4.0**r, "native", repetition=r, run_order=2 * r + 1)
        for r in range(3)
    ]
    page = lines(study(rows=rows))
    found = [line.split("  ")[-1].strip() for line in page if ".." in line]
    assert found[:2] == ["0.1..100 s", "-1399..+98 %"], (
        "4 s by a factor of exp(4.30 ln(4) / sqrt(3)), against 8.1 s"
    )
    assert found[2:] == [BETWEEN_MEANS]


def test_time_of_a_disturbed_cell_is_shown_however_wide_its_interval(study):  # noqa: F811
    page = lines(
        study(
            rows=[
                run("allreduce", 4, 4.0**r, "native", repetition=r, others_load=0.9)
                for r in range(3)
            ]
        )
    )
    assert any(line.endswith("4.00 s †") for line in page)
