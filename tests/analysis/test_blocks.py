"""Which runs are paired: what the run order put side by side."""

from __future__ import annotations

import math

import pytest

from scalebench.analysis import ratios
from scalebench.analysis.blocks import by_block, paired_times, share_blocks
from scalebench.cluster.load import load_cluster
from scalebench.launch import engines
from scalebench.launch.sweep import expand
from scalebench.study.spec import Study
from tests.analysis.test_comparing import only, run


def two(study, order_a, order_b, execution="native", engine_b="mpi"):
    rows = [run("allreduce", 2, 2.0 + r, execution, repetition=r, run_order=at) for r, at in enumerate(order_a)]
    engine = None if execution == "virtual" else engine_b
    rows += [
        run("epoch_average", 2, 1.0, execution, engine, repetition=r, run_order=at) for r, at in enumerate(order_b)
    ]
    first, second = sorted(by_block(study(rows=rows)), key=lambda cell: cell.label)
    return first, second


@pytest.mark.parametrize(
    ("order_a", "order_b", "paired"),
    [
        ((0, 3, 4), (1, 2, 5), True),  # drawn anew in each block
        ((0, 1, 2), (3, 4, 5), False),  # one launch after the other
        ((0, 2, 3), (1, 4, 5), False),  # the second's block 1 ends after the first's block 2 began
    ],
)
def test_pairs_are_told_by_the_run_order(study, order_a, order_b, paired):
    a, b = two(study, order_a, order_b)
    assert share_blocks(a, b) == share_blocks(b, a) == paired


def test_virtual_repetitions_are_paired_whenever_they_were_computed(study):
    assert share_blocks(*two(study, (0, 1, 2), (3, 4, 5), "virtual"))


def test_a_common_engine_is_not_what_pairs(study):
    assert share_blocks(*two(study, (0, 3, 4), (1, 2, 5), engine_b="horovod"))


def test_pairs_are_of_the_blocks_that_both_have(study):
    rows = [run("allreduce", 2, 2.0 + r, "native", repetition=r, run_order=2 * r) for r in (0, 2, 3)]
    rows += [run("epoch_average", 2, 1.0 + r, "native", repetition=r, run_order=2 * r + 1) for r in (0, 1, 3)]
    a, b = sorted(by_block(study(rows=rows)), key=lambda cell: cell.label)
    assert paired_times(a, b) == ([2.0, 5.0], [1.0, 4.0])


def test_the_noise_of_the_baseline_is_inside_either_interval(study):
    # The strategy itself takes exactly one second: all that the intervals show is the baseline's noise.
    steady, noisy = [1.0] * 4, [2.0, 2.2, 1.8, 2.1]
    for shift in (0, 100):
        rows = [run("allreduce", 2, t, "native", repetition=r, run_order=2 * r) for r, t in enumerate(noisy)]
        rows += [
            run("epoch_average", 2, t, "native", repetition=r, run_order=2 * r + 1 + shift)
            for r, t in enumerate(steady)
        ]
        row = only(ratios(study(rows=rows)), label="epoch_average", baseline="allreduce")
        assert row.paired == (shift == 0)
        assert row.ratio_low < 1.9 < 2.1 < row.ratio_high
        if row.paired:
            assert row.median_ratio == pytest.approx(math.sqrt(2.0 * 2.1)), "the middle of four, on logs"
        else:
            assert math.isnan(row.median_ratio)


def test_every_real_point_of_a_study_shares_its_blocks_whatever_its_engine(study, monkeypatch):
    monkeypatch.setattr(engines, "available", lambda name: "no GPU here" if name == "nccl" else None)
    plan = Study(workers="1,2,4", strategies=["serial", "allreduce", "horovod", "ddp", "epoch_average"], repetitions=4)
    runs = expand(plan, load_cluster(plan.cluster), 4).runs
    rows = [
        run(one.strategy.name, one.workers, 1.0, one.execution, one.engine, one.repetition, run_order=one.run_order)
        for one in runs
    ]
    found = [cell for cell in by_block(study(rows=rows)) if cell.execution == "native"]
    assert {cell.engine for cell in found} >= {"mpi", "horovod", "gloo"}
    assert all(share_blocks(a, b) for a in found for b in found)
