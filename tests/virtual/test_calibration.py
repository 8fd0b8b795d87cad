"""How many steps are taken before times are believed."""

from __future__ import annotations

import math

import pytest

from scalebench.virtual.calibration import bounded, take_steps


@pytest.mark.parametrize(
    ("least", "most", "seconds", "steps"),
    [(3, 30, 0.0, 3), (3, 30, math.inf, 30), (20, None, 0.0, 20), (5, 5, math.inf, 5)],
)
def test_slow_models_take_the_fewest_steps_and_fast_ones_the_most(least, most, seconds, steps):
    assert list(bounded(least, most, seconds)) == list(range(steps))


def test_time_ends_what_has_no_most():
    assert len(list(bounded(2, None, 0.02))) > 2


class ThreeBatches:
    """A replica with epochs of three batches, which counts what it did."""

    def __init__(self):
        self.fetched, self.stepped = [], []

    def batches(self, epoch):
        for batch in range(3):
            self.fetched.append((epoch, batch))
            yield epoch, batch

    def local_step(self, batch):
        self.stepped.append(batch)


def test_steps_go_on_over_epochs_and_fetch_no_batch_in_vain():
    replica = ThreeBatches()
    assert take_steps(replica, range(7)) == 7
    assert replica.stepped == replica.fetched == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]
