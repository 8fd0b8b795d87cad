"""Start a command on another host as ssh does: by its name, without the environment of the caller.

`python agent.py serve FOLDER NAME` listens on host NAME; `python agent.py FOLDER NAME
COMMAND...` runs there.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

_ENVIRONMENT = {
    "HOME": "/root",
    "USER": "root",
    "SHELL": "/bin/sh",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "TMPDIR": "/dev/shm",
}


def serve(path: Path) -> None:
    """Run the commands of callers on their standard streams, and answer with the exit status."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    while True:
        threading.Thread(
            target=_answer, args=(listener.accept()[0],), daemon=True
        ).start()


def _answer(caller: socket.socket) -> None:
    with caller:
        command, streams, *_ = socket.recv_fds(caller, 1 << 16, 3)
        status = subprocess.call(
            ["/bin/sh", "-c", command.decode()], stdin=streams[0], stdout=streams[1], stderr=streams[2],
            env=_ENVIRONMENT, cwd="/", start_new_session=True,
        )  # fmt: skip
        for stream in streams:
            os.close(stream)
        caller.sendall(bytes([status % 256]))


def call(path: Path, command: str) -> int:
    """Return the exit status of `command` there; 255, as ssh does, if the host cannot be reached."""
    with socket.socket(socket.AF_UNIX) as host:
        try:
            host.connect(str(path))
            socket.send_fds(host, [command.encode()], [0, 1, 2])
            status = host.recv(1)
        except OSError as error:
            print(f"agent: {path.name}: {error.strerror}", file=sys.stderr)
            return 255
    return status[0] if status else 255


if __name__ == "__main__":
    first, folder, *more = sys.argv[1:]
    if first == "serve":
        serve(Path(folder) / more[0])
    sys.exit(call(Path(first) / folder, " ".join(more)))
