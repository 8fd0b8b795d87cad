"""epoch_average and epoch_async against final weights that dislib 1.0.0 itself produced (tests/reference/README.md).

float32, as the reference computed it: 5 epochs of 8 batches, so sums in another order differ by some 1e-7.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scalebench.data.dataset import Dataset
from scalebench.virtual.engine import simulate

REFERENCE = Path(__file__).parents[1] / "reference" / "dislib-1.0.0.npz"


@pytest.fixture(scope="module")
def reference():
    with np.load(REFERENCE) as archive:
        return {name: archive[name] for name in archive}


CASES = [
    ("synchronous", "epoch_average", {"every": 1}),
    ("synchronous", "epoch_average", {"every": 1, "aggregation": "master"}),
    ("synchronous_every_2", "epoch_average", {"every": 2}),
    ("synchronous_every_2", "epoch_average", {"every": 2, "aggregation": "master"}),
    ("asynchronous", "epoch_async", {"every": 1}),
    ("asynchronous_every_2", "epoch_async", {"every": 2}),
]


@pytest.mark.parametrize(("expected", "name", "options"), CASES)
def test_final_weights_are_those_of_dislib(reference, expected, name, options, make_run, scenery, tmp_path):
    np.savez(tmp_path / "initial.npz", initial=reference["initial"])
    run = make_run(
        {name: {**options, "optimizer_state": "reset_per_block"}},
        int(reference["workers"]),
        model={"mlp": {"hidden": [8]}},
        dtype="float32",
        epochs=int(reference["epochs"]),
        lr=float(reference["lr"]),
        optimizer={"sgd": {"momentum": float(reference["momentum"])}},
        batch_per_worker=8,
        blocks=int(reference["blocks"]),
        partition="by_order",
        shuffle="none",
        init_weights=tmp_path / "initial.npz",
        virtual={"ties": "rank", "jitter": "none"},
    )
    x, y = reference["x"], reference["y"]
    dataset = Dataset("dislib", "regression", 3, x, y, x[:8], y[:8])
    outcome, weights = simulate(run, dataset, scenery)
    assert outcome.status == "completed", outcome.error
    np.testing.assert_array_equal(weights["initial"].numpy(), reference["initial"])
    np.testing.assert_allclose(weights["final"].numpy(), reference[expected], atol=1e-6, rtol=0)
    assert np.abs(reference[expected] - reference["initial"]).max() > 0.01
