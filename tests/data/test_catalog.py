"""Data sets are built once and cached; damage is a one-line error."""

import json
import os
import stat
import subprocess
import sys

import numpy as np
import pytest

from scalebench.data.builder import DATASETS, Arrays, DatasetBuilder, check
from scalebench.data.catalog import prepare
from scalebench.data.dataset import ARRAY_NAMES, open_dataset
from scalebench.errors import DataError
from scalebench.study.spec import Training
from scalebench.system.file_access import cache_folder


def training(dataset, **options):
    return Training.model_validate({"dataset": dataset, **options})


def load(tmp_path, dataset, workers=1, **options):
    return open_dataset(
        prepare(training(dataset, **options), workers, tmp_path / "cache")
    )


def test_every_data_set_has_a_name_and_a_summary():
    assert set(DATASETS.names()) >= {
        "digits", "digits_shifted", "breast_cancer", "wine", "diabetes", "synthetic",
        "mnist", "cifar10", "cifar100", "cinic10", "csv", "npz",
    }  # fmt: skip
    assert all(summary and "\n" not in summary for _, summary in DATASETS.describe())


def test_registering_a_name_twice_is_refused():
    with pytest.raises(ValueError, match="'digits' is registered twice"):
        DATASETS.add(
            type(
                "Copy",
                (DatasetBuilder,),
                {"name": "digits", "summary": "", "__module__": __name__},
            )
        )


def test_listing_imports_neither_torch_nor_sklearn():
    code = (
        "import sys, scalebench.data.catalog, scalebench.data.batch_plan, scalebench.models.registry as m\n"
        "from scalebench.data.builder import DATASETS\n"
        "DATASETS.describe(); m.describe_models()\n"
        "print(sorted({'torch', 'sklearn', 'PIL', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_second_preparation_uses_the_cache(tmp_path):
    first = prepare(training("digits"), 1, tmp_path)
    written = (first / "x_train.npy").stat().st_mtime_ns
    assert prepare(training("digits"), 64, tmp_path) == first
    assert (first / "x_train.npy").stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_arrays_are_memory_mapped_and_named(tmp_path):
    dataset = load(tmp_path, "digits")
    assert isinstance(dataset.x_train, np.memmap)
    assert (dataset.name, dataset.task, dataset.outputs) == (
        "digits",
        "classification",
        10,
    )
    assert (dataset.n_train, dataset.n_test, dataset.input_shape) == (1437, 360, (64,))
    assert dataset.metric_name == "accuracy"
    assert len(dataset.sha256) == 64
    assert stat.S_IMODE(dataset.folder.stat().st_mode) & 0o555 == 0o555


def test_checksum_covers_the_content(tmp_path):
    small = {"synthetic": {"n_train": 40, "n_test": 8}}
    sums = {load(tmp_path / str(copy), small).sha256 for copy in range(2)}
    assert len(sums) == 1
    assert (
        load(tmp_path, {"synthetic": {"n_train": 40, "n_test": 8, "seed": 1}}).sha256
        not in sums
    )


@pytest.mark.parametrize(
    "damage", ["shorten", "remove", "reshape", "meta", "no_meta", "format"]
)
def test_a_damaged_cache_is_refused_and_rebuilt(tmp_path, damage):
    wine = training("wine")
    folder = prepare(wine, 1, tmp_path)
    path, meta = folder / "x_train.npy", folder / "meta.json"
    whole = open_dataset(folder).sha256
    if damage == "shorten":
        path.write_bytes(path.read_bytes()[:-4])
    elif damage == "remove":
        path.unlink()
    elif damage == "reshape":
        np.save(path, np.zeros((3, 13), np.float32))
    elif damage == "meta":
        meta.write_text("{")
    elif damage == "no_meta":
        meta.unlink()
    else:
        meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": 99}))
    with pytest.raises(DataError, match=str(folder)) as caught:
        open_dataset(folder)
    assert "\n" not in str(caught.value)
    assert prepare(wine, 1, tmp_path) == folder
    assert open_dataset(folder).sha256 == whole
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_concurrent_processes_prepare_one_data_set(tmp_path):
    code = (
        "import sys; from pathlib import Path; from scalebench.data.catalog import prepare\n"
        "from scalebench.study.spec import Training\n"
        "print(prepare(Training(dataset='digits_shifted'), 1, Path(sys.argv[1])))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    folders = [process.communicate()[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len(set(folders)) == 1
    assert [str(path) for path in tmp_path.iterdir()] == folders[:1]
    assert open_dataset(tmp_path / folders[0]).n_train == 7185


def test_failed_build_leaves_no_files(tmp_path):
    np.savez(tmp_path / "bad.npz", x=np.full((10, 2), np.nan), y=np.zeros(10))
    with pytest.raises(DataError, match="holds NaN"):
        load(tmp_path, "npz", data_dir=tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []


def test_unwritable_cache_is_a_one_line_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be cached in .*set XDG_CACHE_HOME"):
        prepare(training("wine"), 1, tmp_path / "file" / "cache")


def test_default_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("datasets") == tmp_path / "scalebench" / "datasets"
    assert prepare(training("wine"), 1).parent == cache_folder("datasets")


def test_changed_file_rebuilds_the_cache(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, x=np.ones((10, 2)), y=np.arange(10) % 2)
    assert load(tmp_path, "npz", data_dir=tmp_path).x_train.max() == 1
    np.savez(path, x=np.full((10, 2), 3.0), y=np.arange(10) % 2)
    os.utime(path, ns=(1, 1))
    assert load(tmp_path, "npz", data_dir=tmp_path).x_train.max() == 3


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("digit", "unknown data set 'digit'; did you mean 'digits'"),
        (
            {"digits": {"size": 3}},
            "data set digits: unknown option 'size'; it takes no options",
        ),
        (
            {"synthetic": {"ntrain": 3}},
            "unknown option 'ntrain'; did you mean 'n_train'",
        ),
        (
            {"synthetic": {"n_train": 0}},
            "option 'n_train': expected a number greater than 0, got 0",
        ),
        (
            {"synthetic": {"kind": "images", "shape": [3, 3]}},
            r"shape of images is \[channels, height, width\]",
        ),
        ({"synthetic": {"classes": 1}}, "classes must be at least 2"),
    ],
)
def test_unknown_names_and_options(tmp_path, dataset, message):
    with pytest.raises(DataError, match=message):
        load(tmp_path, dataset)


def test_weak_scaling_multiplies_samples(tmp_path):
    four = load(
        tmp_path,
        {"synthetic": {"n_train": 1100, "n_test": 10}},
        workers=4,
        scaling="weak",
    )
    one = load(
        tmp_path,
        {"synthetic": {"n_train": 1100, "n_test": 10}},
        workers=1,
        scaling="weak",
    )
    assert (four.n_train, four.n_test, one.n_train) == (4400, 10, 1100)
    assert np.array_equal(four.x_train[:1100], one.x_train)
    with pytest.raises(DataError, match="'digits' cannot; use dataset: synthetic"):
        load(tmp_path, "digits", workers=2, scaling="weak")


def arrays(**changes):
    x, y = np.zeros((6, 2), np.float32), np.arange(6) % 3
    parts = {
        "task": "classification",
        "outputs": 3,
        "x_train": x,
        "y_train": y,
        "x_test": x,
        "y_test": y,
    }
    return Arrays(**{**parts, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_test": np.zeros((0, 2), np.float32)}, "test part: no samples"),
        ({"y_train": np.zeros(5, np.int64)}, "6 samples but 5 targets"),
        ({"x_test": np.zeros((6, 3), np.float32)}, r"shape \(3,\), expected \(2,\)"),
        ({"x_train": np.zeros((6, 2))}, "float64, expected float32"),
        (
            {"y_train": np.array([0, 1, 2, 3, 0, 1])},
            "row 3 has label 3, expected 0 to 2",
        ),
        ({"y_test": np.array([0, 1, 2, 0, -1, 1])}, "row 4 has label -1"),
        ({"y_test": np.zeros((6, 1), np.int64)}, "expected int64"),
        (
            {"task": "regression", "outputs": 1},
            r"targets of shape \(6,\), expected \(6, 1\)",
        ),
        (
            {"x_train": np.array([[0, 0]] * 5 + [[0, np.inf]], np.float32)},
            "row 5 .* NaN or infinity",
        ),
    ],
)
def test_invalid_arrays_are_refused(changes, message):
    check("made", arrays())
    with pytest.raises(DataError, match=message):
        check("made", arrays(**changes))


def test_names_of_arrays_are_those_of_the_data_set(tmp_path):
    folder = prepare(training("wine"), 1, tmp_path)
    assert sorted(path.stem for path in folder.glob("*.npy")) == sorted(ARRAY_NAMES)
