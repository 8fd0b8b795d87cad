"""What is told of a launch that mpirun, or a rank, ended."""

from __future__ import annotations

import pytest

from scalebench.launch.postmortem import cause_of_death

SLOTS = """--------------------------------------------------------------------------
There are not enough slots available in the system to satisfy the 64
slots that were requested by the application:

  python

Either request fewer procs for your application, or make more slots
available for use.
--------------------------------------------------------------------------
"""
TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1\nImportError: no such thing\nmpirun: ended\n'


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            SLOTS,
            "There are not enough slots available in the system to satisfy the 64 slots that were requested by the "
            "application; see",
        ),
        (TRACE, "ImportError: no such thing; see"),
        ("\n---\n\n", "it said nothing; see"),
        ("word " * 400, "word ...; see"),
    ],
)
def test_mpirun_is_quoted_by_its_first_paragraph_or_by_an_exception(said, told, tmp_path):
    (tmp_path / "stderr.txt").write_text(said)
    death = cause_of_death(tmp_path, 1)
    assert death.status == "failed"
    assert death.error.startswith("mpirun exited with code 1: ")
    assert told in death.error
    assert len(death.error.partition("; see")[0]) < 340
