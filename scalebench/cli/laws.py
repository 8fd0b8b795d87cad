"""`scalebench laws [RESULTS]`: scaling laws of the strategies, and the worker counts worth running."""

from __future__ import annotations

import json
from pathlib import Path

import rich_click as click

from scalebench.cli.options import completed_study, results_argument, share_option


@click.command()
@results_argument
@click.option("--strategy", "strategies", multiple=True, metavar="NAME", help="Only this one; repeatable.")
@click.option(
    "--efficiency",
    callback=share_option,
    metavar="SHARE",
    default="50%",
    show_default=True,
    help="Least speedup per worker at which a worker count is worth running.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option(
    "--extrap",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.jsonl",
    help="Write the times for Extra-P as JSON Lines.",
)
def laws(
    results: Path | None, strategies: tuple[str, ...], efficiency: float, as_json: bool, extrap: Path | None
) -> int:
    """Fit scaling laws to the times of the study in RESULTS (of several the newest; default: results/).

    Amdahl's law (Gustafson's in weak scaling), the Universal Scalability Law, and compute + synchronisations x (latency
    + bytes / bandwidth) are fitted to each strategy on each engine of each execution, and chosen by AICc.
    Oversubscribed runs are left out; below four worker counts no law is fitted. The exit code is 1 where none could be
    fitted at all.
    """
    from scalebench.analysis import load
    from scalebench.analysis.laws import scaling_laws, write_extrap
    from scalebench.analysis.laws.render import as_values, laws_text
    from scalebench.cli.run_common import results_console

    study = load(completed_study(results))
    found = scaling_laws(study, strategies=strategies, efficiency=efficiency)
    if as_json:
        click.echo(json.dumps({"folder": str(study.folder), "laws": [as_values(one) for one in found]}, indent=2))
    else:
        results_console().print(laws_text(found))
        for note in study.notes:
            click.echo(note, err=True)
    if extrap is not None:
        for file in write_extrap([one.series for one in found], extrap):
            click.echo(f"for Extra-P: {file}", err=True)
    return 1 if all(one.refusal for one in found) else 0
