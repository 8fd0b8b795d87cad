"""The page: well-formed HTML, self-contained, texts of records escaped."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from scalebench.cli.report import report
from scalebench.errors import ResultsError
from scalebench.records.store import Store
from scalebench.report.page import write_report
from tests.facts import together
from tests.records_factory import keep_study, run_row, study_rows

VOID = {"meta", "link", "br", "hr", "img", "input"}
NASTY = [
    *(
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "</style><script>1</script>",
        "{{ 7 * 7 }}",
    ),
    *(
        "=cmd()",
        "javascript:alert(1)",
        "a\x07b",
        "]]>",
        "&lt;b&gt;",
        "../../x",
        "{% raw %}",
    ),
]


class Reader(HTMLParser):
    """Collect the elements and texts of a page, and elements that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.shown: list[str] = []
        self.faults: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.shown.append(data)

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def read(text: str) -> Reader:
    return Reader(text)


def test_html_is_well_formed_with_unique_ids(read):
    assert (read.faults, read.open) == ([], [])
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) > 20
    targets = {
        attributes["href"][1:]
        for attributes in read.named("a")
        if attributes["href"].startswith("#")
    }
    assert targets <= set(ids)


def test_page_references_nothing_external(read, text):
    for tag, attributes in read.elements:
        for name in ("src", "href", "srcset", "poster", "action", "data", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (
                tag,
                attributes,
            )
    assert not re.search(
        r"url\((?!#)|@import|https?://", re.sub(r'href="data:[^"]*"', "", text)
    )


def test_policy_allows_own_style_and_script_only(read, text):
    policy = next(
        item["content"] for item in read.named("meta") if item.get("http-equiv")
    )
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not [
        name
        for _, attributes in read.elements
        for name in attributes
        if name == "style" or name.startswith("on")
    ]


def test_answer_comes_first(read):
    shown = " ".join(" ".join(read.shown).split())
    at = shown.index("How much time does synchronising less often save")
    assert at < 200
    assert re.match(
        r".*?At 64 workers, epoch_\w+ takes \d+\s% less time than per-batch allreduce \(",
        shown[at : at + 250],
    )
    headings = [tag for tag, _ in read.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == "h1"
    assert headings.count("h1") == 1
    assert all(
        int(after[1]) <= int(before[1]) + 1 for before, after in pairwise(headings)
    )


def test_page_has_every_section(read):
    shown = " ".join(" ".join(read.shown).split())
    for part in (
        "What is known beforehand.",
        "mlp(hidden=[128]) (9,610 parameters), float32",
        "rank 3 died: SIGKILL",
        "Abacus 9000",
        "scalebench run study.yaml",
        "weak-scaling (the study scales strongly; see strong-scaling)",
        "Checksums (SHA-256)",
    ):
        assert part in shown


def test_figures_have_text_alternatives_with_numbers(read):
    pictures = [
        attributes for _, attributes in read.elements if attributes.get("role") == "img"
    ]
    assert (
        len(pictures)
        == len(
            [1 for attributes in read.elements if attributes[1].get("class") == "panel"]
        )
        > 20
    )
    for picture in pictures:
        assert re.search(
            r"against .*\. \S.* \((native|virtual)\): -?[\d.,]+ at \d",
            picture["aria-label"],
        ), picture
    figures = {attributes["id"] for attributes in read.named("figure")}
    assert figures >= {
        "time-reduction",
        "strong-scaling",
        "convergence",
        "breakdown",
        "agreement",
    }


def test_tables_have_headings_and_numeric_sort_keys(read):
    tables = read.named("table")
    assert len(tables) == 6
    assert all(table["aria-labelledby"] for table in tables)
    assert all(head["scope"] == "col" for head in read.named("th"))
    numbers = [
        cell["data-key"] for cell in read.named("td") if cell.get("class") == "number"
    ]
    assert len(numbers) > 300
    assert all(key == "" or float(key) is not None for key in numbers)


def test_study_yaml_can_be_downloaded_from_the_page(read):
    (link,) = [attributes for attributes in read.named("a") if "download" in attributes]
    study = base64.b64decode(link["href"].partition(",")[2]).decode()
    assert study.startswith("name: synthetic\n")


def test_same_records_give_same_bytes(small, page, tmp_path):
    cached, again = (
        write_report(small.folder, tmp_path / f"{jobs}.html", jobs) for jobs in (1, 2)
    )
    assert cached.read_bytes() == again.read_bytes()
    assert cached.stat().st_size < page.stat().st_size < 3_000_000


@pytest.fixture(scope="module")
def nasty(tmp_path_factory) -> Path:
    """A study whose texts look like HTML, templates, paths and formulas."""
    folder = tmp_path_factory.mktemp("nasty") / "study"
    shared = (
        "study",
        "model",
        "dataset",
        "cluster",
        "optimizer",
        "partition",
        "shuffle",
        "lr_policy",
        "device",
    )
    same = dict.fromkeys(shared, f"../../x{NASTY[0]}") | {
        "workers": 2,
        "git_commit": NASTY[0],
    }
    with Store(folder, fsync=False) as store:
        store.append(run_row(run_id="base", **same))
        for number, text in enumerate(NASTY):
            options = {"strategy": text, "strategy_options": {text: text}}
            store.append(run_row(run_id=f"run-{number}", **same, **options))
        store.append(
            run_row(
                run_id="f", status="failed", error=" ".join(NASTY), train_s=None, **same
            )
        )
        keep_study(store.folder, {"name": NASTY[0], "description": " ".join(NASTY)})
        store.keep_provenance(
            {text: {text: [text]} for text in NASTY}
            | {"packages": {NASTY[0]: NASTY[1]}}
        )
    return folder


def test_hostile_names_stay_text_and_inside_plots(nasty, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = write_report(nasty)
    assert page.parts[0] == "plots"
    assert ".." not in page.parts
    assert len(page.parts) == 3
    text = page.read_text(encoding="utf-8")
    read = Reader(text)
    assert (read.faults, read.open) == ([], [])
    assert len(read.named("script")) == len(read.named("style")) == 1
    assert not read.named("img")
    assert "<script>alert(1)</script>" in "".join(read.shown)
    assert "{{ 7 * 7 }}" in "".join(read.shown)
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", text)
    assert all(
        (link["href"] or "").startswith(("#", "data:")) for link in read.named("a")
    )


def test_report_holds_no_home_or_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-of-alice")
    leak = "cannot read /home/alice/data.npz with s3cr3t-of-alice at https://alice:pw@host/"
    with Store(tmp_path / "study", fsync=False) as store:
        store.append(run_row())
        store.append(run_row(run_id="lost", status="failed", error=leak, train_s=None))
        keep_study(
            store.folder,
            {
                "name": "x",
                "description": leak,
                "dataset": {"npz": {"path": "/home/alice/data.npz"}},
            },
        )
        store.keep_provenance(
            {"cpu": {"model": leak}, "environment": {"OMP_PLACES": leak}}
        )
    text = write_report(tmp_path / "study", tmp_path / "r.html").read_text()
    (link,) = [item["href"] for item in Reader(text).named("a") if "download" in item]
    for told in (text, base64.b64decode(link.partition(",")[2]).decode()):
        assert "alice" not in told
        assert "~/data.npz" in told


@pytest.mark.parametrize(
    "rows",
    [
        [run_row()],
        [run_row(status="failed", train_s=None, error="lost")],
        [
            run_row(
                workers=2,
                final_metric=None,
                metric_name=None,
                parameters=None,
                n_train=None,
            )
        ],
        [run_row(strategy="epoch_average", workers=8)],
        [
            run_row(
                run_id=s, strategy=s, execution="paced", engine="mpi", paced_overrun=0.5
            )
            for s in "ab"
        ],
        [
            run_row(run_id=str(n), workers=n, scaling="weak", batch_policy="global")
            for n in (1, 2)
        ],
    ],
    ids=["one run", "nothing completed", "no metric", "no baseline", "paced", "weak"],
)
def test_minimal_studies_have_a_report(rows, tmp_path):
    with Store(tmp_path / "study", fsync=False) as store:
        for row in rows:
            store.append(row)
    read = Reader(write_report(tmp_path / "study", tmp_path / "r.html").read_text())
    assert (read.faults, read.open) == ([], [])
    shown = " ".join(" ".join(read.shown).split())
    assert "These records cannot answer it" in shown or "No saving is stated" in shown
    assert together(shown, "records", "nothing", "where")
    assert "These records lack their study.yaml" in shown


def test_damaged_provenance_is_skipped(keep, tmp_path):
    results = keep(
        study_rows(
            strategies=("allreduce",), workers=(1,), native_workers=(), repetitions=1
        )
    )
    for name, damage in (
        ("a", b"{"),
        ("b", b"[1]"),
        ("c", b"\xff\xfe"),
        ("d", json.dumps({"packages": 7}).encode()),
    ):
        (results.folder / "provenance" / f"{name}.json").write_bytes(damage)
    shown = "".join(
        Reader(write_report(results.folder, tmp_path / "r.html").read_text()).shown
    )
    assert "Abacus 9000" in shown


def test_command_reports_newest_study_beside_its_figures(small, tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "one").symlink_to(small.folder)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(report, [])
    assert (done.exit_code, done.stdout) == (0, "plots/synthetic/report.html\n")
    assert (tmp_path / "plots/synthetic/report.html").is_file()


def test_missing_records_or_unwritable_output_is_refused(small, tmp_path):
    with pytest.raises(ResultsError, match=r"holds no runs\.csv"):
        write_report(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ResultsError, match=r"cannot write .*report.html.*--output"):
        write_report(small.folder, tmp_path / "file" / "report.html")
