"""Plans of papers: memory by strategy, and the components that `adaptive` chooses."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalebench.errors import StudyError
from scalebench.models.layer_files import load_layers
from scalebench.papers.plans import read_plans

FOLDER = Path(__file__).parents[2] / "experiments" / "asa2025"


@pytest.fixture(scope="module")
def plan():
    return read_plans(FOLDER / "plans.yaml")["resnet50"]


def test_components_are_all_layers_and_move_fewer_numbers_than_data_parallelism(plan):
    components = plan.components()
    assert [(components[0].first, components[-1].last)] == [("stem", "head")]
    assert sum(each.parameters for each in components) == load_layers("resnet50").parameters
    assert {each.degree for each in components} > {1}
    assert 0 < plan.numbers_saved() < 1


def test_memory_is_that_of_the_fullest_worker_of_each_strategy(plan):
    memories = {name.partition("(")[0]: memory for name, memory in plan.memories().items()}
    assert memories["serial"].activations == 8 * memories["ddp"].activations
    assert memories["serial"].parameters == memories["ddp"].parameters > memories["hybrid"].parameters
    assert memories["model_parallel"].parameters < memories["hybrid"].parameters


def test_a_plan_is_drawn(plan, tmp_path):
    plan.draw(tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    assert text.startswith("<?xml")
    assert "stage4_3" in text


def test_a_plan_that_is_not_one_is_refused(tmp_path):
    (tmp_path / "plans.yaml").write_text("plans:\n  mine: {description: it, model: resnet50, devices: 0}\n")
    with pytest.raises(StudyError, match=r"plans\.yaml"):
        read_plans(tmp_path / "plans.yaml")
    assert read_plans(tmp_path / "none.yaml") == {}
