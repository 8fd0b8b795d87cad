"""A disk that is really full, a folder that is closed while a study runs: one line, nothing torn, and on it goes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys

import pytest

from scalebench.comm import engines
from tests.conftest import some
from tests.facts import together

LIBC = ctypes.CDLL(None)


def run(place, output, *more, **popen):
    command = [
        sys.executable,
        "-m",
        "scalebench",
        "run",
        "study.yaml",
        "--output",
        output,
        "--jobs",
        "1",
        *more,
    ]
    return subprocess.Popen(
        command,
        cwd=place.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **popen,
    )


def heed_permissions():
    """Root may write whatever its mode says: not in this process."""
    LIBC.prctl(24, 1, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE


def on_small_disk(place, size, script):
    """Run `script` with a tmpfs of `size` on small-disk, in a mount namespace of its own."""
    if os.getuid() != 0:
        pytest.skip("only root may mount a small file system")
    (place.folder / "small-disk").mkdir()
    mounted = f"mount -t tmpfs -o size={size} tmpfs small-disk || exit 77\n{script}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mounted],
        cwd=place.folder,
        capture_output=True,
        check=False,
    )
    if done.returncode in (1, 77):
        pytest.skip(
            f"no file system can be mounted here: {done.stderr.decode().strip()}"
        )


def test_full_disk_is_a_one_line_error_and_the_study_resumes_with_room(
    place, undisturbed
):
    """A disk of 40 KiB grows before the second command."""
    command = (
        f"{sys.executable} -m scalebench run study.yaml --output small-disk --jobs 1"
    )
    script = (
        f"{command} --quiet 2>first.txt; echo $? >first.code; cp -r small-disk first\n"
        "mount -o remount,size=16m small-disk || exit 77\n"
        f"{command} >second.txt 2>&1; echo $? >second.code; cp -r small-disk second\n"
    )
    on_small_disk(place, "40k", script)
    output = (place.folder / "first.txt").read_text().strip().splitlines()
    assert (place.folder / "first.code").read_text().strip() == "2", output
    assert together(output[-1], "No space left on device", "same command")
    assert "Traceback" not in "\n".join(output)
    kept = place.whole_lines("first")
    assert kept == place.runs_csv("first").read_bytes(), "a torn row was left"
    assert 1 < kept.count(b"\n") < 33
    assert (place.folder / "second.code").read_text().strip() == "0", (
        place.folder / "second.txt"
    ).read_text()
    assert place.tables("second") == undisturbed.tables("out")


def test_study_folder_deleted_during_the_study_is_written_again_with_all_rows(place):
    """As by a purge of old files on scratch."""
    long = ("--set", "epochs=6", "--set", "workers=2")
    process = place.start("run", "study.yaml", "--output", "out", "--jobs", "1", *long)
    place.until(lambda: place.whole_lines("out").count(b"\n") > 3, "rows")
    shutil.rmtree(place.folder / "out", ignore_errors=True)
    code, output = process.wait(), place.printed()
    assert code == 0, output
    assert together(output, "deleted", "written again", "all rows")
    assert place.run("out", *long) == 0
    assert "Traceback" not in output + place.printed()
    assert {"study.yaml", "planned.json", "provenance"} <= {
        path.name for path in (place.folder / "out/small").iterdir()
    }
    assert place.run("undisturbed", *long) == 0
    assert place.tables("out") == place.tables("undisturbed")


@pytest.mark.parametrize("kept", some([0, 8], 8))
def test_lost_epochs_are_named_and_their_runs_made_again(place, undisturbed, kept):
    """The study has 32 runs of 2 epochs; epochs.csv is gone, or shorter than runs.csv commits."""
    shutil.copytree(undisturbed.folder / "out", place.folder / "out")
    wanted = place.tables("out")
    epochs = place.runs_csv("out").with_name("epochs.csv")
    lines = epochs.read_bytes().splitlines(keepends=True)
    epochs.write_bytes(b"".join(lines[: 1 + kept]))
    if not kept:
        epochs.unlink()
    lost = f"{32 - kept // 2} completed runs"
    place.start(
        "plot",
        "out/small",
        "--figure",
        "strong-scaling",
        "--figure",
        "convergence",
        "--format",
        "png",
    ).wait()
    assert f"epochs.csv lacks epochs of {lost} (" in place.printed()
    place.start("check", "out/small").wait()
    assert f"epochs of {lost} are missing" in place.printed()
    assert "never made" not in place.printed()
    place.start("status", "out/small").wait()
    assert together(
        place.printed(),
        f"{kept // 2} of 32 runs",
        "0 failed",
        f"{32 - kept // 2} remaining",
    )
    assert f"epochs.csv lacks epochs of {lost} (" in place.printed()
    assert place.run("out", "--dry-run") == 0
    assert "all of it is done" not in place.printed()
    assert together(place.printed(), "note", "epochs.csv", lost)
    assert place.run("out") == 0
    assert "they are run again" in place.printed()
    kept_rows, latest = place.tables("out")
    assert len(kept_rows) == len(wanted[0]) + 32 - kept // 2
    assert len(set(latest)) == len(wanted[1]), "every epoch is there again"


@pytest.mark.thorough
def test_folder_made_read_only_during_the_study_fails_the_weights_only(place):
    """Open files stay open; weights, which are new files, fail with their reason and are made later."""
    process = run(
        place,
        "out",
        "--set",
        "save_weights=true",
        "--set",
        "epochs=20",
        preexec_fn=heed_permissions,
    )
    weights = place.folder / "out" / "small" / "weights"
    place.until(
        lambda: weights.exists() and len(list(weights.iterdir())) > 2, "weights"
    )
    weights.chmod(0o555)
    output = process.communicate()[0]
    weights.chmod(0o755)
    assert process.returncode == 1, output
    assert "cannot write the weights" in output
    assert "Permission denied" in output
    assert "Traceback" not in output
    (place.folder / "out" / "small").chmod(0o555)
    again = run(
        place,
        "out",
        "--set",
        "save_weights=true",
        "--set",
        "epochs=20",
        preexec_fn=heed_permissions,
    )
    (line,) = again.communicate()[0].strip().splitlines()
    assert again.returncode == 2
    assert together(line, "Permission denied", "--output")
    (place.folder / "out" / "small").chmod(0o755)
    last = run(
        place,
        "out",
        "--set",
        "save_weights=true",
        "--set",
        "epochs=20",
        preexec_fn=heed_permissions,
    )
    output = last.communicate()[0]
    assert last.returncode == 0, output
    assert len(list(weights.glob("*.npz"))) == 32


FILLING = """
import os, torch

class Filling(torch.nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 200 and os.environ.get("OMPI_COMM_WORLD_RANK") == "0":
            try:
                with open(os.environ["FILL"], "wb", buffering=0) as file:
                    while True:
                        file.write(bytes(1024))
            except OSError:
                pass
        return super().forward(x)

def build(input_shape, outputs):
    return Filling(input_shape[0], outputs)
"""


def test_disk_that_fills_while_real_ranks_train_ends_the_command_at_once(place):
    """Rank 0 can write neither the outcome nor the reason of its failure, and still ends the others."""
    if reason := engines.available("mpi"):
        pytest.skip(reason)
    (place.folder / "filling.py").write_text(FILLING)
    native = "--execution native --engine mpi --workers 2 --strategy allreduce --repetitions 1 --epochs 40 "
    native += "--model filling.py:build"
    command = (
        f"{sys.executable} -m scalebench run study.yaml --output small-disk {native}"
    )
    script = f"FILL=small-disk/fill {command} >first.txt 2>&1; echo $? >first.code\n"
    on_small_disk(place, "300k", script)
    first = (place.folder / "first.txt").read_text()
    assert (place.folder / "first.code").read_text().strip() in ("1", "2"), first
    assert "No space left on device" in first
    assert "Traceback" not in first
