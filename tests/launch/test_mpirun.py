"""An mpirun that starts another MPI than mpi4py's is found before a study starts, or by the ranks themselves."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from scalebench.cluster.cluster_file import load_cluster
from scalebench.comm import engines
from scalebench.comm.launchers import mpirun
from scalebench.comm.launchers.mpirun import mismatch
from scalebench.errors import EngineError
from scalebench.launch.hosts import reachable
from scalebench.launch.planning import prepare_study
from scalebench.launch.real_runs import RealRuns
from scalebench.launch.sweep import expand
from scalebench.study.spec import Study
from tests.conftest import needs_mpi
from tests.facts import together

ALONE = """\
#!{python}
import subprocess, sys
if "--version" in sys.argv:
    print({version!r})
    sys.exit()
program = sys.argv[sys.argv.index({python!r}):]
ranks = [subprocess.Popen(program) for _ in range(int(sys.argv[sys.argv.index("-n") + 1]))]
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """An mpirun whose processes know nothing of each other, and which states a version."""
    if reason := engines.available("mpi"):
        pytest.skip(reason)

    def make(version):
        path = tmp_path / "mpirun"
        path.write_text(ALONE.format(python=sys.executable, version=version))
        path.chmod(0o755)
        monkeypatch.setattr(mpirun, "find", lambda: path)
        return path

    return make


def test_an_mpirun_of_another_mpi_is_refused_with_what_to_do(alone):
    alone("HYDRA build details:\n    Version:   4.1.2\n")
    reason = engines.available("mpi")
    assert together(
        reason,
        "(HYDRA build details: Version: 4.1.2)",
        "2 ranks",
        "alone",
        "mpi4py",
        "another MPI",
    )
    assert reason.endswith("pip install --no-binary mpi4py --force-reinstall mpi4py")
    assert "\n" not in reason


def test_ranks_that_are_alone_although_versions_agree_end_the_launch(alone, tmp_path):
    from scalebench.comm.launchers.mpirun import library

    alone(library())
    study = Study(
        name="s",
        workers="2",
        strategies=["allreduce"],
        dataset="wine",
        execution="native",
        repetitions=1,
    )
    runs = expand(study, load_cluster("this-machine"), reachable()).runs
    folders = prepare_study(study, runs).folders
    with pytest.raises(
        EngineError,
        match=r"mpirun started 2 ranks, and each of them is alone.*--no-binary mpi4py",
    ):
        RealRuns(
            folders,
            ranks=2,
            work_dir=tmp_path / "work",
            on_start=print,
            on_outcome=print,
            log=print,
        ).launch(runs)


@needs_mpi
@pytest.mark.skipif(
    not os.access("/usr/bin/mpirun", os.X_OK),
    reason="no MPI of the system's beside that of Python",
)
def test_another_version_that_starts_ranks_that_know_each_other_will_do():
    assert mismatch(Path("/usr/bin/mpirun")) is None
