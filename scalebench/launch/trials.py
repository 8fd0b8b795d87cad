"""Trials of a tuned study, and its runs with the values that the best trials had.

Every strategy gets, at every worker count, the trials k = 0 ... n - 1 at the points of
one scrambled Halton sequence over the search space (`Tune.points`; Bousquet et al.
2017, arXiv:1706.03200). The first trials of a longer sequence are those of a shorter
one. Options of one strategy are values of that strategy alone; a strategy with nothing
to tune has no trials. All trials have one seed, which no run has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from scalebench.errors import ResultsError, StudyError
from scalebench.launch.sweep import named
from scalebench.strategies import registry
from scalebench.study.cell import Cell
from scalebench.study.spec import TRIAL_SEED, TUNABLE, Component, Run, Study
from scalebench.study.validation import explain
from scalebench.training.optimizers import check_optimizer

if TYPE_CHECKING:
    import pandas as pd

    from scalebench.launch.planning import StudyPlan

_STREAM = 0x7E57  # of the study's random numbers


def trials_of(study: Study, runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return the trials of each virtual cell among `runs`, in an order drawn by the study's seed.

    Raises:
        StudyError: a value or option of the search space is invalid, or no strategy has anything to tune.
    """
    if study.tune is None:
        return ()
    points = search_points(study)
    for point in points:
        _check_training(study, point)
    # repetitions of a cell share its trials
    cells = {Cell.of(run): run for run in runs if run.execution == "virtual"}
    trials = [
        _tuned(run, values).model_copy(
            update={
                "trial": number,
                "validation": study.tune.validation,
                "seed": study.seed + TRIAL_SEED,
                "repetition": 0,
                "also_without_jitter": False,
                "save_weights": False,
            }
        )
        for run in cells.values()
        for number, point in enumerate(points)
        if (values := _values_of(run.strategy.name, point))
    ]
    if not trials:
        raise StudyError("tune.over: no strategy of the study has one of its keys")
    for trial in trials:
        check_optimizer(trial.optimizer)
        # refuses an option or value that the strategy does not take
        registry.create(trial.strategy.name, trial.strategy.options, "virtual")
    order = np.random.default_rng([study.seed, _STREAM]).permutation(len(trials))
    return tuple(
        named(trials[place].model_copy(update={"run_order": at}))
        for at, place in enumerate(order)
    )


def search_points(study: Study) -> list[dict[str, Any]]:
    """Return the values of each trial, by key of the search space."""
    from scipy.stats import qmc

    assert study.tune is not None
    scramble = np.random.default_rng([study.seed, _STREAM])
    # quasi-random: n points have n values of each key, a grid of two keys sqrt(n)
    halton = qmc.Halton(len(study.tune.over), scramble=True, seed=scramble)
    return study.tune.points(halton.random(study.tune.trials).tolist())


def with_chosen(plan: StudyPlan, trials: pd.DataFrame) -> StudyPlan:
    """Return `plan` with the values of the best of `trials` in the runs of each strategy and worker count, if it tunes.

    Raises:
        ResultsError: no trial of a cell was completed.
    """
    if plan.study.tune is None:
        return plan
    from scalebench.analysis.tuning_trials import chosen

    found = chosen(trials, plan.study.tune.metric)
    values = {
        (label, workers): json.loads(tuned)
        for label, workers, tuned in zip(
            found["label"], found["workers"], found["tuned"], strict=True
        )
    }
    # strategies with nothing to tune keep the values of the study
    wanted = {_cell(run) for run in plan.trials}
    if lost := sorted(
        {
            f"{_label(run)} at {run.workers}"
            for run in plan.trials
            if _cell(run) not in values
        }
    ):
        raise ResultsError(
            f"tune: no trial of {', '.join(lost[:4])} workers was completed; narrow tune.over, and give the study "
            "another name"
        )
    runs, further = (
        tuple(
            named(_tuned(run, values[_label(run), run.workers]))
            if _cell(run) in wanted
            else run
            for run in some
        )
        for some in (plan.sweep.runs, plan.sweep.further)
    )
    return replace(plan, sweep=replace(plan.sweep, runs=runs, further=further))


def _cell(run: Run) -> tuple[str, int]:
    return _label(run), run.workers


def _label(run: Run) -> str:
    from scalebench.analysis.loading import label_of  # pandas

    return label_of(
        run.strategy.name, json.dumps(run.strategy.options), json.dumps(run.tuned)
    )


def _values_of(strategy: str, point: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `point` that concern `strategy`."""
    return {
        key: value
        for key, value in point.items()
        if "." not in key or key.split(".")[0] in ("optimizer", strategy)
    }


def _tuned(run: Run, values: Mapping[str, Any]) -> Run:
    update: dict[str, Any] = {
        "tuned": dict(values),
        "strategy": run.strategy,
        "optimizer": run.optimizer,
    }
    for key, value in values.items():
        name, _, option = key.partition(".")
        if key in TUNABLE:
            update[key] = value
            continue
        place = "optimizer" if name == "optimizer" else "strategy"
        component: Component = update[place]
        update[place] = component.model_copy(
            update={"options": component.options | {option: value}}
        )
    return run.model_copy(update=update)


def _check_training(study: Study, point: Mapping[str, Any]) -> None:
    """Raise StudyError, with its key, for a value of `point` that the study could not have."""
    training = {key: value for key, value in point.items() if key in TUNABLE}
    try:
        # the whole study: values may be refused beside others, as lr_decay without
        # lr_decay_every
        Study.model_validate(
            study.model_dump(exclude_unset=True) | {"tune": None} | training
        )
    except ValidationError as error:
        raise StudyError(explain(error, Study, "tune.over")) from None
