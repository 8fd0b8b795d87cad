"""The ds-tensor keeps every row, once, in blocks that differ by at most one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.data.tensor import DsTensor, cut
from scalebench.errors import DataError


@given(length=st.integers(0, 10_000), parts=st.integers(1, 300))
def test_cut_loses_nothing_and_is_even(length, parts):
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
def test_a_grid_of_blocks_is_row_major_and_neither_repeats_nor_loses_rows(rows, columns, extra):
    array = np.arange(rows * columns + extra)
    tensor = DsTensor(array, (rows, columns))
    assert tensor.n_blocks == rows * columns
    grid = [tensor.block(i, j) for i in range(rows) for j in range(columns)]
    assert np.array_equal(np.concatenate(grid), array)
    assert np.array_equal(tensor.block(rows - 1, columns - 1), tensor.block(rows * columns - 1))


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
    assert DsTensor.from_npz(tmp_path / "a.npz", "x", [1, 5]).block(1).tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(DataError, match="no array 'z'; it holds x, y"):
        DsTensor.from_npz(tmp_path / "a.npz", "z")


@pytest.mark.parametrize(
    ("blocks", "message"),
    [(4, "4 blocks but 3 samples"), (0, "at least one"), ([1, 1], "add up to 2"), ([4, -1], "add up to 3")],
)
def test_impossible_blocks_are_refused(blocks, message):
    with pytest.raises(DataError, match=message):
        DsTensor(np.zeros(3), blocks)


def test_unreadable_files_are_one_line(tmp_path):
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
