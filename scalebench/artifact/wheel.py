"""The scalebench that is running, as a wheel: a reviewer installs what drew the figures, published or not.

A wheel (PyPA, "Binary distribution format") is a zip of the package and of NAME-VERSION.dist-info with METADATA, WHEEL,
RECORD (each file's SHA-256 and size) and entry_points.txt. It is written from the installed files, without a build.
"""

from __future__ import annotations

import base64
import hashlib
import re
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import scalebench

MOMENT = (1980, 1, 1, 0, 0, 0)  # the first that a zip can say: the same files give the same bytes
_LEFT_OUT = {"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


def write_wheel(folder: Path) -> Path:
    """Write scalebench-VERSION-py3-none-any.whl to `folder`."""
    version = scalebench.__version__
    info = f"scalebench-{version}.dist-info"
    files = dict(_package())
    files |= {f"{info}/{name}": text.encode() for name, text in _about().items()}
    record = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in sorted(files.items())]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    wheel = folder / f"scalebench-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in sorted(files.items()):
            add_file(archive, name, data)
    return wheel


def add_file(archive: zipfile.ZipFile, name: str, data: bytes, mode: int = 0o644) -> None:
    """A file in `archive` that says nothing of when and by whom it was packed."""
    entry = zipfile.ZipInfo(name, MOMENT)
    entry.create_system = 3  # Unix: the mode counts
    entry.external_attr = (0o100000 | mode) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, data, compresslevel=9)


def metadata() -> str:
    """The METADATA that an installer reads; in a checkout from pyproject.toml, newer than its last installation."""
    project = Path(scalebench.__file__).parents[1] / "pyproject.toml"
    if project.is_file():
        about = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        if about["name"] == "scalebench":
            return _metadata_of(about)
    return distribution("scalebench").read_text("METADATA") or ""


def _metadata_of(project: dict[str, Any]) -> str:
    extras: dict[str, list[str]] = project["optional-dependencies"]
    lines = [
        "Metadata-Version: 2.4",
        "Name: scalebench",
        f"Version: {scalebench.__version__}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {need}" for need in project["dependencies"]),
    ]
    for extra, needs in extras.items():
        lines += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {need}; extra == "{extra}"' for need in needs)]
    return "\n".join([*lines, ""])


def requirements() -> list[str]:
    """What scalebench needs without any extra, as it says: `numpy>=1.26`."""
    found = re.findall(r"^Requires-Dist: (.+)$", metadata(), flags=re.MULTILINE)
    return [line for line in found if "extra ==" not in line]


def _package() -> Iterator[tuple[str, bytes]]:
    package = Path(scalebench.__file__).parent
    for file in sorted(package.rglob("*")):
        inner = file.relative_to(package.parent)
        if file.is_file() and not _LEFT_OUT & set(inner.parts) and file.suffix not in (".pyc", ".pyo", ".so"):
            yield inner.as_posix(), file.read_bytes()


def _about() -> dict[str, str]:
    about = {
        "METADATA": metadata(),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: scalebench\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": "[console_scripts]\nscalebench = scalebench.cli.main:main\n",
        "top_level.txt": "scalebench\n",
    }
    beside = Path(scalebench.__file__).parents[1] / "LICENSE"
    licence = distribution("scalebench").read_text("licenses/LICENSE")
    if not licence and beside.is_file():
        licence = beside.read_text(encoding="utf-8")
    return about | ({"licenses/LICENSE": licence} if licence else {})


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
