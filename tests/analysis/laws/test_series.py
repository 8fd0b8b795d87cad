"""Workload: recorded, interpolated and extrapolated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.analysis.laws.series import SeriesWork, workload_of
from tests.law_factory import BYTES, COUNTS, STEPS, workload
from tests.records_factory import run_row


def rows(**columns):
    """Columns of `workload_of` for runs at 1, 2, 4 and 8 workers."""
    import pandas as pd

    found = []
    for workers in (1, 2, 4, 8):
        values = {
            "optimizer_steps": 800 // workers,
            "syncs": 6 * (workers > 1),
            "bytes_sent_per_worker": 60.0,
        }
        values |= {
            name: value(workers) if callable(value) else value
            for name, value in columns.items()
        }
        found.append(run_row(workers=workers, **values).model_dump())
    return pd.DataFrame(found)


@given(st.integers(0, 6), st.sampled_from(["batch", "epoch"]))
def test_workload_at_measured_counts_is_exact(power, every):
    load = workload(every=every)
    n = np.array([2.0**power])
    assert load.steps(n) == pytest.approx(load.measured_steps[power])
    assert load.syncs(n) == pytest.approx(load.measured_syncs[power])
    assert load.bytes_sent(n) == pytest.approx(load.measured_bytes[power])


@given(st.floats(2, 5000))
def test_workload_interpolates_and_extrapolates_powers_of_n(count):
    n = np.array([count])
    batch, epoch = workload(every="batch"), workload(every="epoch")
    assert batch.steps(n) == pytest.approx(STEPS / n)
    assert batch.syncs(n) == pytest.approx(STEPS / n)
    assert epoch.syncs(n) == pytest.approx(6)
    assert batch.bytes_sent(n) == pytest.approx(BYTES * STEPS / n)
    assert epoch.bytes_sent(n) == pytest.approx(6 * BYTES)


@given(st.floats(1.0, 1e6))
def test_workload_is_never_negative(count):
    n = np.array([count])
    counts = np.array(COUNTS, dtype=float)
    # a straight line would go below zero
    shrinking = np.where(counts > 1, 70 - counts, 0.0)
    load = SeriesWork(
        counts, STEPS / counts, shrinking, shrinking * (1 + 1 / counts), -1.0
    )
    assert load.syncs(n)[0] >= 0
    assert load.bytes_sent(n)[0] >= 0


def test_bytes_extrapolate_linearly_in_log2_n():
    counts = np.array(COUNTS, dtype=float)
    syncs = np.where(counts > 1, 6.0, 0.0)
    load = SeriesWork(
        counts, STEPS / counts, syncs, syncs * np.log2(counts) * 100, -1.0
    )
    assert load.bytes_sent(np.array([256.0])) == pytest.approx(6 * 8 * 100)


def test_one_worker_sends_no_bytes():
    load = workload(COUNTS[1:])
    assert load.syncs(np.ones(1))[0] == 0
    assert load.bytes_sent(np.ones(1))[0] == 0
    assert load.steps(np.ones(1)) == pytest.approx(STEPS)


def test_workload_is_read_from_rows():
    load = workload_of(rows())
    assert isinstance(load, SeriesWork)
    assert load.measured_steps.tolist() == [800, 400, 200, 100]
    assert load.measured_syncs.tolist() == [0, 6, 6, 6]
    assert load.samples is None
    both = workload_of(
        rows(batch_policy="global", batch_per_worker=lambda workers: 64 // workers)
    )
    assert isinstance(both, SeriesWork)
    assert both.samples is not None
    assert both.samples.tolist() == [51200, 12800, 3200, 800]


@pytest.mark.parametrize(
    "columns",
    [
        {"syncs": None},
        {"bytes_sent_per_worker": None},
        {"optimizer_steps": 0},
        {"syncs": 0},
        {"batch_policy": "global", "batch_per_worker": None},
    ],
)
def test_rows_without_counts_have_no_workload(columns):
    assert workload_of(rows(**columns)) is None
