"""The Python interface: light to import, and the command line's own numbers."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

import scalebench
from scalebench.cli.main import main
from scalebench.formatting import digits, percent, seconds
from scalebench.pricing.calibration_file import Calibration
from scalebench.records.store import Store
from tests.records_factory import study_rows

ROOT = Path(__file__).parents[1]
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
        "import sys, scalebench; assert {'load', 'analysis', 'figures'} <= set(dir(scalebench))\n"
        "print([name for name in ('pandas', 'numpy', 'torch', 'yaml', 'click') if name in sys.modules])\n"
        "scalebench.load; print('pandas' in sys.modules, 'torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\nTrue False False\n"


def test_unknown_attribute_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plto'"):
        scalebench.plto  # noqa: B018


def test_tables_hold_the_numbers_of_the_command_line(tmp_path, monkeypatch, capsys, machine) -> None:
    monkeypatch.chdir(tmp_path)
    given = Calibration(key="given", tables=machine.tables, engines=machine.engines)
    Path("given.json").write_text(given.model_dump_json())
    Path("study.yaml").write_text(STUDY)
    with pytest.raises(SystemExit) as end:
        main.main(["run", "study.yaml", "--jobs", "1", "--full"], prog_name="scalebench")
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
    ratios = scalebench.analysis.ratios(results).set_index(["baseline", "label", "workers"])
    assert len(cells) == len(printed) == 7
    for cell in cells.to_dict("records"):
        key = (cell["label"], cell["workers"])
        _, time, median, spread, speedup, reduction, metric = printed[key[0], str(key[1])]
        assert time.startswith(seconds(cell["train_s"]))
        assert median == seconds(cell["median_s"])
        assert spread == percent(cell["spread"]).lstrip("+")
        assert speedup == f"{digits(ratios['speedup']['serial', *key])}x"
        saved = ratios["reduction"].get(("allreduce", *key), math.nan)
        assert reduction.startswith(percent(saved))
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
    assert {path.suffix for path in Path("plots/digits-strong-scaling").iterdir()} == {".png", ".csv", ".txt", ".tex"}
