"""Speedup, efficiency and reductions over baselines."""

from __future__ import annotations

import math

import pytest

from scalebench.analysis import cells, ratios, summary
from scalebench.analysis.quantities import with_ratios
from scalebench.study.cell import CELL
from tests.facts import in_order, together
from tests.records_factory import run_row, study_rows


def run(
    strategy,
    workers,
    train_s,
    execution="virtual",
    engine=None,
    repetition=0,
    **changes,
):
    engine = engine or ("virtual" if execution == "virtual" else "mpi")
    return run_row(
        run_id=f"{execution}-{engine}-{strategy}-{workers}-{repetition}-{changes.get('strategy_options', '')}",
        strategy=strategy,
        workers=workers,
        train_s=train_s,
        execution=execution,
        engine=engine,
        repetition=repetition,
        **{"batch_global": 8 * workers, **changes},
    )


def only(table, **keys):
    for name, value in keys.items():
        table = table[table[name] == value]
    assert len(table) == 1, table
    return table.iloc[0]


STUDY = [
    run("serial", 1, 16.0),
    run("allreduce", 4, 8.0),
    run("horovod", 4, 10.0),
    run("ddp", 4, 5.0),
    run("epoch_average", 4, 4.0),
]


def test_speedup_efficiency_and_reductions_have_their_known_values(study):
    table = ratios(study(rows=STUDY))
    serial = only(table, label="epoch_average", baseline="serial")
    assert (serial.speedup, serial.efficiency, serial.reduction) == pytest.approx(
        (4.0, 1.0, 0.75)
    )
    assert (serial.baseline_s, serial.train_s, serial.saved_s) == pytest.approx(
        (16, 4, 12)
    )
    headline = only(table, label="epoch_average", baseline="allreduce")
    assert (headline.reduction, headline.saved_s, headline.note) == pytest.approx(
        (0.5, 4.0, "")
    )


@pytest.mark.parametrize("unknown", ["batch_global", "batch_per_worker"])
def test_cells_and_ratios_are_joined_where_a_batch_is_not_known(study, unknown):
    results = study(rows=[row.model_copy(update={unknown: None}) for row in STUDY])
    joined = cells(results).merge(ratios(results), on=CELL)
    assert len(joined) == len(ratios(results))
    assert summary(results).rows


def test_a_reduction_against_an_engine_is_split_and_signed(study):
    table = ratios(study(rows=STUDY))
    horovod = only(table, label="epoch_average", baseline="horovod")
    assert (
        horovod.engine_part,
        horovod.frequency_part,
        horovod.reduction,
    ) == pytest.approx((0.2, 0.4, 0.6))
    ddp = only(table, label="epoch_average", baseline="ddp")
    assert (ddp.engine_part, ddp.frequency_part, ddp.reduction) == pytest.approx(
        (-0.6, 0.8, 0.2)
    )


def test_the_parts_add_up_with_noise_too(study):
    table = ratios(study(noise=0.3, repetitions=4))
    split = table[table["engine_part"].notna()]
    assert len(split) > 40
    assert (split["engine_part"] + split["frequency_part"]).to_numpy() == pytest.approx(
        split["reduction"].to_numpy()
    )


def test_bounds_of_everything_made_of_a_ratio_lie_on_its_two_sides(study):
    table = ratios(study(noise=0.1, repetitions=6, native_workers=(1, 2)))
    table = table[table["ratio_low"] < table["ratio_high"]]
    serial = table[table["baseline"] == "serial"]
    assert len(table) > 60
    assert len(serial) > 20
    for name, own in (
        ("reduction", table),
        ("median_ratio", table),
        ("speedup", serial),
        ("efficiency", serial),
    ):
        known = own[own[f"{name}_low"].notna()]
        assert len(known), name
        assert (known[f"{name}_low"] < known[name]).all(), name
        assert (known[name] < known[f"{name}_high"]).all(), name
    assert table["reduction_low"].to_numpy() == pytest.approx(
        1 - 1 / table["ratio_low"].to_numpy()
    )
    assert table["reduction_high"].to_numpy() == pytest.approx(
        1 - 1 / table["ratio_high"].to_numpy()
    )


def test_executions_and_engines_are_never_joined(study):
    rows = [
        run("serial", 1, 100.0, "native"),
        run("allreduce", 2, 60.0, "native"),
        run("allreduce", 2, 77.0, "native", "gloo"),
        run("epoch_average", 2, 30.0, "native"),
        run("epoch_average", 2, 30.0, "paced"),
        run("epoch_average", 2, 1.0),
        run("allreduce", 2, 2.0),
    ]
    table = ratios(study(rows=rows))
    native = only(
        table, label="epoch_average", execution="native", baseline="allreduce"
    )
    assert (native.baseline_s, native.baseline_engine) == (pytest.approx(60), "mpi")
    virtual = only(table, label="epoch_average", execution="virtual", baseline="serial")
    assert math.isnan(virtual.speedup)
    assert together(virtual.note, "serial", "1 worker", "virtual")
    paced = only(table, label="epoch_average", execution="paced", baseline="allreduce")
    assert math.isnan(paced.reduction)
    assert together(paced.note, "allreduce", "engine mpi", "2 workers", "paced")


def test_native_serial_is_the_base_of_every_engine(study):
    rows = [
        run("serial", 1, 9.0, "native"),
        run("horovod", 2, 6.0, "native", "horovod"),
    ]
    row = only(ratios(study(rows=rows)), label="horovod", baseline="serial")
    assert (row.speedup, row.baseline_engine) == (pytest.approx(1.5), "mpi")


def test_oversubscribed_runs_are_never_a_baseline_but_are_compared(study):
    rows = [
        run("serial", 1, 8.0, "native"),
        run("allreduce", 4, 4.0, "native", oversubscribed=True),
        run("epoch_average", 4, 2.0, "native", oversubscribed=True),
    ]
    table = ratios(study(rows=rows))
    row = only(table, label="epoch_average", baseline="allreduce")
    assert math.isnan(row.reduction)
    named = "allreduce on engine mpi at 4 workers (native)"
    assert in_order(row.note, named, "oversubscribed", "no baseline")
    assert only(
        table, label="epoch_average", baseline="serial"
    ).speedup == pytest.approx(4)


def test_failed_runs_do_not_enter(study):
    rows = [
        run("serial", 1, 8.0),
        run("serial", 1, 999.0, repetition=1, status="timeout"),
        run("allreduce", 2, 4.0),
    ]
    results = study(rows=rows)
    assert only(
        ratios(results), label="allreduce", baseline="serial"
    ).speedup == pytest.approx(2)
    assert only(cells(results), label="serial").n == 1


def test_ratios_are_paired_by_repetition(study):
    # Each repetition has its own speed of the machine; the ratio is 2 in every one of
    # them.
    rows = [
        run("serial", 1, 2 * speed, repetition=r)
        for r, speed in enumerate((1.0, 5.0, 9.0))
    ]
    rows += [
        run("allreduce", 2, speed, repetition=r)
        for r, speed in enumerate((1.0, 5.0, 9.0))
    ]
    rows += [run("epoch_average", 2, 7.0, repetition=r) for r in (1, 2)]
    results = study(rows=rows)
    row = only(ratios(results), label="allreduce", baseline="serial")
    assert (row.speedup, row.speedup_low, row.speedup_high) == pytest.approx((2, 2, 2))
    assert (row.n, row.interval) == (3, "no interval, as nothing varies")
    assert only(ratios(results), label="epoch_average", baseline="serial").n == 2


def test_one_repetition_has_no_interval(study):
    results = study(rows=STUDY)
    table = ratios(results)
    others = table[table["label"] != "serial"]  # which is equal to itself
    assert others["reduction_low"].isna().all()
    assert set(others["interval"]) == {""}
    assert cells(results)["low_s"].isna().all()


def test_a_plain_baseline_goes_before_its_variants(study):
    rows = [
        run("allreduce", 2, 4.0, strategy_options={"compression": "bf16"}),
        run("allreduce", 2, 5.0),
        run("epoch_average", 2, 2.0),
    ]
    row = only(ratios(study(rows=rows)), label="epoch_average", baseline="allreduce")
    assert row.reduction == pytest.approx(0.6)


def test_speedup_of_replicas_in_parts_is_over_serial_at_the_same_global_batch(study):
    in_parts = {
        "data_parallel": 2,
        "pipeline_parallel": 2,
        "tensor_parallel": 1,
        "batch_per_worker": 8,
    }
    rows = [
        run("serial", 1, 8.0, batch_global=16),
        run("pipeline", 4, 4.0, **in_parts, batch_global=16),
    ]
    row = only(ratios(study(rows=rows)), label="pipeline", baseline="serial")
    assert row.speedup == pytest.approx(2.0)
    rows[1] = run("pipeline", 4, 4.0, **in_parts, batch_global=32)
    row = only(ratios(study(rows=rows)), label="pipeline", baseline="serial")
    assert math.isnan(row.speedup)
    assert together(row.note, "serial", "16", "batch_global")


def test_two_candidates_for_a_baseline_are_not_chosen_between(study):
    rows = [
        run("allreduce", 2, 4.0, strategy_options={"compression": "bf16"}),
        run("allreduce", 2, 5.0, strategy_options={"compression": "fp16"}),
        run("epoch_average", 2, 2.0),
    ]
    row = only(ratios(study(rows=rows)), label="epoch_average", baseline="allreduce")
    assert math.isnan(row.reduction)
    assert together(row.note, "2", "baseline", "allreduce")


def test_weak_scaling_efficiency_is_the_ratio_of_times(study):
    rows = [
        run("serial", 1, 4.0, scaling="weak"),
        run("allreduce", 8, 5.0, scaling="weak"),
    ]
    row = only(ratios(study(rows=rows)), label="allreduce", baseline="serial")
    assert (row.efficiency, row.speedup) == pytest.approx((0.8, 6.4))


def test_different_batches_are_different_cells(study):
    rows = [
        run("allreduce", 2, 4.0),
        run_row(
            run_id="x",
            workers=2,
            repetition=1,
            train_s=9.0,
            batch_per_worker=4,
            batch_global=8,
        ),
    ]
    assert cells(study(rows=rows))["n"].tolist() == [1, 1]


def test_a_target_that_is_never_reached_counts_as_infinite_in_the_median(study):
    reached = {"target_metric": 0.9}
    rows = [
        run("serial", 1, 4.0, repetition=r, time_to_target_s=t, **reached)
        for r, t in enumerate((1.0, None, 3.0))
    ]
    assert cells(study(rows=rows))["time_to_target_s"].tolist() == [3.0]
    rows = [
        run("serial", 1, 4.0, repetition=r, time_to_target_s=t, **reached)
        for r, t in enumerate((1.0, None, None))
    ]
    assert cells(study(rows=rows))["time_to_target_s"].tolist() == [math.inf]


def test_a_split_that_one_repetition_lacks_is_empty(study):
    rows = [
        run("ddp", 2, 4.0, comm_s=1.0),
        run("ddp", 2, 4.0, repetition=1, comm_s=None),
    ]
    assert cells(study(rows=rows))["comm_s"].isna().all()


@pytest.fixture
def two_batches(study):
    """The synthetic study at a batch of 8, and of 16: ten times slower, and worse for averaging once per epoch."""
    rows = [row for row, _ in study_rows(repetitions=4, native_workers=())]
    for row in list(rows):
        metric = row.final_metric - (0.1 if row.strategy == "epoch_average" else 0.0)
        changes = {
            "run_id": f"{row.run_id}-b16",
            "train_s": 10 * row.train_s,
            "final_metric": metric,
        }
        batch = {"batch_per_worker": 16, "batch_global": 2 * row.batch_global}
        rows.append(row.model_copy(update={**changes, **batch}))
    return study(rows=rows)


def test_cells_of_two_batches_are_compared_at_their_own(two_batches):
    """Speedups are over serial, and verdicts on the metric against allreduce, at the same batch."""
    table = with_ratios(
        two_batches, cells(two_batches), ["speedup", "metric-vs-allreduce"]
    )
    both = [
        table[table["batch_per_worker"] == batch].set_index(["label", "workers"])
        for batch in (8, 16)
    ]
    assert both[0]["speedup"].notna().all()
    assert both[0]["speedup"].to_dict() == pytest.approx(both[1]["speedup"].to_dict())
    assert [own.loc[("epoch_average", 2), "metric_verdict"] for own in both] == [
        "equal",
        "worse",
    ]
