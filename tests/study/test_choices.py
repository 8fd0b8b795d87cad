"""Who is a baseline of whom."""

from __future__ import annotations

import pytest

from scalebench.study.choices import PER_BATCH, baselines_of


@pytest.mark.parametrize("strategy", [*PER_BATCH, "local_sgd"])
def test_baselines_of_baselines_are_compared_with_too(strategy):
    """Blocks of a study that repeats until intervals are narrow hold them all, and so leave no gap."""
    own = baselines_of(strategy)
    assert own[0] == "serial"
    assert {base for name in own for base in baselines_of(name)} <= set(own)


def test_strategy_is_compared_with_all_baselines_and_a_library_with_serial():
    assert baselines_of("local_sgd") == ("serial", "allreduce", "horovod", "ddp")
    assert baselines_of("allreduce") == ("serial", "horovod", "ddp")
    assert baselines_of("ddp") == ("serial",)
