"""Pairs of runs by run order and start times."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from scalebench.analysis import Results, differences, ratios
from scalebench.analysis.intervals import RATIO_WHEN_STOPPED, unpaired_ratio
from scalebench.analysis.methodology import findings
from scalebench.analysis.rounds import paired_rounds, paired_times, runs_by_cell
from scalebench.cluster.cluster_file import load_cluster
from scalebench.comm import engines
from scalebench.launch.hosts import Allocation, Host
from scalebench.launch.sweep import expand
from scalebench.study.spec import Study
from tests.analysis.test_comparing import only, run


def two(study, order_a, order_b, execution="native", engine_b="mpi"):
    rows = [
        run("allreduce", 2, 2.0 + r, execution, repetition=r, run_order=at)
        for r, at in enumerate(order_a)
    ]
    engine = None if execution == "virtual" else engine_b
    rows += [
        run("epoch_average", 2, 1.0, execution, engine, repetition=r, run_order=at)
        for r, at in enumerate(order_b)
    ]
    first, second = sorted(runs_by_cell(study(rows=rows)), key=lambda cell: cell.label)
    return first, second


@pytest.mark.parametrize(
    ("order_a", "order_b", "paired"),
    [
        ((0, 3, 4), (1, 2, 5), True),  # drawn anew in each round
        ((0, 1, 2), (3, 4, 5), False),  # one launch after the other
        (
            (0, 2, 3),
            (1, 4, 5),
            False,
        ),  # the second's round 1 ends after the first's round 2 began
    ],
)
def test_run_order_determines_pairs(study, order_a, order_b, paired):
    a, b = two(study, order_a, order_b)
    assert paired_rounds(a, b) == paired_rounds(b, a) == ([0, 1, 2] if paired else None)


def test_virtual_repetitions_are_paired_whenever_they_were_computed(study):
    assert paired_rounds(*two(study, (0, 1, 2), (3, 4, 5), "virtual")) == [0, 1, 2]


def test_engines_may_differ_in_a_pair(study):
    assert paired_rounds(*two(study, (0, 3, 4), (1, 2, 5), engine_b="horovod")) == [
        0,
        1,
        2,
    ]


def test_pairs_are_of_common_rounds(study):
    rows = [
        run("allreduce", 2, 2.0 + r, "native", repetition=r, run_order=2 * r)
        for r in (0, 2, 3)
    ]
    rows += [
        run("epoch_average", 2, 1.0 + r, "native", repetition=r, run_order=2 * r + 1)
        for r in (0, 1, 3)
    ]
    a, b = sorted(runs_by_cell(study(rows=rows)), key=lambda cell: cell.label)
    assert paired_times(a, b) == ([2.0, 5.0], [1.0, 4.0])


NAMES = ("serial", "allreduce", "epoch_average", "local_sgd")
STEP_S = 10.0  # from run to run


def sessions(study, *sessions, repetitions=5, timed=True, begins=(0.0, 3600.0)):
    """A study of four points with runs of 9 s that began every 10 s, in two sessions an hour apart.

    Each session is a list of (name, repetition, attempt); the first one's default is
    every round in turn.
    """
    rows = {}
    for begin, runs in zip(begins, sessions, strict=False):
        for place, (name, repetition, attempt) in enumerate(runs):
            at = datetime(2026, 11, 21, tzinfo=UTC) + timedelta(
                seconds=begin + STEP_S * place
            )
            rows[name, repetition] = run(
                name,
                1 if name == "serial" else 2,
                9.0 + 0.1 * repetition,
                "native",
                repetition=repetition,
                seed=repetition,
                attempt=attempt,
                run_order=len(NAMES) * repetition + NAMES.index(name),
                started_utc=at.isoformat(timespec="milliseconds") if timed else None,
            )
    results = study(rows=list(rows.values()))
    return results, {cell.label: cell for cell in runs_by_cell(results)}


def rounds(repetitions=5, but=()):
    return [
        (name, r, 1)
        for r in range(repetitions)
        for name in NAMES
        if (name, r) not in but
    ]


def test_uninterrupted_study_is_paired(study):
    _, found = sessions(study, rounds())
    assert len(found) == len(NAMES)
    assert all(
        paired_rounds(a, b) == [0, 1, 2, 3, 4]
        for a in found.values()
        for b in found.values()
    )


@pytest.mark.parametrize("repetition", [0, 2, 4])
def test_run_repeated_hours_later_is_not_paired(study, repetition):
    """Including the last run, which is adjacent by rank but not by time."""
    results, found = sessions(
        study, rounds(but={("allreduce", repetition)}), [("allreduce", repetition, 2)]
    )
    kept = [r for r in range(5) if r != repetition]
    assert paired_rounds(found["allreduce"], found["epoch_average"]) == kept
    assert paired_rounds(found["epoch_average"], found["local_sgd"]) == [0, 1, 2, 3, 4]
    row = only(ratios(results), label="epoch_average", baseline="allreduce")
    assert (row["paired"], row["n"], row["left_out"]) == (True, 4, 1)
    table = differences(results, "epoch_average", "allreduce")
    assert (table["n"].item(), table["left_out"].item(), table["metric_n"].item()) == (
        4,
        1,
        5,
    )


def test_runs_repeated_side_by_side_are_paired(study):
    """Start times give the order: by the planned one, round 1 would lie in the first hour."""
    failed = {("allreduce", 1), ("epoch_average", 1)}
    again = [("allreduce", 1, 2), ("epoch_average", 1, 2)]
    _, found = sessions(study, rounds(but=failed), again)
    assert paired_rounds(found["allreduce"], found["epoch_average"]) == [0, 1, 2, 3, 4]
    assert paired_rounds(found["allreduce"], found["local_sgd"]) == [0, 2, 3, 4]
    assert found["allreduce"].order[1] == 18, "of 20 runs, the last but one"


def test_strategy_repeated_as_a_whole_is_independent(study):
    results, found = sessions(
        study,
        rounds(but={("allreduce", r) for r in range(5)}),
        [("allreduce", r, 2) for r in range(5)],
    )
    assert paired_rounds(found["allreduce"], found["epoch_average"]) is None
    row = only(ratios(results), label="epoch_average", baseline="allreduce")
    welch = unpaired_ratio(
        list(found["allreduce"].seconds.values()),
        list(found["epoch_average"].seconds.values()),
    )
    assert (row["paired"], row["n"], row["ratio_low"]) == (
        False,
        5,
        pytest.approx(welch.low),
    )


def test_too_few_pairs_are_independent_samples(study):
    failed = [("allreduce", 0), ("allreduce", 1), ("allreduce", 2)]
    _, found = sessions(study, rounds(but=failed), [(*run, 2) for run in failed])
    assert paired_rounds(found["allreduce"], found["epoch_average"]) is None, (
        "two pairs of five"
    )
    assert paired_times(found["allreduce"], found["epoch_average"])[0] == list(
        found["allreduce"].seconds.values()
    )


def test_interrupted_round_is_left_out(study):
    """The command ended between two runs and continued after an hour, without a second attempt."""
    every = rounds()
    _, found = sessions(study, every[:10], every[10:])
    assert paired_rounds(found["allreduce"], found["epoch_average"]) == [0, 1, 3, 4]
    assert paired_rounds(found["serial"], found["allreduce"]) == [0, 1, 2, 3, 4]


def test_planned_order_counts_without_start_times(study):
    _, found = sessions(
        study, rounds(but={("allreduce", 4)}), [("allreduce", 4, 2)], timed=False
    )
    assert paired_rounds(found["allreduce"], found["epoch_average"]) == [0, 1, 2, 3]
    assert paired_rounds(found["epoch_average"], found["local_sgd"]) == [0, 1, 2, 3, 4]


def test_lost_pairs_are_reported(study):
    results, _ = sessions(study, rounds(but={("allreduce", 2)}), [("allreduce", 2, 2)])
    (found,) = [
        finding for finding in findings(results) if finding.rule == "runs-apart"
    ]
    assert found.severity == "warning"
    lost = "3 native ratios lost pairs to runs that were not made side by side: 3 without such rounds, 0 of independent"
    assert found.what == f"{lost} samples"
    whole, _ = sessions(study, rounds())
    assert not [finding for finding in findings(whole) if finding.rule == "runs-apart"]


def test_one_common_round_is_not_paired(study):
    """One pair has no spread, and would discard the other runs."""
    rows = [
        run("allreduce", 2, 2.0 + r, "native", repetition=r, run_order=2 * r)
        for r in (0, 1, 2)
    ]
    rows += [
        run("epoch_average", 2, 1.0 + r, "native", repetition=r, run_order=2 * r + 1)
        for r in (2, 3, 4)
    ]
    results = study(rows=rows)
    a, b = runs_by_cell(results)
    assert paired_rounds(a, b) is None
    row = only(ratios(results), label="epoch_average", baseline="allreduce")
    assert (row["paired"], row["n"], math.isfinite(row["ratio_low"])) == (
        False,
        3,
        True,
    )


def test_no_common_round_is_not_paired(study):
    rows = [
        run("allreduce", 2, 2.0 + r, "native", repetition=r, run_order=r)
        for r in (0, 1, 2)
    ]
    rows += [
        run("epoch_average", 2, 1.0 + r, "native", repetition=r, run_order=r)
        for r in (3, 4, 5)
    ]
    results = study(rows=rows)
    assert paired_rounds(*runs_by_cell(results)) is None
    row = only(ratios(results), label="epoch_average", baseline="allreduce")
    assert (row["paired"], row["n"]) == (False, 3)
    virtual = [
        row.model_copy(update={"execution": "virtual", "engine": "virtual"})
        for row in rows
    ]
    row = only(ratios(study(rows=virtual)), label="epoch_average", baseline="allreduce")
    assert (row["paired"], row["n"], row["note"]) == (
        False,
        0,
        "allreduce shares no repetition with it",
    )


def test_one_run_of_each_has_lost_no_pairs(study):
    rows = [
        run("allreduce", 2, 2.0, "native"),
        run("epoch_average", 2, 1.0, "native", run_order=1),
    ]
    results = study(rows=rows)
    assert not [
        finding for finding in findings(results) if finding.rule == "runs-apart"
    ]
    needed = differences(results, "epoch_average", "allreduce")[
        "repetitions_needed"
    ].item()
    assert needed == 6, "further ones will lie in rounds"


@pytest.mark.parametrize("timed", [True, False])
def test_strategy_added_later_is_independent(study, timed):
    """Run numbers given twice look like one interleaved study; start times distinguish two."""
    rows = []
    for name, begin in (("allreduce", 0.0), ("epoch_average", 40.0)):
        for r in range(4):
            at = datetime(2026, 11, 21, tzinfo=UTC) + timedelta(seconds=begin + 10 * r)
            changes = {"started_utc": at.isoformat()} if timed else {}
            rows.append(
                run(name, 2, 9.0, "native", repetition=r, run_order=r, **changes)
            )
    a, b = runs_by_cell(study(rows=rows))
    assert paired_rounds(a, b) is None
    assert [*a.order.values(), *b.order.values()] == (
        [*range(8)] if timed else [0, 1, 2, 3, 0, 1, 2, 3]
    )


@settings(max_examples=30)  # a table of up to 24 runs is made for each
@given(
    orders=st.lists(st.permutations(NAMES), min_size=3, max_size=6),
    seconds=st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
    pause=st.floats(0, 1),
)
def test_uninterrupted_study_is_paired_at_any_order_and_duration(
    orders, seconds, pause
):
    """Slow points among fast ones, first in one round and last in the next: pairs may lie nearly a round apart."""
    took, at, rows = (
        dict(zip(NAMES, seconds, strict=True)),
        datetime(2026, 11, 21, tzinfo=UTC),
        [],
    )
    for repetition, order in enumerate(orders):
        for name in order:
            place = {
                "repetition": repetition,
                "run_order": len(rows),
                "attempt": 1 + len(rows) % 2,
            }
            row = run(
                name, 2, took[name], "native", **place, started_utc=at.isoformat()
            )
            rows.append(
                row.model_dump() | {"label": name, "eval_s": 0.0, "disturbed": False}
            )
            at += timedelta(seconds=took[name] + pause)
    found = runs_by_cell(Results(Path(), pd.DataFrame(rows), pd.DataFrame(), {}))
    assert len(found) == len(NAMES)
    assert all(
        paired_rounds(a, b) == list(range(len(orders))) for a in found for b in found
    )


def test_the_noise_of_the_baseline_is_inside_either_interval(study):
    # The strategy itself takes exactly one second: all that the intervals show is the
    # baseline's noise.
    steady, noisy = [1.0] * 4, [2.0, 2.2, 1.8, 2.1]
    for shift in (0, 100):
        rows = [
            run("allreduce", 2, t, "native", repetition=r, run_order=2 * r)
            for r, t in enumerate(noisy)
        ]
        rows += [
            run(
                "epoch_average",
                2,
                t,
                "native",
                repetition=r,
                run_order=2 * r + 1 + shift,
            )
            for r, t in enumerate(steady)
        ]
        row = only(
            ratios(study(rows=rows)), label="epoch_average", baseline="allreduce"
        )
        assert row.paired == (shift == 0)
        assert row.ratio_low < 1.9 < 2.1 < row.ratio_high
        if row.paired:
            assert row.median_ratio == pytest.approx(math.sqrt(2.0 * 2.1)), (
                "the middle of four, on logs"
            )
        else:
            assert math.isnan(row.median_ratio)


def test_native_cells_of_all_engines_share_rounds(study, monkeypatch):
    monkeypatch.setattr(
        engines,
        "available",
        lambda name, **_: "no GPU here" if name == "nccl" else None,
    )
    plan = Study(
        workers="1,2,4",
        strategies=["serial", "allreduce", "horovod", "ddp", "epoch_average"],
        repetitions=4,
    )
    runs = expand(
        plan, load_cluster(plan.cluster), Allocation((Host("here", 4, 4, 4),))
    ).runs
    rows = [
        run(
            one.strategy.name,
            one.workers,
            1.0,
            one.execution,
            one.engine,
            one.repetition,
            run_order=one.run_order,
        )
        for one in runs
    ]
    native = [
        cell for cell in runs_by_cell(study(rows=rows)) if cell.execution == "native"
    ]
    # Horovod and gloo on as many workers as cores are no baseline, and run after the
    # others.
    found = [cell for cell in native if cell.at.engine == "mpi" or cell.workers < 4]
    assert {cell.at.engine for cell in found} >= {"mpi", "horovod", "gloo"}
    assert all(paired_rounds(a, b) == [0, 1, 2, 3] for a in found for b in found)


@pytest.mark.parametrize("paired", [True, False])
def test_ratios_of_adaptive_studies_have_their_own_level(study, paired):
    """The stopping rule does not look at ratios, so their level differs from that of times."""
    logs = [0.0, 0.03, -0.02, 0.01], [-0.01, 0.02, 0.02, -0.03]
    rows = [
        run(
            name,
            2,
            math.exp(log),
            "native",
            repetition=r,
            run_order=2 * r + place + 100 * place * (not paired),
        )
        for place, (name, own) in enumerate(
            zip(("allreduce", "epoch_average"), logs, strict=True)
        )
        for r, log in enumerate(own)
    ]
    results = study(rows=rows)
    stopped = Results(
        results.folder, results.runs, results.epochs, {"until": {"ci_width": 0.05}}
    )
    row = only(ratios(stopped), label="epoch_average", baseline="allreduce")
    a, b = (np.array(own) for own in logs)
    if paired:
        half = stats.t(3).ppf((1 + RATIO_WHEN_STOPPED) / 2) * (a - b).std(ddof=1) / 2
    else:
        shares = a.var(ddof=1) / 4, b.var(ddof=1) / 4
        # Welch 1947
        freedom = min(sum(shares) ** 2 / sum(share**2 / 5 for share in shares) - 2, 6)
        half = stats.t(freedom).ppf((1 + RATIO_WHEN_STOPPED) / 2) * math.sqrt(
            sum(shares)
        )
    assert row["paired"] == paired
    assert math.log(row["ratio_high"] / row["ratio"]) == pytest.approx(half)
