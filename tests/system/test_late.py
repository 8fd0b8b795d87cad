"""torch is imported at its first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scalebench.system import late

PROGRAM = """
import sys
from scalebench.strategies import compression
print("torch" in sys.modules)
print(compression.torch.zeros(2).tolist(), "torch" in sys.modules)
"""


def test_torch_is_imported_at_its_first_use() -> None:
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert said.stdout.splitlines() == ["False", "[0.0, 0.0] True"]


def test_its_parts_are_those_of_torch() -> None:
    import torch

    assert late.torch.Tensor is torch.Tensor
    assert late.torch.Tensor is torch.Tensor  # and when it has been used before
    with pytest.raises(AttributeError, match="no_such_part"):
        late.torch.no_such_part  # type: ignore[attr-defined]  # noqa: B018
