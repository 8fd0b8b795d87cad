"""Arrays of a file, read whole, so that no test leaves a file open that another one is told of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def arrays_in(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file by name."""
    with np.load(path) as arrays:
        return dict(arrays)
