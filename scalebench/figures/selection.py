"""What a figure shows: a part of a study, and curves beside it, of another study or of one's own from a CSV file.

Statistics are computed from the whole study before a part is selected.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scalebench.errors import ResultsError, UsageError, nearest
from scalebench.system.file_access import read_bytes

if TYPE_CHECKING:
    import pandas as pd

    from scalebench.analysis import Results

EXECUTION = "added"  # of the rows of a file, whose times are of an unknown kind
# Columns of a file, and their names in the tables of the analysis; all but the workers
# may be missing.
_COLUMNS = {
    "workers": "workers",
    "time_s": "train_s",
    "time_low_s": "low_s",
    "time_high_s": "high_s",
    "efficiency": "efficiency",
    "efficiency_low": "efficiency_low",
    "efficiency_high": "efficiency_high",
    "metric": "metric",
    "metric_low": "metric_low",
    "metric_high": "metric_high",
}
_VALUES = ("time_s", "efficiency", "metric")


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
            kept &= table["strategy"].isin(self.strategies) | table["label"].isin(
                self.strategies
            )
        for column, chosen in (
            ("workers", self.workers),
            ("execution", self.executions),
            ("engine", self.engines),
        ):
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
            "strategy": (
                self.strategies,
                {*runs["strategy"].unique(), *runs["label"].unique()},
            ),
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
                    # Of numbers there is no nearest spelling.
                    has = nearest(name, known) if isinstance(name, str) else has
                    raise UsageError(
                        f"--{flag}: no completed run of {name!r} in {results.folder}; {has}"
                    )
        if len(runs) and self.of(runs).empty:
            raise ResultsError(
                f"{results.folder}: no completed run has all that was selected; select less"
            )


EVERYTHING = Selection()


@dataclass(frozen=True)
class Added:
    """A folder of results, or a CSV file, with the label that tells its curves from those of the study."""

    path: Path
    label: str

    @property
    def is_study(self) -> bool:
        return self.path.is_dir()

    def results(self) -> Results:
        """Return the records of an added study.

        Raises:
            ResultsError: the folder holds none.
        """
        from scalebench.analysis import load
        from scalebench.records.folder import study_in

        return load(study_in(self.path))

    def curve(self) -> pd.DataFrame:
        """Return the rows of a file with the columns of a cell.

        Raises:
            UsageError: the file cannot be read, or lacks a column of numbers.
        """
        import pandas as pd

        try:
            table = pd.read_csv(io.BytesIO(read_bytes(self.path)))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--add {self.path}: cannot be read as CSV: {error}"
            ) from None
        known = [name for name in _COLUMNS if name in table]
        if "workers" not in known or not set(_VALUES) & set(known):
            has = ", ".join(map(str, table.columns))
            raise UsageError(
                f"--add {self.path}: expected the columns workers and {' or '.join(_VALUES)}; it has {has}"
            )
        for name in known:
            # A cell that is no number is named below; an empty one is a missing value.
            numbers = pd.to_numeric(table[name], errors="coerce")
            wrong = (
                numbers.isna() & table[name].notna()
                if name != "workers"
                else ~(numbers >= 1)
            )
            if wrong.any():
                raise UsageError(
                    f"--add {self.path}: {name} {str(table.loc[wrong, name].iloc[0])!r} is no number that fits"
                )
            table[name] = numbers
        rows = table[known].rename(columns=_COLUMNS)
        return rows.assign(
            # A file is one curve: its label is a series of its own, beside all
            # strategies.
            label=self.label,
            strategy=self.label,
            execution=EXECUTION,
            engine=EXECUTION,
            oversubscribed=False,
            interval="",
        )


def parse_added(text: str) -> Added:
    """Return the path and the label of `PATH:LABEL`; without a label it is the name of the file or folder.

    Raises:
        UsageError: the path does not exist.
    """
    path, _, label = text.partition(":")
    if not Path(path).exists():
        raise UsageError(
            f"--add {text}: no file or folder {path}; expected FILE.csv:LABEL or RESULTS:LABEL"
        )
    return Added(Path(path), label.strip() or Path(path).stem)


def with_added(
    table: pd.DataFrame,
    added: Sequence[Added],
    compute: Callable[[Results], pd.DataFrame],
) -> pd.DataFrame:
    """Return `table` with the rows that `compute` gives for added studies, and with those of added files.

    The label of an added study is appended to those of its strategies: `epoch_average
    in LABEL`.

    Raises:
        UsageError: an added study has another metric or scaling mode, or a file is not as expected.
        ResultsError: an added folder holds no records.
    """
    import pandas as pd

    tables = [table]
    for one in added:
        if not one.is_study:
            tables.append(one.curve())
            continue
        own = compute(one.results())
        # A curve beside those of the study has to mean the same: strong beside weak
        # scaling does not.
        for column, what in (("scaling", "scaling"), ("metric_name", "metric")):
            here, there = (
                set(part[column].dropna()) if column in part else set()
                for part in (table, own)
            )
            if here and there and here != there:
                raise UsageError(
                    f"--add {one.path}: its {what} is {', '.join(there)}, that of the study {', '.join(here)}"
                )
        tables.append(own.assign(label=own["label"].astype(str) + f" in {one.label}"))
    return pd.concat(tables, ignore_index=True) if added else table
