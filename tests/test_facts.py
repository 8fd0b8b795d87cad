"""The facts of a sentence, which other tests assert."""

from __future__ import annotations

import pytest

from tests.facts import in_order

TEXT = "At 16 workers ours takes 50 % less time (-2.5 to -1.9 points)."


@pytest.mark.parametrize(
    "facts",
    [
        ("16 workers", "50 % less"),
        ("ours", "-2.5", "-1.9"),
        ("(-2.5 to -1.9 points).",),
    ],
)
def test_facts_of_a_sentence_are_found(facts):
    assert in_order(TEXT, *facts)


@pytest.mark.parametrize(
    "facts",
    [
        ("50 % less", "16 workers"),
        ("50 % more",),
        ("6 workers",),
        ("2.5",),
        ("5 to",),
        ("50 % less", "50 % less"),
    ],
    ids=["order", "sign", "digits", "minus", "fraction", "once"],
)
def test_other_facts_are_not(facts):
    assert not in_order(TEXT, *facts)
