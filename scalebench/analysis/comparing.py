"""Times against baselines: speedup, efficiency, time reduction. Two executions are never joined.

Two questions are kept apart. What does synchronising less often save: against per-batch `allreduce` on the same engine.
What does the engine save: against the real `horovod` and `ddp`. A reduction against those two is split into

    engine part     (T_base - T_allreduce) / T_base
    frequency part  (T_allreduce - T_strategy) / T_base

which add up to the signed total 1 - T_strategy / T_base. `serial` runs at one worker, natively on engine mpi, and is
the base of the speedup of every engine of its execution.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import pandas as pd

from scalebench.analysis.blocks import Cell, by_block
from scalebench.analysis.cached import cached
from scalebench.analysis.grouping import EXECUTIONS, PER_BATCH, strategy_rank
from scalebench.analysis.intervals import time_interval
from scalebench.analysis.loading import CELL, Results
from scalebench.analysis.pairing import NO_RATIO, Ratio, Ratios

SPLIT_BASELINES = ("horovod", "ddp")
NO_RUN = "no completed run of"


COLUMNS = [
    *CELL,
    *("strategy", "oversubscribed", "baseline", "baseline_engine", "baseline_workers", "n", "paired", "left_out"),
    *("train_s", "baseline_s", "saved_s", "ratio", "ratio_low", "ratio_high"),
    *("reduction", "reduction_low", "reduction_high", "median_ratio", "median_ratio_low", "median_ratio_high"),
    *("interval", "note", "speedup", "efficiency", "speedup_low", "efficiency_low", "speedup_high", "efficiency_high"),
    *("engine_part", "frequency_part", "split_total", "split_note"),
]


class Baseline(NamedTuple):
    """A baseline's cell, or None and why there is none."""

    cell: Cell | None
    engine: str
    workers: int
    fault: str


Index: TypeAlias = dict[tuple[object, str, int], list[Cell]]  # by execution, strategy and workers


@cached
def ratios(results: Results) -> pd.DataFrame:
    """One row per cell and baseline.

    Against `serial`: `ratio` is T(serial, 1) / T, from which `speedup` and `efficiency`. In strong scaling the ratio is
    the speedup and efficiency = speedup / workers; in weak scaling the ratio is the efficiency T(1) / T(N) and speedup
    (scaled) = workers x efficiency. Against the others, at the same worker count: `ratio` is T_baseline / T.
    `reduction` = 1 - 1 / ratio, signed; `saved_s` = `baseline_s` - `train_s`; `engine_part` and `frequency_part` as
    above. `paired`: from the blocks of the run order that both have, `n` of them, without the `left_out` blocks in
    which they did not run side by side; else from all repetitions, as independent samples. Either way the baseline's
    own noise is inside the interval, which is `interval`. Beside the geometric mean of the pairs' ratios stands their
    median, `median_ratio`, from six pairs on with an interval of its own. Where a baseline is missing or oversubscribed
    the numbers are empty and `note` says so.
    """
    table, compared = sorted(by_block(results), key=_rank), Ratios(results)
    index: Index = {}
    for cell in table:
        index.setdefault((cell.execution, cell.strategy, cell.workers), []).append(cell)
    rows = [row for cell in table for row in _compare(index, cell, compared)]
    # As in `cells`, also where no batch is known: the two are joined by these.
    return pd.DataFrame(rows, columns=COLUMNS).astype(dict.fromkeys(("batch_per_worker", "batch_global"), "Int64"))


def _rank(cell: Cell) -> tuple[object, ...]:
    """The order of `cells`."""
    batch = cell.key["batch_per_worker"]
    known = 0 if pd.isna(batch) else batch  # type: ignore[call-overload]
    return EXECUTIONS.index(cell.execution), strategy_rank(cell.label), cell.engine, cell.workers, known


def _compare(index: Index, cell: Cell, compared: Ratios) -> list[dict[str, object]]:
    serial = _baseline(index, "serial", None, cell)
    ratio = _ratio(serial, cell, compared)
    rows = [_row(cell, "serial", serial, ratio) | _scaling(cell, ratio)]
    if cell.strategy == "serial":
        return rows
    allreduce = _baseline(index, "allreduce", cell.engine, cell)
    if cell.strategy not in PER_BATCH:
        rows.append(_row(cell, "allreduce", allreduce, _ratio(allreduce, cell, compared)))
    if cell.strategy not in SPLIT_BASELINES:
        for name in SPLIT_BASELINES:
            base = _baseline(index, name, None, cell)
            rows.append(_row(cell, name, base, _ratio(base, cell, compared)) | _parts(cell, allreduce, base))
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
        return Baseline(None, engine or "", workers, f"{NO_RUN} {name}{where}")
    if len(found) > 1:
        labels = ", ".join(sorted(f"{base.key['label']} on {base.key['engine']}" for base in found))
        return Baseline(
            None, engine or "", workers, f"{len(found)} candidates for the baseline {name}{where}: {labels}"
        )
    (base,) = found
    at = base.engine
    if base.oversubscribed:
        return Baseline(None, at, workers, f"{name}{where} is oversubscribed and so no baseline")
    return Baseline(base, at, workers, "")


def _ratio(base: Baseline, cell: Cell, compared: Ratios) -> Ratio:
    return NO_RATIO if base.cell is None else compared.of(base.cell, cell)


def _row(cell: Cell, name: str, base: Baseline, ratio: Ratio) -> dict[str, object]:
    note = base.fault or ("" if ratio.mean.n else f"{name} shares no repetition with it")
    baseline, train = time_interval(ratio.top_s).centre, time_interval(ratio.bottom_s).centre
    return {
        **cell.key,
        "strategy": cell.strategy,
        "oversubscribed": cell.oversubscribed,
        "baseline": name,
        "baseline_engine": base.engine,
        "baseline_workers": base.workers,
        "n": ratio.mean.n,
        "paired": ratio.paired,
        "left_out": ratio.left_out,
        "train_s": train,
        "baseline_s": baseline,
        "saved_s": baseline - train,
        "ratio": ratio.mean.centre,
        "ratio_low": ratio.mean.low,
        "ratio_high": ratio.mean.high,
        "reduction": 1 - 1 / ratio.mean.centre,
        "reduction_low": 1 - 1 / ratio.mean.low,
        "reduction_high": 1 - 1 / ratio.mean.high,
        "median_ratio": ratio.median.centre,
        "median_ratio_low": ratio.median.low,
        "median_ratio_high": ratio.median.high,
        "interval": ratio.interval,
        "note": note,
    }


def _scaling(cell: Cell, serial: Ratio) -> dict[str, float]:
    per_speedup, per_efficiency = (cell.workers, 1.0) if cell.weak else (1, 1 / cell.workers)
    values: dict[str, float] = {}
    for suffix, value in zip(("", "_low", "_high"), serial.mean[:3], strict=True):
        values[f"speedup{suffix}"] = value * per_speedup
        values[f"efficiency{suffix}"] = value * per_efficiency
    return values


def _parts(cell: Cell, allreduce: Baseline, base: Baseline) -> dict[str, object]:
    """The two parts, from the repetitions that all three have, of which `split_total` is the sum."""
    times = [other.seconds if other else {} for other in (cell, allreduce.cell, base.cell)]
    common = sorted(times[0].keys() & times[1].keys() & times[2].keys())
    strategy, between, baseline = (time_interval([own[r] for r in common]).centre for own in times)
    return {
        "engine_part": (baseline - between) / baseline,
        "frequency_part": (between - strategy) / baseline,
        "split_total": 1 - strategy / baseline,
        "split_note": base.fault or allreduce.fault,
    }
