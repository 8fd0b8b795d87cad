"""Damaged rows are checked and compared, or refused with an error of the package."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from scalebench.analysis import load
from scalebench.analysis.methodology import check
from scalebench.analysis.verdicts import compare_studies
from scalebench.errors import ScalebenchError
from scalebench.records.schema import RunRow, columns
from tests.doctored import make_sound

EXAMPLES = int(os.environ.get("SCALEBENCH_HOSTILE", "15"))
VALUES = [
    "",
    "0",
    "-1",
    "7",
    "1e308",
    "1e-320",
    "inf",
    "nan",
    "true",
    "native",
    "failed",
    "{}",
    "=cmd()",
    "../x",
    "2",
]
VALUES += [
    "-inf",
    "1e300",
    "1e149",
    "1e9",
    "1e-9",
    "-1e9",
    "7.5",
    "-0.5",
    "99999999999999999999",
    "9007199254740992",
]
FACTS = st.recursive(
    st.none() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3),
)
KEYS = st.sampled_from(["host_hash", "packages_hash", "packages", "cpu", "gpus"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    study = make_sound()
    study.drop(lambda row: row.repetition > 1 or row.workers > 2)
    return study.write(tmp_path_factory.mktemp("whole"))


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, 19),
            st.sampled_from(columns(RunRow)),
            st.sampled_from(VALUES),
        ),
        min_size=1,
        max_size=4,
    ),
    everywhere=st.booleans(),
    facts=st.dictionaries(
        KEYS,
        FACTS | st.dictionaries(st.text(max_size=3), FACTS, max_size=2),
        max_size=3,
    ),
)
def test_damaged_cells_raise_package_errors_only(whole, edits, everywhere, facts):
    folder = whole.parent / "hurt"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    (folder / "provenance" / "more.json").write_text(json.dumps(facts))
    with (whole / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for number, column, value in edits:
        for row in rows if everywhere else [rows[number % len(rows)]]:
            row[column] = value
    with (folder / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns(RunRow), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for question in (
        lambda: check(folder),
        lambda: compare_studies(load(whole), load(folder)),
    ):
        with contextlib.suppress(ScalebenchError):
            question()
