"""`scalebench run`: results, messages, and one line with exit code 2 for every usage error."""

from __future__ import annotations

import csv
import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from scalebench.calibration.calibration_file import Calibration
from scalebench.cli.main import command_of, main
from scalebench.cli.run_common import run_plan
from scalebench.comm import engines
from scalebench.launch.study_run import _jobs
from scalebench.launch.work import Tally
from scalebench.system import hardware
from tests.conftest import needs_mpi, runs_made
from tests.facts import together

SMALL = [
    "--dataset",
    "wine",
    "--epochs",
    "1",
    "--repetitions",
    "1",
    "--execution",
    "virtual",
]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def scalebench(tmp_path, monkeypatch, capsys, machine):
    """Call `scalebench run` in an empty folder; virtual runs are charged by given times and stay in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    given = Calibration(key="given", tables=machine.tables, engines=machine.engines)
    (tmp_path / "given.json").write_text(given.model_dump_json())

    def call(*arguments: object) -> Done:
        words = ["run", *map(str, arguments)]
        if "--calibration" not in words:
            words += ["--calibration", "given.json"]
        with pytest.raises(SystemExit) as end:
            main.main([*words, "--jobs", "1"], prog_name="scalebench")
        out, err = capsys.readouterr()
        return Done(int(end.value.code or 0), out, err)

    return call


@pytest.fixture
def refused(scalebench, tmp_path):
    """The one line of an error that kept everything from running."""

    def call(*arguments: object) -> str:
        done = scalebench(*arguments)
        assert done.returncode == 2, done.stderr
        lines = done.stderr.strip().splitlines()
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("scalebench: error: ")
        assert not list(tmp_path.rglob("runs.csv"))
        return lines[0]

    return call


def rows(tmp_path: Path) -> list[dict[str, str]]:
    (path,) = (tmp_path / "results").rglob("runs.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--strategy", "alreduce"],
            "unknown strategy 'alreduce'; did you mean 'allreduce'",
        ),
        (["--dataset", "digit"], "unknown data set 'digit'; did you mean 'digits'"),
        (["--model", "mpl"], "unknown model 'mpl'; did you mean 'mlp'"),
        (
            ["--cluster", "juwels"],
            "unknown cluster 'juwels', and no such file; did you mean 'juwels-booster'",
        ),
        (["--set", "epohcs=3"], "did you mean 'epochs'"),
        (["--set", "optimizer=sgdd"], "unknown optimizer 'sgdd'; did you mean 'sgd'"),
        (["--workers", "0"], "between 1 and 1,000,000"),
        (["--workers", "64..1"], "runs backwards"),
        (["--workers", "1.."], "cannot read the worker counts '1..'"),
        (["--workers", "1..64:0"], "between 1 and"),
        (
            ["--dataset", "wine", "--workers", "500"],
            "500 workers but 142 training samples",
        ),
        (
            ["--dataset", "wine", "--workers", "8", "--set", "blocks=4"],
            "4 blocks but 8 workers",
        ),
        (["--batch-per-worker", "8", "--batch-global", "64"], "batch_per_worker"),
        (["--lr", "nan"], "lr"),
        (["--lr", "inf"], "lr"),
        (
            ["--lr", "1e308", "--dry-run"],
            "lr: 1e+308 is too large for float32; expected at most 1e+38",
        ),
        (
            ["--set", "optimizer={sgd: {weight_decay: 1.0e+308}}", "--dry-run"],
            "option 'weight_decay'",
        ),
        (
            ["--workers", "1..1000000:1"],
            "expected 1 to 1,000 worker counts, got 1,000,000",
        ),
        (
            ["--repetitions", "1000000000"],
            "make 42,000,000,000 runs; a study has at most 100,000",
        ),
        (["--set", "device_step_time=.inf"], "device_step_time"),
        (["--set", "lr="], "--set lr=: key 'lr': expected a number, got nothing"),
        (
            ["--until", "x"],
            "--until: key 'until.ci_width': expected a share such as 5% or 0.05, got 'x'",
        ),
        (
            ["--engine", "gloo", "--strategy", "epoch_async"],
            "epoch_async cannot run on engine gloo",
        ),
        (
            ["--engine", "mpi", "--strategy", "horovod"],
            "horovod cannot run on engine mpi",
        ),
        (["--cluster", "dgx-h100"], "--device-step-time"),
        (["--execution", "paced"], "--device-step-time"),
        (["--dataset", "mnist", "--data-dir", "nowhere"], "train-images-idx3-ubyte"),
        (["--scaling", "weak", "--dataset", "digits"], "synthetic"),
        (
            ["--set", "init_weights=nowhere.npz", "--dataset", "wine"],
            "cannot read nowhere.npz",
        ),
        (
            [
                "--calibration",
                "nowhere.json",
                "--dataset",
                "wine",
                "--execution",
                "virtual",
            ],
            "cannot read nowhere.json",
        ),
        (["--model", "nowhere.py:net"], "nowhere.py"),
        (["--name", "../../escape"], "name"),
        (["no-such-study.yaml"], "no-such-study.yaml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_error_is_one_line(refused, arguments, message):
    if engines.available("mpi") and {"--engine", "--execution"} & set(arguments):
        pytest.skip("MPI is not installed")
    assert message in refused(*arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workers: [1, 2\n", "line"),
        ("epochs: 3\n\tlr: 0.1\n", "tab"),
        ("lr: !!python/object/apply:os.system ['echo pwned > pwned']\n", "tag"),
        ("- a\n- list\n", "expected a mapping"),
        ("epochs: many\n", "epochs"),
        ("epochs: 2\nepochs: 3\n", "epochs"),
        ("stratgies: [serial]\n", "did you mean 'strategies'"),
        ("strategies: [{epoch_average: {every: 0}}]\n", "option 'every'"),
        ("strategies: [{epoch_average: {evry: 2}}]\n", "did you mean 'every'"),
        ("\x00\x01\x02", ""),
    ],
    ids=[
        "not YAML",
        "tab",
        "Python tag",
        "list",
        "wrong type",
        "twice",
        "unknown",
        "range",
        "option",
        "binary",
    ],
)
def test_invalid_study_file_is_named(refused, tmp_path, text, message):
    (tmp_path / "study.yaml").write_text(text)
    line = refused("study.yaml")
    assert message in line
    assert not (tmp_path / "pwned").exists()


def test_repeated_strategy_is_refused(refused):
    said = refused(
        "--strategy", "serial", "--set", "strategies=[allreduce]", "--dry-run"
    )
    assert re.search(r"--set strategies=\[allreduce\]: --strategy .*leave one", said)


def test_dry_run_notes_local_batchnorm_statistics(scalebench):
    small = (
        "--workers",
        "2",
        "--execution",
        "virtual",
        "--dry-run",
        "--dataset",
        "digits",
        "--strategy",
        "allreduce",
    )
    done = scalebench(
        *small, "--model", "resnet", "--epochs", 1, "--batch-per-worker", 64
    )
    assert done.returncode == 0, done.stderr
    assert ", 1 epoch, " in done.stdout
    assert re.search(
        r"^note: .*BatchNorm.* resnet .*local under allreduce ",
        done.stdout,
        re.MULTILINE,
    )
    assert "BatchNorm" not in scalebench(*small, "--model", "mlp").stdout


def test_powersgd_without_matrices_is_refused(refused, tmp_path):
    """4 x 13 and 3 x 4 weights do not shrink to less than half at rank 2."""
    options = (
        "--dataset",
        "wine",
        "--model",
        "mlp",
        "--set",
        "model.hidden=[4]",
        "--workers",
        "2",
    )
    for name in ("allreduce", "ddp"):
        study = f"strategies=[{{{name}: {{compression: powersgd, rank: 2}}}}]"
        for more in ((), ("--dry-run",)):
            said = refused(*options, "--set", study, "--execution", "virtual", *more)
            assert together(said, f"strategy {name}", "compression=powersgd", "rank=2")
            assert re.search(
                r"no layer shrinks .*lower rank.*wider model.*another compression", said
            )
            assert not list(tmp_path.glob("results/*/runs.csv"))


@pytest.mark.parametrize("execution", ["auto", "native", "paced", "virtual"])
def test_horovod_with_bfloat16_is_refused(refused, monkeypatch, execution):
    monkeypatch.setattr("scalebench.comm.engines.available", lambda name, **_: None)
    options = (
        "--execution",
        execution,
        "--dataset",
        "wine",
        "--workers",
        "2",
        "--device-step-time",
        "0.02",
        "--dry-run",
    )
    said = refused(*options, "--strategy", "horovod", "--set", "dtype=bfloat16")
    assert said.startswith("scalebench: error: strategy horovod: ")
    assert re.search(r"Horovod has no bfloat16|bfloat16; use another dtype", said)
    if execution != "virtual":
        wire = (
            "--engine",
            "horovod",
            "--set",
            "strategies=[{allreduce: {compression: bf16}}]",
        )
        assert re.search(
            r"engine horovod .*bfloat16; use fp16.*--engine", refused(*options, *wire)
        )


def test_missing_mpirun_refuses_native_but_not_auto(refused, scalebench, monkeypatch):
    monkeypatch.setattr("scalebench.comm.launchers.mpirun.find", lambda: None)
    line = refused(
        "--execution", "native", "--dataset", "wine", "--strategy", "allreduce"
    )
    assert "no mpirun" in line
    assert "pip install" in line
    done = scalebench(*SMALL[:6], "--strategy", "allreduce", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert re.search(r"allreduce: no native runs.*no mpirun", done.stderr)


@needs_mpi
@pytest.mark.parametrize("execution", ["auto", "native", "paced"])
def test_nccl_without_gpu_is_refused(refused, monkeypatch, execution):
    """A missing engine that is named is refused in every execution."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    line = refused(
        *SMALL[:6],
        "--engine",
        "nccl",
        "--execution",
        execution,
        "--device-step-time",
        "0.002",
    )
    assert re.search(
        r"engine nccl .*(no NVIDIA GPU here; use --engine gloo|torch has no CUDA)", line
    )


def test_missing_horovod_leaves_its_virtual_runs(scalebench, monkeypatch):
    import scalebench.comm.engines as engines

    whole = engines.available
    missing = "Horovod is not built for torch; add it with: scalebench install horovod"
    monkeypatch.setattr(
        engines,
        "available",
        lambda name, **_: missing if name == "horovod" else whole(name),
    )
    done = scalebench(*SMALL[:6], "--strategy", "horovod", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert re.search(r"horovod: no native runs.*not built", done.stderr)


@pytest.mark.parametrize(
    "output", ["taken", "/proc/nowhere"], ids=["a file", "nobody may write"]
)
def test_unwritable_results_are_one_line(refused, tmp_path, output):
    (tmp_path / "taken").write_text("")
    line = refused(*SMALL, "--output", output)
    assert output in line
    assert "--output" in line.rpartition(";")[2], "the next step"


def test_dry_run_prints_the_plan_and_runs_nothing(scalebench, tmp_path):
    done = scalebench("--dataset", "wine", "--workers", "1..4", "--dry-run")
    assert "virtual runs on this-machine" in " ".join(done.stdout.split())
    native = ("--execution", "native", "--workers", "1", "--dry-run")
    assert "virtual runs on" not in scalebench("--dataset", "wine", *native).stdout
    assert done.returncode == 0, done.stderr
    assert "steps per epoch" in done.stdout
    assert "core-hours" in done.stdout
    for fact in (
        "mlp(hidden=[128])",
        "float32",
        "wine",
        "4 epochs",
        "sgd(momentum=0.9)",
        "lr 0.06",
    ):
        assert fact in done.stdout
    rows = {
        line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()[1:10]
    }
    columns = rows["workers"][rows["workers"].index("1") :]
    assert columns == ["1", "2", "4"]
    for strategy in (
        "serial",
        "allreduce",
        "horovod",
        "ddp",
        "epoch_average",
        "epoch_async",
    ):
        assert rows[strategy][-1] == ("-" if strategy == "serial" else "v"), (
            "real ones end below 4 on this machine"
        )
    assert "v virtual" in done.stdout
    assert "3 repetitions of each" in done.stdout
    assert len(done.stdout.splitlines()) < 20
    assert not (tmp_path / "results").exists()


def test_dry_run_of_a_table_of_layers_measures_no_step(scalebench):
    words = (
        "--execution",
        "modelled",
        "--device-step-time",
        "0.01",
        "--workers",
        "1,8",
    )
    done = scalebench(
        "--set",
        "model={layers: {table: resnet50}}",
        "--dataset",
        "wine",
        *words,
        "--dry-run",
    )
    assert done.returncode == 0, done.stderr
    assert "nothing is trained" in done.stdout


def test_dry_run_counts_what_is_done_and_refuses_what_run_refuses(scalebench, tmp_path):
    study = [*SMALL, "--strategy", "allreduce", "--workers", "1,2", "--name", "mine"]
    assert scalebench(*study).returncode == 0
    assert "all of it is done" in scalebench(*study, "--dry-run").stdout
    more = [*study, "--repetitions", "3", "--dry-run"]
    done = scalebench(*more)
    assert "mine: 6 runs, 2 done" in done.stdout
    assert "v:1/3" in done.stdout
    kept = tmp_path / "results" / "mine" / "calibration.json"
    for spoil, said in (
        (
            lambda: kept.write_text(kept.read_text().replace('"given"', '"other"')),
            "has changed since it charged",
        ),
        (lambda: (kept.parent / "runs.csv").write_text("a,b\n1,2\n"), "runs.csv"),
    ):
        spoil()
        for words in (more, more[:-1]):
            done = scalebench(*words)
            assert done.returncode == 2
            assert said in done.stderr.splitlines()[-1]
    for words in (
        [*study, "--lr", "0.5", "--dry-run"],
        [*study, "--output", "given.json", "--dry-run"],
    ):
        assert scalebench(*words).returncode == 2


def test_an_engine_that_was_not_measured_is_named(scalebench, tmp_path, machine):
    known = [entry for entry in machine.engines.entries if entry.engine != "horovod"]
    some = machine.engines.model_copy(update={"entries": known})
    (tmp_path / "some.json").write_text(
        Calibration(key="some", tables=machine.tables, engines=some).model_dump_json()
    )
    both = [
        "--strategy",
        "allreduce",
        "--strategy",
        "horovod",
        "--workers",
        "1,2",
        *SMALL,
    ]
    done = scalebench(*both, "--calibration", "some.json")
    assert (done.returncode, done.stderr.count("nothing is measured of")) == (0, 1)
    assert "measured of horovod" in done.stderr
    assert "nothing is measured" not in scalebench(*both, "--name", "whole").stderr


def test_batch_larger_than_the_shard_is_reduced_with_a_note(scalebench, tmp_path):
    done = scalebench(
        *SMALL, "--strategy", "allreduce", "--workers", "2", "--batch-per-worker", "512"
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"2 workers: batch 512 .*reduced to 71\b", done.stderr)
    assert [row["batch_per_worker"] for row in rows(tmp_path)] == ["71"]


def test_diverged_run_has_a_row_and_others_complete(scalebench, tmp_path):
    (tmp_path / "study.yaml").write_text(
        "name: wild\ndataset: wine\nepochs: 2\nrepetitions: 1\nexecution: virtual\nworkers: 2\n"
        "strategies: [serial, allreduce, epoch_average]\nlr: 1.0e+30\n"
    )
    done = scalebench("study.yaml")
    assert done.returncode == 1
    found = rows(tmp_path)
    assert [row["status"] for row in found] == ["diverged"] * 3
    assert all("training loss is" in row["error"] for row in found)
    assert all(row["train_s"] == "" for row in found)


def test_failing_own_model_has_a_row_with_its_line(scalebench, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n\n"
        "class Odd(nn.Module):\n"
        "    def __init__(self, inputs, outputs):\n"
        "        super().__init__()\n"
        "        self.linear = nn.Linear(inputs, outputs)\n\n"
        "    def forward(self, x):\n"
        "        if self.training and len(x) == 71:\n"
        "            return {}['of no use']\n"
        "        return self.linear(x)\n\n\n"
        "def build(input_shape, outputs):\n"
        "    return Odd(input_shape[0], outputs)\n"
    )
    strategies = [
        "--strategy",
        "serial",
        "--strategy",
        "allreduce",
        "--workers",
        "2",
        "--batch-per-worker",
        "71",
    ]
    done = scalebench(
        *SMALL, *strategies, "--model", "mine.py:build", "--device-step-time", "0.01"
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    said = {row["strategy"]: (row["status"], row["error"]) for row in rows(tmp_path)}
    assert set(said.values()) == {("failed", "KeyError: 'of no use' (mine.py:11)")}
    assert set(said) == {"serial", "allreduce"}


def test_same_command_resumes_and_changed_study_is_refused(scalebench, tmp_path):
    arguments = [*SMALL, "--strategy", "serial", "--name", "mine"]
    assert scalebench(*arguments).returncode == 0
    before = (tmp_path / "results" / "mine" / "runs.csv").read_text()
    again = scalebench(*arguments)
    assert again.returncode == 0
    assert runs_made(again.stdout) == (0, 1)
    assert (tmp_path / "results" / "mine" / "runs.csv").read_text() == before
    other = scalebench(*arguments, "--lr", "0.5")
    assert other.returncode == 2
    assert re.search(r"\blr\b.* 0\.06.* 0\.5\b", other.stderr)
    more = scalebench(*arguments[:4], "--repetitions", "2", *arguments[6:])
    assert more.returncode == 0
    assert runs_made(more.stdout) == (1, 1)


def test_incomplete_rows_of_a_killed_command_are_set_aside(scalebench, tmp_path):
    arguments = [*SMALL, "--strategy", "serial", "--name", "mine"]
    assert "half-written" not in scalebench(*arguments).stderr
    table = tmp_path / "results" / "mine" / "runs.csv"
    table.write_bytes(table.read_bytes()[:-5])
    again = scalebench(*arguments)
    assert runs_made(again.stdout) == (1, 0)
    for name in ("runs.csv", "epochs.csv"):
        assert re.search(
            rf"half-written .*results/mine/{re.escape(name)}\.partial", again.stderr
        )
        assert (table.parent / f"{name}.partial").exists()


def test_quiet_prints_one_line_and_verbose_every_run(scalebench):
    arguments = [*SMALL, "--strategy", "serial"]
    quiet = scalebench(*arguments, "--quiet", "--output", "a")
    assert quiet.stderr == ""
    assert len(quiet.stdout.strip().splitlines()) == 1
    loud = scalebench(*arguments, "--verbose", "--output", "b")
    (begun,) = re.findall(r"start (serial-w1-r0-\S+)", loud.stderr)
    assert f"done {begun}" in loud.stderr


def test_saved_weights_can_be_initial_weights(scalebench, tmp_path):
    import numpy as np

    assert (
        scalebench(
            *SMALL,
            "--strategy",
            "allreduce",
            "--workers",
            "2",
            "--set",
            "save_weights=true",
        ).returncode
        == 0
    )
    (first,) = (tmp_path / "results").rglob("*.npz")
    with np.load(first) as archive:
        kept = dict(archive)
    assert kept["initial"].shape == kept["final"].shape
    assert np.abs(kept["final"] - kept["initial"]).max() > 0
    arguments = [
        *SMALL,
        "--strategy",
        "allreduce",
        "--workers",
        "2",
        "--set",
        "save_weights=true",
        "--output",
        "more",
    ]
    assert scalebench(*arguments, "--set", f"init_weights={first}").returncode == 0
    (second,) = (tmp_path / "more").rglob("*.npz")
    with np.load(second) as archive:
        np.testing.assert_array_equal(archive["initial"], kept["final"])


def test_initial_weights_of_another_model_are_refused(refused, tmp_path):
    import numpy as np

    np.savez(tmp_path / "other.npz", final=np.zeros(7))
    wanted = 13 * 128 + 128 + 128 * 3 + 3
    assert re.search(
        rf"\b7\b.*\b{wanted:,}\b", refused(*SMALL, "--set", "init_weights=other.npz")
    )


@pytest.mark.parametrize(
    "flag", ["scaling", "lr_policy", "execution", "engine", "dtype"]
)
def test_flag_choices_match_the_study_model(flag):
    from scalebench.cli.run import run
    from scalebench.study.spec import Study

    (option,) = (parameter for parameter in run.params if parameter.name == flag)
    accepted = Study.model_json_schema()["properties"][flag]
    accepted = {
        choice
        for part in accepted.get("anyOf", [accepted])
        for choice in (part.get("enum") or [part["const"]])
    }
    # what is not said is auto
    assert set(option.type.choices) | {"auto"} == accepted | {"auto"}


def test_dry_run_reads_the_named_calibration(refused, tmp_path):
    assert "cannot read nowhere.json" in refused(
        *SMALL, "--calibration", "nowhere.json", "--dry-run"
    )


def test_modelled_runs_take_the_times_of_virtual_ones_without_training(
    scalebench, tmp_path
):
    arguments = [
        *(
            "--dataset",
            "wine",
            "--epochs",
            "2",
            "--repetitions",
            "1",
            "--workers",
            "1,2,4",
        ),
        *(
            "--strategy",
            "serial",
            "--strategy",
            "allreduce",
            "--strategy",
            "epoch_async",
        ),
    ]
    done = scalebench(*arguments, "--execution", "virtual", "--name", "trained")
    assert done.returncode == 0, done.stderr
    done = scalebench(*arguments, "--execution", "modelled", "--name", "priced")
    assert done.returncode == 0, done.stderr
    both = []
    for name in ("trained", "priced"):
        with (tmp_path / "results" / name / "runs.csv").open() as file:
            both.append(
                {(row["strategy"], row["workers"]): row for row in csv.DictReader(file)}
            )
    assert both[0].keys() == both[1].keys()
    for place, trained in both[0].items():
        priced = both[1][place]
        assert (priced["execution"], priced["engine"]) == ("modelled", "virtual")
        assert priced["final_metric"] == priced["final_train_loss"] == ""
        for column in ("train_s", "compute_s", "comm_s", "wait_s"):
            assert float(priced[column]) == pytest.approx(
                float(trained[column]), rel=1e-9, abs=1e-15
            )
        assert (priced["syncs"], priced["optimizer_steps"]) == (
            trained["syncs"],
            trained["optimizer_steps"],
        )


@needs_mpi
def test_real_runs_follow_virtual_ones_until_their_budget_is_over(scalebench, tmp_path):
    words = [
        "--dataset",
        "wine",
        "--epochs",
        "1",
        "--repetitions",
        "2",
        "--workers",
        "1",
        "--strategy",
        "serial",
    ]
    scalebench(*words, "--native-budget", "1e-9", "--name", "mine")
    table = tmp_path / "results" / "mine" / "runs.csv"
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["execution"] for row in rows] == ["virtual", "virtual"]
    assert {row["calibration"] for row in rows} == {"quiet"}
    scalebench(*words, "--name", "mine")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["execution"] for row in rows] == [
        "virtual",
        "virtual",
        "native",
        "native",
    ]
    orders = [int(row["run_order"]) for row in rows]
    assert orders == sorted(orders)
    assert {row["calibration"] for row in rows[2:]} == {""}


@needs_mpi
def test_virtual_runs_answer_before_real_ones_begin(scalebench):
    words = [
        "--dataset",
        "wine",
        "--epochs",
        "1",
        "--repetitions",
        "3",
        "--workers",
        "1,2",
        "--native-budget",
        "1e-9",
    ]
    compared = ["--set", 'strategies=["allreduce", "epoch_average"]']
    said = scalebench(*words, *compared).stderr.splitlines()
    places = [
        n
        for n, line in enumerate(said)
        if line.startswith("so far: At 2 workers, epoch_average ")
    ]
    assert places, said
    assert said[places[0] - 1] == "virtual workers: 12 of 12 runs"


@pytest.mark.parametrize(("busy", "further"), [(0.0, 0), (1e3, 1000)])
def test_further_virtual_runs_take_the_share_of_cores_that_others_keep_busy(
    busy, further
):
    assert _jobs(busy) == hardware.cores() + further


@pytest.mark.parametrize(
    ("tally", "code", "said"),
    [
        ({"completed": 2}, 0, ""),
        (
            {
                "completed": 2,
                "remaining": 1,
                "why_left": "the 90 s for real runs are over",
            },
            3,
            "1 run is left, as the 90 s",
        ),
        (
            {
                "completed": 2,
                "remaining": 1,
                "failed": [None],
                "why_left": "the 90 s for real runs are over",
            },
            1,
            "1 run is left, as the 90 s",
        ),
        (
            {"completed": 2, "remaining": 2, "interrupted": 2},
            130,
            "2 runs are left, as SIGINT ended the command",
        ),
        ({"completed": 2, "failed": [None]}, 1, ""),
    ],
)
def test_exit_code_is_zero_only_if_every_run_was_made(
    monkeypatch, capsys, tmp_path, tally, code, said
):
    plan = SimpleNamespace(study=SimpleNamespace(name="mine"))
    found = Tally(tmp_path / "mine", **tally)
    monkeypatch.setattr("scalebench.launch.study_run.run_study", lambda *_, **__: found)
    monkeypatch.setattr("scalebench.cli.run_common.verbosity", lambda: -1)
    monkeypatch.setattr(
        "scalebench.records.progress.progress_of",
        lambda _: SimpleNamespace(remaining=Counter()),
    )
    (tmp_path / "mine").mkdir()
    assert run_plan(plan, tmp_path) == code
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(said or "2 runs completed")
    assert last.endswith("the same command goes on with them") == bool(said)


def test_help_has_twelve_options_before_those_for_experts(scalebench):
    said = scalebench("--help").stdout
    panels = re.findall(r"^╭─ (.+?) ─", said, re.MULTILINE)
    assert panels == ["What runs", "Where", "How long", "Output", "For experts"]
    first, experts = said.split("╭─ For experts")
    assert len(re.findall(r"^│ --[a-z]", first, re.MULTILINE)) == 12
    for option in command_of("run").params:
        if isinstance(option, click.Option):
            assert (f"│ {option.opts[0]}" in first + experts) is not option.hidden, (
                option.name
            )
    assert "--patience" not in said


def test_a_flag_that_went_says_what_is_in_its_place(refused):
    assert re.search(r"--noisy: leave it out; .*--require-quiet", refused("--noisy"))


def test_hidden_flags_still_work_and_name_their_key(scalebench, tmp_path):
    small = [*SMALL, "--strategy", "allreduce", "--workers", "2"]
    done = scalebench(*small, "--seed", "3")
    assert re.search(r"next version .*--set seed=\.\.\. .*--seed\b", done.stderr)
    assert [row["seed"] for row in rows(tmp_path)] == ["3"]
    done = scalebench(*small, "--set", "seed=3")
    assert runs_made(done.stdout) == (0, 1)
    assert "next version" not in done.stderr
    assert "next version" not in scalebench(*small, "--seed", "3", "--quiet").stderr


@pytest.mark.parametrize(
    "place",
    [
        "launch.planning.plan_study",
        "records.study_file.keep_study",
        "calibration.charging.machine_for",
    ],
)
def test_signal_of_the_time_limit_before_any_run_is_a_job_too_short_for_one(
    scalebench, monkeypatch, place
):
    """The job does not go back into the queue then, where the same would happen for ever: while planning, and later."""

    def signalled(*arguments, **options):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(1)

    monkeypatch.setattr(f"scalebench.{place}", signalled)
    done = scalebench(*SMALL, "--workers", "1")
    assert done.returncode == 3
    assert re.search(r"job is too short .*more time", done.stderr)
