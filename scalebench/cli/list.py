"""`scalebench list WHAT`: the names that a study can use."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import rich_click as click

Rows = Sequence[tuple[str, ...]]


def _strategies() -> Rows:
    from scalebench.launch.engine_choice import describe_strategies

    known = [(entry.name, entry.summary, f"runs on {', '.join(entry.engines)}") for entry in describe_strategies()]
    return [*known, ("file.py:Class", "your own: a class derived from scalebench.strategies.base.Strategy", "")]


def _datasets() -> Rows:
    from scalebench.data.catalog import describe_datasets

    return describe_datasets()


def _models() -> Rows:
    from scalebench.models.registry import describe_models

    return describe_models()


def _clusters() -> Rows:
    from scalebench.cluster.load import describe_clusters

    return describe_clusters()


def _figures() -> Rows:
    from scalebench.figures import describe_figures

    rows: Rows = describe_figures()
    return rows


KINDS: dict[str, Callable[[], Rows]] = {
    "strategies": _strategies,
    "datasets": _datasets,
    "models": _models,
    "clusters": _clusters,
    "figures": _figures,
}


@click.command("list")
@click.argument("what", type=click.Choice(list(KINDS)))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(what: str, as_json: bool) -> None:
    """List what a study can name: strategies, datasets, models, clusters or figures."""
    rows = KINDS[what]()
    if as_json:
        click.echo(json.dumps([dict(zip(("name", "summary", "detail"), row, strict=False)) for row in rows], indent=2))
        return
    width = max((len(row[0]) for row in rows), default=0)
    for name, *rest in rows:
        click.echo(f"{name:<{width}}  {rest[0]}".rstrip())
        for detail in rest[1:]:
            click.echo(f"{'':<{width}}  {detail}")
