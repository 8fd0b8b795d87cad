"""Files of weights: `<run_id>.npz` with the flat vectors `initial` and `final`, in parameter order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scalebench.errors import ModelError, ResultsError
from scalebench.system.file_access import open_own

# of a number: 8, or 16 of a complex one, which is refused by its dtype
_MOST_BYTES_EACH = 16
_HEADER = 10_000  # most bytes before the numbers of an array


def save_weights(folder: Path, run_id: str, initial: Tensor, final: Tensor) -> Path:
    """Write the vectors (n,) of one run atomically.

    Raises:
        ResultsError: the folder cannot be written.
    """
    path = folder / f"{run_id}.npz"
    part = folder / f"{run_id}.part.npz"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open_own(part, "wb") as file:
            np.savez(file, initial=_numbers(initial), final=_numbers(final))
        part.replace(path)
    except OSError as error:
        raise ResultsError(
            f"cannot write the weights {path}: {error.strerror}"
        ) from None
    return path


def load_weights(path: Path, parameters: int) -> Tensor:
    """Return the vector `final` (else `initial`, else the first) in `path`, (parameters,) in float64.

    Raises:
        ModelError: the file is missing, not an .npz of numbers, or has another length.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            name = next(
                (key for key in ("final", "initial") if key in archive),
                archive.files[0],
            )
            # Looked up before it is read: a small archive may unpack to any size.
            nbytes = archive.zip.getinfo(f"{name}.npy").file_size
            if nbytes > _MOST_BYTES_EACH * parameters + _HEADER:
                raise ModelError(
                    f"init_weights: {name} of {path} has {nbytes:,} bytes; the model has {parameters:,} parameters"
                )
            vector = np.array(archive[name], dtype=np.float64).reshape(-1)
    except (OSError, ValueError, IndexError, EOFError, AttributeError) as error:
        reason = (
            getattr(error, "strerror", None)
            or "no .npz file of numbers; save_weights: true keeps such files"
        )
        raise ModelError(f"init_weights: cannot read {path}: {reason}") from None
    if vector.size != parameters:
        raise ModelError(
            f"init_weights: {path} holds {vector.size:,} numbers, the model has {parameters:,}"
        )
    return torch.from_numpy(vector)


def _numbers(vector: Tensor) -> np.ndarray:  # numpy has no bfloat16
    return (vector.float() if vector.dtype == torch.bfloat16 else vector).cpu().numpy()
