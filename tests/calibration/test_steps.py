"""Numbers of calibration steps, and step tables from windows."""

from __future__ import annotations

import math
import threading
import time
from functools import partial
from itertools import count
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from scalebench.calibration import step_windows, steps_under_load
from scalebench.calibration.step_windows import (
    LapClock,
    Rounds,
    SecondsGauge,
    StepWindows,
    bounded,
    layer_shares,
    release_shares,
    single_replica,
    take_steps,
)
from scalebench.calibration.steps_under_load import (
    BLOCKS,
    JITTER_KEPT,
    _blocks,
    _jitter,
    measure_reference,
    step_tables,
)
from scalebench.errors import DisturbedError
from scalebench.pricing.machine import loads_up_to
from scalebench.system.clock import Task
from scalebench.training.reference_step import reference_step_of_now


@pytest.mark.parametrize(
    ("least", "most", "seconds", "steps"),
    [(3, 30, 0.0, 3), (3, 30, math.inf, 30), (20, None, 0.0, 20), (5, 5, math.inf, 5)],
)
def test_bounded_takes_least_steps_if_slow_and_most_if_fast(
    least, most, seconds, steps
):
    assert list(bounded(least, most, seconds)) == list(range(steps))


def test_bounded_without_most_ends_by_time(monkeypatch):
    passing = SimpleNamespace(perf_counter=count().__next__)  # a second each look
    monkeypatch.setattr(step_windows, "time", passing)
    assert list(bounded(2, None, 3.0)) == [0, 1, 2, 3]


def test_clock_waits_for_the_device_before_it_reads_the_time():
    clock = LapClock(partial(time.sleep, 0.002))
    clock.start()
    clock.did(Task.FORWARD)
    assert clock.laps[Task.FORWARD][0] >= 0.002


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(
                not torch.cuda.is_available(), reason="no GPU here"
            ),
        ),
    ],
)
def test_steps_in_seconds_and_release_of_gradients(device, blobs, make_run):
    replica = single_replica(make_run(), blobs, 8, torch.device(device))
    take_steps(replica, range(3))
    release = release_shares(replica)
    rounds = Rounds(
        replica,
        SecondsGauge(),
        0,
        1,
        threading.Barrier(1),
        SimpleNamespace(value=False),
    )
    began = time.perf_counter()
    windows = rounds.run(8, release, 0.2)
    took = time.perf_counter() - began
    (table,) = step_tables([windows], [1], None).tables
    (batch,) = table.batches
    step_s = sum(float(np.median(seconds)) for seconds in batch.blocks())
    assert 0 < step_s * windows.seconds.shape[1] * windows.steps.shape[1] < took
    assert all(0 < share <= 1 for share in release)
    assert release[0] > release[-1], "the last layer is done first"


def wide_in_the_middle(input_shape, outputs):
    return nn.Sequential(
        nn.Linear(2, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, outputs),
    )


class Uncut(nn.Module):
    def __init__(self, input_shape, outputs):
        super().__init__()
        self.only = nn.Linear(2, outputs)

    def forward(self, x):
        return self.only(x if x.shape[1] == 2 else -x)


def test_layers_share_the_passes_by_their_times(blobs, make_run):
    replica = single_replica(
        make_run(model=f"{__file__}:wide_in_the_middle"), blobs, 32, torch.device("cpu")
    )
    layers = layer_shares(replica)
    assert [layer.name for layer in layers] == ["0", "2", "4"]
    for task in ("forward", "backward"):
        shares = [getattr(layer, task) for layer in layers]
        assert sum(shares) == pytest.approx(1)
        assert max(shares) == shares[1], "128 times the work of the first layer"


def test_a_model_that_cannot_be_cut_has_no_layers(blobs, make_run):
    replica = single_replica(
        make_run(model=f"{__file__}:Uncut"), blobs, 32, torch.device("cpu")
    )
    assert layer_shares(replica) == []


class ThreeBatches:
    """A replica with epochs of three batches that counts its steps."""

    def __init__(self):
        self.fetched, self.stepped = [], []

    def batches(self, epoch):
        for batch in range(3):
            self.fetched.append((epoch, batch))
            yield epoch, batch

    def local_step(self, batch):
        self.stepped.append(batch)


def test_take_steps_continues_over_epochs_without_extra_batches():
    replica = ThreeBatches()
    assert take_steps(replica, range(7)) == 7
    assert (
        replica.stepped
        == replica.fetched
        == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]
    )


@pytest.mark.parametrize(
    ("workers", "loads"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8])]
)
def test_loads_are_powers_of_two_and_a_full_node(workers, loads):
    assert loads_up_to(workers) == loads


SHARES = np.array([0.05, 0.3, 0.6, 0.05])  # of a step: data, forward, backward, update


def windows(
    step=2.0,
    *,
    load=1,
    size=8,
    reference=1e-3,
    alone=None,
    rounds=20,
    spread=0.0,
    undisturbed=True,
    seed=0,
):
    """Windows of four steps, four windows a round, of one process; `step` in reference steps."""
    count = 4 * rounds
    factors = np.exp(spread * np.random.default_rng(seed).standard_normal((count, 4)))
    steps = step * reference * factors
    return StepWindows(
        load=load,
        size=size,
        rounds=np.repeat(np.arange(rounds), 4),
        seconds=SHARES[:, None] * steps.mean(axis=1),
        undisturbed=np.full(count, undisturbed),
        steps=steps,
        shuffle_s_per_sample=1e-6,
        release=[1.0, 0.5],
        references=np.full(count, reference),
        processor=np.stack([steps.mean(axis=1), np.full(count, reference)]),
        alone=np.full(rounds, reference if alone is None else alone),
    )


def step_s(table, size=8):
    (batch,) = [batch for batch in table.batches if batch.samples == size]
    return batch.blocks().sum(axis=0)


def test_step_time_is_its_ratio_times_the_mean_reference_step():
    larger = windows(3.0, size=16)._replace(release=[1.0, 0.25])
    measured = step_tables([windows(2.0), larger], [1], 0.25)
    (table,) = measured.tables
    assert (table.busy_workers, table.others_load, table.shuffle_s_per_sample) == (
        1,
        0.25,
        1e-6,
    )
    assert [table.release_at(samples) for samples in (11, 12)] == [
        [1.0, 0.5],
        [1.0, 0.25],
    ]  # the nearest, by ratio
    assert step_s(table) == pytest.approx([2e-3] * BLOCKS)
    assert step_s(table, 16) == pytest.approx([3e-3] * BLOCKS)
    assert table.batches[0].blocks()[:, 0] == pytest.approx(2e-3 * SHARES)
    assert measured.reference_s == pytest.approx(1e-3)
    assert measured.imprecise == []


def test_machine_speed_does_not_change_the_cost_in_reference_steps():
    changing = windows(2.0)
    late = changing.rounds >= 10
    changing.seconds[:, late] *= 2
    for values in (changing.steps, changing.references):
        values[late] *= 2
    changing.alone[10:] *= 2
    measured = step_tables([changing], [1], None)
    assert measured.reference_s == pytest.approx(1.5e-3), "the mean of both speeds"
    assert step_s(measured.tables[0]) == pytest.approx([3e-3] * BLOCKS)


def test_load_scales_steps_by_its_reference_step_at_least_one():
    alone = windows(2.0)
    slower = [
        windows(2.0, load=2, reference=1.3e-3, alone=1e-3),
        windows(2.0, load=2, reference=1.3e-3),
    ]
    # only process 0 looks at the reference step alone
    slower[1] = slower[1]._replace(alone=np.empty(0))
    one, two = step_tables([alone, *slower], [1, 2], None).tables
    assert step_s(one) == pytest.approx([2e-3] * BLOCKS)
    assert step_s(two) == pytest.approx([1.3 * 2e-3] * BLOCKS)
    faster = [
        windows(2.0, load=2, reference=0.9e-3, alone=1e-3),
        slower[1]._replace(references=np.full(80, 0.9e-3)),
    ]
    two = step_tables([alone, *faster], [1, 2], None).tables[1]
    assert step_s(two).mean() >= 2e-3 * (1 - 1e-9), "company makes no core faster"


def test_disturbed_windows_are_excluded():
    mixed = windows(2.0)
    late = mixed.rounds % 2 == 1
    mixed.undisturbed[late] = False
    mixed.seconds[:, late] *= 5
    mixed.steps[late] *= 5
    (table,) = step_tables([mixed], [1], None).tables
    assert step_s(table) == pytest.approx([2e-3] * BLOCKS)
    assert set(table.jitter) == {1.0}


def test_steps_without_undisturbed_windows_are_taken_from_processor_time():
    disturbed = windows(2.0, undisturbed=False)
    # waits for a core
    disturbed.seconds[:] *= np.random.default_rng(0).uniform(
        1, 20, size=disturbed.seconds.shape[1]
    )
    disturbed.references[:] *= 3
    (table,) = step_tables([disturbed], [1], None).tables
    assert step_s(table) == pytest.approx([2e-3] * BLOCKS)
    assert table.batches[0].blocks()[:, 0] == pytest.approx(2e-3 * SHARES), (
        "divided by the shares of the tasks"
    )
    assert table.disturbed
    with pytest.raises(
        DisturbedError,
        match=r"a step of 8 samples .* in every window; .*--require-quiet",
    ):
        step_tables([disturbed], [1], None, quiet=True)


def test_load_is_taken_from_processor_time_where_its_windows_are_disturbed():
    alone = windows(2.0)
    slower = windows(2.0, load=2, reference=1.3e-3, alone=1e-3, undisturbed=False)
    slower.references[:] *= 9
    one, two = step_tables([alone, slower], [1, 2], None).tables
    assert (one.disturbed, two.disturbed) == (False, True)
    assert step_s(two) == pytest.approx([1.3 * 2e-3] * BLOCKS)


def test_too_few_undisturbed_windows_count_as_disturbed():
    few = windows(2.0)
    few.undisturbed[7:] = False
    few.seconds[:, :7] *= 2
    (table,) = step_tables([few], [1], None).tables
    assert table.disturbed
    assert step_s(table) == pytest.approx([2e-3] * BLOCKS)
    few.undisturbed[:12] = True
    (table,) = step_tables([few], [1], None, quiet=True).tables
    assert not table.disturbed
    assert len(step_s(table)) == 12


def test_imprecise_medians_are_named():
    measured = step_tables([windows(2.0, spread=1.0), windows(2.0, size=16)], [1], None)
    (said,) = measured.imprecise
    assert said.startswith("steps of 8 samples at 1 a node to ")
    assert float(said.rpartition(" to ")[2].removesuffix(" %")) > 2


def test_blocks_are_medians_of_consecutive_windows_split_by_mean_shares():
    units = SHARES[:, None] * np.repeat(np.arange(1.0, BLOCKS + 1), 3)
    units[:, 1] *= 100  # one window of three, which the median does not follow
    blocks = _blocks(units)
    assert blocks.shape == (4, BLOCKS)
    assert blocks.sum(axis=0) == pytest.approx(np.arange(1.0, BLOCKS + 1))
    assert blocks / blocks.sum(axis=0) == pytest.approx(
        np.tile(SHARES[:, None], BLOCKS)
    )
    assert _blocks(units[:, 3:8]).shape == (4, 5), "fewer windows than blocks"


@pytest.mark.parametrize(
    "shape", [(1000, 4), (4000, 1)], ids=["windows of four", "windows of one"]
)
def test_jitter_excludes_outliers_and_drift(shape):
    random = np.random.default_rng(1)
    steps = 1e-3 * np.exp(0.02 * random.standard_normal(shape))
    whole, none = _jitter(steps)
    assert whole.std() == pytest.approx(0.02, rel=0.1)
    assert none < 0.002
    steps[shape[0] // 2 :] *= 1.33  # the core slows down
    hit = random.random(shape) < 0.05
    steps[hit] *= 3.0
    factors, outliers = _jitter(steps)
    assert outliers == pytest.approx(hit.mean(), abs=0.01)
    assert factors.std() == pytest.approx(0.02, rel=0.15)
    assert abs(factors - 1).max() < 0.15, "neither the interrupts nor the two speeds"


def test_a_few_steps_have_no_jitter():
    assert _jitter(np.array([[1.0, 5.0], [1.0, 2.0]])) == (np.ones(1), 0.0)


def test_jitter_of_a_table_has_mean_one_and_limited_length():
    (table,) = step_tables([windows(2.0, rounds=400, spread=0.05)], [1], None).tables
    assert len(table.jitter) == JITTER_KEPT
    assert np.mean(table.jitter) == pytest.approx(1.0)
    assert np.std(table.jitter) == pytest.approx(0.05, rel=0.1)


def test_reference_step_of_another_process_is_that_of_this_machine():
    measured = measure_reference(1)
    assert measured is None or 0.1 < measured / reference_step_of_now() < 10, (
        "None beside a busy program"
    )


@pytest.mark.parametrize("busy", [True, False])
def test_no_reference_step_is_taken_from_a_busy_machine(monkeypatch, busy):
    monkeypatch.setattr(steps_under_load, "exit_with_parent", lambda: None)
    monkeypatch.setattr(steps_under_load, "reference_step_of_now", lambda: 1e-3)
    monkeypatch.setattr(steps_under_load, "disturbed", lambda cores: busy)
    results = SimpleQueue()
    steps_under_load._measure_reference(1, results)
    assert results.get() == (None if busy else 1e-3)


class Pair(nn.Module):
    """A module whose output is a tuple, and one that takes it."""

    def __init__(self, input_shape, outputs):
        super().__init__()
        self.both = _Both()
        self.joined = _Joined(outputs)

    def forward(self, x):
        return self.joined(self.both(x))


class _Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Linear(2, 16), nn.Linear(16, 4))

    def forward(self, x):
        made = self.one(x)
        return made, made


class _Joined(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.two = nn.Linear(4, outputs)

    def forward(self, pair):
        return self.two(pair[0] + pair[1])


def test_layers_between_which_a_tuple_passes_have_no_shares(blobs, make_run):
    replica = single_replica(
        make_run(model=f"{__file__}:Pair"), blobs, 32, torch.device("cpu")
    )
    assert layer_shares(replica) == []
