"""Names of cells in text."""

from __future__ import annotations

import pandas as pd

from scalebench.analysis.grouping import listed, place
from scalebench.formatting import counted


def test_place_groups_cells():
    cells = [
        *(("virtual", "virtual", label, workers) for label in ("ddp", "horovod") for workers in (4, 2)),
        ("native", "gloo", "ddp", 1),
        ("native", "gloo", "ddp", 1),
    ]
    table = pd.DataFrame(cells, columns=["execution", "engine", "label", "workers"])
    assert place(table) == "ddp, horovod at 2, 4 workers (virtual); ddp at 1 worker (native gloo)"


def test_place_counts_further_cells():
    cells = [("native", "mpi", f"local_sgd(every={n})", n) for n in range(1, 40)]
    table = pd.DataFrame(cells, columns=["execution", "engine", "label", "workers"])
    assert place(table).endswith("; and 35 more")


def test_listed_counts_further_items():
    assert listed(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert listed(range(10)) == "0, 1, 2, 3, 4, 5, 6 and 3 more"
    assert (counted(1, "run"), counted(1200, "run")) == ("1 run", "1,200 runs")
