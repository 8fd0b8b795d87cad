"""Cache folder of reproducible files: data sets as arrays, engine costs, built wheels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """Return `$XDG_CACHE_HOME/scalebench/<kind>`, by default below `~/.cache`, without creating it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scalebench" / kind
