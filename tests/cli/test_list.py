"""`scalebench list`: every kind of name, as text and JSON."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from scalebench.cli.list import KINDS
from scalebench.cli.main import main
from tests.facts import together


@pytest.mark.parametrize(
    ("what", "some"),
    [
        (
            "strategies",
            {"serial", "allreduce", "horovod", "ddp", "epoch_average", "epoch_async"},
        ),
        (
            "datasets",
            {
                "digits",
                "digits_shifted",
                "breast_cancer",
                "wine",
                "diabetes",
                "synthetic",
                "mnist",
                "csv",
            },
        ),
        ("models", {"mlp", "cnn"}),
        (
            "clusters",
            {
                "this-machine",
                "ethernet-10g",
                "marenostrum5-acc",
                "juwels-booster",
                "dgx-h100",
            },
        ),
        ("devices", {"a100-40gb", "h100-sxm", "epyc-7742"}),
        (
            "figures",
            {
                "strong-scaling",
                "time-reduction",
                "convergence",
                "breakdown",
                "agreement",
            },
        ),
    ],
)
def test_kind_lists_names_with_summaries(what: str, some: set[str]) -> None:
    plain = CliRunner().invoke(main, ["list", what])
    assert plain.exit_code == 0, plain.output
    rows = json.loads(CliRunner().invoke(main, ["list", what, "--json"]).stdout)
    assert some <= {row["name"] for row in rows}
    for row in rows:
        assert row["summary"]
        assert "\n" not in row["summary"]
        assert any(
            line.startswith(f"{row['name']} ") and row["summary"] in line
            for line in plain.output.splitlines()
        )


def test_every_kind_is_tested_above() -> None:
    assert set(KINDS) == {
        "strategies",
        "datasets",
        "models",
        "clusters",
        "devices",
        "figures",
    }


def test_strategies_name_their_engines() -> None:
    said = CliRunner().invoke(main, ["list", "strategies"]).output
    assert "runs on horovod, virtual" in said
    assert together(said, "runs", "mpi, gloo, horovod, nccl, virtual")
    assert together(said, "runs", "gloo, nccl, virtual", "elastic", "gloo, nccl")


def test_list_alone_says_what_can_be_listed():
    said = (
        CliRunner()
        .invoke(main, ["list"], standalone_mode=False, catch_exceptions=False)
        .output
    )
    assert said.split() == list(KINDS)
