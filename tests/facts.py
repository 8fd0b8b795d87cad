"""Facts of a sentence, so that tests need not quote the words between them."""

from __future__ import annotations

import re


def in_order(text: str, *facts: str) -> bool:
    """Return True if `text` holds the facts (numbers with units, names, signs) as whole words, one after another."""
    return re.search(".*?".join(map(_whole, facts)), text, re.DOTALL) is not None


def _whole(fact: str) -> str:
    before = r"(?<![\w.-])" if fact[0].isalnum() else ""
    after = r"(?!\w)" if fact[-1].isalnum() else ""
    return before + re.escape(fact) + after
