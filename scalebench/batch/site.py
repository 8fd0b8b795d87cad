"""Facts of a site that batch jobs need: account, partition, nodes, modules. Read from the first site.yaml found."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveInt

from scalebench.errors import UsageError
from scalebench.study.choices import LauncherName, SchedulerName
from scalebench.study.validation import StrictModel, parse_duration, read_as

FILE = "site.yaml"


class SiteError(UsageError):
    """Missing, unknown or impossible fact of a site."""


def _one_line(text: str) -> str:
    # a second line would become a command of the batch script
    if "\n" in text or not text.strip():
        raise ValueError(f"expected one line of text, got {text[:40]!r}")
    return text


Line = Annotated[str, AfterValidator(_one_line)]
Duration = Annotated[int, BeforeValidator(parse_duration)]


class Site(StrictModel):
    """What a batch script of this site says beside the study."""

    scheduler: SchedulerName | None = Field(
        None, description="default: the one that is found"
    )
    account: Line | None = Field(
        None, description="project that pays; -A, or -P of LSF"
    )
    partition: Line | None = Field(
        None, description="partition of Slurm, queue of PBS and LSF"
    )
    nodes: PositiveInt | None = Field(
        None, description="most nodes of one job; default: those of the partition"
    )
    cores_per_node: PositiveInt | None = Field(
        None, description="default: those of the partition's nodes"
    )
    gpus_per_node: NonNegativeInt = 0
    max_time: Duration | None = Field(None, description="longest job, as 24:00:00")
    modules: list[Line] = Field([], description="loaded before anything else")
    setup: list[Line] = Field(
        [],
        description="lines of shell after the modules; default: this environment's PATH",
    )
    container: Line | None = Field(
        None, description="command before `scalebench`, as `apptainer exec image.sif`"
    )
    launcher: LauncherName | None = Field(None, description="what starts real ranks")
    options: list[Line] = Field(
        [], description="further flags of each job, as --qos=short or --mem=64G"
    )


def site_for(place: Path, given: Path | None = None) -> tuple[Site, Path | None]:
    """Return the facts in `given`, else in the first site.yaml of `site_files(place)`, and the file.

    Raises:
        SiteError: the file cannot be read, has an unknown key or an impossible value; one line.
    """
    path = given or next((path for path in site_files(place) if path.is_file()), None)
    if path is None:
        return Site(), None
    return read_as(path, Site, SiteError, "site"), path


def site_files(place: Path) -> list[Path]:
    """Return where site.yaml is looked for: beside the study in `place`, of the user, of the machine."""
    own = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return [place / FILE, own / "scalebench" / FILE, Path("/etc/scalebench") / FILE]


def site_template(known: dict[str, Any], remarks: Sequence[str]) -> str:
    """Return a commented site.yaml with the facts that are `known`; `remarks` stand above them."""
    lines = [
        "# Facts of this site for `scalebench submit`. Looked for beside the study, in ~/.config/scalebench and in",
        "# /etc/scalebench; the first one found counts. Remove the # of what applies.",
        *(f"# {remark}" for remark in remarks),
        "",
    ]
    examples = {
        "scheduler": "slurm",
        "account": "my-project",
        "partition": "batch",
        "nodes": 16,
        "cores_per_node": 64,
        "gpus_per_node": 4,
        "max_time": "24:00:00",
        "modules": "[gcc, openmpi]",
        "setup": '["source $HOME/scalebench/bin/activate"]',
        "container": "apptainer exec scalebench.sif",
        "launcher": "srun",
        "options": "[--qos=short, --constraint=ib]",
    }
    # all keys, those that are unknown behind a #: the file is its own documentation
    for name, field in Site.model_fields.items():
        written = (
            f"{name}: {known[name]}" if name in known else f"# {name}: {examples[name]}"
        )
        meaning = f"# {field.description}" if field.description else ""
        lines.append(f"{written:<60}{meaning}".rstrip())
    return "\n".join(lines) + "\n"
