"""Our value of a published quantity: from the rows of a study, by a fit to published rows, or from a priced what-if.

`what_if.yaml` of a paper has the what-ifs, priced in seconds and drawn with the
component that binds each cell.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
from pydantic import Field, PositiveFloat, PositiveInt

from scalebench.analysis import Results, intervals, ratios
from scalebench.analysis.loading import cells_in
from scalebench.analysis.target import EpochsLaw, fit_epochs, target_ratios
from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.device import load_device
from scalebench.errors import StudyError, UsageError, nearest
from scalebench.figures.predicted import draw_what_if
from scalebench.formatting import counted
from scalebench.measured import Measured
from scalebench.models.zoo.layers import load_layers
from scalebench.papers.paper_folder import WHAT_IFS, found_file
from scalebench.pricing import devices
from scalebench.pricing.axes import Axis
from scalebench.pricing.platform import Platform
from scalebench.pricing.prediction import Predictor
from scalebench.pricing.what_if import Plane, what_if
from scalebench.pricing.workload import Workload
from scalebench.study.cell import PLACE
from scalebench.study.choices import ALLREDUCE, SERIAL
from scalebench.study.spec import Component
from scalebench.study.validation import StrictModel, read_as
from scalebench.system.file_access import read_bytes
from scalebench.validation import held_out, measurements, prediction_errors

# In the column `study`: ours follows from the paper's entries.csv; from its rows.csv;
# from the rows of all sources.
ENTRIES, ROWS, PUBLISHED_ROWS = "entries", "rows", "published"
_FITTED_UP_TO = "1.0"  # MLPerf rounds that are fitted; later ones are held out


@dataclass(frozen=True)
class Obtained:
    """Our value of a quantity, from `measured.n` rows, with their execution: `native mpi`, `virtual`, `fitted`."""

    measured: Measured
    execution: str


@dataclass(frozen=True)
class Rows:
    """Runs of one strategy in one execution and engine: at all worker counts, and `at` the asked one."""

    results: Results
    runs: pd.DataFrame
    at: pd.DataFrame
    argument: str  # of the quantity

    def of(self, label: str) -> pd.DataFrame:
        """Return the runs of strategy `label` in this execution at this worker count; serial: at one worker."""
        at, completed = cells_in(self.at)[0].baseline(label), self.results.completed
        place = ["execution", "label", "workers"]
        same = completed[place].eq([at.execution, label, at.workers])
        return completed[same.all(axis=1)]


def obtain(
    results: Results, quantity: str, strategy: str, workers: int | None
) -> list[Obtained]:
    """Return `quantity` of a strategy (with its options) at a worker count, one value per execution and engine.

    A quantity is a name of QUANTITIES, with its argument after @: `epochs_to@0.80`,
    `time_reduction@serial`. Empty if the study has no such rows.

    Raises:
        UsageError: an unknown quantity.
    """
    name, _, argument = quantity.partition("@")
    if name not in QUANTITIES:
        raise UsageError(f"unknown quantity {name!r}; {nearest(name, QUANTITIES)}")
    found = []
    completed = results.completed
    of_strategy = completed[completed["label"] == strategy]
    for (execution, engine), runs in of_strategy.groupby(
        ["execution", "engine"], sort=False
    ):
        at = runs if workers is None else runs[runs["workers"] == workers]
        if len(at):
            value = QUANTITIES[name](Rows(results, runs, at, argument))
            if value is not None and not math.isnan(value.value):
                place = (
                    execution
                    if execution == engine or engine == "virtual"
                    else f"{execution} {engine}"
                )
                found.append(Obtained(value, str(place)))
    return found


def _over_seeds(rows: Rows, values: pd.Series[float] | None) -> Measured | None:
    """Mean metric over seeds with its interval, which ends where no value of the metric exists."""
    # A mean over some of the seeds would stand beside one over all.
    if values is None or values.empty or values.isna().any():
        return None
    return intervals.metric_interval(values, rows.at["metric_name"].iloc[0])


def _epochs_to(rows: Rows) -> Measured | None:
    """Epochs until the metric is reached, median over seeds; infinite where most never reach it."""
    return _median_epochs(_curves(rows.results, rows.at), float(rows.argument))


def _ideal_speedup_to(rows: Rows) -> Measured | None:
    """Workers times the epochs of serial over its own epochs: the speedup to a metric if epochs scaled perfectly."""
    target = float(rows.argument)
    alone = _median_epochs(_curves(rows.results, rows.of(SERIAL)), target)
    own = _median_epochs(_curves(rows.results, rows.at), target)
    # Over serial that never reaches the metric there is no speedup.
    if alone is None or own is None or math.isinf(alone.value):
        return None
    workers = int(rows.at["workers"].iloc[0])
    return Measured(workers * alone.value / own.value, n=len(rows.at))


def _time_reduction(rows: Rows) -> Measured | None:
    return _compared(rows, ratios(rows.results), rows.argument, "reduction")


def _largest_time_reduction(rows: Rows) -> Measured | None:
    each = [
        _time_reduction(replace(rows, at=some))
        for _, some in rows.runs.groupby("workers")
    ]
    return max(filter(None, each), key=lambda found: found.value, default=None)


def _speedup_over(rows: Rows) -> Measured | None:
    """T at the worker count of the argument over T: above 1 where more workers still save time."""
    fewer = rows.runs[rows.runs["workers"] == int(rows.argument)]
    if fewer.empty:
        return None
    times, fewer_times = (
        intervals.time_interval(runs["train_s"]).value for runs in (rows.at, fewer)
    )
    return Measured(fewer_times / times, n=min(len(fewer), len(rows.at)))


def _metric_difference(rows: Rows) -> Measured | None:
    """Metric minus that of another strategy (serial: at one worker) over common seeds."""
    pairs = rows.at.merge(rows.of(rows.argument), on="seed", suffixes=("", "_other"))
    values = (pairs["final_metric"] - pairs["final_metric_other"]).dropna()
    return intervals.metric_difference(values) if len(values) else None


def _optimum_workers(rows: Rows) -> Measured | None:
    """Worker count of the shortest time."""
    times = rows.runs.groupby("workers")["train_s"].mean()
    counts = times.index.to_numpy(dtype=float)
    return Measured(float(counts[times.argmin()]), n=len(rows.runs))


def _largest_workers(rows: Rows) -> Measured | None:
    """Worker count up to which each larger one takes less time than all before it."""
    times = rows.runs.groupby("workers")["train_s"].mean().sort_index()
    # Less than all before it: a single dip behind a rise does not count.
    falling = times.lt(times.cummin().shift(fill_value=math.inf))
    last = len(times) - 1
    if not falling.all():
        # before the first count that is no faster
        last = int((~falling).to_numpy().argmax()) - 1
    return Measured(float(times.index[last]), n=len(rows.runs))


def _fewer_syncs(rows: Rows) -> Measured | None:
    """Synchronisations of another strategy until the study's target, over its own."""

    def until_target(runs: pd.DataFrame) -> pd.Series[float]:
        return (
            runs["syncs"]
            * runs["epochs_to_target"].astype(float).fillna(math.inf)
            / runs["epochs"]
        )

    # Turned around: `_over` divides ours by theirs.
    found = _over(rows, until_target)
    return found and found._replace(value=1 / found.value if found.value else math.nan)


def _largest_lead(rows: Rows) -> Measured | None:
    """Largest lead over the slowest worker with which a push came, in steps, of all runs."""
    leads = [
        int(lead)
        for text in rows.at["lead_histogram"].dropna()
        for lead in json.loads(text)
    ]
    return Measured(float(max(leads)), n=len(rows.at)) if leads else None


QUANTITIES: dict[str, Callable[[Rows], Measured | None]] = {
    # Metric after the last epoch, and after that many epochs.
    "final_metric": lambda rows: _over_seeds(rows, rows.at["final_metric"].dropna()),
    "final_train_metric": lambda rows: _over_seeds(
        rows, rows.at["final_train_metric"].dropna()
    ),
    "metric_after_epoch": lambda rows: _over_seeds(
        rows, _curves(rows.results, rows.at).get(int(rows.argument))
    ),
    "metric_difference": _metric_difference,
    "epochs_to": _epochs_to,
    "ideal_speedup_to": _ideal_speedup_to,
    # 1 - T / T(baseline), of training and to the study's target: against serial at one
    # worker, else against the baseline at the same worker count. A baseline on another
    # engine counts too: against real Horovod, say.
    "time_reduction": _time_reduction,
    "largest_time_reduction": _largest_time_reduction,  # over worker counts
    "target_time_reduction": lambda rows: _compared(
        rows, target_ratios(rows.results), rows.argument, "reduction"
    ),
    # T(serial, 1) / T, the same over workers, and T at fewer workers over T.
    "speedup": lambda rows: _compared(rows, ratios(rows.results), SERIAL, "speedup"),
    "efficiency": lambda rows: _compared(
        rows, ratios(rows.results), SERIAL, "efficiency"
    ),
    "speedup_over": _speedup_over,
    "optimum_workers": _optimum_workers,
    "largest_workers": _largest_workers,
    # T over that of another strategy at the same worker count, of training and to the
    # study's target.
    "time_over": lambda rows: _over(rows, lambda runs: runs["train_s"]),
    "target_time_over": lambda rows: _over(
        rows, lambda runs: runs["time_to_target_s"].fillna(math.inf)
    ),
    "fewer_syncs": _fewer_syncs,
    "largest_lead": _largest_lead,
}


def _curves(results: Results, at: pd.DataFrame) -> pd.DataFrame:
    """Metric by run (rows) and number of epochs trained (columns); empty if nothing was evaluated."""
    attempt = ["run_id", "attempt"]
    epochs = results.epochs.merge(at[attempt], on=attempt).dropna(
        subset=["test_metric"]
    )
    if epochs.empty:
        return pd.DataFrame()
    counted = epochs.assign(trained=epochs["epoch"].astype(int) + 1)
    return counted.pivot(index="run_id", columns="trained", values="test_metric")


def _median_epochs(curves: pd.DataFrame, target: float) -> Measured | None:
    """Median of the epochs until `target` with its rank interval, which six values or more have."""
    if curves.empty:
        return None
    trained = curves.columns.to_numpy(dtype=float)
    reached = [trained[curve >= target] for curve in curves.to_numpy(dtype=float)]
    # Never is later than any epoch, and so takes its place in the median.
    values = np.array([min(epochs, default=math.inf) for epochs in reached])
    return intervals.median_interval(values)


def _over(
    rows: Rows, values: Callable[[pd.DataFrame], pd.Series[float]]
) -> Measured | None:
    """Median of `values` over that of the strategy in the argument, without an interval; None where it has none."""
    own, base = (
        intervals.median_interval(values(runs)).value
        for runs in (rows.at, rows.of(rows.argument))
    )
    if math.isnan(own) or base == 0 or not math.isfinite(base):
        return None
    return Measured(own / base, n=len(rows.at))


def _compared(
    rows: Rows, table: pd.DataFrame, baseline: str, name: str
) -> Measured | None:
    """Return the column `name` of a table of ratios with its interval; None without a finite value."""
    same = table["baseline"].eq(baseline)
    first = rows.at.iloc[0]
    for column in PLACE:
        same &= table[column].eq(first[column])
    if not same.any():
        return None
    row = table[same].iloc[-1]
    return (
        Measured(row[name], row[f"{name}_low"], row[f"{name}_high"], int(row["n"]))
        if math.isfinite(row[name])
        else None
    )


class WhatIf(StrictModel):
    """The training of a model along one axis or two, as `scalebench what-if` prices it."""

    description: str
    model: str = Field(description="layer table")
    cluster: str
    device: str | None = Field(
        None, description="roofline of this device, in place of a stated step"
    )
    step_time: PositiveFloat | None = Field(
        None, description="seconds of a worker's step"
    )
    strategy: Component = Component(name=ALLREDUCE)
    workers: PositiveInt = 64
    batch: PositiveInt = 64
    samples: PositiveInt
    epochs: PositiveInt = 1
    collective: str = "auto"
    vary: list[str] = Field(
        min_length=1,
        max_length=2,
        description="AXIS=LOW..HIGH[:POINTS] or AXIS=VALUE,VALUE,...",
    )

    def price(self) -> Plane:
        """Return the priced plane."""
        workload = Workload(
            load_layers(self.model), self.samples, self.epochs, self.batch
        )
        axes = [Axis.parse(text) for text in self.vary]
        return what_if(
            Predictor(workload, self._platform()),
            self.strategy,
            self.workers,
            axes,
        )

    def draw(self, plane: Plane, path: Path) -> None:
        """Write the figure of `plane` to `path`."""
        place = "" if plane.varies_workers else f" at {counted(self.workers, 'worker')}"
        platform = self._platform()
        what = f"{self.model} by {self.strategy}{place} on {platform.cluster.name}; {platform.device.source}"
        draw_what_if(path, {str(self.strategy): plane}, what)

    def seen_from(self, paper: Path) -> WhatIf:
        """Return this with the files of its cluster and device found from the folder `paper`."""
        files = {
            name: found_file(paper, file)
            for name in ("cluster", "device")
            if (file := getattr(self, name))
        }
        return self.model_copy(update=files)

    def _platform(self) -> Platform:
        # A roofline and a stated step would be two times of one device.
        if (self.device is None) == (self.step_time is None):
            raise UsageError(
                f"what-if of {self.model}: give device or step_time, one of them"
            )
        if self.device is not None:
            return Platform(
                load_cluster(self.cluster),
                devices.Roofline(load_device(self.device)),
                collective=self.collective,
            )
        stated = devices.Stated(self.step_time or 0.0, self.batch)
        return Platform(load_cluster(self.cluster), stated, collective=self.collective)


class _WhatIfs(StrictModel):
    planes: dict[str, WhatIf]


def read_what_ifs(path: Path) -> dict[str, WhatIf]:
    """Read `what_if.yaml`; no planes where there is no such file.

    Raises:
        StudyError: not a mapping of planes; one line that names file and key.
    """
    if not path.is_file():
        return {}
    planes = read_as(path, _WhatIfs, StudyError, "file of what-ifs").planes
    return {name: plane.seen_from(path.parent) for name, plane in planes.items()}


def sources(folder: Path) -> tuple[str, ...]:
    """Return the values of `study` that need no run in the paper of `folder`."""
    return (ENTRIES, ROWS, PUBLISHED_ROWS, *read_what_ifs(folder / WHAT_IFS))


def without_run(
    folder: Path, study: str, quantity: str, workers: int | None
) -> Obtained | None:
    """Return `quantity` of the paper in `folder`, None if it takes runs of `study`.

    `epochs_at_batch@B`: by E0 (1 + B / B_crit), fitted to the first rounds of
    entries.csv. `prediction_accuracy`: 1 - mean error at the held rows of
    experiments/published/. `predicted_efficiency@MODEL`: of rows.csv, calibrated on its
    base row and on the base rows of experiments/published/. `share_bound_by@COMPONENT`:
    of a what-if.
    """
    name, _, argument = quantity.partition("@")
    published = folder.parent / "published" / "scaling.csv"
    if (study, name) == (ENTRIES, "epochs_at_batch"):
        law, rows = _law(folder / f"{ENTRIES}.csv")
        return Obtained(law.epochs(float(argument))._replace(n=rows), "fitted")
    if (study, name) == (PUBLISHED_ROWS, "prediction_accuracy"):
        errors = _predicted(published, None)["error"].abs()
        return Obtained(Measured(1 - float(errors.mean()), n=len(errors)), "fitted")
    if (study, name) == (ROWS, "predicted_efficiency"):
        return _efficiency(
            _predicted(published, folder / f"{ROWS}.csv"), argument, workers
        )
    if study not in (what_ifs := read_what_ifs(folder / WHAT_IFS)):
        return None
    plane = what_ifs[study].price()
    if name != "share_bound_by":
        raise UsageError(
            f"unknown quantity {name!r} of a what-if; expected share_bound_by@COMPONENT"
        )
    if argument not in plane.components:
        raise UsageError(
            f"{quantity}: unknown component {argument!r}; {nearest(argument, plane.components)}"
        )
    return Obtained(
        Measured(plane.share_bound_by(argument), n=plane.train_s.size), "modelled"
    )


@lru_cache
def _law(entries: Path) -> tuple[EpochsLaw, int]:
    rows = pd.read_csv(io.BytesIO(read_bytes(entries)), dtype={"round": str})
    early = rows[rows["round"] <= _FITTED_UP_TO]
    return fit_epochs(early["batch_global"], early["epochs"]), len(early)


@lru_cache
def _predicted(published: Path, own: Path | None) -> pd.DataFrame:
    """Return predictions at the held rows of `own`, else of `published`, calibrated on what neither holds."""
    table, _ = measurements.read_published(published)
    if own is not None:
        # The held rows of the table go: ours take their place.
        known, (rows, _) = (
            table[table["split"] != "hold"],
            measurements.read_published(own),
        )
        table = pd.concat([known, rows], ignore_index=True)
    return prediction_errors.with_errors(held_out.predict_published(table)[0])


def _efficiency(
    predictions: pd.DataFrame, model: str, workers: int | None
) -> Obtained | None:
    """Return the predicted throughput over that of linear scaling from one worker."""
    found = predictions[
        (predictions["model"] == model) & (predictions["workers"] == workers)
    ]
    if found.empty:
        return None
    row = found.iloc[0]
    value, low, high = (
        float(row[name] / row["linear"]) for name in ("predicted", "low", "high")
    )
    return Obtained(Measured(value, low, high, len(found)), "fitted")
