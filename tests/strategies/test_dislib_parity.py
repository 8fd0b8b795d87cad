"""Epoch averaging against dislib: final weights that dislib 1.0.0 itself produced (tests/reference/README.md), and a
transcription of its rule for what those weights do not cover: odd sizes, uneven chains,
other intervals.

dislib's own in float32, as it computed them: sums in another order differ by some 1e-7.
The transcription in float64.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scalebench.comm.engines import available
from scalebench.data.dataset import Dataset
from scalebench.launch.processes import environment, launch_command
from scalebench.virtual.engine import simulate
from tests.arrays import arrays_in

REFERENCE = Path(__file__).parents[1] / "reference" / "dislib-1.0.0.npz"
PROGRAM = Path(__file__).parent / "programs" / "dislib_natively.py"
RESET = {"optimizer_state": "reset_per_block"}
CASES = [
    ("synchronous", "dislib-compat", {}),
    ("synchronous", "dislib-compat", {"aggregation": "allreduce"}),
    ("synchronous", "epoch_average", {**RESET, "aggregation": "master"}),
    ("synchronous", "epoch_average", RESET),
    ("synchronous_every_2", "dislib-compat", {"every": 2}),
    ("synchronous_every_2", "epoch_average", {**RESET, "every": 2}),
    ("asynchronous", "dislib-compat-async", {}),
    ("asynchronous", "epoch_async", RESET),
    ("asynchronous_every_2", "dislib-compat-async", {"every": 2}),
    ("asynchronous_every_2", "epoch_async", {**RESET, "every": 2}),
]
ODD = [
    (strategy, {"every": every})
    for strategy in ("dislib-compat", "dislib-compat-async")
    for every in (1, 2, 3)
]


@pytest.fixture(scope="module")
def reference():
    with np.load(REFERENCE) as archive:
        return {name: archive[name] for name in archive}


def run_of_reference(make_run, reference, folder, strategy, options, **values):
    np.savez(folder / "initial.npz", initial=reference["initial"])
    return make_run(
        {strategy: options},
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
        init_weights=folder / "initial.npz",
        **{"virtual": {"ties": "rank", "jitter": "none"}, **values},
    )


@pytest.mark.parametrize(("expected", "name", "options"), CASES)
def test_final_weights_are_those_of_dislib(
    reference, expected, name, options, make_run, machine, tmp_path
):
    run = run_of_reference(make_run, reference, tmp_path, name, options)
    x, y = reference["x"], reference["y"]
    outcome, weights = simulate(
        run, Dataset("dislib", "regression", 3, x, y, x[:8], y[:8]), machine
    )
    assert outcome.status == "completed", outcome.error
    np.testing.assert_array_equal(weights["initial"].numpy(), reference["initial"])
    np.testing.assert_allclose(
        weights["final"].numpy(), reference[expected], atol=1e-6, rtol=0
    )
    assert np.abs(reference[expected] - reference["initial"]).max() > 0.01


# --- the rule, written from its description, for any sizes ---------------------------------------------------------

ROWS, BLOCKS, BATCH, EPOCHS, RATE, MOMENTUM = 207, 7, 8, 5, 0.05, 0.9


def odd_data():
    random = np.random.default_rng(11)
    x = random.standard_normal((ROWS, 4)).astype(np.float32)
    return x, np.tanh(x @ random.standard_normal((4, 2))).astype(np.float32)


def gradient(weights, x, y):
    """Of mean((relu(x a' + b) c' + d - y)^2); `weights` is a (5, 4), b, c (2, 5), d in one vector."""
    a, b, c, d = (
        weights[:20].reshape(5, 4),
        weights[20:25],
        weights[25:35].reshape(2, 5),
        weights[35:],
    )
    before = x @ a.T + b
    hidden = np.where(before > 0, before, 0)
    slope = 2 * (hidden @ c.T + d - y) / y.size
    back = slope @ c * (before > 0)
    return np.concatenate(
        [(back.T @ x).ravel(), back.sum(0), (slope.T @ hidden).ravel(), slope.sum(0)]
    )


def local_epoch(weights, x, y, blocks):
    for rows in blocks:
        velocity = np.zeros_like(weights)
        batches = (len(rows) + BATCH - 1) // BATCH
        size = len(rows) // batches
        for number in range(batches):
            chosen = rows[number * size : (number + 1) * size]
            velocity = MOMENTUM * velocity + gradient(weights, x[chosen], y[chosen])
            weights = weights - RATE * velocity
    return weights


def dislib(initial, workers, every, order=None):
    """`order` is who merges, one entry a merge; None: synchronous."""
    x, y = (array.astype(np.float64) for array in odd_data())
    blocks = np.array_split(np.arange(ROWS), BLOCKS)
    chains = [blocks[worker::workers] for worker in range(workers)]
    mine = [initial.copy() for _ in range(workers)]
    if order is None:
        for epoch in range(EPOCHS):
            mine = [
                local_epoch(w, x, y, chain)
                for w, chain in zip(mine, chains, strict=True)
            ]
            if (epoch + 1) % every == 0 or epoch + 1 == EPOCHS:
                mine = [sum(mine) / workers] * workers
        return mine[0]
    common = initial.copy()
    for worker in order:
        for _ in range(every):
            mine[worker] = local_epoch(mine[worker], x, y, chains[worker])
        common = (common + mine[worker]) / 2
        mine[worker] = common.copy()
    for _ in range(EPOCHS % every):
        mine = [
            local_epoch(w, x, y, chain) for w, chain in zip(mine, chains, strict=True)
        ]
    return sum(mine) / workers


def odd_run(make_run, strategy, options, workers, **values):
    return make_run(
        {strategy: options}, workers, model={"mlp": {"hidden": [5]}}, epochs=EPOCHS, lr=RATE, blocks=BLOCKS,
        optimizer={"sgd": {"momentum": MOMENTUM}}, batch_per_worker=BATCH, partition="by_order", shuffle="none",
        **values,
    )  # fmt: skip


def order_of(places):
    """Who merged at each place, from each worker's places."""
    who = {place: worker for worker, own in enumerate(places) for place in own}
    return [who[place] for place in range(len(who))]


@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize(("strategy", "options"), ODD)
def test_uneven_block_sizes_follow_the_rule(
    strategy, options, workers, make_run, machine
):
    """207 rows in 7 blocks of 30 and 29: 4 batches of 7, 2 or 1 left out; 3 and 2 blocks a worker."""
    x, y = odd_data()
    run = odd_run(make_run, strategy, options, workers)
    outcome, weights = simulate(
        run, Dataset("odd", "regression", 2, x, y, x[:8], y[:8]), machine
    )
    assert outcome.status == "completed", outcome.error
    order = None
    if strategy.endswith("async"):
        places = [
            list(map(int, worker.histograms["merge_position"]))
            for worker in outcome.workers
        ]
        order = order_of(places)
        assert sorted(order) == sorted(
            list(range(workers)) * (EPOCHS // options["every"])
        )
    expected = dislib(weights["initial"].numpy(), workers, options["every"], order)
    np.testing.assert_allclose(weights["final"].numpy(), expected, atol=1e-10, rtol=0)


@pytest.mark.thorough
def test_four_real_ranks_reproduce_dislib(reference, make_run, tmp_path):
    if reason := available("mpi"):
        pytest.skip(reason)
    native = {"execution": "native", "engine": "mpi", "warmup_steps": 0}
    runs = [
        (
            run_of_reference(
                make_run,
                reference,
                tmp_path,
                name,
                options,
                run_id=f"reference-{i}",
                **native,
            ),
            "dislib",
        )
        for i, (_, name, options) in enumerate(CASES)
    ]
    runs += [
        (odd_run(make_run, name, options, 4, run_id=f"odd-{i}", **native), "odd")
        for i, (name, options) in enumerate(ODD)
    ]
    np.savez(tmp_path / "dislib.npz", x=reference["x"], y=reference["y"])
    np.savez(tmp_path / "odd.npz", x=odd_data()[0], y=odd_data()[1])
    entries = [
        {"run": json.loads(run.model_dump_json()), "data": f"{data}.npz"}
        for run, data in runs
    ]
    (tmp_path / "runs.json").write_text(json.dumps(entries))
    command = [
        *launch_command(4)[0],
        sys.executable,
        "-W",
        "error",
        str(PROGRAM),
        str(tmp_path),
    ]
    done = subprocess.run(
        command,
        env=environment(1, oversubscribed=True),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for i, (expected, name, options) in enumerate(CASES):
        found = arrays_in(tmp_path / f"reference-{i}.npz")["final"]
        np.testing.assert_allclose(
            found, reference[expected], atol=1e-6, rtol=0, err_msg=f"{name} {options}"
        )
    for i, (name, options) in enumerate(ODD):
        made = arrays_in(tmp_path / f"odd-{i}.npz")
        order = order_of(made["places"].tolist()) if name.endswith("async") else None
        expected = dislib(made["initial"], 4, options["every"], order)
        np.testing.assert_allclose(
            made["final"], expected, atol=1e-10, rtol=0, err_msg=f"{name} {options}"
        )
