"""Facts of a sentence, so that tests need not quote the words between them."""

from __future__ import annotations

import re

_WITHIN_A_SENTENCE = 50  # characters between two facts


def in_order(text: str, *facts: str) -> bool:
    """Return True if `text` holds the facts (numbers with units, names, signs) as whole words, one after another."""
    return re.search(".*?".join(map(_whole, facts)), text, re.DOTALL) is not None


def together(text: str, *facts: str) -> bool:
    """Return True if the facts stand one after another in one sentence of a long `text`."""
    return re.search(naming(*facts), text) is not None


def naming(*facts: str) -> str:
    """Return a pattern of a message that names these facts one after another in one sentence, for `pytest.raises`."""
    return f"(?s:.{{0,{_WITHIN_A_SENTENCE}}}?)".join(map(_whole, facts))


def _whole(fact: str) -> str:
    before = r"(?<![\w.-])" if fact[0].isalnum() else ""
    after = r"(?!\w)" if fact[-1].isalnum() else ""
    return before + re.escape(fact) + after
