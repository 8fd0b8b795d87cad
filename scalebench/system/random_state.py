"""The global random generators that models and strategies draw from: torch's of the CPU, numpy's and Python's.

Weights are drawn inside `seeded`; each worker trains with generators of its own, seeded
by `worker_seed`. Generators that a program makes itself (`numpy.random.default_rng()`,
`torch.Generator()`) are its own affair.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Generator(NamedTuple):
    """How a library's global generator is seeded, and how its state is read, put back and compared."""

    seed: Callable[[int], object]
    state: Callable[[], Any]
    put_back: Callable[[Any], object]
    equal: Callable[[Any, Any], bool]


def worker_seed(seed: int, rank: int) -> int:
    """Return the seed of a worker's generators in a run of `seed`."""
    # Distinct for all seeds, up to a million workers.
    return (seed * 1_000_003 + rank + 1) % (1 << 63)


def generators() -> dict[str, Generator]:
    """Return the generators by library, of the libraries that are loaded."""
    found = {
        "random": Generator(
            random.seed,
            random.getstate,
            random.setstate,
            lambda one, other: bool(one == other),
        )
    }
    if "numpy" in sys.modules:
        found["numpy"] = _numpy()
    if "torch" in sys.modules:
        found["torch"] = _torch()
    return found


def random_state(names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the states of the generators `names`, by default of all."""
    return {
        name: generator.state()
        for name, generator in generators().items()
        if names is None or name in names
    }


def put_back(states: dict[str, Any]) -> None:
    """Restore the states that `random_state` returned."""
    known = generators()
    for name, state in states.items():
        known[name].put_back(state)


def drawn_since(states: dict[str, Any]) -> frozenset[str]:
    """Return the generators that have been used since their `states`."""
    known = generators()
    now = {name: known[name].state() for name in states}
    return frozenset(
        name
        for name, state in states.items()
        if not known[name].equal(state, now[name])
    )


def seed_generators(seed: int, names: Collection[str] | None = None) -> None:
    """Seed the generators `names`, by default all, from one number."""
    for name, generator in generators().items():
        if names is None or name in names:
            generator.seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators inside; behind it they go on from where they were."""
    before = random_state()
    seed_generators(seed)
    try:
        yield
    finally:
        put_back(before)


def _numpy() -> Generator:
    import numpy as np

    def equal(
        one: Any, other: Any
    ) -> bool:  # name, key, position, and a normal number kept for the next call
        return bool(np.array_equal(one[1], other[1])) and one[2:] == other[2:]

    return Generator(
        lambda seed: np.random.seed(seed % (1 << 32)),
        np.random.get_state,
        np.random.set_state,
        equal,
    )


def _torch() -> Generator:
    import torch

    own = torch.default_generator  # only the CPU's, without a query for devices
    return Generator(own.manual_seed, own.get_state, own.set_state, torch.equal)
