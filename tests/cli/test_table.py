"""`scalebench table`: numbers for print, rounded to what their intervals support."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest

from scalebench.analysis import bootstrap_cells, cells, load
from scalebench.analysis.verdicts import compare_strategies
from scalebench.cli.table import table_of
from scalebench.formatting import BETWEEN, BETWEEN_MEANS
from scalebench.records.store import Store
from tests.analysis.conftest import study  # noqa: F401
from tests.analysis.test_comparing import only
from tests.analysis.test_target import cell
from tests.facts import in_order
from tests.records_factory import run_row, study_rows


@pytest.fixture
def folder(tmp_path):
    with Store(tmp_path / "mine", fsync=False) as store:
        for run, epochs in study_rows(
            workers=(1, 2, 4), native_workers=(1, 2, 4), repetitions=3
        ):
            store.append(run, epochs)
    return tmp_path / "mine"


def test_latex_table_has_rules_caption_and_label(folder, invoke):
    words = "--style latex --execution virtual --columns time,speedup"
    text = invoke("table", folder, *words.split())
    for part in (
        r"\toprule",
        r"\midrule",
        r"\bottomrule",
        r"\begin{tabular}{@{}lrrr@{}}",
        r"\label{tab:mine}",
        r"\caption{Strong",
        r"\parbox{\linewidth}{\scriptsize ",
    ):
        assert part in text
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert rows[0] == r"    Strategy & Workers & Time (s) & Speedup \\"
    assert len(rows) == 1 + 16
    assert all(line.count("&") == 3 for line in rows)
    assert text.count(r"\addlinespace") == 5
    assert r"epoch\_average" in text


def test_a_table_that_fits_a_column_stands_in_one(folder, invoke):
    narrow, wide = (
        invoke(
            "table",
            folder,
            "--style",
            "latex",
            "--columns",
            columns,
            "--workers",
            "2..8",
        )
        for columns in ("vs-allreduce", "vs-allreduce,metric,time")
    )
    assert r"\begin{table}[t]" in narrow
    assert r"4\ensuremath{\times} & --" in narrow
    assert r"\begin{table*}[t]" in wide


def test_default_columns_fit_a_column_of_a_page(folder, invoke):
    said, everything = (
        invoke("table", folder, "--style", "latex", "--execution", "virtual", *more)
        for more in ((), ("--columns", "all"))
    )
    assert r"\begin{table}[t]" in said
    assert r"\begin{table*}[t]" in everything
    header, full = (
        next(line for line in text.splitlines() if "Strategy &" in line)
        for text in (said, everything)
    )
    assert header.startswith("    Strategy & Workers & Time (s) & ")
    assert "vs allreduce" in header, (
        "more telling than the speedup, which stands before it where all fit"
    )
    left = [title for title in full.strip(" \\").split(" & ") if title not in header]
    assert in_order(
        said, "left out", ", ".join(left).replace("\\", ""), "--columns all"
    )
    assert "left out" not in everything
    markdown = invoke("table", folder, "--execution", "virtual")
    assert markdown.splitlines()[1].count("|") == header.count("&") + 2, (
        "the same columns"
    )


LONG_NAMES = [
    ("slowmo", {"slow_lr": 0.9, "slow_momentum": 0.6, "steps": 4}),
    ("torch_hierarchical_local_sgd", {"groups": [4, 16], "periods": [8, 32]}),
    ("torch_hierarchical_local_sgd", {"groups": [4, 16], "periods": [8, 64]}),
]


def long_names(folder, added):
    named = [(name, {}) for name in ("serial", "allreduce", "horovod", "ddp")]
    with Store(folder, fsync=False) as store:
        for place, (strategy, options) in enumerate([*named, *added]):
            for workers in (1,) if strategy == "serial" else (1, 2):
                own = {"strategy": strategy, "strategy_options": json.dumps(options)}
                store.append(
                    run_row(run_id=f"{place}-{workers}", workers=workers, **own), []
                )
    return str(folder)


@pytest.mark.parametrize("count", [1, 3])
def test_default_fits_a_column_beside_long_names(tmp_path, invoke, count):
    """Names are shortened where they are alike; those that leave no room stand in rows of their own."""
    folder = long_names(tmp_path / "long", LONG_NAMES[:count])
    said = invoke("table", folder, "--style", "latex")
    assert r"\begin{table}[t]" in said
    assert r"slowmo(\dots{})" in said
    notes = " ".join(said.split())
    assert (
        r"slowmo(\dots{}) is slowmo(slow\_lr=0.9, slow\_momentum=0.6, steps=4)" in notes
    )
    own_rows = [
        line for line in said.splitlines() if line.strip().startswith(r"\multicolumn")
    ]
    assert len(own_rows) == (0 if count == 1 else 7)
    if own_rows:
        assert r"periods=[8, 32])" in said
        assert r"periods=[8, 64])" in said
    header = next(line for line in said.splitlines() if "Workers &" in line)
    body = [line for line in said.splitlines() if re.match(r"    .* & .*\\\\$", line)]
    assert {line.count("&") for line in body} == {header.count("&")}


def test_chosen_columns_have_the_whole_names(tmp_path, invoke):
    said = invoke(
        "table", long_names(tmp_path / "long", LONG_NAMES), "--columns", "time"
    )
    assert "| torch_hierarchical_local_sgd(groups=[4, 16], periods=[8, 64]) |" in said
    assert "Names: " not in said


def test_csv_has_bounds_in_columns_and_empty_cells_for_unknown(folder, invoke):
    words = "--style csv --strategy allreduce --strategy epoch_average"
    text = invoke("table", folder, *words.split())
    rows = list(csv.DictReader(io.StringIO(text)))
    assert {row["execution"] for row in rows} == {"native", "virtual"}
    assert {row["strategy"] for row in rows} == {"allreduce", "epoch_average"}
    assert {
        row["vs allreduce (%)"] for row in rows if row["strategy"] == "allreduce"
    } == {""}
    crowded = [row for row in rows if row["oversubscribed"] == "true"]
    assert {(row["execution"], row["workers"]) for row in crowded} == {("native", "4")}
    for row in rows:
        if row["Time (s) low"]:
            assert (
                float(row["Time (s) low"])
                <= float(row["Time (s)"])
                <= float(row["Time (s) high"])
            )


def test_markdown_marks_oversubscribed_and_says_so(folder, invoke):
    text = invoke("table", folder, "--execution", "native", "--columns", "time,metric")
    assert "| 4 × |" in text
    assert in_order(text, "×: more workers", "never a baseline.")
    assert text.startswith("| Strategy | Workers | Time (s) | Accuracy |\n")


def test_table_goes_to_a_file(folder, invoke, tmp_path):
    target = tmp_path / "tables" / "mine.tex"
    said = invoke("table", folder, "--style", "latex", "--output", target)
    assert str(target) in said.splitlines()
    assert target.read_text().rstrip().endswith(r"\end{table}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--columns", "tme"), "--columns: unknown column 'tme'; did you mean 'time'"),
        (("--strategy", "allreduc"), "--strategy: no completed run of 'allreduc'"),
        (("--workers", "8..4"), "runs backwards"),
    ],
)
def test_wrong_requests_exit_2(folder, invoke, words, message):
    assert message in invoke("table", str(folder), *words, code=2)


def test_time_to_the_target_has_its_interval_epochs_and_reduction(study):  # noqa: F811
    rows = [*cell("serial", 1, (3.0, 3.3, 2.7)), *cell("allreduce", 2, (1.0, 1.2, 1.1))]
    results = study(rows=[*rows, *cell("epoch_average", 2, (0.5, 0.55, 0.6))])
    found = table_of(results, cells(results))
    names = [column.name for column in found.columns]
    assert {"time to target", "epochs to target", "to target vs allreduce"} <= set(
        names
    )
    (row,) = (row for row in found.rows if row[0].text == "epoch_average")
    shown = {name: cell.number for name, cell in zip(names, row, strict=True)}
    time = shown["time to target"]
    assert time.low < time.value < time.high
    assert shown["to target vs allreduce"].value == pytest.approx(0.5, abs=0.03)


def test_a_baseline_that_was_not_run_is_named(tmp_path, invoke):
    with Store(tmp_path / "mine", fsync=False) as store:
        for run, epochs in study_rows(
            strategies=("serial", "allreduce"), workers=(1, 2), native_workers=()
        ):
            store.append(run, epochs)
    said = invoke("table", tmp_path / "mine", "--columns", "time,vs-ddp", code=2)
    assert "vs-ddp needs a completed run of ddp" in said


def noisy(tmp_path):
    """One strategy with times that vary by a factor of four, beside a steady baseline."""
    rows = study_rows(
        strategies=("allreduce", "epoch_average"),
        workers=(2,),
        native_workers=(2,),
        repetitions=3,
    )
    with Store(tmp_path / "noisy", fsync=False) as store:
        for run, epochs in rows:
            if (run.execution, run.strategy) == ("native", "epoch_average"):
                run = run.model_copy(
                    update={
                        "train_s": run.train_s * 4.0**run.repetition,
                        **SPLIT_UNKNOWN,
                    }
                )
            store.append(run, epochs)
    return tmp_path / "noisy"


SPLIT_UNKNOWN = dict.fromkeys(("compute_s", "comm_s", "wait_s", "data_s", "other_s"))


def test_bounds_stand_in_place_of_a_number_that_nothing_supports(tmp_path, invoke):
    folder = noisy(tmp_path)
    words = (
        "--execution native --strategy epoch_average --columns time,vs-allreduce,metric"
    )
    latex = invoke("table", folder, "--style", "latex", *words.split())
    assert r"epoch\_average & 2 & 0.1..100 & -7957..+89 & $0.9" in latex
    assert f"{BETWEEN_MEANS}." in " ".join(latex.split())
    (row,) = csv.DictReader(
        io.StringIO(invoke("table", folder, "--style", "csv", *words.split()))
    )
    low, high = (float(row[f"Time (s) {end}"]) for end in ("low", "high"))
    assert row["Time (s)"] == ""
    assert (round(low, 1), round(high, -2)) == (0.1, 100)
    assert (row["vs allreduce (%)"], round(float(row["vs allreduce (%) low"]))) == (
        "",
        -7957,
    )


def test_trimmed_mean_with_its_bootstrap_interval_is_a_column(tmp_path, folder, invoke):
    rows = study_rows(
        strategies=("allreduce",), workers=(2,), native_workers=(2,), repetitions=20
    )
    with Store(tmp_path / "many", fsync=False) as store:
        for run, epochs in rows:
            store.append(run, epochs)
    words = ("--columns", "time,bootstrap", "--format", "json")
    of = {
        row["execution"]: row
        for row in json.loads(invoke("table", tmp_path / "many", *words))["rows"]
    }
    expected = only(bootstrap_cells(load(tmp_path / "many")), workers=2)
    assert of["native"]["trimmed mean"] == expected.trimmed_s
    assert (
        of["native"]["trimmed mean low"]
        == expected.low_s
        < of["native"]["trimmed mean"]
    )
    assert of["virtual"]["trimmed mean"] is None, (
        "its repetitions are draws of one calibration"
    )
    refusal = invoke("table", folder, *words, code=2)
    assert in_order(refusal, "most repetitions", "native or paced time", "3")


def test_steady_study_has_no_footnote_on_bounds_that_stand_alone(folder, invoke):
    assert BETWEEN not in invoke("table", folder, "--columns", "time,vs-allreduce")


def test_table_has_the_verdict_of_compare_on_the_metric(folder, invoke):
    text = invoke(
        "table",
        folder,
        "--execution",
        "virtual",
        "--workers",
        "4",
        "--columns",
        "metric,metric-vs-allreduce",
    )
    rows = {
        line.split(" | ")[0].strip("| "): line.split(" | ")[-1].strip("| ")
        for line in text.splitlines()
    }
    assert rows["Strategy"] == "Accuracy vs allreduce"
    assert rows["allreduce"] == "–"
    assert rows["epoch_average"] in ("worse", "undecided", "equal")
    found = compare_strategies(
        load(folder), "allreduce", "epoch_average", execution="virtual"
    ).table
    assert rows["epoch_average"] == found.set_index("workers").loc[4, "metric_verdict"]


def test_runs_that_never_reached_the_target_are_marked_as_run_prints_them(
    study,  # noqa: F811
    invoke,
):
    rows = [
        *cell("allreduce", 2, (1.0, 2.0, None)),
        *cell("epoch_async", 2, (1.0, None, None)),
    ]
    rows += cell("epoch_average", 2, (None, None, None))
    words = ("table", study(rows=rows).folder, "--columns", "target,epochs", "--style")
    text = invoke(*words, "markdown")
    assert "| allreduce | 2 | 2.00* | 3.0* |" in text
    assert "| epoch_async | 2 | 1 of 3 | 1 of 3 |" in text
    assert "| epoch_average | 2 | never | never |" in text
    assert in_order(text, "*: not every run", "Kaplan-Meier")
    assert "1 of 3: so few of the runs" in text
    assert "$2.00$* & $3.0$*" in invoke(*words, "latex")
    rows = {
        row["strategy"]: row
        for row in csv.DictReader(io.StringIO(invoke(*words, "csv")))
    }
    assert [
        rows["allreduce"][f"Time to target (s){part}"] for part in ("", " mark")
    ] == ["2", "*"]
    assert rows["epoch_async"]["Time to target (s)"] == "1 of 3"
