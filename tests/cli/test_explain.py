"""`scalebench explain` shows rule, options and recorded traffic of every strategy."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from scalebench.cli.formats import indented
from scalebench.cli.main import main
from scalebench.strategies import registry
from scalebench.strategies.registry import options_of, rule_of
from tests.conftest import some
from tests.facts import in_order, together


def explain(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["explain", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    "name", some(registry.names(), "allreduce", "daso-heat", "epoch_average", "ssp")
)
def test_every_strategy_is_explained(name: str) -> None:
    said = explain(name)
    strategy = registry.create(name, {})
    assert said.startswith(f"{name}: {strategy.summary}\n")
    assert f"source: {strategy.source}\n" in said
    # or why the default study does not suit it
    assert "Traffic of mlp" in said or "\ntraffic: strategy " in said
    for option in options_of(type(strategy)):
        assert option.description, (
            f"{name}: option {option.name} says nothing of itself"
        )
        assert option.description in said
    assert "\x1b" not in said  # plain where nobody looks


def test_the_rule_is_the_formula_of_the_class_that_has_the_name() -> None:
    assert "in backward order" in rule_of(registry.find("ddp", "gloo"))[0]
    assert (
        rule_of(registry.find("ddp", "gloo"))[0]
        == rule_of(registry.find("ddp", "virtual"))[0]
    )
    assert "w <- (1/K) sum_j w_j" in explain("epoch_average")


def test_it_is_told_where_a_strategy_is_elastic() -> None:
    assert together(
        explain("epoch_average"),
        "elastic",
        "gloo (torchrun)",
        "horovod (horovodrun)",
        "nccl (torchrun)",
    )
    assert "elastic: horovod (horovodrun)\n" in explain("horovod")
    assert "elastic: no\n" in explain("pipeline")


def test_traffic_that_depends_on_time_is_marked() -> None:
    assert "order depends on time" in explain(
        "asp", "--workers", "2", "--dataset", "wine"
    )
    assert "order depends on time" not in explain(
        "bsp", "--workers", "2", "--dataset", "wine"
    )


def test_a_rule_is_told_once_and_without_what_a_family_shares() -> None:
    assert len(rule_of(registry.find("dislib-compat"))) == 1
    for name in registry.names():
        told = "\n".join(rule_of(registry.find(name)))
        assert len(told.splitlines()) <= 24, name
        assert ".py" not in told
    assert "one stage works at a time" not in explain("pipeline").lower()
    # the part that both presets share
    assert "w <- (2 s w + sum_p w_p) / (2 s + P)" in explain("daso-fixed")
    assert together(explain("ssp"), "weights", "reply")


def test_step_times_are_not_asked_for() -> None:
    said = explain(
        "epoch_average",
        "--cluster",
        "marenostrum5-acc",
        "--workers",
        "2,8",
        "--model",
        "cnn",
    )
    assert [
        line.split()[0] for line in said.splitlines() if line.startswith(("2 ", "8 "))
    ] == ["2", "8"]


def test_rows_that_a_shuffle_moves_are_in_the_table() -> None:
    said = explain(
        "allreduce",
        "--set",
        "shuffle=pairwise",
        "--workers",
        "2",
        "--dataset",
        "wine",
        "--epochs",
        "2",
    )
    assert "of rows that the shuffle moves" in said
    (line,) = [line for line in said.splitlines() if line.startswith("2 ")]
    # of one epoch of two
    assert (
        0.5
        < int(line.split()[-1].replace(",", "")) / ((13 * 4 + 8) * 142 / 2 / 2 / 2)
        < 1.5
    )
    assert "the shuffle moves" not in explain("allreduce", "--workers", "2")


def test_the_allreduce_that_virtual_runs_assume_between_nodes_has_its_name() -> None:
    four = ("--cluster", "ethernet-10g", "--workers", "1,4", "--dataset", "wine")
    said = explain("allreduce", *four)
    assert in_order(said, "recursive doubling up to 2 KiB", "Rabenseifner's algorithm")
    assert together(
        explain("allreduce", *four, "--set", "virtual.collective=ring"),
        "nodes",
        "ring",
        "none",
        "measured",
    )
    assert "between nodes by" not in explain(
        "allreduce", "--cluster", "this-machine", "--workers", "1", *four[4:]
    )


def test_options_have_type_default_and_range() -> None:
    rows = {option.name: option for option in options_of(registry.find("daso-heat"))}
    assert rows["stability"][1:4] == ("float", "0.05", ">= 0, < 1")
    assert rows["devices_per_node"][1:4] == ("int or none", "none", ">= 1")
    assert {
        option.name: option.allowed for option in options_of(registry.find("easgd"))
    }["alpha"] == "> 0, <= 1"
    choices = {option.name: option for option in options_of(registry.find("local_sgd"))}
    assert choices["weighting"][1:4] == ("choice", "uniform", "uniform | samples")


def test_options_and_flags_change_the_traffic() -> None:
    said = explain(
        "allreduce",
        "--set",
        "compression=fp16",
        "--workers",
        "1,4",
        "--dataset",
        "wine",
        "--set",
        "seed=3",
    )
    steps = -(-142 // 4 // 16)  # 142 of 178 wines are trained on, by batches of 16
    parameters = 13 * 128 + 128 + 128 * 3 + 3
    numbers = [
        line.split()
        for line in said.splitlines()
        if line.lstrip().startswith(("1 ", "4 "))
    ]
    assert [row[3] for row in numbers] == ["0", f"{2 * parameters * steps:,}"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["allredcue"], "unknown strategy 'allredcue'; did you mean 'allreduce'?"),
        (["local_sgd", "--set", "step=3"], "neither an option of local_sgd nor a study's key; did you mean 'steps'?"),
        (["local_sgd", "--set", "steps=0"], "option 'steps': expected a number greater than or equal to 1, got 0"),
        (["gossip", "--workers", "1"], "strategy gossip at 1 worker: there is nobody to mix with"),
    ],
)  # fmt: skip
def test_what_cannot_be_explained_is_one_line(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["explain", *arguments])
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_strategy_is_written_as_for_run() -> None:
    assert explain("local_sgd: {steps: 4}", "--workers", "2") == explain(
        "local_sgd", "--set", "steps=4", "--workers", "2"
    )
    for words, said in (
        ("local_sgd: 4", "STRATEGY 'local_sgd: 4': expected a name"),
        ("nix: {a: 1}", "'nix'"),
    ):
        result = CliRunner().invoke(main, ["explain", words])
        assert result.exit_code == 2
        assert said in result.output


def test_a_strategy_in_a_file_has_its_traffic_counted(tmp_path) -> None:
    (tmp_path / "own.py").write_text(
        "from scalebench.strategies.epoch_average import EpochAverage\n"
        "from scalebench.strategies.registry import register\n"
        "@register()\n"
        "class Own(EpochAverage):\n"
        "    name, summary, source = 'own', 'as epoch_average', 'an example'\n"
    )
    said = explain(f"{tmp_path}/own.py:Own", "--workers", "1,2")
    assert "Traffic of mlp" in said
    assert re.search(r"^2 +225 +1 +38,440$", said, re.MULTILINE)


def test_a_terminal_breaks_no_words_of_the_rule(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    prose = "Average the weights of all replicas every `every` epochs, then go on."
    rule = f"{prose}\n\n  w <- (1/K) sum_j w_j over all of the workers"
    lines = indented(rule, "  ").splitlines()
    assert lines[0] == "  Average the weights of all replicas"
    assert lines[-1] == "    w <- (1/K) sum_j w_j over all of the workers"
    beside = indented("one two three four five six seven", " " * 20, "name")
    assert beside.splitlines() == ["nameone two three four five six seven"]
    monkeypatch.setenv("COLUMNS", "30")
    beside = indented("one two three four five six seven", " " * 8, "name    ")
    assert beside == "name    one two three four\n        five six seven"
