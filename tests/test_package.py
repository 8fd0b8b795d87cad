"""The package as a whole: pinned versions, imports, documentation pages."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
import yaml

import scalebench
from docs._generate.strategies import matrix_markdown, renewed
from scalebench.cluster.cluster_file import Cluster
from scalebench.launch.engine_choice import (
    ENGINES,
    describe_strategies,
    describe_strategy,
)
from scalebench.strategies import registry
from scalebench.strategies.torch_averagers import TorchAverager
from scalebench.study.load import load_study
from scalebench.study.spec import Study
from tests.conftest import some

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = ("torch", "pandas", "sklearn", "matplotlib", "scipy", "mpi4py", "horovod")


def named(requirement: str) -> str:
    """The package that a requirement names, as indexes compare it."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match
    return re.sub(r"[-_.]+", "-", match.group(0)).lower()


def pins() -> dict[str, str]:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and line[0] != "#"
    ]
    return {named(line): line.partition("==")[2] for line in lines}


def test_versions_agree() -> None:
    assert scalebench.__version__ == PROJECT["version"] == version("scalebench")
    assert (
        yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
        == scalebench.__version__
    )


def test_every_requirement_is_pinned_to_one_version() -> None:
    wanted = [
        *PROJECT["dependencies"],
        *(
            item
            for extra in PROJECT["optional-dependencies"].values()
            for item in extra
        ),
    ]
    assert {named(item) for item in wanted} <= set(pins())
    assert all(
        re.fullmatch(r"[0-9][A-Za-z0-9.]*", pinned) for pinned in pins().values()
    )


def test_dependencies_of_requirements_are_pinned() -> None:
    """Installed dependencies of pinned packages are pinned themselves."""
    needed = {
        named(need)
        for package in pins()
        if is_installed(package)
        for need in requires(package) or []
        if ";" not in need  # of other systems, versions or extras
    }
    assert {"numpy", "sympy"} <= needed, "of pandas and torch"
    assert [package for package in needed - set(pins()) if is_installed(package)] == []


def is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def test_studies_and_strategies_load_without_heavy_imports() -> None:
    program = (
        "import sys, scalebench.cli.main, scalebench.study.load, scalebench.cluster.cluster_file\n"
        "from scalebench.strategies import registry\n"
        "scalebench.cluster.cluster_file.load_cluster('this-machine'); registry.create('epoch_average', {})\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_the_strategy_page_is_generated() -> None:
    page = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    assert page == matrix_markdown(), "run: python docs/_generate/strategies.py"


def test_strategy_page_shows_torch_strategies_as_study_options() -> None:
    said = dict(
        re.findall(r"^- for `(torch_\w+)`: `(.+)`$", matrix_markdown(), re.MULTILINE)
    )
    assert set(said) == {
        name
        for name in registry.names()
        if issubclass(registry.find(name), TorchAverager)
    }
    for name, written in said.items():
        (known,) = Study(strategies=[yaml.safe_load(written)]).strategies
        assert (
            registry.create(known.name, known.options) == registry.create(name, {}).rule
        )
        assert "mpi" in registry.find(known.name).engines


@pytest.mark.parametrize(
    "name", some(registry.names(), "daso-heat", "local_sgd", "gossip")
)
def test_pages_of_strategies_state_options_and_recorded_traffic(name: str) -> None:
    entry = describe_strategy(name)
    page = (ROOT / "docs" / "strategies" / f"{entry.name}.md").read_text(
        encoding="utf-8"
    )
    assert page == renewed(page, entry), "run: python docs/_generate/strategies.py"
    assert f"# {entry.name}\n" in page
    assert "## When to use it" in page
    assert f"(timelines/{entry.name}.png)" in page


def test_matrix_marks_unsupported_combinations() -> None:
    entries = {entry.name: entry for entry in describe_strategies()}
    assert entries["horovod"].engines == ("horovod", "virtual")
    assert entries["ddp"].missing["mpi"] == ("process_group",)
    assert entries["epoch_async"].missing["gloo"] == ("shared_state",)
    for entry in entries.values():
        assert set(entry.engines) | set(entry.missing) == set(ENGINES)
        assert entry.engines[-1] == "virtual"


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_files_of_the_pages_are_valid(tmp_path: Path) -> None:
    study, _ = blocks("docs/quick-start.md", "yaml")
    (cluster,) = blocks("docs/cluster-files.md", "yaml")
    path = tmp_path / "study.yaml"
    path.write_text(study)
    assert load_study(path, {}, []).name == "averaging-every-n"
    assert Cluster.model_validate(yaml.safe_load(cluster)).name == "our-cluster"


@pytest.mark.parametrize(
    "page", ["README.md", "docs/quick-start.md", "docs/cluster-files.md"]
)
def test_documented_flags_and_keys_exist(page: str) -> None:
    from click.testing import CliRunner

    from scalebench.cli.main import COMMANDS, main

    lines = [
        line
        for block in blocks(page, "sh")
        for line in block.splitlines()
        if line.startswith("scalebench ")
    ]
    assert any(line.startswith("scalebench run ") for line in lines)
    for line in lines:
        words = line.partition("#")[0].split()
        assert words[1] in COMMANDS, line
        said = (
            CliRunner()
            .invoke(main, [words[1], "--help"], env={"COLUMNS": "200"})
            .output
        )
        for flag in (word for word in words if word.startswith("--")):
            assert flag in said, f"{line!r}: {words[1]} has no {flag}"
        for key in (words[at + 1] for at, word in enumerate(words) if word == "--set"):
            assert key.partition("=")[0].partition(".")[0] in Study.model_fields


def test_the_readme_counts_every_strategy() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"**{len(describe_strategies())} strategies**" in text


def test_licence_is_complete() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_ci_runs_the_command_of_the_readme() -> None:
    assert "pip install tox && tox" in (ROOT / "README.md").read_text(encoding="utf-8")
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "set -euo pipefail" in script.read_text()
