"""Sentences of the answer: phrases that are the message, and phrases that can be skipped."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Phrase(NamedTuple):
    """A part of a sentence: `strong` parts are the message, `detail` parts can be skipped."""

    text: str
    kind: Literal["plain", "strong", "detail"] = "plain"


Sentence = tuple[Phrase, ...]


def plain(text: str) -> Sentence:
    """Return a sentence without a message or details."""
    return (Phrase(text),)


def as_text(sentence: Sentence) -> str:
    """Return the plain text of `sentence`."""
    return "".join(phrase.text for phrase in sentence)
