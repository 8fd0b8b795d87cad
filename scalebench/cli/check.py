"""`scalebench check [RESULTS]`: check the method of a study."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from scalebench.cli.options import json_option, results_argument, study_folder
from scalebench.formatting import counted

if TYPE_CHECKING:
    from scalebench.analysis.methodology import Finding, Report

JSON_SCHEMA = 1  # of `--json`; raised when a key changes its meaning or goes
_COLORS = {"error": "red", "warning": "yellow", "note": "cyan"}
_WIDEST = 110


@click.command()
@results_argument
@click.option(
    "--ignore", multiple=True, metavar="RULE", help="Leave this rule out; repeatable."
)
@click.option(
    "--rules",
    is_flag=True,
    help="List the rules, and who keeps each of Hoefler and Belli's twelve.",
)
@json_option
def check(
    results: Path | None, ignore: tuple[str, ...], rules: bool, as_json: bool
) -> int:
    """Check the method of the study in RESULTS (of several the newest; default: results/).

    An error is a number that cannot be supported, a warning what a reviewer will ask, a
    note what the text has to say. Leaves with 1 if there are errors.
    """
    # before any records are looked for: the rules are those of the tool
    if rules:
        _list_rules(as_json)
        return 0
    from scalebench.analysis import load
    from scalebench.analysis.methodology import Evidence
    from scalebench.analysis.methodology import check as apply

    # also of a study without a completed run, which a rule says
    folder = study_folder(results)
    evidence = Evidence(load(folder))
    report = apply(evidence, ignore)
    if as_json:
        facts = {
            "schema": JSON_SCHEMA,
            "study": evidence.progress.study,
            "folder": str(folder),
            **{f"{severity}s": report.count(severity) for severity in _COLORS},
            "findings": [asdict(finding) for finding in report.findings],
            "passed": report.passed,
            "ignored": report.ignored,
        }
        click.echo(json.dumps(facts, indent=2))
    else:
        click.echo(f"{evidence.progress.study}: {_summary(report)}")
        for finding in report.findings:
            _show(finding)
    # warnings and notes fail no pipeline: they are for the text of a paper
    return 1 if report.count("error") else 0


def _show(finding: Finding) -> None:
    color = _COLORS[finding.severity]
    click.echo(
        f"\n{click.style(finding.severity, fg=color, bold=True)}  {click.style(finding.rule, bold=True)}"
    )
    click.echo(_indented(finding.what, "  "))
    click.echo(_indented(finding.where, "  where  "))
    click.echo(_indented(finding.fix, "  fix    "))


def _summary(report: Report) -> str:
    found = ", ".join(counted(report.count(severity), severity) for severity in _COLORS)
    ignored = (
        f", {len(report.ignored)} ignored ({', '.join(report.ignored)})"
        if report.ignored
        else ""
    )
    return f"{found}; {len(report.passed)} rules found nothing{ignored}"


def _list_rules(as_json: bool) -> None:
    from scalebench.analysis.methodology import RULES, TWELVE

    known = RULES.describe()
    if as_json:
        facts = {
            "schema": JSON_SCHEMA,
            "rules": [{"name": name, "summary": summary} for name, summary in known],
            "twelve": [asdict(kept) for kept in TWELVE],
        }
        click.echo(json.dumps(facts, indent=2))
        return
    click.echo("Rules of this command (--ignore RULE leaves one out):\n")
    width = max(len(name) for name, _ in known)
    for name, summary in known:
        click.echo(
            _indented(summary, f"  {click.style(f'{name:<{width}}', bold=True)}  ")
        )
    click.echo(
        "\nHoefler and Belli's twelve rules (SC '15, doi:10.1145/2807591.2807644), and who keeps them:"
    )
    for kept in TWELVE:
        click.echo(
            "\n" + _indented(click.style(kept.rule, bold=True), f"{kept.number:>4}. ")
        )
        for what, text in (
            ("checked ", ", ".join(kept.checked)),
            ("built in", kept.by_construction),
            ("to you  ", kept.to_you),
        ):
            if text:
                click.echo(_indented(text, f"      {what} "))


def _indented(text: str, lead: str) -> str:
    """Put `text` after `lead`: wrapped on a terminal, on one line in a pipe (for grep)."""
    if not sys.stdout.isatty():
        return lead + text
    # colours take bytes and no columns
    room = len(click.unstyle(lead))
    width = max(40, min(_WIDEST, shutil.get_terminal_size().columns) - room)
    lines = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
    return lead + f"\n{room * ' '}".join(lines or [""])
