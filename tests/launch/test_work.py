"""What a study has still to do, by its plan and by what has ended; nothing is measured or trained."""

from __future__ import annotations

import math
import random
from dataclasses import FrozenInstanceError

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalebench.launch.planning import plan_study
from scalebench.launch.work import (
    Ended,
    Timed,
    Trial,
    left,
    next_work,
    planned,
    settled,
)
from scalebench.study.spec import Study

STUDY = {
    "dataset": "wine", "workers": "1,2", "execution": "auto", "epochs": 2, "target_metric": 0.8,
    "strategies": ["serial", "allreduce", "epoch_average"],
}  # fmt: skip
TUNED = STUDY | {
    "execution": "virtual",
    "tune": {"over": {"lr": [0.003, 0.3]}, "trials": 3},
}
GROWING = TUNED | {"until": {"ci_width": "5%", "at_least": 3, "at_most": 6}}


class Rows:
    """The rows of a study, of which a command makes some."""

    def __init__(self, study):
        self.plan = plan_study(Study.model_validate(study))
        self.completed, self.tried, self.rows, self.in_vain = {}, {}, [], set()

    @property
    def ended(self):
        return Ended(
            self.completed, self.tried, self.trials, in_vain=frozenset(self.in_vain)
        )

    def trials(self):
        return pd.DataFrame(self.rows)

    def next(self):
        return next_work(self.plan, self.ended)

    def append(self, run, seconds):
        key = run.run_id, run.config_hash
        self.tried[key] = seconds
        if run.trial is None:
            self.completed[key] = seconds
        else:
            row = {
                "label": run.strategy.name,
                "workers": run.workers,
                "trial": run.trial,
                "status": "completed",
            }
            tuned = f'{{"lr": {run.lr}}}'
            self.rows.append(
                row
                | {
                    "tuned": tuned,
                    "time_to_target_s": np.nan,
                    "final_metric": 1 / (1 + run.trial),
                }
            )


def seconds_of(run, spread=0.2):
    return math.exp(random.Random(run.run_id).gauss(0, spread))


def made_in_order(rows, most=math.inf):
    """Make work as a command does; return (kind, is virtual, run_id) of each run, at most `most`."""
    made = []
    while work := rows.next():
        for run in work.runs:
            if len(made) >= most:
                return made
            made.append((type(work), run.is_virtual, run.run_id))
            rows.append(run, seconds_of(run))
    return made


def test_trials_come_first_then_virtual_runs_then_real_ones():
    made = made_in_order(Rows(STUDY))
    virtual = [is_virtual for _, is_virtual, _ in made]
    assert {kind for kind, _, _ in made} == {Timed}
    assert virtual == sorted(virtual, reverse=True)
    assert set(virtual) == {True, False}
    rows = Rows(TUNED)
    kinds = [kind for kind, _, _ in made_in_order(rows)]
    # 5 points, 3 trials and 3 repetitions of each
    assert kinds == [Trial] * 15 + [Timed] * 15
    assert rows.next() is None


def test_next_work_is_the_same_when_it_is_asked_again():
    rows = Rows(STUDY)
    first = rows.next()
    assert rows.next() == first
    rows.append(first.runs[0], 1.0)
    assert rows.next().runs == first.runs[1:]
    with pytest.raises(FrozenInstanceError):
        rows.plan.sweep = None


def test_runs_have_the_values_of_the_best_trials_once_all_have_ended():
    rows = Rows(TUNED)
    best = {
        (run.strategy.name, run.workers): run.lr
        for run in rows.plan.trials
        if run.trial == 0
    }
    assert made_in_order(rows, most=15)[-1][0] is Trial
    work = rows.next()
    assert isinstance(work, Timed)
    assert len(work.runs) == 15
    assert {(run.strategy.name, run.workers): run.lr for run in work.runs} == best


@settings(max_examples=25, deadline=None)
@given(stops=st.lists(st.integers(0, 40), max_size=4))
def test_an_interrupted_study_makes_the_runs_of_one_that_was_not(stops):
    whole, parts = Rows(GROWING), Rows(GROWING)
    expected = made_in_order(whole)
    assert len(expected) > 30  # blocks follow
    made = [found for most in stops for found in made_in_order(parts, most)]
    made += made_in_order(parts)
    assert sorted(made, key=str) == sorted(expected, key=str)
    assert [kind for kind, _, _ in made] == [kind for kind, _, _ in expected]


def test_nothing_follows_from_a_trial_that_failed_until_it_is_made_again():
    rows = Rows(TUNED)
    first, *others = rows.next().runs
    rows.in_vain.add(first.run_id)
    for run in others:
        rows.append(run, 1.0)
    assert rows.next() is None
    rows.in_vain.clear()  # another command
    assert rows.next() == Trial((first,))
    rows.append(first, 1.0)
    assert isinstance(rows.next(), Timed)


def test_a_run_that_failed_is_not_made_again_by_the_same_command():
    rows = Rows(STUDY)
    failed = rows.next().runs[0]
    rows.in_vain.add(failed.run_id)
    assert failed.run_id not in {run_id for _, _, run_id in made_in_order(rows)}
    rows.in_vain.clear()
    assert rows.next() == Timed((failed,))


@pytest.mark.parametrize(("study", "kind"), [(STUDY, Timed), (TUNED, Trial)])
def test_only_what_failed_is_left_to_a_retry(study, kind):
    rows = Rows(study)
    failed = next(
        run
        for run in planned(rows.plan, rows.ended)
        if (run.trial is not None) == (kind is Trial)
        and run.is_virtual == (kind is Trial)
    )
    rows.plan = settled(rows.plan, rows.ended).only({failed.run_id})
    assert left(rows.plan, rows.ended) == [failed]
    assert rows.next() == kind((failed,))
    rows.append(failed, 1.0)
    assert rows.next() is None
