"""Global generators: seeded together, put back, and known to have been used."""

from __future__ import annotations

import random

import numpy as np
import torch

from scalebench.system.random_state import (
    drawn_since,
    put_back,
    random_state,
    seed_generators,
    seeded,
)

DRAWS = {
    "random": random.random,
    "numpy": lambda: float(
        np.random.normal()
    ),  # an odd number of them leaves one for the next call
    "torch": lambda: float(torch.rand(())),
}


def draws():
    return [draw() for draw in DRAWS.values()]


def test_numbers_inside_depend_on_the_seed_and_behind_it_nothing_has_changed():
    before = random_state()
    with seeded(5):
        first = draws()
    assert drawn_since(before) == frozenset()
    draws()
    with seeded(5):
        assert draws() == first
    with seeded(6):
        assert not set(draws()) & set(first)


def test_generators_in_use_are_told_apart():
    for name, draw in DRAWS.items():
        before = random_state()
        draw()
        assert drawn_since(before) == {name}
        put_back(before)
        assert drawn_since(before) == frozenset()


def test_some_generators_are_seeded_alone():
    seed_generators(1)
    first = draws()
    seed_generators(1)
    after = random_state()
    seed_generators(2, {"numpy"})
    assert drawn_since(after) == {"numpy"}
    seed_generators(1, {"numpy"})
    assert draws() == first
