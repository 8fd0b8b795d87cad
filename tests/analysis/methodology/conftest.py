"""A sound study for tests of rules."""

from __future__ import annotations

import pytest

from tests.doctored import Doctored, make_sound


@pytest.fixture
def sound() -> Doctored:
    """A study without findings."""
    return make_sound()
