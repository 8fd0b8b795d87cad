"""`scalebench init`: a study file to begin from."""

from __future__ import annotations

import re

import pytest
import yaml
from click.testing import CliRunner

from scalebench.cli.init import TEMPLATE
from scalebench.cli.main import main
from scalebench.launch.planning import plan_study
from scalebench.study.load import load_study
from scalebench.study.spec import Study
from tests.facts import together


def test_study_that_is_written_can_be_planned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["init", "mine"], standalone_mode=False)
    assert (
        done.output == "mine/study.yaml written; next: scalebench run mine/study.yaml\n"
    )
    plan = plan_study(load_study(tmp_path / "mine" / "study.yaml", {}, []))
    assert {run.workers for run in plan.sweep.runs if run.execution == "virtual"} == {
        1,
        2,
        4,
        8,
    }
    assert [str(strategy) for strategy in plan.study.strategies] == [
        "serial",
        "allreduce",
        "epoch_average",
    ]


def test_existing_study_is_left_alone(tmp_path, capsys):
    (tmp_path / "study.yaml").write_text("workers: 1\n")
    with pytest.raises(SystemExit) as ended:
        main(["init", str(tmp_path)])
    assert ended.value.code == 2
    assert together(capsys.readouterr().err, "study.yaml", "already", "another folder")
    assert (tmp_path / "study.yaml").read_text() == "workers: 1\n"


def test_keys_are_those_of_a_study():
    text = TEMPLATE.read_text()
    keys = {
        match[1]
        for match in re.finditer(r"^(?:# )?([a-z_]+):(?: |$)", text, re.MULTILINE)
    }
    assert keys <= set(Study.model_fields)
    assert {"until", "data_dir", "device_step_time", "virtual"} <= keys, (
        "the commented ones were looked at, too"
    )


@pytest.mark.parametrize(
    "key",
    ["until", "dataset", "batch_global", "virtual", "device_step_time", "time_limit_s"],
)
def test_commented_examples_are_valid(key):
    text = TEMPLATE.read_text()
    (example,) = re.findall(rf"^# ({key}: .*)$", text, re.MULTILINE)
    chosen = yaml.safe_load(text) | yaml.safe_load(example)
    for other in {"until": ["repetitions"], "batch_global": ["batch_per_worker"]}.get(
        key, []
    ):
        del chosen[other]
    Study.model_validate(chosen)


@pytest.mark.parametrize(
    "strategy",
    re.findall(r"^  # - ((?!my_).*?)\s*(?:#.*)?$", TEMPLATE.read_text(), re.MULTILINE),
)
def test_commented_strategies_are_known(strategy):
    from scalebench.strategies.registry import create

    study = Study.model_validate({"strategies": [yaml.safe_load(strategy)]})
    assert (
        create(study.strategies[0].name, study.strategies[0].options).name
        == study.strategies[0].name
    )
