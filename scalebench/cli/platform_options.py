"""Options that say what is trained and on what, for the commands that predict without training."""

from __future__ import annotations

from typing import Any, get_args

import rich_click as click

from scalebench.cli.options import DTYPE, Number, all_of
from scalebench.study.choices import BACKENDS, EngineName


class _Gib(Number):
    """A number of GiB, with or without the unit."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        if isinstance(value, str):
            # as devices' data sheets and clouds' price lists write it
            value = value.removesuffix("GiB").strip()
            try:
                float(value)
            except ValueError:
                self.fail(f"expected GiB, as 40 or 40GiB, got {value!r}", param, ctx)
        return super().convert(value, param, ctx)


_COUNT = click.IntRange(min=1)
POSITIVE = Number(min=0, min_open=True)
_DTYPES = click.Choice([*DTYPE.choices, "tf32", "bf16-mixed"])
# bounds of what is physically possible: beyond them is a slip of a unit
_SHARE, _SECONDS = Number(min=0, max=10), Number(min=0, max=1e9)
_GIB = _Gib(min=0, min_open=True)

_MODEL = (
    click.option(
        "--layers",
        metavar="FILE.csv",
        help="Layer table of your own, in place of MODEL's.",
    ),
    click.option(
        "--input",
        "input_shape",
        metavar="CxHxW",
        help="Shape of a sample, for file.py:factory.",
    ),
)
_PLACE = (
    click.option(
        "--cluster",
        metavar="NAME|FILE",
        help="Nodes and links.  [default: those of a study; with --calibration, this-machine]",
    ),
    click.option(
        "--calibration",
        metavar="FILE",
        help="Model, steps, engines and operations as `scalebench calibrate` measured.",
    ),
    click.option(
        "--step-time", type=float, metavar="SECONDS", help="Seconds of a worker's step."
    ),
    click.option(
        "--step-batch",
        type=_COUNT,
        metavar="N",
        help="Samples of that step.  [default: --batch, or 64]",
    ),
    click.option(
        "--device",
        metavar="NAME|FILE",
        help="In place of --step-time: a published step time of this device, else its roofline; or a file of "
        "`calibrate --kernels`.  [default: the cluster's, where its file names one]",
    ),
    click.option(
        "--roofline",
        is_flag=True,
        help="The device's roofline, also where a step time is published.",
    ),
    click.option(
        "--measured-on",
        metavar="NAME|FILE",
        help="Device of --step-time, --calibration or a study, whose steps are scaled by rooflines to --device, or "
        "to the cluster's.",
    ),
    click.option(
        "--dtype",
        type=_DTYPES,
        help="Of parameters, gradients and products; tf32 and bf16-mixed: of products, beside float32.  "
        "[default: float32]",
    ),
    click.option(
        "--optimizer",
        metavar="NAME",
        help="For its memory.  [default: SGD with momentum]",
    ),
    click.option(
        "--collective",
        default="auto",
        show_default=True,
        help="Allreduce: ring, tree, nccl, ...",
    ),
    click.option(
        "--input-rate",
        type=POSITIVE,
        metavar="SAMPLES/S",
        help="Input pipeline of a worker.",
    ),
    click.option(
        "--jitter",
        type=_SHARE,
        metavar="SHARE",
        help="Spread of a step's compute; 0: none.  [default: the cluster's, or 0.03]",
    ),
    click.option(
        "--memory",
        type=_GIB,
        metavar="GIB",
        help="Memory of a worker.  [default: the device's]",
    ),
)
_TRAINING = (
    click.option(
        "--epoch-overhead",
        type=_SECONDS,
        default=0.0,
        metavar="SECONDS",
        help="Fixed, of each epoch.",
    ),
    click.option(
        "--batch",
        type=_COUNT,
        metavar="N",
        help="Samples of a worker's batch.  [default: that of a study, else the largest measured, or 64]",
    ),
    click.option(
        "--batch-global",
        type=_COUNT,
        metavar="N",
        help="Samples of a step of all workers, in its place.",
    ),
    click.option(
        "--engine",
        type=click.Choice(["auto", *get_args(EngineName)]),
        default="auto",
        help="Carries all strategies, as virtual.engine of a study.  [default: the one that each prefers]",
    ),
    click.option(
        "--backend",
        type=click.Choice(BACKENDS),
        help="Where --engine tasks computes, at its typical cost.  [default: as calibrated, or processes]",
    ),
    click.option(
        "--samples",
        type=_COUNT,
        help="Training samples.  [default: ImageNet's, or the measured data's]",
    ),
    click.option(
        "--epochs",
        type=_COUNT,
        metavar="N",
        help="Epochs.  [default: those of a study, or 90]",
    ),
)
# Of model, workload and platform; `predictions.asked.training_asked_for` reads them.
platform_options = all_of(
    click.argument("model", required=False, metavar="[MODEL|STUDY|RESULTS]"),
    *_MODEL,
    *_PLACE,
    *_TRAINING,
)
# without the batch and the length of a training
layout_options = all_of(
    click.argument("model", required=False, metavar="[MODEL|STUDY|RESULTS]"),
    *_MODEL,
    *_PLACE,
)
