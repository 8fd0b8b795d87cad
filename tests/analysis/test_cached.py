"""Caching of statistics."""

from __future__ import annotations

import gc
import weakref

import pandas as pd
import pytest

from scalebench.analysis import cells, load, ratios, virtual_error
from scalebench.analysis.loading import cached


def test_statistic_is_computed_once_per_study(study):
    asked = []

    @cached
    def rows(results):
        """Number of rows."""
        asked.append(results)
        return len(results.runs)

    first, second = study(repetitions=1), study(repetitions=2)
    assert [rows(results) for results in (first, second, first)] == [
        len(first.runs),
        len(second.runs),
        len(first.runs),
    ]
    assert asked == [first, second]
    assert rows.__doc__ == "Number of rows."


@pytest.mark.parametrize("statistic", [cells, ratios])
def test_cached_tables_are_copies(study, statistic):
    results = study(repetitions=2)
    table = statistic(results)
    before = table.copy(deep=True)
    table.loc[:, "train_s"] = 0.0
    table["more"] = 1
    pd.testing.assert_frame_equal(statistic(results), before)


def test_loading_again_computes_again(study):
    results = study(repetitions=2)
    assert load(results.folder) != results
    assert virtual_error(load(results.folder)) == virtual_error(results)


def test_cached_statistics_are_freed_with_the_study(study):
    results = study(repetitions=1)
    cells(results)
    gone = weakref.ref(results)
    del results
    gc.collect()
    assert gone() is None
