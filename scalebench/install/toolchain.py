"""What a Horovod is built against; a wheel fits another environment when all of it is the same."""

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

from scalebench.errors import EngineError
from scalebench.launch.engines import ADD_MPI, find_mpirun
from scalebench.study.spec import slug


@dataclass(frozen=True)
class Toolchain:
    """The parts that decide whether a built Horovod runs."""

    torch: str
    cuda: str | None
    python: str
    mpi: str
    compiler: str
    cxx: str  # the command
    mpirun: Path
    layout: str  # where site-packages lies in the environment: the built library finds MPI by the way from there

    @property
    def key(self) -> str:
        """A folder name that says it all."""
        libc = "-".join(platform.libc_ver())
        return slug("_".join((self.python, f"torch-{self.torch}", self.mpi, self.compiler, libc, self.layout)))


def find_toolchain() -> Toolchain:
    """What is here.

    Raises:
        EngineError: PyTorch, MPI or a C++ compiler is missing; the message says what adds it.
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
    """`mpirun (Open MPI) 5.0.11` -> `mpirun-Open-MPI-5.0.11`: the first line of what the command says of itself."""
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"`{' '.join(command)}` does not work: {error}") from None
    words = re.findall(r"[A-Za-z0-9.+-]+", said.splitlines()[0] if said else "unknown")
    return "-".join(words)
