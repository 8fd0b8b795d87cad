"""Step times that an earlier study of the same model measured on this machine, undisturbed; kept in the cache.

They count in reference steps: at another speed of the machine they are scaled by the reference step of now. Costs of
engines are kept by `engine_costs`; what strategies compute beside their steps is measured in each study.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress

from scalebench.cluster.engine_costs import EngineCosts
from scalebench.errors import ClusterError, ResultsError
from scalebench.pricing.calibration_file import Calibration, read_calibration
from scalebench.study.spec import Run
from scalebench.system.atomic_write import cache_folder
from scalebench.virtual.calibration import measure_reference


class KeptSteps:
    """The step times of the model of `run`, for calibrations with `key`."""

    def __init__(self, key: str, run: Run) -> None:
        name = hashlib.sha256(f"{key} {run.model_sha256}".encode()).hexdigest()[:16]
        self._threads = run.threads_per_worker
        self._path = cache_folder("steps") / f"{name}.json"

    def read(self, sizes: set[int], most_workers: int) -> Calibration | None:
        """Return the step times at the speed of now; None if they lack some of `sizes` or loads of a node."""
        kept = self._kept()
        if kept is None or kept.lacking(sizes, most_workers):
            return None
        return kept.at(measure_reference(self._threads))

    def keep(self, measured: Calibration) -> None:
        """Keep the step times of `measured`, beside those of other batch sizes, unless some were disturbed."""
        if measured.reference_s is None or any(table.disturbed for table in measured.tables):
            return
        kept = self._kept()
        if kept is not None:
            measured = measured.with_tables(kept.at(measured.reference_s).tables)
        with suppress(OSError, ResultsError):  # a cache that cannot be written is one that nothing is read from
            self._path.parent.mkdir(parents=True, exist_ok=True)
            measured.model_copy(update={"engines": EngineCosts(), "operations": {}}).save(self._path)

    def _kept(self) -> Calibration | None:
        with suppress(ClusterError):
            return read_calibration(self._path)
        return None
