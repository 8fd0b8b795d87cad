"""Horovod's wheel is relocatable between equal environments; failures are one-line errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from scalebench.cli.main import main
from scalebench.errors import EngineError
from scalebench.install import horovod_build
from scalebench.install.horovod_build import (
    BuildError,
    build_environment,
    check_horovod,
    default_cache,
    find_toolchain,
    find_wheel,
    install_horovod,
    relative_runpath,
    store_wheel,
    write_compiler,
)
from tests.conftest import needs_mpi
from tests.facts import together

HERE = find_toolchain()


def test_key_depends_on_torch_python_mpi_and_compiler() -> None:
    others = {
        "torch": "2.14.0",
        "python": "cpython-312",
        "mpi": "MPICH-4",
        "compiler": "clang-18",
        "layout": "lib64/x",
    }
    keys = {
        HERE.key,
        *(replace(HERE, **{part: value}).key for part, value in others.items()),
    }
    assert len(keys) == 1 + len(others)
    assert HERE.torch.replace("+", "-") in HERE.key
    assert os.sep not in HERE.key
    assert len(HERE.key) < 250  # a file name


def test_runpaths_into_the_environment_become_relative() -> None:
    site = Path(sysconfig.get_path("platlib"))
    paths = [
        f"{sys.prefix}/lib",
        "",
        "/usr/lib/openmpi",
        str(site / "torch/lib"),
        "$ORIGIN/../near",
    ]
    said = relative_runpath(paths, Path("horovod/torch"))
    up = os.path.relpath(f"{sys.prefix}/lib", site / "horovod/torch")
    assert said == [
        f"$ORIGIN/{up}",
        "/usr/lib/openmpi",
        "$ORIGIN/../../torch/lib",
        "$ORIGIN/../near",
    ]
    assert relative_runpath([], Path("horovod/torch")) == ["$ORIGIN/../../torch/lib"]


def test_build_environment_has_tools_first_and_user_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MAKEFLAGS", "-j7")
    monkeypatch.setenv("HOROVOD_WITH_TENSORFLOW", "")
    env = build_environment(
        replace(HERE, cuda=None), tmp_path / "tools", tmp_path / "c++"
    )
    assert env["PATH"].split(os.pathsep)[:2] == [
        str(tmp_path / "tools" / "bin"),
        str(Path(sys.executable).parent),
    ]
    assert env["PYTHONPATH"].startswith(str(tmp_path / "tools"))
    assert (env["CXX"], env["MAKEFLAGS"]) == (str(tmp_path / "c++"), "-j7")
    assert (
        env["HOROVOD_WITH_MPI"],
        env["HOROVOD_WITH_GLOO"],
        env["CMAKE_POLICY_VERSION_MINIMUM"],
    ) == ("1", "1", "3.5")
    assert "HOROVOD_GPU_OPERATIONS" not in env
    assert (
        build_environment(replace(HERE, cuda="13.0"), tmp_path, tmp_path)[
            "HOROVOD_GPU_OPERATIONS"
        ]
        == "NCCL"
    )


def test_cache_stores_wheels_atomically(tmp_path: Path) -> None:
    wheel = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(b"a wheel")
    kept = store_wheel(wheel, tmp_path / "cache" / "key")
    assert kept.read_bytes() == b"a wheel"
    assert find_wheel(kept.parent) == kept
    assert [path.name for path in kept.parent.iterdir()] == [wheel.name]
    assert find_wheel(tmp_path / "nothing") is None


def test_unwritable_cache_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(
        main,
        ["install", "horovod", "--force", "--cache", str(tmp_path / "file" / "below")],
    )
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert together(result.stderr, "Not a directory", "--cache")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "find_spec",
            lambda name: None if name == "torch" else name,
            "run: pip install torch",
        ),
        ("find_mpirun", lambda: None, r'an MPI.*run: pip install "scalebench\[mpi\]"'),
    ],
)
def test_missing_requirement_names_the_command_that_adds_it(
    monkeypatch: pytest.MonkeyPatch, path: str, value: object, message: str
) -> None:
    monkeypatch.setattr(horovod_build, path, value)
    with pytest.raises(EngineError, match=message):
        install_horovod()


@needs_mpi
def test_missing_compiler_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        EngineError, match=r"no C\+\+ compiler is here; run: apt-get install g\+\+"
    ):
        find_toolchain()


def test_compiler_takes_the_standard_of_torch_and_writes_no_symbols(
    tmp_path: Path,
) -> None:
    source, out = tmp_path / "one.cc", tmp_path / "one.o"
    source.write_text("static_assert(__cplusplus == 201703L); int one() { return 1; }")
    compiler = write_compiler(tmp_path, HERE.cxx)
    asked = ["-std=c++14", "-g", "-c", source, "-o", out]
    subprocess.run([compiler, *asked], check=True)
    assert b".debug_info" not in out.read_bytes()


def test_failing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with pytest.raises(
        EngineError, match=r"`/nonexistent/c\+\+ --version` does not work"
    ):
        find_toolchain()


def test_failing_pip_names_the_last_error_and_the_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "build.log"
    with pytest.raises(
        BuildError,
        match=r"pip install failed: ERROR: .*no_such_folder.*; its log is .*build\.log",
    ):
        horovod_build._pip(
            ["install", "--no-index", "./no_such_folder"], os.environ.copy(), log
        )
    assert "no_such_folder" in log.read_text()


def test_last_error_skips_noise() -> None:
    log = """
      mpi_ops.cc:12:10: fatal error: torch/extension.h: No such file or directory
      compilation terminated.
      make[2]: *** [CMakeFiles/pytorch.dir/build.make:76] Error 1
      note: This error originates from a subprocess
    ERROR: Failed building wheel for horovod
    error: subprocess-exited-with-error: hard luck
    """
    found = horovod_build._last_error(log)
    assert (
        found
        == "mpi_ops.cc:12:10: fatal error: torch/extension.h: No such file or directory"
    )
    assert horovod_build._last_error("nothing\nat all\n") == "at all"


def test_horovod_that_does_not_load_is_an_error(tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(
        "#!/bin/sh\necho 'ImportError: libtorch_cpu.so: no such file' >&2\nexit 1\n"
    )
    mpirun.chmod(0o755)
    with pytest.raises(
        BuildError, match=r"does not work: ImportError: libtorch_cpu\.so: no such file"
    ):
        check_horovod(mpirun)


@needs_mpi
def test_check_horovod_sums_over_two_processes() -> None:
    assert check_horovod(HERE.mpirun).startswith("MPI True Gloo True")


def test_wheel_works_in_a_second_environment(tmp_path: Path) -> None:
    """Every file of this environment is linked into another one, which then loads nothing from this one."""
    wheel = find_wheel(default_cache() / f"horovod-{horovod_build.VERSION}" / HERE.key)
    if wheel is None:
        pytest.skip(
            "no cached wheel of this toolchain; run: scalebench install horovod"
        )
    second = tmp_path / "second"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(second)], check=True
    )
    # Hard links share the bytes and nothing else: no path leads back to the first
    # environment.
    for part in ("lib", "share", "etc", "bin"):
        source = Path(sys.prefix) / part
        if source.is_dir():
            (second / part).mkdir(exist_ok=True)
            link = subprocess.run(
                ["cp", "-aln", f"{source}/.", str(second / part)], check=False
            )
            if link.returncode != 0:  # another file system
                subprocess.run(
                    ["cp", "-an", f"{source}/.", str(second / part)], check=True
                )
    site = second / HERE.layout
    subprocess.run(["rm", "-rf", str(site / "horovod")], check=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--upgrade",
    ]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True)
    program = (
        "import sys, horovod.torch as hvd, torch;"
        "hvd.init(); hvd.allreduce(torch.ones(3)); hvd.shutdown();"
        "print(sys.prefix);"
        "print({line.split()[-1] for line in open('/proc/self/maps') if 'libmpi.so' in line or 'mpi_lib' in line})"
    )
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in {"LD_LIBRARY_PATH", "PYTHONPATH"}
    }
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [second / "bin" / "python", "-c", program],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    prefix, mapped = done.stdout.splitlines()[-2:]
    assert prefix == str(second)
    assert str(second) in mapped
    assert sys.prefix not in mapped


def test_two_installs_at_once_build_one_after_the_other(tmp_path: Path) -> None:
    """The second waits, names the first, and takes its wheel; a real lock between real processes."""
    program = """if True:
        import sys, time
        from pathlib import Path
        from scalebench.install import horovod_build
        from scalebench.install.horovod_build import store_wheel

        folder, name = Path(sys.argv[1]), sys.argv[2]

        def note(event):
            with (folder / "events").open("a") as file:
                file.write(f"{name} {event}\\n")

        def build(toolchain, place, progress):
            note("builds")
            while "waiting" not in (folder / "events").read_text():
                time.sleep(0.02)
            (folder / f"{name}.whl").write_text("a wheel")
            return store_wheel(folder / f"{name}.whl", place)

        horovod_build._build = build
        horovod_build._pip = lambda command, *_: note(Path(command[-1]).name)
        horovod_build.check_horovod = lambda mpirun: ""
        horovod_build.install_horovod(cache=folder / "cache", progress=lambda line: "waiting" in line and note(line))
    """
    command = [sys.executable, "-c", program, str(tmp_path)]
    first = subprocess.Popen([*command, "first"])
    while not list(tmp_path.glob("events")) and first.poll() is None:
        time.sleep(0.02)
    second = subprocess.Popen([*command, "second"])
    assert [first.wait(), second.wait()] == [0, 0]
    events = (tmp_path / "events").read_text().splitlines()
    assert re.fullmatch(
        rf"second waiting for process {first.pid} on .*; if it has ended, delete .*lock",
        events.pop(1),
    )
    assert events == [
        "first builds",
        *["first first.whl"] * 2,
        *["second first.whl"] * 2,
    ]
    assert not list(tmp_path.rglob("lock"))
