"""The verification suite on many hosts by one process, which collects the checks once (tests/image/each.py).

Each host has a process of its own there, so that one that hangs or crashes is no other's business.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from image_builder import process
from image_builder.errors import VerifyError
from image_builder.process import TAIL_LINES, Arg


class SuiteProcess:
    """It, and who waits for it; a context manager. ``run`` may be called from any thread."""

    def __init__(self, argv: Sequence[Arg], env: dict[str, str]) -> None:
        self._argv, self._env = argv, env
        self._stack = ExitStack()
        self._guard = threading.Lock()
        self._waiting: dict[str, Future[int]] = {}
        self._number = 0
        self._said: deque[str] = deque(maxlen=TAIL_LINES)
        self.ended = False

    def __enter__(self) -> Self:
        """Start it; raises CommandError."""
        self._child = self._stack.enter_context(process.conversation(self._argv, env=self._env))
        self._reader = threading.Thread(target=self._read, name="suite-reader")
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it; whoever waits is told."""
        assert self._child.stdin
        with self._guard:
            self.ended = True
            with suppress(BrokenPipeError):  # it has ended already
                self._child.stdin.close()  # its end
        self._reader.join(_END_SECONDS)
        self._stack.close()
        self._reader.join()

    def run(self, target: str, out: Path, seconds: float) -> int:
        """Run the checks on a host, for so long; return the status of its process, below 0 for a signal.

        Raises VerifyError where the process of all ended meanwhile.
        """
        assert self._child.stdin
        ended: Future[int] = Future()
        with self._guard:
            if self.ended:
                raise VerifyError(self._why())
            self._number += 1
            name = str(self._number)
            self._waiting[name] = ended
            asked = {"id": name, "target": target, "out": os.fspath(out), "seconds": seconds}
            with suppress(BrokenPipeError):  # the reader tells everybody that it ended, this one too
                self._child.stdin.write(json.dumps(asked) + "\n")
                self._child.stdin.flush()
        return ended.result()

    def _read(self) -> None:
        """Read what it says, in a thread of its own, to its end."""
        assert self._child.stdout
        for line in self._child.stdout:
            told = _told(line)
            if told is None:
                self._said.append(line)
                continue
            with self._guard:
                waits = self._waiting.pop(told[0])
            waits.set_result(told[1])
        with self._guard:
            self.ended = True
            left, self._waiting = self._waiting, {}
        for waits in left.values():
            waits.set_exception(VerifyError(self._why()))

    def _why(self) -> str:
        return "the suite's process ended:\n" + "".join(f"  {line}" for line in self._said).rstrip()


# For it to notice the end of its input, and to end what it runs.
_END_SECONDS = 10.0


def _told(line: str) -> tuple[str, int] | None:
    """Return which run ended, and how; None for what pytest says besides."""
    try:
        said = json.loads(line)
        return str(said["ended"]), int(said["status"])
    except (ValueError, TypeError, KeyError):
        return None
