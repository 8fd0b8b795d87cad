"""Colours and markers of series: equal in all studies, distinct within one."""

from __future__ import annotations

import random
from itertools import chain

import pytest

from scalebench.figures.drawing.styles import looks
from scalebench.strategies import registry

SWEEPS = [
    [f"local_sgd(steps={n})" for n in (4, 8, 16, 32)],
    [f"epoch_average(every={n})" for n in (1, 2, 3, 4, 5)],
    [f"diloco(steps={n})" for n in (8, 16, 32, 64)],
    ["allreduce on gloo", "allreduce(compression=bf16)", "allreduce(compression=topk)"],
]
LABELS = [*registry.names(), *chain(*SWEEPS), "mine.py:Mine", "mine.py:Mine(first=3)", "ours.py:Other"]


def shown(names):
    return {name: (look.color, look.marker) for name, look in looks(names).items()}


def test_strategies_have_distinct_looks():
    given = shown(registry.names())
    assert len(set(given.values())) == len(given)


@pytest.mark.parametrize("seed", range(20))
def test_look_is_independent_of_other_series(seed):
    whole, draw = shown(LABELS), random.Random(seed)
    names = draw.sample(LABELS, draw.randint(1, len(LABELS)))
    assert shown(names) == {name: whole[name] for name in names}


@pytest.mark.parametrize("labels", SWEEPS, ids=lambda labels: labels[0])
def test_common_option_values_differ_in_colour(labels):
    assert len({color for color, _ in shown(labels).values()}) == len(labels)


def test_colliding_looks_are_resolved():
    names = [f"mine.py:Mine(first={n})" for n in range(100)]
    assert len(set(shown(names).values())) == 100
    assert len(shown([f"mine.py:Mine(first={n})" for n in range(300)])) == 300, "more than there are looks"
