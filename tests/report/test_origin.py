"""Assignment of rows to launch environments."""

from __future__ import annotations

import pandas as pd

from scalebench.records.provenance import name_of
from scalebench.report.origin import machines, study_facts
from tests.records_factory import run_row


def test_rows_belong_to_named_or_matching_provenance():
    """Two environments that differ in a variable alone have the same machine, packages and commit."""
    same = {"host_hash": "cafe", "packages_hash": "beef", "git_commit": "0" * 40}
    files = [
        same | {"environment": {"OMP_PROC_BIND": value}}
        for value in ("close", "spread")
    ]
    # as `provenance_in` reads them
    files = [facts | {"provenance": name_of(facts)} for facts in files]
    named = (
        files[0]["provenance"],
        files[1]["provenance"],
        files[1]["provenance"],
        None,
    )
    rows = pd.DataFrame([same | {"provenance": name} for name in named])
    assert [machine["runs"] for machine in machines(rows, files)] == [1 + 1, 2 + 1]


def test_single_epoch_is_singular(keep):
    said = {
        epochs: dict(study_facts(keep([(run_row(epochs=epochs), [])])))["training"]
        for epochs in (1, 2)
    }
    assert said[1].startswith("1 epoch, ")
    assert said[2].startswith("2 epochs, ")
