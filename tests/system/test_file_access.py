"""Files that scalebench names itself are never written through symbolic links."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from scalebench.analysis import load
from scalebench.analysis.target import read_law
from scalebench.calibration.calibration_file import read_calibration
from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.engine_costs import EngineCosts
from scalebench.errors import ResultsError, UsageError
from scalebench.figures.plotting import plot
from scalebench.figures.selection import Added
from scalebench.models.pinning import checksum
from scalebench.models.registry import check_own
from scalebench.models.zoo.layers import load_layers
from scalebench.papers.paper_folder import read_published
from scalebench.pricing.kernel_model import load_kernel_model
from scalebench.records.attempts import Attempts
from scalebench.records.folder import PLANNED
from scalebench.records.lock import folder_lock
from scalebench.records.progress import keep_planned
from scalebench.records.reading import read_table
from scalebench.records.schema import RunRow
from scalebench.records.store import Store
from scalebench.study.load import load_study
from scalebench.system import file_access
from scalebench.system.file_access import atomic_file, write_atomic
from scalebench.training.initial_weights import load_weights
from scalebench.training.outcome import read_horovod
from scalebench.validation.measurements import read_csv
from scalebench.validation.placements import is_placements
from tests.facts import naming
from tests.records_factory import epoch_row, run_row, study_rows

OTHERS = "a file of someone else\n"
ZERO = Path("/dev/zero")


@pytest.fixture
def study(tmp_path):
    """A study with one committed run, an epoch row that no run commits, and a cut-off line in both tables."""
    folder = tmp_path / "study"
    with Store(folder) as store:
        store.append(run_row(), [epoch_row(epoch=epoch) for epoch in range(6)])
    keep_planned(folder, [])
    for name in ("runs.csv", "epochs.csv"):
        with (folder / name).open("a") as file:
            file.write("cut off")
    return folder


def use(folder):
    """Take each way by which a command writes into the folder of a study."""
    with folder_lock(folder), Store(folder) as store:
        store.keep_provenance({"cpu": "x"})
        keep_planned(folder, [])


@pytest.mark.parametrize(
    "name",
    [
        *("lock", "runs.csv", "epochs.csv", "runs.csv.partial", "epochs.csv.partial"),
        *(
            "planned.json",
            "planned.json.new",
            "provenance/{}.json",
            "provenance/{}.json.new",
        ),
    ],
)
@pytest.mark.parametrize("dangling", [False, True])
def test_link_in_a_study_folder_is_refused_in_one_line_and_its_target_kept(
    study, tmp_path, name, dangling
):
    use_twice = "provenance" in name
    if use_twice:
        use(study)
        (path,) = (study / "provenance").iterdir()
        name = name.format(path.stem)
    target = tmp_path / "target"
    if not dangling:
        target.write_text(OTHERS)
    (study / name).unlink(missing_ok=True)
    (study / name).symlink_to(target)
    with pytest.raises(
        ResultsError,
        match=r"is a symbolic link, which is not written through; remove it",
    ) as caught:
        use(study)
    assert "\n" not in str(caught.value)
    assert (study / name).name in str(caught.value)
    assert not target.exists() if dangling else target.read_text() == OTHERS
    (study / name).unlink()
    if name != "runs.csv":
        use(study)


def test_linked_study_folder_is_written(study, tmp_path):
    link = tmp_path / "elsewhere"
    link.symlink_to(study)
    use(link)
    assert (study / PLANNED).is_file()


@pytest.mark.parametrize(
    "name", ["strong-scaling.png", "strong-scaling.csv", "strong-scaling.txt"]
)
def test_link_among_the_figures_is_refused_and_its_target_kept(tmp_path, name):
    with Store(tmp_path / "study", fsync=False) as store:
        for row, epochs in study_rows(
            strategies=("allreduce",), workers=(1, 2), repetitions=1
        ):
            store.append(row, epochs)
    place = tmp_path / "plots" / "synthetic"
    place.mkdir(parents=True)
    (tmp_path / "target").write_text(OTHERS)
    (place / name).symlink_to(tmp_path / "target")
    with pytest.raises(ResultsError, match=f"{name} is a symbolic link"):
        plot(load(tmp_path / "study"), tmp_path / "plots", ["strong-scaling"], ["png"])
    assert (tmp_path / "target").read_text() == OTHERS


def test_file_left_by_a_killed_command_is_replaced(tmp_path):
    (tmp_path / "kept.json.new").write_text("half")
    os.link(tmp_path / "kept.json.new", tmp_path / "another-name")
    write_atomic(tmp_path / "kept.json", "whole")
    assert (tmp_path / "kept.json").read_text() == "whole"
    assert (tmp_path / "another-name").read_text() == "half", (
        "a hard link is not written through either"
    )
    assert not (tmp_path / "kept.json.new").exists()


def test_link_that_the_user_names_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with atomic_file(tmp_path / "link") as file:
        file.write("text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"


@pytest.mark.parametrize(
    "read",
    [
        read_calibration,
        load_kernel_model,
        EngineCosts.load,
        read_csv,
        lambda path: Added(path, "mine").curve(),
        read_law,
        read_published,
        load_cluster,
        checksum,
        lambda path: load_study(path, {}, []),
    ],
)
def test_endless_files_are_refused_in_one_line(read):
    with pytest.raises(
        UsageError, match=r"/dev/zero.*(larger than|device or pipe)|unknown cluster"
    ) as caught:
        read(ZERO)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "read",
    [Attempts, lambda path: read_table(path, RunRow), read_horovod],
    ids=["attempts", "table", "timeline"],
)
def test_endless_records_are_refused(read, monkeypatch):
    for module in ("records.attempts", "records.reading", "training.outcome"):
        monkeypatch.setattr(f"scalebench.{module}.LARGE", file_access.MIB)
    with pytest.raises(
        UsageError,
        match=naming("/dev/zero", "larger", "1 MiB"),
    ):
        read(ZERO)


def test_endless_layer_table_is_refused(tmp_path):
    (tmp_path / "net.csv").symlink_to(ZERO)
    with pytest.raises(
        UsageError, match=r"net\.csv.*: cannot read it: it is larger than 64 MiB"
    ):
        load_layers(str(tmp_path / "net.csv"))
    assert not is_placements(tmp_path / "net.csv")


def test_huge_code_is_refused(tmp_path):
    with (tmp_path / "net.py").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(
        UsageError,
        match=naming("net.py", "10,000,000 bytes", "Python file"),
    ):
        check_own(f"{tmp_path}/net.py:build")


def test_weights_that_unpack_to_more_than_the_model_has_are_refused(tmp_path):
    np.savez_compressed(tmp_path / "start.npz", final=np.zeros(1_000_000))
    with pytest.raises(
        UsageError,
        match=r"final of .*start\.npz has 8,000,128 bytes; the model has 10 parameters",
    ):
        load_weights(tmp_path / "start.npz", 10)


def test_texts_of_any_system_are_read(tmp_path):
    (tmp_path / "text").write_bytes(b"a\r\nb\rc\n")
    assert file_access.read_text(tmp_path / "text", 7) == "a\nb\nc\n"
    with pytest.raises(OSError, match="larger than"):
        file_access.read_text(tmp_path / "text", 6)
