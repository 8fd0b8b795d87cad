"""Predictions of a study's native and paced runs: the schedules of its strategies, priced by its calibration.

Each point is the median time of the repetitions of a strategy on an engine at a worker
count, beside the price of the same program on the placement that the runs had. Nothing
of the runs enters the prediction but the reference step beside native ones, the speed
that the machine had. Oversubscribed runs are left out.

The 95 % interval of a prediction contains the draws of the calibration, communication
that is slower or faster as the interval of latency and bandwidth allows that are fitted
to the measured collectives (`cluster.fitting`, wider beyond their sizes and node
counts), and the scatter of the median of so many runs: their standard deviation, pooled
over all points of an execution, but at least 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from scalebench.analysis import intervals, loading, rounds
from scalebench.calibration import calibration_file, charging
from scalebench.cluster import cluster_file, link_fit
from scalebench.data.dataset import open_dataset
from scalebench.errors import ClusterError, ResultsError
from scalebench.formatting import counted
from scalebench.launch.calibrating import request_of
from scalebench.launch.planning import StudyPlan, plan_study
from scalebench.pricing.machine import Machine
from scalebench.pricing.platform import scaled_engines
from scalebench.records.folder import CALIBRATION, STUDY
from scalebench.study.cell import PLACE, SERIES
from scalebench.study.load import load_study
from scalebench.study.spec import Run
from scalebench.validation.prediction_errors import predictions_of
from scalebench.virtual.engine import model_time

_UNEXPLAINED = 0.01  # least standard deviation of ln T of a point; an assumption


class _Point(NamedTuple):
    """Repetitions of one strategy on one engine at one worker count, and seconds of them by linear scaling."""

    runs: pd.DataFrame
    linear_s: float
    first: Any  # of the runs
    nbytes: float  # of a worker in one synchronisation


def predict_runs(
    folder: Path, calibration: Path | None = None, note: charging.Note = lambda _: None
) -> pd.DataFrame:
    """Return the prediction of each measured point of the study in `folder`.

    It is priced by `calibration`, else by the one in `folder`, else by the one that the
    study names.

    Raises:
        ResultsError: no measured run, or no calibration.
        ClusterError: the calibration is none of this version, or of another model, dtype or processor.
    """
    results = loading.load(folder)
    plan = plan_study(
        load_study(folder / STUDY, {"execution": "modelled"}, []), timed=False
    )
    runs = _comparable(results, plan, note)
    path = calibration or (
        folder / CALIBRATION
        if (folder / CALIBRATION).exists()
        else plan.study.calibration
    )
    if path is None:
        raise ResultsError(
            f"{folder} has no {CALIBRATION} to predict by; measure one with: scalebench calibrate {folder / STUDY}, "
            "and name it with --calibration"
        )
    # Each repetition is priced with the draw of its own number, as virtual runs are.
    templates = {
        (str(run.strategy), run.workers, run.repetition): run
        for run in plan.sweep.simulated
    }
    machine = _machine(plan, path, runs)
    rows, scatter = [], _scatter(runs)
    for point in _points(runs):
        first = point.first
        if (
            not machine.engines.has(first["engine"], int(first["nodes"]))
            and first["workers"] > 1
        ):
            where = "between nodes" if first["nodes"] > 1 else "on one node"
            note(
                f"{first['label']} at {first['workers']} workers: {path} has no cost of {first['engine']} {where}"
            )
            continue
        place = str(first["label"]), int(first["workers"])
        keys = [(*place, int(number)) for number in point.runs["repetition"]]
        draws = [templates[key] for key in keys if key in templates]
        median = max(
            _UNEXPLAINED,
            scatter[first["execution"]] * _scatter_of_median(len(point.runs)),
        )
        seconds = _predicted(plan, machine, draws, point, median)
        if seconds is not None:
            rows.append(_row(results, machine, point, seconds))
    return predictions_of(rows)


def _comparable(
    results: loading.Results, plan: StudyPlan, note: charging.Note
) -> pd.DataFrame:
    runs = rounds.timed(results)
    runs = runs[runs["execution"].isin(rounds.MEASURED)]
    if runs.empty:
        raise ResultsError(
            f"{results.folder} holds no completed native or paced run to compare a prediction with"
        )
    # Neither is the time of this study alone on the cores that it asks for.
    for what in ("oversubscribed", "disturbed"):
        marked = runs[what].astype(bool)
        if marked.any():
            note(f"{counted(int(marked.sum()), f'{what} run')} left out")
        runs = runs[~marked]
    if (
        plan.study.device_step_time is not None
        and (native := runs["execution"] == "native").any()
    ):
        note(
            f"{counted(int(native.sum()), 'native run')} left out: the study states the step time of another device"
        )
        runs = runs[~native]
    return runs


def _machine(plan: StudyPlan, path: Path, runs: pd.DataFrame) -> Machine:
    """Return what prices the runs: this machine's engines and links, and measured or stated steps."""
    calibration = calibration_file.read_calibration(path)
    if (of := calibration.measured) is not None:
        here = {"model": str(plan.study.model), "dtype": plan.study.dtype}
        # Stated steps, and those of a GPU, do not depend on the processor.
        if plan.study.device_step_time is None and of.device == "cpu":
            here["cpu"] = str(runs["device"].iloc[0])
        if other := of.differences(of.model_copy(update=here), list(here)):
            raise ClusterError(
                f"calibration: {path} is not of these runs ({'; '.join(other)}); name another"
            )
    references = runs["reference_step_s"].dropna().tolist()
    # The speed that the machine had beside the runs is no error of a prediction.
    if plan.study.device_step_time is None and references:
        calibration = calibration.at(fmean(references))
    # Measured runs communicate here, whichever cluster the study simulates.
    machine = charging.machine_of(calibration, request_of(plan, plan.sweep.simulated))
    return (
        machine
        if plan.cluster.compute == "this-machine"
        else replace(
            machine, cluster=cluster_file.load_cluster(calibration_file.THIS_MACHINE)
        )
    )


def _points(runs: pd.DataFrame) -> Iterator[_Point]:
    for _, series in runs.groupby(SERIES, sort=False):
        base = series["workers"].min()
        base_s = float(series.loc[series["workers"] == base, "train_s"].median())
        for workers, own in series.groupby("workers"):
            # Weak scaling keeps the samples of a worker, and so the time.
            shorter = base / workers if own["scaling"].iloc[0] == "strong" else 1.0
            first = own.iloc[0]
            nbytes = float(first["bytes_sent_per_worker"]) / max(1, int(first["syncs"]))
            yield _Point(
                own, math.nan if workers == base else base_s * shorter, first, nbytes
            )


def _scatter(runs: pd.DataFrame) -> dict[str, float]:
    """Return the standard deviation of ln T of equal runs by execution, pooled over its points; 0 if none has two."""
    found = {}
    for execution, own in runs.groupby("execution"):
        logs = np.log(own["train_s"]).groupby([own[name] for name in PLACE])
        # The mean of each point takes a degree of freedom.
        free = len(own) - logs.ngroups
        squares = float((logs.var(ddof=0) * logs.size()).sum())
        found[str(execution)] = math.sqrt(squares / free) if free else 0.0
    return found


def _scatter_of_median(runs: int) -> float:
    """Return the standard deviation of the median of so many normal values relative to that of one."""
    # The variance of a median tends to pi/2 of that of the mean; of one or two values
    # it is the mean.
    over_mean = math.pi / 2 if runs > 2 else 1.0
    return math.sqrt(over_mean / runs)


def _predicted(
    plan: StudyPlan,
    machine: Machine,
    draws: Sequence[Run],
    point: _Point,
    scatter: float,
) -> tuple[float, float, float] | None:
    """Return seconds with their bounds; None where the program cannot be priced."""
    first = point.first
    # A scheduler may have placed the runs otherwise than the cluster file has it.
    node = machine.cluster.node.model_copy(
        update={"workers_per_node": int(first["workers_per_node"])}
    )
    placed = replace(machine, cluster=machine.cluster.model_copy(update={"node": node}))
    half = _half_of_communication(machine, point)
    execution, engine = str(first["execution"]), str(first["engine"])
    times = []
    for factor in (
        math.exp(-half),
        1.0,
        math.exp(half),
    ):  # with communication at either end of its interval
        priced = replace(placed, engines=scaled_engines(placed.engines, factor))
        times.append([_seconds(plan, priced, run, execution, engine) for run in draws])
    logs = np.log(times)
    if not np.isfinite(logs).all() or not draws:
        return None
    low, centre, high = logs.mean(axis=1).tolist()
    drawn = intervals.calibration_interval(logs[1])
    own = math.hypot(
        1.96 * scatter, drawn.high - drawn.value if len(draws) > 1 else 0.0
    )
    bounds = (
        centre - math.hypot(own, centre - low),
        centre + math.hypot(own, high - centre),
    )
    return math.exp(centre), math.exp(bounds[0]), math.exp(bounds[1])


def _half_of_communication(machine: Machine, point: _Point) -> float:
    """Return half the width, on logs, of the interval of a collective at the point."""
    workers = int(point.first["workers"])
    nodes = int(point.first["nodes"])
    fit = (
        link_fit.fit_engine(
            machine.engines, str(point.first["engine"]), inside=nodes == 1
        )
        if workers > 1
        else None
    )
    if fit is None:
        return 0.0
    found = fit.seconds(workers, nodes, point.nbytes)
    return math.log(found.high / found.value)


def _seconds(
    plan: StudyPlan, machine: Machine, run: Run, execution: str, engine: str
) -> float:
    """Return seconds of the training of `run` on `engine`; NaN if its program fails."""
    options = run.virtual.model_copy(update={"engine": engine})
    if execution == "native":  # nothing is injected
        options = options.model_copy(
            update={"slowdown": {}, "slow_windows": [], "slow_links": {}}
        )
    asked = run.model_copy(update={"virtual": options})
    outcome = model_time(
        asked, open_dataset(plan.prepared.folders[run.workers]), machine
    )
    return outcome.train_s if outcome.status == "completed" else math.nan


def _row(
    results: loading.Results,
    machine: Machine,
    point: _Point,
    predicted: tuple[float, float, float],
) -> dict[str, Any]:
    first, (seconds, low, high) = point.first, predicted
    batch = (
        first["batch_per_worker"]
        if first["batch_policy"] == "per_worker"
        else first["batch_global"]
    )
    where = (
        results.folder.name,
        results.study.get("device_step_time"),
        first["execution"],
        first["model"],
        batch,
    )
    return {
        "source": f"{first['study']}: {first['execution']}, {first['engine']}",
        "series": f"{first['label']} on {first['engine']}",
        "system": first["cluster"],
        "execution": first["execution"],
        "strategy": first["label"],
        "model": first["model"],
        "quantity": "train_time",
        "workers": int(first["workers"]),
        "nodes": int(first["nodes"]),
        "measured": float(point.runs["train_s"].median()),
        "predicted": seconds,
        "low": low,
        "high": high,
        "linear": point.linear_s,
        "doublings": _doublings(machine, point),
        "configuration": " | ".join(map(str, where)),
    }


def _doublings(machine: Machine, point: _Point) -> float:
    """Return doublings of workers, nodes or bytes, whichever is most, beyond the collectives that price the point."""
    workers = int(point.first["workers"])
    nodes = int(point.first["nodes"])
    if workers == 1:
        return 0.0
    # Of the measured collectives those that price this point.
    nearest = machine.engines.of(str(point.first["engine"]), workers, nodes)
    largest = max((nbytes for nbytes, _ in nearest.points), default=1.0)
    beyond = (
        workers / nearest.ranks,
        nodes / nearest.nodes,
        max(1.0, point.nbytes) / max(1.0, largest),
    )
    return max(0.0, *map(math.log2, beyond))
