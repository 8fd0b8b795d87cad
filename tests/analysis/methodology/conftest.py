"""A sound study for tests of rules."""

from __future__ import annotations

import pytest

from tests.doctored import Doctored, make_sound


@pytest.fixture
def sound() -> Doctored:
    """A study to which no rule objects."""
    return make_sound()
