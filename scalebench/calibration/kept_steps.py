"""What earlier studies of the same model measured on this machine, undisturbed; kept in the cache.

These are step times, and times of what scalebench's own strategies compute beside their steps. They count in reference
steps: at another speed of the machine they are scaled by the reference step of now. Beside busy programs that says
nothing of the machine's speed, and the last one counts that nothing disturbed. Costs of engines are kept by
`engine_measurement`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Set
from contextlib import suppress

from scalebench import __version__
from scalebench.calibration.calibration_file import Calibration, read_calibration
from scalebench.calibration.steps_under_load import measure_reference
from scalebench.cluster.engine_costs import EngineCosts
from scalebench.errors import ClusterError, ResultsError
from scalebench.study.spec import Run
from scalebench.system.atomic_write import cache_folder


class KeptSteps:
    """The step times of the model of `run`, for calibrations with `key`."""

    def __init__(self, key: str, run: Run) -> None:
        name = hashlib.sha256(f"{__version__} {key} {run.model_sha256}".encode()).hexdigest()[:16]
        self._threads = run.threads_per_worker
        self._path = cache_folder("steps") / f"{name}.json"

    def with_all(self, sizes: Set[int], most_workers: int) -> Calibration | None:
        """Return what is kept, as it is; None if it lacks step times for some of `sizes` or loads of a node."""
        kept = self._kept()
        return None if kept is None or kept.reference_s is None or kept.lacking(sizes, most_workers) else kept

    def at_speed_of_now(self, kept: Calibration) -> Calibration:
        """Return `kept` at the speed that this machine has now, which is kept in its place.

        Beside programs that take the cores it is returned at the last speed that nothing disturbed.
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
        if measured.reference_s is None or any(table.disturbed for table in measured.tables):
            return
        before = self._kept()
        if before is not None:
            before = before.at(measured.reference_s)
            operations = before.operations | measured.operations
            measured = measured.with_tables(before.tables).model_copy(update={"operations": operations})
        with suppress(OSError, ResultsError):  # a cache that cannot be written is one that nothing is read from
            self._path.parent.mkdir(parents=True, exist_ok=True)
            measured.model_copy(update={"engines": EngineCosts()}).save(self._path)

    def _kept(self) -> Calibration | None:
        with suppress(ClusterError):
            return read_calibration(self._path)
        return None
