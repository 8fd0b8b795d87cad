"""Our values that follow without any run: by a fit to published rows, or from a priced what-if.

`what_if.yaml` of a paper has the what-ifs, priced in seconds and drawn with the component that binds each cell.
"""

from __future__ import annotations

import io
from functools import lru_cache
from pathlib import Path

import pandas as pd
from pydantic import Field, PositiveFloat, PositiveInt

from scalebench.analysis.critical_batch import EpochsLaw, fit_epochs
from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.device import load_device
from scalebench.errors import StudyError, UsageError, nearest
from scalebench.figures.what_if import draw_what_if
from scalebench.measured import Measured
from scalebench.models.layer_files import load_layers
from scalebench.papers.obtained import Obtained
from scalebench.papers.paper_folder import WHAT_IFS, found_file
from scalebench.pricing.devices import Roofline, Stated
from scalebench.pricing.platform import Platform
from scalebench.pricing.prediction import Predictor, Workload
from scalebench.pricing.what_if import Axis, Plane, what_if
from scalebench.study.spec import Component
from scalebench.study.validation import StrictModel, read_as
from scalebench.system.bounded_read import read_bytes
from scalebench.validation.held_out import predict_published
from scalebench.validation.measurements import read_published
from scalebench.validation.prediction_errors import with_errors

# In the column `study`: ours follows from the paper's entries.csv; from its rows.csv; from the rows of all sources.
ENTRIES, ROWS, PUBLISHED_ROWS = "entries", "rows", "published"
_FITTED_UP_TO = "1.0"  # MLPerf rounds that are fitted; later ones are held out


class WhatIf(StrictModel):
    """The training of a model along one axis or two, as `scalebench what-if` prices it."""

    description: str
    model: str = Field(description="layer table")
    cluster: str
    device: str | None = Field(None, description="roofline of this device, in place of a stated step")
    step_time: PositiveFloat | None = Field(None, description="seconds of a worker's step")
    strategy: Component = Component(name="allreduce")
    workers: PositiveInt = 64
    batch: PositiveInt = 64
    samples: PositiveInt
    epochs: PositiveInt = 1
    collective: str = "auto"
    vary: list[str] = Field(min_length=1, max_length=2, description="AXIS=LOW..HIGH[:POINTS] or AXIS=VALUE,VALUE,...")

    def price(self) -> Plane:
        """Return the priced plane."""
        workload = Workload(load_layers(self.model), self.samples, self.epochs, self.batch)
        axes = [Axis.parse(text) for text in self.vary]
        return what_if(Predictor(workload, self._platform()), self.strategy, self.workers, axes)

    def draw(self, plane: Plane, path: Path) -> None:
        """Write the figure of `plane` to `path`."""
        place = "" if any(axis.name == "workers" for axis in plane.axes) else f" at {self.workers:,} workers"
        platform = self._platform()
        what = f"{self.model} by {self.strategy}{place} on {platform.cluster.name}; {platform.device.source}"
        draw_what_if(path, {str(self.strategy): plane}, what)

    def seen_from(self, paper: Path) -> WhatIf:
        """Return this with the files of its cluster and device found from the folder `paper`."""
        files = {name: found_file(paper, file) for name in ("cluster", "device") if (file := getattr(self, name))}
        return self.model_copy(update=files)

    def _platform(self) -> Platform:
        if (self.device is None) == (self.step_time is None):
            raise UsageError(f"what-if of {self.model}: give device or step_time, one of them")
        if self.device is not None:
            return Platform(load_cluster(self.cluster), Roofline(load_device(self.device)), collective=self.collective)
        stated = Stated(self.step_time or 0.0, self.batch)
        return Platform(load_cluster(self.cluster), stated, collective=self.collective)


class _WhatIfs(StrictModel):
    planes: dict[str, WhatIf]


def read_what_ifs(path: Path) -> dict[str, WhatIf]:
    """Read `what_if.yaml`; no planes where there is no such file.

    Raises:
        StudyError: not a mapping of planes; one line that names file and key.
    """
    if not path.is_file():
        return {}
    planes = read_as(path, _WhatIfs, StudyError, "file of what-ifs").planes
    return {name: plane.seen_from(path.parent) for name, plane in planes.items()}


def sources(folder: Path) -> tuple[str, ...]:
    """Return the values of `study` that need no run in the paper of `folder`."""
    return (ENTRIES, ROWS, PUBLISHED_ROWS, *read_what_ifs(folder / WHAT_IFS))


def without_run(folder: Path, study: str, quantity: str, workers: int | None) -> Obtained | None:
    """Return `quantity` of the paper in `folder`, None if it takes runs of `study`.

    `epochs_at_batch@B`: by E0 (1 + B / B_crit), fitted to the first rounds of entries.csv. `prediction_accuracy`: 1 -
    mean error at the held rows of experiments/published/. `predicted_efficiency@MODEL`: of rows.csv, calibrated
    on its base row and on the base rows of experiments/published/. `share_bound_by@COMPONENT`: of a what-if.
    """
    name, _, argument = quantity.partition("@")
    published = folder.parent / "published" / "scaling.csv"
    if (study, name) == (ENTRIES, "epochs_at_batch"):
        law, rows = _law(folder / f"{ENTRIES}.csv")
        return Obtained(law.epochs(float(argument))._replace(n=rows), "fitted")
    if (study, name) == (PUBLISHED_ROWS, "prediction_accuracy"):
        errors = _predicted(published, None)["error"].abs()
        return Obtained(Measured(1 - float(errors.mean()), n=len(errors)), "fitted")
    if (study, name) == (ROWS, "predicted_efficiency"):
        return _efficiency(_predicted(published, folder / f"{ROWS}.csv"), argument, workers)
    if study not in (what_ifs := read_what_ifs(folder / WHAT_IFS)):
        return None
    plane = what_ifs[study].price()
    if name != "share_bound_by":
        raise UsageError(f"unknown quantity {name!r} of a what-if; expected share_bound_by@COMPONENT")
    if argument not in plane.components:
        raise UsageError(f"{quantity}: unknown component {argument!r}; {nearest(argument, plane.components)}")
    return Obtained(Measured(plane.share_bound_by(argument), n=plane.train_s.size), "modelled")


@lru_cache
def _law(entries: Path) -> tuple[EpochsLaw, int]:
    rows = pd.read_csv(io.BytesIO(read_bytes(entries)), dtype={"round": str})
    early = rows[rows["round"] <= _FITTED_UP_TO]
    return fit_epochs(early["batch_global"], early["epochs"]), len(early)


@lru_cache
def _predicted(published: Path, own: Path | None) -> pd.DataFrame:
    """Return predictions at the held rows of `own`, else of `published`, calibrated on what neither holds."""
    table, _ = read_published(published)
    if own is not None:
        known, (rows, _) = table[table["split"] != "hold"], read_published(own)
        table = pd.concat([known, rows], ignore_index=True)
    return with_errors(predict_published(table)[0])


def _efficiency(predictions: pd.DataFrame, model: str, workers: int | None) -> Obtained | None:
    """Return the predicted throughput over that of linear scaling from one worker."""
    found = predictions[(predictions["model"] == model) & (predictions["workers"] == workers)]
    if found.empty:
        return None
    row = found.iloc[0]
    value, low, high = (float(row[name] / row["linear"]) for name in ("predicted", "low", "high"))
    return Obtained(Measured(value, low, high, len(found)), "fitted")
