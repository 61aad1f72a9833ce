"""Work in a forked process, which may hang.

A driver call can block in the kernel forever, and then not even SIGKILL ends the process. So it is left behind and
remembered, and no other is started as long as it exists.

It isn't a separate program but a fork of this one: a check is a function, and starting the agent again would cost more
than all checks of a look.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from image_builder.node.errors import NodeError

_MOST_BYTES = 4 << 20
# How long a process has to exit, once it has answered or was killed.
_END_SECONDS = 1.0


class HungError(NodeError):
    """The process did not end in time. ``process`` identifies it for later: its ID, and when it was started."""

    def __init__(self, task: str, process: tuple[int, str]) -> None:
        super().__init__("health.hung", f"{task} hangs in process {process[0]}")
        self.process = process


def started(pid: int, proc: Path = Path("/proc")) -> str:
    """Return a process's start time as the kernel writes it; empty if there is no such process, or it has ended."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def run(
    work: Callable[[], Any],
    task: str,
    seconds: float,
    *,
    hung: Sequence[Any] | None = None,
    proc: Path = Path("/proc"),
) -> Any:
    """Return what ``work`` returns, which must be JSON. Raises NodeError (``health.failed``), HungError.

    ``hung`` is the process of an earlier HungError: no other is started as long as it exists. No other thread may be
    running, since this forks.
    """
    if hung and hung[1] and started(hung[0], proc) == hung[1]:
        raise HungError(task, (hung[0], hung[1]))
    readable, writable = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        # Should the parent be killed first, nothing else would end this process.
        signal.alarm(math.ceil(seconds + _END_SECONDS) + 1)
        _work(work, writable)
    os.close(writable)
    try:
        data = _receive(readable, time.monotonic() + seconds)
    finally:
        os.close(readable)
    # Its driver handles are closed as it exits: that may hang, too.
    if data is None or not _reap(pid, time.monotonic() + _END_SECONDS):
        born = started(pid)
        os.kill(pid, signal.SIGKILL)
        _reap(pid, time.monotonic() + _END_SECONDS)
        raise HungError(task, (pid, born))
    try:
        answer = json.loads(data)
    except ValueError as error:
        raise NodeError("health.failed", f"{task} ended without an answer") from error
    if "error" in answer:
        raise NodeError("health.failed", f"{task}: {answer['error']}")
    return answer["value"]


def _work(work: Callable[[], Any], writable: int) -> None:
    """Work, write the answer and exit, whatever happens: this process is a copy of its parent."""
    try:
        # It may outlive its parent, and then hold the lock that the parent had: only the answer's pipe stays open.
        os.closerange(3, writable)
        os.closerange(writable + 1, os.sysconf("SC_OPEN_MAX"))
        try:
            answer = {"value": work()}
        except Exception as error:  # whatever it is, the parent reports it
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        with os.fdopen(writable, "w", encoding="utf-8") as stream:
            json.dump(answer, stream)
    finally:
        os._exit(0)


def _receive(readable: int, until: float) -> bytes | None:
    """Return everything that is written before the other end is closed, None if that takes too long."""
    parts: list[bytes] = []
    while (remaining := until - time.monotonic()) > 0:
        if not select.select([readable], [], [], remaining)[0]:
            continue
        part = os.read(readable, 1 << 16)
        if not part or sum(map(len, parts)) > _MOST_BYTES:
            return b"".join(parts)
        parts.append(part)
    return None


def _reap(pid: int, until: float) -> bool:
    """Wait for a process that is exiting or was killed; return whether it is gone. One that isn't is left behind."""
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() >= until:
            return False
        time.sleep(0.002)
    return True
