"""Times against baselines: speedup, efficiency, time reduction. Two executions are never joined.

Two questions are kept apart. What does synchronising less often save: against per-batch `allreduce` on the same engine.
What does the engine save: against the real `horovod` and `ddp`. A reduction against those two is split into

    engine part     (T_base - T_allreduce) / T_base
    frequency part  (T_allreduce - T_strategy) / T_base

which add up to the signed total 1 - T_strategy / T_base. `serial` runs at one worker, natively on engine mpi, and is
the base of the speedup of every engine of its execution.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from scalebench.analysis.grouping import PER_BATCH, Cell, by_block
from scalebench.analysis.intervals import Estimate, interval_name, paired_ratio
from scalebench.analysis.reading import Results

SPLIT_BASELINES = ("horovod", "ddp")


class Baseline(NamedTuple):
    """The times of a baseline by repetition, or why there are none."""

    seconds: dict[int, float]
    engine: str
    workers: int
    fault: str


Index: TypeAlias = dict[tuple[object, str, int], list[Cell]]  # by execution, strategy and workers


def ratios(results: Results) -> pd.DataFrame:
    """One row per cell and baseline.

    Against `serial`: `ratio` is T(serial, 1) / T, from which `speedup` and `efficiency`. In strong scaling the ratio is
    the speedup and efficiency = speedup / workers; in weak scaling the ratio is the efficiency T(1) / T(N) and speedup
    (scaled) = workers x efficiency. Against the others, at the same worker count: `ratio` is T_baseline / T.
    `reduction` = 1 - 1 / ratio, signed; `saved_s` = `baseline_s` - `train_s`; `engine_part` and `frequency_part` as
    above. All from repetitions that both have, paired (`n`); their interval is `interval`. Where a baseline is missing
    or oversubscribed the numbers are empty and `note` says so.
    """
    table = by_block(results)
    index: Index = {}
    for cell in table:
        index.setdefault((cell.execution, cell.strategy, cell.workers), []).append(cell)
    return pd.DataFrame([row for cell in table for row in _compare(index, cell)])


def _compare(index: Index, cell: Cell) -> list[dict[str, object]]:
    serial = _baseline(index, "serial", None, cell)
    rows = [_row(cell, "serial", serial) | _scaling(cell, serial)]
    if cell.strategy == "serial":
        return rows
    allreduce = _baseline(index, "allreduce", cell.engine, cell)
    if cell.strategy not in PER_BATCH:
        rows.append(_row(cell, "allreduce", allreduce))
    if cell.strategy not in SPLIT_BASELINES:
        for name in SPLIT_BASELINES:
            base = _baseline(index, name, None, cell)
            rows.append(_row(cell, name, base) | _parts(cell.seconds, allreduce, base))
    return rows


def _baseline(index: Index, name: str, engine: str | None, cell: Cell) -> Baseline:
    workers = 1 if name == "serial" else cell.workers
    found = index.get((cell.execution, name, workers), [])
    on = f" on engine {engine}" if engine else ""
    where = f"{on} at {workers} worker{'s' if workers > 1 else ''} ({cell.key['execution']})"
    if engine is not None:
        found = [base for base in found if base.engine == engine]
    if name != "serial":  # with another global batch it would solve another problem
        found = [base for base in found if base.batch_global == cell.batch_global]
    plain = [base for base in found if base.label == name]
    found = plain or found  # with options it is a variant, and a baseline only where the plain one did not run
    if not found:
        return Baseline({}, engine or "", workers, f"no completed run of {name}{where}")
    if len(found) > 1:
        labels = ", ".join(sorted(f"{base.key['label']} on {base.key['engine']}" for base in found))
        return Baseline({}, engine or "", workers, f"{len(found)} candidates for the baseline {name}{where}: {labels}")
    (base,) = found
    at = base.engine
    if base.oversubscribed:
        return Baseline({}, at, workers, f"{name}{where} is oversubscribed and so no baseline")
    return Baseline(base.seconds, at, workers, "")


def _row(cell: Cell, name: str, base: Baseline) -> dict[str, object]:
    own = cell.seconds
    common = sorted(own.keys() & base.seconds.keys())
    note = base.fault or ("" if common else f"{name} shares no repetition with it")
    ratio = _paired(base.seconds, own, common)
    train, baseline = _centre(own, common), _centre(base.seconds, common)
    return {
        **cell.key,
        "strategy": cell.strategy,
        "oversubscribed": cell.oversubscribed,
        "baseline": name,
        "baseline_engine": base.engine,
        "baseline_workers": base.workers,
        "n": ratio.n,
        "train_s": train,
        "baseline_s": baseline,
        "saved_s": baseline - train,
        "ratio": ratio.centre,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "reduction": 1 - 1 / ratio.centre,
        "reduction_low": 1 - 1 / ratio.low,
        "reduction_high": 1 - 1 / ratio.high,
        "interval": interval_name(cell.execution) if ratio.n > 1 else "",
        "note": note,
    }


def _scaling(cell: Cell, serial: Baseline) -> dict[str, float]:
    ratio = _paired(serial.seconds, cell.seconds, sorted(cell.seconds.keys() & serial.seconds.keys()))
    per_speedup, per_efficiency = (cell.workers, 1.0) if cell.weak else (1, 1 / cell.workers)
    values: dict[str, float] = {}
    for suffix, value in zip(("", "_low", "_high"), ratio[:3], strict=True):
        values[f"speedup{suffix}"] = value * per_speedup
        values[f"efficiency{suffix}"] = value * per_efficiency
    return values


def _parts(own: dict[int, float], allreduce: Baseline, base: Baseline) -> dict[str, object]:
    """The two parts, from the repetitions that all three have, of which `split_total` is the sum."""
    common = sorted(own.keys() & allreduce.seconds.keys() & base.seconds.keys())
    strategy, between, baseline = (_centre(times, common) for times in (own, allreduce.seconds, base.seconds))
    return {
        "engine_part": (baseline - between) / baseline,
        "frequency_part": (between - strategy) / baseline,
        "split_total": 1 - strategy / baseline,
        "split_note": base.fault or allreduce.fault,
    }


def _paired(top: dict[int, float], bottom: dict[int, float], common: list[int]) -> Estimate:
    return paired_ratio([top[r] for r in common], [bottom[r] for r in common])


def _centre(times: dict[int, float], repetitions: list[int]) -> float:
    if not repetitions:
        return math.nan
    return float(np.exp(np.mean(np.log([times[repetition] for repetition in repetitions]))))
