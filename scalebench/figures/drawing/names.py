"""Names of series in titles and legends: shortened where they are alike, never where they differ, and wrapped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from matplotlib import rcParams

from scalebench.tables.latex import printed_width

LONG = 26  # characters; shorter names stay as they are
_LABEL = re.compile(r"(?P<head>[^(]*?)(?:\((?P<options>.*)\))?(?P<rest> (?:on|in) .*)?", re.DOTALL)
_LETTER = re.compile(r"\([a-z]+\)")  # of a panel
_BREAKS = re.compile(r"(?<=[(,_:/])|(?<=\.)(?!\d)")  # a word may be broken after these, a number nowhere


def family(name: str) -> str:
    """Return the strategy of a series without its options, engine and study."""
    return _parts(name)[0]


def short_names(series: Iterable[str]) -> dict[str, str]:
    """Return a name for each series: long ones without the options that others of the same strategy have too.

    `local_sgd(first=4, steps=16)` beside `local_sgd(first=4, steps=32)` becomes `local_sgd(…, steps=16)`. All names are
    distinct.
    """
    known = list(dict.fromkeys(series))
    options: dict[str, list[set[str]]] = {}
    for name in known:
        head, own, _ = _parts(name)
        options.setdefault(head, []).extend([set(own)] * bool(own))
    common = {head: set.intersection(*found) if len(found) > 1 else set() for head, found in options.items()}
    plain = {head for head, own, _ in map(_parts, known) if not own}  # beside these no option is common to all
    short = {name: _without(name, common[family(name)], family(name) in plain) for name in known}
    taken = list(short.values())
    return {name: own if taken.count(own) == 1 else name for name, own in short.items()}


def _without(name: str, common: set[str], beside_plain: bool) -> str:
    head, options, rest = _parts(name)
    if len(name) <= LONG or not common:
        return name
    kept = [option for option in options if option not in common]
    if not kept and beside_plain:
        return name
    return f"{head}({', '.join(['…', *kept])}){rest}"


def _parts(name: str) -> tuple[str, list[str], str]:
    """Split `head(key=value, key=value) on engine`."""
    match = _LABEL.fullmatch(name)
    if match is None or not match["head"]:
        return name, [], ""
    # A comma inside brackets, as in groups=[4, 8], does not end an option.
    options = re.split(r", (?=[\w.-]+=)", match["options"] or "")
    return match["head"], [option for option in options if option], match["rest"] or ""


def group_name(group: Sequence[str]) -> str:
    """Return the strategies of a group of series, each once: `local_sgd, slowmo`."""
    return ", ".join(dict.fromkeys(family(name) for name in group))


def wrapped(text: str, points: float, size: float) -> str:
    """Break `text` into lines of at most `points` at font `size`: at spaces, and inside of words that are wider."""
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if width(joined, size) <= points:
            lines[-1] = joined
        elif _LETTER.fullmatch(lines[-1]):  # a letter does not stand on a line of its own
            lines[-1:] = _broken(joined, points, size)
        else:
            lines += _broken(word, points, size) if width(word, size) > points else [word]
    return "\n".join(line for line in lines if line)


def _broken(word: str, points: float, size: float) -> list[str]:
    """Break a word after brackets, commas and underscores where that is enough, else anywhere."""
    lines = [""]
    for piece in _BREAKS.split(word):
        whole = width(piece, size) <= points
        for part in [piece] if whole else piece:
            if lines[-1] and width(lines[-1] + part, size) > points:
                lines.append("")
            lines[-1] += part
    return lines


def width(text: str, size: float) -> float:
    """Return the width in points of `text` in the font of the style in use."""
    return printed_width(text, size, str(rcParams["font.family"][0]))
