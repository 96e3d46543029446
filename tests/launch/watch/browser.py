"""A headless Chromium, driven over a pipe by its own protocol: no driver program, no port.

Only what the tests of the page need: open an address, evaluate an expression in it, wait until one
is true, take a picture, and see which requests were made.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# Chromium reads commands from descriptor 3 and writes answers to 4.
_BEGIN = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--window-size=1400,1000",
)


class Browser:
    """One page.

    Args:
        commands: Descriptor that commands are written to.
        answers: Descriptor that answers and events are read from.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer, self._next = b"", 0
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank", session=None)["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True, session=None)
        self._session: str = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, session: str | None = "", **params: Any) -> dict[str, Any]:
        """A command's result."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + DEADLINE_S
        while (found := self._message(deadline)).get("id") != self._next:
            self.events.append(found)
        assert "error" not in found, f"{method}: {found['error']}"
        return found["result"]

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left_s = deadline - time.monotonic()
            ready = select.select([self._answers], [], [], max(0.0, left_s))[0]
            assert ready, f"the browser said nothing for {DEADLINE_S:g} s"
            got = os.read(self._answers, 1 << 16)
            assert got, "the browser has ended"
            self._buffer += got
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def open(self, url: str) -> None:
        """Go to an address, by way of an empty page: a change of its hash alone loads nothing."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """What an expression is in the page; of a promise, what it gives."""
        found = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.value(f"Boolean({expression})"):
            said = self.value("document.body ? document.body.innerText.slice(0, 3000) : ''")
            assert time.monotonic() < deadline, f"never true: {expression}\n{said}"
            time.sleep(0.05)

    def drag(self, start: float, stop: float, height: float) -> None:
        """Drag the mouse from left to right, as a person does."""
        for kind, x in (("Moved", start), ("Pressed", start), ("Moved", stop), ("Released", stop)):
            self.send(
                "Input.dispatchMouseEvent",
                type=f"mouse{kind}",
                x=x,
                y=height,
                button="left",
                buttons=1,
                clickCount=1,
            )

    def resize(self, width: int, height: int) -> None:
        """Make the page as large, in pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def picture(self) -> bytes:
        """The page as PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def requests(self) -> list[str]:
        """Every address that was asked for so far."""
        self.value("0")  # takes in what has happened up to now
        asked = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in asked]


@contextmanager
def started(home: Path) -> Generator[Browser]:
    """A browser with an empty profile below a folder; the test is skipped if there is none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("needs a browser: apt-get install chromium")
    pipes = [*os.pipe(), *os.pipe()]
    # Above 10, so that none of them is in the way of another's new number.
    ours = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in pipes]
    for one in pipes:
        os.close(one)
    reads, commands, answers, writes = ours
    process = subprocess.Popen(
        [sys.executable, "-c", _BEGIN, str(reads), str(writes), program, *_OPTIONS]
        + [f"--user-data-dir={home / 'profile'}"],
        pass_fds=(reads, writes),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "HOME": str(home)},
    )
    try:
        os.close(reads)
        os.close(writes)
        yield Browser(commands, answers)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)
        os.close(commands)
        os.close(answers)
