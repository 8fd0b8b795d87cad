"""A small study with a given calibration, and commands on it that can be hit at any moment."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from scalebench.calibration.calibration_file import Calibration
from scalebench.records.schema import ENVIRONMENT_COLUMNS
from tests.conftest import invented_machine

ZYGOTE = Path(__file__).parent / "programs" / "zygote.py"
STUDY = """\
name: small
dataset: wine
model: {mlp: {hidden: [8]}}
epochs: 2
repetitions: 2
workers: 1,2,4
batch_per_worker: 8
strategies: [serial, allreduce, horovod, ddp, epoch_average, epoch_async]
execution: virtual
calibration: given.json
"""


class Command:
    """A `scalebench` command under way."""

    def __init__(
        self, zygote: subprocess.Popen[str], folder: Path, arguments: tuple[str, ...]
    ) -> None:
        assert zygote.stdin
        assert zygote.stdout
        self._answers = zygote.stdout
        zygote.stdin.write(json.dumps([str(folder), *arguments]) + "\n")
        zygote.stdin.flush()
        self.pid = int(zygote.stdout.readline())

    def is_alive(self) -> bool:
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def send(self, signum: int) -> None:
        if psutil.pid_exists(self.pid):
            os.kill(self.pid, signum)

    def family(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def wait(self) -> int:
        """The exit code; negative: ended by that signal."""
        return int(self._answers.readline())


class Place:
    """A folder with a study in it, and the commands that are called there."""

    def __init__(self, folder: Path, zygote: subprocess.Popen[str]) -> None:
        self.folder, self._zygote = folder, zygote

    def start(self, *arguments: str) -> Command:
        return Command(self._zygote, self.folder, arguments)

    def run(self, output: str, *more: str) -> int:
        return self.start(
            "run", "study.yaml", "--output", output, "--jobs", "1", *more
        ).wait()

    def runs_csv(self, output: str) -> Path:
        return self.folder / output / "small" / "runs.csv"

    def whole_lines(self, output: str) -> bytes:
        """Return the committed rows of runs.csv."""
        path = self.runs_csv(output)
        data = path.read_bytes() if path.exists() else b""
        return data[: data.rfind(b"\n") + 1]

    def tables(
        self, output: str
    ) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """runs.csv without its environment columns and epochs.csv, sorted."""
        tables = []
        for name in ("runs.csv", "epochs.csv"):
            with (self.folder / output / "small" / name).open(newline="") as file:
                rows = list(csv.DictReader(file))
            kept = [column for column in rows[0] if column not in ENVIRONMENT_COLUMNS]
            tables.append(sorted(tuple(row[column] for column in kept) for row in rows))
        return tables[0], tables[1]

    def printed(self) -> str:
        return (self.folder / "printed.txt").read_text()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` holds, as long as a test may take; print then how far the command came."""
        try:
            while not condition():
                time.sleep(0.005)
        except BaseException:
            print(f"{what} never came; {self.printed()}")
            raise


@pytest.fixture(scope="session")
def zygote() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(ZYGOTE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin
        process.stdin.close()
        assert process.wait() == 0


def made(folder: Path, zygote: subprocess.Popen[str]) -> Place:
    machine = invented_machine()
    given = Calibration(key="given", tables=machine.tables, engines=machine.engines)
    (folder / "given.json").write_text(given.model_dump_json())
    (folder / "study.yaml").write_text(STUDY)
    (folder / "printed.txt").touch()
    return Place(folder, zygote)


@pytest.fixture
def place(tmp_path, zygote) -> Place:
    return made(tmp_path, zygote)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, zygote) -> Place:
    """The study that nothing has hit, run once for all tests, in the folder `out`: read it, or copy it."""
    found = made(tmp_path_factory.mktemp("undisturbed"), zygote)
    assert found.run("out") == 0, found.printed()
    return found
