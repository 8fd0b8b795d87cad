"""`scalebench plan MODEL`: how to divide a training among devices, which layouts there are, and what each costs."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from scalebench.cli.formats import format_option, show_tables
from scalebench.cli.options import NEW_FILE, all_of, verbosity_options
from scalebench.cli.platform_options import layout_options, predictor_of
from scalebench.errors import writing
from scalebench.formatting import EMPTY, counted, digits, seconds, share

if TYPE_CHECKING:
    from torch import nn

    from scalebench.pricing.layouts import ComponentOf, Plan, Planner, StageOf, Step
    from scalebench.pricing.prediction import Predictor
    from scalebench.study.spec import Component
    from scalebench.tables import Table

_GIB, _MIB = 2**30, 2**20
_OUTPUTS = 1000  # of an own model, as its layers are counted
_STEPS = 16  # of the epoch of a written study
_FEWEST_TESTED, _IMAGES = 64, 3  # samples; axes
_WHOLE = {"samples": None, "epochs": 1, "epoch_overhead": 0.0}  # one step is planned
_PANELS = {  # of `--help`
    "What is trained": ("--batch", "--dtype", "--optimizer", "--layers", "--input"),
    "Where": (
        *("--cluster", "--devices", "--memory", "--device", "--step-time", "--step-batch", "--calibration"),
        *("--roofline", "--measured-on", "--jitter", "--collective", "--input-rate"),
    ),
    "Output": ("--format", "--write", "--quiet", "--verbose", "--help"),
}


@click.command()
@all_of(*(click.option_panel(heading, options=list(flags)) for heading, flags in _PANELS.items()))
@layout_options
@click.option("--devices", type=click.IntRange(1, 65536), required=True, metavar="N", help="Workers, one a device.")
@click.option(
    "--batch", type=click.IntRange(min=1), required=True, metavar="B", help="Samples of a step of all devices."
)
@click.option("--write", "study", type=NEW_FILE, metavar="FILE.yaml", help="Write a study that compares the layouts.")
@format_option
@verbosity_options
def plan(model: str | None, devices: int, batch: int, study: Path | None, form: str, **flags: Any) -> int:
    """Plan how to divide a training of MODEL among N devices: data, sharded, tensor, pipeline, adaptive parallelism.

    Every mesh of replicas, stages and tensor degree that multiplies to the devices is searched, with up to 8
    micro-batches a stage in the order of 1f1b or interleaved, and stages cut by times; where a worker does not fit into
    the memory, activations are computed again. `adaptive` shares each layer by as many devices as move the least for
    it. The best of each kind has a row. Nothing is trained: every number is
    modelled, as `predict` does.

    \b
    scalebench plan vit_b16 --cluster juwels-booster --device a100-40gb --devices 8 --batch 512
    scalebench plan my_model.py:build --input 3x32x32 --cluster this-machine --step-time 0.02 --devices 4 --batch 64
    """
    gc.disable()  # for a command of seconds: what torch alone makes are 400,000 objects that stay
    from scalebench.pricing.layouts import Planner

    predictor = predictor_of(model, flags | {"batch": None, "batch_global": batch} | _WHOLE)
    planner = Planner(predictor, devices, _module(model or "", predictor))
    found = planner.plan()
    tables = _table(planner, found), *_stages(planner, found), *_components(planner, found)
    show_tables(form, *_answer(planner, found), *tables)
    if study is not None:
        _write(study, model or "", planner, found, flags)
    return 0


def _module(model: str, predictor: Predictor) -> nn.Module | None:
    """Return the module of the model, without memory; None for a layer table."""
    import torch

    from scalebench.models.registry import build_model, build_own, is_own

    workload = predictor.workload
    if (own := workload.trained) is not None:
        dtype = getattr(torch, workload.dtype)
        return build_model(own.model, own.input_shape, own.outputs, own.task, dtype, 0).to("meta")
    if not is_own(model):
        return None
    with torch.device("meta"):
        return build_own(model, {}, workload.layers.input_shape, _OUTPUTS)


def _answer(planner: Planner, found: Plan) -> Iterator[str]:
    """Yield the best layout, whether it is that at the ends of the intervals, and what the greedy choice loses."""
    best, workload = found.best, planner.predictor.workload
    where = f"{planner.devices:,} {planner.predictor.platform.device.name}"
    line = (
        f"{workload.layers.name} on {where} at a global batch of {planner.batch:,}: {best.layout.strategy} is the "
        f"fastest of {counted(found.tried, 'layout')}, {seconds(best.step_s)} a step and "
        f"{_gib(best.memory.total)} a worker"
    )
    if len(found.steps) > 1:
        second = found.steps[1]
        line += f"; {second.layout.strategy} takes {digits(second.step_s / best.step_s)} times as long"
    yield f"{line}."
    yield _at_ends(found)
    yield from _adaptive_choice(planner, found)
    if found.greedy is None:
        yield "Deciding one number after the other (tensor degree, stages, micro-batches) finds none that fits."
    elif found.greedy.step_s <= best.step_s:
        yield "Deciding one number after the other (tensor degree, stages, micro-batches) finds it too."
    else:
        lost = share(found.greedy.step_s / best.step_s - 1)
        yield (
            f"Deciding one number after the other (tensor degree, stages, micro-batches) finds "
            f"{found.greedy.layout.strategy}, which loses {lost}."
        )


def _adaptive_choice(planner: Planner, found: Plan) -> Iterator[str]:
    """Yield the layers that `adaptive` shares, and what its greedy choice loses."""
    best, greedy = found.adaptive, found.adaptive_greedy
    if best is None:
        return
    degrees = planner.degrees(best.layout)
    several = sum(degree > 1 for degree in degrees)
    line = (
        f"adaptive shares {several} of {counted(len(degrees), 'layer')} among devices"
        if several
        else ("adaptive shares no layer among devices: data parallelism moves the least")
    )
    if greedy is None:
        line += "; chosen greedily, layer after layer, no layout fits"
    elif planner.degrees(greedy.layout) == degrees:
        line += "; chosen greedily, layer after layer, the layout is the same"
    else:
        moved, least = (sum(each.moved for each in planner.components(step.layout)) for step in (greedy, best))
        line += (
            f"; chosen greedily, layer after layer, it moves {share(moved / least - 1)} more and takes "
            f"{digits(greedy.step_s / best.step_s)} times as long"
        )
    yield f"{line}."


def _at_ends(found: Plan) -> str:
    from scalebench.pricing.uncertainty import ENDS

    others: dict[str, list[str]] = {}
    for end, words in enumerate(ENDS):
        fastest = min(found.steps, key=lambda step: step.ends_s[end])
        if fastest is not found.best:
            others.setdefault(str(fastest.layout.strategy), []).append(words)
    if not others:
        return "It is the fastest at both ends of the intervals, too."
    said = "; ".join(f"{name} with {' or '.join(words)}" for name, words in others.items())
    return f"Not at both ends of the intervals: {said}."


def _table(planner: Planner, found: Plan) -> Table:
    from scalebench.measured import Measured
    from scalebench.pricing.decision import SPAN
    from scalebench.pricing.layouts import ADAPTIVE
    from scalebench.tables.table import COUNT, MEMORY, NUMBER, TIME_ALONE, Column, Table

    def recomputed(step: Step) -> str:
        return str(step.layout.strategy.options.get("recompute", EMPTY))

    def if_uniform(step: Step, value: int) -> Measured:
        return Measured(math.nan if step.layout.kind == ADAPTIVE else value)

    def if_staged(step: Step, value: float) -> Measured:
        return Measured(value if step.layout.mesh.pipeline > 1 else math.nan)

    again = any("recompute" in step.layout.strategy.options for step in found.steps)
    columns: list[Column[Step]] = [
        Column("layout", _layout, left=True),
        Column("data", lambda step: if_uniform(step, step.layout.mesh.data), COUNT),
        Column("stages", lambda step: if_uniform(step, step.layout.mesh.pipeline), COUNT),
        Column("tensor", lambda step: if_uniform(step, step.layout.mesh.tensor), COUNT),
        Column("micro-batches", lambda step: if_staged(step, step.layout.micro_batches), COUNT, spare=2),
        *([Column("computed again", recomputed)] if again else []),
        Column("step", lambda step: Measured(step.step_s, step.low_s, step.high_s), SPAN),
        Column("speedup", lambda step: Measured(found.alone_s / step.step_s), NUMBER, spare=1),
        Column("compute", lambda step: Measured(step.compute_s), TIME_ALONE, spare=4),
        Column("communication", lambda step: Measured(step.comm_s), TIME_ALONE),
        Column("bubble", lambda step: if_staged(step, step.bubble_s), TIME_ALONE),
        Column("memory", lambda step: Measured(step.memory.total), MEMORY),
    ]
    platform = planner.predictor.platform
    title = f"modelled ({platform.device.source}): a step on {planner.devices:,} workers of {platform.cluster.name}"
    notes = ["the best of each kind; speedup: over one device at the same batch; memory: of the fullest worker"]
    if not planner.uncut:
        notes.append(f"times of layers: {platform.device.of_layers(planner.predictor.workload.layers)}")
    if found.unfitting:
        least = min((planner.memory(layout).total, str(layout.strategy)) for layout in found.unfitting)
        notes.append(
            f"{len(found.unfitting)} of {found.tried} layouts do not fit into {platform.memory_gib:g} GiB; the "
            f"smallest of these, {least[1]}, needs {_gib(least[0])} a worker"
        )
    if planner.uncut:
        notes.append(f"layouts that divide the model are left out: {planner.uncut}")
    return Table.of(title, columns, found.steps, notes)


def _layout(step: Step) -> str:
    strategy = step.layout.strategy
    shard = f" shard {strategy.options['shard']}" if "shard" in strategy.options else ""
    interleaved = " interleaved" if step.layout.chunks > 1 else ""
    return f"{strategy.name}{shard}{interleaved}"


def _stages(planner: Planner, found: Plan) -> Iterator[Table]:
    """Yield the stages of the fastest layout that has several."""
    from scalebench.measured import Measured
    from scalebench.tables.table import COUNT, MEMORY, TIME_ALONE, Column, Table

    step = next((step for step in found.steps if step.layout.mesh.pipeline > 1), None)
    if step is None:
        return

    def size(name: str) -> Column[tuple[int, StageOf]]:
        return Column(name, lambda each: Measured(getattr(each[1].memory, name)), MEMORY)

    columns: list[Column[tuple[int, StageOf]]] = [
        Column("stage", lambda each: str(each[0])),
        Column("from", lambda each: each[1].first, left=True),
        Column("to", lambda each: each[1].last, left=True),
        Column("number", lambda each: Measured(each[1].layers), COUNT),
        Column("both passes", lambda each: Measured(each[1].pass_s), TIME_ALONE),
        *map(size, ("parameters", "gradients", "optimizer", "activations")),
        Column("memory", lambda each: Measured(each[1].memory.total), MEMORY),
    ]
    yield Table.of(
        f"stages of {step.layout.strategy}",
        columns,
        list(enumerate(planner.stages(step.layout))),
        [
            "from, to: the ends of each chunk of layers; both passes: of a micro-batch, with what is computed once; "
            "memory has the strategy's own tensors, too"
        ],
    )


def _components(planner: Planner, found: Plan) -> Iterator[Table]:
    """Yield the components of the adaptive layout, where it shares a layer."""
    from scalebench.measured import Measured
    from scalebench.tables.table import COUNT, MEMORY, TIME_ALONE, Column, Table

    if found.adaptive is None or max(planner.degrees(found.adaptive.layout)) == 1:
        return
    columns: list[Column[ComponentOf]] = [
        Column("from", lambda each: each.shared.first, left=True),
        Column("to", lambda each: each.shared.last, left=True),
        Column("number", lambda each: Measured(each.shared.layers), COUNT),
        Column("shared by", lambda each: Measured(each.shared.degree), COUNT),
        Column("replicas", lambda each: Measured(planner.devices // each.shared.degree), COUNT),
        Column("both passes", lambda each: Measured(each.pass_s), TIME_ALONE),
        Column("parameters", lambda each: Measured(each.parameters), MEMORY),
        Column("moved", lambda each: Measured(each.moved), MEMORY),
        Column("by data alone", lambda each: Measured(each.moved_by_data), MEMORY),
    ]
    yield Table.of(
        f"components of {found.adaptive.layout.strategy}",
        columns,
        planner.components(found.adaptive.layout),
        [
            "moved: by a device in a step: gradients, sums among those that share a layer, rows between components; by "
            "data alone: if every device held all layers"
        ],
    )


def _gib(nbytes: int) -> str:
    return f"{digits(nbytes / _GIB)} GiB" if nbytes >= _GIB / 10 else f"{digits(nbytes / _MIB)} MiB"


def _write(path: Path, model: str, planner: Planner, found: Plan, flags: dict[str, Any]) -> None:
    """Write a study with the best layout of each kind, and serial, on data that are made for it."""
    import yaml

    from scalebench.models.registry import is_own

    workload, platform = planner.predictor.workload, planner.predictor.platform
    content: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9]+", "-", f"plan-{Path(workload.layers.name).stem}-{planner.devices}"),
        "description": f"Layouts of {workload.layers.name} on {planner.devices} devices",
        "workers": [planner.devices],
        "repetitions": 1,
        "strategies": ["serial", *(_plain(step.layout.strategy) for step in found.steps)],
        "batch_global": planner.batch,
        "epochs": 1,
        "evaluate_every": 0,
        "optimizer": _plain(workload.optimizer),
        "dtype": workload.dtype,
        "cluster": flags["cluster"] or "this-machine",
    }
    data: dict[str, Any] = {"n_train": _STEPS * planner.batch, "n_test": max(_FEWEST_TESTED, planner.batch)}
    if workload.trained is not None or is_own(model):
        own = workload.trained
        shape = list(own.input_shape if own else workload.layers.input_shape)
        data |= {"shape": shape, **({"kind": "images"} if len(shape) == _IMAGES else {})}
        content["model"] = _plain(own.model) if own else model
    else:
        content |= {"execution": "modelled", "model": {"layers": {"table": flags["layers"] or model}}}
    content["dataset"] = {"synthetic": data}
    if platform.cluster.compute == "stated":
        alone = platform.device.times(workload.layers, planner.batch)
        content["device_step_time"] = alone.step_s  # of the largest batch, that of serial
    text = f"# Written by scalebench plan; scalebench run {path}\n{yaml.safe_dump(content, sort_keys=False)}"
    with writing(path, ""):
        path.write_text(text, encoding="utf-8")
    click.echo(f"{path} written; next: scalebench run {path}", err=True)


def _plain(component: Component) -> object:
    return {component.name: component.options} if component.options else component.name
