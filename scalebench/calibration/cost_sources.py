"""Where the costs are from that charge the virtual runs of a study: chosen once, as a value.

| source          | steps                                | engines                  | operations of strategies |
|-----------------|--------------------------------------|--------------------------|--------------------------|
| `StatedCosts`   | the cluster's file, or the study     | the cluster's links      | none                     |
| `GivenCosts`    | the file that the study names        | that file                | that file                |
| `KeptCosts`     | the file beside the records, or what | that file, or measured   | those that are missing   |
|                 | an earlier study measured here       |                          | are measured             |
| `MeasuredCosts` | measured here and now                | measured                 | measured                 |

A study that states the time of its steps (`device_step_time`) takes engines only from a
source. What a user is told follows from the source (`notes`).

A `Request` says what a calibration is asked for: the runs that it charges, and all of
their study that decides what is measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path

import torch

from scalebench import __version__
from scalebench.calibration.calibration_file import (
    Calibration,
    Measurement,
    read_calibration,
    require_measured_cluster,
)
from scalebench.calibration.engine_measurement import Placing
from scalebench.calibration.steps_under_load import measure_reference
from scalebench.cluster.cluster_file import Cluster
from scalebench.cluster.engine_costs import EngineCosts
from scalebench.data.dataset import Dataset
from scalebench.errors import ClusterError, ResultsError
from scalebench.formatting import Detail
from scalebench.pricing.machine import STATED_STEPS, Trained
from scalebench.records.folder import CALIBRATION
from scalebench.records.machine_facts import cpu_model
from scalebench.records.provenance import host_hash
from scalebench.study.spec import Run, Study
from scalebench.system import hardware
from scalebench.system.file_access import cache_folder

_OF_THE_STUDY = ("model", "dtype")  # step times of others say nothing
_COMPARED = ("device", "cpu", "torch")  # where real and virtual times are compared
# version of the kept steps and choices of arithmetic; files of another are not read
_KEPT = 2
_OF_THE_MACHINE = ("device", "cpu", "cores", "torch", "optimizer", "threads_per_worker")


@dataclass(frozen=True)
class Request:
    """The simulated `runs` of `study`, on `cluster`, whose steps a `device` (cpu, cuda) computes.

    `data` is one of the data sets, which are prepared in `folders` by worker count.
    `sizes` finds the sizes of all batches and micro-batches, which takes a while where
    rows move between epochs; `largest` is the batch of the most samples. `beside_real`:
    the study has real runs too, whose times are compared with virtual ones. `placing`
    starts ranks that measure.
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
        at_once = (
            hardware.gpus()
            if self.device == "cuda"
            else self.cluster.node.workers_per_node
        )
        # Loads that no run puts on a node are not measured.
        return min(max(run.workers for run in self.runs), at_once)

    @cached_property
    def measurement(self) -> Measurement:
        """What is measured here and now."""
        return Measurement(
            model=str(self.study.model),
            dtype=self.study.dtype,
            optimizer=str(self.study.optimizer),
            threads_per_worker=self.study.threads_per_worker,
            cpu=cpu_model(),
            cores=hardware.cores(),
            torch=torch.__version__,
            device=torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            model_sha256=self.study.model_sha256,
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
        return [
            run
            for run in self.runs
            if run.workers > 1 and str(run.strategy) not in calibration.operations
        ]


@dataclass(frozen=True)
class StatedCosts:
    """The cluster is another machine, whose steps are stated; its engines were not measured: its links are charged."""

    def notes(self, request: Request) -> list[str]:
        return []


@dataclass(frozen=True)
class GivenCosts:
    """The file that the study names."""

    path: Path
    calibration: Calibration

    def notes(self, request: Request) -> list[str]:
        """Name what differs from this machine and study, and the strategies without times of operations."""
        found = []
        of = self.calibration.measured
        if of is not None and (
            other := of.differences(request.measurement, _OF_THE_MACHINE)
        ):
            found.append(
                f"{self.path} is not of this machine and study: {'; '.join(other)}"
            )
        if not request.states_steps:
            names = sorted(
                {
                    str(run.strategy)
                    for run in request.without_operations(self.calibration)
                }
            )
            found += [
                f"{self.path} does not say what {name} computes beside its steps: nothing is charged for it"
                for name in names
            ]
        return found


class Place(Enum):
    """Where costs were kept; the value is the note on them."""

    FOLDER = ""
    ANOTHER_MACHINE = f"virtual runs go on by {CALIBRATION}, which another machine or another torch measured"
    CACHE = "step times are those of an earlier study of this model: scalebench recalibrate measures them anew"


@dataclass(frozen=True)
class KeptCosts:
    """Costs beside the records or in the cache of this machine, with all step times that the runs take."""

    calibration: Calibration
    place: Place = Place.FOLDER

    def notes(self, request: Request) -> list[str]:
        text = self.place.value
        return [Detail(text) if self.place == Place.CACHE else text] if text else []


@dataclass(frozen=True)
class MeasuredCosts:
    """A measurement here and now, of all; or beside `before`, which charged earlier runs, of what that is `lacking`."""

    before: Calibration | None = None
    lacking: str = ""

    def notes(self, request: Request) -> list[str]:
        return (
            [f"{CALIBRATION} lacked {self.lacking}: measured now, beside what it holds"]
            if self.lacking
            else []
        )


Source = StatedCosts | GivenCosts | KeptCosts | MeasuredCosts


def choose_source(
    request: Request, folder: Path, *, charged: bool = False, anew: bool = False
) -> Source:
    """Choose where the costs of the runs of a study in `folder` are from; measures nothing.

    Runs that were `charged` before fix the numbers: only batch sizes and loads that
    these lack are measured, on the machine that measured them. Step times of an earlier
    study of the model count unless all is measured `anew`.

    Raises:
        ClusterError: a calibration cannot be read, or does not fit the study.
        ResultsError: the numbers that charged earlier runs are lost, have changed, or cannot be completed here.
    """
    given = _given_calibration(request)
    if not request.is_here:
        return StatedCosts()
    path = folder / CALIBRATION
    kept = read_calibration(path) if path.exists() else None
    if charged:
        _require_kept(request, folder, given, kept)
    if given is not None:
        return given
    # Numbers of another machine go on only where they charged runs before.
    if kept is not None and (charged or kept.key == request.key):
        # Stated steps need no tables, whatever the sizes.
        lacking = (
            ""
            if request.states_steps
            else kept.lacking(request.sizes(), request.most_busy)
        )
        if kept.key != request.key and lacking:
            raise ResultsError(
                f"{path} was measured on another machine or by another torch and has no step times for {lacking}: "
                f"go on there, or measure all of it here with: scalebench recalibrate {folder}"
            )
        if not lacking:
            return KeptCosts(
                kept, Place.FOLDER if kept.key == request.key else Place.ANOTHER_MACHINE
            )
        if charged:
            return MeasuredCosts(kept, lacking)
    if not anew and not request.states_steps:
        earlier = KeptSteps(request.key, request.runs[0]).with_all(
            request.sizes(), request.most_busy
        )
        if earlier is not None:
            return KeptCosts(earlier, Place.CACHE)
    return MeasuredCosts()


def notes_on(source: Source, request: Request) -> list[str]:
    """Return what a user is told of `source`, and of steps that are stated."""
    stated = (request.states_steps or not request.is_here) and any(
        run.workers > 1 for run in request.runs
    )
    return [*([STATED_STEPS] if stated else []), *source.notes(request)]


def _given_calibration(request: Request) -> GivenCosts | None:
    """Read the calibration file that a study names; only its engines' costs count if the study states step times.

    Raises:
        ClusterError: the file cannot be read or is not a calibration, lacks step times that the study does not state,
            is of another model or dtype, or charges nothing, as the cluster states everything.
    """
    path = request.study.calibration
    if path is None:
        return None
    found = read_calibration(path)
    require_measured_cluster(path, request.cluster)
    if request.states_steps:
        # Stated times count, so that those in the file must not.
        return GivenCosts(path, found.model_copy(update={"tables": []}))
    if found.measured and (
        other := found.measured.differences(request.measurement, _OF_THE_STUDY)
    ):
        raise ClusterError(
            f"calibration: {path} was measured for {found.measured}, which this study does not train "
            f"({'; '.join(other)}); name a calibration of this study, or leave it out to measure one"
        )
    if not found.tables:
        raise ClusterError(
            f"calibration: {path} has no step times, as it is of a study that states them; "
            "name another, or state them with --device-step-time"
        )
    return GivenCosts(path, found)


def check_given_calibration(request: Request) -> None:
    """Check the calibration that a study names, if any.

    Raises:
        ClusterError: as `_given_calibration`, or real runs here would be compared with times of another machine.
    """
    given = _given_calibration(request)
    if given is None or given.calibration.measured is None or not request.beside_real:
        return
    if other := given.calibration.measured.differences(request.measurement, _COMPARED):
        raise ClusterError(
            f"calibration: {given.path} is of another machine ({'; '.join(other)}), with whose times real runs "
            "here cannot be compared; add --execution virtual, or leave the calibration out to measure one"
        )


def check_kept_calibration(request: Request, folder: Path) -> None:
    """Check that what charged the virtual runs in `folder` is there, unchanged.

    Raises:
        ClusterError: as `_given_calibration`.
        ResultsError: it is lost or has changed.
    """
    path = folder / CALIBRATION
    if request.is_here:
        kept = read_calibration(path) if path.exists() else None
        _require_kept(request, folder, _given_calibration(request), kept)


def _require_kept(
    request: Request, folder: Path, given: GivenCosts | None, kept: Calibration | None
) -> None:
    # The folder holds a copy of the file that charged its runs.
    if given is not None and kept is not None and kept != given.calibration:
        raise ResultsError(
            f"{given.path} has changed since it charged the virtual runs in {folder}; "
            f"put it back, or give them new times with: scalebench recalibrate {folder}"
        )
    if given is None and kept is None:
        raise ResultsError(
            f"{folder} holds virtual runs but not {CALIBRATION}, which they were charged by; "
            f"put it back, or give them new times with: scalebench recalibrate {folder}"
        )


class KeptSteps:
    """What earlier studies of the model of `run` measured here, undisturbed, for calibrations with `key`; in the cache.

    These are step times, how gradients are computed the fastest, and times of what
    scalebench's own strategies compute beside their steps. Times count in reference
    steps: at another speed of the machine they are scaled by the reference step of now.
    Beside busy programs that says nothing of the machine's speed, and the last one
    counts that nothing disturbed. Costs of engines are kept by `engine_measurement`.
    """

    def __init__(self, key: str, run: Run) -> None:
        # Another version of scalebench may compute a step otherwise.
        name = hashlib.sha256(
            f"{__version__} {_KEPT} {key} {run.model_sha256}".encode()
        ).hexdigest()[:16]
        self._threads = run.threads_per_worker
        self._path = cache_folder("steps") / f"{name}.json"

    def with_all(self, sizes: Set[int], most_workers: int) -> Calibration | None:
        """Return what is kept, as it is; None if it lacks step times for some of `sizes` or loads of a node."""
        kept = self._kept()
        return (
            None
            if kept is None
            # Without a reference step it cannot be brought to the speed of now.
            or kept.reference_s is None
            or kept.lacking(sizes, most_workers)
            else kept
        )

    def at_speed_of_now(self, kept: Calibration) -> Calibration:
        """Return `kept` at the speed that this machine has now, which is kept in its place.

        Beside programs that take the cores it is returned at the last speed that
        nothing disturbed.
        """
        reference_s = measure_reference(self._threads)
        if reference_s is not None:
            kept = kept.at(reference_s)
            self.keep(kept)
        return kept

    def keep(self, measured: Calibration) -> None:
        """Keep what was `measured`, in place of what was kept of the same batch sizes and strategies.

        Nothing is kept where step times were disturbed.
        """
        if measured.reference_s is None or any(
            table.disturbed for table in measured.tables
        ):
            return
        before = self._kept()
        if before is not None:
            # At one speed of the machine, before they stand in one table.
            before = before.at(measured.reference_s)
            operations = before.operations | measured.operations
            measured = (
                measured.with_tables(before.tables)
                .with_arithmetic(before.arithmetic)
                .model_copy(update={"operations": operations})
            )
        # a cache that cannot be written is one that nothing is read from
        with suppress(OSError, ResultsError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Engines are kept by `engine_measurement`, for all models.
            measured.model_copy(update={"engines": EngineCosts()}).save(self._path)

    def _kept(self) -> Calibration | None:
        with suppress(ClusterError):
            return read_calibration(self._path)
        return None
