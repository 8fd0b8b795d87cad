"""The calibration of a machine and a model, measured ahead of any study: `scalebench calibrate`.

It is saved after each batch size, so that an interrupted command goes on with what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from scalebench.errors import ClusterError
from scalebench.launch.machine import (
    ENGINES_SHARE,
    Note,
    key_of,
    measure_engines,
    measurement_of,
    trained_in,
    with_operations,
)
from scalebench.launch.planning import StudyPlan
from scalebench.pricing.calibration_file import Calibration, read_calibration
from scalebench.system.parent_watch import start_forkserver
from scalebench.virtual.calibration import Budget, measure_steps


def calibrate(plan: StudyPlan, path: Path, batches: Iterable[int], note: Note = lambda _: None) -> Calibration:
    """Measure what the calibration at `path` lacks for the model of `plan` at the sizes `batches`; save it there.

    These are step times under the loads 1, 2, 4, ... of a node, costs of the engines, and times of what the strategies
    of `plan` compute beside steps. The budget of the study is divided among them.

    Raises:
        ClusterError: the file is of another model, machine or torch, or the cluster's compute is stated.
        DisturbedError: nothing could be measured beside other programs.
    """
    study, runs, sizes = plan.study, plan.sweep.simulated, sorted(set(batches))
    if plan.cluster.compute != "this-machine":
        raise ClusterError(f"cluster {plan.cluster.name} states its step times: calibrate on it with this-machine")
    start_forkserver()
    kept = read_calibration(path) if path.exists() else None
    if kept is not None and kept.key != key_of(plan):
        raise ClusterError(
            f"{path} was measured for {kept.measured or 'another study'}; this is {measurement_of(study)}, with its "
            "own data: name another file with --output, or delete it"
        )
    if kept is None:
        engines = measure_engines(plan, note)
        kept = Calibration(
            key=key_of(plan), measured=measurement_of(study), trained=trained_in(plan), tables=[], engines=engines
        )
        kept.save(path)
    example = min(runs, key=lambda run: run.workers)
    most = min(max(run.workers for run in runs), plan.cluster.node.workers_per_node)
    for size in sizes:
        if kept.tables and not kept.lacking({size}, most):
            continue
        budget = Budget((1 - ENGINES_SHARE) * study.calibration_budget_s / len(sizes), study.noisy)
        found = measure_steps(example, plan.prepared.folders[example.workers], {size}, most, budget)
        if found.imprecise:
            note(f"measured as well as {budget.seconds:.3g} s allow: {'; '.join(found.imprecise)}")
        if kept.reference_s is None:
            kept = kept.model_copy(
                update={"reference_s": found.reference_s, "engines": kept.engines.at(found.reference_s)}
            )
        assert kept.reference_s is not None
        factor = kept.reference_s / found.reference_s
        kept = kept.with_tables([table.scaled(factor) for table in found.tables])
        kept.save(path)
    return with_operations(plan, kept, runs, path)
