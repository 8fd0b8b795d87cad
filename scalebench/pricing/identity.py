"""Keys of caches by the object itself, for values that are equal to others or cannot be hashed."""

from __future__ import annotations


class Identity:
    """Stands for `of` and for nothing that equals it; keeps it alive, so that no later object is taken for it."""

    __slots__ = ("of",)

    def __init__(self, of: object) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.of is other.of

    def __hash__(self) -> int:
        return id(self.of)
