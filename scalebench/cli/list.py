"""`scalebench list WHAT`: the names that a study can use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from operator import attrgetter

import rich_click as click

from scalebench.cli.formats import indented
from scalebench.cli.options import json_option

# as text, as none of them is imported for `--help`
KINDS = {  # function that describes them, as (name, summary, details ...)
    "strategies": "scalebench.cli.list:strategy_rows",
    "datasets": "scalebench.data.builder:DATASETS.describe",
    "models": "scalebench.models.registry:describe_models",
    "clusters": "scalebench.cluster.cluster_file:describe_clusters",
    "devices": "scalebench.cluster.device:describe_devices",
    "figures": "scalebench.figures:describe_figures",
}


@click.command("list")
@click.argument(
    "what", metavar="[WHAT]", type=click.Choice(list(KINDS)), required=False
)
@json_option
def list_(what: str | None, as_json: bool) -> None:
    """List strategies, datasets, models, clusters, devices or figures by name; without WHAT, these words."""
    if what is None:
        click.echo(json.dumps(list(KINDS)) if as_json else "\n".join(KINDS))
        return
    # imported for the kind that is asked: models bring torch along
    module, _, function = KINDS[what].partition(":")
    rows: Sequence[tuple[str, ...]] = attrgetter(function)(import_module(module))()
    if as_json:
        keys = ("name", "summary", "detail")
        click.echo(
            json.dumps([dict(zip(keys, row, strict=False)) for row in rows], indent=2)
        )
        return
    width = max((len(row[0]) for row in rows), default=0)
    for name, *rest in rows:
        beside = " " * (width + 2)
        click.echo(indented(rest[0], beside, f"{name:<{width}}  ").rstrip())
        for detail in rest[1:]:
            click.echo(indented(detail, beside))


def strategy_rows() -> list[tuple[str, ...]]:
    """Return names, summaries and engines of the strategies."""
    from scalebench.launch import engine_choice

    known = [
        (
            each.name,
            each.summary,
            f"runs on {', '.join(each.engines)}"
            + (f"; elastic on {', '.join(each.elastic)}" if each.elastic else ""),
        )
        for each in engine_choice.describe_strategies()
    ]
    return [
        *known,
        (
            "file.py:Class",
            "your own: a class derived from scalebench.strategies.base.Strategy",
            "",
        ),
    ]
