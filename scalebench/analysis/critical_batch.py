"""The critical batch of each series of a study, from its epochs to the target metric at several global batches."""

from __future__ import annotations

from dataclasses import dataclass

from scalebench.analysis.epochs_to_target import LEAST_BATCHES, EpochsLaw, fit_epochs
from scalebench.analysis.loading import Results
from scalebench.analysis.rounds import CellRuns, runs_by_cell
from scalebench.analysis.time_to_target import reached_by_all

DRAWS = 200  # resamples of a fit
_FAR = 10.0  # a critical batch beyond so many times the largest batch is extrapolation


@dataclass(frozen=True)
class SeriesLaw:
    """The law of one execution, engine and label, fitted to runs at global batches from `least` to `most`."""

    execution: str
    engine: str
    label: str
    law: EpochsLaw
    least: int
    most: int

    @property
    def grows(self) -> bool:
        """Return True if the critical batch is within reach of the measured batches."""
        return self.law.critical_batch <= _FAR * self.most


def critical_batches(results: Results, *, draws: int | None = None) -> list[SeriesLaw]:
    """Fit the law to every series that has LEAST_BATCHES global batches at which every run reached the target.

    A batch at which some run did not is left out: the runs that did alone would show too few epochs.
    """
    series: dict[tuple[str, str, str], list[CellRuns]] = {}
    for cell in runs_by_cell(results):
        if reached_by_all(cell) and cell.batch_global:
            series.setdefault((cell.execution, cell.engine, cell.label), []).append(cell)
    found = []
    for key, own in series.items():
        rows = [(cell.batch_global or 0, epochs) for cell in own for epochs in cell.epochs_to_target.values()]
        rows = [(batch, epochs) for batch, epochs in rows if epochs > 0]
        batches, epochs = [batch for batch, _ in rows], [epochs for _, epochs in rows]
        if len(set(batches)) >= LEAST_BATCHES:
            found.append(SeriesLaw(*key, fit_epochs(batches, epochs, draws=draws or DRAWS), min(batches), max(batches)))
    return found
