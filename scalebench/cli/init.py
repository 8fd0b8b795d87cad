"""`scalebench init [DIR]`: a commented study file to begin from."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from scalebench.cli.options import FOLDER
from scalebench.errors import StudyError
from scalebench.records.folder import STUDY

TEMPLATE = Path(__file__).with_name("study_template.yaml")


@click.command()
@click.argument("folder", metavar="[DIR]", type=FOLDER, default=Path())
def init(folder: Path) -> None:
    """Write DIR/study.yaml (default: ./study.yaml), a commented study that runs as it is in under a minute.

    An existing file is left alone.
    """
    path = folder / STUDY
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.read_text(encoding="utf-8"))
    except FileExistsError:
        raise StudyError(f"{path} is there already and was left alone; name another folder, or remove it") from None
    except OSError as error:
        raise StudyError(f"cannot write {path}: {error.strerror}; name another folder") from None
    click.echo(f"{path} written; next: scalebench run {path}")
