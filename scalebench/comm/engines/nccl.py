"""NCCL of torch.distributed, between NVIDIA GPUs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from scalebench.comm.base import Capability
from scalebench.comm.engines.base import WITH_GROUPS, Engine, Place, folder_of
from scalebench.system import hardware

if TYPE_CHECKING:
    from scalebench.comm.native import NativeCommunicator


class Nccl(Engine):
    """A process group of NCCL, of one GPU for each worker."""

    name = "nccl"
    provides = WITH_GROUPS | {Capability.PROCESS_GROUP}
    elastic_launcher = "torchrun"
    progress_threads = 1
    on_gpus = True

    def lacks(self, *, here: bool = True) -> str | None:
        """Return None if torch has CUDA, and there is a GPU here."""
        if reason := super().lacks(here=here):
            return reason
        torch = folder_of("torch")
        # By its files: importing torch takes seconds, and some commands only ask.
        if torch is None or not any((torch / "lib").glob("libtorch_cuda*")):
            return "this torch has no CUDA; install one of https://pytorch.org/get-started/locally that has"
        if not here:
            return None
        driver = (
            Path("/proc/driver/nvidia/version").exists()
            or Path("/dev/nvidiactl").exists()
        )
        if not driver or not hardware.gpus():
            return "no NVIDIA GPU here; use --engine gloo, or run where there is one"
        return None

    def connect(self, place: Place) -> AbstractContextManager[NativeCommunicator]:
        """Make the process group of the GPUs that the ranks have set."""
        from scalebench.comm.torch_dist import process_group

        return process_group(self.name, place)


ENGINE = Nccl()
