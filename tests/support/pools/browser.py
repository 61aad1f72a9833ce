"""A real headless Chromium, driven over two pipes by the Chrome DevTools Protocol.

The protocol is https://chromedevtools.github.io/devtools-protocol/: JSON objects, each ended by a zero byte. The
browser reads them from its file descriptor 3 and writes to 4, so nothing listens on a port.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

# Debian's packages; the second one has no windowed mode.
PROGRAMS = ("chromium", "chromium-headless-shell")
_SECONDS = 120.0
# Moves the two pipes to the descriptors that the protocol requires; subprocess can only pass them on unchanged.
_LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_ARGUMENTS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # it refuses to run as root with one
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
)


def program() -> str | None:
    """Return the path of a Chromium on this machine, None if there is none."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


@dataclass
class Tab:
    """A page. ``events`` are those reported so far, as method and parameters."""

    _to: int
    _from: int
    session: str = ""
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))
    _rest: bytes = b""

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return the answer. Raises AssertionError for an error, TimeoutError if there is none."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        end = time.monotonic() + _SECONDS
        while True:
            answer = self._receive(end)
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, end: float) -> dict[str, Any]:
        """Return the next message; an event is also added to ``events``."""
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("the browser doesn't answer")
            data = os.read(self._from, 1 << 20)
            assert data, "the browser ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append((message["method"], message["params"]))
        return message

    def open(self, page: Path) -> None:
        """Load a file; ``events`` then has what happened while it loaded."""
        self.events.clear()
        self.send("Page.navigate", url=page.as_uri())
        end = time.monotonic() + _SECONDS
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            self._receive(end)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page. Raises AssertionError if it throws."""
        done = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def scheme(self, name: str) -> None:
        """Set the user's preferred color scheme, `light` or `dark`."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def size(self, width: int, height: int) -> None:
        """Set the window's size in pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )


@contextmanager
def tab(chromium: str, profile: Path) -> Iterator[Tab]:
    """Start a browser with its own profile; it ends with the block."""
    commands, answers = os.pipe(), os.pipe()
    # Above 3 and 4, or the launcher would overwrite one with the other.
    inherited = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (commands[0], answers[1])]
    os.close(commands[0])
    os.close(answers[1])
    environment = {"PATH": os.environ["PATH"], "HOME": os.fspath(profile), "LANG": "C.UTF-8"}
    argv = [chromium, *_ARGUMENTS, f"--user-data-dir={profile}"]
    try:
        with (profile / "stderr").open("wb") as stderr:
            browser = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, *map(str, inherited), *argv],
                env=environment,
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
            )
    finally:
        for fd in inherited:
            os.close(fd)
    try:
        shown = Tab(commands[1], answers[0])
        target = shown.send("Target.createTarget", url="about:blank")["targetId"]
        shown.session = shown.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            shown.send(f"{domain}.enable")
        yield shown
        shown.session = ""
        shown.send("Browser.close")
    finally:
        # Closing its pipes also makes it end by itself.
        os.close(commands[1])
        os.close(answers[0])
        try:
            browser.wait(30)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()
