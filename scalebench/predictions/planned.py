"""Layouts of a training on many devices: the answer in words, their tables, and a study that compares them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from scalebench.formatting import EMPTY, counted, digits, memory_size, seconds, share
from scalebench.measured import Measured
from scalebench.models.flat import to_meta
from scalebench.models.registry import build_model, build_own, is_own
from scalebench.models.zoo.layers import layers_of
from scalebench.predictions.asked import training_asked_for
from scalebench.pricing import layout_costs, layouts
from scalebench.pricing.advice import SPAN
from scalebench.pricing.uncertainty import ENDS
from scalebench.study.choices import SERIAL
from scalebench.tables.table import COUNT, MEMORY, NUMBER, TIME_ALONE, Column, Table

if TYPE_CHECKING:
    from torch import nn

    from scalebench.pricing.prediction import Predictor
    from scalebench.study.spec import Component

_OUTPUTS = 1000  # of an own model, as its layers are counted
_WHOLE = {"samples": None, "epochs": 1, "epoch_overhead": 0.0}  # one step is planned
# each layout by the engine that it prefers
_CARRIED = {
    "engine": "auto",
    "backend": None,
}
_STEPS = 16  # of the epoch of a written study
_FEWEST_TESTED, _IMAGES = 64, 3  # samples; axes


def planned(
    model: str | None,
    devices: int,
    batch: int,
    flags: Mapping[str, Any],
    note: Callable[[str], None] = lambda _: None,
) -> Planned:
    """Return the layouts of a training on so many devices, `batch` samples a step of all; `flags` as of the command.

    Raises:
        UsageError: the flags do not say what is trained, or where.
    """
    # the batch of all devices is fixed: layouts divide it in different ways
    whole = {**flags, "batch": None, "batch_global": batch} | _WHOLE | _CARRIED
    asked = training_asked_for(model, (), whole, note)
    predictor = asked.predictor
    planner = layouts.Planner(predictor, devices, _module(model or "", predictor))
    return Planned(planner, planner.plan(), asked.flags)


def _module(model: str, predictor: Predictor) -> nn.Module | None:
    """Return the module of the model, without memory; None for a layer table."""
    workload = predictor.workload
    # the calibration names the model that it timed
    if (own := workload.trained) is not None:
        dtype = getattr(torch, workload.dtype)
        return to_meta(
            build_model(own.model, own.input_shape, own.outputs, own.task, dtype, 0)
        )
    if not is_own(model):
        return None
    # only shapes are needed, of models that no machine here could hold
    with torch.device("meta"):
        return build_own(model, {}, workload.layers.input_shape, _OUTPUTS)


@dataclass(frozen=True)
class Planned:
    """The layouts that a plan has found, and the planner that prices them."""

    planner: layouts.Planner
    found: layouts.Plan
    flags: Mapping[str, Any]

    def answer(self) -> Iterator[str]:
        """Yield the best layout, whether it is that at the ends of the intervals, and what the greedy choice loses."""
        planner, found = self.planner, self.found
        best, workload = found.best, planner.predictor.workload
        where = planner.predictor.platform.device.counted(planner.devices)
        line = (
            f"{workload.layers.name} on {where} at a global batch of {planner.batch:,}: {best.layout.strategy} is the "
            f"fastest of {counted(found.tried, 'layout')}, {seconds(best.time.value)} a step and "
            f"{memory_size(best.memory.total)} a worker"
        )
        if len(found.steps) > 1:
            second = found.steps[1]
            line += f"; {second.layout.strategy} takes {digits(second.time.value / best.time.value)} times as long"
        yield f"{line}."
        yield _at_ends(found)
        yield from self._adaptive_choice()
        if found.greedy is None:
            yield "Deciding one number after the other (tensor degree, stages, micro-batches) finds none that fits."
        elif found.greedy.time.value <= best.time.value:
            yield "Deciding one number after the other (tensor degree, stages, micro-batches) finds it too."
        else:
            lost = share(found.greedy.time.value / best.time.value - 1)
            yield (
                f"Deciding one number after the other (tensor degree, stages, micro-batches) finds "
                f"{found.greedy.layout.strategy}, which loses {lost}."
            )

    def tables(self) -> Iterator[Table]:
        """Yield the layouts, the stages of the fastest that has several, and what the adaptive one shares."""
        yield self._layouts()
        yield from self._stages()
        yield from self._components()

    def study(self, model: str | None) -> dict[str, Any]:
        """Return a study with the best layout of each kind, and serial, on data that are made for it.

        Of a model of its own it trains; of a layer table, `model` or the file of
        --layers, its runs are modelled.
        """
        planner, found, flags = self.planner, self.found, self.flags
        workload, platform = planner.predictor.workload, planner.predictor.platform
        content: dict[str, Any] = {
            # The name of a study is that of its folder.
            "name": re.sub(
                r"[^A-Za-z0-9]+",
                "-",
                f"plan-{Path(workload.layers.name).stem}-{planner.devices}",
            ),
            "description": f"Layouts of {workload.layers.name} on {counted(planner.devices, 'device')}",
            "workers": [planner.devices],
            "repetitions": 1,
            "strategies": [
                SERIAL,
                *(_plain(planner.stated(step.layout)) for step in found.steps),
            ],
            "batch_global": planner.batch,
            "epochs": 1,
            # The data are made up: an accuracy on them says nothing.
            "evaluate_every": 0,
            "optimizer": _plain(workload.optimizer),
            "dtype": workload.dtype,
            "cluster": flags["cluster"] or "this-machine",
        }
        data: dict[str, Any] = {
            "n_train": _STEPS * planner.batch,
            "n_test": max(_FEWEST_TESTED, planner.batch),
        }
        if workload.trained is not None or is_own(model or ""):
            own = workload.trained
            shape = list(own.input_shape if own else workload.layers.input_shape)
            data |= {
                "shape": shape,
                **({"kind": "images"} if len(shape) == _IMAGES else {}),
            }
            content["model"] = _plain(own.model) if own else model
            if own and layers_of(own.model):
                content["execution"] = "modelled"
        else:
            content |= {
                "execution": "modelled",
                "model": {"layers": {"table": flags["layers"] or model}},
            }
        content["dataset"] = {"synthetic": data}
        if platform.cluster.compute == "stated" or flags["step_time"] is not None:
            alone = platform.device.times(workload.layers, planner.batch)
            # of the largest batch, that of serial
            content["device_step_time"] = alone.step_s
        return content

    def _adaptive_choice(self) -> Iterator[str]:
        """Yield the layers that `adaptive` shares, and what the choice of its other solver loses."""
        planner, best, other = (
            self.planner,
            self.found.adaptive,
            self.found.adaptive_other,
        )
        if best is None:
            return
        degrees = planner.costs.degrees(best.layout)
        several = sum(degree > 1 for degree in degrees)
        line = (
            f"adaptive shares {several} of {counted(len(degrees), 'layer')} among devices"
            if several
            else "adaptive shares no layer among devices"
        )
        if len(planner.adaptive_layouts) == 1:
            line += "; chosen greedily, layer after layer, the layout is the same"
        elif other is None:
            line += "; chosen greedily, layer after layer, no layout fits"
        else:
            moved, own = (
                sum(each.moved for each in planner.costs.components(step.layout))
                for step in (other, best)
            )
            lost = digits(other.time.value / best.time.value)
            line += (
                f"; chosen greedily, layer after layer, it moves {share(moved / own - 1)} more and takes {lost} times "
                "as long"
                if other.layout == planner.adaptive_layouts.get("greedy")
                else f", chosen greedily, layer after layer; the layout of the fewest bytes moves "
                f"{share(1 - moved / own)} less and takes {lost} times as long"
            )
        yield f"{line}."

    def _layouts(self) -> Table:
        planner, found = self.planner, self.found

        def recomputed(step: layout_costs.Step) -> str:
            recompute = step.layout.recompute
            return EMPTY if recompute == "none" else recompute

        # Degrees of the adaptive layout differ from layer to layer.
        def if_uniform(step: layout_costs.Step, value: int) -> Measured:
            return Measured(math.nan if step.layout.kind == layouts.ADAPTIVE else value)

        # Only stages divide a batch, and wait for one another.
        def if_staged(step: layout_costs.Step, value: float) -> Measured:
            return Measured(value if step.layout.mesh.pipeline > 1 else math.nan)

        again = any(step.layout.recompute != "none" for step in found.steps)
        columns: list[Column[layout_costs.Step]] = [
            Column("layout", _layout, left=True),
            Column("data", lambda step: if_uniform(step, step.layout.mesh.data), COUNT),
            Column(
                "stages",
                lambda step: if_uniform(step, step.layout.mesh.pipeline),
                COUNT,
            ),
            Column(
                "tensor", lambda step: if_uniform(step, step.layout.mesh.tensor), COUNT
            ),
            Column(
                "micro-batches",
                lambda step: if_staged(step, step.layout.micro_batches),
                COUNT,
                spare=2,
            ),
            *([Column("computed again", recomputed)] if again else []),
            Column(
                "step",
                lambda step: step.time,
                SPAN,
            ),
            Column(
                "speedup",
                lambda step: Measured(found.alone_s / step.time.value),
                NUMBER,
                spare=1,
            ),
            Column(
                "compute", lambda step: Measured(step.compute_s), TIME_ALONE, spare=4
            ),
            Column("communication", lambda step: Measured(step.comm_s), TIME_ALONE),
            Column("bubble", lambda step: if_staged(step, step.bubble_s), TIME_ALONE),
            Column("memory", lambda step: Measured(step.memory.total), MEMORY),
        ]
        platform = planner.predictor.platform
        where = f"{counted(planner.devices, 'worker')} of {platform.cluster.name}"
        title = f"modelled ({platform.device.source}): a step on {where}"
        return Table.of(title, columns, found.steps, self._layout_notes())

    def _layout_notes(self) -> list[str]:
        """Return the meaning of the columns, where times of layers are from, and which layouts are left out."""
        planner, found = self.planner, self.found
        platform = planner.predictor.platform
        notes = [
            "the best of each kind; speedup: over one device at the same batch; memory: of the fullest worker"
        ]
        if platform.jitter and planner.devices > 1:
            notes.append(
                f"communication: with the wait for the slowest worker, by a jitter of {share(platform.jitter)} "
                f"({platform.jitter_source})"
            )
        if not planner.uncut:
            notes.append(
                f"times of layers: {platform.device.of_layers(planner.predictor.workload.layers)}"
            )
        if found.unfitting:
            # The least memory with which a layout more would fit.
            least = min(
                (planner.costs.memory(layout).total, str(layout.strategy))
                for layout in found.unfitting
            )
            notes.append(
                f"{len(found.unfitting)} of {found.tried} layouts do not fit into {platform.memory_gib:g} GiB; the "
                f"smallest of these, {least[1]}, needs {memory_size(least[0])} a worker"
            )
        if planner.whole_layers:
            notes.append(
                "layouts that share layers or shard them are left out: optimizer "
                f"{planner.predictor.workload.optimizer} needs whole ones"
            )
        if planner.uncut:
            notes.append(f"layouts that divide the model are left out: {planner.uncut}")
        return notes

    def _stages(self) -> Iterator[Table]:
        """Yield the stages of the fastest layout that has several."""
        step = next(
            (step for step in self.found.steps if step.layout.mesh.pipeline > 1), None
        )
        if step is None:
            return

        def size(name: str) -> Column[tuple[int, layout_costs.StageOf]]:
            return Column(
                name, lambda each: Measured(getattr(each[1].memory, name)), MEMORY
            )

        columns: list[Column[tuple[int, layout_costs.StageOf]]] = [
            Column("stage", lambda each: str(each[0])),
            Column("from", lambda each: each[1].first, left=True),
            Column("to", lambda each: each[1].last, left=True),
            Column("number", lambda each: Measured(each[1].layers), COUNT),
            Column("both passes", lambda each: Measured(each[1].pass_s), TIME_ALONE),
            Column("communication", lambda each: Measured(each[1].comm_s), TIME_ALONE),
            Column("bubble", lambda each: Measured(each[1].bubble_s), TIME_ALONE),
            *map(size, ("parameters", "gradients", "optimizer", "activations")),
            Column("memory", lambda each: Measured(each[1].memory.total), MEMORY),
        ]
        yield Table.of(
            f"stages of {step.layout.strategy}",
            columns,
            list(enumerate(self.planner.costs.stages(step.layout))),
            [
                "from, to: the ends of each chunk of layers; both passes: of a micro-batch, with what is computed "
                "once; communication, bubble: of a step; memory has the strategy's own tensors, too"
            ],
        )

    def _components(self) -> Iterator[Table]:
        """Yield the components of the adaptive layout, where it shares a layer."""
        planner, adaptive = self.planner, self.found.adaptive
        if adaptive is None or max(planner.costs.degrees(adaptive.layout)) == 1:
            return

        def size(name: str) -> Column[layout_costs.ComponentOf]:
            return Column(
                name, lambda each: Measured(getattr(each.memory, name)), MEMORY
            )

        columns: list[Column[layout_costs.ComponentOf]] = [
            Column("from", lambda each: each.shared.first, left=True),
            Column("to", lambda each: each.shared.last, left=True),
            Column("number", lambda each: Measured(each.shared.layers), COUNT),
            Column("shared by", lambda each: Measured(each.shared.degree), COUNT),
            Column(
                "replicas",
                lambda each: Measured(planner.devices // each.shared.degree),
                COUNT,
            ),
            Column("both passes", lambda each: Measured(each.pass_s), TIME_ALONE),
            Column("communication", lambda each: Measured(each.comm_s), TIME_ALONE),
            *map(size, ("parameters", "gradients", "optimizer", "activations")),
            Column("memory", lambda each: Measured(each.memory.total), MEMORY),
            Column("moved", lambda each: Measured(each.moved), MEMORY),
            Column("by data alone", lambda each: Measured(each.moved_by_data), MEMORY),
        ]
        yield Table.of(
            f"components of {adaptive.layout.strategy}",
            columns,
            planner.costs.components(adaptive.layout),
            [
                "moved: by a device in a step: gradients, sums among those that share a layer, rows between "
                "components; by data alone: if every device held all layers; no component waits for another: there "
                "is no bubble"
            ],
        )


def _at_ends(found: layouts.Plan) -> str:
    others: dict[str, list[str]] = {}
    for end, words in enumerate(ENDS):
        fastest = min(found.steps, key=lambda step: step.ends_s[end])
        if fastest is not found.best:
            others.setdefault(str(fastest.layout.strategy), []).append(words)
    # Fast or slow steps, each on links as stated or slow: the same for every layout.
    if not others:
        return "It is the fastest at both ends of the intervals, too."
    said = "; ".join(
        f"{name} with {' or '.join(words)}" for name, words in others.items()
    )
    return f"Not at both ends of the intervals: {said}."


def _layout(step: layout_costs.Step) -> str:
    layout = step.layout
    shard = f" shard {layout.sharded}" if layout.sharded else ""
    order = "" if layout.order in (None, "1f1b") else f" {layout.order}"
    return f"{layout.strategy.name}{shard}{order}"


def _plain(component: Component) -> object:
    return {component.name: component.options} if component.options else component.name
