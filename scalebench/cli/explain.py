"""`scalebench explain STRATEGY`: its rule, options, engines, and its traffic in a study."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import rich_click as click

from scalebench.cli.formats import indented, show
from scalebench.cli.options import study_options, verbosity_options
from scalebench.errors import StudyError, UsageError, nearest
from scalebench.formatting import counted
from scalebench.tables import Column, Table

if TYPE_CHECKING:
    from scalebench.launch.planning import StudyPlan
    from scalebench.strategies.base import Strategy


@click.command()
@click.argument("name", metavar="STRATEGY")
@study_options(
    "workers",
    "model",
    "dataset",
    "epochs",
    "batch_per_worker",
    "batch_global",
    "dtype",
    "cluster",
)
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option of the strategy, or any key of a study.",
)
@verbosity_options
def explain(name: str, sets: tuple[str, ...], **flags: Any) -> None:
    """Explain STRATEGY: rule, options, engines, source, and its traffic: synchronisations and bytes per epoch.

    Written as for `run --strategy`: NAME, NAME:OPTION=VALUE, 'NAME: {option: value}',
    or your own as file.py:Class. The traffic is that of the default study, or of one
    with these flags over it, recorded without training.
    """
    # here and below: a strategy and its study cost more than `--help` may take
    from scalebench.launch.engine_choice import describe_strategy
    from scalebench.strategies import registry
    from scalebench.strategies.registry import options_of, rule_of
    from scalebench.study import load, spec

    try:
        component = spec.Component.model_validate(
            load.written_component(name, "STRATEGY")
        )
    except ValueError:
        raise StudyError(
            f"STRATEGY {name!r}: expected a name, or 'NAME: {{option: value}}'"
        ) from None
    name, cls = component.name, registry.find(component.name)
    options, others = _sorted_out(sets, cls)
    options = component.options | options
    registry.create(name, options)  # refuses what is no option or value of it
    # a study that was asked for and cannot be is an error, the default one a remark
    asked = bool(others) or any(value is not None for value in flags.values())
    # first, so that an error is all that is printed
    if asked:
        plan = _plan(name, options, flags, others)
    entry = describe_strategy(name)

    click.echo(f"{click.style(name, fg='cyan', bold=True)}: {cls.summary}")
    for paragraph in rule_of(cls):
        click.echo(indented(paragraph, "  ") + "\n")
    _print_table(
        "Options",
        ("option", "type", "default", "range", "what it says"),
        options_of(cls),
    )
    click.echo(f"source: {cls.source}\nengines: {', '.join(entry.engines)}")
    elastic = [f"{engine} ({launcher})" for engine, launcher in entry.elastic.items()]
    click.echo(f"elastic: {', '.join(elastic) or 'no'}\n")
    try:
        plan = plan if asked else _plan(name, options, flags, others)
    except UsageError as error:  # the default study does not suit it
        click.echo(f"traffic: {error}")
    else:
        _show_traffic(plan)


def _sorted_out(
    sets: Sequence[str], cls: type[Strategy]
) -> tuple[dict[str, Any], list[str]]:
    """Which of `--set` are options of the strategy, and which are keys of a study."""
    from scalebench.study import spec, validation

    options: dict[str, Any] = {}
    others: list[str] = []
    for item in sets:
        key, equals, text = (part.strip() for part in item.partition("="))
        # an option of the strategy wins over a study's key of that name
        if equals and key in cls.model_fields:
            options[key] = validation.parse(text, f"--set {key}", StudyError)
        elif equals and key.partition(".")[0] not in spec.Study.model_fields:
            known = [*cls.model_fields, *spec.Study.model_fields]
            raise StudyError(
                f"--set {item}: neither an option of {cls.name} nor a study's key; {nearest(key, known)}"
            )
        else:
            others.append(item)
    return options, others


def _plan(
    name: str, options: dict[str, Any], flags: dict[str, Any], sets: list[str]
) -> StudyPlan:
    from scalebench.launch.planning import plan_study
    from scalebench.study import load

    study = load.load_study(None, {**flags, "strategies": [{name: options}]}, sets)
    return plan_study(
        study.model_copy(
            # traffic is the same in every repetition, and needs no cores
            update={"execution": "virtual", "repetitions": 1, "until": None}
        ),
        # without step times: traffic needs no machine
        timed=False,
    )


def _show_traffic(plan: StudyPlan) -> None:
    from scalebench.launch.traffic import traffic_of
    from scalebench.strategies import registry

    rows, study = traffic_of(plan), plan.study
    head = ["workers", "steps", "synchronisations", "bytes sent by a worker"]
    cells = [
        [
            str(row.workers),
            str(row.steps),
            f"{row.syncs:,.4g}",
            f"{row.bytes_sent:,.0f}",
        ]
        for row in rows
    ]
    if any(row.rows_bytes for row in rows):
        head.append("and of rows that the shuffle moves")
        cells = [
            [*line, f"{row.rows_bytes:,.0f}"]
            for line, row in zip(cells, rows, strict=True)
        ]
    what = f"{study.model} in {study.dtype} on {study.dataset}, {counted(study.epochs, 'epoch')}"
    _print_table(f"Traffic of {what}, means per epoch", head, cells)
    (component,) = study.strategies
    # recorded without a clock, a server answers at once
    if not registry.create(component.name, component.options).deterministic:
        click.echo(
            "Its order depends on time: these are the counts of workers that never wait for one another."
        )
    for note in plan.notes:
        click.echo(f"note: {note}")


def _print_table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    columns = [
        Column[Sequence[str]](name, itemgetter(place), left=True)
        for place, name in enumerate(head)
    ]
    show(Table.of(title, columns, rows, [""] if rows else ["none", ""]))
