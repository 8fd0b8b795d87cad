"""The pages of the documentation: their commands run, every figure has its entry, pictures and links exist.

A ```sh block of README.md and of the tutorials is executed unless a comment above it
gives the reason why not: `<!-- not run: REASON -->`. `<!-- run with: FLAGS -->` makes
`scalebench run` small, or `plot` quick: the n-th such comment belongs to the n-th of
these commands (the last one to all that follow). A block whose first line is a comment
with a file name is that file.
"""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from scalebench import __version__
from scalebench.figures import figure_names
from tests.artifact.test_artifact_description import compiles_latex
from tests.facts import together

ROOT = Path(__file__).parents[1]
# Pages of one folder, in the order in which they are read.
PAGES = {
    "readme": ["README.md"],
    "one study": [
        f"docs/tutorials/{name}.md"
        for name in ("first-study", "reading-the-numbers", "figure-for-a-paper")
    ],
    "own": ["docs/tutorials/own-model-data-strategy.md"],
    "slurm": ["docs/tutorials/laptop-to-slurm.md"],
    "parts": ["docs/tutorials/parts-of-a-model.md"],
}
SHRUNK = ("run", "plot", "predict")
FENCE = re.compile(r"((?:<!--.*?-->\n)*)```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"[#%] ([\w-]+\.(?:py|yaml|tex))\n")
LINK = re.compile(r"\]\(([^)#:]+\.(?:md|png))(?:#[\w-]+)?\)")


class Block(NamedTuple):
    """A fenced block with the comments above it."""

    comments: str
    language: str
    text: str

    @property
    def flags(self) -> list[list[str]]:
        return [
            shlex.split(words)
            for words in re.findall(r"<!-- run with: (.*?) -->", self.comments)
        ]


def blocks_of(page: Path) -> Iterator[Block]:
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        yield Block(*match.groups())


def commands_of(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command, made small by the comments."""
    flags = block.flags
    for line in block.text.replace("\\\n", " ").replace(" && ", "\n").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if (
            words[0] == "scalebench"
            and words[1] in SHRUNK
            and "--dry-run" not in words
            and flags
        ):
            words += flags[0]
            flags = flags[1:] or flags
        yield words


@pytest.mark.parametrize("pages", PAGES.values(), ids=PAGES)
def test_commands_of_the_pages_run(pages, tmp_path, monkeypatch, invoke):
    monkeypatch.chdir(tmp_path)
    # most of these commands draw one figure
    monkeypatch.setattr("scalebench.figures.plotting._MOST_JOBS", 1)
    for page in pages:
        blocks = list(blocks_of(ROOT / page))
        assert any([*commands_of(block)] for block in blocks if block.language == "sh")
        for block in blocks:
            if named := NAMED.match(block.text):
                Path(named[1]).write_text(block.text, encoding="utf-8")
            if block.language != "sh" or "<!-- not run: " in block.comments:
                continue
            for words in commands_of(block):
                if words[0] == "scalebench":
                    invoke(*words[1:])
                elif found := program(words[0]):
                    subprocess.run(
                        [found, *words[1:]],
                        check=True,
                        capture_output=True,
                        stdin=subprocess.DEVNULL,
                    )
                else:
                    assert f"<!-- needs: {words[0]} -->" in block.comments, (
                        f"{page}: no {words[0]} on this machine"
                    )


def program(name):
    """The path of a program that can run the pages' commands, or None."""
    if name == "python":
        return sys.executable
    return None if name == "pdflatex" and not compiles_latex() else shutil.which(name)


def test_every_tutorial_is_run():
    assert {path.name for path in (ROOT / "docs/tutorials").glob("*.md")} == {
        Path(page).name
        for pages in PAGES.values()
        for page in pages
        if page.startswith("docs")
    }


def test_every_figure_of_the_registry_is_in_the_gallery():
    text = (ROOT / "docs/figures.md").read_text(encoding="utf-8")
    sections = dict(
        re.findall(r"^## ([\w-]+)\n\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    )
    for name in figure_names():
        assert f"scalebench plot --figure {name}\n" in sections[name]
        assert f"(images/figures/{name}.png)" in sections[name]
    pictures = {path.stem for path in (ROOT / "docs/images/figures").glob("*.png")}
    assert pictures == set(figure_names())


def test_links_between_pages_and_to_pictures_lead_somewhere():
    links = {
        page: LINK.findall(page.read_text(encoding="utf-8"))
        for page in [
            ROOT / "README.md",
            ROOT / "CONTRIBUTING.md",
            *(ROOT / "docs").rglob("*.md"),
        ]
        if "_build" not in page.parts and "reference" not in page.parts
    }
    assert len(links[ROOT / "README.md"]) > 1
    assert len(links[ROOT / "docs/figures.md"]) >= len(figure_names())
    for page, targets in links.items():
        for link in targets:
            assert (page.parent / link).is_file() or "reference/" in link, (
                f"{page.name}: {link}"
            )


def test_check_of_pictures_finds_other_versions_runs_and_answers(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs/_generate"))
    pictures = importlib.import_module("pictures")

    def keep(name, run="one", version=__version__, answer=""):
        facts = PngInfo()
        for key, text in (
            ("Software", f"scalebench {version}"),
            ("Run", run),
            ("Answer", answer),
        ):
            facts.add_text(key, text)
        Image.new("RGB", (2, 2)).save(tmp_path / name, pnginfo=facts)

    answer = "Virtual, at 64 workers: epoch_average takes 69 % less time than allreduce (12.3 ms instead of 39.5 ms)."
    keep("strong-scaling.png", answer=answer)
    keep("other.png")
    readme = "At 64 workers, **epoch_average takes\n> 69 % less time** (12.3 ms instead of 39.5 ms)"
    assert pictures.problems(tmp_path, readme) == []
    assert together(
        pictures.problems(tmp_path, readme.replace("69", "61"))[0],
        "README.md",
        "not",
        "69 %",
    )
    keep("other.png", run="two")
    keep("third.png")
    (tmp_path / "old.png").write_bytes((ROOT / "docs/images/paper.png").read_bytes())
    keep("older.png", version="0.0.9")
    found = pictures.problems(tmp_path, readme)
    assert [line.partition(":")[0] for line in found[:2]] == [
        "docs/images/old.png",
        "docs/images/older.png",
    ]
    assert "other.png: of another run" in found[2]
    assert all("python docs/_generate/pictures.py" in line for line in found)
