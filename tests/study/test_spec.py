"""Forms of components and defaults of studies."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from scalebench.study.spec import Component, Study, slug


@pytest.mark.parametrize(
    ("written", "name", "options"),
    [
        ("mlp", "mlp", {}),
        ({"mlp": {"hidden": [64]}}, "mlp", {"hidden": [64]}),
        ({"mlp": None}, "mlp", {}),
        ({"name": "mlp", "hidden": [64]}, "mlp", {"hidden": [64]}),
        ({"name": "mlp"}, "mlp", {}),
        ({"name": "mlp", "options": {"hidden": []}}, "mlp", {"hidden": []}),
    ],
)
def test_component_accepts_three_forms(
    written: object, name: str, options: dict[str, object]
) -> None:
    component = Component.model_validate(written)
    assert (component.name, component.options) == (name, options)
    assert Component.model_validate(component.model_dump()) == component


@pytest.mark.parametrize("written", [3, [], {}, {"a": 1, "b": 2}, {"mlp": 3}, None])
def test_other_forms_are_refused(written: object) -> None:
    with pytest.raises(
        ValidationError, match=r"expected a name, \{name: \{option: value\}\}"
    ):
        Component.model_validate(written)


def test_component_prints_sorted_options() -> None:
    assert str(
        Component(name="epoch_average", options={"every": 2, "aggregation": "master"})
    ) == ("epoch_average(aggregation=master, every=2)")
    assert str(Component(name="serial")) == "serial"


def test_the_default_study() -> None:
    study = Study()
    assert (str(study.dataset), str(study.model)) == (
        "digits_shifted",
        "mlp(hidden=[128])",
    )
    assert (study.batch_per_worker, study.epochs, study.lr, study.repetitions) == (
        16,
        4,
        0.06,
        3,
    )
    assert str(study.optimizer) == "sgd(momentum=0.9)"
    names = ["serial", "allreduce", "horovod", "ddp", "epoch_average", "epoch_async"]
    assert [component.name for component in study.strategies] == names
    assert study.workers == [1, 2, 4, 8, 16, 32, 64]
    assert (study.execution, study.cluster) == ("auto", "this-machine")


def test_batch_policy_follows_the_given_key() -> None:
    assert Study().batch_policy == "per_worker"
    assert Study(batch_global=64).batch_policy == "global"


@pytest.mark.parametrize(
    ("text", "name"),
    [("a b/c", "a-b-c"), ("../..", "unnamed"), ("épée", "p-e"), ("v1.2", "v1.2")],
)
def test_slug_is_a_valid_file_name(text: str, name: str) -> None:
    assert slug(text) == name
