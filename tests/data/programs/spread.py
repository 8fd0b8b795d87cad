"""Runs under mpirun: a ds-tensor over the ranks against one in each process. Rank 0 prints a JSON line at the end."""

import gc
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from scalebench.comm.mpi import MpiCommunicator
from scalebench.data.ds_tensor import DsTensor
from scalebench.data.layout import SHUFFLES
from scalebench.errors import DataError

WORLD = MPI.COMM_WORLD
COMM = MpiCommunicator(WORLD)
RANK, SIZE = WORLD.rank, WORLD.size
HOLD = [4, 0, 7, 1, 0, 3, 5, 3]  # uneven, some empty; 23 rows
ROWS = sum(HOLD)
LAYOUTS = [1, (4, 2), HOLD, [ROWS, 0, 0, 0]]
ARRAYS = [
    np.random.default_rng(0).standard_normal((ROWS, 2, 3)),
    np.arange(ROWS, dtype=">i2"),
    np.array([f"row {i}" for i in range(ROWS)]),
    np.arange(2 * ROWS).reshape(ROWS, 2) % 3 == 0,
    np.zeros((ROWS, 0)),
    np.array(
        [(i, i / 3) for i in range(ROWS)], dtype=[("number", "i8"), ("third", "f4")]
    ),
    np.arange(4 * ROWS, dtype="f4").reshape(4, ROWS).T,  # columns lie together
]
counts = {}


def same(spread, whole):
    """Each rank holds its own blocks of `whole`, bit for bit, and no others; `spread` knows the shape of all."""
    assert spread.shape == whole.shape
    assert len(spread) == len(whole)
    assert spread.dtype == whole.dtype, (spread.dtype, whole.dtype)
    assert spread.grid == whole.grid
    assert spread.block_shape == whole.block_shape
    assert spread.block_sizes.tolist() == whole.block_sizes.tolist()
    own = list(range(RANK, whole.n_blocks, SIZE))
    assert list(spread.own_blocks) == own
    assert len(spread.array) == sum(whole.block_sizes[own])
    for k, block in zip(own, spread, strict=True):
        assert block.dtype == whole.dtype
        assert block.shape == whole.block(k).shape
        assert block.tobytes() == whole.block(k).tobytes()
    counts["tensors"] = counts.get("tensors", 0) + 1


def refused(said, act, kind=DataError):
    """Every rank raises one line that holds `said`; with `kind` None, each rank its own kind."""
    with pytest.raises(kind or Exception) as raised:
        act()
    line = str(raised.value)
    assert "\n" not in line
    lines = WORLD.allgather(line)
    assert all(said in each for each in lines), lines
    counts["refused"] = counts.get("refused", 0) + 1


def operations(array, layout):
    whole, spread = (
        DsTensor(array.copy(), layout),
        DsTensor.from_array(array.copy(), layout, comm=COMM),
    )
    same(spread, whole)
    assert not np.shares_memory(spread.array, array)
    for how in SHUFFLES:
        mixed = whole.shuffle(how, 3), spread.shuffle(how, 3)
        same(mixed[1], mixed[0])
        same(mixed[1].shuffle(how, 4), mixed[0].shuffle(how, 4))
        assert not np.shares_memory(mixed[1].array, spread.array)
    same(spread, whole)
    for other in ((2, 2), [0, 9, ROWS - 9, 0, 0]):
        same(spread.rechunk(other), whole.rechunk(other))
    other = DsTensor(array[5:].copy(), 4), DsTensor(array[5:].copy(), 4, comm=COMM)
    same(
        DsTensor.concatenate([spread, other[1], spread]),
        DsTensor.concatenate([whole, other[0], whole]),
    )
    same(
        spread.map(lambda block: block[: len(block) // 2]),
        whole.map(lambda block: block[: len(block) // 2]),
    )
    same(
        spread.map(lambda block: np.stack([block, block], 1)),
        whole.map(lambda block: np.stack([block, block], 1)),
    )
    collected = spread.collect()
    assert collected.dtype == array.dtype
    assert collected.tobytes() == array.tobytes()
    mask = np.arange(ROWS) % 3 == RANK  # each rank its own
    for index in (-1, slice(20, 2, -3), [5, 1, 5, RANK], mask, slice(0), None):
        assert np.array_equal(spread[index], np.asarray(array[index])), index
        assert spread[index].dtype == np.asarray(array[index]).dtype
    if array.ndim > 1 and array.size:
        for index in ((slice(3, None), 0), (..., 1), ([1, 2], [0, 1]), array != 0):
            assert np.array_equal(spread[index], np.asarray(array[index])), index
    wanted = np.array([ROWS - 1, 0, RANK, 0])
    assert np.array_equal(spread.rows(wanted), array[wanted])
    assert spread.rows(np.arange(0)).shape == (0, *array.shape[1:])


def files(folder):
    array = np.random.default_rng(1).standard_normal((ROWS, 3)).astype("f4")
    if RANK == 0:
        import h5py

        np.save(folder / "x.npy", array)
        np.savez_compressed(folder / "x.npz", x=array)
        with h5py.File(folder / "x.h5", "w") as file:
            file["plain"] = array
            file.create_dataset("packed", data=array, chunks=(5, 3), compression="gzip")
    WORLD.Barrier()
    for layout in (None, HOLD):
        # by default one for each rank
        blocks = min(SIZE, ROWS) if layout is None else layout
        whole = DsTensor(array, blocks)
        for made in (
            DsTensor.from_npy(folder / "x.npy", layout, comm=COMM),
            DsTensor.from_npz(folder / "x.npz", "x", layout, comm=COMM),
            DsTensor.from_hdf5(folder / "x.h5", "plain", layout, comm=COMM),
            DsTensor.from_hdf5(folder / "x.h5", "packed", layout, comm=COMM),
        ):
            same(made, whole)
            assert not isinstance(made.array, np.memmap)
    # as where a node does not see the folder
    mine = folder / ("x.npy" if RANK == 0 else "missing.npy")
    refused(
        "missing.npy: not a readable .npy", lambda: DsTensor.from_npy(mine, comm=COMM)
    )
    refused(
        "no data set 'z'", lambda: DsTensor.from_hdf5(folder / "x.h5", "z", comm=COMM)
    )


def types_of_results():
    """A result's dtype is that of all blocks, also where a rank has none, or none of that dtype."""
    spread, whole = DsTensor(np.arange(6), 3, comm=COMM), DsTensor(np.arange(6), 3)
    for function in (
        lambda block: block + 0.5 if block[0] == 0 else block,
        lambda block: block.astype("f4") if block[0] == 2 else block.astype("i1"),
        lambda block: np.array(["word"] if block[0] == 4 else ["x"]),
        lambda block: np.broadcast_to(block[:1], (3,)),
    ):
        same(spread.map(function), whole.map(function))
    joined = [DsTensor(np.arange(4), 2), DsTensor(np.arange(3) / 2, 1)]
    same(
        DsTensor.concatenate(
            [DsTensor(each.array, each.n_blocks, comm=COMM) for each in joined]
        ),
        DsTensor.concatenate(joined),
    )


def bad_input():
    tensor = DsTensor(np.arange(ROWS), HOLD, comm=COMM)
    refused("did you mean 'in_block'", lambda: tensor.shuffle("in_blocks", 0))
    refused("cannot cut 23 rows into 24x1 blocks", lambda: tensor.rechunk(ROWS + 1))
    refused("add up to the", lambda: tensor.rechunk([1, 1]))
    refused("single number", lambda: DsTensor(np.array(1.0), 1, comm=COMM))
    refused("single number", lambda: tensor.map(lambda block: block.sum()))
    wide = DsTensor(np.arange(4), [1, 3], COMM)
    refused(
        "cannot join rows of shapes (1,) and (3,)",
        lambda: wide.map(lambda block: block[None]),
    )
    refused(
        "Python objects (object) cannot travel",
        lambda: DsTensor(np.array([{}, {}]), 1, comm=COMM),
    )
    refused("out of bounds", lambda: tensor[ROWS], IndexError)
    refused("out of bounds", lambda: tensor.rows(np.array([0, ROWS])), IndexError)
    refused(
        "expected one comm",
        lambda: DsTensor.concatenate([tensor, DsTensor(np.arange(3))]),
    )
    refused(
        "expected a communicator of scalebench",
        lambda: DsTensor(np.arange(3), comm=WORLD),
    )
    background = (RANK + 1) % SIZE
    refused("is on rank", lambda: tensor.block(background), IndexError)
    # one rank alone gives another input, or fails: all of them end, and say who
    last = SIZE - 1
    refused(
        "rank 0 has", lambda: DsTensor(np.arange(ROWS + (last == RANK)), 2, comm=COMM)
    )
    refused(
        "rank 0 has",
        lambda: DsTensor(
            np.arange(ROWS, dtype="f4" if last == RANK else "i4"), 2, comm=COMM
        ),
    )
    refused("rank 0 has", lambda: tensor.shuffle("global", RANK))
    refused("the ranks do not ask for the same", lambda: tensor.shuffle("global", None))
    refused("rank 0 has", lambda: tensor.rechunk(2 + (last == RANK)))
    refused("out of bounds", lambda: tensor[ROWS if last == RANK else 0], None)

    def breaks(block):
        raise ZeroDivisionError("broken here")

    refused("broken here", lambda: tensor.map(breaks if last == RANK else abs), None)
    same(tensor, DsTensor(np.arange(ROWS), HOLD))  # and go on together afterwards


for blocks in LAYOUTS:
    operations(ARRAYS[0], blocks)
for each in ARRAYS[1:]:
    operations(each, HOLD)
types_of_results()
files(Path(sys.argv[1]))
bad_input()
totals = WORLD.gather(counts)
if RANK == 0:
    assert all(each == counts for each in totals)
    print(json.dumps(counts))
gc.freeze()  # or a search at the end looks through all that torch has made
