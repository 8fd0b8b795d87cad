"""Hides who wrote a program, without changing what it does."""

from __future__ import annotations

import io
import tokenize
from itertools import accumulate

from scalebench.records.provenance import redact

_LAYOUT = (tokenize.NL, tokenize.COMMENT)
_BEGINS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def redact_code(text: str) -> str:
    """The Python program `text`, without homes and secrets, and in comments and docstrings without names either.

    Elsewhere a word that is called as the user may be a variable, and stays.
    """
    lines = io.StringIO(text).readlines()
    begins = list(accumulate(map(len, lines), initial=0))
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return redact(text, names=False)
    pieces, end = [], 0
    for token in _said(tokens):
        first, last = (begins[row - 1] + column for row, column in (token.start, token.end))
        pieces += [text[end:first], redact(text[first:last])]
        end = last
    return redact("".join([*pieces, text[end:]]), names=False)


def _said(tokens: list[tokenize.TokenInfo]) -> list[tokenize.TokenInfo]:
    """Comments, and strings that are whole statements."""
    found, before = [], tokenize.NEWLINE
    for token, after in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
        alone = token.type == tokenize.STRING and before in _BEGINS and after.type in (tokenize.NEWLINE, *_LAYOUT)
        if token.type == tokenize.COMMENT or alone:
            found.append(token)
        if token.type not in _LAYOUT:
            before = token.type
    return found
