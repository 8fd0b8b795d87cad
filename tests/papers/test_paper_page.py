"""The page of a paper: verdicts on its claims, from a made-up study whose ratios are known, and its priced plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scalebench.analysis import load
from scalebench.cli.main import main
from scalebench.errors import ResultsError, StudyError, UsageError
from scalebench.launch.work import Tally
from scalebench.measured import Measured
from scalebench.models.zoo.layers import load_layers
from scalebench.papers.obtained import Obtained, obtain
from scalebench.papers.paper_folder import (
    COLUMNS,
    Published,
    find_paper,
    read_published,
)
from scalebench.papers.paper_page import read_plans, write_page
from scalebench.papers.side_by_side import Check, Claim, Pair, draw, judge
from scalebench.records.store import Store
from tests.facts import in_order, together
from tests.records_factory import study_rows

PUBLISHED = """\
final_metric,epoch_average,4,0.9,accuracy,Figure 1,fig1,its table,no,
final_metric,epoch_average,8,0.8,accuracy,Figure 1,fig1,its table,no,
time_reduction@allreduce,epoch_average,64,0.95,share,abstract,fig1,abstract,no,
train_accuracy,serial,1,0.99,accuracy,Figure 1,,its curve,yes,
final_metric,serial,1,0.7,accuracy,Table 2,table2,its table,no,
"""
STUDY = (
    "name: mine-fig1\nworkers: 1..64\nstrategies: [serial, allreduce, epoch_average]\n"
)

FOLDER = Path(__file__).parents[2] / "experiments" / "asa2025"


@pytest.fixture
def paper(tmp_path):
    folder = tmp_path / "experiments" / "mine"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("# mine: a made-up paper\n")
    (folder / "published.csv").write_text(f"{','.join(COLUMNS)}\n{PUBLISHED}")
    (folder / "fig1.yaml").write_text(STUDY)
    (folder / "table2.yaml").write_text(STUDY.replace("fig1", "table2"))
    (folder / "scales.yaml").write_text(
        "smoke:\n  all: {repetitions: 1}\n  fig1, table2: {epochs: 2}\n"
    )
    return find_paper(tmp_path / "experiments", "mine")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records") / "mine-fig1"
    with Store(folder) as store:
        for row, epochs in study_rows(native_workers=(1,)):
            store.append(row, epochs)
    return load(folder)


def test_the_page_has_each_published_number_and_ours(paper, results, tmp_path):
    page, verdict = write_page(paper, {"fig1": results}, "laptop", tmp_path / "plots")
    lines = page.with_suffix(".md").read_text().splitlines()
    (at_4,) = [
        line
        for line in lines
        if line.startswith("| final metric | epoch_average | 4 | 0.900 |")
    ]
    (ours,) = obtain(results, "final_metric", "epoch_average", 4)
    assert f"{ours.measured.value:.3f} [" in at_4
    assert "| virtual |" in at_4
    assert f"+{ours.measured.value - 0.9:.3f}" in at_4
    (saved,) = [
        line for line in lines if line.startswith("| time reduction against allreduce")
    ]
    assert "| 0.950 |" in saved
    assert [
        line
        for line in lines
        if line.startswith("| train accuracy") and "no counterpart" in line
    ]
    assert [
        line
        for line in lines
        if line.startswith("| final metric | serial") and "not run" in line
    ]
    pictures = [
        line.partition("(")[2].rstrip(")") for line in lines if line.startswith("![")
    ]
    assert pictures
    assert all((page.parent / picture).is_file() for picture in pictures)
    assert in_order(verdict, "5 published numbers", "3 have ours", "0 lie")
    assert f"**{verdict}**" in lines
    html = page.read_text()
    assert f"<strong>{verdict}</strong>" in html
    assert html.count("<tr>") == sum(line.startswith("| ") for line in lines) - sum(
        "| --- |" in line for line in lines
    )
    assert html.count("<img ") == len(pictures)


def test_a_page_names_verdicts_on_claims_and_numbers_in_our_intervals(
    paper, results, tmp_path
):
    (ours,) = obtain(results, "final_metric", "epoch_average", 4)
    path = paper.folder / "published.csv"
    path.write_text(
        path.read_text().replace(
            "epoch_average,4,0.9,", f"epoch_average,4,{ours.measured.value},"
        )
    )
    check = "{study: fig1, quantity: time_reduction@allreduce, strategy: epoch_average, workers: 64"
    (paper.folder / "claims.yaml").write_text(
        "claims:\n"
        f"- {{claim: faster, source: abstract, why: so, checks: [{check}, at_least: 0.0}}]}}\n"
        f"- {{claim: at once, source: abstract, why: so, checks: [{check}, at_least: 0.999}}]}}\n"
    )
    verdict = write_page(paper, {"fig1": results}, "laptop", tmp_path / "plots").verdict
    assert in_order(verdict, "2 claims", "1 reproduced", "1 not reproduced")
    assert in_order(verdict, "5 published numbers", "3 have ours", "1 lie")


def test_scale_smoke_is_not_compared_with_the_paper(paper, results, tmp_path, capsys):
    page, verdict = write_page(paper, {"fig1": results}, "smoke", tmp_path / "plots")
    text = page.with_suffix(".md").read_text()
    assert in_order(verdict, "1 of 1 study", "smoke trains too little")
    assert "published" not in verdict
    rows = [
        line.split(" | ")
        for line in text.splitlines()
        if line.startswith("| final metric | epoch_average")
    ]
    assert [(cells[3], cells[6]) for cells in rows] == [("0.900", "–"), ("0.800", "–")]
    assert all(cells[4] != "–" for cells in rows), "ours is shown"
    assert "published-" not in text, "no picture sets them side by side"
    with pytest.raises(SystemExit) as end:
        main.main(
            [
                "reproduce",
                "mine",
                "--claims",
                "--scale",
                "smoke",
                "--experiments",
                str(paper.folder.parent),
            ],
            prog_name="scalebench",
        )
    assert end.value.code == 2
    assert in_order(capsys.readouterr().err, "smoke trains too little", "claim")


@pytest.mark.parametrize(
    ("tallies", "code"),
    [
        ([Tally(Path("a")), Tally(Path("b"))], 0),
        ([Tally(Path("a"), remaining=2, why_left="it was so"), Tally(Path("b"))], 3),
        ([Tally(Path("a"), remaining=2), Tally(Path("b"), failed=[(None, None)])], 1),  # type: ignore[list-item]
    ],
)
def test_reproduce_leaves_with_3_where_runs_are_left(
    paper, tmp_path, monkeypatch, capsys, tallies, code
):
    made = iter(tallies)
    monkeypatch.setattr("scalebench.launch.planning.plan_study", lambda study: study)

    def run_study(study, output, watcher, jobs):
        watcher.phase("virtual workers", 3)
        return next(made)

    monkeypatch.setattr("scalebench.launch.study_run.run_study", run_study)
    monkeypatch.setattr(
        "scalebench.cli.run_common.runs_left",
        lambda tally: f"{tally.remaining} runs are left",
    )
    where = [
        "--experiments",
        str(paper.folder.parent),
        "--results",
        str(tmp_path),
        "--output",
        str(tmp_path / "p"),
    ]
    with pytest.raises(SystemExit) as end:
        main.main(["reproduce", "mine", *where], prog_name="scalebench")
    assert end.value.code == code
    out, err = capsys.readouterr()
    assert ("mine-fig1: 2 runs are left" in out) is (code > 0)
    assert together(err, "mine-fig1", "1 of 2", "virtual", "3 runs")
    assert together(err, "mine-table2", "2 of 2", "virtual", "3 runs")
    *_, verdict, page = out.splitlines()
    assert in_order(verdict, "mine: Of 5 published numbers", "0 have ours", "0 lie")
    assert page == f"{tmp_path}/p/mine/index.html"


@pytest.mark.parametrize(
    ("strategy", "workers", "bound", "verdict"),
    [
        ("epoch_average", 64, {"at_least": 0.0}, "reproduced"),
        ("epoch_average", 64, {"at_least": 0.999}, "not reproduced"),
        ("epoch_average", 128, {"at_least": 0.0}, "not run"),
    ],
)
def test_a_verdict_follows_from_the_rows(results, strategy, workers, bound, verdict):
    check = {
        "study": "fig1",
        "quantity": "time_reduction@allreduce",
        "strategy": strategy,
        "workers": workers,
        **bound,
    }
    claim = Claim(claim="less time", source="abstract", why="", checks=[check])
    assert judge(claim, {"fig1": results}).verdict == verdict
    assert judge(claim, {}).verdict == "not run"


def test_claims_that_hold_in_part_and_without_checks(results):
    check = {
        "study": "fig1",
        "quantity": "time_reduction@allreduce",
        "strategy": "epoch_average",
        "workers": 64,
    }
    both = [{**check, "at_least": 0.0}, {**check, "at_least": 0.999}]
    assert (
        judge(
            Claim(claim="a", source="b", why="", checks=both), {"fig1": results}
        ).verdict
        == "partly"
    )
    assert (
        judge(Claim(claim="a", source="b", why=""), {"fig1": results}).verdict
        == "not testable here"
    )
    (ours,) = obtain(results, "final_metric", "epoch_average", 64)
    inside = [
        {**check, "quantity": "final_metric", "at_least": float(ours.measured.value)}
    ]
    assert (
        judge(
            Claim(claim="a", source="b", why="", checks=inside), {"fig1": results}
        ).verdict
        == "partly"
    )


def test_quantities_of_curves_and_times(results):
    (first,) = obtain(results, "metric_after_epoch@1", "epoch_average", 8)
    (last,) = obtain(results, "metric_after_epoch@6", "epoch_average", 8)
    (final,) = obtain(results, "final_metric", "epoch_average", 8)
    assert first.measured.value < last.measured.value == final.measured.value
    assert obtain(results, "metric_after_epoch@7", "epoch_average", 8) == []
    (reached,) = obtain(results, "epochs_to@0.9", "epoch_average", 8)
    assert 1 < reached.measured.value <= 6
    assert obtain(results, "epochs_to@1.5", "epoch_average", 8)[
        0
    ].measured.value == float("inf")
    (alone,) = [
        one
        for one in obtain(results, "epochs_to@0.9", "serial", 1)
        if one.execution == "virtual"
    ]
    (ideal,) = obtain(results, "ideal_speedup_to@0.9", "epoch_average", 8)
    assert ideal.measured.value == pytest.approx(
        8 * alone.measured.value / reached.measured.value
    )
    assert (
        obtain(results, "largest_workers", "epoch_average", None)[0].measured.value
        == 64
    )
    assert (
        obtain(results, "optimum_workers", "epoch_average", None)[0].measured.value
        == 64
    )

    def virtual(quantity, workers):
        found = obtain(results, quantity, "epoch_average", workers)
        return [one.measured.value for one in found if one.execution == "virtual"]

    saved = [
        value
        for workers in (2, 4, 8, 16, 32, 64)
        for value in virtual("time_reduction@allreduce", workers)
    ]
    assert virtual("largest_time_reduction@allreduce", None) == [max(saved)]
    assert obtain(results, "speedup_over@32", "epoch_average", 64)[0].measured.value > 1
    with pytest.raises(UsageError, match="unknown quantity 'epochs'"):
        obtain(results, "epochs@3", "serial", 1)


def test_quantities_that_compare_two_strategies(results):
    runs = results.runs.assign(
        lead_histogram='{"0": 5, "12": 1}',
        syncs=results.runs["label"].map({"epoch_average": 6}).fillna(60),
        epochs_to_target=3,
        target_metric=0.9,
        time_to_target_s=results.runs["train_s"] / 2,
    )
    made = replace(results, runs=runs)
    same = (runs["workers"] == 8) & (runs["execution"] == "virtual")
    own, other = (
        runs[same & (runs["label"] == label)]
        for label in ("epoch_average", "allreduce")
    )

    def one(quantity, of=made):
        return [one.measured.value for one in obtain(of, quantity, "epoch_average", 8)]

    ratio = own["train_s"].median() / other["train_s"].median()
    assert (
        one("time_over@allreduce")
        == one("target_time_over@allreduce")
        == [pytest.approx(ratio)]
    )
    assert one("target_time_reduction@allreduce") == one("time_reduction@allreduce")
    assert one("target_time_reduction@asp") == []
    assert one("fewer_syncs@allreduce") == [pytest.approx(10)]
    assert one("largest_lead") == [12]
    assert one("time_over@asp") == one("largest_lead", results) == []
    slow = runs.assign(
        time_to_target_s=runs["time_to_target_s"].where(
            runs["label"] != "epoch_average"
        )
    )
    assert one("target_time_over@allreduce", replace(results, runs=slow)) == [
        float("inf")
    ]
    slow.loc[slow["strategy"] == "allreduce", "time_to_target_s"] = None
    assert one("target_time_over@allreduce", replace(results, runs=slow)) == [], (
        "no ratio to what has no time"
    )


def test_a_number_at_one_place_is_drawn_and_several_along_their_arguments(tmp_path):
    def pair(quantity, strategy, workers, value):
        row = (
            quantity,
            strategy,
            workers,
            value,
            "epochs",
            "1",
            "fig1",
            "abstract",
            False,
            "",
        )
        published = Published.model_validate(dict(zip(COLUMNS, row, strict=True)))
        return Pair(
            published, Obtained(Measured(value + 1, value, value + 2, 3), "fitted")
        )

    def words(*pairs):
        assert draw(pairs, tmp_path / "drawn.svg")
        return (tmp_path / "drawn.svg").read_text()

    alone = words(pair("time_reduction@serial", "epoch_async", 64, 0.95))
    assert together(alone, "time reduction", "serial", "64 workers")
    assert "epoch_async" in alone
    against = words(
        *(
            pair(f"time_reduction@{name}", "epoch_async", 64, 0.95)
            for name in ("serial", "ddp")
        )
    )
    assert "epoch_async, ddp" in against
    along = words(
        *(pair(f"epochs_at_batch@{batch}", "", None, 30) for batch in (1024, 2048))
    )
    assert along.count("<!-- epochs at batch -->") == along.count("<!-- 2048 -->") == 1
    assert not draw(
        [Pair(pair("time_reduction@serial", "a", 4, 1).published, None, "not run")],
        tmp_path / "none.svg",
    )


def test_scales_and_figures_choose_studies(paper):
    assert paper.studies_of("1") == paper.studies_of("fig1") == ["fig1"]
    assert paper.studies_of(None) == ["fig1", "table2"]
    assert (
        paper.study_at("fig1", "smoke").epochs,
        paper.study_at("fig1", "smoke").repetitions,
    ) == (2, 1)
    assert paper.study_at("table2", "smoke").epochs == 2
    assert paper.study_at("fig1", "smoke").name == "mine-fig1-smoke"
    assert paper.study_at("fig1", "laptop").name == "mine-fig1"
    with pytest.raises(UsageError, match="--figure 7: mine has no study 'fig7'"):
        paper.studies_of("7")


def test_a_number_without_a_source_is_refused(tmp_path):
    path = tmp_path / "published.csv"
    path.write_text(
        f"{','.join(COLUMNS)}\nfinal_metric,serial,1,0.9,accuracy,Figure 1,fig1,,no,\n"
    )
    with pytest.raises(ResultsError, match=r"published\.csv, line 2: key 'source'"):
        read_published(path)


def test_the_command_lists_papers_and_names_an_unknown_one(paper, capsys):
    where = ["--experiments", str(paper.folder.parent)]
    with pytest.raises(SystemExit) as end:
        main.main(["reproduce", *where], prog_name="scalebench")
    assert end.value.code == 0
    assert "mine  a made-up paper\n    fig1, table2" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main.main(["reproduce", "mina", *where], prog_name="scalebench")
    assert end.value.code == 2
    assert "unknown paper 'mina'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main.main(["reproduce", "all", "--figure", "1", *where], prog_name="scalebench")
    assert end.value.code == 2


def test_redraw_runs_nothing_and_writes_a_page_of_each_paper(
    paper, results, tmp_path, capsys
):
    kept = [
        "--experiments",
        str(paper.folder.parent),
        "--results",
        str(results.folder.parent),
    ]
    with pytest.raises(SystemExit) as end:
        main.main(
            [
                "reproduce",
                "all",
                "--redraw",
                *kept,
                "--output",
                str(tmp_path / "plots"),
            ],
            prog_name="scalebench",
        )
    assert end.value.code == 0
    page = (tmp_path / "plots" / "mine" / "index.md").read_text()
    assert "1 study at scale laptop" in page
    assert "not run" in page


def test_the_page_has_each_plane_of_what_if_yaml(paper, tmp_path):
    (paper.folder / "what_if.yaml").write_text(
        "planes:\n  links:\n    description: By the speed of links.\n    model: alexnet\n    cluster: juwels-booster\n"
        "    step_time: 0.1\n    samples: 4096\n    vary: ['network-bandwidth=0.001x,1x']\n"
    )
    page = write_page(paper, {}, "laptop", tmp_path / "plots").path
    text = page.with_suffix(".md").read_text()
    assert "## What if: links\n\nBy the speed of links.\n\n- 2 cells, modelled:" in text
    assert together(text, "network bandwidth", "50 %")
    assert (page.parent / "what-if-links.svg").is_file()


def test_a_check_with_both_bounds_is_a_range():
    check = Check(study="fig1", quantity="efficiency", at_least=0.85, at_most=0.95)
    assert check.bound == "0.850 to 0.950"
    for low, high, holds in (
        (0.86, 0.94, True),
        (0.96, 0.99, False),
        (0.7, 0.8, False),
        (0.9, 0.99, None),
    ):
        assert (
            check.holds(Obtained(Measured((low + high) / 2, low, high, 3), "modelled"))
            is holds
        )


@pytest.fixture(scope="module")
def plan():
    return read_plans(FOLDER / "plans.yaml")["resnet50"]


def test_components_are_all_layers_and_move_fewer_numbers_than_data_parallelism(plan):
    components = plan.components()
    assert [(components[0].first, components[-1].last)] == [("stem", "head")]
    assert (
        sum(each.parameters for each in components)
        == load_layers("resnet50").parameters
    )
    assert {each.degree for each in components} > {1}
    assert 0 < plan.numbers_saved() < 1


def test_memory_is_that_of_the_fullest_worker_of_each_strategy(plan):
    memories = {
        name.partition("(")[0]: memory for name, memory in plan.memories().items()
    }
    assert memories["serial"].activations == 8 * memories["ddp"].activations
    assert (
        memories["serial"].parameters
        == memories["ddp"].parameters
        > memories["hybrid"].parameters
    )
    assert memories["model_parallel"].parameters < memories["hybrid"].parameters


def test_a_plan_is_drawn(plan, tmp_path):
    plan.draw(tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    assert text.startswith("<?xml")
    assert "stage4_3" in text


def test_a_plan_that_is_not_one_is_refused(tmp_path):
    (tmp_path / "plans.yaml").write_text(
        "plans:\n  mine: {description: it, model: resnet50, devices: 0}\n"
    )
    with pytest.raises(StudyError, match=r"plans\.yaml"):
        read_plans(tmp_path / "plans.yaml")
    assert read_plans(tmp_path / "none.yaml") == {}
