"""What a study has still to do, by its plan and by what has ended; nothing is measured or trained."""

from __future__ import annotations

import math
import random

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalebench.launch.planning import plan_study
from scalebench.launch.work import Ended, Stage, WorkQueue
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
    """The rows of a study, and a queue that a command would make of them."""

    def __init__(self, study):
        self.plan = plan_study(Study.model_validate(study))
        self.completed, self.tried, self.rows = {}, {}, []

    def queue(self):
        return WorkQueue(self.plan, Ended(self.completed, self.tried, self.trials))

    def trials(self):
        return pd.DataFrame(self.rows)

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


def made_in_order(rows, queue, most=math.inf):
    """Make the work of `queue` as a command does; return (stage, run_id) of each run, at most `most`."""
    made = []
    while work := queue.next():
        for run in work.runs:
            if len(made) >= most:
                return made
            made.append((work.stage, run.run_id))
            seconds = seconds_of(run)
            rows.append(run, seconds)
            queue.ended(run, seconds)
    return made


def test_trials_come_first_then_virtual_runs_then_real_ones():
    rows = Rows(STUDY)
    stages = [stage for stage, _ in made_in_order(rows, rows.queue())]
    assert stages == sorted(stages, key=list(Stage).index)
    assert set(stages) == {Stage.VIRTUAL, Stage.REAL}
    rows = Rows(TUNED)
    stages = [stage for stage, _ in made_in_order(rows, rows.queue())]
    # 5 points, 3 trials and 3 repetitions of each
    assert stages == [Stage.TRIALS] * 15 + [Stage.VIRTUAL] * 15
    assert rows.queue().next() is None


def test_runs_have_the_values_of_the_best_trials_once_all_have_ended():
    rows = Rows(TUNED)
    best = {
        (run.strategy.name, run.workers): run.lr
        for run in rows.plan.trials
        if run.trial == 0
    }
    queue = rows.queue()
    assert made_in_order(rows, queue, most=15)[-1][0] is Stage.TRIALS
    work = queue.next()
    assert work.stage is Stage.VIRTUAL
    assert len(work.runs) == 15
    assert {(run.strategy.name, run.workers): run.lr for run in work.runs} == best


@settings(max_examples=25, deadline=None)
@given(stops=st.lists(st.integers(0, 40), max_size=4))
def test_an_interrupted_study_makes_the_runs_of_one_that_was_not(stops):
    whole, parts = Rows(GROWING), Rows(GROWING)
    expected = made_in_order(whole, whole.queue())
    assert len(expected) > 30  # blocks follow
    made = [
        pair for most in stops for pair in made_in_order(parts, parts.queue(), most)
    ]
    made += made_in_order(parts, parts.queue())
    assert sorted(made, key=str) == sorted(expected, key=str)
    assert [stage for stage, _ in made] == [stage for stage, _ in expected]


def test_nothing_follows_from_a_trial_that_failed_until_it_is_made_again():
    rows = Rows(TUNED)
    queue = rows.queue()
    first, *others = queue.next().runs
    queue.ended(first, None, failed=True)
    for run in others:
        rows.append(run, 1.0)
        queue.ended(run, 1.0)
    assert queue.next() is None
    again = rows.queue()
    assert again.next().runs == [first]
    rows.append(first, 1.0)
    again.ended(first, 1.0)
    assert again.next().stage is Stage.VIRTUAL


@pytest.mark.parametrize(
    ("study", "stage"), [(STUDY, Stage.REAL), (TUNED, Stage.TRIALS)]
)
def test_only_what_failed_is_left_to_a_retry(study, stage):
    rows = Rows(study)
    failed = next(
        run
        for run in rows.queue().planned()
        if (run.trial is not None) == (stage is Stage.TRIALS)
        and run.is_virtual == (stage is Stage.TRIALS)
    )
    queue = rows.queue()
    queue.only({failed.run_id})
    assert queue.left() == [failed]
    work = queue.next()
    assert (work.stage, work.runs) == (stage, [failed])
    queue.ended(failed, 1.0)
    assert queue.next() is None
