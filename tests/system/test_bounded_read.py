"""Every file that a user can name is read up to a size: /dev/zero, which has no end, is refused in one line."""

from pathlib import Path

import numpy as np
import pytest

from scalebench.analysis.critical_batch import read_law
from scalebench.calibration.calibration_file import read_calibration
from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.engine_costs import EngineCosts
from scalebench.errors import UsageError
from scalebench.figures.selection import Added
from scalebench.models.layer_files import load_layers
from scalebench.models.pinning import checksum
from scalebench.models.registry import check_own
from scalebench.papers.paper_folder import read_published
from scalebench.pricing.kernel_model import load_kernel_model
from scalebench.records.attempts import Attempts
from scalebench.records.reading import read_table
from scalebench.records.schema import RunRow
from scalebench.study.load import load_study
from scalebench.system import bounded_read
from scalebench.training.initial_weights import load_weights
from scalebench.training.outcome import read_horovod
from scalebench.validation.measurements import read_csv
from scalebench.validation.placements import is_placements

ZERO = Path("/dev/zero")


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
        monkeypatch.setattr(f"scalebench.{module}.LARGE", bounded_read.MIB)
    with pytest.raises(
        UsageError,
        match="cannot read /dev/zero: it is larger than 1 MiB, the most that is read of such",
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
        match=r"net\.py is larger than 10,000,000 bytes; expected a Python file",
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
    assert bounded_read.read_text(tmp_path / "text", 7) == "a\nb\nc\n"
    with pytest.raises(OSError, match="larger than"):
        bounded_read.read_text(tmp_path / "text", 6)
