"""Lists of cores as text."""

from __future__ import annotations

import pytest

from scalebench.system.hardware import core_list, cores_in


@pytest.mark.parametrize(
    ("cores", "text"),
    [
        ({0}, "0"),
        ({3, 1, 2}, "1-3"),
        ({0, 1, 2, 8, 10, 11}, "0-2,8,10-11"),
        (set(), ""),
    ],
)
def test_cores_are_listed_as_taskset_takes_them(cores, text):
    assert core_list(cores) == text
    assert cores_in(text) == cores
