"""One shell of root's on a machine, which runs one command after the other.

A channel, a login session and a sudo for each of some hundreds of commands cost more than the commands: on an
emulated machine two thirds of a whole run.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shlex
import time
from collections.abc import Callable

import paramiko

_LOOK_SECONDS = 0.5
_BYTES = 1 << 16
_LONGEST_END = 64


class ShellEndedError(OSError):
    """The shell is gone, or the connection is: what the command did is not known."""


class RootShell:
    """A shell over a connection that others may use too.

    What a command writes is told from the next one's by a word that it can't know, behind the end of each stream; it
    reads nothing, and runs in a copy of the shell: what it sets, or where it goes, is gone with it.
    """

    def __init__(self, transport: paramiko.Transport, *, sudo: bool, seconds: float) -> None:
        """Start it. ``seconds`` is how long the other side may take for that. Raises SSHException."""
        self._word = secrets.token_hex(16)
        self._end = re.compile(rb"\n%b (\d+)\n\Z" % self._word.encode())
        self._channel = transport.open_session(timeout=seconds)
        try:
            self._channel.settimeout(seconds)
            self._channel.exec_command("exec sudo -n /bin/sh" if sudo else "exec /bin/sh")
        except BaseException:
            self._channel.close()
            raise

    def close(self) -> None:
        """End it; what still runs in it gets its standard streams closed."""
        self._channel.close()

    def run(self, command: str, seconds: float) -> tuple[int, bytes, bytes]:
        """Return a command's status (128 and its number for a signal) and what it wrote to its two streams.

        Raises TimeoutError when it takes longer than ``seconds``, ShellEndedError; the shell is closed then.
        """
        try:
            return self._run(command, time.monotonic() + seconds)
        except (OSError, EOFError, paramiko.SSHException) as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"no end after {seconds:g} s: {command}") from error
            raise ShellEndedError(f"{error or type(error).__name__}: {command}") from error

    def _run(self, command: str, deadline: float) -> tuple[int, bytes, bytes]:
        end = f"'\\n%s %d\\n' {self._word} $s"
        told = f"(eval {shlex.quote(command)}) </dev/null; s=$?; printf {end}; printf {end} >&2\n"
        self._channel.settimeout(max(0.0, deadline - time.monotonic()))
        self._channel.sendall(told.encode())
        out, err = bytearray(), bytearray()
        while not (ended := self._end.search(out, max(0, len(out) - _LONGEST_END))):
            self._read(out, self._channel.recv, deadline)
            # What nobody takes there would hold up the command, once the window is full.
            while self._channel.recv_stderr_ready():
                err += self._channel.recv_stderr(_BYTES)
        while not (also := self._end.search(err, max(0, len(err) - _LONGEST_END))):
            self._read(err, self._channel.recv_stderr, deadline)
        return int(ended[1]), bytes(out[: ended.start()]), bytes(err[: also.start()])

    def _read(self, stream: bytearray, receive: Callable[[int], bytes], deadline: float) -> None:
        """Wait a moment for more of a stream."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._channel.settimeout(min(left, _LOOK_SECONDS))
        with contextlib.suppress(TimeoutError):
            part = receive(_BYTES)
            if not part:
                raise EOFError("the shell has ended")
            stream += part
