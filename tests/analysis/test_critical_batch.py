"""Critical batches of the series of a study."""

from __future__ import annotations

import pytest

from scalebench.analysis.epochs_to_target import critical_batches
from tests.analysis.test_comparing import run


def aimed(strategy, workers, epochs, seed=0, **changes):
    """A run at the global batch 8 x workers that reached its target after `epochs`; None: never."""
    time = None if epochs is None else 0.01 * epochs
    changes = {"epochs": 100, "target_metric": 0.9, "time_to_target_s": time, "epochs_to_target": epochs} | changes
    return run(strategy, workers, 4.0, repetition=seed, seed=seed, **changes)


def law(workers):
    return round(20 * (1 + 8 * workers / 64))


COUNTS = (1, 2, 4, 8, 16)


def test_series_of_three_batches_has_a_critical_batch_and_others_have_none(study):
    rows = [aimed("allreduce", workers, law(workers), seed) for workers in COUNTS for seed in (0, 1)]
    (found,) = critical_batches(study(rows=[aimed("serial", 1, 20), *rows]), draws=5)
    assert (found.label, found.execution, found.least, found.most) == ("allreduce", "virtual", 8, 128)
    assert found.law.critical_batch == pytest.approx(64, rel=0.05)
    assert found.grows


def test_batches_that_some_run_fails_at_are_not_fitted(study):
    rows = [aimed("allreduce", workers, law(workers), seed) for workers in COUNTS for seed in (0, 1)]
    rows += [aimed("allreduce", 32, 21, 0), aimed("allreduce", 32, None, 1)]
    (found,) = critical_batches(study(rows=rows), draws=5)
    assert found.most == 128
    assert found.law.critical_batch == pytest.approx(64, rel=0.05), "21 epochs at batch 256 would raise it"


def test_equal_epochs_have_no_critical_batch_within_reach(study):
    (found,) = critical_batches(study(rows=[aimed("allreduce", workers, 20) for workers in COUNTS]), draws=2)
    assert not found.grows


def test_laws_of_a_study_are_fitted_once(study, monkeypatch):
    made = study(rows=[aimed("allreduce", workers, law(workers)) for workers in COUNTS])
    monkeypatch.setattr("scalebench.analysis.epochs_to_target.DRAWS", 2)
    found = critical_batches(made)
    monkeypatch.delattr("scalebench.analysis.epochs_to_target.fit_epochs")
    assert critical_batches(made) == found
