"""What is said of predicted points."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from scalebench.predictions.points import _shares


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        (
            {"compute": 0.7, "network": 0.2},
            "network to 20 %; the rest, 10 %, to several at once or to none",
        ),
        ({"compute": 0.8, "network": 0.21}, "network to 21 %"),
        (
            {"compute": 0.8, "cycle": 0.25},
            "cycle to 25 %; more than all together, as one waits for another",
        ),
    ],
)
def test_shares_of_what_the_time_follows_account_for_all_of_it(shares, said):
    assert _shares(SimpleNamespace(shares=shares)).endswith(said)
