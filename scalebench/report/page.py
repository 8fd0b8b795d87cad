"""Write the report as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from scalebench import __version__
from scalebench.analysis import load
from scalebench.analysis.methodology import Evidence, check
from scalebench.errors import writing
from scalebench.records.provenance import redactor
from scalebench.report.answer import answer
from scalebench.report.comparison import as_text, comparisons
from scalebench.report.drawings import StyleSheet, drawing_all, inlined
from scalebench.report.origin import machines, rerun_of, study_facts
from scalebench.report.tables import tables
from scalebench.study.spec import slug
from scalebench.system.atomic_write import atomic_file

TEMPLATES = Path(__file__).with_name("templates")
_ELSEWHERE = "choose another file with --output"
_SHORTEST = 6  # characters: shorter texts hold no path or secret
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def write_report(folder: Path, output: Path | None = None, jobs: int = 1) -> Path:
    """Write the report on the study in `folder` to `output` (plots/<study>/report.html); return its path.

    With more than one of `jobs`, as many other processes draw the figures while this one computes the words. The same
    records give the same bytes.

    Raises:
        ResultsError: `folder` cannot be read, or `output` cannot be written.
    """
    evidence = Evidence(load(folder))
    results = evidence.results
    study = str(results.runs["study"].iloc[-1])
    output = output or Path("plots") / slug(study) / "report.html"
    with writing(output, _ELSEWHERE):  # fails before the figures are drawn
        output.parent.mkdir(parents=True, exist_ok=True)
    sheet = StyleSheet()
    with drawing_all(results, jobs) as drawings:
        compared = comparisons(results)
        reply = answer(results, compared)
        facts = {
            "version": __version__,
            "study": study,
            "description": str(results.study.get("description") or ""),
            "answer": reply,
            "summary": as_text(reply.sentence),
            "facts": study_facts(results),
            "tables": tables(results, compared),
            "method": check(evidence),
            "machines": machines(evidence.rows, evidence.provenance),
            "rerun": rerun_of(results, evidence.provenance),
        }
        drawn = [inlined(drawing, sheet) for drawing in drawings]
    notes = dict.fromkeys([*results.notes, *(note for drawing in drawn for note in drawing.notes)])
    text = render({**facts, "drawings": drawn, "notes": list(notes)}, sheet)
    with writing(output, _ELSEWHERE), atomic_file(output) as file:
        file.write(text)
    return output


def render(facts: Mapping[str, Any], sheet: StyleSheet) -> str:
    """Render the page; its content security policy allows its own style and script only, by their hashes."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=partial(_printable, cache(redactor(names=False))),
    )
    css = {"rules": sheet.rules(), "light": sheet.colors(dark=False), "dark": sheet.colors(dark=True)}
    rules = {name: Markup(text) for name, text in css.items()}  # noqa: S704
    style = Markup(environment.get_template("report.css").render(sheet=rules))  # noqa: S704
    script = Markup((TEMPLATES / "report.js").read_text(encoding="utf-8"))  # noqa: S704
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = environment.get_template("report.html.j2")
    return page.render(facts, style=style, script=script, policy=Markup(policy)) + "\n"  # noqa: S704


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _printable(redacted: Callable[[str], str], value: Any) -> Any:
    """Remove control characters, which HTML forbids, home folders and secrets from text."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    text = _UNPRINTABLE.sub("\ufffd", value)
    return redacted(text) if len(text) >= _SHORTEST else text
