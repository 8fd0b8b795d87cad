"""Starts `scalebench` commands at once: everything heavy is imported, and each command is a fork of this process.

Reads one JSON list per line, the folder and the arguments; answers with the command's
process number, then with the exit code. A command that gets SIGUSR2 writes its stack
into stack.txt and continues.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys


def main() -> None:
    import torch  # noqa: F401

    import scalebench.analysis
    import scalebench.cli.live_progress
    import scalebench.cli.run
    import scalebench.cli.run_common
    import scalebench.launch.study_run
    from scalebench.cli.main import main as scalebench

    # what is left once a command that ends has put its handlers back
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    for line in sys.stdin:
        folder, *arguments = json.loads(line)
        stack = os.open(f"{folder}/stack.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        faulthandler.register(signal.SIGUSR2, stack, all_threads=False)
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            os.chdir(folder)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            # a shell's background jobs ignore it
            signal.signal(signal.SIGINT, signal.default_int_handler)
            output = os.open("printed.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.argv = ["scalebench", *arguments]
            scalebench(prog_name="scalebench")
        os.close(stack)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
