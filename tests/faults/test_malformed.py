"""Tables that a spreadsheet, an editor or a broken disk made: read, or refused in one line; never a traceback.

Study files get the same treatment in tests/study/test_load.py.
"""

from __future__ import annotations

import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalebench.analysis import load
from scalebench.errors import ResultsError
from scalebench.records.progress import progress_of
from scalebench.records.store import Store
from tests.records_factory import study_rows

SETTINGS = settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
# of tests that run with each change: three readers read a whole study for an example
FEWER = settings(SETTINGS, max_examples=80)
TOKENS = [
    b",",
    b'"',
    b"\n",
    b"\r",
    b";",
    b"\t",
    b"\x00",
    b"\xff",
    b"\xef\xbb\xbf",
    b"nan",
    b"inf",
    b"-1",
    b"1e999",
    b"1e300",
    b"1e-320",
    b"-inf",
    b"99999999999999999999",
    b"",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with Store(folder, fsync=False) as store:
        for run, epochs in study_rows(
            workers=(1, 2), native_workers=(1,), repetitions=1
        ):
            store.append(run, epochs)
    return folder


def read_all(folder):
    """Check that each reader returns or raises a one-line error."""
    for reader in (progress_of, load, lambda place: Store(place, fsync=False).close()):
        message = f"{folder} was read"
        try:
            reader(folder)
        except ResultsError as error:
            message = str(error)
        assert "\n" not in message
        assert str(folder) in message


def hurt(whole, name, data):
    folder = whole.parent / "hurt"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    (folder / name).write_bytes(data)
    return folder


@FEWER
@given(
    name=st.sampled_from(["runs.csv", "epochs.csv"]),
    edits=st.lists(
        st.tuples(
            st.floats(0, 1),
            st.integers(0, 40),
            st.one_of(
                st.sampled_from(TOKENS),
                st.binary(max_size=12),
                st.text(max_size=6).map(str.encode),
            ),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_edited_tables_are_read_or_refused_in_one_line(whole, name, edits):
    data = (whole / name).read_bytes()
    for place, length, replacement in edits:
        start = int(place * len(data))
        data = data[:start] + replacement + data[start + length :]
    read_all(hurt(whole, name, data))


@pytest.mark.thorough
@SETTINGS
@given(
    name=st.sampled_from(["runs.csv", "epochs.csv", "planned.json", "lock"]),
    data=st.binary(max_size=300),
)
def test_any_bytes_are_read_or_refused_in_one_line(whole, name, data):
    read_all(hurt(whole, name, data))


@pytest.mark.thorough
@SETTINGS
@given(data=st.data())
def test_shuffled_and_repeated_cells_are_read_or_refused_in_one_line(whole, data):
    header, *rows = (whole / "runs.csv").read_text().splitlines()
    row = data.draw(st.integers(0, len(rows) - 1))
    cells = rows[row].split(",")
    cells = data.draw(
        st.one_of(st.permutations(cells), st.lists(st.sampled_from(cells), max_size=90))
    )
    rows[row] = ",".join(cells)
    read_all(hurt(whole, "runs.csv", "\n".join([header, *rows, ""]).encode()))


@pytest.mark.parametrize(
    ("column", "cell", "expected"),
    [
        ("train_s", "inf", "1e-09 to 1e+09 s"),
        ("comm_s", "-1e300", "at most 1e+09 s"),
        (
            "parameters",
            "99999999999999999999",
            "a whole number of at most 9007199254740992",
        ),
        ("attempt", "9" * 5000, "a number from 1 up"),
        ("attempt", "0", "a number from 1 up"),
        ("others_load", "much", "a number"),
    ],
)
def test_status_refuses_the_same_numbers_as_other_commands(
    whole, column, cell, expected
):
    header, *lines = (whole / "runs.csv").read_text().splitlines()
    cells = lines[-1].split(",")
    cells[header.split(",").index(column)] = cell
    folder = hurt(
        whole,
        "runs.csv",
        "\n".join([header, *lines[:-1], ",".join(cells), ""]).encode(),
    )
    place = f"runs.csv, line {len(lines) + 1}: {column} is "
    with pytest.raises(ResultsError, match=place) as error:
        progress_of(folder)
    assert str(error.value).endswith(f"expected {expected}; repair or remove the line")
    with pytest.raises(ResultsError, match=place):
        load(folder)
