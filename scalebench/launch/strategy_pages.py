"""The parts of the strategies' pages that the code knows: `python -m scalebench.launch.strategy_pages docs/strategies`.

Under `## Options` the table, or `None.`; under `## Bytes` the block with the formulas. Rule, advice and what is said of
the formulas are written by hand. The timelines are drawn by `scalebench.figures.timelines`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from scalebench.launch.matrix import Entry, describe_strategies
from scalebench.strategies import registry
from scalebench.strategies.description import options_of, sendings_of

_OPTIONS = re.compile(r"(?<=^## Options\n\n)(?:\|.*\n)+|(?<=^## Options\n\n)None\.\n", re.MULTILINE)
_FORMULAS = re.compile(r"(?<=^## Bytes\n\n```text\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)


def renewed(page: str, entry: Entry) -> str:
    """`page` of one strategy with the options and formulas that its class states.

    Raises:
        ValueError: the page has no such place.
    """
    if entry.one_worker:
        return page
    for place, text in ((_OPTIONS, _options(entry.name)), (_FORMULAS, _formulas(entry))):
        found = list(place.finditer(page))
        if len(found) != 1:
            raise ValueError(f"the page of {entry.name} has {len(found)} places for {text!r}, not 1")
        page = page[: found[0].start()] + text + page[found[0].end() :]
    return page


def _options(name: str) -> str:
    cls = registry.find(name)
    rows = [
        f"| `{option.name}` | {'' if cls.model_fields[option.name].default is None else f'`{option.default}`'} "
        f"| {option.description} |"
        for option in options_of(cls)
    ]
    return "\n".join(["| option | default | what it says |", "|---|---|---|", *rows, ""]) if rows else "None.\n"


def _formulas(entry: Entry) -> str:
    return "\n".join(_sendings(entry)) + "\n"


def _sendings(entry: Entry) -> Iterator[str]:
    sendings = sendings_of({engine: registry.create(entry.name, {}, engine) for engine in entry.engines})
    for sending in sendings:
        if len(sendings) > 1:
            yield f"on {', '.join(sending.engines)}:"
        yield f"synchronisations per epoch:  {sending.syncs}"
        yield f"bytes per epoch and worker:  {sending.bytes}"


if __name__ == "__main__":
    import sys
    from pathlib import Path

    for each in describe_strategies():
        path = Path(sys.argv[1]) / f"{each.name}.md"
        path.write_text(renewed(path.read_text(encoding="utf-8"), each), encoding="utf-8")
