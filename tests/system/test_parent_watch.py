"""Children that end with whom started them."""

import subprocess
import sys
from pathlib import Path

CHILD = """
import os, sys, time
from scalebench.system.parent_watch import end_with_launcher
while sys.argv[1] == "late" and os.getppid() != 1:
    time.sleep(0.01)
end_with_launcher()
print("runs on", flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], stdout=open(sys.argv[3], "w"))
while sys.argv[2] == "early" and not os.path.getsize(sys.argv[3]):
    time.sleep(0.01)
print(child.pid, flush=True)
"""


def rank_after_its_launcher(moment: str, tmp_path: Path) -> str:
    """Start a rank that outlives its launcher, wait for its end, and return what it printed."""
    output = tmp_path / "output"
    output.touch()
    started = subprocess.run(
        [sys.executable, "-c", PARENT, CHILD, moment, str(output)],
        capture_output=True,
        text=True,
        check=True,
    )
    subprocess.run(
        ["tail", f"--pid={started.stdout.strip()}", "-f", "/dev/null"],
        check=True,
    )
    return output.read_text()


def test_rank_ends_with_its_launcher(tmp_path: Path) -> None:
    assert rank_after_its_launcher("early", tmp_path) == "runs on\n"


def test_rank_whose_launcher_ended_first_ends_at_once(tmp_path: Path) -> None:
    assert rank_after_its_launcher("late", tmp_path) == ""


POOL = """
import signal
from scalebench.system.parent_watch import preloaded_forkserver, start_forkserver

def tell(pipe):
    pipe.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))

if __name__ == "__main__":
    start_forkserver()
    context = preloaded_forkserver()
    ours, theirs = context.Pipe()
    process = context.Process(target=tell, args=(theirs,))
    process.start()
    print(ours.recv(), signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
    process.join()
"""


def test_ctrl_c_of_a_terminal_does_not_reach_processes_of_a_pool(
    tmp_path: Path,
) -> None:
    """It is sent to the whole group: a child that took it would end, and a run under way be lost."""
    program = tmp_path / "pool.py"
    program.write_text(POOL)
    done = subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", "False"], (
        "blocked in the child, heard in the command itself"
    )
