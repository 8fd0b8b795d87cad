"""Statistics of a study that many tables and figures ask for are computed once.

Results are not changed after they were read, so that what follows from them is kept as long as they are. A table is
handed out as a copy, which its reader may change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

import pandas as pd

if TYPE_CHECKING:
    from scalebench.analysis.loading import Results

T = TypeVar("T")


def cached(function: Callable[[Results], T]) -> Callable[[Results], T]:
    """`function`, which is called once for each `Results` and gives the same answer again."""
    kept: WeakKeyDictionary[Results, T] = WeakKeyDictionary()

    @wraps(function)
    def answer(results: Results) -> T:
        if results not in kept:
            kept[results] = function(results)
        found = kept[results]
        return found.copy() if isinstance(found, pd.DataFrame) else found

    return answer
