"""Colours and markers of series: those of common strategies equal in all studies, all distinct within one."""

from __future__ import annotations

from itertools import chain

import pytest

from scalebench.figures.drawing.series_style import looks
from scalebench.strategies import registry

SWEEPS = [
    [f"local_sgd(steps={n})" for n in (4, 8, 16, 32)],
    [f"epoch_average(every={n})" for n in (1, 2, 3, 4, 5)],
    [f"diloco(steps={n})" for n in (8, 16, 32, 64)],
    ["allreduce on gloo", "allreduce(compression=bf16)", "allreduce(compression=topk)"],
]
LABELS = [
    *registry.names(),
    *chain(*SWEEPS),
    "mine.py:Mine",
    "mine.py:Mine(first=3)",
    "ours.py:Other",
]


def shown(names):
    return {
        name: (look.color, look.marker, look.inside)
        for name, look in looks(names).items()
    }


def test_strategies_have_distinct_looks():
    given = shown(registry.names())
    assert len(set(given.values())) == len(given)


def test_common_strategies_look_the_same_in_every_study():
    whole = shown(LABELS)
    for name in (
        "serial",
        "allreduce",
        "horovod",
        "ddp",
        "epoch_average",
        "epoch_async",
    ):
        assert shown([name, "slowmo", "diloco(steps=8)"])[name] == whole[name]


def test_layouts_of_a_model_look_the_same_in_every_study():
    layouts = ["fsdp", "tensor", "pipeline", "hybrid", "adaptive", "model_parallel"]
    together = shown(["serial", "ddp", *layouts])
    assert len({color for color, *_ in together.values()}) == len(together)
    for name in layouts:
        assert shown(["serial", name])[name] == together[name]


def test_options_of_a_strategy_share_its_mark_and_differ_in_shade():
    for labels in SWEEPS[:3]:
        given = shown(labels)
        assert set(given) == set(labels)
        assert len({marker for _, marker, _ in given.values()}) == 1


@pytest.mark.parametrize("labels", SWEEPS, ids=lambda labels: labels[0])
def test_common_option_values_differ_in_colour(labels):
    assert len({color for color, *_ in shown(labels).values()}) == min(4, len(labels))
    assert len(set(shown(labels).values())) == len(labels)


def test_many_options_of_a_strategy_differ():
    names = [f"mine.py:Mine(first={n})" for n in range(24)]
    assert len(set(shown(names).values())) == 24
    assert len(shown([f"mine.py:Mine(first={n})" for n in range(300)])) == 300, (
        "more than there are looks"
    )
