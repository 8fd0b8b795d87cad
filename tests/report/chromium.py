"""A headless Chromium, driven through its DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = [
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--hide-scrollbars",
    ),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
    ),
]


def chromium() -> str | None:
    """Return the path of Chromium; None if it is not installed."""
    return (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )


class Browser:
    """One page in a new, empty profile.

    `complaints` are the errors and warnings of console, security policy and network
    since the last `open`, `requests` the addresses that the page requested.
    """

    def __init__(self, profile: Path) -> None:
        program = chromium()
        assert program is not None
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def connect() -> None:  # the browser reads its file descriptor 3 and writes 4
            # Beyond 4, or one copy would be overwritten by the other where 3 or 4 is
            # free.
            reading, writing = (
                fcntl.fcntl(end, fcntl.F_DUPFD, 10)
                for end in (to_browser, from_browser)
            )
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        self._process = subprocess.Popen(
            [
                program,
                *FLAGS,
                "--remote-debugging-pipe",
                f"--user-data-dir={profile.resolve()}",
                "about:blank",
            ],
            preexec_fn=connect,
            close_fds=False,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._loaded = False
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call(
            "Target.attachToTarget", targetId=target, flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session = ""

    def open(self, page: Path, *, scripts: bool = True) -> None:
        """Load a file, with or without its scripts, and wait until it is loaded."""
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.complaints, self.requests, self._loaded = [], [], False
        self.call("Page.navigate", url=page.as_uri())
        while not self._loaded:
            self._receive()
        if scripts:  # and errors had time to appear
            self.evaluate(
                "new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))"
            )

    def look(
        self, width: int, height: int, *, dark: bool = False, media: str = ""
    ) -> None:
        """Set the screen size, the colour scheme, and the medium (`screen` or `print`)."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page; promises are awaited."""
        answer = self.call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, top: int = 0) -> bytes:
        """Return one screenful from `top` down as PNG."""
        width, height = self.evaluate("[window.innerWidth, window.innerHeight]")
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        answer = self.call(
            "Page.captureScreenshot",
            format="png",
            captureBeyondViewport=True,
            clip=clip,
        )
        return base64.b64decode(answer["data"])

    def pdf(self) -> bytes:
        """Return the page printed on A4."""
        answer = self.call(
            "Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=True
        )
        return base64.b64decode(answer["data"])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # with its child processes
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._in, 1 << 20)
            assert data, "the browser is gone"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = dict(json.loads(line))
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, facts: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif event == "Network.loadingFailed":
            self.complaints.append(f"request failed: {facts.get('errorText')}")
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(
                f"exception: {facts['exceptionDetails'].get('text')}"
            )
        elif event == "Runtime.consoleAPICalled" and facts["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.complaints.append(f"console: {facts['args']}")
        elif event == "Log.entryAdded" and facts["entry"]["level"] in (
            "error",
            "warning",
        ):
            self.complaints.append(f"log: {facts['entry']['text']}")
