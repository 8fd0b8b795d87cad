"""What a calibration is asked for: the runs that it charges, and all of their study that decides what is measured."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from scalebench.calibration.calibration_file import Calibration, Measurement
from scalebench.calibration.engine_measurement import Placing
from scalebench.cluster.cluster_file import Cluster
from scalebench.data.dataset import Dataset
from scalebench.pricing.step_times import Trained
from scalebench.records.machine_facts import cpu_model
from scalebench.records.provenance import host_hash
from scalebench.study.spec import Run, Study
from scalebench.system import hardware


@dataclass(frozen=True)
class Request:
    """The simulated `runs` of `study`, on `cluster`, whose steps a `device` (cpu, cuda) computes.

    `data` is one of the data sets, which are prepared in `folders` by worker count. `sizes` finds the sizes of all
    batches and micro-batches, which takes a while where rows move between epochs; `largest` is the batch of the most
    samples. `beside_real`: the study has real runs too, whose times are compared with virtual ones. `placing` starts
    ranks that measure.
    """

    study: Study
    cluster: Cluster
    device: str
    runs: Sequence[Run]
    data: Dataset
    folders: Mapping[int, Path]
    sizes: Callable[[], Set[int]]
    largest: int
    beside_real: bool
    placing: Placing

    @property
    def is_here(self) -> bool:
        """True if the cluster's nodes are machines like this one; others state their steps and links."""
        return self.cluster.compute == "this-machine"

    @property
    def states_steps(self) -> bool:
        """True if the study states the time of a step; engines are measured beside it."""
        return self.study.device_step_time is not None

    @property
    def most_busy(self) -> int:
        """The most workers that compute at the same time on this node; a worker on a GPU has one of its own."""
        at_once = hardware.gpus() if self.device == "cuda" else self.cluster.node.workers_per_node
        return min(max(run.workers for run in self.runs), at_once)

    @cached_property
    def measurement(self) -> Measurement:
        """What is measured here and now."""
        import torch

        return Measurement(
            model=str(self.study.model),
            dtype=self.study.dtype,
            optimizer=str(self.study.optimizer),
            threads_per_worker=self.study.threads_per_worker,
            cpu=cpu_model(),
            cores=hardware.cores(),
            torch=torch.__version__,
            device=torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
        )

    @property
    def trained(self) -> Trained:
        """The model and data whose steps are measured."""
        return Trained(
            model=self.study.model,
            optimizer=self.study.optimizer,
            dataset=self.data.name,
            samples=self.data.n_train,
            input_shape=self.data.input_shape,
            outputs=self.data.outputs,
            task=self.data.task,
        )

    @cached_property
    def key(self) -> str:
        """Hash of the machine, the torch build, the model, the data and the settings that are measured."""
        parts = (
            host_hash(),
            self.measurement.torch,
            self.study.model,
            self.data.sha256,
            self.study.dtype,
            self.study.optimizer,
            self.study.threads_per_worker,
            self.measurement.device,
            self.cluster.node.workers_per_node,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def without_operations(self, calibration: Calibration) -> list[Run]:
        """Return the runs of which `calibration` does not say what their strategy computes beside its steps."""
        return [run for run in self.runs if run.workers > 1 and str(run.strategy) not in calibration.operations]
