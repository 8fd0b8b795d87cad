"""`scalebench compare`: table, JSON and exit codes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from contextlib import chdir

import pytest

from scalebench.cli.main import main
from scalebench.cli.run_common import _summarise
from scalebench.launch.work import Tally
from scalebench.records.store import Store
from tests.doctored import make_sound
from tests.facts import in_order, together
from tests.records_factory import in_proportion, study_rows


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """`before`, and in `after` real allreduce has become 30 % slower; `other` has another learning rate.

    In `once` epoch_average ran once; it is `before` otherwise.
    """

    def slow_down(study):
        study.change(git_commit="1" * 40)
        study.change(
            lambda row: row.strategy == "allreduce" and row.execution == "native",
            train_s=lambda row: 1.3 * row.train_s,
        )

    doctors = {
        "before": lambda study: None,
        "after": slow_down,
        "other": lambda study: study.change(lr=0.5),
        "once": lambda study: study.drop(
            lambda row: row.strategy == "epoch_average" and row.repetition > 0
        ),
    }
    folder = tmp_path_factory.mktemp("results")
    for name, doctor in doctors.items():
        study = make_sound()
        doctor(study)
        study.write(folder / name)
    return folder


@pytest.fixture
def call(studies, tmp_path, monkeypatch, capsys):
    """`scalebench compare` beside a copy of the studies."""
    shutil.copytree(studies, tmp_path / "results")
    monkeypatch.chdir(tmp_path / "results")

    def invoke(*words, code=0):
        with pytest.raises(SystemExit) as end:
            main.main(["compare", *words], prog_name="scalebench")
        out, err = capsys.readouterr()
        assert int(end.value.code or 0) == code, out + err
        return out, err

    return invoke


def test_table_names_the_regressions(call):
    out, err = call("before", "after")
    line = next(
        line
        for line in out[out.index("allreduce, native mpi\n") :].splitlines()
        if " 4 " in line
    )
    assert "1.30 [1.2" in line
    assert "regression" in line
    assert together(out, "changed", "commit 0000000000", "1111111111")
    assert together(out, "p", "Wilcoxon rank-sum", "Holm")
    assert out.splitlines()[0] == (
        "time: 3 regressed, 11 unchanged (threshold 5 %); metric: 14 equal (margin 0.01)"
    )
    assert err == ""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["before", "after"], 0),
        (["before", "after", "--fail-on", "regression"], 1),
        (["after", "before", "--fail-on", "regression"], 0),
        (["before", "after", "--fail-on", "regression", "--threshold", "50%"], 0),
        (
            [
                "before",
                "after",
                "--fail-on",
                "regression",
                "--strategy",
                "epoch_average",
            ],
            0,
        ),
        (["before", "after", "--fail-on", "regression", "--execution", "virtual"], 0),
        (["before", "after", "--fail-on", "missing", "--fail-on", "undecided"], 0),
        (["before", "after", "--fail-on", "undecided", "--threshold", "30%"], 1),
        (
            [
                "before",
                "--strategy",
                "allreduce",
                "--strategy",
                "epoch_average",
                "--fail-on",
                "regression",
            ],
            0,
        ),
        (
            [
                "before",
                "--strategy",
                "epoch_average",
                "--strategy",
                "allreduce",
                "--fail-on",
                "regression",
            ],
            1,
        ),
    ],
)
def test_exit_code_follows_fail_on(call, words, code):
    call(*words, code=code)


def test_fail_on_repeatable_metric_ignores_racing_strategies(call, tmp_path):
    """On real workers `asp` ends elsewhere each time; the same strategy with a barrier has to end where it did."""

    def folder(name, strategy, lost):
        study = make_sound()
        study.change(lambda row: row.strategy == "epoch_average", strategy=strategy)
        study.change(
            lambda row: (
                row.strategy == strategy
                and row.workers == 4
                and row.execution == "native"
            ),
            final_metric=lambda row: row.final_metric - lost * (1 + row.seed / 100),
        )
        return study.write(tmp_path / "results" / name)

    for strategy, code in (("asp", 0), ("bsp", 1), ("not-installed", 0)):
        folder(f"{strategy}-a", strategy, 0.0)
        folder(f"{strategy}-b", strategy, 0.2)
        words = f"{strategy}-a", f"{strategy}-b", "--fail-on"
        out, _ = call(*words, "repeatable-metric", code=code)
        assert out.splitlines()[0].endswith(
            "metric: 1 worse, 13 equal (margin 0.01)"
        ), "shown all the same"
        varies = f"metric varies from run to run, as workers merge when they arrive: {strategy} at 2, 4 workers (native"
        assert (varies in out) == (code == 0)
        call(*words, "metric", code=1)


def test_missing_cell_fails_if_asked_for(call, tmp_path):
    path = tmp_path / "results" / "after" / "runs.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(
        "".join(line for line in lines if "native-mpi-allreduce-w4" not in line)
    )
    out, _ = call("before", "after", "--fail-on", "missing", code=1)
    lacking = "allreduce at 4 workers (native mpi)"
    assert f"in A only: {lacking}" in out
    assert f"in B only: {lacking}" in call("after", "before")[0]


def test_two_strategies_of_one_study_are_compared(call):
    out, _ = call("before", "--strategy", "allreduce", "--strategy", "epoch_average")
    assert "A: allreduce   B: epoch_average" in out
    assert "strategy" not in out
    assert "time: improvement, accuracy: equal" in " ".join(out.split()), out


def test_json_holds_the_cells(call):
    facts = json.loads(call("before", "after", "--json")[0])
    assert list(facts) == [
        *(
            "schema",
            "a",
            "b",
            "threshold",
            "metric_margin",
            "regressed",
            "time",
            "metric",
        ),
        *(
            "failed",
            "missing",
            "added",
            "changed",
            "virtual_error",
            "overridden",
            "cells",
        ),
    ]
    assert (facts["schema"], facts["threshold"], facts["regressed"]) == (2, 0.05, True)
    assert facts["time"]["regression"] == 3
    assert len(facts["cells"]) == 14
    virtual = next(cell for cell in facts["cells"] if cell["execution"] == "virtual")
    assert virtual["p"] is None
    assert virtual["verdict"] == "unchanged"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["before", "other"],
            "before and other cannot be compared: lr is 0.1 and 0.5. Make them equal, or override",
        ),
        (
            ["before"],
            "name a second folder, or two strategies of the first (--strategy NAME, twice), which has serial",
        ),
        (
            ["before", *2 * ["--strategy", "serial"]],
            "serial differs in nothing from itself; name two strategies",
        ),
        (
            ["before", *2 * ["--strategy", "serial"], "--threshold", "1e400"],
            "such as 5% or 0.05, got '1e400'",
        ),
        (
            ["before", "--strategy", "allreduce"],
            "name a second folder, or two strategies",
        ),
        (
            ["before", "--strategy", "allreduce", "--strategy", "ddp"],
            "no completed run of strategy 'ddp'",
        ),
        (["before", "none"], "none holds no runs.csv"),
        (["before", "after", "--ignore", "commit"], "--ignore commit: no such key"),
        (["before", "after", "--threshold", "5"], "write 5% for per cent"),
        (["before", "after", "--threshold", "-1%"], "--threshold"),
        (["before", "after", "--threshold", "nan"], "--threshold"),
        (
            [
                "before",
                "--strategy",
                "serial",
                "--strategy",
                "allreduce",
                "--ignore",
                "lr",
            ],
            "strategies of one have none",
        ),
    ],
)
def test_usage_error_is_one_line_with_exit_code_2(call, words, said):
    _, err = call(*words, code=2)
    assert said in err
    assert len(err.splitlines()) == 1


def test_ignored_difference_is_noted(call):
    out, _ = call("before", "other", "--ignore", "lr")
    assert in_order(out, "ignored", "lr is 0.1 and 0.5")


def test_run_check_and_compare_agree(tmp_path, capsys):
    """The warnings, the error of virtual times and the repetitions that each of them names."""
    rows = study_rows(
        strategies=("serial", "allreduce", "epoch_average"),
        workers=(1, 2, 4),
        native_workers=(1, 2, 4),
    )
    with Store(tmp_path / "mine", fsync=False) as store:
        for run, epochs in rows:
            slower = 1.5 if run.execution == "native" else 1.0
            store.append(
                in_proportion(run.model_copy(update={"train_s": slower * run.train_s})),
                epochs,
            )
    said = {}
    for name, words in (
        ("check", ["check", "mine"]),
        (
            "compare",
            [
                "compare",
                "mine",
                "--strategy",
                "allreduce",
                "--strategy",
                "epoch_average",
            ],
        ),
    ):
        with chdir(tmp_path), pytest.raises(SystemExit):
            main.main(words, prog_name="scalebench")
        said[name] = capsys.readouterr().out
    for name, full in (("run", False), ("run --full", True)):
        _summarise(Tally(tmp_path / "mine", done_before=len(rows)), (), full)
        said[name] = " ".join(capsys.readouterr().out.split())
    (counts,) = re.findall(r"(\d+ errors?), (\d+ warnings?)", said["check"])
    expected = " and ".join(count for count in counts if not count.startswith("0 "))
    for name in ("run", "run --full"):
        assert together(said[name], expected, "scalebench check")
    factors = {
        found
        for text in said.values()
        for found in re.findall(r"off native ones by ([^(]+\([^)]+\))", text)
    }
    assert len(factors) == 1, factors
    options = {
        name: set(re.findall(r"--repetitions \d+", text)) for name, text in said.items()
    }
    assert options["check"] == options["compare"] == {"--repetitions 7"}, (
        "two worker counts that are tested at once"
    )
    assert options["run"] <= options["check"]


def test_help_imports_nothing_heavy():
    heavy = ("torch", "pandas", "numpy", "scipy", "matplotlib", "rich")
    program = f"import sys, scalebench.cli.compare; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_equal_metrics_with_every_seed_are_unchanged(call):
    out, _ = call("before", "before")
    assert "equal" in out
    assert "+0.000" not in out


def test_equal_metric_of_one_seed_is_undecided(call):
    """On a grid of 1 / n_test two runs agree now and then."""
    out, _ = call("once", "before", "--strategy", "epoch_average")
    assert out.count("+0.000") == 6
    assert out.splitlines()[0].endswith("metric: 6 undecided (margin 0.01)")


def test_cells_of_undecided_metric_are_named(call):
    out, _ = call("once", "before")
    cells = "epoch_average at 1, 2, 4 workers"
    assert in_order(out, "metric undecided", f"{cells} (native mpi)", cells)
    assert out.splitlines()[0].endswith("metric: 8 equal, 6 undecided (margin 0.01)")
    assert "metric undecided" not in call("before", "before")[0]
