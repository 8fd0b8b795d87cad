"""A report on a synthetic study, written once for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from scalebench.analysis import Results, load
from scalebench.records.schema import EpochRow, RunRow
from scalebench.records.store import Store
from scalebench.report.page import write_report
from tests.records_factory import keep_study, study_rows
from tests.report.chromium import Browser, chromium

Rows = Iterable[tuple[RunRow, Sequence[EpochRow]]]
FACTS = {
    "cpu": {"model": "Abacus 9000", "governor": None},
    "git_dirty": False,
    "packages": {"scalebench": "0.1.0"},
}


@pytest.fixture(scope="session")
def keep(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Results]:
    """`keep(rows)` writes rows as a study and loads it."""

    def write(rows: Rows) -> Results:
        folder = tmp_path_factory.mktemp("results") / "study"
        with Store(folder, fsync=False) as store:
            for run, epochs in rows:
                store.append(run, epochs)
            keep_study(
                store.folder,
                {
                    "name": "synthetic",
                    "description": "What is known beforehand.",
                    "workers": [1, 2],
                },
            )
            store.keep_provenance(FACTS)
        return load(folder)

    return write


@pytest.fixture(scope="session")
def results(keep: Callable[..., Results]) -> Results:
    """A study like the default one, with one failed run."""
    rows = study_rows()
    failed = {
        "run_id": "lost",
        "status": "failed",
        "error": "rank 3 died: SIGKILL",
        "train_s": None,
    }
    return keep([*rows, (rows[0][0].model_copy(update=failed), [])])


@pytest.fixture(scope="session")
def small(keep: Callable[..., Results]) -> Results:
    """A study that is drawn in little time."""
    strategies = ("serial", "allreduce", "epoch_average")
    return keep(
        study_rows(
            strategies=strategies, workers=(1, 2), native_workers=(1,), repetitions=2
        )
    )


@pytest.fixture(scope="session")
def page(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on `results`."""
    return write_report(
        results.folder, tmp_path_factory.mktemp("report") / "report.html"
    )


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterable[Browser]:
    """The browser, skipped if missing."""
    if chromium() is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def browser(opened: Browser) -> Browser:
    """The browser with a screen of a common size, in light colours."""
    opened.look(1280, 900)
    return opened
