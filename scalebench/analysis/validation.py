"""How far virtual times are from native ones."""

from __future__ import annotations

import pandas as pd

from scalebench.analysis.grouping import timed
from scalebench.analysis.intervals import time_interval, unpaired_ratio
from scalebench.analysis.reading import Results

PREFERRED_ENGINES = ("mpi", "nccl", "gloo", "horovod")  # which native engine stands for a strategy that has several
_COLUMNS = [
    *("label", "strategy", "workers", "engine", "oversubscribed", "n_native", "n_virtual"),
    *("native_s", "virtual_s", "ratio", "ratio_low", "ratio_high", "error"),
]


def agreement(results: Results) -> pd.DataFrame:
    """One row per strategy and worker count that ran both ways: `ratio` = T_virtual / T_native, `error` = ratio - 1.

    The interval is Welch's on logs, as repetitions of the two have nothing in common that would pair them. A strategy
    that ran on several native engines is compared on the first of mpi, nccl, gloo, horovod. Oversubscribed native runs
    are marked: there the machine is not the one that virtual workers stand for.
    """
    runs = timed(results)
    both = {kind: runs[runs["execution"] == kind] for kind in ("native", "virtual")}
    rows = []
    for (label, workers), native in both["native"].groupby(["label", "workers"]):
        virtual = both["virtual"][(both["virtual"]["label"] == label) & (both["virtual"]["workers"] == workers)]
        if virtual.empty:
            continue
        engine = min(native["engine"], key=PREFERRED_ENGINES.index)
        native = native[native["engine"] == engine]
        ratio = unpaired_ratio(virtual["train_s"].tolist(), native["train_s"].tolist())
        rows.append(
            {
                "label": label,
                "strategy": native["strategy"].iloc[0],
                "workers": workers,
                "engine": engine,
                "oversubscribed": bool(native["oversubscribed"].any()),
                "native_s": time_interval(native["train_s"].tolist()).centre,
                "virtual_s": time_interval(virtual["train_s"].tolist()).centre,
                "ratio": ratio.centre,
                "ratio_low": ratio.low,
                "ratio_high": ratio.high,
                "n_native": len(native),
                "n_virtual": len(virtual),
                "error": ratio.centre - 1,
            }
        )
    return pd.DataFrame(rows, columns=_COLUMNS)


def median_error(table: pd.DataFrame) -> float | None:
    """Median of |error| over the cells of `agreement` whose native runs were not oversubscribed, None if all were."""
    fair = table[~table["oversubscribed"].astype(bool)]
    return float(fair["error"].abs().median()) if len(fair) else None
