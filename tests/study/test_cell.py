"""The identity of a point, and cells in words."""

from __future__ import annotations

import random

from scalebench.study.cell import Cell, in_words


def test_cells_are_grouped_by_strategy_and_engine():
    cells = [
        *(
            Cell("virtual", "virtual", label, workers)
            for label in ("ddp", "horovod")
            for workers in (4, 2)
        ),
        *(Cell("native", "gloo", "ddp", 1, batch) for batch in (8, 16)),
    ]
    assert (
        in_words(cells)
        == "ddp, horovod at 2, 4 workers (virtual); ddp at 1 worker (native gloo)"
    )


def test_further_groups_of_cells_are_counted():
    assert in_words(
        Cell("native", "mpi", f"local_sgd(every={n})", n) for n in range(1, 40)
    ).endswith("; and 35 more")


def test_cells_are_ordered_by_execution_strategy_workers_and_batch():
    order = [
        Cell("native", "mpi", "epoch_average", 2),
        Cell("virtual", "virtual", "serial", 1),
        Cell("virtual", "virtual", "allreduce", 2),
        Cell("virtual", "virtual", "local_sgd(steps=4)", 2, 8),
        Cell("virtual", "virtual", "local_sgd(steps=4)", 2, 16),
        Cell("virtual", "virtual", "local_sgd(steps=16)", 1),
    ]
    assert (
        sorted(
            random.Random(0).sample(order, len(order)), key=lambda cell: cell.sort_key
        )
        == order
    )


def test_baselines_are_on_any_engine_but_allreduce_and_serial_has_one_worker():
    cell = Cell("native", "gloo", "local_sgd(steps=4)", 8, 16)
    places = [cell.baseline(name)[:4] for name in ("serial", "allreduce", "horovod")]
    assert places == [
        ("native", "", "serial", 1),
        ("native", "gloo", "allreduce", 8),
        ("native", "", "horovod", 8),
    ]
