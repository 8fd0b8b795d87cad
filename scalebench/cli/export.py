"""`scalebench export [RESULTS]`: the records as Parquet, as JSON, or for MLflow."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from scalebench.cli.options import FILE, FOLDER, results_argument, study_folder


@click.command()
@results_argument
@click.option("--parquet", metavar="DIR", type=FOLDER, help="One file per table.")
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=FILE,
    help="One file; - is standard output.  [default, without another option: STUDY.json]",
)
@click.option(
    "--mlflow-dir",
    metavar="DIR",
    type=FOLDER,
    help="MLflow's file store (mlruns); other experiments in it stay.",
)
def export(
    results: Path | None,
    parquet: Path | None,
    json_file: Path | None,
    mlflow_dir: Path | None,
) -> None:
    """Write the study in RESULTS (of several the newest; default: results/) in other tools' formats.

    What is written: runs and epochs (the latest attempts), and for Parquet and JSON the
    statistics per cell and the ratios to the baselines.
    """
    from scalebench.analysis import load
    from scalebench.export import json_text, write_json, write_mlflow, write_parquet

    found = load(study_folder(results))
    # JSON needs no package that is not installed anyway
    if parquet is None and json_file is None and mlflow_dir is None:
        # in the working folder: a folder of records holds records only
        json_file = Path(f"{found.folder.name}.json")
    written = write_parquet(found, parquet) if parquet is not None else []
    if json_file == Path("-"):
        # piece by piece: the text of a large study is never in memory whole
        for piece in json_text(found):
            click.echo(piece, nl=False)
    elif json_file is not None:
        written.append(write_json(found, json_file))
    if mlflow_dir is not None:
        written.append(write_mlflow(found, mlflow_dir))
    for path in written:
        # standard output is the JSON then
        click.echo(path, err=json_file == Path("-"))
    for note in found.notes:
        click.echo(note, err=True)
