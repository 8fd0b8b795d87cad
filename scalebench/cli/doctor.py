"""`scalebench doctor`: the parts found on this machine, and the command that adds each missing one."""

from __future__ import annotations

import json
from dataclasses import asdict

import rich_click as click

from scalebench.cli.options import json_option, launcher_option


@click.command()
@json_option
@launcher_option
@click.option(
    "--network",
    is_flag=True,
    help="Compare MPI's allreduce with a ring, on a single node too.",
)
def doctor(as_json: bool, network: bool) -> None:
    """Say what this machine has, and for each missing part the command that adds it.

    In an allocation of several nodes, say also whether MPI chooses a slower allreduce
    than a ring.
    """
    from scalebench.install.examine import examine

    findings = examine(network=network)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
        return
    width = max(len(finding.part) for finding in findings)
    # each with its command: the reader is about to type it
    for finding in findings:
        mark = (
            click.style("ok", fg="green")
            if finding.present
            else click.style("--", fg="yellow")
        )
        click.echo(f"{mark}  {finding.part:<{width}}  {finding.detail}")
        if finding.add:
            click.echo(
                f"    {'':<{width}}  add it with: {click.style(finding.add, bold=True)}"
            )
