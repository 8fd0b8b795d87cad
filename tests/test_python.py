"""The Python interface: light to import, and the command line's own numbers."""

from __future__ import annotations

import ast
import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import scalebench
from scalebench.calibration.calibration_file import Calibration
from scalebench.cli.main import main
from scalebench.errors import ResultsError, ScalebenchError, StudyError, UsageError
from scalebench.formatting import digits, percent, seconds
from scalebench.notebook import _named_by_keywords
from scalebench.records.store import Store
from tests.records_factory import study_rows

ROOT = Path(__file__).parents[1]
SMALL = {"name": "small", "dataset": "wine", "epochs": 1, "execution": "virtual"}
ON_BOOSTER: dict[str, Any] = {"cluster": "juwels-booster", "step_time": 0.02}
ON = {"cluster": "juwels-booster", "device_step_time": 0.001, "jobs": 1}
STUDY = """\
name: mine
dataset: wine
epochs: 2
repetitions: 2
execution: virtual
workers: 1,2,4
strategies: [serial, allreduce, epoch_average]
calibration: given.json
"""


def test_importing_it_imports_nothing_heavy() -> None:
    program = (
        "import sys, scalebench; assert {'run', 'plot', 'predict', 'load', 'analysis'} <= set(dir(scalebench))\n"
        "print([name for name in ('pandas', 'numpy', 'torch', 'yaml', 'click') if name in sys.modules])\n"
        "scalebench.load; print('pandas' in sys.modules, 'torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\nTrue False False\n"


def test_unknown_attribute_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plto'"):
        scalebench.plto  # noqa: B018


def test_tables_hold_the_numbers_of_the_command_line(
    tmp_path, monkeypatch, capsys, machine
) -> None:
    monkeypatch.chdir(tmp_path)
    given = Calibration(key="given", tables=machine.tables, engines=machine.engines)
    Path("given.json").write_text(given.model_dump_json())
    Path("study.yaml").write_text(STUDY)
    with pytest.raises(SystemExit) as end:
        main.main(
            ["run", "study.yaml", "--jobs", "1", "--full"], prog_name="scalebench"
        )
    assert not end.value.code
    lines = capsys.readouterr().out.splitlines()
    printed, label = {}, ""
    for line in lines:
        if line.endswith(", virtual"):
            label = line.removesuffix(", virtual")
        elif len(cells := re.split("  +", line.strip())) == 7 and cells[0].isdigit():
            printed[label, cells[0]] = cells

    results = scalebench.load("results/mine")
    cells = scalebench.analysis.cells(results)
    ratios = scalebench.analysis.ratios(results).set_index(
        ["baseline", "label", "workers"]
    )
    assert len(cells) == len(printed) == 7
    for cell in cells.to_dict("records"):
        key = (cell["label"], cell["workers"])
        _, time, median, spread, speedup, reduction, metric = printed[
            key[0], str(key[1])
        ]
        assert time.startswith(seconds(cell["train_s"]))
        assert median == seconds(cell["median_s"])
        assert spread == percent(cell["spread"]).lstrip("+")
        assert speedup == f"{digits(ratios['speedup']['serial', *key])}x"
        saved = ratios["reduction"].get(("allreduce", *key), math.nan)
        assert reduction.startswith("equal" if saved == 0 else percent(saved))
        assert metric == f"{cell['metric']:.3f}"


def test_documented_code_runs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("digits-strong-scaling", "another"):
        with Store(Path("results") / name, fsync=False) as store:
            for run, epochs in study_rows(workers=(1, 2, 4), native_workers=(1, 2)):
                store.append(run.model_copy(update={"study": name}), epochs)
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    said = capsys.readouterr().out
    assert "reduction_low" in said
    assert list(names["saved"].index) == [1, 2, 4]  # type: ignore[attr-defined]
    assert said.count("digits-strong-scaling") == 1
    assert {path.suffix for path in Path("plots/digits-strong-scaling").iterdir()} == {
        ".png",
        ".csv",
        ".txt",
        ".tex",
    }


def test_notebook_runs(tmp_path, monkeypatch, capsys) -> None:
    """Execute the cells as a notebook does: the value of a last expression is shown."""
    monkeypatch.chdir(tmp_path)
    book = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    shown: list[str] = []
    for cell in book["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == [], "numbers of another version would stay in it"
        body = ast.parse("".join(cell["source"])).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), "docs/notebook.ipynb", "exec"), names)
        if last is not None:
            value = eval(
                compile(ast.Expression(last.value), "docs/notebook.ipynb", "eval"),
                names,
            )
            shown += [value._repr_html_()] if hasattr(value, "_repr_html_") else []
    answer, saved, picture, predicted = shown
    assert answer.startswith("<p>At 8 workers, ")
    assert ">local_sgd(steps=4)</td>" in answer
    assert "<th>epoch_average</th>" in saved
    assert picture.startswith(
        '<img alt="page 1" width="922" style="max-width: 100%" src="data:image/png;base64,'
    )
    assert predicted.count("<td>ddp</td>") == 3
    assert Path("scaling.pdf").read_bytes().startswith(b"%PDF")
    assert "Decision: " in capsys.readouterr().out


def test_run_takes_a_file_with_keys_over_it_and_goes_on(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("study.yaml").write_text(
        "name: mine\ndataset: wine\nepochs: 1\nexecution: virtual\nworkers: 1,2\n"
    )
    results = scalebench.run(
        "study.yaml", strategies="allreduce", repetitions=1, output="out", **ON
    )
    assert results.folder == Path("out/mine")
    assert sorted(results.runs["workers"]) == [1, 2]
    assert set(results.completed["label"]) == {"allreduce"}
    capsys.readouterr()
    again = scalebench.run(
        "study.yaml", strategies="allreduce", repetitions=1, output="out", **ON
    )
    assert len(again.runs) == 2
    assert "virtual workers" not in capsys.readouterr().err, "nothing was left to run"


def test_interrupted_run_is_an_interrupted_cell(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    signals = iter([signal.SIGINT])  # a third Ctrl-C would end this process at once
    # Ignored in what a shell has started in the background, and then left so by a run.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def stop(*_: object) -> None:
        for signum in signals:
            signal.raise_signal(signum)

    monkeypatch.setattr("scalebench.cli.live_progress.Watcher.ended", stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            scalebench.run(
                SMALL, workers="1..4", strategies=["allreduce"], repetitions=8, **ON
            )
    finally:
        signal.signal(signal.SIGINT, before)
    assert 0 < len(scalebench.load("results/small").runs) < 24


def test_plot_returns_the_axes_of_what_was_chosen(tmp_path) -> None:
    with Store(tmp_path / "mine", fsync=False) as store:
        for run, epochs in study_rows(workers=(1, 2, 4), native_workers=(1, 2)):
            store.append(run, epochs)
    results = scalebench.load(tmp_path / "mine")
    axes = scalebench.plot(results, panels="time", workers=[2, 4], style="ieee")
    assert [panel.get_title(loc="left") for panel in axes] == ["training time"]
    assert min(x for line in axes[0].lines for x in line.get_xdata()) > 1
    assert axes.figures[0].get_size_inches()[0] == 3.5
    assert len(scalebench.plot(tmp_path / "mine")) == 3
    with pytest.raises(
        ResultsError, match="weak-scaling cannot be drawn: the study scales strongly"
    ):
        scalebench.plot(results, "weak-scaling")
    with pytest.raises(UsageError, match="no completed run of 'gossip'"):
        scalebench.plot(results, strategies=["gossip"])


def test_predict_gives_the_numbers_of_the_command(tmp_path, invoke) -> None:
    words = ("--cluster", "juwels-booster", "--step-time", "0.025", "--workers", "4,64")
    said = invoke("predict", "resnet50", *words, "--csv", str(tmp_path / "all.csv"))
    table = scalebench.predict(
        "resnet50", cluster="juwels-booster", step_time=0.025, workers=[4, 64]
    )
    printed = pd.read_csv(tmp_path / "all.csv")
    assert list(table) == list(printed)
    assert table["train_s_high"].tolist() == pytest.approx(
        printed["train_s_high"].tolist(), rel=1e-12
    )
    assert table.attrs["answer"][0][:60] in said


def test_plan_gives_the_layouts_of_the_command(tmp_path, invoke) -> None:
    where = ("--cluster", "juwels-booster", "--device", "a100-40gb")
    words = ("vit_b16", *where, "--devices", "8", "--batch", "512")
    file = tmp_path / "layouts.yaml"
    first, *_ = json.loads(invoke("plan", *words, "--format", "json"))
    invoke("plan", *words, "--format", "json", "--write", str(file))
    layouts = scalebench.plan(
        "vit_b16",
        cluster="juwels-booster",
        device="a100-40gb",
        devices=8,
        batch=512,
    )
    assert len(layouts) == len(first["rows"]) > 1
    for name in ("layout", "step", "step low", "memory"):
        assert layouts[name].tolist() == [row[name] for row in first["rows"]]
    assert layouts.attrs["study"] == yaml.safe_load(file.read_text())
    assert layouts["layout"][0] in layouts.attrs["answer"][0]
    with pytest.raises(UsageError, match="no such keyword clster"):
        scalebench.plan("vit_b16", clster="juwels-booster", devices=8, batch=512)
    with pytest.raises(UsageError, match="write"):
        scalebench.plan("vit_b16", devices=8, batch=512, write="layouts.yaml")


def test_predict_varies_a_number(invoke) -> None:
    words = (
        "--cluster",
        "juwels-booster",
        "--step-time",
        "0.075",
        "--workers",
        "256",
        "--strategy",
        "ddp",
    )
    said = invoke("predict", "vit_b16", *words, "--vary", "network-bandwidth=100,200")
    on = {"cluster": "juwels-booster", "step_time": 0.075, "strategies": "ddp"}
    table = scalebench.predict(
        "vit_b16", **on, workers=[256], vary="network-bandwidth=100,200"
    )
    assert table["network_bandwidth_gbit_per_s"].tolist() == [100, 200]
    assert all(table["train_s_low"] < table["train_s"])
    assert table.attrs["answer"][0] in " ".join(said.split())
    with pytest.raises(UsageError, match=r"^workers: vary takes one count, got 2"):
        scalebench.predict(
            "vit_b16", **on, workers=[4, 256], vary="network-bandwidth=100,200"
        )
    with pytest.raises(UsageError, match=r"^budget: does not go with vary"):
        scalebench.predict("vit_b16", **on, vary="network-bandwidth=100,200", budget=3)


def test_mistakes_are_the_command_lines_errors() -> None:
    with pytest.raises(StudyError, match="unknown key 'epcohs'; did you mean 'epochs'"):
        scalebench.run(epcohs=3)
    with pytest.raises(UsageError, match="no such keyword clster"):
        scalebench.predict("resnet50", clster="juwels-booster")
    with pytest.raises(
        UsageError, match="csv and figure are options of the command alone"
    ):
        scalebench.predict("resnet50", cluster="juwels-booster", csv="a.csv")
    with pytest.warns(UserWarning, match="not predicted"):
        scalebench.predict(
            "resnet50",
            cluster="juwels-booster",
            step_time=0.02,
            batch_global=64,
            workers=[1, 128],
            samples=6400,
        )


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (
            lambda: scalebench.predict("resnet50", **ON_BOOSTER, step_tim=1),
            "no such keyword step_tim. (Did you mean",
        ),
        (
            lambda: scalebench.predict("resnet50", cluster="ethernet-10g"),
            "with step_time, or a device ",
        ),
        (
            lambda: scalebench.predict("resnet50"),
            "cluster is missing; give it, or what was measured with calibration",
        ),
        (
            lambda: scalebench.predict(cluster="juwels-booster"),
            "model is missing; give it, or what was measured",
        ),
        (
            lambda: scalebench.predict("resnet5"),
            "unknown layer table 'resnet5'; did you mean 'resnet50'",
        ),
        (
            lambda: scalebench.predict("resnet50", **ON_BOOSTER, jitter=20),
            "predict: jitter: 20.0 is not in the range",
        ),
        (
            lambda: scalebench.predict("resnet50", **ON_BOOSTER, workers="a"),
            "predict: workers: cannot read the worker",
        ),
        (
            lambda: scalebench.predict(
                "resnet50", **ON_BOOSTER, workers=[4, 8], vary="latency=1x,2x"
            ),
            "workers: vary takes one count, got 2; vary them with vary workers=4,64",
        ),
        (
            lambda: scalebench.predict(
                "resnet50", **ON_BOOSTER, batch=1, batch_global=2
            ),
            "give batch or batch_global",
        ),
        (
            lambda: scalebench.run(epochs=-1),
            "epochs: expected a number greater than 0, got -1",
        ),
        (
            lambda: scalebench.run(epocs=1),
            "epocs: unknown key 'epocs'; did you mean 'epochs'?",
        ),
        (
            lambda: scalebench.run(execution="paced", workers="1"),
            "say its seconds with device_step_time, or name",
        ),
    ],
)
def test_errors_name_keywords_and_no_option_of_a_command(call, named) -> None:
    with pytest.raises(UsageError) as error:
        call()
    assert named in str(error.value)
    assert "--" not in str(error.value)


def test_errors_of_plot_name_keywords(tmp_path) -> None:
    with Store(tmp_path / "mine", fsync=False) as store:
        for run, epochs in study_rows(workers=(1, 2), native_workers=()):
            store.append(run, epochs)
    for keywords, named in (
        ({"panels": "foo"}, "panels: strong-scaling has no 'foo'"),
        ({"strategies": "foo"}, "strategies: no completed run of 'foo'"),
        ({"workers": 3}, "workers: no completed run of 3"),
        ({"columns": 3}, "columns: expected 1 or 2, got 3"),
    ):
        with pytest.raises(UsageError) as error:
            scalebench.plot(tmp_path / "mine", **keywords)
        assert str(error.value).startswith(named)


def test_commands_in_errors_keep_their_options() -> None:
    with pytest.raises(ScalebenchError) as error, _named_by_keywords():
        raise UsageError(
            "--engine: not installed; scalebench install horovod --force adds it; leave --engine out"
        )
    assert (
        str(error.value)
        == "engine: not installed; scalebench install horovod --force adds it; leave engine out"
    )


def test_predict_takes_one_count_and_two_axes() -> None:
    cells = scalebench.predict(
        "resnet50", **ON_BOOSTER, workers=8, vary=["latency=1x,2x", "batch=32,64"]
    )
    assert len(cells.query("strategy == 'allreduce'")) == 4


def test_run_works_in_a_script_without_a_guard(tmp_path) -> None:
    """Processes that a run starts import the script that called it, unless it is left out."""
    script = tmp_path / "script.py"
    script.write_text(
        "import scalebench\nprint('begun')\n"
        "found = scalebench.run(name='mine', dataset='wine', epochs=1, execution='virtual', workers='1,2', jobs=2,\n"
        "    repetitions=1, strategies=['allreduce', 'epoch_average'], cluster='juwels-booster',\n"
        "    device_step_time=0.001)\nprint(len(found.completed), __file__)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout == f"begun\n4 {script}\n"
