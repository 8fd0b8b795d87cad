"""`scalebench plan MODEL`: how to divide a training among devices, which layouts there are, and what each costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click

from scalebench.cli import formats, options, platform_options
from scalebench.errors import writing

_PANELS = {  # of `--help`
    "What is trained": ("--batch", "--dtype", "--optimizer", "--layers", "--input"),
    "Where": (
        "--cluster",
        "--devices",
        "--memory",
        "--device",
        "--step-time",
        "--step-batch",
        "--calibration",
        "--roofline",
        "--measured-on",
        "--jitter",
        "--collective",
        "--input-rate",
    ),
    "Output": ("--format", "--write", "--quiet", "--verbose", "--help"),
}


@click.command()
@options.all_of(
    *(
        click.option_panel(heading, options=list(flags))
        for heading, flags in _PANELS.items()
    )
)
@platform_options.layout_options
@click.option(
    "--devices",
    type=click.IntRange(1, 65536),
    required=True,
    metavar="N",
    help="Workers, one a device.",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    required=True,
    metavar="B",
    help="Samples of a step of all devices.",
)
@click.option(
    "--write",
    "study",
    type=options.NEW_FILE,
    metavar="FILE.yaml",
    help="Write a study that compares the layouts.",
)
@formats.format_option
@options.verbosity_options
def plan(
    model: str | None,
    devices: int,
    batch: int,
    study: Path | None,
    form: str,
    **flags: Any,
) -> int:
    """Plan how to divide a training of MODEL among N devices: by data, shards, tensors, stages, or adaptively.

    Every mesh of replicas, stages and tensor degree that multiplies to the devices is
    searched, with up to 8 micro-batches a stage in the order of 1f1b, interleaved or
    gpipe, or the whole batch (model_parallel), and stages cut by times; where a worker
    does not fit into the memory, activations are computed again. `adaptive` shares each
    layer among the number of devices that moves the fewest bytes. The best of each kind
    has a row. Nothing is trained: every number is modelled, as `predict` does.

    \b
    scalebench plan vit_b16 --cluster juwels-booster --device a100-40gb --devices 8 --batch 512
    scalebench plan my_model.py:build --input 3x32x32 --cluster this-machine --step-time 0.02 --devices 4 --batch 64
    """
    from scalebench.predictions.planned import planned

    found = planned(model, devices, batch, flags, formats.note)
    try:
        formats.show_tables(form, *found.answer(), *found.tables())
    finally:
        # after the answer, which a file that cannot be written would hide; also where
        # `head` takes the first lines of it
        if study is not None:
            _write(study, found.study(model))
    return 0


def _write(path: Path, study: dict[str, Any]) -> None:
    import yaml

    text = f"# Written by scalebench plan; scalebench run {path}\n{yaml.safe_dump(study, sort_keys=False)}"
    with writing(path, ""):
        path.write_text(text, encoding="utf-8")
    # standard output has the tables alone
    click.echo(f"{path} written; next: scalebench run {path}", err=True)
