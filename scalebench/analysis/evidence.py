"""What the rules that doubt a study look at: its cells, their comparisons and their single runs, each computed once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from scalebench.analysis.blocks import Cell, by_block
from scalebench.analysis.comparing import ratios
from scalebench.analysis.grouping import cells
from scalebench.analysis.loading import Results
from scalebench.analysis.testing import MEASURED


@dataclass(frozen=True)
class Evidence:
    """What the rules look at."""

    results: Results
    table: pd.DataFrame  # of cells
    compared: pd.DataFrame  # with baselines

    @classmethod
    def of(cls, results: Results) -> Evidence:
        return cls(results, cells(results), ratios(results))

    @cached_property
    def runs(self) -> list[Cell]:
        """Every cell's times one by one."""
        return by_block(self.results)

    def measured(self) -> Iterator[tuple[str, pd.DataFrame]]:
        """The repeated cells of each execution that measures times."""
        for execution in MEASURED:
            own = self.table[(self.table["execution"] == execution) & (self.table["n"] > 1)]
            if len(own):
                yield execution, own
