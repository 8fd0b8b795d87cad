"""Reader of a study's folder: tables of runs and epochs, validated."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import pandas as pd
import yaml

from scalebench.analysis.reading import TEXT, check_completed, read_table
from scalebench.errors import ResultsError
from scalebench.formatting import counted
from scalebench.records.attempts import counting
from scalebench.records.schema import READABLE, EpochRow, RunRow, columns
from scalebench.records.table import check_version

CELL = ["execution", "engine", "label", "workers", "batch_per_worker", "batch_global"]
PACE_OVERRUN_LIMIT = 0.01
_OF_A_CHECKSUM = 12  # digits
# Equal for all runs of a study. The batch may be reduced to a small shard, so it belongs to the cell.
CONDITION = [
    *("model", "model_sha256", "init_weights_sha256", "dtype", "dataset", "partition", "shuffle", "threads_per_worker"),
    *("scaling", "batch_policy", "lr", "lr_policy", "optimizer", "epochs"),
]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Results:
    """Latest attempts at the runs of one study, with any status, and their epochs.

    `runs` has the columns of runs.csv and `label`, the strategy with its options; `oversubscribed` includes paced runs
    that missed their pace. `epochs` has the columns of epochs.csv. Do not change either in place: statistics are
    computed once per Results (`cached`). `repeated` are further rows of runs that `runs` contains.
    """

    folder: Path
    runs: pd.DataFrame
    epochs: pd.DataFrame
    study: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    repeated: pd.DataFrame = field(default_factory=pd.DataFrame)

    @cached_property
    def completed(self) -> pd.DataFrame:
        """Completed runs without those for warm-up: the input of statistics."""
        return self.runs[(self.runs["status"] == "completed") & ~self.runs["warmup"].fillna(False).astype(bool)]

    @cached_property
    def failed(self) -> pd.DataFrame:
        """Runs with another status than completed."""
        return self.runs[self.runs["status"] != "completed"]


def cached(function: Callable[[Results], T]) -> Callable[[Results], T]:
    """Decorate a statistic to be computed once per `Results`; tables are returned as copies."""
    kept: WeakKeyDictionary[Results, T] = WeakKeyDictionary()

    @wraps(function)
    def answer(results: Results) -> T:
        if results not in kept:
            kept[results] = function(results)
        found = kept[results]
        return found.copy() if isinstance(found, pd.DataFrame) else found

    return answer


def load(folder: Path | str) -> Results:
    """Read the study in `folder`.

    Only the latest attempt at a run counts, and the last of several rows of one attempt. Of several configurations
    (another learning rate, another model) that of the last row counts, of several runs of one repetition of a cell the
    last. Notes give the number of runs left out.

    Raises:
        ResultsError: no records there, another schema version, or a damaged cell (named by file, line and column).
    """
    folder = Path(folder)
    runs = read_runs(folder)
    doubled = runs[runs.duplicated(["run_id", "attempt"], keep="last")]
    runs = runs.iloc[sorted(counting(runs["run_id"].tolist(), runs["attempt"].tolist()).values())]
    runs, notes = _one_configuration(runs)
    again = _claimed_twice(runs)
    repeated, runs = pd.concat([doubled, runs[again]]), runs[~again]
    if len(repeated):
        notes.append(f"rows that give a run once more, of which only the last counts: {len(repeated)} left out")
    path = folder / "epochs.csv"
    epochs = read_table(path, EpochRow) if path.is_file() else pd.DataFrame(columns=columns(EpochRow))
    of_run = epochs[["run_id", "attempt"]].merge(
        runs[["run_id", "attempt", "status", "metric_name"]], on=["run_id", "attempt"], how="left"
    )
    check_completed(path, epochs, EpochRow, of_run["status"] == "completed", of_run["metric_name"])
    epochs = epochs.merge(runs[["run_id", "attempt"]], on=["run_id", "attempt"])
    epochs = epochs.drop_duplicates(["run_id", "attempt", "epoch"], keep="last")
    runs, epochs = runs.reset_index(drop=True), epochs.reset_index(drop=True)
    return Results(folder, runs, epochs, _read_study(folder), notes, repeated)


def read_runs(folder: Path) -> pd.DataFrame:
    """Read all rows of `folder`/runs.csv, with `label` and `oversubscribed` as in Results.

    Raises:
        ResultsError: no records there, another schema version, or a damaged cell (named by file, line and column).
    """
    path = folder / "runs.csv"
    if not path.is_file():
        raise ResultsError(f"{folder} holds no runs.csv; expected the folder of a study, such as results/<study>")
    runs = read_table(path, RunRow)
    if runs.empty:
        raise ResultsError(f"{path} holds no runs yet; `scalebench run` fills it")
    check_version(
        path, {"(none)" if pd.isna(version) else str(version) for version in runs["schema_version"]}, READABLE
    )
    runs["oversubscribed"] = runs["oversubscribed"].astype(bool) | (runs["paced_overrun"] > PACE_OVERRUN_LIMIT)
    runs["label"] = list(map(_label, runs["strategy"].tolist(), runs["strategy_options"].tolist()))
    return runs


def _claimed_twice(runs: pd.DataFrame) -> pd.Series[bool]:
    """Mark completed runs for whose repetition of a cell a later row exists under another run_id."""
    counted = (runs["status"] == "completed") & ~runs["warmup"].fillna(False).astype(bool)
    found = runs[counted].duplicated([*CELL, "repetition"], keep="last")
    return found.reindex(runs.index, fill_value=False)


def _one_configuration(runs: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    last = runs.iloc[-1]
    notes: list[str] = []
    for column in CONDITION:
        other = (runs[column].notna() & (runs[column] != last[column])).fillna(False)
        other |= runs[column].isna() != pd.isna(last[column])
        if other.any():
            values = ", ".join(sorted(str(value) for value in runs.loc[other, column].unique()))
            notes.append(
                f"left out {counted(other.sum(), 'run')} with {column} = {values}: the latest runs have "
                f"{last[column]}; give each configuration a study name of its own"
            )
            runs = runs[~other]
    codes = runs["strategy_sha256"].astype(TEXT).fillna("")
    other = codes != codes.groupby(runs["strategy"]).transform("last")
    if other.any():
        named = ", ".join(sorted(runs.loc[other, "strategy"].unique()))
        notes.append(f"left out {counted(other.sum(), 'run')} of {named} with another content of its file")
        runs = runs[~other]
    clusters = clusters_of(runs)
    other = clusters != clusters.groupby(runs["execution"]).transform("last")
    if other.any():
        named = ", ".join(sorted(clusters[other].unique()))
        notes.append(f"left out {counted(other.sum(), 'run')} of another cluster ({named})")
        runs = runs[~other]
    return runs, notes


def clusters_of(runs: pd.DataFrame) -> pd.Series[str]:
    """Identity of the cluster of each run: its name, and the checksum of a cluster file."""
    content = " (sha256 " + runs["cluster_sha256"].astype(TEXT).str[:_OF_A_CHECKSUM] + ")"
    return runs["cluster"] + content.fillna("")


@lru_cache(maxsize=4096)
def _label(strategy: str, options: object) -> str:
    if not isinstance(options, str):  # an empty cell, from other writers
        return strategy
    try:
        chosen = json.loads(options)
    except ValueError:
        chosen = {"options": options}
    if not chosen or not isinstance(chosen, dict):
        return strategy
    return f"{strategy}({', '.join(f'{key}={value}' for key, value in sorted(chosen.items()))})"


def _read_study(folder: Path) -> dict[str, Any]:
    path = folder / "study.yaml"
    if not path.is_file():
        return {}
    try:
        study = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"cannot read {path}: {str(error).splitlines()[0]}") from None
    return study if isinstance(study, dict) else {}
