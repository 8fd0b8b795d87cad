"""Statistics are computed once for each study that was read."""

from __future__ import annotations

import gc
import weakref

import pandas as pd
import pytest

from scalebench.analysis import cells, load, ratios, virtual_error
from scalebench.analysis.cached import cached


def test_a_study_is_asked_once_and_another_one_again(study):
    asked = []

    @cached
    def rows(results):
        """Count them."""
        asked.append(results)
        return len(results.runs)

    first, second = study(repetitions=1), study(repetitions=2)
    assert [rows(results) for results in (first, second, first)] == [len(first.runs), len(second.runs), len(first.runs)]
    assert asked == [first, second]
    assert rows.__doc__ == "Count them."


@pytest.mark.parametrize("statistic", [cells, ratios])
def test_a_reader_may_change_the_table_it_got(study, statistic):
    results = study(repetitions=2)
    table = statistic(results)
    before = table.copy(deep=True)
    table.loc[:, "train_s"] = 0.0
    table["more"] = 1
    pd.testing.assert_frame_equal(statistic(results), before)


def test_a_study_that_is_read_again_is_another_one(study):
    results = study(repetitions=2)
    assert load(results.folder) != results
    assert virtual_error(load(results.folder)) == virtual_error(results)


def test_what_was_computed_goes_with_the_study(study):
    results = study(repetitions=1)
    cells(results)
    gone = weakref.ref(results)
    del results
    gc.collect()
    assert gone() is None
