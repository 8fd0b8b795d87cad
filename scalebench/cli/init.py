"""`scalebench init [DIR]`: a commented study file to begin from, or the facts of a site."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from scalebench.cli.options import FOLDER
from scalebench.errors import StudyError
from scalebench.records.folder import STUDY

# what doctor says of them explains the facts
_OF_A_SITE = (
    "MPI",
    "mpi4py",
    "launcher",
    "Slurm",
    "NCCL",
)
TEMPLATE = Path(__file__).with_name("study_template.yaml")


@click.command()
@click.argument("folder", metavar="[DIR]", type=FOLDER, default=Path())
@click.option(
    "--site",
    is_flag=True,
    help="Write a site.yaml, for `submit`, with what doctor finds here.",
)
def init(folder: Path, site: bool) -> None:
    """Write DIR/study.yaml (default: ./study.yaml), a commented study that runs as it is in under a minute.

    With --site, write DIR/site.yaml instead: account, partition, nodes and modules of a
    batch system, as far as they are found here. An existing file is left alone.
    """
    path = folder / ("site.yaml" if site else STUDY)
    text = _site_text() if site else TEMPLATE.read_text(encoding="utf-8")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # x: never over a study that is there
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise StudyError(
            f"{path} is there already and was left alone; name another folder, or remove it"
        ) from None
    except OSError as error:
        raise StudyError(
            f"cannot write {path}: {error.strerror}; name another folder"
        ) from None
    following = (
        "scalebench submit STUDY --dry-run" if site else f"scalebench run {path}"
    )
    click.echo(f"{path} written; next: {following}")


def _site_text() -> str:
    """Return a site.yaml with the scheduler, the partition and the launcher that are found here."""
    from scalebench.batch.job import SchedulerError, clock
    from scalebench.batch.schedulers import found_here
    from scalebench.batch.site import site_template
    from scalebench.comm.launchers import of_all_hosts
    from scalebench.install.examine import examine

    known: dict[str, object] = {}
    # facts of this node, which may not be those of the compute nodes: remarks, no keys
    remarks = [
        f"doctor: {found.part}: {found.detail}"
        for found in examine()
        if found.part in _OF_A_SITE
    ]
    if scheduler := found_here():
        known["scheduler"] = scheduler.name
        try:
            partition = scheduler.partition(None)
        # a scheduler that does not answer leaves its facts to be filled in
        except SchedulerError as error:
            partition, remarks = None, [*remarks, str(error)]
        if partition is not None:
            known |= {
                "partition": partition.name,
                "nodes": partition.nodes,
                "cores_per_node": partition.cores_per_node,
            }
            known |= (
                {"gpus_per_node": partition.gpus_per_node}
                if partition.gpus_per_node
                else {}
            )
            known |= (
                {"max_time": clock(partition.max_time_s)}
                if partition.max_time_s
                else {}
            )
        if launcher := of_all_hosts(here=False):
            known["launcher"] = launcher.name
    return site_template(known, remarks)
