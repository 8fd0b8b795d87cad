"""Agreement of virtual and native times."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from scalebench.analysis import (
    agreement,
    cells,
    differences,
    load,
    ratios,
    virtual_error,
)
from scalebench.analysis.intervals import variance_between
from scalebench.analysis.methodology import findings
from scalebench.analysis.native_check import (
    _steady,
    checked,
    error_of_times,
    slowdown_of_native_runs,
)
from scalebench.calibration.calibration_file import Calibration
from scalebench.cluster.engine_costs import EngineCost, EngineCosts
from scalebench.records.folder import CALIBRATION
from tests.analysis.test_comparing import only, run
from tests.facts import in_order


def test_errors_are_of_the_same_strategy_and_count(study):
    rows = [
        run("serial", 1, 10.0, "native"),
        run("serial", 1, 9.0),
        run("allreduce", 2, 10.0, "native"),
        run("allreduce", 2, 14.0, "native", "gloo"),
        run("allreduce", 2, 13.0),
        run("allreduce", 4, 10.0, "native", oversubscribed=True),
        run("allreduce", 4, 1.0),
        run("allreduce", 8, 1.0),
    ]
    table = agreement(study(rows=rows))
    assert table["error"].tolist() == pytest.approx([0.3, -0.9, -0.1])
    assert only(table, label="allreduce", workers=2).engine == "mpi"
    assert checked(table)["error"].tolist() == pytest.approx([0.3, -0.1]), (
        "the oversubscribed cell does not count"
    )


@pytest.mark.parametrize(
    ("said", "engines"),
    [
        ("", ["mpi", "mpi"]),
        ("virtual: {engine: gloo}", ["gloo", "mpi"]),
        ("virtual: {engine: gloo}\nengine: auto", ["gloo", "mpi"]),
        ("engine: gloo", ["gloo"]),
        ("virtual: {engine: horovod}\nengine: mpi", []),
    ],
)
def test_virtual_times_are_checked_on_the_engine_that_they_are_charged_by(
    study, said, engines
):
    rows = [
        run("allreduce", 2, 10.0, "native"),
        run("allreduce", 2, 14.0, "native", "gloo"),
        run("allreduce", 2, 13.0),
    ]
    rows += [run("epoch_async", 2, 10.0, "native"), run("epoch_async", 2, 13.0)]
    folder = study(rows=rows).folder
    (folder / "study.yaml").write_text(f"name: s\n{said}\n")
    table = agreement(load(folder))
    assert table["engine"].tolist() == engines
    native = {"gloo": 14.0, "mpi": 10.0}
    assert table["ratio"].tolist() == pytest.approx(
        [13.0 / native[engine] for engine in engines]
    )


def test_without_native_runs_there_is_no_error(study):
    results = study(rows=[run("serial", 1, 9.0)])
    assert agreement(results).empty
    assert virtual_error(results) is None


@pytest.mark.parametrize(
    "key", ["device_step_time: 0.01", "virtual: {slowdown: {0: 2.0}}"]
)
def test_stated_machine_properties_are_not_checked_natively(study, key):
    found = study(rows=[run("serial", 1, 10.0, "native"), run("serial", 1, 90.0)])
    assert len(agreement(found)) == 1
    (found.folder / "study.yaml").write_text(f"name: s\n{key}\n")
    found = load(found.folder)
    assert agreement(found).empty
    (finding,) = [
        finding for finding in findings(found) if finding.rule == "virtual-error"
    ]
    assert finding.severity == "note"
    assert "no native point checks" in finding.what
    assert finding.fix.startswith("quote them as virtual times")


def test_known_gap_lies_inside_the_interval(study):
    table = agreement(study(noise=0.02, repetitions=5))
    fair = table[~table["oversubscribed"]]
    inside = (fair["ratio_low"] < 1 / 1.1) & (fair["ratio_high"] > 1 / 1.1)
    assert inside.mean() > 0.8


def test_more_draws_do_not_narrow_the_agreement(study):
    """Variances s^2 (1 + 1/n) and s^2 / n, of two degrees of freedom each: Welch's have at most four."""
    rows = [
        run("allreduce", 2, math.exp(x), repetition=r)
        for r, x in enumerate((-0.1, 0.0, 0.1))
    ]
    rows += [
        run("allreduce", 2, math.exp(x), "native", repetition=r)
        for r, x in enumerate((-0.2, 0.0, 0.2))
    ]
    row = only(agreement(study(rows=rows)), workers=2)
    variance = 0.1**2 * (1 + 1 / 3) + 0.2**2 / 3  # two equal parts
    half = stats.t.ppf(0.975, 4) * math.sqrt(variance)
    assert (math.log(row.ratio_low), math.log(row.ratio_high)) == pytest.approx(
        (-half, half)
    )


def checked_study(factors, native_noise=0.0):
    """Virtual times off by `factors` at 1, 1 (another strategy), 2, 4 ... workers."""
    points = [
        ("serial", 1),
        ("allreduce", 1),
        ("allreduce", 2),
        ("allreduce", 4),
        ("allreduce", 8),
    ]
    rows = []
    for (strategy, workers), factor in zip(points, factors, strict=False):
        rows += [
            run(strategy, workers, 8 / workers, "native", repetition=r)
            for r in range(3)
        ]
        rows += [
            run(strategy, workers, factor * 8 / workers, repetition=r) for r in range(3)
        ]
    return rows


def test_the_virtual_error_is_a_root_mean_square_in_which_one_worker_counts_once(study):
    error = virtual_error(study(rows=checked_study([1.1, 1.1, 0.9, 1.2])))
    expected = math.sqrt(
        (math.log(1.1) ** 2 + math.log(0.9) ** 2 + math.log(1.2) ** 2) / 3
    )
    assert (error.rms, error.checks) == (pytest.approx(expected), 3)
    assert error.whole() == pytest.approx((expected**2, 3))
    assert error.words == "14 % (root mean square of 3 checks)"
    between = np.var(np.log([1.1, 0.9, 1.2]), ddof=1)
    assert error.own() == error.own("unchecked") == pytest.approx((between, 2))
    two = virtual_error(study(rows=checked_study([1.1, 1.1, 0.9])))
    assert two.between is None, "two checks leave one degree of freedom"
    assert two.ratio("allreduce", "serial") == pytest.approx(
        (math.log(1.1) ** 2 + math.log(0.9) ** 2, 2)
    )


def test_virtual_error_is_robust_to_one_delayed_native_run(study):
    rows = [
        row.model_copy(update={"train_s": 3 * row.train_s})
        if row.execution == "native" and row.repetition == 2
        else row
        for row in checked_study([1.1, 1.1, 0.9, 1.2])
    ]
    assert virtual_error(study(rows=rows)).rms == pytest.approx(
        virtual_error(study(rows=checked_study([1.1, 1.1, 0.9, 1.2]))).rms
    )


def test_two_checks_do_not_tell_what_is_common(study):
    """A ratio has the whole error of both times, of two degrees of freedom; times have no interval of their own."""
    results = study(rows=checked_study([1.1, 1.1, 0.9]))
    square = math.log(1.1) ** 2 + math.log(0.9) ** 2
    cell = only(cells(results), execution="virtual", workers=2)
    assert (math.isnan(cell.high_s), cell.interval) == (True, "")
    ratio = only(ratios(results), execution="virtual", workers=2, baseline="serial")
    assert math.log(ratio.ratio_high / ratio.ratio) == pytest.approx(
        stats.t.ppf(0.975, 2) * math.sqrt(square)
    )


def test_one_check_withholds_the_interval_instead_of_narrowing_it(study):
    """All points of one worker are one check, which is too few for an interval."""
    rows = [
        *checked_study([1.1, 1.2]),
        *(run("allreduce", 8, 1.0 + 0.01 * r, repetition=r) for r in range(3)),
    ]
    results = study(rows=rows)
    assert (virtual_error(results).checks, virtual_error(results).known) == (1, False)
    virtual = cells(results).query("execution == 'virtual'")
    assert virtual[["low_s", "high_s"]].isna().all(axis=None)
    assert set(virtual["interval"]) == {""}
    assert set(cells(results).query("execution == 'native'")["interval"]) == {
        "95 % confidence interval"
    }
    row = only(ratios(results), execution="virtual", workers=8, baseline="serial")
    assert (math.isnan(row.ratio_low), row.interval) == (True, "")
    found = {finding.rule: finding for finding in findings(results)}["virtual-error"]
    assert found.severity == "warning"
    facts = "16 % (root mean square of 1 check)", "too few"
    assert in_order(found.what, *facts), "two points of one worker"


def test_without_any_check_the_interval_is_the_calibrations_own(study):
    results = study(
        rows=[run("allreduce", 8, 1.0 + 0.01 * r, repetition=r) for r in range(3)]
    )
    assert virtual_error(results) is None
    assert only(cells(results), workers=8).interval == "calibration interval"


def test_interval_of_a_disturbed_calibration_holds_its_error(study):
    """Of a time once, of a ratio of two strategies twice, on top of the spread of the draws."""
    rows = [
        run(label, 8, seconds * (1 + 0.001 * r), repetition=r, calibration="disturbed")
        for label, seconds in (("allreduce", 1.0), ("epoch_average", 0.5))
        for r in range(3)
    ]
    disturbed = study(rows=rows)
    assert virtual_error(disturbed) is None, "nothing checks it"
    quiet = study(
        rows=[row.model_copy(update={"calibration": "quiet"}) for row in rows]
    )
    cell, alone = (
        only(cells(results), label="epoch_average", workers=8)
        for results in (disturbed, quiet)
    )
    assert (
        cell.interval
        == "calibration interval with error of calibrating beside programs"
    )
    own = error_of_times(disturbed).own("epoch_average")
    wide = stats.t.ppf(0.975, own.freedom) * math.sqrt(own.variance)
    assert math.log(cell.high_s / cell.train_s) == pytest.approx(wide, rel=0.05)
    assert math.log(alone.high_s / alone.train_s) < wide / 5
    ratio = only(
        ratios(disturbed), label="epoch_average", workers=8, baseline="allreduce"
    )
    assert math.log(ratio.ratio_high / ratio.ratio) == pytest.approx(
        math.sqrt(2) * wide, rel=0.05
    )
    assert ratio.interval == cell.interval


@pytest.mark.parametrize(
    ("measured_beside", "least", "most"), [(True, 2.7, 30), (False, 1.1, 1.5)]
)
def test_costs_of_an_engine_from_a_quiet_hour_have_a_smaller_error(
    measured_beside, least, most, study
):
    """Steps alone were disturbed then: the interval of a strategy on horovod is no factor of its threads."""
    rows = [
        run("horovod", 8, 1 + 0.001 * r, repetition=r, calibration="disturbed")
        for r in range(3)
    ]
    results = study(rows=rows)
    costs = [
        EngineCost(
            engine="horovod", ranks=2, alpha_s=1e-5, points=[(4, 1e-5)], source="test"
        )
    ]
    entries = [cost.model_copy(update={"disturbed": measured_beside}) for cost in costs]
    calibration = Calibration(key="", tables=[], engines=EngineCosts(entries=entries))
    (results.folder / CALIBRATION).write_text(calibration.model_dump_json())
    cell = only(cells(results), label="horovod", workers=8)
    assert least < cell.high_s / cell.train_s < most


def test_virtual_intervals_contain_the_error(study):
    results = study(rows=checked_study([1.1, 1.1, 0.9, 1.2, 1.0]))
    logs = np.log([1.1, 0.9, 1.2, 1.0])
    between = logs.var(ddof=1)  # native times are equal: no noise to take out
    t = stats.t.ppf(0.975, 3)  # the draws are equal: nothing else varies
    cell = only(cells(results), execution="virtual", workers=8)
    assert cell.interval == "calibration interval with virtual-native error"
    assert math.log(cell.high_s / cell.train_s) == pytest.approx(t * math.sqrt(between))
    table = ratios(results)
    ratio = only(table, execution="virtual", workers=8, baseline="serial")
    assert math.log(ratio.ratio_high / ratio.ratio) == pytest.approx(
        t * math.sqrt(2 * between)
    )
    assert ratio.interval == cell.interval
    itself = only(table, execution="virtual", label="serial", baseline="serial")
    assert (itself.ratio_low, itself.ratio_high) == pytest.approx((1, 1)), (
        "what is divided by itself is 1"
    )
    native = only(table, execution="native", workers=8, baseline="serial")
    assert (native.ratio_low, native.interval) == (
        pytest.approx(8),
        "95 % confidence interval",
    )


def test_equal_computations_have_a_ratio_of_exactly_one(study):
    """Averaging once per epoch equals serial at one worker, in every draw."""
    rows = checked_study([1.1, 1.1, 0.9, 1.2])
    for strategy, longer in (("epoch_average", 1.0), ("local_sgd", 1.0 + 1e-12)):
        rows += [
            run(strategy, 1, longer * (8.8 + 0.1 * r), repetition=r) for r in range(3)
        ]
    rows = [
        row.model_copy(update={"train_s": 8.8 + 0.1 * row.repetition})
        if row.execution == "virtual" and row.strategy == "serial"
        else row
        for row in rows
    ]
    results = study(rows=rows)
    same, other = (
        only(ratios(results), execution="virtual", label=label, baseline="serial")
        for label in ("epoch_average", "local_sgd")
    )
    assert (same.ratio, same.ratio_low, same.ratio_high, same.n) == (1.0, 1.0, 1.0, 3)
    error = virtual_error(results).ratio("local_sgd", "serial")
    assert error.variance > 0.1**2
    assert math.log(other.ratio_high) > 2 * math.sqrt(error.variance)
    difference = differences(results, "epoch_average", "serial").query(
        "execution == 'virtual'"
    )
    assert difference[["ratio_low", "ratio_high"]].to_numpy().tolist() == [[1.0, 1.0]]


def test_agreement_compares_equal_clusters_only(study):
    rows = [
        run("allreduce", 2, 1.0, "native"),
        run("allreduce", 2, 1.3, cluster="juwels-booster"),
    ]
    assert agreement(study(rows=rows)).empty


def engines_study(factors, native=((0.0, 0.0, 0.0),)):
    """Virtual times off by factors[label, workers], with native runs on the engine of each strategy.

    `native` are the logs of the noise of three native runs, for each cell in turn.
    """
    on = {"horovod": "horovod", "ddp": "gloo"}
    rows = []
    for at, ((strategy, workers), factor) in enumerate(factors.items()):
        for r, noise in enumerate(native[at % len(native)]):
            seconds = 8 / workers * math.exp(noise)
            rows.append(
                run(
                    strategy,
                    workers,
                    seconds,
                    "native",
                    on.get(strategy, "mpi"),
                    repetition=r,
                )
            )
            rows.append(run(strategy, workers, factor * 8 / workers, repetition=r))
    split = {
        "compute_s": None,
        "comm_s": None,
        "wait_s": None,
    }  # times are compared as they are
    return [row.model_copy(update=split) for row in rows]


MPI = [("serial", 1), ("allreduce", 2), ("epoch_average", 2), ("local_sgd", 2)]


def test_common_error_cancels_in_a_ratio(study):
    apart = dict(zip(MPI, (1.0, 1.02, 0.98, 1.01), strict=True))
    right = virtual_error(study(rows=engines_study(apart)))
    slow = virtual_error(
        study(
            rows=engines_study({cell: 1.4 * factor for cell, factor in apart.items()})
        )
    )
    assert slow.common - right.common == pytest.approx(math.log(1.4))
    assert slow.ratio("allreduce", "epoch_average") == pytest.approx(
        right.ratio("allreduce", "epoch_average")
    )
    assert slow.ratio("allreduce", "epoch_average").variance < 0.03**2
    assert slow.own("allreduce") == pytest.approx(right.own("allreduce"))
    assert slow.rms > math.log(1.3), "it is stated once"


def test_bars_of_virtual_times_do_not_hold_the_common_factor(study):
    """Virtual times 17 times as long as native ones, equal in all draws but for 0.4 %."""
    apart = dict(zip(MPI, (1.0, 1.02, 0.98, 1.01), strict=True))
    near, far = (
        cells(
            study(
                rows=engines_study(
                    {cell: off * factor for cell, factor in apart.items()}
                )
            )
        )
        for off in (1.0, 17.0)
    )
    for table in (near, far):
        virtual = table[table["execution"] == "virtual"]
        assert (virtual["high_s"] / virtual["train_s"]).max() < 1.1
        assert (virtual["high_s"] / virtual["train_s"]).min() > 1.01, (
            "they hold what strategies have of their own"
        )


def test_an_engine_that_is_off_by_half_widens_only_ratios_with_it(study):
    apart = dict(zip(MPI, (1.0, 1.02, 0.98, 1.01), strict=True))
    both = {
        **apart,
        ("horovod", 1): 1.0,
        ("horovod", 2): 1.0,
        ("ddp", 1): 1.01,
        ("ddp", 2): 0.99,
    }
    right = virtual_error(study(rows=engines_study(both)))
    off = {
        cell: 1.5 * factor if cell[0] == "horovod" else factor
        for cell, factor in both.items()
    }
    wrong = virtual_error(study(rows=engines_study(off)))
    for other in ("epoch_average", "ddp"):
        assert wrong.ratio("allreduce", other) == pytest.approx(
            right.ratio("allreduce", other)
        )
    variance, freedom = wrong.ratio("allreduce", "horovod")
    assert variance == pytest.approx(math.log(1.5) ** 2, rel=0.1)
    assert freedom == 5, "eight checks and three means"
    assert wrong.own("allreduce") == pytest.approx(right.own("allreduce"))
    assert wrong.own("horovod").variance > right.own("horovod").variance + 0.1
    assert wrong.rms > 0.15


def test_noise_of_native_runs_is_taken_out_of_the_error_between_strategies(study):
    """Medians of three runs of 10 % noise; a simulation without further error, and one that is off by 30 %."""
    random = np.random.default_rng(3)
    noise = random.normal(0, 0.1, (4, 3))
    noise_alone = virtual_error(
        study(rows=engines_study(dict.fromkeys(MPI, 1.0), noise))
    )
    seen = np.var(np.median(noise, axis=1), ddof=1)
    assert noise_alone.between.variance == pytest.approx(0.7 * seen), "what stays"
    apart = dict(zip(MPI, (0.7, 1.3, 0.7, 1.3), strict=True))
    real = virtual_error(study(rows=engines_study(apart, noise)))
    errors = np.log(list(apart.values())) - np.median(noise, axis=1)
    assert (
        0.7 * np.var(errors, ddof=1)
        < real.between.variance
        < np.var(errors, ddof=1) - 0.002
    )


def test_variance_between_excludes_noise():
    """Eight values each, 2,000 times: the mean of 2,000 variances is known to 2 %."""
    random = np.random.default_rng(4)
    values, noise = random.normal(0, 1, (2000, 8)), np.ones((2000, 8))
    alone = variance_between([(values, noise)]).variance
    assert np.mean(alone) < np.mean(values.var(axis=-1, ddof=1))
    assert np.all(alone >= 0.7 * values.var(axis=-1, ddof=1) - 1e-9)
    wide = variance_between([(10 * values, noise)]).variance
    assert np.mean(wide) == pytest.approx(100, rel=0.1)
    exact = variance_between([(values, 0 * noise)]).variance
    assert exact == pytest.approx(values.var(axis=-1, ddof=1))


def times(**columns):
    return pd.DataFrame(
        {"wait_s": [None], "compute_s": [None], "reference_step_s": [None], **columns}
    )


def test_native_times_are_compared_at_one_speed_of_the_machine():
    """Three runs; the machine is slower by a half in the second, by compute time on mpi."""
    virtual = times(train_s=[4.0], compute_s=[3.0])
    native = {
        "train_s": [4.0, 6.0, 4.0],
        "compute_s": [3.0, 4.5, 3.0],
        "wait_s": [None] * 3,
    }
    native["reference_step_s"] = [1.0, 7.0, 1.0]
    mpi, simulated = _steady(pd.DataFrame({**native, "engine": "mpi"}), virtual)
    assert (mpi.tolist(), simulated.tolist()) == (pytest.approx([4.0, 4.0, 4.0]), [4.0])


def test_speed_on_other_engines_is_from_the_reference_step():
    virtual = times(train_s=[4.0], reference_step_s=[1e-3], compute_s=[3.0])
    native = pd.DataFrame(
        {
            "train_s": [4.0, 6.0],
            "reference_step_s": [1e-3, 1.5e-3],
            "compute_s": [9.0, 2.0],
        }
    )
    for engine in ("horovod", "gloo", "nccl"):
        assert _steady(native.assign(engine=engine, wait_s=None), virtual)[
            0
        ].tolist() == pytest.approx([4.0, 4.0])


def test_times_without_known_speed_are_not_corrected():
    virtual = times(train_s=[4.0], reference_step_s=[1e-3])
    native = pd.DataFrame(
        {
            "train_s": [4.0, 6.0],
            "reference_step_s": [1e-3, None],
            "compute_s": [None, None],
        }
    )
    for engine in ("horovod", "mpi"):
        assert _steady(native.assign(engine=engine, wait_s=None), virtual)[
            0
        ].tolist() == [4.0, 6.0]


def test_waiting_is_left_out_on_both_sides_or_on_neither():
    virtual = times(train_s=[4.0], wait_s=[0.5], compute_s=[3.0])
    native = pd.DataFrame(
        {
            "train_s": [5.0],
            "wait_s": [1.5],
            "compute_s": [3.0],
            "reference_step_s": [None],
        }
    )
    steady = [side.tolist() for side in _steady(native.assign(engine="mpi"), virtual)]
    assert steady == [[3.5], [3.5]]
    steady = [
        side.tolist()
        for side in _steady(native.assign(engine="mpi", wait_s=None), virtual)
    ]
    assert steady == [[5.0], [4.0]]


def test_slowdown_is_of_steps_where_virtual_times_are_off(study):
    def rows(factor: float):
        """Native runs whose compute takes `factor` times as long, and little else."""
        for repetition, noise in enumerate((0.99, 1.0, 1.01)):
            for workers in (1, 2):
                slow = factor if workers == 2 else 1.0
                compute = 9.0 * slow * noise
                yield run(
                    "allreduce",
                    workers,
                    1.0 + compute,
                    "native",
                    compute_s=compute,
                    wait_s=0.0,
                    repetition=repetition,
                )
                yield run(
                    "allreduce",
                    workers,
                    10.0,
                    compute_s=9.0,
                    wait_s=0.0,
                    repetition=repetition,
                )

    found = slowdown_of_native_runs(study(rows=list(rows(1.5))))
    assert found is not None
    assert found.factor == pytest.approx(1.5, rel=0.02)
    # Of 14.5 s the tenth that is communication does not become slower.
    assert found.left == pytest.approx(math.log(10 / (14.5 / 1.5)), abs=0.01)
    assert slowdown_of_native_runs(study(rows=list(rows(1.0)))) is None
