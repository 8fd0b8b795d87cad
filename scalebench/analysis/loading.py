"""Reader of a study's folder: tables of runs and epochs, validated."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd

from scalebench.errors import ResultsError
from scalebench.formatting import counted
from scalebench.records import reading
from scalebench.records.attempts import latest_places
from scalebench.records.folder import EPOCHS, RUNS, STUDY, filled_by
from scalebench.records.schema import EpochRow, RunRow, columns
from scalebench.study.cell import BATCH, CELL, Cell
from scalebench.study.spec import SIMULATED
from scalebench.study.validation import read_mapping
from scalebench.system.disturbance import SHARE

# Share of steps that took longer than the stated pace.
PACE_OVERRUN_LIMIT = 0.01
_OF_A_CHECKSUM = 12  # digits
_SHOWN = 5  # names of runs in a note
# Equal for all runs of a study; the batch belongs to the cell.
CONDITION = [
    "model",
    "model_sha256",
    "init_weights_sha256",
    "dtype",
    "dataset",
    "partition",
    "shuffle",
    "threads_per_worker",
    "scaling",
    "batch_policy",
    "lr",
    "lr_policy",
    "optimizer",
    "epochs",
]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Results:
    """Latest attempts at the runs of one study, with any status, and their epochs.

    `runs` has the columns of runs.csv, `label`, the strategy with its options except
    tuned ones, and `disturbed` (`is_disturbed`); `oversubscribed` includes paced runs
    that missed their pace. Do not change tables in place: statistics are computed once
    per Results (`cached`). `trials`, with the columns of `runs`, are the trials of
    tuning, which are in no other table. `rows` are those of all attempts and
    configurations, with the columns of `runs`.
    """

    folder: Path
    runs: pd.DataFrame
    # epochs.csv can have a million rows, and most tables need none of them.
    given_epochs: pd.DataFrame | None  # None: read when `epochs` is asked for
    study: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    trials: pd.DataFrame = field(default_factory=pd.DataFrame)
    rows: pd.DataFrame = field(default_factory=pd.DataFrame)

    @cached_property
    def epochs(self) -> pd.DataFrame:
        """Epochs of `runs`, with the columns of epochs.csv. Those of `without_epochs` are left out, and noted.

        Raises:
            ResultsError: epochs.csv cannot be read, or a cell is damaged (named by file, line and column).
        """
        if self.given_epochs is not None:
            return self.given_epochs
        epochs, lacking = _read_epochs(self.folder / EPOCHS, self.runs)
        self.without_epochs.extend(lacking)
        if lacking:
            more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
            self.notes.append(
                f"{EPOCHS} lacks epochs of {counted(len(lacking), 'completed run')} "
                f"({', '.join(lacking[:_SHOWN])}{more}), which are in no figure over epochs; the command that made the "
                "study runs them again"
            )
        return epochs

    @cached_property
    def without_epochs(self) -> list[str]:
        """Names of completed runs with fewer rows in epochs.csv than epochs; known once `epochs` was read."""
        return []

    @cached_property
    def completed(self) -> pd.DataFrame:
        """Completed runs without those for warm-up: the input of statistics."""
        # Rows of other writers may leave the column empty.
        counted = (self.runs["status"] == "completed") & ~self.runs["warmup"].fillna(
            False
        ).astype(bool)
        return rows_where(self.runs, counted)

    @cached_property
    def failed(self) -> pd.DataFrame:
        """Runs with another status than completed."""
        return self.runs[self.runs["status"] != "completed"]


def cells_in(table: pd.DataFrame) -> list[Cell]:
    """Return the cell of each row of runs or cells, at any batch where `table` has no batches."""
    known = []
    for name in CELL:
        if name in table:
            # None for what is missing: NaN equals nothing, and cells are keys.
            known.append(table[name].astype(object).where(table[name].notna(), None))
    return [Cell(*row) for row in zip(*known, strict=True)]


def table_by_cell(
    rows: Sequence[dict[str, Any]], columns: Sequence[str]
) -> pd.DataFrame:
    """Return a table with a row for each cell; batches are of one type, also where none is known, to join tables by."""
    table = pd.DataFrame(rows, columns=list(columns))
    # pandas would make a column of missing values one of objects or floats, by which no
    # other table joins.
    return table.astype(dict.fromkeys(BATCH, "Int64"))


def rows_where(table: pd.DataFrame, marked: pd.Series[bool]) -> pd.DataFrame:
    """Return the `marked` rows; the table itself, in place of a copy, where all of them are."""
    return table if marked.all() else table[marked]


def cached(function: Callable[[Results], T]) -> Callable[[Results], T]:
    """Decorate a statistic to be computed once per `Results`; tables are returned as copies."""
    # Weak, so that a study that is no longer used takes its statistics with it.
    kept: WeakKeyDictionary[Results, T] = WeakKeyDictionary()

    @wraps(function)
    def answer(results: Results) -> T:
        if results not in kept:
            kept[results] = function(results)
        found = kept[results]
        # What a caller adds to a table must not be in that of the next one.
        return found.copy() if isinstance(found, pd.DataFrame) else found

    return answer


def load(folder: Path | str) -> Results:
    """Read the study in `folder`.

    Only the latest attempt at a run counts, and the last of several rows of one
    attempt. Of several configurations (another learning rate, another model, other
    data) that of the last row counts, of several runs of one repetition of a cell the
    last. Notes give the number of runs left out.

    Raises:
        ResultsError: no records there, another schema version, or a damaged cell (named by file, line and column).
    """
    folder = Path(folder)
    rows = _read_rows(folder)
    runs = every = _runs_in(rows, folder)
    # Counted before the choice of attempts, which leaves them out.
    doubled = int(runs.duplicated(["run_id", "attempt"]).sum())
    places = latest_places(runs["run_id"].tolist(), runs["attempt"].tolist())
    # In the order of the file: what is latest is decided by it below.
    if len(places) < len(runs):
        runs = runs.iloc[sorted(places.values())]
    runs, notes = _one_configuration(runs)
    # After the choice of a configuration: the same repetition of another one is no
    # repeated run.
    again = _claimed_twice(runs)
    if again.any():
        runs = runs[~again]
    repeated = doubled + int(again.sum())
    if repeated:
        notes.append(
            f"rows that give a run once more, of which only the last counts: {repeated} left out"
        )
    notes += _of_earlier_versions(folder)
    # The index of a row is its place, as where nothing was left out.
    if len(runs) < len(rows):
        runs = runs.reset_index(drop=True)
    return Results(
        folder, runs, None, _read_study(folder), notes, _trials_in(rows), every
    )


def _of_earlier_versions(folder: Path) -> list[str]:
    """Note the columns that the records in `folder` lack, as they were written before these columns existed."""
    notes = []
    for name, row_type in ((RUNS, RunRow), (EPOCHS, EpochRow)):
        path = folder / name
        lacking = reading.columns_not_recorded(path, row_type) if path.is_file() else []
        if lacking:
            notes.append(
                f"{name} is of an earlier version, without the columns {', '.join(lacking)}; they are read as empty"
            )
    return notes


def _read_epochs(path: Path, runs: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the epochs of the attempts `runs`, and the completed runs with fewer rows than epochs, which are left out.

    Such a run was committed by its row in runs.csv; later its epochs were cut off, or
    epochs.csv was deleted.
    """
    epochs = (
        reading.read_table(path, EpochRow)
        if path.is_file()
        else pd.DataFrame(columns=columns(EpochRow))
    )
    # in `runs`; -1: of none
    place = object_index(runs["run_id"]).get_indexer(object_index(epochs["run_id"]))
    attempts = runs["attempt"].to_numpy(dtype=np.int64)
    # Epochs of an earlier attempt belong to no run here.
    place[epochs["attempt"].to_numpy(dtype=np.int64) != attempts[place]] = -1
    completed = (runs["status"] == "completed").to_numpy(dtype=bool)
    is_accuracy = (runs["metric_name"] == "accuracy").to_numpy(
        dtype=bool, na_value=False
    )
    of_none = place < 0
    reading.check_completed(
        path,
        epochs,
        EpochRow,
        completed[place] & ~of_none,
        is_accuracy[place] & ~of_none,
    )
    numbers = epochs["epoch"].to_numpy(dtype=np.int64)
    # one number for each epoch of each run
    row = pd.Series(place * (numbers.max(initial=0) + 1) + numbers)
    # An epoch may be written again behind one that was cut off: the last one counts.
    kept = ~of_none & ~row.duplicated(keep="last").to_numpy()
    found = np.bincount(place[kept], minlength=len(runs))
    lacking = completed & (found < runs["epochs"].to_numpy(dtype=np.int64))
    # Part of a curve would look like a whole one.
    kept &= ~lacking[place]
    if not kept.all():
        epochs = epochs[kept].reset_index(drop=True)
    return epochs, runs.loc[lacking, "run_id"].tolist()


def object_index(texts: pd.Series[str]) -> Any:
    """Return an index of the objects of `texts`: pandas would convert a million of them to Arrow's for a second."""
    return pd.Index(texts.to_numpy(dtype=object), dtype=object)


def read_runs(folder: Path) -> pd.DataFrame:
    """Read all rows of `folder`/runs.csv except trials, with `label`, `oversubscribed` and `disturbed` as in Results.

    Raises:
        ResultsError: no records there, another schema version, or a damaged cell (named by file, line and column).
    """
    return _runs_in(_read_rows(folder), folder)


def read_trials(folder: Path) -> pd.DataFrame:
    """Read the latest attempt at each trial of tuning, as `read_runs`; empty without any."""
    return _trials_in(_read_rows(folder))


def _runs_in(rows: pd.DataFrame, folder: Path) -> pd.DataFrame:
    # Trials of tuning saw a part of the samples, and are no runs of the study.
    is_run = rows["trial"].isna()
    runs = rows if is_run.all() else rows[is_run]
    if runs.empty:
        more = f" but {counted(len(rows), 'trial')} of tuning" if len(rows) else ""
        raise ResultsError(
            f"{folder / RUNS} holds no runs yet{more}; `{filled_by(folder)}` fills it"
        )
    return runs


def _trials_in(rows: pd.DataFrame) -> pd.DataFrame:
    trials = rows[rows["trial"].notna()]
    places = latest_places(trials["run_id"].tolist(), trials["attempt"].tolist())
    return trials.iloc[sorted(places.values())].reset_index(drop=True)


def _read_rows(folder: Path) -> pd.DataFrame:
    path = folder / RUNS
    if not path.is_file():
        raise ResultsError(
            f"{folder} holds no runs.csv; expected the folder of a study, such as results/<study>"
        )
    rows = reading.read_table(path, RunRow)
    # A paced run that did not keep its pace had too few cores, whatever their number
    # says.
    rows["oversubscribed"] = rows["oversubscribed"].astype(bool) | (
        rows["paced_overrun"] > PACE_OVERRUN_LIMIT
    )
    # Computed from the load and not kept: the limit may change, and old rows with it.
    rows["disturbed"] = is_disturbed(rows)
    texts = (rows[name].tolist() for name in ("strategy", "strategy_options", "tuned"))
    rows["label"] = list(map(label_of, *texts))
    return rows


def is_disturbed(runs: pd.DataFrame) -> pd.Series[bool]:
    """Mark measured runs during which other programs took more than `disturbance.SHARE` of the cores.

    What needs all cores takes a third longer from there on, and there is no bound
    above.
    """
    # Virtual times do not depend on the load, except through their calibration.
    measured = ~runs["execution"].isin(SIMULATED)
    return measured & (runs["others_load"] > SHARE).fillna(False).astype(bool)


def is_representative(table: pd.DataFrame) -> pd.Series[bool]:
    """Mark runs or cells that may be compared with, checked with and fitted to: not oversubscribed, not disturbed."""
    return ~(table["oversubscribed"].astype(bool) | table["disturbed"].astype(bool))


def _claimed_twice(runs: pd.DataFrame) -> pd.Series[bool]:
    """Mark completed runs for whose repetition of a cell a later row exists under another run_id."""
    counted = (runs["status"] == "completed") & ~runs["warmup"].fillna(False).astype(
        bool
    )
    found = runs[counted].duplicated([*CELL, "repetition"], keep="last")
    return found.reindex(runs.index, fill_value=False)


def _one_configuration(runs: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    notes: list[str] = []
    one = pd.Series("", runs.index)
    identities = [(column, runs[column], one) for column in conditions(runs)]
    identities += [
        (
            "strategy_sha256",
            runs["strategy_sha256"].str[:_OF_A_CHECKSUM],
            runs["strategy"],
        )
    ]
    identities += [("cluster", clusters_of(runs), runs["execution"])]
    # Under weak scaling the data grow with the workers; a run that failed early has no
    # checksum.
    grown = runs["workers"].where(runs["scaling"] == "weak", 0)
    identities += [
        ("dataset_sha256", runs["dataset_sha256"].dropna().str[:_OF_A_CHECKSUM], grown)
    ]
    for name, values, group in identities:
        # as in almost every study, found faster than below
        if group is one and values.nunique(dropna=False) < 2:
            continue
        # Only rows that were not left out for an earlier key.
        texts = values[values.index.isin(runs.index)].map(str)
        # The last row is what the user ran last, and so means.
        latest = texts.groupby(group.loc[texts.index]).transform("last")
        other = texts != latest
        if other.any():
            left_out = ", ".join(sorted(texts[other].unique()))
            kept = ", ".join(latest[other].unique())
            notes.append(
                f"left out {counted(other.sum(), 'run')} with {name} = {left_out}: the latest runs have {kept}; give "
                "each configuration a study name of its own"
            )
            runs = runs.drop(texts.index[other])
    return runs, notes


def conditions(runs: pd.DataFrame) -> list[str]:
    """Return the columns that all of `runs` have to share: CONDITION without what was tuned for each point."""
    tuned = set()
    for text in runs["tuned"].dropna().unique():
        # `optimizer.momentum` is a part of the column `optimizer`.
        tuned |= {key.partition(".")[0] for key in json.loads(text)}
    return [column for column in CONDITION if column not in tuned]


def clusters_of(runs: pd.DataFrame) -> pd.Series[str]:
    """Identity of the cluster of each run: its name, and the checksum of a cluster file."""
    content = (
        " (sha256 "
        + runs["cluster_sha256"].astype(reading.TEXT).str[:_OF_A_CHECKSUM]
        + ")"
    )
    return runs["cluster"] + content.fillna("")


@lru_cache(maxsize=4096)
def label_of(strategy: str, options: object, tuned: object = None) -> str:
    """Return the name of a strategy with its options (JSON), without those that were `tuned` (JSON)."""
    if not isinstance(options, str):  # an empty cell, from other writers
        return strategy
    try:
        chosen = json.loads(options)
        given = json.loads(tuned) if isinstance(tuned, str) else {}
    except ValueError:
        chosen, given = {"options": options}, {}
    if not chosen or not isinstance(chosen, dict):
        return strategy
    left = {
        key: value
        # Sorted: a label is an identity, whatever order the options were written in.
        for key, value in sorted(chosen.items())
        if f"{strategy}.{key}" not in given
    }
    if not left:
        return strategy
    options_in_words = ", ".join(
        f"{key}={_option(value)}" for key, value in left.items()
    )
    return f"{strategy}({options_in_words})"


def _option(value: object) -> str:
    """Return an option as a study writes it: the keys of a JSON object are texts, those of `{4: 2}` are not."""
    if not isinstance(value, dict):
        return str(value)
    items = ", ".join(f"{key}: {_option(own)}" for key, own in value.items())
    return f"{{{items}}}"


def _read_study(folder: Path) -> dict[str, Any]:
    path = folder / STUDY
    return read_mapping(path, ResultsError, "study") if path.is_file() else {}
