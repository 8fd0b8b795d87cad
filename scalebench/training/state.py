"""The state of a replica between two batches, as it travels to another process or is kept in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scalebench.training.replica import Replica


class Packed(NamedTuple):
    """A tensor as it travels: torch's own pickling of tensors opens a file for each."""

    dtype: str
    shape: tuple[int, ...]
    content: NDArray[np.uint8]
    device: str = "cpu"

    @classmethod
    def of(cls, tensor: Tensor) -> Packed:
        content = (
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        )
        # A copy: dask keeps a result where it was made until it is asked for, while the
        # next block is trained there.
        return cls(
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            content.copy(),
            str(tensor.device),
        )

    def tensor(self) -> Tensor:
        """Return the tensor, in memory of its own."""
        content = torch.from_numpy(np.array(self.content))
        return content.view(getattr(torch, self.dtype)).view(self.shape).to(self.device)


@dataclass(frozen=True)
class State:
    """Weights, buffers and optimizer of a replica, and its random `generators` where they are to go on."""

    parameters: Packed
    buffers: list[Packed]
    optimizer: dict[int, dict[str, Any]]  # by place of the parameter in the optimizer
    steps: int  # taken so far
    generators: dict[str, Any] | None = None

    @classmethod
    def of(
        cls, replica: Replica, steps: int, generators: dict[str, Any] | None
    ) -> State:
        """Return the state of `replica`."""
        known, state = _parameters_of(replica), replica.optimizer.state
        optimizer = {
            place: {name: _packed(value) for name, value in state[parameter].items()}
            for place, parameter in enumerate(known)
            if parameter in state
        }
        buffers = [Packed.of(buffer) for buffer in replica.model.buffers()]
        return cls(Packed.of(replica.parameters), buffers, optimizer, steps, generators)

    def put_into(self, replica: Replica) -> None:
        """Give `replica` this state."""
        with torch.no_grad():
            replica.parameters.copy_(self.parameters.tensor())
            for buffer, value in zip(
                replica.model.buffers(), self.buffers, strict=True
            ):
                buffer.copy_(value.tensor())
        known, optimizer = _parameters_of(replica), replica.optimizer
        optimizer.state.clear()
        for place, remembered in self.optimizer.items():
            optimizer.state[known[place]] = {
                name: _unpacked(value) for name, value in remembered.items()
            }


def _parameters_of(replica: Replica) -> list[Tensor]:
    return [
        parameter
        for group in replica.optimizer.param_groups
        for parameter in group["params"]
    ]


def _packed(value: Any) -> Any:
    return Packed.of(value) if isinstance(value, Tensor) else value


def _unpacked(value: Any) -> Any:
    return value.tensor() if isinstance(value, Packed) else value
