"""The engine that carries a strategy's real runs, and the worker counts it holds here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scalebench.comm import engines
from scalebench.comm.base import Capability
from scalebench.errors import EngineError
from scalebench.launch.hosts import Allocation
from scalebench.records.provenance import in_job
from scalebench.strategies import registry
from scalebench.strategies.base import Strategy
from scalebench.study.choices import VIRTUAL, EngineName
from scalebench.study.spec import Component, Study
from scalebench.system import hardware

ENGINES = (VIRTUAL, *engines.NAMES)
_BATCHES = frozenset({Capability.BATCHES})
# what some native engine provides
_NATIVE = frozenset().union(*(engines.named(name).provides for name in engines.NAMES))


@dataclass(frozen=True)
class StrategyEngines:
    """The engines that can carry a strategy."""

    name: str
    summary: str
    source: str
    # of ENGINES, the preferred native one first, `virtual` last
    engines: tuple[str, ...]
    missing: dict[str, tuple[str, ...]]  # capabilities that each other engine lacks
    one_worker: bool
    # launchers that let a run go on without a worker that died, by engine
    elastic: dict[str, str]


def describe_strategies() -> list[StrategyEngines]:
    """Return every strategy with the engines that can carry it."""
    return [describe_strategy(name) for name in registry.names()]


def describe_strategy(name: str) -> StrategyEngines:
    """Return the strategy called `name` with the engines that can carry it."""
    cls = registry.find(name)
    missing: dict[str, tuple[str, ...]] = {}
    always = _between_batches(registry.create(name, {}))
    for engine in ENGINES:
        needs = _class_on(name, engine).requires | always
        lacking = needs - engines.named(engine).provides
        if lacking:
            missing[engine] = tuple(sorted(str(capability) for capability in lacking))
    able = [engine for engine in ENGINES if engine not in missing]
    preferred = {engine: place for place, engine in enumerate(cls.engines)}
    able.sort(
        key=lambda engine: (engine == VIRTUAL, preferred.get(engine, len(preferred)))
    )
    elastic = {
        engine: launcher
        for engine in able
        if (launcher := engines.named(engine).elastic_launcher)
        and registry.create(name, {}, engine).traits.resumes
    }
    return StrategyEngines(
        name, cls.summary, cls.source, tuple(able), missing, not cls.requires, elastic
    )


def _between_batches(strategy: Strategy) -> frozenset[Capability]:
    """Return what a strategy needs of an engine which does not train for whole epochs alone."""
    return frozenset() if strategy.traits.trains_alone else _BATCHES


def _class_on(name: str, engine: str) -> type[Strategy]:
    """Return the class that runs on `engine`, or, if no native engine carries it, that of the preferred engine."""
    cls = registry.find(name, engine)
    return (
        cls
        if engine == VIRTUAL or cls.requires <= _NATIVE
        else registry.find(name, cls.engines[0])
    )


def native_points(
    study: Study,
    component: Component,
    counts: Sequence[int],
    allocation: Allocation,
    notes: list[str],
) -> tuple[str, list[int]] | None:
    """The engine of a strategy's real runs and their worker `counts`; under `auto` those that fit, else all.

    None under `auto` if no engine can carry the strategy and none was named; the reason
    is added to `notes`.

    Raises:
        EngineError: the engine that was asked for is missing, cannot carry the strategy, or wants more GPUs.
    """
    auto = study.execution == "auto"
    known = registry.create(component.name, component.options)
    name = _engine_for(study, known, allocation)
    engine = engines.named(name)
    reason = engines.available(name, here=allocation.is_here)
    if reason is not None:
        # what was asked for is an error, what was tried on top a note
        if not auto or study.engine != "auto":
            raise EngineError(
                f"strategy {component.name}: engine {name} is not available: {reason}"
            )
        notes.append(f"{component.name}: no native runs, {reason}")
        return None
    strategy = registry.create(component.name, component.options, name)
    if auto and not _able(strategy):
        notes.append(
            f"{component}: no native runs, no engine has {_listed(strategy.needs - _NATIVE)}"
        )
        return None
    check_provided(strategy, name)
    slots = [host.slots for host in allocation.hosts]
    if reason := engine.lacks_with(study.tasks, max(counts), slots):
        raise EngineError(reason)
    # before it starts: collectives of Horovod, for instance, have no bfloat16
    if study.dtype in engine.cannot_carry:
        raise EngineError(
            f"strategy {component.name}: engine {name} cannot carry {study.dtype}; use another dtype"
        )
    wire = strategy.traits.wire
    if wire in engine.cannot_carry:
        raise EngineError(
            f"strategy {component}: engine {name} cannot carry {wire}; use fp16, or another --engine"
        )
    if auto:
        if engine.on_gpus:
            return name, [workers for workers in counts if workers <= allocation.gpus]
        return name, allocation.most(study.threads_per_worker, counts)
    if engine.on_gpus:
        _check_gpus(component.name, name, max(counts), allocation)
    return name, list(counts)


def _check_gpus(strategy: str, engine: str, most: int, allocation: Allocation) -> None:
    """Check that the allocation has a GPU for each of `most` workers, where its GPUs are known.

    In a job of a scheduler this node may have fewer than the launcher gets.

    Raises:
        EngineError: it has fewer.
    """
    if allocation.is_here and in_job(os.environ):
        return
    held, where = (
        (hardware.gpus(), "here")
        if allocation.is_here
        else (allocation.gpus, "in that allocation")
    )
    if most > held:
        raise EngineError(
            f"strategy {strategy}: engine {engine} takes a GPU for each worker, and {where} "
            f"{'is' if held == 1 else 'are'} {held} for {most}; use --workers 1..{held}, or --engine gloo"
        )


def charged_engine(
    study: Study, component: Component, notes: list[str]
) -> EngineName | Literal["auto"]:
    """The engine whose costs charge a strategy's virtual runs: the study's, or `auto` if that cannot carry it.

    Without one for virtual runs it is that of native ones, which check their times.
    """
    stated = study.virtual.engine
    wanted = study.engine if stated == "auto" else stated
    if wanted == "auto":
        return wanted
    strategy = registry.create(component.name, component.options)
    if wanted in _able(strategy):
        return wanted
    # a library's own strategy is charged by that library, which needs no note
    if strategy.requires and not registry.is_of_a_library(strategy):
        lacking = _lacking(strategy, wanted)
        notes.append(
            f"{component}: charged as on {strategy.engines[0]}, for {wanted} has no {_listed(lacking)}"
        )
    return "auto"


def check_provided(strategy: Strategy, engine: str) -> None:
    """Check that `engine` has the capabilities that `strategy` with its options needs.

    Raises:
        EngineError: it names what is missing, and the engines that have it.
    """
    if missing := _lacking(strategy, engine):
        able = _able(strategy)
        step = (
            f"--engine {' or '.join(able)}, or leave --engine out"
            if able
            else "--execution virtual"
        )
        raise EngineError(
            f"strategy {strategy.name} cannot run on engine {engine}, which has no {_listed(missing)}; use {step}"
        )


def _lacking(strategy: Strategy, engine: str) -> frozenset[Capability]:
    """Return the capabilities that `strategy` with its options needs and `engine` lacks."""
    needs = strategy.needs | _between_batches(strategy)
    return needs - engines.named(engine).provides


def _engine_for(study: Study, strategy: Strategy, allocation: Allocation) -> str:
    if study.engine != "auto":
        return study.engine
    here = allocation.is_here
    if (alike := study.virtual.engine) in _able(strategy) and engines.available(
        alike, here=here
    ) is None:
        return alike  # so that virtual times can be checked
    several = (
        (in_job(os.environ) or hardware.gpus() > 1) if here else allocation.gpus > 1
    )
    if several:  # a lone GPU holds one worker: nothing is communicated
        for name in strategy.engines:
            if (
                engines.named(name).on_gpus
                and engines.available(name, here=here) is None
            ):
                return name
    return strategy.engines[0]


def _able(strategy: Strategy) -> list[str]:
    """The native engines with all capabilities that these options need."""
    always = _between_batches(strategy)
    return [
        name
        for name in engines.NAMES
        if always | registry.needs_on(strategy, name) <= engines.named(name).provides
    ]


def _listed(capabilities: frozenset[Capability]) -> str:
    return ", ".join(sorted(str(capability) for capability in capabilities))
