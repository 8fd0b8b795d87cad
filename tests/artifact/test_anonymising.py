"""Names in packed programs are masked without changing the code."""

from __future__ import annotations

import pytest

from scalebench.artifact.anonymising import redact_code

CODE = '''\
"""By nn, of no other."""
from torch import nn  # as nn wrote it


def build(shape, outputs):
    """See nn's notes in /home/nn/notes, and https://nn:pw@example.org."""
    name = "nn"  # not said, used
    return nn.Linear(shape[0], outputs), name, "https://nn:pw@example.org"
'''
HIDDEN = '''\
"""By <user>, of no other."""
from torch import nn  # as <user> wrote it


def build(shape, outputs):
    """See <user>'s notes in ~/notes, and https://<credentials>@example.org."""
    name = "nn"  # not said, used
    return nn.Linear(shape[0], outputs), name, "https://<credentials>@example.org"
'''


@pytest.fixture(autouse=True)
def called_nn(monkeypatch):
    for name in ("USER", "LOGNAME"):
        monkeypatch.setenv(name, "nn")
    monkeypatch.setenv("HOME", "/home/nn")


def test_names_are_masked_in_comments_and_docstrings_only():
    assert redact_code(CODE) == HIDDEN


def test_text_that_does_not_parse_loses_homes_and_secrets_only():
    assert redact_code('nn = """ /home/nn/x') == 'nn = """ ~/x'
    assert redact_code("") == ""
