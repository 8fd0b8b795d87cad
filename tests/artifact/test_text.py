"""Names stay text: in LaTeX, in Markdown and in the script."""

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
from hypothesis import given
from hypothesis import strategies as st

from scalebench.analysis import load
from scalebench.artifact.again import expected_again
from scalebench.artifact.contents import Description, describe
from scalebench.artifact.minutes import expected_minutes
from scalebench.artifact.paper import Paper
from scalebench.artifact.shipping import Shipment
from scalebench.artifact.text import escape_latex, escape_markdown, latex, latex_link, markdown, script
from scalebench.figures.plotting import Drawn
from scalebench.records.store import Store
from scalebench.study.spec import Study
from tests.records_factory import run_row, study_rows

NASTY = r"50 % & more_of #1 {~^\} $x$ <b>|</b> `ls` \input{/etc/passwd} %%% --- '' ,, é ł 日本 🎉" + "\x00\x1b\u202e\n"
# What may stand in the text that LaTeX reads: itself, or one of these commands.
COMMAND = re.compile(
    r"\\(?:text(?:backslash|asciicircum|asciitilde|less|greater|bar|quotedbl|asciigrave)|pounds|S|dots)\{\}"
    r"|\\ensuremath\{\\(?:mu|times|pm)\}|\\textsuperscript\{2\}|\\[{}$&#%_]|\{\}"
)


@given(st.text())
def test_latex_reads_no_command_that_we_did_not_write(text):
    rest = COMMAND.sub("", escape_latex(text))
    assert not set(rest) & set('\\{}$&#%_^~<>|"\n\x00'), rest
    assert all(0x20 <= ord(character) < 0x7F or 0xC0 <= ord(character) <= 0x17F for character in rest)


@given(st.text(alphabet=st.characters(min_codepoint=0x20, max_codepoint=0x7E, exclude_characters="-,'")))
def test_what_latex_sets_is_what_was_written(text):
    """Escaping is undone by reading each command as the character it sets."""
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
def test_letters_and_ligatures(text, expected):
    assert escape_latex(text) == expected


def test_only_a_plain_address_becomes_a_link():
    assert latex_link("https://example.org/a_b~c") == r"\url{https://example.org/a_b~c}"
    assert escape_latex(latex_link("https://x.org/}\\input{y}")).count("\\input") == 0


@given(st.text())
def test_markdown_is_one_line_without_markup(text):
    escaped = escape_markdown(text)
    assert len(escaped.splitlines()) <= 1
    assert not re.search(r"(?<!\\)(?:\\\\)*[<>`*_|\[\]]", escaped)


@pytest.fixture
def description(tmp_path) -> Description:
    with Store(tmp_path / "mine", fsync=False) as store:
        for run, epochs in study_rows(workers=(1, 4), native_workers=(1, 2), repetitions=2):
            store.append(
                run.model_copy(update={"dataset": NASTY, "model": NASTY, "git_commit": "0123abcd" * 5}), epochs
            )
        store.keep_provenance(
            {"cpu": {"model": NASTY, "usable_cores": 2}, "packages": {"numpy": "2.4.6"}, "gpus": [NASTY]}
        )
    paper = Paper.model_validate(
        {
            "title": NASTY,
            "authors": [{"name": NASTY, "affiliation": NASTY}],
            "contributions": [{"text": NASTY, "figures": ["strong-scaling"]}],
            "elements": {"strong-scaling": NASTY},
        }
    )
    drawn = [Drawn("strong-scaling", [Path("x.csv")]), Drawn("agreement", [], NASTY)]
    return describe(load(tmp_path / "mine"), drawn, paper, Shipment(missing=["inputs/x"]))


def test_a_latex_document_is_balanced_whatever_the_names(description):
    text = latex(description)
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
    rows = [line for line in table[: table.index(r"\end{table*}")].splitlines() if line.count("&")]
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(description.header) - 1}


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here")
def test_latex_sets_the_document_whatever_the_names(description, tmp_path):
    (tmp_path / "artifact.tex").write_text(latex(description), encoding="utf-8")
    command = ["pdflatex", "-no-shell-escape", "-interaction=nonstopmode", "-halt-on-error", "artifact.tex"]
    said = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert said.returncode == 0, said.stdout.decode(errors="replace")[-2000:]
    assert (tmp_path / "artifact.pdf").read_bytes().startswith(b"%PDF")


def test_the_description_has_the_parts_that_sc_asks_for(description):
    text = latex(description)
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


def test_markdown_shows_every_expected_result_as_a_row(description):
    text = markdown(description)
    assert "<b>" not in text
    assert description.expected
    for row in description.expected:
        assert any(line.startswith(f"| {escape_markdown(row[0])} | {row[1]} |") for line in text.splitlines())


def test_expected_results_are_those_at_the_largest_count_that_was_fed(description):
    counts = {(row[0], row[-1]): int(row[1]) for row in description.expected}
    assert counts["allreduce", "virtual"] == 4
    assert counts["allreduce", "native mpi"] == 2


def test_the_script_is_bash_whatever_the_study(description, tmp_path):
    (tmp_path / "reproduce.sh").write_text(script(description), encoding="utf-8")
    subprocess.run(["bash", "-n", tmp_path / "reproduce.sh"], check=True)
    done = subprocess.run(["bash", tmp_path / "reproduce.sh", "--what"], capture_output=True, text=True, check=False)
    assert (done.returncode, "usage: ./reproduce.sh" in done.stderr) == (2, True)


def sandbox(description, folder):
    """The script beside commands that only say what they were asked; SAYS is what `scalebench compare` leaves with."""
    folder.mkdir()
    with_study = replace(description, shipment=Shipment(study=Study(name="mine"), has_calibration=True))
    (folder / "reproduce.sh").write_text(script(with_study), encoding="utf-8")
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
    environment = {**os.environ, "SAYS": str(says), "ASKED": str(asked), "PYTHON": sys.executable}
    command = ["bash", folder / "reproduce.sh", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    return done, asked.read_text().splitlines()


@pytest.mark.parametrize("option", ["--rerun", "--rerun-virtual"])
def test_a_rerun_that_differs_from_the_records_fails(description, tmp_path, option):
    folder = sandbox(description, tmp_path / "artifact")
    done, asked = reproduce(folder, option)
    assert done.returncode == 0, done.stderr
    assert "what was run again agrees with the records" in done.stdout
    compared = [line for line in asked if line.startswith("scalebench compare")]
    assert "--execution virtual" in compared[0]
    assert "--fail-on regression --fail-on missing" in compared[0]
    assert len(compared) == (2 if option == "--rerun" else 1)
    if option == "--rerun":
        assert "--execution native" in compared[1]
        assert "--fail-on repeatable-metric --fail-on failed" in compared[1]
    assert (
        len([line for line in asked if "pip install" in line and "scalebench-" in line and "no-deps" not in line]) == 1
    )
    assert any("[mpi]" in line for line in asked) == (option == "--rerun")
    done, asked = reproduce(folder, option, says=1)
    assert done.returncode == 1
    assert "differs from the records" in done.stderr
    assert len([line for line in asked if line.startswith("scalebench compare")]) == len(compared), "the rest is shown"


def test_the_script_tells_what_its_steps_took(description, tmp_path):
    folder = sandbox(description, tmp_path / "artifact")
    reproduce(folder, "--rerun")
    rows = list(csv.DictReader((folder / "times.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == ["install again", "draw", "install to run", "run", "compare"]
    assert all(0 <= int(row["seconds"]) < 60 for row in rows)


@pytest.fixture
def timeless(tmp_path, monkeypatch):
    """A study of which nothing was timed, on a machine where no Horovod was built."""
    monkeypatch.setattr("scalebench.artifact.minutes.build_seconds", lambda: None)
    with Store(tmp_path / "mine", fsync=False) as store:
        for number in range(10):
            began = f"2026-11-21T08:{number:02d}:00.000+00:00"
            store.append(run_row(run_id=f"v{number}", repetition=number, started_utc=began))
        native = {"execution": "native", "engine": "horovod", "strategy": "horovod", "train_s": 89.0, "eval_s": 1.0}
        store.append(run_row(run_id="n", started_utc="2026-11-21T09:00:00.000+00:00", **native))
    return tmp_path / "mine"


def test_execution_follows_from_the_records_and_what_was_not_timed_is_said(timeless):
    """Ten virtual runs that began a minute apart take ten minutes; one native run of 90 s takes two."""
    minutes = expected_minutes(load(timeless))
    assert (minutes.virtual, minutes.native, minutes.execution) == (10, 2, 12)
    assert {minutes.said(part) for part in ("setup", "setup_rerun", "analysis")} == {"not timed"}


def test_minutes_are_what_commands_and_the_script_took(timeless, tmp_path, monkeypatch):
    (timeless / "durations.json").write_text('{"run": 900.5, "plot": 61}')
    minutes = expected_minutes(load(timeless))
    assert (minutes.execution, minutes.analysis, minutes.setup) == (16, 2, None)
    monkeypatch.setattr("scalebench.artifact.minutes.build_seconds", lambda: 170.0)
    minutes = expected_minutes(load(timeless))
    assert minutes.said("setup_rerun") == "not timed, but for building Horovod: 3"
    (tmp_path / "times.csv").write_text("step,seconds\ninstall,50\ndraw,200\ninstall again,2\ninstall to run,250\n")
    minutes = expected_minutes(load(timeless), tmp_path)
    assert (minutes.setup, minutes.setup_rerun, minutes.analysis) == (1, 5, 4)
    (tmp_path / "times.csv").write_text("edited by hand")
    assert expected_minutes(load(timeless), tmp_path).setup is None


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
def test_what_virtual_runs_give_again_is_said_and_judged_by_what_charged_them(description, shipment, said, asked):
    again = expected_again({"virtual": ["allreduce"], "native": ["allreduce"]}, shipment)
    told = replace(description, shipment=shipment, executions=("virtual", "native"), again=again)
    for text in (markdown(told), latex(told)):
        assert said in " ".join(text.replace("\\_", "_").split())
        assert "Native times depend on the machine: on the one described below" in text
        assert "Paced" not in text
    (line,) = [line for line in script(told).splitlines() if "compare --execution virtual" in line]
    assert f"--fail-on {asked}" in line
    assert ("--ignore calibration" in line) == (asked == "repeatable-metric")


@pytest.mark.parametrize("execution", ["native", "paced"])
def test_metrics_of_strategies_that_race_are_not_promised_again(execution):
    """Which worker arrives first is no matter of the seed: two native runs of `asp` end with other weights."""
    (steady,) = expected_again({execution: ["allreduce", "bsp", "local_sgd"]}, Shipment())
    assert steady.endswith("Metrics vary with the order of sums only.")
    (mixed,) = expected_again({execution: ["asp", "allreduce", "epoch_async", "asp", "not-installed"]}, Shipment())
    assert "sums only; those of asp, epoch_async and not-installed vary with the order in which workers arrive" in mixed
    (racing,) = expected_again({execution: ["asp", "asp"]}, Shipment())
    assert "Metrics vary with the order in which workers arrive" in racing


def test_nor_are_those_of_virtual_runs_whose_times_are_lost():
    (steady,) = expected_again({"virtual": ["allreduce"]}, Shipment(Study()))
    assert steady.endswith("the metrics of the records and the times of the machine that runs them.")
    (mixed,) = expected_again({"virtual": ["allreduce", "asp"]}, Shipment(Study()))
    assert "; only the metrics of asp vary with these times" in mixed
    (racing,) = expected_again({"virtual": ["asp"]}, Shipment(Study()))
    assert "metrics of the records" not in racing
    for kept in (Shipment(Study(), has_calibration=True), Shipment(Study(), is_stated=True)):
        assert "same times and metrics" in expected_again({"virtual": ["asp"]}, kept)[0]


def test_the_description_says_it_of_the_strategies_that_ran(tmp_path):
    with Store(tmp_path / "mine", fsync=False) as store:
        for number, name in enumerate(("allreduce", "asp")):
            store.append(run_row(run_id=f"n{number}", execution="native", engine="mpi", strategy=name))
    (said,) = describe(load(tmp_path / "mine"), [], Paper(), Shipment()).again
    assert "those of asp vary with the order in which workers arrive" in said
