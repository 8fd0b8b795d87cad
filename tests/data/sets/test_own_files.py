"""User data: .npz archives and CSV tables."""

import re

import numpy as np
import pytest

from scalebench.data.catalog import prepare
from scalebench.data.dataset import open_dataset
from scalebench.errors import DataError
from scalebench.study.spec import Training


def load(tmp_path, name, **options):
    training = Training.model_validate(
        {"dataset": {name: options}, "data_dir": tmp_path}
    )
    return open_dataset(prepare(training, 1, tmp_path / "cache"))


def test_npz_with_a_test_part_is_used_unchanged(tmp_path):
    x, y = np.arange(12.0).reshape(6, 2), np.arange(18.0).reshape(6, 3)
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    dataset = load(tmp_path, "npz")
    assert (dataset.task, dataset.outputs, dataset.metric_name) == (
        "regression",
        3,
        "r2",
    )
    assert np.array_equal(dataset.x_train, x)
    assert np.array_equal(dataset.y_test, y[:2])


def test_npz_is_standardised_if_told_so_and_large_targets_are_noted(tmp_path):
    x, y = np.linspace(0, 50, 40).reshape(20, 2), np.linspace(100, 1000, 20) + 0.5
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    (note,) = [
        note for note in load(tmp_path, "npz").notes if "standardise: true" in note
    ]
    assert "targets reach 953 " in note, "of the training part"
    scaled = load(tmp_path, "npz", standardise=True)
    for part in (scaled.x_train, scaled.y_train):
        assert np.allclose(
            (part.mean(axis=0), part.std(axis=0)), [[0.0], [1.0]], atol=1e-5
        )
    assert not any("standardise" in note for note in scaled.notes)
    np.savez(tmp_path / "mine.npz", x=x, y=y / 1000)
    assert not any("standardise" in note for note in load(tmp_path, "npz").notes)


def test_npz_without_a_test_part_is_split(tmp_path):
    x, y = np.arange(40).reshape(20, 2), np.arange(20) % 4
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    dataset = load(tmp_path, "npz", test_fraction=0.4)
    assert (dataset.task, dataset.outputs) == ("classification", 4)
    assert np.bincount(dataset.y_test).tolist() == [2, 2, 2, 2]
    rows = np.concatenate([dataset.x_train, dataset.x_test])
    assert np.array_equal(rows[np.argsort(rows[:, 0])], x)
    assert not np.array_equal(
        dataset.x_test, load(tmp_path, "npz", test_fraction=0.4, seed=1).x_test
    )
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
        (
            {"x": X, "y": np.array(list("abab"))},
            r"targets are text, <U1 \(4,\); number the classes",
        ),
        (
            {"x": X, "y": np.zeros((4, 2, 2))},
            r"expects numbers \(N,\) or \(N, columns\)",
        ),
        (
            {"x": X, "y": np.array([0, 1, -1, 0])},
            r"y, row 2 \(counted from 0\): label -1; number the classes",
        ),
        (
            {
                "x_train": X,
                "y_train": np.array([0, 1, 1, 0]),
                "x_test": X,
                "y_test": np.array([0, -1, 1, 0]),
            },
            "y_test, row 1 .* label -1",
        ),
        (
            {"x": X, "y": np.array([0, 99, 10**12, 0])},
            r",001 classes of 4 samples; .* task: regression",
        ),
        (
            {
                "x_train": X,
                "y_train": np.zeros((4, 2)),
                "x_test": X,
                "y_test": np.zeros(4),
            },
            "test part: targets of shape",
        ),
        (
            {
                "x_train": X,
                "y_train": np.zeros(4),
                "x_test": X[:0],
                "y_test": np.zeros(0),
            },
            "test part: no samples",
        ),
        ({"x": X * np.nan, "y": np.zeros(4)}, r"x, row 0 \(counted from 0\) holds NaN"),
        (
            {"x": X * [[1], [1], [1e39], [1]], "y": np.zeros(4)},
            "x, row 2 .* that float32 does not hold",
        ),
        (
            {"x": X, "y": np.array([0.5, 1, 2, np.inf])},
            "y, row 3 .* holds NaN, infinity",
        ),
    ],
)
def test_invalid_npz_is_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load(tmp_path, "npz")


def test_npz_with_objects_or_garbage_is_refused(tmp_path):
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object), y=np.zeros(1))
    with pytest.raises(DataError, match=r"objects\.npz: .*Python objects"):
        load(tmp_path, "npz")
    (tmp_path / "short.npz").write_bytes((tmp_path / "objects.npz").read_bytes()[:50])
    with pytest.raises(
        DataError, match=r"found 2 \(objects\.npz, short\.npz\); .*option file"
    ):
        load(tmp_path, "npz")
    with pytest.raises(DataError, match=r"short\.npz: not a readable \.npz"):
        load(tmp_path, "npz", file="short.npz")
    (tmp_path / "short.npz").write_bytes(bytes(range(200)))
    with pytest.raises(DataError, match=r"short\.npz: not a readable .*no array"):
        load(tmp_path, "npz", file="short.npz")
    with pytest.raises(DataError, match=r"missing other\.npz"):
        load(tmp_path, "npz", file="other.npz")


def write_csv(tmp_path, lines, name="table.csv"):
    (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8-sig")


def test_csv_with_named_classes(tmp_path):
    rows = [f"{size},{size * 2},{'small' if size < 5 else 'big'}" for size in range(10)]
    write_csv(tmp_path, ["width, height ,kind", *rows, ""])
    dataset = load(tmp_path, "csv", target="kind")
    assert (dataset.task, dataset.outputs, dataset.input_shape) == (
        "classification",
        2,
        (2,),
    )
    assert dataset.n_test == 2
    assert np.abs(dataset.x_train.mean(axis=0)).max() < 1e-6  # float32 rounding
    plain = load(tmp_path, "csv", target="kind", standardise=False)
    # `big` sorts before `small`
    assert np.array_equal(plain.y_train == 0, plain.x_train[:, 0] >= 5)


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
    assert (
        load(tmp_path, "csv", task="regression", standardise=False).y_train.max() == 10
    )


GOOD = ["1,2,0", "3,4,1", "5,6,0", "7,8,1"]


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (["a,b,y", *GOOD[:3], "7,x,1"], {}, r"line 5, b: 'x' is not a number"),
        (["a,b,y", *GOOD[:3], "7,,1"], {}, r"line 5, b: '' is not a number"),
        (["a,b,y", *GOOD[:3], "7,1"], {}, "line 5: 2 cells, expected 3"),
        (
            ["a,b,y", *GOOD],
            {"target": "z"},
            r"no column 'z' for the target; known: a, b, y",
        ),
        (["a,b,y", *GOOD], {"target": 3}, "no column 3 .* columns 0 to 2"),
        (["a,b,y", *GOOD[:3], "7,8,"], {}, "line 5, y: '' is no target"),
        (["a,b,y", *GOOD[:3], "7,nan,1"], {}, "line 5, b: 'nan' is not a number"),
        (["a,b,y", *GOOD[:3], "7,1e39,1"], {}, "line 5, b: '1e39' is not a number"),
        (["a,b,y", *GOOD[:3], "7,8,NA"], {}, "line 5, y: 'NA' is no target"),
        (["a,b,y", '1,"2\n",0', *GOOD[:2], "7,x,1"], {}, "line 6, b: 'x'"),
        (
            GOOD,
            {},
            r"line 1: numbers only, so no header; give the option header: false \(--set dataset.header=false",
        ),
        (
            ["a,b,a,y", "1,2,3,0", "1,2,3,1"],
            {},
            r"line 1: 'a' names the columns 0 and 2",
        ),
        (
            ["a;b;y", "1,5;2;0", "1;2;1"],
            {},
            r"line 1: one column; .* give the option delimiter: ';'",
        ),
        (
            ["a\tb\ty", "1\t2\t0", "1\t2\t1"],
            {},
            r'one column; .* give the option delimiter: "\\t"',
        ),
        (
            ["a;b;y", "1,5;2;0", "1;2;1"],
            {"delimiter": ";"},
            r"line 2, a: '1,5' .* give the option decimal: ','",
        ),
        (["a,b,y", *GOOD], {"decimal": ","}, "decimal and delimiter are both ','"),
        (
            ["a,b,y,", *(f"{line}," for line in GOOD)],
            {},
            "column 3, the target, has no name",
        ),
        (
            ["a,b,y", "1,2,1", "1,2,1.0", "1,2,u", "1,2,u"],
            {},
            "line 3, y: the label '1.0' is '1' in other rows",
        ),
        (["a,b,y", GOOD[0]], {}, "at least two samples"),
        (["a", "1", "2"], {}, "one column"),
        (
            ["a,b,y", "1,2,0", "3,4,1", "5,6,2", "7,8,3"],
            {},
            "4 classes in 4 samples; .*task: regression",
        ),
        (["a,b,y", *GOOD[:3], '7,"8,1'], {}, "line 5: not readable as CSV"),
        (
            ["a,b,y", "1,2,u", "3,4,v", "5,6,u"],
            {"task": "regression"},
            "'u' is not a number",
        ),
    ],
)
def test_invalid_csv_is_refused(tmp_path, lines, options, message):
    write_csv(tmp_path, lines)
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path, "csv", **options)
    assert "\n" not in str(caught.value)


def test_equal_numbers_are_one_class(tmp_path):
    write_csv(
        tmp_path,
        ["a,y", *(f"{row},{('0', '1', '0.0', '1e0')[row % 4]}" for row in range(16))],
    )
    dataset = load(tmp_path, "csv", standardise=False)
    assert dataset.outputs == 2
    assert np.array_equal(dataset.y_train, dataset.x_train[:, 0] % 2)


def test_unnamed_columns_are_no_features(tmp_path):
    for name in ("", "Unnamed: 0"):
        write_csv(
            tmp_path,
            [f"{name},a,y", *(f"{row},{row % 3},{row % 2}" for row in range(12))],
        )
        dataset = load(tmp_path, "csv")
        assert dataset.input_shape == (1,)
        assert re.match(r"table\.csv: column 0 .*no name", dataset.notes[0])
    write_csv(
        tmp_path, ["id,a,y", *(f"{row},{row % 3},{row % 2}" for row in range(12))]
    )
    assert load(tmp_path, "csv").input_shape == (2,)


def test_numbered_columns_are_a_header_unless_it_is_said(tmp_path):
    write_csv(tmp_path, ["0,1", *(f"{row / 2},{row % 2}" for row in range(9))])
    found = [
        load(tmp_path, "csv", **options)
        for options in ({}, {"header": True}, {"header": False})
    ]
    assert [dataset.n_train + dataset.n_test for dataset in found] == [9, 9, 10]


def test_decimal_commas(tmp_path):
    write_csv(tmp_path, ["a;y", *(f"{row},5;{row},25" for row in range(8))])
    dataset = load(tmp_path, "csv", delimiter=";", decimal=",", standardise=False)
    assert dataset.task == "regression"
    assert np.array_equal(dataset.x_train, dataset.y_train + 0.25)


def test_whole_numbers_in_floats_are_classes(tmp_path):
    x, y = np.arange(24.0).reshape(12, 2), np.arange(12) % 3
    np.savez(tmp_path / "mine.npz", x=x, y=y.astype(np.float64))
    dataset = load(tmp_path, "npz")
    assert (dataset.task, dataset.outputs) == ("classification", 3)
    (note,) = dataset.notes
    assert re.match(r"mine\.npz: .*float64, .*3 classes; .*task: regression", note)
    assert load(tmp_path, "npz", task="regression").task == "regression"
    assert not load(tmp_path, "npz", task="regression").notes
    np.savez(tmp_path / "mine.npz", x=x, y=y + 0.5)
    assert load(tmp_path, "npz").task == "regression"


def test_empty_classes_and_test_samples_of_the_training_part_are_noted(tmp_path):
    x, y = np.arange(16.0).reshape(8, 2), np.array([0, 1, 0, 1, 0, 1, 5, 5])
    np.savez(
        tmp_path / "mine.npz",
        x_train=x,
        y_train=y,
        x_test=np.where(x[4:] == 14, 0.5, x[4:]),
        y_test=[0, 1, 5, 3],
    )
    empty, shared = load(tmp_path, "npz").notes
    assert re.match(
        r"3 of 6 classes \(2, 3, 4\) .*no training sample, .*1 of these .*without gaps",
        empty,
    )
    assert re.match(r"3 of 4 test samples are training samples", shared)


def test_raw_bytes_of_images_are_noted(tmp_path):
    x = (
        np.full((10, 4, 4), 159, dtype=np.uint8)
        - np.arange(10, dtype=np.uint8)[:, None, None]
    )
    x[:, 0] = 159
    np.savez(tmp_path / "mine.npz", x=x, y=np.arange(10) % 2)
    (note,) = load(tmp_path, "npz").notes
    assert re.search(r"uint8 up to 159, .*divide by 255", note)


@pytest.mark.parametrize("dtype", [np.int64, np.float32, bool])
def test_one_hot_targets_are_refused_unless_they_are_values(tmp_path, dtype):
    np.savez(
        tmp_path / "mine.npz",
        x=np.arange(24.0).reshape(12, 2),
        y=np.eye(3)[np.arange(12) % 3].astype(dtype),
    )
    with pytest.raises(
        DataError, match=r"one-hot \(12, 3\); .*y\.argmax\(axis=1\), .*task: regression"
    ):
        load(tmp_path, "npz")
    assert load(tmp_path, "npz", task="regression").outputs == 3


def test_a_column_of_class_numbers_is_refused_unless_they_are_values(tmp_path):
    np.savez(
        tmp_path / "mine.npz",
        x=np.arange(24.0).reshape(12, 2),
        y=(np.arange(12) % 3)[:, None],
    )
    with pytest.raises(
        DataError, match=r"whole numbers \(12, 1\); .*y\[:, 0\], .*task: regression"
    ):
        load(tmp_path, "npz")
    assert load(tmp_path, "npz", task="regression").outputs == 1


def test_data_larger_than_memory_are_refused_before_they_are_read(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("scalebench.data.files.usable_memory_mib", lambda: 1)
    np.savez_compressed(
        tmp_path / "mine.npz", x=np.zeros((100_000, 2)), y=np.zeros(100_000)
    )
    with pytest.raises(DataError, match=r"mine\.npz: .* [\d.]+ MiB of memory"):
        load(tmp_path, "npz")
    with (tmp_path / "huge.csv").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError, match=r"huge\.csv: .* 12\.0 TiB of memory"):
        load(tmp_path, "csv")


def test_a_device_is_no_file_of_data(tmp_path):
    """It may have no end: a link to /dev/zero was read up to a gibibyte."""
    (tmp_path / "table.csv").symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"table\.csv is no regular file"):
        load(tmp_path, "csv")


def test_binary_csv_is_refused(tmp_path):
    (tmp_path / "table.csv").write_bytes(b"a,y\n\xff\xfe,1\n")
    with pytest.raises(DataError, match="expected UTF-8 text"):
        load(tmp_path, "csv")
    (tmp_path / "table.csv").unlink()
    with pytest.raises(DataError, match=r"one \.csv file .*found 0"):
        load(tmp_path, "csv")
