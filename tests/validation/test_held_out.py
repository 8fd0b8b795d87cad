"""Published rows are read strictly, calibrated on base alone, and predicted with intervals."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from scalebench.errors import ResultsError
from scalebench.validation.held_out import buckets_of, predict_published
from scalebench.validation.measurements import (
    calibrating_rows,
    communication_s,
    family,
    read_published,
    records,
    stated_cluster,
    step_seconds,
)
from scalebench.validation.prediction_errors import error_by_source, with_errors

FILE = Path(__file__).parents[2] / "experiments" / "published" / "scaling.csv"


def some_rows(*sources: str) -> pd.DataFrame:
    table, _ = read_published(FILE)
    return table[table["source"].str.startswith(sources)].reset_index(drop=True)


def test_every_shipped_row_is_read_or_left_out_with_a_reason() -> None:
    table, notes = read_published(FILE)
    held = int((pd.read_csv(FILE)["split"] == "hold").sum())
    left_out = sum(int(note.split()[0]) for note in notes)
    assert int((table["split"] == "hold").sum()) + left_out == held
    assert "pipeline" in notes[0]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("value", -1.0, r"line \d+: expected a number above 0 as value, got -1.0"),
        ("workers", 0.0, "as workers, got 0.0"),
        ("batch_per_worker", "", "as batch_per_worker, got nan"),
        ("split", "later", "expected base or hold as split, got later"),
    ],
)
def test_bad_rows_are_refused_with_their_place(
    tmp_path: Path, column: str, value: object, message: str
) -> None:
    table = pd.read_csv(FILE)
    table = (
        table[table["series"] == "weak-0306"]
        .reset_index(drop=True)
        .astype({column: object})
    )
    table.loc[len(table) - 1, column] = value
    file = tmp_path / "own.csv"
    table.to_csv(file, index=False)
    with pytest.raises(ResultsError, match=message):
        read_published(file)


def test_a_file_without_held_rows_or_columns_is_refused(tmp_path: Path) -> None:
    table = pd.read_csv(FILE)
    file = tmp_path / "own.csv"
    table[table["split"] == "base"].to_csv(file, index=False)
    with pytest.raises(ResultsError, match="no row of split=hold to predict"):
        read_published(file)
    table.drop(columns="inter_gbps_per_node").to_csv(file, index=False)
    with pytest.raises(ResultsError, match="column 'inter_gbps_per_node' is missing"):
        read_published(file)
    with pytest.raises(ResultsError, match="not a readable CSV"):
        read_published(tmp_path / "nothing.csv")


def test_held_values_never_enter_the_calibration() -> None:
    """Predictions, intervals and overheads stay the same when every held value is another."""
    # Mosaic's are calibrated on rows of no series, too
    table = some_rows("TensorFlow", "Baidu", "MosaicML")
    # the configurations with base rows of several workers
    colocated = table["strategy"].str.contains("colocated")
    table = table[
        colocated | ~table["source"].str.startswith("TensorFlow")
    ].reset_index(drop=True)
    altered = table.copy()
    altered.loc[altered["split"] == "hold", "value"] *= 1.7
    (before, fitted), (after, refitted) = (
        predict_published(table),
        predict_published(altered),
    )
    assert fitted == refitted
    for column in ("predicted", "low", "high", "linear"):
        pd.testing.assert_series_equal(before[column], after[column])


def test_rows_that_calibrate_are_of_one_configuration_and_not_held() -> None:
    table = some_rows("MosaicML")
    base = {row.series: row for row in records(table[table["split"] == "base"])}
    for one in base.values():
        for row in records(
            table.loc[[found.Index for found in calibrating_rows(one, table)]]
        ):
            assert row.split != "hold"
            assert row.workers <= one.workers
            assert (row.model, row.device, row.precision, row.strategy) == (
                one.model,
                one.device,
                one.precision,
                one.strategy,
            )
            # sequence and recomputation
            assert str(row.note).split("; MFU")[0] == str(one.note).split("; MFU")[0]
            assert 2**-0.5 < row.batch_per_worker / one.batch_per_worker < 2**0.5
    found = [
        (row.workers, row.batch_per_worker)
        for row in calibrating_rows(base["weak-0298"], table)
    ]
    assert sorted(found) == [(8, 8), (16, 8), (32, 10)]


def one_row(**changed: object) -> pd.DataFrame:
    """Return the row of a series on one worker."""
    table = some_rows("PyTorch DDP")
    return (
        table[(table["split"] == "base") & (table["workers"] == 1)]
        .head(1)
        .assign(**changed)
    )


def test_a_base_row_that_two_others_contradict_is_outvoted() -> None:
    """The median of the steps a sample predicts, linear scaling starts from it, and the interval has all three."""
    base = one_row()
    step = float(base["value"].iloc[0])
    more = [
        one_row(split=math.nan, series=math.nan, value=step * factor)
        for factor in (0.8, 0.7)
    ]
    held = one_row(split="hold")
    (found,) = records(
        predict_published(pd.concat([base, *more, held], ignore_index=True))[0]
    )
    assert found.predicted == pytest.approx(0.8 * step)
    assert found.linear == pytest.approx(0.8 * step)
    assert (found.low, found.high) == (pytest.approx(0.7 * step), pytest.approx(step))
    half = one_row(
        split=math.nan,
        series=math.nan,
        value=0.45 * step,
        batch_per_worker=0.75 * base["batch_per_worker"],
    )
    (found,) = records(
        predict_published(pd.concat([base, half, half, held], ignore_index=True))[0]
    )
    assert found.predicted == pytest.approx(0.6 * step), "in proportion to the batch"


@pytest.mark.parametrize(
    "other",
    [
        {"model": "resnet101"},
        {"device": "T4"},
        {"precision": "fp16"},
        {"strategy": "DDP, bucket 1 MB"},
        {"note": "seq=4096"},
        {"workers": 2},
        {"batch_per_worker": 64},
    ],
)
def test_rows_of_another_configuration_do_not_calibrate(
    other: dict[str, object],
) -> None:
    more = one_row(split=math.nan, series=math.nan, value=0.001)
    tables = [
        pd.concat(
            [one_row(), more.assign(**changed), one_row(split="hold")],
            ignore_index=True,
        )
        for changed in (other, {})
    ]
    kept, changed = (records(predict_published(table)[0])[0] for table in tables)
    assert kept.predicted == pytest.approx(kept.measured)
    assert changed.predicted < 0.6 * changed.measured, (
        "the same configuration calibrates"
    )


def test_the_step_of_the_base_row_is_reproduced_and_linear_scaling_keeps_it() -> None:
    table = some_rows("MXNet")
    base = table[table["split"] == "base"]
    # predict the base itself
    table = pd.concat([base, base.assign(split="hold")], ignore_index=True)
    found, overheads = predict_published(table)
    assert found["predicted"].tolist() == pytest.approx(
        found["measured"].tolist(), rel=1e-6
    )
    assert found["linear"].tolist() == pytest.approx(
        found["measured"].tolist(), rel=1e-9
    )
    assert not overheads.fitted  # one worker count: jitter and overlap are assumed


def test_predictions_of_one_node_meet_their_target_and_intervals_widen() -> None:
    table = some_rows("TensorFlow", "PyTorch")
    found, overheads = predict_published(table[table["data"].ne("real")])  # less of it
    errors = with_errors(found)
    summary = error_by_source(errors).set_index("source")
    assert summary.loc["all of one node", "median"] < 0.05
    assert summary.loc["TensorFlow performance benchmarks", "skill"] > 0.3
    assert overheads.fitted
    assert 0 <= overheads.unhidden <= 1
    width = (
        (errors["high"] / errors["low"])
        .groupby([errors["series"], errors["doublings"]])
        .mean()
    )
    for _, own in width.groupby(level=0):
        assert own.is_monotonic_increasing
    assert (
        (errors["low"] <= errors["predicted"]) & (errors["predicted"] <= errors["high"])
    ).all()


def test_throughput_and_seconds_are_inverse() -> None:
    table = some_rows("TensorFlow", "Baidu", "MosaicML")
    assert set(table["quantity"]) == {"throughput_total", "allreduce_time"}
    for row in records(table):
        assert step_seconds(
            row, step_seconds(row, float(row.value)), back=True
        ) == pytest.approx(float(row.value))


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("parameter_server on cpu", "server"),
        ("replicated without NCCL", "server"),
        ("replicated (NCCL)", "allreduce"),
        ("DDP, bucket 25 MB", "allreduce"),
        ("sharded data parallel FULL_SHARD", "sharded"),
        ("allreduce sum fp32", "collective"),
        ("pipeline", "pipeline"),
    ],
)
def test_strategies_are_told_by_how_they_communicate(strategy: str, kind: str) -> None:
    assert family(strategy) == kind


def test_slower_links_and_a_single_flow_take_longer() -> None:
    row = next(
        row
        for row in records(some_rows("Pollux"))
        if row.nodes == 4 and row.params_million > 50
    )
    assert communication_s(row, 0.5) > communication_s(row, one_flow=False)
    # 5 of 50 Gbit/s
    assert communication_s(row) > 5 * communication_s(row, one_flow=False)


def test_links_of_a_switch_are_those_of_the_device() -> None:
    """An A100 has 12 NVLinks, an H100 18, which carry what NCCL's model of them has."""
    row = next(
        row
        for row in records(some_rows("MosaicML"))
        if row.device == "h100_80gb" and row.nodes == 1
    )
    of_a100, of_h100 = (
        stated_cluster(row._replace(device=device)).links.intra.bandwidth_bytes_per_s
        for device in ("a100_80gb", "h100_80gb")
    )
    assert of_a100 == pytest.approx(12 * 20e9)
    assert of_h100 == pytest.approx(18 * 20.6e9)
    with pytest.raises(ResultsError, match="expected a device that begins with v100"):
        stated_cluster(row._replace(device="cpu"))


def test_the_device_of_the_largest_variable_receives_it_from_all_others() -> None:
    """AlexNet's first fully connected layer holds 62 % of its parameters: 16 devices send it to one of them."""
    rows = [row for row in records(some_rows("MXNet")) if row.workers == 16]
    seconds = {row.model: communication_s(row) for row in rows}
    assert seconds["AlexNet"] == pytest.approx(
        2 * 15 * 203e6 * 37_748_736 / 61_100_840 / 15.75e9
    )
    # two devices share a switch
    assert seconds["Inception-v3"] == pytest.approx(2 * 2 * 95e6 / 15.75e9)


def test_buckets_are_released_by_the_layers_of_a_known_model() -> None:
    """VGG16's fully connected layers are nine tenths of its bytes and complete after few of the flops."""
    known, unknown = buckets_of("VGG16", 553e6), buckets_of("YOLOv3 PASCAL-VOC", 248e6)
    for buckets in (known, unknown):
        assert sum(part for part, _ in buckets) == pytest.approx(1.0)
        assert [release for _, release in buckets] == sorted(
            release for _, release in buckets
        )
        assert buckets[-1][1] == pytest.approx(1.0)
    assert sum(part for part, release in known if release < 0.1) > 0.85
    assert [release for _, release in unknown] == pytest.approx(
        [k / 10 for k in range(1, 11)]
    )


def test_compute_follows_the_batch_of_a_worker_in_strong_scaling() -> None:
    """Half of the batch takes half of the step, also by linear scaling, and the interval reaches further up."""
    table = some_rows("PyTorch DDP")
    base = table[(table["split"] == "base") & (table["workers"] == 1)].head(1)
    held = pd.concat(
        [
            base.assign(split="hold"),
            base.assign(split="hold", batch_per_worker=base["batch_per_worker"] / 2),
        ]
    )
    found, _ = predict_published(pd.concat([base, held], ignore_index=True))
    same, half = records(found)
    assert half.predicted_s == pytest.approx(same.predicted_s / 2, rel=1e-3)
    assert half.linear_s == pytest.approx(same.linear_s / 2)
    highest, lowest = (
        max(step_seconds(held.iloc[1], end) for end in (half.low, half.high)),
        half.predicted_s,
    )
    assert highest == pytest.approx(lowest * 2**0.5, rel=0.02)


def test_workers_that_share_an_input_pipeline_have_wider_intervals() -> None:
    table = some_rows("TensorFlow")
    real = table[(table["data"] == "real")]
    series = real[real["series"] == real.loc[real["workers"] == 8, "series"].iloc[0]]
    synthetic = series.assign(data="synthetic")
    shared, alone = (
        predict_published(rows.reset_index(drop=True))[0]
        for rows in (series, synthetic)
    )
    assert (shared["predicted"] == alone["predicted"]).all()
    assert (shared["low"] < alone["low"]).all(), "of throughput"


def test_every_source_has_a_skill_of_two_fifths_and_nine_of_ten_intervals_hold() -> (
    None
):
    table, _ = read_published(FILE)
    found = error_by_source(with_errors(predict_published(table)[0]))
    assert (found["held"] >= 0.9).all()
    assert (found["skill"] >= 0.4).all()


def test_layers_of_a_sharded_model_are_gathered_one_after_another() -> None:
    """The bytes stay the same, and each layer waits for the latency of its own rings."""
    table = some_rows("MosaicML")
    (row,) = records(table.query("model == 'MPT-7b' and workers == 512"))
    (once,) = records(
        table.query("model == 'MPT-7b' and workers == 512").assign(layers=math.nan)
    )
    rings = 3 * (512 - 1)  # steps of two gathers and a scatter
    assert communication_s(row) - communication_s(once) == pytest.approx(
        31 * rings * 4e-6, rel=0.05
    )
    assert communication_s(once) == communication_s(row._replace(layers=1))


def test_parameters_that_stay_gathered_are_gathered_once() -> None:
    """SHARD_GRAD_OP frees what forward gathered after backward: a gather and a scatter in place of two and one."""
    table = some_rows("MosaicML")
    (row,) = records(table.query("model == 'MPT-3b' and workers == 512"))
    assert "SHARD_GRAD_OP" in row.strategy
    again = row._replace(strategy=row.strategy.replace("SHARD_GRAD_OP", "FULL_SHARD"))
    assert communication_s(row) == pytest.approx(2 / 3 * communication_s(again))
