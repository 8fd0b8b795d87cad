"""What is trained and on what, by the options of a prediction: its predictor and its strategies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import pstdev
from typing import Any

import torch

from scalebench.calibration.calibration_file import (
    THIS_MACHINE,
    Calibration,
    read_calibration,
)
from scalebench.cluster.cluster_file import Cluster, load_cluster
from scalebench.cluster.device import Device, load_device
from scalebench.cluster.engine_costs import EngineCosts
from scalebench.cluster.network import Network
from scalebench.comm.engines import named
from scalebench.errors import ClusterError, ModelError, ResultsError, UsageError
from scalebench.launch.calibrating import request_of
from scalebench.launch.engine_choice import charged_engine, check_provided
from scalebench.launch.planning import plan_study
from scalebench.models import parts
from scalebench.models.flat import to_meta
from scalebench.models.layer_counting import count_model
from scalebench.models.layers import LayerTable
from scalebench.models.registry import build_model, build_own, is_own
from scalebench.models.zoo.layers import layers_of, load_layers
from scalebench.pricing import devices
from scalebench.pricing.machine import Trained
from scalebench.pricing.platform import Platform, faster
from scalebench.pricing.prediction import Predictor
from scalebench.pricing.published_steps import published_step
from scalebench.pricing.uncertainty import JITTER
from scalebench.pricing.workload import PRECISIONS, SGD, Workload, optimizer_states
from scalebench.records.folder import CALIBRATION, RUNS, STUDY, study_in
from scalebench.records.progress import begun_in
from scalebench.strategies import registry
from scalebench.study.choices import ALLREDUCE, BACKENDS, Backend
from scalebench.study.heterogeneity import STATED
from scalebench.study.load import load_study, written_component
from scalebench.study.spec import Component, Study, TaskOptions

STRATEGIES = (ALLREDUCE, "epoch_average")  # by default
_JITTER = 0.03  # of published base rows five had 0.3 to 3.5 %
_SAMPLES = 1_281_167  # ImageNet's training images
_OUTPUTS = 1000  # of an own model, as its layers are counted
_EPOCHS = 90  # of its usual recipe
# a calibration knows the model and the machine
_MISSING = "{} is missing; give it, or what was measured with --calibration"


@dataclass(frozen=True)
class Asked:
    """A training as the options state it: its predictor, strategies, and the worker counts of a study, if any.

    `flags` are the options, completed by what the study states.
    """

    predictor: Predictor
    strategies: list[Component]
    flags: Mapping[str, Any]
    workers: tuple[int, ...] = ()


def training_asked_for(
    model: str | None,
    strategies: Sequence[str],
    flags: Mapping[str, Any],
    note: Callable[[str], None] = lambda _: None,
) -> Asked:
    """Return what is predicted for the command's options; what they leave out is as in a study.

    In the place of MODEL stands its file STUDY.yaml, its folder of results, or its
    runs.csv. Engines of this machine that no run of the study needed yet are measured,
    which takes seconds, as `note` says.

    Raises:
        UsageError: the options do not say what is trained, or where.
    """
    path = _study_file(model)
    if path is None:
        chosen = strategies_on(flags["engine"], strategies or STRATEGIES)
        return Asked(_predictor_of(model, flags), chosen, flags)
    if stated := [
        flag for flag in ("layers", "input_shape") if flags[flag] is not None
    ]:
        raise UsageError(
            f"--{stated[0].partition('_')[0]}: {path} says what is trained; leave one of them out"
        )
    study = load_study(path, {}, [], begun_in(path.parent))
    is_own = flags["calibration"] is None
    chosen = strategies_on(flags["engine"], strategies) or _of_several(study)
    flags = _completed(flags, study, path, chosen)
    if flags["calibration"] is None:
        measured = _with_stated_steps(study, path, flags, note)
    else:
        measured = _measured(None, flags)
        if is_own and measured.trained is not None:
            # its file is named as from the folder in which the study began
            trained = measured.trained.model_copy(update={"model": study.model})
            measured = measured.model_copy(update={"trained": trained})
    return Asked(_predictor("", flags, measured), chosen, flags, tuple(study.workers))


def _study_file(model: str | None) -> Path | None:
    """Return the file of the study that `model` is, or is the results of; None for a model."""
    if model is None:
        return None
    path = Path(model).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return path
    folder = study_in(path.parent if path.name == RUNS else path)
    if (folder / STUDY).is_file():
        return folder / STUDY
    if path.is_dir() or path.name == RUNS:
        raise ResultsError(
            f"{path}: no {STUDY} in {folder}, which says what was trained; name a folder that `scalebench run` made, "
            "a study's file or a model"
        )
    return None


def _of_several(study: Study) -> list[Component]:
    """Return the strategies of the study that run at several workers, all of them if none does."""
    several = [
        each
        for each in study.strategies
        if registry.create(each.name, each.options, "virtual").requires
    ]
    return several or study.strategies


def _completed(
    flags: Mapping[str, Any], study: Study, path: Path, chosen: Sequence[Component]
) -> dict[str, Any]:
    """Return the options, completed by what the study trains, for how long, and on what."""
    if study.scaling == "weak" and flags["samples"] is None:
        raise UsageError(
            f"{path}: samples grow with the workers of this study, and a prediction has the same at each count; "
            "give --samples"
        )
    flags = dict(flags)
    if flags["batch"] is None and flags["batch_global"] is None:
        flags["batch"] = study.batch_per_worker
        flags["batch_global"] = study.batch_global
    if flags["engine"] == "auto":
        carried = {charged_engine(study, each, []) for each in chosen}
        flags["engine"] = carried.pop() if len(carried) == 1 else "auto"
    if flags["engine"] == "tasks" and flags["backend"] is None:
        flags["backend"] = study.tasks.backend
    if flags["collective"] == "auto":
        flags["collective"] = study.virtual.collective
    own: dict[str, object] = {
        "cluster": study.cluster,
        "epochs": study.epochs,
        "dtype": study.dtype,
    }
    if study.virtual.jitter == "none":
        own["jitter"] = 0.0
    elif study.virtual.jitter in STATED:
        own["jitter"] = study.virtual.jitter_sigma
    own |= _steps_of(study, path, flags)
    return flags | {name: value for name, value in own.items() if flags[name] is None}


def _steps_of(study: Study, path: Path, flags: Mapping[str, Any]) -> dict[str, object]:
    """Return the options that give the step times of a study: stated by it, or measured for it.

    Raises:
        ClusterError: neither is there, and no option or cluster gives them.
    """
    batch = study.batch_global or study.batch_per_worker
    if flags["calibration"] is not None:
        return {}
    if flags["step_time"] is not None:
        return {"step_batch": batch}
    # another device than that of the study's steps
    if flags["device"] is not None and flags["measured_on"] is None:
        return {}
    if study.device_step_time is not None:
        return {"step_time": study.device_step_time, "step_batch": batch}
    found = study.calibration or _calibration_beside(path, study)
    if found is not None:
        return {"calibration": str(found)}
    if load_cluster(flags["cluster"] or study.cluster).node.device is not None:
        return {}
    raise ClusterError(
        f"{path} says nothing of what a step takes: give --step-time SECONDS or --device NAME, or measure it with: "
        f"scalebench calibrate {path}, then add --calibration {CALIBRATION}"
    )


def _calibration_beside(path: Path, study: Study) -> Path | None:
    """Return the calibration of the runs of a study, where it has any, in its folder of results."""
    folder = path.parent if path.name == STUDY else Path("results") / study.name
    return found if (found := folder / CALIBRATION).is_file() else None


def _with_stated_steps(
    study: Study, path: Path, flags: Mapping[str, Any], note: Callable[[str], None]
) -> Calibration:
    """Return the model and data of a study whose step times are stated, with measured costs of engines alone."""
    # None leaves what the study has
    own = {name: flags[name] for name in ("cluster", "optimizer")}
    overrides = own | {"execution": "modelled"}
    modelled = load_study(path, overrides, [], begun_in(path.parent))
    plan = plan_study(modelled, timed=False)
    request = request_of(plan, plan.sweep.simulated)
    beside = study.calibration or _calibration_beside(path, study)
    engines = EngineCosts()
    if beside is not None:
        engines = read_calibration(beside).engines
    elif request.is_here and max(study.workers) > 1:
        # with what measures, for studies whose engines no run was charged for
        from scalebench.calibration.charging import engines_of

        note(
            f"the engines of this machine are measured, unless they were, as a run of {path} would"
        )
        engines = engines_of(request, note)
    return Calibration(key="", trained=request.trained, tables=[], engines=engines)


def _predictor_of(model: str | None, flags: Mapping[str, Any]) -> Predictor:
    """Return the predictor for the options of a model; raise UsageError for what cannot be."""
    measured = _measured(model, flags) if flags["calibration"] is not None else None
    if measured is None and not (model or flags["layers"]):
        raise UsageError(_MISSING.format("MODEL"))
    return _predictor(model or "", flags, measured)


def _predictor(
    model: str, flags: Mapping[str, Any], measured: Calibration | None
) -> Predictor:
    # an unknown model is named before what its training still lacks
    workload = _workload(model, flags, measured)
    if measured is None and flags["cluster"] is None:
        raise UsageError(_MISSING.format("--cluster"))
    return Predictor(workload, _platform(workload, flags, measured))


def _measured(model: str | None, flags: Mapping[str, Any]) -> Calibration:
    """Read the calibration, and refuse options that it decides otherwise."""
    path = flags["calibration"]
    found = read_calibration(Path(path))
    # calibrations of engines alone have no model
    if not found.tables or found.trained is None or found.measured is None:
        raise ClusterError(
            f"calibration: {path} has no step times of a model; write one with: scalebench calibrate"
        )
    # other numbers change a step's time, which was measured with these
    own = {"dtype": found.measured.dtype, "optimizer": str(found.trained.optimizer)}
    if model is not None and model not in (
        found.trained.model.name,
        str(found.trained.model),
    ):
        raise UsageError(
            f"calibration: {path} was measured for {found.measured}, not for {model}; leave MODEL out"
        )
    # two sources for one number: which one counted would not be seen in the answer
    for flag in ("layers", "step_time", "step_batch", "device"):
        if flags[flag] is not None and not (
            flag == "device" and flags["measured_on"] is not None
        ):
            scaling = (
                "; to scale that to the device, add --measured-on DEVICE"
                if flag == "device"
                else ""
            )
            raise UsageError(
                f"--{flag.replace('_', '-')}: {path} says what a step takes; give one of them{scaling}"
            )
    for flag, value in own.items():
        asked = str(Component.model_validate(flags[flag])) if flags[flag] else value
        if asked != value:
            raise UsageError(
                f"--{flag}: {path} was measured with {value}, not {asked}; calibrate with the other"
            )
    return found


def _workload(
    model: str, flags: Mapping[str, Any], measured: Calibration | None
) -> Workload:
    if flags["batch"] is not None and flags["batch_global"] is not None:
        raise UsageError("give --batch or --batch-global, not both")
    largest = (
        max(batch.samples for batch in measured.tables[0].batches)
        if measured and measured.tables
        else 64
    )
    batch = flags["batch_global"] or flags["batch"] or largest
    asked = (
        measured.measured.dtype
        if measured and measured.measured
        else flags["dtype"] or "float32"
    )
    # tf32 and bf16-mixed name how products are computed; parameters stay float32
    dtype, products = PRECISIONS.get(asked, (asked, ""))
    epochs, in_all = flags["epochs"] or _EPOCHS, flags["batch_global"] is not None
    if measured is not None and (own := measured.trained) is not None:
        # the model that was timed, built again without memory to count its layers
        build = partial(_timed_on, own, getattr(torch, dtype))
        layers = layers_of(own.model) or count_model(
            build, str(own.model), own.input_shape
        )
        samples = flags["samples"] or own.samples
        uncut = _why_uncut(build, layers) if is_own(own.model.name) else ""
        return Workload(
            layers,
            samples,
            epochs,
            batch,
            in_all,
            own.optimizer,
            dtype,
            own,
            uncut=uncut,
        )
    if model and flags["layers"]:
        raise UsageError("give MODEL or --layers, not both")
    layers = load_layers(flags["layers"] or model, _sample_shape(flags["input_shape"]))
    optimizer = (
        Component.model_validate(flags["optimizer"]) if flags["optimizer"] else SGD
    )
    samples = flags["samples"] or _SAMPLES
    uncut = _why_uncut(partial(_own_on, model, layers), layers) if is_own(model) else ""
    return Workload(
        layers,
        samples,
        epochs,
        batch,
        in_all,
        optimizer,
        dtype,
        products=products,
        uncut=uncut,
    )


def _sample_shape(asked: str | None) -> tuple[int, ...]:
    if not asked:
        return ()
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", asked):
        raise UsageError(f"--input: expected sizes such as 3x224x224, got {asked!r}")
    return tuple(map(int, asked.split("x")))


def _timed_on(own: Trained, dtype: torch.dtype, device: str) -> torch.nn.Module:
    built = build_model(own.model, own.input_shape, own.outputs, own.task, dtype, 0)
    return to_meta(built) if device == "meta" else built


def _own_on(model: str, layers: LayerTable, device: str) -> torch.nn.Module:
    with torch.device(device):
        return build_own(model, {}, layers.input_shape, _OUTPUTS)


def _why_uncut(build: Callable[[str], torch.nn.Module], layers: LayerTable) -> str:
    """Return why the model that `build` makes on a device cannot be divided among workers; empty if it can."""
    try:
        module = build("meta")
        dtype = next(module.parameters()).dtype
        sample = torch.empty(2, *layers.input_shape, device="meta", dtype=dtype)
        parts.facts_of(parts.layers_of(module, layers.name), sample)
    except ModelError as error:
        return str(error)
    return ""


def _platform(
    workload: Workload, flags: Mapping[str, Any], measured: Calibration | None
) -> Platform:
    cluster = load_cluster(flags["cluster"] or "this-machine")
    jitter, jitter_range, jitter_source = _jitter(flags["jitter"], cluster, measured)
    scaled = flags["measured_on"] is not None
    is_timed = flags["step_time"] is not None or flags["calibration"] is not None
    # a cluster of one kind of node knows its device
    if flags["device"] is None and (scaled or not is_timed):
        flags = {**flags, "device": cluster.node.device}
    is_there = cluster.compute == THIS_MACHINE
    if flags["calibration"] is not None and not (is_there or scaled):
        raise ClusterError(
            f"calibration: {flags['calibration']} holds what this machine costs, and cluster {cluster.name} has other "
            "nodes; name the device that was measured, as --measured-on epyc-7742, to scale its steps to the "
            "cluster's, or leave the calibration out"
        )
    device = _device(workload, flags, measured)
    operations = measured.operations if measured else {}
    if isinstance(device, devices.Scaled):  # they stream vectors
        here, there = (
            roofline.device.memory_bandwidth_bytes_per_s
            for roofline in (device.here, device.there)
        )
        operations = faster(operations, there / here)
    Network(cluster, 1, flags["collective"])  # refuses an unknown one
    # messages between other nodes are priced by the links of their cluster
    engines = _engines(
        flags["engine"], flags["backend"], measured if is_there else None
    )
    return Platform(
        cluster,
        device,
        engines
        if isinstance(device, devices.MeasuredSteps)
        else engines.after_pauses(),
        flags["engine"],
        operations,
        collective=flags["collective"],
        input_s=1 / flags["input_rate"] if flags["input_rate"] else 0.0,
        epoch_s=flags["epoch_overhead"],
        jitter=jitter,
        jitter_range=jitter_range,
        jitter_source=jitter_source,
        stated_gib=flags["memory"],
    )


def _engines(
    engine: str, backend: Backend | None, measured: Calibration | None
) -> EngineCosts:
    """Return what the calibration measured of engines, with the typical cost of `engine` where it has none of that."""
    found = measured.engines if measured else EngineCosts()
    options = TaskOptions(backend=backend or BACKENDS[0])
    typical = None if engine == "auto" else named(engine).typical_cost(options)
    # a backend that is named may be another than the measured one
    if typical is not None and (backend is not None or not found.has(engine)):
        return found.with_stated(typical)
    if typical is None and backend is not None:
        raise UsageError(
            "--backend: says where --engine tasks computes; add that, or leave --backend out"
        )
    return found


def _jitter(
    asked: float | None, cluster: Cluster, measured: Calibration | None
) -> tuple[float, tuple[float, float] | None, str]:
    """Return the spread of a step's compute, its interval where it is assumed, and where it is from."""
    if asked is not None:
        return asked, None, "stated"
    # the nearest word counts: the option, the cluster file, the calibration, an
    # assumption
    if cluster.uneven.jitter == "none":
        return 0.0, None, f"of the cluster file {cluster.name}"
    if cluster.uneven.jitter in STATED:
        return cluster.uneven.jitter_sigma, None, f"of the cluster file {cluster.name}"
    tables = measured.tables if measured is not None else []
    if tables and (drawn := tables[0].jitter):
        return pstdev(drawn), None, "of the calibration"
    return _JITTER, JITTER, "assumed"


def _device(
    workload: Workload, flags: Mapping[str, Any], measured: Calibration | None
) -> devices.TimeModel:
    """Return what gives the times of a step: a calibration, a stated time, one of them scaled, or a device."""
    base: devices.TimeModel | None = None
    if measured is not None and measured.tables:
        of = measured.measured
        base = devices.MeasuredSteps(
            tuple(measured.tables),
            of.machine if of else "",
            of is not None and of.device != "cpu",
        )
    elif flags["step_time"] is not None:
        base = devices.Stated(
            flags["step_time"], flags["step_batch"] or flags["batch"] or 64
        )
    if flags["measured_on"] is not None:
        if base is None or flags["device"] is None:
            raise UsageError(
                "--measured-on: scales --step-time or --calibration to --device, or to the cluster's; give both"
            )
        return devices.Scaled(
            base,
            _roofline(flags["measured_on"], workload),
            _roofline(flags["device"], workload),
        )
    if not (measured and measured.tables) and (base is None) == (
        flags["device"] is None
    ):
        raise UsageError(
            "give the seconds of a step with --step-time, or a --device (a100-40gb, v100-16gb, ...), one of them; both "
            "with --measured-on DEVICE scale the step time"
        )
    if base is not None:
        return base
    if Path(flags["device"]).suffix != ".json":
        roofline = _roofline(flags["device"], workload)
        # published steps are of known models, not of a user's own table
        if flags["roofline"] or flags["layers"] is not None:
            return roofline
        return (
            # measured by others, on this device: closer than its peak numbers
            published_step(workload.layers.name, roofline.device, workload.precision)
            or roofline
        )
    # scipy, for files of measured kernels alone
    from scalebench.pricing.kernel_model import Learned, load_kernel_model

    kernels = load_kernel_model(Path(flags["device"]))
    return Learned(kernels, _roofline(kernels.device, workload))


def _roofline(device: str | Device, workload: Workload) -> devices.Roofline:
    if workload.optimizer.name == "muon":
        raise UsageError(
            "a device's speeds give no price for the steps of optimizer muon, which multiply matrices of their own; "
            "state the seconds of a step with --step-time, or give a calibration"
        )
    found = load_device(device) if isinstance(device, str) else device
    states = optimizer_states(workload.optimizer)
    return devices.Roofline(
        found, workload.products or workload.dtype, states, stored=workload.dtype
    )


def strategies_on(engine: str, texts: Sequence[str]) -> list[Component]:
    """Return the strategies written as for `run --strategy`, all of which `engine` can carry."""
    found = []
    for text in texts:
        component = Component.model_validate(
            written_component(text.strip(), "--strategy")
        )
        # options are checked now, not in each of many points
        registry.create(component.name, component.options, "virtual")
        # auto takes an engine that each strategy can run on
        if engine != "auto":
            check_provided(
                registry.create(component.name, component.options, engine), engine
            )
        found.append(component)
    return found
