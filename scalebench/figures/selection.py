"""The part of a study that a figure or table shows. Statistics are computed from the whole study before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalebench.errors import ResultsError, UsageError, nearest

if TYPE_CHECKING:
    import pandas as pd

    from scalebench.analysis import Results


@dataclass(frozen=True)
class Selection:
    """Strategies (name, or label with options), worker counts, executions and engines; an empty one selects all."""

    strategies: tuple[str, ...] = ()
    workers: tuple[int, ...] = ()
    executions: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()

    def of(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the selected rows of a table with the columns of a cell and `strategy`."""
        kept = table["strategy"].notna()
        if self.strategies:
            kept &= table["strategy"].isin(self.strategies) | table["label"].isin(self.strategies)
        for column, chosen in (("workers", self.workers), ("execution", self.executions), ("engine", self.engines)):
            if chosen:
                kept &= table[column].isin(chosen)
        return table[kept]

    def require(self, results: Results) -> None:
        """Raise unless each selected name or count, and their combination, has a completed run.

        Raises:
            UsageError: a strategy, worker count, execution or engine without a completed run.
            ResultsError: no completed run has all of them.
        """
        runs = results.completed
        present = {
            "strategy": (self.strategies, {*runs["strategy"].unique(), *runs["label"].unique()}),
            "workers": (self.workers, set(runs["workers"].unique())),
            "execution": (self.executions, set(runs["execution"].unique())),
            "engine": (self.engines, set(runs["engine"].unique())),
        }
        for flag, (chosen, known) in present.items():
            if flag == "workers" and set(chosen) & known:
                continue  # 1..64 of a study up to 32
            for name in chosen:
                if name not in known:
                    has = f"the study has {', '.join(map(str, sorted(known)))}"
                    has = nearest(name, known) if isinstance(name, str) else has
                    raise UsageError(f"--{flag}: no completed run of {name!r} in {results.folder}; {has}")
        if len(runs) and self.of(runs).empty:
            raise ResultsError(f"{results.folder}: no completed run has all that was selected; select less")


EVERYTHING = Selection()
