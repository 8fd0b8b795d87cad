"""A ds-tensor over real MPI ranks equals that of one process; each rank holds its blocks only."""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalebench.comm.engines import available
from scalebench.data.ds_tensor import DsTensor
from scalebench.data.layout import MOVING, SHUFFLES
from scalebench.errors import DataError
from scalebench.launch.processes import environment, launch_command
from tests.conftest import some

PROGRAM = Path(__file__).parent / "programs/spread.py"


@pytest.mark.parametrize("ranks", some([2, 3, 4], 3))
def test_tensor_over_real_ranks_equals_one_process(ranks, tmp_path):
    """Every operation bit for bit on uneven, empty and few blocks, grids and files; bad input ends on every rank."""
    if reason := available("mpi"):
        pytest.skip(reason)
    command = [
        *launch_command(ranks)[0],
        sys.executable,
        "-W",
        "error",
        str(PROGRAM),
        str(tmp_path),
    ]
    done = subprocess.run(command, env=environment(1), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"tensors": 184, "refused": 21}


def test_the_documented_example_runs(tmp_path):
    if reason := available("mpi"):
        pytest.skip(reason)
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    (found,) = re.findall(
        r"Save this as `spread.py`:\n\n```python\n(.*?)```", page, re.DOTALL
    )
    (tmp_path / "spread.py").write_text(found)
    command = [
        *launch_command(2)[0],
        sys.executable,
        "-W",
        "error",
        str(tmp_path / "spread.py"),
    ]
    done = subprocess.run(command, env=environment(1), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    sizes = [2, 2, 2, 2, 1, 1]
    mean = "column means [7.  7.5]"  # of the rows (5, 5.5) to (9, 9.5)
    told = [
        f"rank {k % 2} has block {k}, {size} of 10 rows; {mean}"
        for k, size in enumerate(sizes)
    ]
    assert sorted(done.stdout.splitlines()) == sorted(told)


class Threads:
    """An alltoallv between threads as ranks, with a count of calls."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=1200)
        self.given = [None] * size
        self.calls = 0

    def rank(self, rank):
        peers = type("Peers", (), {"rank": rank, "size": len(self.given)})()

        def alltoallv(tensors):
            self.given[rank] = list(tensors)
            self.calls += rank == 0
            self.barrier.wait()
            received = [tensors_of_peer[rank].clone() for tensors_of_peer in self.given]
            self.barrier.wait()
            return received

        peers.alltoallv = alltoallv
        return peers

    def all_do(self, act):
        """Return the result or exception of `act(comm)` on each rank."""
        found = [None] * len(self.given)

        def work(rank):
            try:
                found[rank] = act(self.rank(rank))
            except Exception as error:
                found[rank] = error

        threads = [
            threading.Thread(target=work, args=(rank,)) for rank in range(len(found))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=7),
    other=st.lists(st.integers(0, 5), min_size=1, max_size=7),
    ranks=st.integers(1, 5),
    how=st.sampled_from(SHUFFLES),
    seed=st.integers(0, 3),
)
def test_any_blocks_over_any_number_of_ranks(sizes, other, ranks, how, seed):
    other[-1] += max(0, sum(sizes) - sum(other))
    sizes[-1] += max(0, sum(other) - sum(sizes))
    array = np.random.default_rng(seed).standard_normal((sum(sizes), 2))

    def act(tensor):
        mixed = tensor.shuffle(how, seed)
        joined = DsTensor.concatenate([mixed.rechunk(other), tensor])
        return mixed, joined, joined.collect()

    whole = act(DsTensor(array, sizes))
    shared = Threads(ranks).all_do(lambda comm: act(DsTensor(array, sizes, comm)))
    assert len(shared) == ranks
    for rank, found in enumerate(shared):
        assert np.array_equal(found[2], whole[2])
        for spread, alone in zip(found[:2], whole[:2], strict=True):
            assert spread.block_sizes.tolist() == alone.block_sizes.tolist()
            assert list(spread.own_blocks) == list(range(rank, alone.n_blocks, ranks))
            for k, block in zip(spread.own_blocks, spread, strict=True):
                assert np.array_equal(block, alone.block(k))


@pytest.mark.parametrize("how", SHUFFLES)
def test_moving_shuffle_makes_one_alltoallv(how):
    threads = Threads(3)
    tensors = threads.all_do(lambda comm: DsTensor(np.arange(30), 6, comm))
    before = threads.calls
    threads.all_do(lambda comm: tensors[comm.rank].shuffle(how, 1))
    # one more: all ask for the same
    assert threads.calls - before == 1 + (how in MOVING)


def test_rank_reads_only_its_own_blocks():
    read = {}

    class Array(np.ndarray):
        def __getitem__(self, index):
            read.setdefault(threading.current_thread().name, []).append(
                (index.start, index.stop)
            )
            return np.asarray(super().__getitem__(index))

    def make(comm):
        threading.current_thread().name = f"rank {comm.rank}"
        return DsTensor(np.arange(10).view(Array), [4, 3, 0, 3], comm)

    found = Threads(2).all_do(make)
    assert [tensor.array.tolist() for tensor in found] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7, 8, 9],
    ]
    assert read == {"rank 0": [(0, 4), (7, 7)], "rank 1": [(4, 7), (7, 10)]}


def test_other_ranks_name_the_failing_rank():
    def act(comm):
        def halve(block):
            if comm.rank == 1:
                raise ZeroDivisionError("in two")
            return block

        return DsTensor(np.arange(6), 3, comm).map(halve)

    first, second, third = Threads(3).all_do(act)
    assert isinstance(second, ZeroDivisionError)
    for error in (first, third):
        assert isinstance(error, DataError)
        assert str(error) == "rank 1: in two"


def test_impossible_blocks_raise_equally_on_every_rank():
    for array, blocks in [
        ([[1, 2], [3, 4]], [[6, 7]]),
        (np.zeros(13), 2.5),
        (np.zeros((0, 3)), None),
        ([[1], []], 1),
    ]:
        errors = Threads(3).all_do(
            lambda comm, array=array, blocks=blocks: DsTensor(array, blocks, comm)
        )
        assert {type(error) for error in errors} == {DataError}
        assert len({str(error) for error in errors}) == 1
    made = Threads(2).all_do(lambda comm: DsTensor([[1, 2], [3, 4]], 2, comm))
    assert [tensor.array.tolist() for tensor in made] == [[[1, 2]], [[3, 4]]]
