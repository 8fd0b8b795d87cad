"""Reduction of the time to the target metric over baselines, at equal worker counts.

1 - T_target(strategy, N) / T_target(baseline, N), within one execution. Where every run of both reached the target, the
ratio has the pairs and the interval of a ratio of training times (pairing.py). Where a run of either did not, it is the
ratio of the Kaplan-Meier medians, without an interval. A median that is infinite has no ratio.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pandas as pd

from scalebench.analysis.comparing import Baseline, Baselines, reduction
from scalebench.analysis.loading import Results, cached, table_by_cell
from scalebench.analysis.pairing import NO_RATIO, Comparer, Ratio
from scalebench.analysis.rounds import MEASURED, CellRuns, runs_by_cell
from scalebench.analysis.time_to_target import (
    OVER_SEEDS,
    reached_by_all,
    shares,
    simulated_interval,
    time_to_target,
    until_target,
)
from scalebench.study.cell import CELL

COLUMNS = [
    *CELL,
    *("strategy", "oversubscribed", "disturbed", "baseline", "baseline_engine", "n", "time_to_target_s", "baseline_s"),
    *("reduction", "reduction_low", "reduction_high", "interval", "note"),
]


@cached
def target_ratios(results: Results) -> pd.DataFrame:
    """Reductions of the time to the target, one row per cell and baseline; `note` says why one is missing.

    `n` is the number of ratios behind an interval, 0 for a ratio of Kaplan-Meier medians.
    """
    cells, comparer = [cell for cell in runs_by_cell(results) if cell.aimed], Comparer(results)
    baselines = Baselines(cells)
    rows = [_row(cell, base, comparer) for cell in cells for base in baselines.of(cell)]
    return table_by_cell(rows, COLUMNS)


def _simulated(ratio: Ratio, base: CellRuns, cell: CellRuns, comparer: Comparer) -> Ratio:
    """The ratio of simulated times, with the spread of draws and that of seeds apart (time_to_target.py)."""
    rounds = sorted(base.to_target.keys() & cell.to_target.keys())
    if not rounds or ratio.top_s == ratio.bottom_s:
        return ratio
    parts = [shares(one) for one in (base, cell)]
    mean = simulated_interval(
        [base.seconds[at] / cell.seconds[at] for at in rounds],
        [parts[0][at] / parts[1][at] for at in rounds],
        comparer.error_of_ratio(base, cell),
    )
    kind = ratio.mean.kind
    return replace(ratio, mean=mean._replace(kind=f"{kind}{OVER_SEEDS}" if kind else ""))


def _row(cell: CellRuns, base: Baseline, comparer: Comparer) -> dict[str, Any]:
    ratio, note = NO_RATIO, base.fault
    own, other = time_to_target(cell, comparer).value, math.nan
    if base.cell is not None:
        other = time_to_target(base.cell, comparer).value
        if math.isinf(own) or math.isinf(other):
            never = " and ".join(label for label, time in ((cell.label, own), (base.name, other)) if math.isinf(time))
            note = f"at most half of the runs of {never} reached the target"
        elif reached_by_all(cell) and reached_by_all(base.cell):
            ratio = comparer.ratio(until_target(base.cell), until_target(cell))
            if cell.execution not in MEASURED:
                ratio = _simulated(ratio, base.cell, cell, comparer)
    saved = reduction(ratio)
    if not ratio.mean.n and not note:
        saved = saved._replace(value=1 - own / other)
    return {
        **cell.at._asdict(),
        "strategy": cell.strategy,
        "oversubscribed": cell.oversubscribed,
        "disturbed": cell.disturbed,
        "baseline": base.name,
        "baseline_engine": base.engine,
        "n": ratio.mean.n,
        "time_to_target_s": own,
        "baseline_s": other,
        **saved.named("reduction"),
        "interval": saved.kind,
        "note": note,
    }
