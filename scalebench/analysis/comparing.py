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

from scalebench.analysis.grouping import CELL, PER_BATCH, timed
from scalebench.analysis.intervals import Estimate, interval_name, paired_ratio
from scalebench.analysis.reading import Results

SPLIT_BASELINES = ("horovod", "ddp")


Bases: TypeAlias = dict[tuple[object, ...], pd.DataFrame]  # (execution, strategy, workers) -> completed runs


class Times(NamedTuple):
    """The times of one cell by repetition, or why they cannot be a baseline."""

    seconds: dict[int, float]
    engine: str
    workers: int
    fault: str


def ratios(results: Results) -> pd.DataFrame:
    """One row per cell and baseline.

    Against `serial`: `ratio` is T(serial, 1) / T, from which `speedup` and `efficiency`. In strong scaling the ratio is
    the speedup and efficiency = speedup / workers; in weak scaling the ratio is the efficiency T(1) / T(N) and speedup
    (scaled) = workers x efficiency. Against the others, at the same worker count: `ratio` is T_baseline / T.
    `reduction` = 1 - 1 / ratio, signed; `saved_s` = `baseline_s` - `train_s`; `engine_part` and `frequency_part` as
    above. All from repetitions that both have, paired (`n`); their interval is `interval`. Where a baseline is missing
    or oversubscribed the numbers are empty and `note` says so.
    """
    runs = timed(results)
    bases = {key: group for key, group in runs.groupby(["execution", "strategy", "workers"]) if key[1] in PER_BATCH}
    rows: list[dict[str, object]] = []
    for key, group in runs.groupby(CELL, dropna=False):
        rows += _compare(bases, dict(zip(CELL, key, strict=True)), group)
    return pd.DataFrame(rows)


def _compare(bases: Bases, cell: dict[str, object], group: pd.DataFrame) -> list[dict[str, object]]:
    strategy, weak = str(group["strategy"].iloc[0]), group["scaling"].iloc[0] == "weak"
    own = _by_repetition(group)
    workers = int(group["workers"].iloc[0])
    cell = {**cell, "strategy": strategy, "oversubscribed": bool(group["oversubscribed"].any())}
    serial = _baseline(bases, "serial", None, 1, cell)
    rows = [_row(cell, "serial", own, serial) | _scaling(own, serial, workers, weak)]
    if strategy == "serial":
        return rows
    allreduce = _baseline(bases, "allreduce", str(cell["engine"]), workers, cell)
    if strategy not in PER_BATCH:
        rows.append(_row(cell, "allreduce", own, allreduce))
    if strategy not in SPLIT_BASELINES:
        for name in SPLIT_BASELINES:
            base = _baseline(bases, name, None, workers, cell)
            rows.append(_row(cell, name, own, base) | _parts(own, allreduce, base))
    return rows


def _baseline(bases: Bases, name: str, engine: str | None, workers: int, cell: dict[str, object]) -> Times:
    found = bases.get((cell["execution"], name, workers))
    where = f" at {workers} worker{'s' if workers > 1 else ''} ({cell['execution']})"
    if engine is not None:
        where = f" on engine {engine}{where}"
    if found is not None and name != "serial":
        same_batch = found["batch_global"].isna() | (found["batch_global"] == cell["batch_global"])
        found = found[same_batch.fillna(True) & (found["engine"] == (engine or found["engine"]))]
    if found is None or found.empty:
        return Times({}, engine or "", workers, f"no completed run of {name}{where}")
    variants = found.groupby(["engine", "label"]).ngroups
    if variants > 1:
        labels = ", ".join(sorted({f"{row.label} on {row.engine}" for row in found.itertuples()}))
        return Times({}, engine or "", workers, f"{variants} candidates for the baseline {name}{where}: {labels}")
    at = str(found["engine"].iloc[0])
    if found["oversubscribed"].any():
        return Times({}, at, workers, f"{name}{where} is oversubscribed and so no baseline")
    return Times(_by_repetition(found), at, workers, "")


def _row(cell: dict[str, object], name: str, own: dict[int, float], base: Times) -> dict[str, object]:
    common = sorted(own.keys() & base.seconds.keys())
    note = base.fault or ("" if common else f"{name} shares no repetition with it")
    ratio = _paired(base.seconds, own, common)
    train, baseline = _centre(own, common), _centre(base.seconds, common)
    return {
        **cell,
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
        "interval": interval_name(str(cell["execution"])) if ratio.n > 1 else "",
        "note": note,
    }


def _scaling(own: dict[int, float], serial: Times, workers: int, weak: bool) -> dict[str, float]:
    ratio = _paired(serial.seconds, own, sorted(own.keys() & serial.seconds.keys()))
    per_speedup, per_efficiency = (workers, 1.0) if weak else (1, 1 / workers)
    values: dict[str, float] = {}
    for suffix, value in zip(("", "_low", "_high"), ratio[:3], strict=True):
        values[f"speedup{suffix}"] = value * per_speedup
        values[f"efficiency{suffix}"] = value * per_efficiency
    return values


def _parts(own: dict[int, float], allreduce: Times, base: Times) -> dict[str, object]:
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


def _by_repetition(group: pd.DataFrame) -> dict[int, float]:
    return dict(zip(group["repetition"].astype(int), group["train_s"].astype(float), strict=True))
