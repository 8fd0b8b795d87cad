"""The Dockerfile and the Apptainer definition: valid shell, the pinned packages, and the same in both."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "docs/containers/Dockerfile").read_text()
DEFINITION = (ROOT / "docs/containers/scalebench.def").read_text()


def commands_of_docker():
    return [
        found.replace("\\\n", " ")
        for found in re.findall(r"^RUN ((?:.*\\\n)*.*)", DOCKERFILE, re.MULTILINE)
    ]


def post_of_apptainer():
    return DEFINITION.partition("%post\n")[2].partition("\n%")[0]


def test_both_install_the_same_with_the_pinned_packages():
    docker = " && ".join(commands_of_docker())
    parts = [" ".join(part.split()) for part in docker.split("&&")]
    lines = [" ".join(line.split()) for line in post_of_apptainer().splitlines()]
    assert parts == [
        line for line in lines if line and not line.startswith(("#", "cd "))
    ]
    assert 'pip install --no-cache-dir --constraint constraints.txt ".[mpi]"' in parts
    assert (
        re.search(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)[1]
        == re.search(r"^From: (\S+)", DEFINITION, re.MULTILINE)[1]
    )


def test_the_base_is_a_pinned_python_that_is_supported():
    tag = re.search(r"^From: python:(\d+)\.(\d+)-slim-\w+$", DEFINITION, re.MULTILINE)
    wanted = re.search(
        r'requires-python = ">=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text()
    )
    assert (int(tag[1]), int(tag[2])) >= (int(wanted[1]), int(wanted[2]))
    assert (ROOT / "constraints.txt").is_file()


def test_commands_are_valid_shell():
    for text in (*commands_of_docker(), post_of_apptainer()):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("linter", "given"),
    [
        (["hadolint", "-"], DOCKERFILE),
        (["shellcheck", "--shell=sh", "-"], post_of_apptainer()),
    ],
    ids=["hadolint", "shellcheck"],
)
def test_linters_find_nothing(linter, given):
    if platform.machine() != "x86_64":
        pytest.skip(
            f"not applicable: no {linter[0]} in the package index for {platform.machine()}"
        )
    if shutil.which(linter[0]) is None:
        pytest.skip(f"{linter[0]} is not installed")
    done = subprocess.run(linter, input=given, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout
