"""`scalebench schema`: print the JSON Schema of study files, for editors."""

from __future__ import annotations

import json

import rich_click as click


@click.command()
def schema() -> None:
    """Print the JSON Schema of study files.

    In an editor with a YAML language server, write it to a file and name that in a
    study's first line: `# yaml-language-server: $schema=study.schema.json`.
    """
    from scalebench.study.load import study_schema

    click.echo(json.dumps(study_schema(), indent=2))
