"""The verification suite on many hosts by one process, which collects the checks once (tests/image/each.py).

Each host has a process of its own there, so that one that hangs or crashes is no other's business. What it asks of its
host comes back here, where the connection is: a message for each command, as JSON, and for its answer one more for
each stream.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from image_builder.errors import VerifyError
from image_builder.machine.shell import ShellEndedError
from image_builder.pool.reach.session import Session
from image_builder.system import process
from image_builder.system.process import TAIL_LINES, Arg

# Of each stream of a command: the listing of a whole system is some megabytes.
_MOST_BYTES = 1 << 27


class SuiteProcess:
    """It, and who waits for it; a context manager. ``run`` may be called from any thread."""

    def __init__(self, argv: Sequence[Arg], env: dict[str, str]) -> None:
        self._argv, self._env = argv, env
        self._guard = threading.Lock()
        self._waiting: dict[str, Future[int]] = {}
        self._number = 0
        self._said: deque[str] = deque(maxlen=TAIL_LINES)
        self.ended = False

    def __enter__(self) -> Self:
        """Start it; raises CommandError."""
        with ExitStack() as stack:
            self._requests, theirs = map(stack.enter_context, socket.socketpair(type=socket.SOCK_SEQPACKET))
            conversation = process.conversation(self._argv, env=self._env, stdin=theirs.fileno())
            self._child = stack.enter_context(conversation)
            theirs.close()
            self._stack = stack.pop_all()
        self._reader = threading.Thread(target=self._read, name="suite-reader")
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it; whoever waits is told."""
        with self._guard:
            self.ended = True
            self._requests.close()  # its end
        self._reader.join(_END_SECONDS)
        self._stack.close()
        self._reader.join()

    def run(self, session: Session, out: Path, seconds: float) -> int:
        """Run the checks on a host, for so long; return the status of its process, below 0 for a signal.

        Raises VerifyError where the process of all ended meanwhile, and what the session raises when it is lost.
        """
        ours, theirs = socket.socketpair()
        with Connection(ours.detach()) as asked:
            with theirs:
                ended = self._begin(theirs, out, seconds)
            # Else what it had asked last would be waited for.
            ended.add_done_callback(lambda _: session.cut())
            try:
                serve(asked, session)
            except Exception:
                # Where it has ended, that broke the session: its status tells more. Else the session is what is lost.
                if not ended.done():
                    asked.close()
                    wait([ended])  # soon: nothing that it asks is answered
                    raise
        return ended.result()

    def _begin(self, shell: socket.socket, out: Path, seconds: float) -> Future[int]:
        """Let it run the checks by what is asked through ``shell``."""
        ended: Future[int] = Future()
        with self._guard:
            if self.ended:
                raise VerifyError(self._why())
            self._number += 1
            name = str(self._number)
            self._waiting[name] = ended
            request = {"id": name, "out": os.fspath(out), "seconds": seconds}
            with suppress(OSError):  # the reader tells everybody that it ended, this one too
                socket.send_fds(self._requests, [json.dumps(request).encode()], [shell.fileno()])
        return ended

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


def serve(asked: Connection, session: Session) -> None:
    """Run what a host's process asks for, to its end; raises what the session raises when it is lost."""
    while True:
        try:
            command, seconds = json.loads(asked.recv_bytes())
        except (EOFError, OSError):
            return
        out = err = b""
        try:
            status, out, err = session.run(command, seconds, _MOST_BYTES)
            told: dict[str, int | str] = {"status": status}
        except (TimeoutError, ShellEndedError) as error:
            told = {"error": type(error).__name__, "message": str(error)}
        with suppress(OSError):  # it has ended
            for part in (json.dumps(told).encode(), out, err):
                asked.send_bytes(part)


# For it to notice the end of its input, and to end what it runs.
_END_SECONDS = 10.0


def _told(line: str) -> tuple[str, int] | None:
    """Return which run ended, and how; None for what pytest says besides."""
    try:
        said = json.loads(line)
        return str(said["ended"]), int(said["status"])
    except (ValueError, TypeError, KeyError):
        return None
