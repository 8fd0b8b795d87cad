"""Trials of a tuned study, and the values that its runs take over."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from scalebench.analysis.tuning_trials import chosen
from scalebench.errors import ResultsError, StudyError
from scalebench.launch.planning import plan_study
from scalebench.launch.sweep import is_simulated
from scalebench.launch.trials import search_points, with_chosen
from scalebench.study.spec import Study
from tests.facts import naming

TUNED = {
    "dataset": "wine", "workers": "1,2", "execution": "virtual", "repetitions": 2, "epochs": 2, "target_metric": 0.8,
    "strategies": ["serial", "allreduce", "local_sgd"],
    "tune": {"over": {"lr": [0.003, 0.3], "local_sgd.steps": [1, 16]}, "trials": 8},
}  # fmt: skip


def plan(**changes):
    return plan_study(Study.model_validate(TUNED | changes))


def rows(trials, value):
    """Rows of these trials as the reader gives them; `value` is the final metric of each."""
    return pd.DataFrame(
        {
            "label": [
                str(run.strategy.model_copy(update={"options": {}})) for run in trials
            ],
            "workers": [run.workers for run in trials],
            "trial": [run.trial for run in trials],
            "tuned": [json.dumps(run.tuned) for run in trials],
            "status": "completed",
            "time_to_target_s": np.nan,
            "final_metric": [value(run) for run in trials],
        }
    )


def test_every_strategy_and_worker_count_gets_the_same_points_of_the_sequence():
    made = plan()
    points = search_points(made.study)
    cells = {}
    for run in made.trials:
        cells.setdefault((run.strategy.name, run.workers), {})[run.trial] = run
    assert set(cells) == {
        ("serial", 1),
        *((name, n) for name in ("allreduce", "local_sgd") for n in (1, 2)),
    }
    for (name, _), own in cells.items():
        assert [own[trial].lr for trial in range(8)] == [
            point["lr"] for point in points
        ]
        options = [own[trial].strategy.options for trial in range(8)]
        steps = [{"steps": point["local_sgd.steps"]} for point in points]
        assert options == (steps if name == "local_sgd" else [{}] * 8)
    assert len({run.run_id for run in made.trials}) == len(made.trials)
    assert all(is_simulated(run.run_id) for run in made.trials)


def test_the_sequence_fills_the_range_and_a_longer_one_begins_with_the_shorter():
    short, long = (
        search_points(plan(tune=TUNED["tune"] | {"trials": n}).study) for n in (8, 64)
    )
    assert long[:8] == short
    tenths = np.histogram(
        np.log([point["lr"] for point in long]), bins=8, range=np.log([0.003, 0.3])
    )[0]
    # 8 expected: independent draws would miss by more (P < 2 %)
    assert tenths.min() >= 6
    assert search_points(plan(seed=1).study) != short


def test_trials_share_a_seed_that_no_run_has_and_never_see_the_test_set():
    made = plan()
    assert len(seeds := {run.seed for run in made.trials}) == 1
    assert not seeds & {run.seed for run in made.sweep.runs}
    for workers, held_out in made.validation.datasets.items():
        whole = made.prepared.datasets[workers]
        assert held_out.n_train + held_out.n_test == whole.n_train


def test_runs_take_the_values_of_the_best_trial_of_their_cell():
    made = plan()
    wanted = {
        ("serial", 1): 2,
        ("allreduce", 1): 3,
        ("allreduce", 2): 4,
        ("local_sgd", 1): 5,
        ("local_sgd", 2): 6,
    }
    best = rows(
        made.trials,
        lambda run: float(run.trial == wanted[run.strategy.name, run.workers]),
    )
    tuned = with_chosen(made, best)
    points = search_points(made.study)
    for before, run in zip(made.sweep.runs, tuned.sweep.runs, strict=True):
        point = points[wanted[run.strategy.name, run.workers]]
        assert run.lr == point["lr"]
        assert run.strategy.options.get("steps") == (
            point["local_sgd.steps"] if run.strategy.name == "local_sgd" else None
        )
        assert (run.seed, run.run_order, run.trial) == (
            before.seed,
            before.run_order,
            None,
        )
        assert run.run_id != before.run_id
    assert with_chosen(tuned, best) == tuned


def test_trials_are_ordered_by_time_then_metric_then_number():
    table = pd.DataFrame(
        {
            "label": "ddp",
            "workers": 2,
            "trial": range(6),
            "tuned": "{}",
            "status": ["completed"] * 5 + ["diverged"],
            "time_to_target_s": [np.nan, 2.0, 1.0, 1.0, 1.0, 0.5],
            "final_metric": [0.99, 0.98, 0.90, 0.95, 0.95, 0.1],
        }
    )
    assert chosen(table, "time_to_target")["trial"].tolist() == [3]
    assert chosen(table, "final_metric")["trial"].tolist() == [0]
    never = table.assign(time_to_target_s=np.nan)
    assert chosen(never, "time_to_target")["trial"].tolist() == [0]
    assert chosen(table.assign(status="diverged"), "time_to_target").empty


def test_a_point_without_a_completed_trial_is_one_line():
    made = plan()
    lost = rows(made.trials, lambda run: 0.5)
    lost.loc[lost["label"] == "allreduce", "status"] = "diverged"
    with pytest.raises(
        ResultsError,
        match=naming("no trial", "allreduce at 1, allreduce at 2"),
    ):
        with_chosen(made, lost)


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"local_sgd.stepz": [1, 16]}, "unknown option 'stepz'; did you mean 'steps'?"),
        ({"local_sgd.steps": ["few", "many"]}, "option 'steps': expected an integer"),
        ({"optimizer.momentum": [0.5, 0.9, 2.0]}, "'momentum'"),
        ({"lr_warmup_epochs": [1, 3]}, "lr_warmup_epochs has no effect"),
        ({"lr": ["high", "low"]}, "expected a number"),
    ],
)
def test_invalid_values_are_one_line(over, said):
    with pytest.raises(StudyError) as error:
        plan(tune={"over": over})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_an_untuned_study_has_no_trials_and_keeps_its_hashes():
    made = plan(tune=None)
    assert made.trials == ()
    assert with_chosen(made, pd.DataFrame()) is made
    assert {run.config_hash for run in made.sweep.runs} == {
        run.config_hash for run in plan().sweep.runs
    }
