"""The description in LaTeX, in Markdown and as a script, for hostile names."""

from __future__ import annotations

import csv
import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scalebench.analysis import load
from scalebench.artifact.anonymising import Shipment
from scalebench.artifact.artifact_description import (
    Description,
    PaperFile,
    describe,
    escape_markdown,
    latex_link,
    render,
)
from scalebench.artifact.verification import expected_again
from scalebench.figures.plotting import Drawn
from scalebench.records.store import Store
from scalebench.study.spec import Study
from scalebench.tables.latex import escape_latex
from tests.facts import together
from tests.records_factory import study_rows

NASTY = (
    r"50 % & more_of #1 {~^\} $x$ <b>|</b> `ls` \input{/etc/passwd} %%% --- '' ,, é ł 日本 🎉"
    + "\x00\x1b\u202e\n"
)
# Commands that escaped text may hold.
COMMAND = re.compile(
    r"\\(?:text(?:backslash|asciicircum|asciitilde|less|greater|bar|quotedbl|asciigrave)|pounds|S|dots)\{\}"
    r"|\\ensuremath\{\\(?:mu|times|dagger|pm|rightarrow|infty|Delta)\}|\\textsuperscript\{2\}|\\[{}$&#%_]|\{\}"
)


@given(st.text())
@example("µ×†±→∞Δ²–—£§…“”‘’")
def test_escaped_latex_holds_only_known_commands(text):
    rest = COMMAND.sub("", escape_latex(text))
    assert not set(rest) & set('\\{}$&#%_^~<>|"\n\x00'), rest
    assert all(
        0x20 <= ord(character) < 0x7F or 0xC0 <= ord(character) <= 0x17F
        for character in rest
    )


@given(
    st.text(
        alphabet=st.characters(
            min_codepoint=0x20, max_codepoint=0x7E, exclude_characters="-,'"
        )
    )
)
def test_escaped_latex_is_set_as_the_original_text(text):
    """Replacing each command by the character that it sets undoes the escaping."""
    sets = {
        "\\textbackslash{}": "\\",
        "\\textasciicircum{}": "^",
        "\\textasciitilde{}": "~",
        "\\textless{}": "<",
        "\\textgreater{}": ">",
        "\\textbar{}": "|",
        "\\textquotedbl{}": '"',
        "\\textasciigrave{}": "`",
    } | {f"\\{character}": character for character in "{}$&#%_"}
    longest_first = sorted(sets, key=len, reverse=True)
    whole = re.compile("|".join(map(re.escape, longest_first)))
    assert whole.sub(lambda found: sets[found[0]], escape_latex(text)) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--rerun", "-{}-rerun"),
        ("a---b", "a-{}-{}-b"),
        ("2–3", "2--3"),
        ("x''", "x'{}'"),
        ("Lovelacé Wałęsa Đà", "Lovelacé Wałęsa Đà"),
        ("ħĦ", "U+0127U+0126"),
        ("日本", "U+65E5U+672C"),
        ("ﬁne", "fine"),
        ("1.5 µs ×", r"1.5 \ensuremath{\mu}s \ensuremath{\times}"),
        ("a\x00b\tc", "ab c"),
    ],
)
def test_escape_latex_of_letters_and_ligatures(text, expected):
    assert escape_latex(text) == expected


def test_only_safe_addresses_become_links():
    assert latex_link("https://example.org/a_b~c") == r"\url{https://example.org/a_b~c}"
    assert escape_latex(latex_link("https://x.org/}\\input{y}")).count("\\input") == 0


@given(st.text())
def test_escaped_markdown_is_one_line_without_markup(text):
    escaped = escape_markdown(text)
    assert len(escaped.splitlines()) <= 1
    assert not re.search(r"(?<!\\)(?:\\\\)*[<>`*_|\[\]]", escaped)


@pytest.fixture
def description(tmp_path) -> Description:
    with Store(tmp_path / "mine", fsync=False) as store:
        for run, epochs in study_rows(
            workers=(1, 4), native_workers=(1, 2), repetitions=2
        ):
            store.append(
                run.model_copy(
                    update={
                        "dataset": NASTY,
                        "model": NASTY,
                        "git_commit": "0123abcd" * 5,
                    }
                ),
                epochs,
            )
        store.keep_provenance(
            {
                "cpu": {"model": NASTY, "usable_cores": 2},
                "packages": {"numpy": "2.4.6"},
                "gpus": [NASTY],
            }
        )
    paper = PaperFile.model_validate(
        {
            "title": NASTY,
            "authors": [{"name": NASTY, "affiliation": NASTY}],
            "contributions": [{"text": NASTY, "figures": ["strong-scaling"]}],
            "elements": {"strong-scaling": NASTY},
        }
    )
    drawn = [Drawn("strong-scaling", [Path("x.csv")]), Drawn("agreement", [], NASTY)]
    return describe(
        load(tmp_path / "mine"), drawn, paper, Shipment(missing=["inputs/x"])
    )


def test_latex_is_balanced_for_hostile_names(description):
    text = render("artifact-description.tex", description)
    assert text.isascii() or not re.search(r"[^\x00-\x7fÀ-ſ]", text)
    assert "\\input" not in text
    lines = [re.sub(r"(?<!\\)%.*", "", line) for line in text.splitlines()]
    body = re.sub(r"\\[\\{}]", "", "\n".join(lines))
    assert body.count("{") == body.count("}")
    opened = re.findall(r"\\(begin|end)\{(\w+\*?)\}", body)
    stack: list[str] = []
    for kind, name in opened:
        if kind == "begin":
            stack.append(name)
        else:
            assert stack.pop() == name
    assert not stack
    table = body[body.index(r"\caption{Expected") :]
    rows = [
        line
        for line in table[: table.index(r"\end{table*}")].splitlines()
        if line.count("&")
    ]
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {
        len(description.expected.columns) - 1
    }


def compiles_latex():
    """Return True if pdflatex is here with the class of the documents, which small installations lack."""
    found = shutil.which("pdflatex") and shutil.which("kpsewhich")
    return (
        bool(found)
        and subprocess.run(
            ["kpsewhich", "IEEEtran.cls"], capture_output=True
        ).returncode
        == 0
    )


@pytest.mark.skipif(not compiles_latex(), reason="no pdflatex with IEEEtran here")
def test_pdflatex_compiles_hostile_names(description, tmp_path):
    (tmp_path / "artifact.tex").write_text(
        render("artifact-description.tex", description), encoding="utf-8"
    )
    command = [
        "pdflatex",
        "-no-shell-escape",
        "-interaction=nonstopmode",
        "-halt-on-error",
        "artifact.tex",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-2000:]
    assert (tmp_path / "artifact.pdf").read_bytes().startswith(b"%PDF")


def test_latex_has_the_sections_of_an_sc_description(description):
    text = render("artifact-description.tex", description)
    parts = [
        "Overview of Contributions and Artifacts",
        "Paper's Main Contributions",
        "Computational Artifacts",
        "Artifact Identification",
        "Relation To Contributions",
        "Expected Results",
        "Expected Reproduction Time (in Minutes)",
        "Artifact Setup (incl. Inputs)",
        "Hardware",
        "Software",
        "Datasets / Inputs",
        "Installation and Deployment",
        "Artifact Execution",
        "Artifact Analysis (incl. Outputs)",
    ]
    heads = re.findall(r"\\(?:sub)*(?:section|paragraph)\*?\{(.+)\}", text)
    assert [head for head in heads if head in parts] == parts


def test_markdown_has_a_row_for_each_expected_result(description):
    text = render("README.md", description)
    assert "<b>" not in text
    assert description.expected.rows
    for strategy, workers, *_ in description.expected.rows:
        cells = f"| {escape_markdown(str(strategy.text))} | {workers.text} |"
        assert any(line.startswith(cells) for line in text.splitlines())


def test_expected_results_take_largest_count_without_oversubscription(description):
    counts = {
        (row[0].text, row[-1].text): row[1].number.value
        for row in description.expected.rows
    }
    assert counts["allreduce", "virtual"] == 4
    assert counts["allreduce", "native mpi"] == 2


def test_script_is_valid_bash_for_hostile_names(description, tmp_path):
    (tmp_path / "reproduce.sh").write_text(
        render("reproduce.sh", description), encoding="utf-8"
    )
    subprocess.run(["bash", "-n", tmp_path / "reproduce.sh"], check=True)
    done = subprocess.run(
        ["bash", tmp_path / "reproduce.sh", "--what"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "usage: ./reproduce.sh" in done.stderr) == (2, True)


def sandbox(description, folder):
    """The script beside commands that write their arguments to ASKED; SAYS is the exit code of `scalebench compare`."""
    folder.mkdir()
    with_study = replace(
        description, shipment=Shipment(study=Study(name="mine"), has_calibration=True)
    )
    (folder / "reproduce.sh").write_text(
        render("reproduce.sh", with_study), encoding="utf-8"
    )
    (folder / "empty").touch()
    (folder / "SHA256SUMS").write_text(f"{hashlib.sha256(b'').hexdigest()}  empty\n")
    tools = folder / "environment" / "bin"
    tools.mkdir(parents=True)
    record = '#!/bin/sh\necho "$(basename "$0") $*" >> "$ASKED"\n[ "$1" != compare ] || exit "${SAYS:-0}"\n'
    for name in ("python", "pip", "scalebench"):
        (tools / name).write_text(record)
        (tools / name).chmod(0o755)
    return folder


def reproduce(folder, *arguments, says=0):
    asked = folder / "asked.txt"
    asked.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "SAYS": str(says),
        "ASKED": str(asked),
        "PYTHON": sys.executable,
    }
    command = ["bash", folder / "reproduce.sh", *arguments]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done, asked.read_text().splitlines()


@pytest.mark.parametrize("option", ["--rerun", "--rerun-virtual"])
def test_rerun_that_differs_from_the_records_fails(description, tmp_path, option):
    folder = sandbox(description, tmp_path / "artifact")
    done, asked = reproduce(folder, option)
    assert done.returncode == 0, done.stderr
    assert together(done.stdout, "again", "agrees", "records")
    compared = [line for line in asked if line.startswith("scalebench compare")]
    assert "--execution virtual" in compared[0]
    assert "--fail-on regression --fail-on missing" in compared[0]
    assert len(compared) == (2 if option == "--rerun" else 1)
    if option == "--rerun":
        assert "--execution native" in compared[1]
        assert "--fail-on repeatable-metric --fail-on failed" in compared[1]
    assert (
        len(
            [
                line
                for line in asked
                if "pip install" in line
                and "scalebench-" in line
                and "no-deps" not in line
            ]
        )
        == 1
    )
    assert any("[mpi]" in line for line in asked) == (option == "--rerun")
    done, asked = reproduce(folder, option, says=1)
    assert done.returncode == 1
    assert "differs from the records" in done.stderr
    assert len(
        [line for line in asked if line.startswith("scalebench compare")]
    ) == len(compared)


def test_script_writes_step_times(description, tmp_path):
    folder = sandbox(description, tmp_path / "artifact")
    reproduce(folder, "--rerun")
    rows = list(csv.DictReader((folder / "times.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == [
        "install again",
        "draw",
        "install to run",
        "run",
        "compare",
    ]
    assert all(0 <= int(row["seconds"]) < 60 for row in rows)


@pytest.mark.parametrize(
    ("shipment", "said", "asked"),
    [
        (Shipment(Study(), has_calibration=True), "with the calibration in the artifact give the same times", "regres"),
        (Shipment(Study(), is_stated=True), "nothing of them is measured: run again, on whatever machine, they give the"
         " same times", "regression"),
        (Shipment(Study()), "the times of the machine that runs them", "repeatable-metric"),
    ],
    ids=["calibrated", "stated", "lost"],
)  # fmt: skip
def test_virtual_rerun_is_judged_by_its_calibration(description, shipment, said, asked):
    again = expected_again(["virtual", "native"], shipment)
    told = replace(
        description, shipment=shipment, executions=("virtual", "native"), again=again
    )
    for text in (render("README.md", told), render("artifact-description.tex", told)):
        assert said in " ".join(text.replace("\\_", "_").split())
        assert together(text, "Native times", "machine", "below")
        assert "Paced" not in text
    (line,) = [
        line
        for line in render("reproduce.sh", told).splitlines()
        if "compare --execution virtual" in line
    ]
    assert f"--fail-on {asked}" in line
    assert ("--ignore calibration" in line) == (asked == "repeatable-metric")
