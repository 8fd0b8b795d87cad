"""Toolchain of a Horovod build, which determines the environments that a wheel fits."""

from __future__ import annotations

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from scalebench.comm.engines import ADD_MPI, find_mpirun
from scalebench.errors import EngineError
from scalebench.study.spec import slug


@dataclass(frozen=True)
class Toolchain:
    """Versions that determine whether a built Horovod runs."""

    torch: str
    cuda: str | None
    python: str
    mpi: str
    compiler: str
    cxx: str  # the command
    mpirun: Path
    layout: str  # path of site-packages in the environment, from which the library finds MPI

    @property
    def key(self) -> str:
        """Folder name of all versions."""
        libc = "-".join(platform.libc_ver())
        return slug("_".join((self.python, f"torch-{self.torch}", self.mpi, self.compiler, libc, self.layout)))


def find_toolchain() -> Toolchain:
    """Return the installed toolchain.

    Raises:
        EngineError: PyTorch, MPI or a C++ compiler is missing; names the command that adds it.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise EngineError("Horovod is built against PyTorch, which is not installed; run: pip install torch")
    torch = runpy.run_path(str(Path(spec.origin).parent / "version.py"))
    mpirun = find_mpirun()
    if mpirun is None or not mpirun.with_name("mpicxx").exists():
        raise EngineError(f"Horovod needs an MPI with its compiler wrapper mpicxx, and none is here; run: {ADD_MPI}")
    cxx = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if cxx is None:
        raise EngineError("Horovod is built from source, and no C++ compiler is here; run: apt-get install g++")
    cache_tag = sys.implementation.cache_tag or platform.python_implementation()
    site, prefix = Path(sysconfig.get_path("platlib")), Path(sys.prefix)
    return Toolchain(
        torch=str(torch["__version__"]),
        cuda=torch.get("cuda"),
        python=f"{cache_tag}-{sysconfig.get_platform()}",
        mpi=_version([str(mpirun), "--version"]),
        compiler=_version([cxx, "--version"]),
        cxx=cxx,
        mpirun=mpirun,
        layout=str(site.relative_to(prefix)) if site.is_relative_to(prefix) else str(site),
    )


def _version(command: list[str]) -> str:
    """Return the first line of a command's output as a slug: `mpirun (Open MPI) 5.0.11` -> `mpirun-Open-MPI-5.0.11`."""
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"`{' '.join(command)}` does not work: {error}") from None
    words = re.findall(r"[A-Za-z0-9.+-]+", output.splitlines()[0] if output else "unknown")
    return "-".join(words)
