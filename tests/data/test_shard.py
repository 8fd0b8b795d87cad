"""A shard with exchanged rows equals one that reads them."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalebench.data.batch_plan import BatchPlan
from scalebench.data.dataset import Dataset
from scalebench.data.layout import SHUFFLES
from scalebench.data.shard import LaidOut, Rows, Shard
from scalebench.errors import RunError


def make_dataset(n, task="classification"):
    rng = np.random.default_rng(n)
    x = rng.standard_normal((n, 2, 3)).astype(np.float32)
    y = (
        np.arange(n)
        if task == "classification"
        else rng.standard_normal((n, 2)).astype(np.float32)
    )
    return Dataset(
        "made", task, n if task == "classification" else 2, x, y, x[:1], y[:1]
    )


class Exchange:
    """An alltoallv between threads as workers."""

    def __init__(self, workers):
        self.given = [None] * workers
        self.barrier = threading.Barrier(workers, timeout=1200)
        self.calls = [0] * workers

    def of(self, worker):
        def exchange(tensors):
            self.calls[worker] += 1
            assert len(tensors) == len(self.given)
            assert all(tensor.is_contiguous() for tensor in tensors)
            self.given[worker] = tensors
            self.barrier.wait()
            received = [
                tensors_of_peer[worker].clone() for tensors_of_peer in self.given
            ]
            self.barrier.wait()
            return received

        return exchange


def run_epochs(dataset, plan, epochs, dtype=torch.float64):
    """Return the shards of all workers and epochs with real exchanges, and the number of exchanges."""
    exchange = Exchange(plan.workers)
    held = [[] for _ in range(plan.workers)]

    def work(worker):
        shard = Shard(dataset, plan, worker, dtype, torch.device("cpu"))
        for epoch in range(epochs):
            x, y = shard.epoch(epoch, exchange.of(worker))
            held[worker].append((x.clone(), y.clone(), len(x)))

    threads = [
        threading.Thread(target=work, args=(worker,)) for worker in range(plan.workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return held, exchange.calls


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(24, 90),
    workers=st.integers(1, 5),
    blocks_each=st.integers(1, 3),
    shuffle=st.sampled_from(SHUFFLES),
    seed=st.integers(0, 3),
    task=st.sampled_from(["classification", "regression"]),
)
def test_exchanged_rows_equal_read_rows(n, workers, blocks_each, shuffle, seed, task):
    dataset = make_dataset(n, task)
    plan = BatchPlan(
        n,
        workers,
        seed=seed,
        batch_per_worker=6,
        blocks=workers * blocks_each,
        shuffle=shuffle,
    )
    held, calls = run_epochs(dataset, plan, 4)
    moves = sum(bool(plan.moved(epoch).any()) for epoch in range(4))
    assert calls == [2 * moves] * workers
    for worker in range(workers):
        for epoch in range(4):
            fresh_x, fresh_y = Shard(
                dataset, plan, worker, torch.float64, torch.device("cpu")
            ).epoch(epoch)
            x, y, length = held[worker][epoch]
            assert torch.equal(x, fresh_x)
            assert torch.equal(y, fresh_y)
            assert length == plan.shard_sizes(epoch)[worker]


@pytest.mark.parametrize("shuffle", ["rotate_blocks", "pairwise", "global"])
def test_moving_shuffles_move_rows(shuffle):
    """Ensures that the property above is not trivially true."""
    plan = BatchPlan(60, 4, seed=0, batch_per_worker=5, shuffle=shuffle)
    _, calls = run_epochs(make_dataset(60), plan, 4)
    assert min(calls) >= 4


def test_dtypes_and_layout():
    dataset = make_dataset(12, "regression")
    plan = BatchPlan(12, 3, seed=0, batch_per_worker=2)
    x, y = Shard(dataset, plan, 1, torch.bfloat16, torch.device("cpu")).epoch(0)
    assert (x.dtype, y.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (tuple(x.shape), tuple(y.shape)) == ((4, 2, 3), (4, 2))
    assert x.is_contiguous()
    _, labels = Shard(
        make_dataset(12), plan, 1, torch.float32, torch.device("cpu")
    ).epoch(0)
    assert labels.dtype == torch.int64
    assert labels.tolist() == plan.indices(0, 1).tolist()


def test_tensors_are_reused_when_nothing_changes():
    shard = Shard(
        make_dataset(12),
        BatchPlan(12, 3, seed=0, batch_per_worker=2, shuffle="none"),
        0,
        torch.float32,
        torch.device("cpu"),
    )
    assert shard.epoch(0)[0].data_ptr() == shard.epoch(1)[0].data_ptr()


def test_rows_are_read_at_the_first_epoch_only(tmp_path):
    """The data set may be deleted after the first epoch."""
    dataset = make_dataset(12)
    shard = Shard(
        dataset,
        BatchPlan(12, 1, seed=0, batch_per_worker=2),
        0,
        torch.float32,
        torch.device("cpu"),
    )
    shard.epoch(0)
    dataset.x_train[:] = np.nan
    assert torch.isfinite(shard.epoch(1)[0]).all()


@pytest.mark.parametrize("blocks", [3, 7])
def test_samples_that_are_laid_out_for_all_are_those_of_each(blocks):
    """Whichever worker comes first, also of one that is many epochs behind."""
    dataset, device = make_dataset(31), torch.device("cpu")
    plan = BatchPlan(31, 3, seed=2, batch_per_worker=2, blocks=blocks)
    laid_out = LaidOut(Rows(dataset, torch.float64, device), plan)

    def shard(worker, laid_out=None):
        return Shard(dataset, plan, worker, torch.float64, device, laid_out)

    together = [shard(worker, laid_out) for worker in range(3)]
    order = [(0, 0), (2, 0), (2, 1), (0, 1), *((2, epoch) for epoch in range(2, 6))]
    for worker, epoch in [*order, (1, 0), (1, 1), (1, 5), (0, 5), (0, 6)]:
        found = together[worker].epoch(epoch)
        for mine, alone in zip(found, shard(worker).epoch(epoch), strict=True):
            assert torch.equal(mine, alone)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parts_of_samples_that_are_laid_out_begin_as_tensors_do(dtype):
    """Or else their products have other last bits than those of a rank or a task, which holds its samples alone."""
    dataset, plan = make_dataset(31), BatchPlan(31, 3, seed=2, batch_per_worker=2)
    laid_out = LaidOut(Rows(dataset, dtype, torch.device("cpu")), plan)
    first, *others = [laid_out.part(0, worker) for worker in range(3)]
    for other in others:
        for its, of_first in zip(other, first, strict=True):
            assert (its.data_ptr() - of_first.data_ptr()) % 64 == 0


def test_a_sample_of_all_that_is_changed_in_place_is_an_error():
    dataset, device = make_dataset(12), torch.device("cpu")
    plan = BatchPlan(12, 3, seed=0, batch_per_worker=2)
    laid_out = LaidOut(Rows(dataset, torch.float64, device), plan)
    shard = Shard(dataset, plan, 1, torch.float64, device, laid_out)
    x, _ = shard.epoch(0)
    x[0] -= 1
    with pytest.raises(RunError, match="changed in place"):
        shard.epoch(1)
