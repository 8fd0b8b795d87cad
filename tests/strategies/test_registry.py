from __future__ import annotations

import subprocess
import sys
from typing import ClassVar

import pytest

from scalebench.errors import StudyError
from scalebench.strategies import registry
from scalebench.strategies.base import Strategy
from scalebench.strategies.serial import Serial


def test_every_strategy_has_name_summary_and_source():
    assert {
        "serial",
        "allreduce",
        "horovod",
        "ddp",
        "epoch_average",
        "epoch_async",
    } <= set(registry.names())
    for name in registry.names():
        for engine in ("virtual", *registry.find(name).engines):
            strategy = registry.create(name, {}, engine)
            assert strategy.name == name
            assert len(strategy.summary) > 10
            assert strategy.source
            assert strategy.engines


def test_horovod_is_the_real_one_on_its_engine_and_a_model_of_it_in_virtual_runs():
    assert registry.find("horovod", "horovod").__name__ == "Horovod"
    assert registry.find("horovod", "virtual").__name__ == "VirtualHorovod"
    assert registry.find("ddp", "gloo") is registry.find("ddp", "nccl")


def test_an_unknown_strategy_names_the_nearest():
    with pytest.raises(
        StudyError,
        match="unknown strategy 'epoch_averge'; did you mean 'epoch_average'",
    ):
        registry.create("epoch_averge", {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evry": 2}, "option 'evry'.*did you mean 'every'"),
        ({"every": 0}, "option 'every'.*greater than or equal to 1"),
        ({"aggregation": "ring"}, "option 'aggregation'.*'allreduce' or 'master'"),
    ],
)
def test_an_option_that_does_not_fit_is_named(options, message):
    with pytest.raises(StudyError, match=message):
        registry.create("epoch_average", options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "local_sgd:steps=4",
            "unknown strategy 'local_sgd:steps=4'; options are written as a mapping: 'local_sgd: {steps: 4}'",
        ),
        ("local_sgd(steps=4)", "'local_sgd: {steps: 4}'"),
        ("local_sgd steps: 4", "'local_sgd: {steps: 4}'"),
        (
            "local_sdg:steps=4",
            "unknown strategy 'local_sdg:steps=4'; options are written as a mapping: 'local_sdg: {",
        ),
    ],
)
def test_alternative_spellings_of_options_are_accepted(name, message):
    with pytest.raises(StudyError) as caught:
        registry.create(name, {})
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["local_sgd", "slowmo", "easgd"])
def test_an_option_may_be_called_as_papers_write_it(name):
    with pytest.raises(
        StudyError,
        match=f"^strategy {name}: unknown option 'H'; did you mean 'steps'\\?$",
    ):
        registry.create(name, {"H": 4})


def test_second_strategy_of_one_name_is_refused():
    class Other(Serial):
        name: ClassVar[str] = "serial"

    with pytest.raises(ValueError, match="registered twice"):
        registry.register()(Other)


def test_options_are_checked_without_torch():
    code = (
        "import sys; from scalebench.strategies import registry; registry.create('epoch_async', {'merge': 'half'});"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["torch_fsdp", "torch_tensor", "slowmo"])
def test_a_strategy_in_a_file_of_another_name_is_found_without_importing_all(name):
    code = (
        f"import sys; from scalebench.strategies import registry; assert registry.find({name!r}).name == {name!r};"
        "sys.exit('scalebench.strategies.daso' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_strategy_has_at_most_18_members():
    own = {name for name in vars(Strategy) if not name.startswith("_")} | set(
        Strategy.__annotations__
    )
    members = own | {"name", "summary"}
    assert (
        len(members - {"model_config", "model_fields", "model_computed_fields"}) <= 18
    ), sorted(members)


@pytest.mark.parametrize("name", registry.names())
def test_at_most_one_family_base_lies_between_strategy_and_a_strategy(name):
    for engine in ("virtual", "gloo", "horovod", "mpi"):
        bases = registry.find(name, engine).__mro__
        family = [
            cls
            for cls in bases
            if issubclass(cls, Strategy)
            and cls is not Strategy
            and not hasattr(cls, "name")
        ]
        assert len(family) <= 1, family
