"""Cells and counts in few words."""

from __future__ import annotations

import pandas as pd

from scalebench.analysis.cell_names import listed, place
from scalebench.formatting import counted


def test_cells_are_named_in_few_words():
    cells = [
        *(("virtual", "virtual", label, workers) for label in ("ddp", "horovod") for workers in (4, 2)),
        ("native", "gloo", "ddp", 1),
        ("native", "gloo", "ddp", 1),
    ]
    table = pd.DataFrame(cells, columns=["execution", "engine", "label", "workers"])
    assert place(table) == "ddp, horovod at 2, 4 workers (virtual); ddp at 1 worker (native gloo)"


def test_many_places_are_counted_not_listed():
    cells = [("native", "mpi", f"local_sgd(every={n})", n) for n in range(1, 40)]
    table = pd.DataFrame(cells, columns=["execution", "engine", "label", "workers"])
    assert place(table).endswith("; and 35 more")


def test_long_lists_are_cut_and_counted():
    assert listed(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert listed(range(10)) == "0, 1, 2, 3, 4, 5, 6 and 3 more"
    assert (counted(1, "run"), counted(1200, "run")) == ("1 run", "1,200 runs")
