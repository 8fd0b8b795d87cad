"""`scalebench explain STRATEGY`: its rule, options, engines, and its traffic in a study."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import rich_click as click

from scalebench.cli.options import verbosity_options
from scalebench.formatting import counted

if TYPE_CHECKING:
    from scalebench.launch.planning import StudyPlan
    from scalebench.strategies.base import Strategy


@click.command()
@click.argument("name", metavar="STRATEGY")
@click.option("--workers", metavar="COUNTS", help="Worker counts: 1..64, 1..64:8 or 1,2,6.")
@click.option("--model", metavar="NAME", help="Model, or your own as file.py:factory.")
@click.option("--dataset", metavar="NAME", help="Data set, which says how many steps an epoch has.")
@click.option("--epochs", type=int)
@click.option("--batch-per-worker", type=int, help="Samples in one worker's batch.")
@click.option("--batch-global", type=int, help="Samples in one step of all workers.")
@click.option("--dtype", type=click.Choice(["float32", "float64", "bfloat16"]))
@click.option("--cluster", metavar="NAME|FILE", help="Which workers share a node.")
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="An option of the strategy, or any key of a study."
)
@verbosity_options
def explain(name: str, sets: tuple[str, ...], **flags: Any) -> None:
    """Explain STRATEGY: rule, options, engines, source, and its traffic: synchronisations and bytes per epoch.

    Written as for `run --strategy`: a name, 'NAME: {option: value}', or your own as file.py:Class.
    The traffic is that of the default study, or of one with these flags over it, recorded without training.
    """
    from scalebench.errors import UsageError
    from scalebench.launch.engine_choice import describe_strategy
    from scalebench.strategies import registry
    from scalebench.strategies.description import options_of, rule_of

    name, given = _said(name)
    cls = registry.find(name)
    options, others = _sorted_out(sets, cls)
    options = given | options
    strategy = registry.create(name, options)
    asked = bool(others) or any(value is not None for value in flags.values())
    if asked:
        plan = _plan(strategy, options, flags, others)
    entry = describe_strategy(name)

    page = _Page()
    page.heading(name, f": {cls.summary}")
    for paragraph in rule_of(cls):
        page.text(paragraph)
    page.heading("Options")
    known = options_of(cls)
    page.table(("option", "type", "default", "range", "what it says"), [tuple(option) for option in known])
    page.heading("Where it comes from, where it runs")
    page.fact("source", cls.source)
    page.fact("engines", ", ".join(entry.engines))
    try:
        plan = plan if asked else _plan(strategy, options, flags, others)
    except UsageError as error:  # the default study does not suit it
        page.text(f"traffic: {error}")
    else:
        _show_traffic(page, plan)


def _said(strategy: str) -> tuple[str, dict[str, Any]]:
    """Name and options of `STRATEGY`, which is written as for `run --strategy`."""
    from scalebench.errors import StudyError
    from scalebench.study.load import written_component
    from scalebench.study.spec import Component

    said = written_component(strategy, "STRATEGY")
    if isinstance(said, str):
        return said, {}
    try:
        component = Component.model_validate(said)
    except ValueError:
        raise StudyError(f"STRATEGY {strategy!r}: expected a name, or 'NAME: {{option: value}}'") from None
    return component.name, component.options


def _sorted_out(sets: Sequence[str], cls: type[Strategy]) -> tuple[dict[str, Any], list[str]]:
    """Which of `--set` are options of the strategy, and which are keys of a study."""
    from scalebench.errors import StudyError, nearest
    from scalebench.study.spec import Study
    from scalebench.study.validation import parse

    options: dict[str, Any] = {}
    others: list[str] = []
    for item in sets:
        key, equals, text = (part.strip() for part in item.partition("="))
        if equals and key in cls.model_fields:
            options[key] = parse(text, f"--set {key}", StudyError)
        elif equals and key.partition(".")[0] not in Study.model_fields:
            known = [*cls.model_fields, *Study.model_fields]
            raise StudyError(f"--set {item}: neither an option of {cls.name} nor a study's key; {nearest(key, known)}")
        else:
            others.append(item)
    return options, others


def _plan(strategy: Strategy, options: dict[str, Any], flags: dict[str, Any], sets: list[str]) -> StudyPlan:
    from scalebench.launch.planning import plan_study
    from scalebench.study.load import load_study

    study = load_study(None, {**flags, "strategies": [{strategy.name: options}]}, sets)
    return plan_study(study.model_copy(update={"execution": "virtual", "repetitions": 1, "until": None}), timed=False)


def _show_traffic(page: _Page, plan: StudyPlan) -> None:
    from scalebench.launch.traffic import traffic_of
    from scalebench.strategies import registry

    rows, study = traffic_of(plan), plan.study
    epochs = counted(study.epochs, "epoch")
    page.heading("Traffic", f" of {study.model} in {study.dtype} on {study.dataset}, {epochs}, means per epoch")
    head = ["workers", "steps", "synchronisations", "bytes sent by a worker"]
    cells = [[str(row.workers), str(row.steps), f"{row.syncs:,.4g}", f"{row.bytes_sent:,.0f}"] for row in rows]
    if any(row.rows_bytes for row in rows):
        head.append("and of rows that the shuffle moves")
        cells = [[*line, f"{row.rows_bytes:,.0f}"] for line, row in zip(cells, rows, strict=True)]
    page.table(head, cells)
    (component,) = study.strategies
    if not registry.create(component.name, component.options).deterministic:
        page.text("Its order depends on time: these are the counts of workers that never wait for one another.")
    for note in plan.notes:
        page.text(f"note: {note}")


class _Page:
    """Prints headings, texts and tables: with rich on a terminal, else as plain aligned text."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, markup=False)

    def heading(self, text: str, rest: str = "") -> None:
        if self._console.is_terminal:
            from rich.text import Text

            self._console.print(Text.assemble((text, "bold cyan"), rest))
        else:
            click.echo(f"{text}{rest}")

    def text(self, text: str) -> None:
        click.echo(textwrap.indent(text, "  ") + "\n")

    def fact(self, name: str, value: str) -> None:
        self._line(f"{name}:", value)

    def _line(self, name: str, value: str) -> None:
        if self._console.is_terminal:
            name = click.style(name, bold=True)
        click.echo(f"  {name} {value}")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if not rows:
            self.text("none")
        elif self._console.is_terminal:
            from rich.table import Table as RichTable

            table = RichTable(*head, box=None, header_style="dim")
            for row in rows:
                table.add_row(*row)
            self._console.print(table)
            click.echo()
        else:
            widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
            for row in (head, *rows):
                cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
                click.echo(f"  {'  '.join(cells)}".rstrip())
            click.echo()
