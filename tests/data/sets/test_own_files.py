"""User data: .npz archives and CSV tables."""

import numpy as np
import pytest

from scalebench.data.catalog import open_dataset, prepare
from scalebench.errors import DataError
from scalebench.study.spec import Training


def load(tmp_path, name, **options):
    training = Training.model_validate({"dataset": {name: options}, "data_dir": tmp_path})
    return open_dataset(prepare(training, 1, tmp_path / "cache"))


def test_npz_with_a_test_part_is_used_unchanged(tmp_path):
    x, y = np.arange(12.0).reshape(6, 2), np.arange(18.0).reshape(6, 3)
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    dataset = load(tmp_path, "npz")
    assert (dataset.task, dataset.outputs, dataset.metric_name) == ("regression", 3, "r2")
    assert np.array_equal(dataset.x_train, x)
    assert np.array_equal(dataset.y_test, y[:2])


def test_npz_without_a_test_part_is_split(tmp_path):
    x, y = np.arange(40).reshape(20, 2), np.arange(20) % 4
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    dataset = load(tmp_path, "npz", test_fraction=0.4)
    assert (dataset.task, dataset.outputs) == ("classification", 4)
    assert np.bincount(dataset.y_test).tolist() == [2, 2, 2, 2]
    rows = np.concatenate([dataset.x_train, dataset.x_test])
    assert np.array_equal(rows[np.argsort(rows[:, 0])], x)
    assert not np.array_equal(dataset.x_test, load(tmp_path, "npz", test_fraction=0.4, seed=1).x_test)
    regression = load(tmp_path, "npz", task="regression")
    assert regression.y_train.shape == (16, 1)


X = np.ones((4, 2))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "holds x; expected x_train, y_train, x_test and y_test, or x and y"),
        ({"x": X, "y": np.zeros(3)}, "as many targets as samples"),
        ({"x": X[:, 0], "y": np.zeros(4)}, "two or more dimensions"),
        ({"x": np.full((4, 2), "a"), "y": np.zeros(4)}, "features are <U1"),
        ({"x": X, "y": np.array(list("abab"))}, "targets are <U1"),
        ({"x": X, "y": np.zeros((4, 2, 2))}, r"expects numbers \(N,\) or \(N, columns\)"),
        ({"x": X, "y": np.array([0, 1, -1, 0])}, "has label -1"),
        (
            {"x": X, "y": np.array([0, 99, 10**12, 0])},
            r",001 classes of 4 samples; .* task: regression",
        ),
        (
            {"x_train": X, "y_train": np.zeros((4, 2)), "x_test": X, "y_test": np.zeros(4)},
            "test part: targets of shape",
        ),
        ({"x_train": X, "y_train": np.zeros(4), "x_test": X[:0], "y_test": np.zeros(0)}, "test part: no samples"),
        ({"x": X * np.nan, "y": np.zeros(4)}, "NaN or infinity"),
    ],
)
def test_invalid_npz_is_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load(tmp_path, "npz")


def test_npz_with_objects_or_garbage_is_refused(tmp_path):
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object), y=np.zeros(1))
    with pytest.raises(DataError, match=r"objects\.npz: not a readable \.npz archive \(it holds Python objects"):
        load(tmp_path, "npz")
    (tmp_path / "short.npz").write_bytes((tmp_path / "objects.npz").read_bytes()[:50])
    with pytest.raises(DataError, match=r"found 2 \(objects\.npz, short\.npz\); say which with the option file"):
        load(tmp_path, "npz")
    with pytest.raises(DataError, match=r"short\.npz: not a readable \.npz"):
        load(tmp_path, "npz", file="short.npz")
    (tmp_path / "short.npz").write_bytes(bytes(range(200)))
    with pytest.raises(DataError, match=r"short\.npz: not a readable .*that is no array of numbers\)$"):
        load(tmp_path, "npz", file="short.npz")
    with pytest.raises(DataError, match=r"missing other\.npz"):
        load(tmp_path, "npz", file="other.npz")


def write_csv(tmp_path, lines, name="table.csv"):
    (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8-sig")


def test_csv_with_named_classes(tmp_path):
    rows = [f"{size},{size * 2},{'small' if size < 5 else 'big'}" for size in range(10)]
    write_csv(tmp_path, ["width, height ,kind", *rows, ""])
    dataset = load(tmp_path, "csv", target="kind")
    assert (dataset.task, dataset.outputs, dataset.input_shape) == ("classification", 2, (2,))
    assert dataset.n_test == 2
    assert np.abs(dataset.x_train.mean(axis=0)).max() < 1e-6  # float32 rounding
    plain = load(tmp_path, "csv", target="kind", standardise=False)
    assert np.array_equal(plain.y_train == 0, plain.x_train[:, 0] >= 5)  # `big` sorts before `small`


def test_csv_of_values(tmp_path):
    write_csv(tmp_path, [f"{row + 0.5};{row};{row * row}" for row in range(10)])
    options = {"header": False, "delimiter": ";", "target": 0}
    dataset = load(tmp_path, "csv", **options)
    assert (dataset.task, dataset.y_train.shape) == ("regression", (8, 1))
    assert abs(dataset.y_train.mean()) < 1e-6
    plain = load(tmp_path, "csv", **options, standardise=False)
    assert np.array_equal(plain.x_train[:, :1], plain.y_train - 0.5)
    assert plain.x_train.dtype == plain.y_train.dtype == np.float32


def test_whole_numbers_are_classes_in_numeric_order(tmp_path):
    write_csv(tmp_path, ["a,y", *(f"{row},{(2, 10)[row % 2]}" for row in range(8))])
    dataset = load(tmp_path, "csv", standardise=False)
    assert np.array_equal(dataset.y_train, dataset.x_train[:, 0] % 2)
    assert load(tmp_path, "csv", task="regression", standardise=False).y_train.max() == 10


GOOD = ["1,2,0", "3,4,1", "5,6,0", "7,8,1"]


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (["a,b,y", *GOOD[:3], "7,x,1"], {}, r"line 5, b: 'x' is not a number"),
        (["a,b,y", *GOOD[:3], "7,,1"], {}, r"line 5, b: '' is not a number"),
        (["a,b,y", *GOOD[:3], "7,1"], {}, "line 5: 2 cells, expected 3"),
        (["a,b,y", *GOOD], {"target": "z"}, r"no column 'z' for the target; known: a, b, y"),
        (["a,b,y", *GOOD], {"target": 3}, "no column 3 .* columns 0 to 2"),
        (["a,b,y", *GOOD[:3], "7,8,"], {}, "sample 3 .* has no target"),
        (["a,b,y", *GOOD[:3], "7,nan,1"], {}, "NaN or infinity"),
        (["a,b,y", GOOD[0]], {}, "at least two samples"),
        (["a", "1", "2"], {}, "one column"),
        (["a,b,y", "1,2,0", "3,4,1", "5,6,2", "7,8,3"], {}, "4 classes in 4 samples; .*task: regression"),
        (["a,b,y", *GOOD[:3], '7,"8,1'], {}, "not a readable CSV"),
        (["a,b,y", "1,2,u", "3,4,v", "5,6,u"], {"task": "regression"}, "'u' is not a number"),
    ],
)
def test_invalid_csv_is_refused(tmp_path, lines, options, message):
    write_csv(tmp_path, lines)
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path, "csv", **options)
    assert "\n" not in str(caught.value)


def test_binary_csv_is_refused(tmp_path):
    (tmp_path / "table.csv").write_bytes(b"a,y\n\xff\xfe,1\n")
    with pytest.raises(DataError, match="expected UTF-8 text"):
        load(tmp_path, "csv")
    (tmp_path / "table.csv").unlink()
    with pytest.raises(DataError, match=r"expected one \.csv file .* found 0 \(none\)"):
        load(tmp_path, "csv")
