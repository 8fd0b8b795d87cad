"""The search space of a tuned study."""

from __future__ import annotations

import math

import pytest

from scalebench.errors import StudyError
from scalebench.study.load import dump_study, load_study
from scalebench.study.spec import Tune


def refusal(tmp_path, text):
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(StudyError) as error:
        load_study(tmp_path / "study.yaml", {}, [])
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("tune", "said"),
    [
        ("{over: {rate: [0.1, 1]}}", "unknown key 'rate'"),
        ("{over: {adam.beta1: [0.1, 0.9]}}", "unknown key 'adam.beta1'"),
        (
            "{over: {lr: []}}",
            "expected a range [low, high] or several distinct values, got []",
        ),
        ("{over: {lr: [0.1, 0.1]}}", "low < high"),
        ("{over: {lr: [0.3, 0.1]}}", "low < high, got [0.3, 0.1]"),
        ("{over: {lr: [0, 0.1]}}", "begins above 0"),
        ("{over: {lr: [0.1, 0.1, 0.2]}}", "several distinct values"),
        ("{over: {}}", "at least 1 item"),
        ("{over: {lr: [0.1, 1]}, trials: 0}", "greater than or equal to 1, got 0"),
        (
            "{over: {lr: [0.1, 1]}, metric: speed}",
            "'time_to_target' or 'final_metric', got 'speed'",
        ),
        ("{over: {lr: [0.1, 1]}, metric: time_to_target}", "needs a target_metric"),
        ("{over: {lr: [0.1, 1]}, validation: 1}", "got 1"),
        ("{trials: 4}", "key 'tune.over' is missing"),
        (
            "{over: {lr: [0.1, 1]}, metric: final_metric}\nexecution: native",
            "execution native excludes",
        ),
        (
            "{over: {lr: [0.1, 1]}, metric: final_metric}\nexecution: modelled",
            "execution modelled excludes",
        ),
        (
            "{over: {local_sgd.steps: [2, 9]}, metric: final_metric}\nstrategies: [{local_sgd: {steps: 4}}]",
            "local_sgd.steps is fixed in strategies",
        ),
    ],
)
def test_each_mistake_is_one_line(tmp_path, tune, said):
    assert said in refusal(tmp_path, f"tune: {tune}\n")


def test_ranges_are_searched_by_their_logarithm_and_lists_by_place():
    tune = Tune(
        over={
            "lr": [0.003, 0.3],
            "local_sgd.steps": [1, 64],
            "lr_decay": [0.1, 0.5, 1.0],
        }
    )
    first, middle, last = tune.points(
        [(0.0, 0.0, 0.0), (0.5, 0.5, 0.5), (1 - 1e-12, 1 - 1e-12, 1 - 1e-12)]
    )
    assert first == {"lr": 0.003, "local_sgd.steps": 1, "lr_decay": 0.1}
    assert middle == {"lr": 0.03, "local_sgd.steps": 8, "lr_decay": 0.5}
    assert last == {"lr": 0.3, "local_sgd.steps": 64, "lr_decay": 1.0}
    assert isinstance(middle["local_sgd.steps"], int)
    drawn = [
        point["lr"]
        for point in Tune(over={"lr": [1.0, 7.77777]}).points(
            [(u / 99,) for u in range(100)]
        )
    ]
    assert min(drawn) == 1.0
    assert max(drawn) <= 7.77777
    assert all(math.isclose(value, float(f"{value:.3g}")) for value in drawn[:-1])


def test_tuned_study_is_written_and_read_again(tmp_path):
    (tmp_path / "study.yaml").write_text(
        "target_metric: 0.9\ntune: {over: {lr: [0.01, 1.0]}, validation: 25%}\n"
    )
    study = load_study(tmp_path / "study.yaml", {}, ["tune.trials=3"])
    (tmp_path / "again.yaml").write_text(dump_study(study))
    assert load_study(tmp_path / "again.yaml", {}, []) == study
    assert study.tune is not None
    assert (study.tune.trials, study.tune.validation) == (3, 0.25)
