"""Where scalebench keeps what can be made again: data sets as arrays, engine costs, built wheels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """`$XDG_CACHE_HOME/scalebench/<kind>`, else the same below `~/.cache`. Not created."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scalebench" / kind
