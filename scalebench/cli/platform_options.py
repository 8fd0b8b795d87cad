"""Options that say what is trained and on what, for the commands that predict without training."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import rich_click as click

if TYPE_CHECKING:
    from scalebench.pricing.platform import Platform
    from scalebench.pricing.prediction import Predictor, Workload
    from scalebench.study.spec import Component

_F = TypeVar("_F", bound=Callable[..., Any])
_SAMPLES = 1_281_167  # ImageNet's training images


def platform_options(command: _F) -> _F:
    """Add the model as an argument, and the options of workload and platform; read with `predictor_of`."""
    options = [
        click.argument("model"),
        click.option("--layers", metavar="FILE.csv", help="Layer table of your own, in place of MODEL's."),
        click.option("--input", "input_shape", metavar="CxHxW", help="Shape of a sample, for file.py:factory."),
        click.option("--cluster", metavar="NAME|FILE", required=True, help="Nodes and links."),
        click.option("--step-time", type=float, metavar="SECONDS", help="Seconds of a worker's step."),
        click.option("--step-batch", type=int, metavar="N", help="Samples of that step.  [default: --batch, or 64]"),
        click.option("--device", metavar="NAME|FILE", help="Roofline of this device, in place of --step-time."),
        click.option("--dtype", default="float32", show_default=True, help="Of parameters, gradients and products."),
        click.option("--batch", type=int, metavar="N", help="Samples of a worker's batch.  [default: 64]"),
        click.option("--batch-global", type=int, metavar="N", help="Samples of a step of all workers, in its place."),
        click.option("--samples", type=int, default=_SAMPLES, help="Training samples.  [default: ImageNet's]"),
        click.option("--epochs", type=int, help="Epochs.  [default: 90]"),
        click.option("--optimizer", metavar="NAME", help="For its memory.  [default: SGD with momentum]"),
        click.option("--collective", default="auto", show_default=True, help="Allreduce: ring, tree, nccl, ..."),
        click.option("--input-rate", type=float, metavar="SAMPLES/S", help="Input pipeline of a worker."),
        click.option("--epoch-overhead", type=float, default=0.0, metavar="SECONDS", help="Fixed, of each epoch."),
        click.option("--jitter", type=float, default=0.0, metavar="SHARE", help="Spread of a step's compute, as 0.05."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def predictor_of(model: str, flags: dict[str, Any]) -> Predictor:
    """Return the predictor for the command's options; raise UsageError for what cannot be."""
    from scalebench.pricing.prediction import Predictor

    workload = _workload(model, flags)
    return Predictor(workload, _platform(workload, flags))


def _workload(model: str, flags: dict[str, Any]) -> Workload:
    from scalebench.errors import UsageError
    from scalebench.models.layers import load_layers
    from scalebench.pricing.prediction import Workload
    from scalebench.study.spec import Component

    if flags["batch"] is not None and flags["batch_global"] is not None:
        raise UsageError("give --batch or --batch-global, not both")
    batch = flags["batch_global"] or flags["batch"] or 64
    epochs = flags["epochs"] or 90
    for flag in ("batch", "batch_global", "epochs", "samples", "step_batch"):
        if flags[flag] is not None and flags[flag] < 1:
            raise UsageError(f"--{flag.replace('_', '-')}: expected 1 or more, got {flags[flag]}")
    if flags["dtype"] not in ("float32", "float64", "bfloat16"):
        raise UsageError(f"--dtype: expected float32, float64 or bfloat16, got {flags['dtype']}")
    shape = tuple(int(side) for side in (flags["input_shape"] or "").split("x") if side.isdigit())
    layers = load_layers(flags["layers"] or model, shape)
    chosen = {"optimizer": Component.model_validate(flags["optimizer"])} if flags["optimizer"] else {}
    return Workload(
        layers, flags["samples"], epochs, batch, flags["batch_global"] is not None, **chosen, dtype=flags["dtype"]
    )


def _platform(workload: Workload, flags: dict[str, Any]) -> Platform:
    from scalebench.cluster.device import load_device
    from scalebench.cluster.load import load_cluster
    from scalebench.cluster.network import Network
    from scalebench.errors import UsageError
    from scalebench.pricing.devices import Roofline, Stated, TimeModel
    from scalebench.pricing.platform import Platform
    from scalebench.pricing.prediction import optimizer_states

    cluster = load_cluster(flags["cluster"])
    if (flags["step_time"] is None) == (flags["device"] is None):
        raise UsageError(
            "give the seconds of a step with --step-time, or a --device (a100-40gb, v100-16gb, ...), one of them"
        )
    rate = flags["input_rate"]
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise UsageError(f"--input-rate: expected samples a second greater than 0, got {rate:g}")
    for flag in ("epoch_overhead", "jitter"):
        if not (math.isfinite(flags[flag]) and flags[flag] >= 0):
            raise UsageError(f"--{flag.replace('_', '-')}: expected a number of 0 or more, got {flags[flag]:g}")
    device: TimeModel
    if flags["device"] is not None:
        device = Roofline(load_device(flags["device"]), workload.dtype, optimizer_states(workload.optimizer))
    else:
        device = Stated(flags["step_time"], flags["step_batch"] or flags["batch"] or 64)
    Network(cluster, 1, flags["collective"])  # refuses an unknown one
    return Platform(
        cluster,
        device,
        collective=flags["collective"],
        input_s=1 / rate if rate else 0.0,
        epoch_s=flags["epoch_overhead"],
        jitter=flags["jitter"],
    )


def parse_strategy(text: str) -> Component:
    """Return the strategy of `NAME`, `NAME:option=value:option=value`, or as for `run --strategy`."""
    from scalebench.errors import StudyError
    from scalebench.strategies import registry
    from scalebench.study.load import written_component
    from scalebench.study.spec import Component
    from scalebench.study.validation import parse

    name, *options = text.split(":")
    if all("=" in option for option in options) and Path(name).suffix != ".py":
        said = {}
        for option in options:
            key, _, value = option.partition("=")
            said[key.strip()] = parse(value, f"--strategy {text}", StudyError)
        component = Component(name=name.strip(), options=said)
    else:
        component = Component.model_validate(written_component(text, "--strategy"))
    registry.create(component.name, component.options, "virtual")
    return component


def worker_counts(text: str) -> list[int]:
    """Return the worker counts of `text`, or raise UsageError."""
    from scalebench.errors import UsageError
    from scalebench.study.parsing import parse_workers

    try:
        return parse_workers(text)
    except ValueError as error:
        raise UsageError(f"--workers: {error}") from None
