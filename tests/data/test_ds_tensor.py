"""The ds-tensor holds every row once, in blocks that differ by at most one."""

import sys
import tracemalloc

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.data.ds_tensor import DsTensor
from scalebench.data.layout import SHUFFLES, cut
from scalebench.errors import DataError
from tests.facts import naming, together


@given(length=st.integers(0, 10_000), parts=st.integers(1, 300))
def test_cut_is_complete_and_even(length, parts):
    sizes = cut(length, parts)
    assert sizes.sum() == length
    assert sizes.max() - sizes.min() <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@pytest.mark.parametrize("shape", [(10,), (10, 1), (10, 3), (10, 2, 4)])
def test_blocks_keep_the_remainder_whatever_the_columns(shape):
    array = np.arange(np.prod(shape)).reshape(shape)
    tensor = DsTensor.from_array(array, 4)
    assert tensor.shape == shape
    assert tensor.n_blocks == 4
    assert tensor.block_sizes.tolist() == [3, 3, 2, 2]
    assert np.array_equal(np.concatenate(list(tensor)), array)
    assert np.array_equal(tensor.block(1), array[3:6])
    assert np.array_equal(tensor.collect(), array)


@given(rows=st.integers(1, 4), columns=st.integers(1, 4), extra=st.integers(0, 9))
def test_grid_is_row_major_and_has_every_row_once(rows, columns, extra):
    array = np.arange(rows * columns + extra)
    tensor = DsTensor(array, (rows, columns))
    assert tensor.n_blocks == rows * columns
    grid = [tensor.block(i, j) for i in range(rows) for j in range(columns)]
    assert np.array_equal(np.concatenate(grid), array)
    assert np.array_equal(
        tensor.block(rows - 1, columns - 1), tensor.block(rows * columns - 1)
    )


def test_npy_blocks_are_views_of_the_file(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(20.0).reshape(10, 2))
    tensor = DsTensor.from_npy(tmp_path / "x.npy", 3)
    block = tensor.block(2)
    assert isinstance(block, np.memmap)
    assert np.shares_memory(block, tensor.array)
    wanted = np.array([7, 0, 7, 3])
    assert np.array_equal(tensor.rows(wanted), np.arange(20.0).reshape(10, 2)[wanted])


def test_npz_reads_the_named_array(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(6), y=np.zeros(3))
    assert DsTensor.from_npz(tmp_path / "a.npz", "x", [1, 5]).block(1).tolist() == [
        1,
        2,
        3,
        4,
        5,
    ]
    with pytest.raises(DataError, match="no array 'z'; it holds x, y"):
        DsTensor.from_npz(tmp_path / "a.npz", "z")


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (4, "cannot cut 3 rows into 4x1 blocks"),
        (0, "cannot cut 3 rows into 0x1 blocks"),
        ([1, 1], "add up to the 3 rows"),
        ([4, -1], "sizes of blocks are 0 or more"),
        ([2**62, 2**62, 2**62, 2**62 + 3], "add up to the 3 rows"),
    ],
)
def test_impossible_blocks_are_refused(blocks, message):
    with pytest.raises(DataError, match=message):
        DsTensor(np.zeros(3), blocks)
    with pytest.raises(DataError, match=message):
        DsTensor(np.zeros(3)).rechunk(blocks)


@pytest.mark.parametrize(
    ("blocks", "got"),
    [
        ((2, 2, 2), "(2, 2, 2)"),
        ((3,), "(3,)"),
        ((True, 1), "(True, 1)"),
        ((1, 2.0), "(1, 2.0)"),
        (2.5, "2.5"),
        ("3", "'3'"),
        (True, "True"),
        (np.array(3), "array(3)"),
        ([[1, 2]], "[[1, 2]]"),
        ([[1], [2, 3]], "[[1], [2, 3]]"),
        ([1.5, 1.5], "[1.5, 1.5]"),
        (["1", 2], "['1', 2]"),
        ([], "[]"),
        (np.ones((1, 3), dtype=int), "array([[1, 1, 1]])"),
    ],
)
def test_invalid_blocks_error_names_valid_forms(blocks, got):
    for act in (
        lambda: DsTensor(np.zeros(3), blocks),
        lambda: DsTensor(np.zeros(3)).rechunk(blocks),
    ):
        with pytest.raises(DataError) as raised:
            act()
        assert together(
            str(raised.value), "blocks", "count", "grid", "list of sizes", f"got {got}"
        )


def test_empty_tensor_needs_explicit_sizes():
    for blocks in (None, 1, (1, 1)):
        with pytest.raises(
            DataError, match=r"^cannot cut 0 rows into 1x1 blocks; .* a list of sizes"
        ):
            DsTensor(np.zeros((0, 3)), blocks)
    assert [block.shape for block in DsTensor(np.zeros((0, 3)), [0, 0])] == [
        (0, 3),
        (0, 3),
    ]


def test_array_likes_are_accepted():
    tensor = DsTensor([[1, 2], [3, 4], [5, 6]], 2)
    assert [block.tolist() for block in tensor] == [[[1, 2], [3, 4]], [[5, 6]]]
    with pytest.raises(DataError, match="a ds-tensor needs an array, got a list: "):
        DsTensor([[1], [2, 3]], 1)


def test_unreadable_file_is_a_one_line_error(tmp_path):
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY junk")
    (tmp_path / "x.npz").write_bytes(b"PK junk")
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    for name in ("x.npy", "object.npy", "missing.npy"):
        with pytest.raises(DataError, match=rf"{name}: not a readable \.npy"):
            DsTensor.from_npy(tmp_path / name)
    with pytest.raises(DataError, match=r"x\.npz: not a readable \.npz"):
        DsTensor.from_npz(tmp_path / "x.npz", "x")
    with pytest.raises(IndexError):
        DsTensor(np.zeros(3), 3).block(3)
    with pytest.raises(IndexError):
        DsTensor(np.zeros(4), (2, 2)).block(0, 2)
    with pytest.raises(DataError, match="first axis"):
        DsTensor(np.array(1.0))


# --- operations on whole tensors -------------------------------------------------------------------------------------


def test_indexing_is_that_of_the_array():
    array = np.arange(24).reshape(8, 3)
    tensor = DsTensor(array, 3)
    assert tensor.block_shape == (3, 3)
    assert tensor[5].tolist() == array[5].tolist()
    assert np.shares_memory(tensor[2:7], array)
    for index in (
        slice(1, 8, 2),
        np.array([4, 1, 4]),
        array[:, 0] > 9,
        (slice(5, None), 0),
        (3, 2),
        -1,
    ):
        assert np.array_equal(tensor[index], array[index])
    with pytest.raises(IndexError):
        tensor[8]


def test_map_applies_to_blocks_and_may_change_their_shape():
    tensor = DsTensor(np.arange(10.0), [5, 3, 2])
    sums = tensor.map(lambda block: block.sum(keepdims=True))
    assert sums.collect().tolist() == [10.0, 18.0, 17.0]
    assert sums.block_sizes.tolist() == [1, 1, 1]
    pairs = tensor.map(lambda block: np.stack([block, -block], 1))
    assert (pairs.shape, pairs.block_sizes.tolist()) == ((10, 2), [5, 3, 2])
    with pytest.raises(DataError, match="first axis"):
        tensor.map(lambda block: block.sum())
    with pytest.raises(
        DataError, match=r"cannot join rows of shapes \(2,\) and \(3,\) and \(5,\)"
    ):
        tensor.map(lambda block: block[None])


@given(rows=st.integers(1, 4), columns=st.integers(1, 4), how=st.sampled_from(SHUFFLES))
def test_operations_on_blocks_keep_the_grid(rows, columns, how):
    tensor = DsTensor(np.arange(rows * columns * 2 + 1), (rows, columns))
    doubled = tensor.map(lambda block: 2 * block)
    assert doubled.grid == tensor.shuffle(how, 1).grid == (rows, columns)
    assert np.array_equal(
        doubled.block(rows - 1, columns - 1), 2 * tensor.block(rows - 1, columns - 1)
    )
    below = DsTensor.concatenate([tensor, doubled])
    assert below.grid == (2 * rows, columns)
    assert np.array_equal(below.block(rows, 0), doubled.block(0, 0))
    beside = DsTensor.concatenate([tensor, DsTensor(np.arange(20), (2, columns + 1))])
    assert beside.grid == (rows * columns + 2 * (columns + 1), 1)
    assert tensor.grid == (rows, columns)


def test_rechunk_shares_the_rows():
    tensor = DsTensor(np.arange(10), 4)
    again = tensor.rechunk((2, 3))
    assert again.block_sizes.tolist() == [2, 2, 2, 2, 1, 1]
    assert again.grid == (2, 3)
    assert np.shares_memory(again.array, tensor.array)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    how=st.sampled_from(SHUFFLES),
    seed=st.integers(0, 4),
)
def test_shuffle_keeps_rows_and_moves_by_its_rule(sizes, how, seed):
    array = np.arange(sum(sizes) * 2).reshape(-1, 2)
    tensor = DsTensor(array.copy(), sizes)
    mixed = tensor.shuffle(how, seed)
    assert np.array_equal(mixed.shuffle("none", 0).collect(), mixed.collect())
    assert np.array_equal(mixed.collect()[np.argsort(mixed[:, 0])], array)
    assert np.array_equal(tensor.collect(), array)
    assert np.array_equal(tensor.shuffle(how, seed).collect(), mixed.collect())
    before = [set(block[:, 0].tolist()) for block in tensor]
    after = [set(block[:, 0].tolist()) for block in mixed]
    if how in ("none", "in_block"):
        assert before == after
    if how == "rotate_blocks":
        assert sorted(map(sorted, before)) == sorted(map(sorted, after))
    else:
        assert mixed.block_sizes.tolist() == sizes


@pytest.mark.parametrize("how", ["in_block", "rotate_blocks", "pairwise", "global"])
def test_shuffles_do_shuffle_and_depend_on_the_seed(how):
    tensor = DsTensor(np.arange(60), 6)
    found = {tuple(tensor.shuffle(how, seed).collect().tolist()) for seed in range(4)}
    assert len(found) == 4
    assert tuple(range(60)) not in found
    with pytest.raises(DataError, match="did you mean 'in_block'"):
        tensor.shuffle("in_blocks", 0)


def test_concatenate_joins_rows_and_blocks():
    joined = DsTensor.concatenate(
        [DsTensor(np.arange(5), 2), DsTensor(np.arange(5, 9), [1, 3])]
    )
    assert joined.collect().tolist() == list(range(9))
    assert joined.block_sizes.tolist() == [3, 2, 1, 3]
    with pytest.raises(DataError, match="expected one shape"):
        DsTensor.concatenate([])


def test_hdf5_contiguous_data_are_mapped_and_packed_ones_read(tmp_path):
    array = np.random.default_rng(0).standard_normal((20, 3)).astype(">f4")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["plain"] = array
        file.create_dataset(
            "group/packed", data=array, chunks=(5, 3), compression="gzip"
        )
        file["empty"] = np.empty((0, 3))
        file["words"] = ["a", "b"]
    plain = DsTensor.from_hdf5(tmp_path / "x.h5", "plain", 3)
    assert isinstance(plain.block(1), np.memmap)
    assert np.array_equal(plain.collect(), array)
    wanted = np.array([7, 0, 7, 3])
    assert np.array_equal(plain.rows(wanted), array[wanted])
    packed = DsTensor.from_hdf5(tmp_path / "x.h5", "group/packed", [12, 8])
    assert not isinstance(packed.array, np.memmap)
    assert np.array_equal(packed.block(1), array[12:])
    assert DsTensor.from_hdf5(tmp_path / "x.h5", "empty", [0]).shape == (0, 3)
    assert DsTensor.from_hdf5(tmp_path / "x.h5", "words").shape == (2,)
    with pytest.raises(
        DataError,
        match=naming("'plane'", "empty, group/packed, plain, words"),
    ):
        DsTensor.from_hdf5(tmp_path / "x.h5", "plane")
    with pytest.raises(DataError, match="no data set 'group'"):
        DsTensor.from_hdf5(tmp_path / "x.h5", "group")
    (tmp_path / "junk.h5").write_bytes(b"junk")
    for name in ("junk.h5", "missing.h5"):
        with pytest.raises(DataError, match=rf"{name}: not a readable HDF5 file"):
            DsTensor.from_hdf5(tmp_path / name, "x")


def test_hdf5_without_h5py_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(
        DataError, match=r"need h5py; install it with pip install 'scalebench\[hdf5\]'"
    ):
        DsTensor.from_hdf5(tmp_path / "x.h5", "x")


def test_rows_of_a_file_are_in_memory_once(tmp_path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).random((40_000, 16)))
    tensor = DsTensor(np.load(tmp_path / "rows.npy", mmap_mode="r"))
    wanted = np.random.default_rng(1).permutation(40_000)
    tracemalloc.start()
    try:
        found = tensor.rows(wanted)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(found, np.asarray(tensor.array)[wanted])
    assert peak < 1.6 * found.nbytes
