"""The report as one self-contained HTML file, whose figures are drawn beside its words."""

from __future__ import annotations

import base64
import gc
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from scalebench import __version__
from scalebench.analysis import Results, load
from scalebench.analysis.methodology import Evidence, check
from scalebench.errors import writing
from scalebench.figures import base, plotting
from scalebench.records.provenance import redactor
from scalebench.report import comparison, origin, pictures
from scalebench.report.answer import answer
from scalebench.report.tables import tables
from scalebench.study.spec import slug
from scalebench.system.file_access import atomic_file
from scalebench.tables import Table
from scalebench.tables.html import as_html

TEMPLATES = Path(__file__).with_name("templates")
ORDER = (
    "time-reduction",
    "reduction-parts",
    "time-to-target",
    "strong-scaling",
    "weak-scaling",
    "convergence",
    "scaling-laws",
    "breakdown",
    "agreement",
)
# Drawn last, and so by the process that writes the words: these fit the laws, too,
# which takes as long as the rest of the figure.
_LAST = "scaling-laws"
_ELSEWHERE = "choose another file with --output"
_SHORTEST = 6  # characters: shorter texts hold no path or secret
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def write_report(folder: Path, output: Path | None = None, jobs: int = 1) -> Path:
    """Write the report on the study in `folder` to `output` (plots/<study>/report.html); return its path.

    Of `jobs` processes all but this one draw the figures, while this one computes the
    words; then it draws with them. The same records give the same bytes.

    Raises:
        ResultsError: `folder` cannot be read, or `output` cannot be written.
    """
    evidence = Evidence(load(folder))
    results = evidence.results
    study = str(results.runs["study"].iloc[-1])
    output = output or Path("plots") / slug(study) / "report.html"
    with writing(output, _ELSEWHERE):  # fails before the figures are drawn
        output.parent.mkdir(parents=True, exist_ok=True)
    # One for all pictures, so that equal styles are one class of the page.
    sheet = pictures.StyleSheet()
    with drawing_all(results, jobs) as drawings:
        compared = comparison.comparisons(results)
        reply = answer(results, compared)
        facts = {
            "version": __version__,
            "study": study,
            "description": str(results.study.get("description") or ""),
            "answer": reply,
            "summary": comparison.as_text(reply.sentence),
            "facts": origin.study_facts(results),
            "tables": tables(results, compared),
            "method": check(evidence),
            "machines": origin.machines(evidence.rows, evidence.provenance),
            "rerun": origin.rerun_of(results, evidence.provenance),
        }
        # Not in the processes that draw: classes are numbered in the order of the page.
        drawn = [pictures.inlined(drawing, sheet) for drawing in drawings]
    # Each process that draws finds notes of its own, some of them the same.
    notes = dict.fromkeys(
        [*results.notes, *(note for drawing in drawn for note in drawing.notes)]
    )
    text = render({**facts, "drawings": drawn, "notes": list(notes)}, sheet)
    with writing(output, _ELSEWHERE), atomic_file(output) as file:
        file.write(text)
    return output


@contextmanager
def drawing_all(
    results: Results, jobs: int = 1
) -> Iterator[Iterator[pictures.Drawing]]:
    """Give the default figures, in the order of `ORDER`, drawn by `jobs` processes.

    All but this one begin at once. This one draws with them when the first figure is
    asked for.
    """
    rank = {name: place for place, name in enumerate(ORDER)}
    # Those that ORDER does not know, of third parties, follow by name.
    names = sorted(
        base.default_figures(), key=lambda name: (rank.get(name, len(rank)), name)
    )
    if jobs == 1:
        yield (_draw(results, name) for name in names)
        return
    context = get_context("fork")
    queue = Queue(
        sorted(plotting.slowest_first(names), key=lambda name: name == _LAST),
        context.Array("i", 2),
    )
    others = ProcessPoolExecutor(
        jobs - 1, context, initializer=_begin, initargs=(results, queue)
    )
    with others as pool:
        shares = [pool.submit(_draw_share) for _ in range(jobs - 1)]

        def in_order() -> Iterator[pictures.Drawing]:
            own = [_draw(results, name) for name in queue.backwards()]
            drawn = own + [one for share in shares for one in share.result()]
            yield from sorted(drawn, key=lambda one: names.index(one.name))

        yield in_order()


@dataclass(frozen=True)
class Queue:
    """Names of figures, which processes take from both ends; `taken` is shared, and counts those of each end."""

    names: Sequence[str]
    taken: Any

    def forwards(self) -> Iterator[str]:
        """Yield the names from the beginning that no process has taken."""
        while (place := self._take(0)) is not None:
            yield self.names[place]

    def backwards(self) -> Iterator[str]:
        """Yield the names from the end that no process has taken."""
        while (place := self._take(1)) is not None:
            yield self.names[-1 - place]

    def _take(self, end: int) -> int | None:
        with self.taken.get_lock():
            if sum(self.taken) == len(self.names):
                return None
            self.taken[end] += 1
            return int(self.taken[end]) - 1


_shared: list[tuple[Results, Queue]] = []  # of a process that draws


def _begin(results: Results, queue: Queue) -> None:
    # It ends soon: a search for unused objects is a sixth of its time.
    gc.disable()
    _shared.append((results, queue))


def _draw_share() -> list[pictures.Drawing]:
    results, queue = _shared[-1]
    return [_draw(results, name) for name in queue.forwards()]


def _draw(results: Results, name: str) -> pictures.Drawing:
    # Imports matplotlib, which the process of the words needs at their end only.
    from scalebench.report.drawings import draw

    return draw(results, name)


def render(facts: Mapping[str, Any], sheet: pictures.StyleSheet) -> str:
    """Render the page; its content security policy allows its own style and script only, by their hashes."""
    # Equal cells are many, and looked up faster than redacted.
    printable = partial(_printable, cache(redactor(names=False)))
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=printable,
    )
    environment.filters["html"] = partial(_table, printable)
    css = {
        "rules": sheet.rules(),
        "light": sheet.colors(dark=False),
        "dark": sheet.colors(dark=True),
    }
    # Escaped, the quotes of a style would be none.
    rules = {name: Markup(text) for name, text in css.items()}  # noqa: S704
    style = Markup(environment.get_template("report.css").render(sheet=rules))  # noqa: S704
    script = Markup((TEMPLATES / "report.js").read_text(encoding="utf-8"))  # noqa: S704
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = environment.get_template("report.html.j2")
    return page.render(facts, style=style, script=script, policy=Markup(policy)) + "\n"  # noqa: S704


def _table(printable: Callable[[str], str], table: Table) -> Markup:
    # Escaped already, after each text was made printable.
    return Markup(as_html(table.with_texts(printable), table.name))  # noqa: S704


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _printable(redacted: Callable[[str], str], value: Any) -> Any:
    """Remove control characters, which HTML forbids, home folders and secrets from text."""
    # Markup is made here: pictures, style and script.
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    text = _UNPRINTABLE.sub("\ufffd", value)
    return redacted(text) if len(text) >= _SHORTEST else text
