"""`scalebench doctor` on the real machine: every missing part comes with the command that adds it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from scalebench.cli.main import main
from scalebench.comm.engines import available
from scalebench.errors import EngineError
from scalebench.install import examine as examination
from scalebench.install.examine import examine
from tests.conftest import needs_mpi
from tests.facts import together

PARTS = {
    "Python",
    "cores",
    "memory",
    "GPUs",
    "C++ compiler",
    "PyTorch",
    "MPI",
    "mpi4py",
    "Horovod",
    "gloo",
    "NCCL",
}


@pytest.fixture
def unloaded_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod looks missing, so that it is not loaded, which takes seconds."""
    monkeypatch.setattr(
        examination,
        "available",
        lambda engine, **_: "left out" if engine == "horovod" else available(engine),
    )


def test_doctor_lists_every_part_and_exits_with_0() -> None:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0
    findings = {finding["part"]: finding for finding in json.loads(result.stdout)}
    assert set(findings) == PARTS | {"launcher", "Slurm"}
    assert findings["cores"]["detail"].startswith(
        f"{len(os.sched_getaffinity(0))} usable"
    )
    for finding in findings.values():
        assert finding["detail"]
        assert not (finding["present"] and finding["add"])


def test_missing_parts_name_the_command_that_adds_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(examination, "find_spec", lambda name: None)
    findings = {finding.part: finding for finding in examine()}
    assert findings["C++ compiler"].add == "apt-get install g++"
    assert findings["PyTorch"].add == "pip install torch"
    assert findings["MPI"].add == 'pip install "scalebench[mpi]"'
    assert findings["Horovod"].add == "scalebench install horovod"
    assert not findings["Slurm"].present


@pytest.mark.usefixtures("unloaded_horovod")
def test_text_shows_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    output = CliRunner().invoke(main, ["doctor"]).output
    assert together(output, "--", "C++ compiler", "none", "Horovod")
    assert "add it with: apt-get install g++" in output


@pytest.mark.usefixtures("unloaded_horovod")
def test_slurm_version_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\necho slurm-wlm 22.05.8\n")
    sinfo.chmod(0o755)
    (tmp_path / "srun").write_text(
        "#!/bin/sh\necho 'MPI plugin types are... pmix none' >&2\n"
    )
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    (finding,) = [finding for finding in examine() if finding.part == "Slurm"]
    assert (finding.present, finding.detail) == (
        True,
        "slurm-wlm 22.05.8, srun with PMIx, in job 42",
    )


def test_horovod_that_does_not_load_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "horovod.py").write_text(
        "raise ImportError('libtorch_cpu.so: not found')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(examination, "available", lambda engine, **_: None)
    (finding,) = [finding for finding in examine() if finding.part == "Horovod"]
    assert finding.detail == "does not load: ImportError: libtorch_cpu.so: not found"
    assert finding.add == "scalebench install horovod --force"


@needs_mpi
@pytest.mark.usefixtures("unloaded_horovod")
@pytest.mark.parametrize(
    ("chosen", "present", "text"),
    [
        (
            0.4,
            False,
            "400 ms as this MPI chooses, 100 ms by a ring, 4.0 times as long; force the ring with: export OMPI_",
        ),
        (0.11, True, "110 ms as this MPI chooses, 100 ms by a ring"),
    ],
)
def test_allreduce_slower_than_a_ring_names_the_setting(
    monkeypatch, chosen, present, text
) -> None:
    monkeypatch.setattr(
        examination,
        "measure_allreduce",
        lambda nbytes, settings, **_: (3, 0.1 if settings else chosen),
    )
    finding = examination.examine(network=True)[-1]
    assert (finding.part, finding.present) == ("allreduce", present)
    assert text in finding.detail


@needs_mpi
@pytest.mark.usefixtures("unloaded_horovod")
def test_comparison_that_nobody_asked_for_ends_ten_seconds_after_the_start(
    monkeypatch,
) -> None:
    limits, ranks = [], []

    def late(nbytes, settings, *, limit_s, most_on_node, **_):
        limits.append(limit_s)
        ranks.append(most_on_node)
        monkeypatch.setattr(examination.time, "monotonic", lambda: 1e12)
        raise EngineError(f"measuring took more than {limit_s:g} s")

    monkeypatch.setattr(examination, "_several_nodes", lambda: True)
    monkeypatch.setattr(examination, "measure_allreduce", late)
    finding = examination.examine()[-1]
    assert (finding.part, finding.present) == ("allreduce", False)
    assert together(finding.detail, "not compared", "scalebench doctor --network")
    assert 0 <= limits[0] <= 10
    assert ranks[0] <= 4, "a node may have hundreds of slots"


@pytest.mark.thorough
def test_network_option_compares_the_allreduce() -> None:
    if reason := available("mpi"):
        pytest.skip(reason)
    (finding,) = [
        finding for finding in examine(network=True) if finding.part == "allreduce"
    ]
    assert "1 MiB among 3 ranks on 1 node: " in finding.detail
    assert " ms by a ring" in finding.detail
