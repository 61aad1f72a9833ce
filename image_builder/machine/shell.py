"""One shell on a machine, which runs one command after another.

A channel, a login session and a sudo for each of several hundred commands cost more than the commands: on an
emulated machine, two thirds of a whole run.
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
# A program and its arguments, possibly after assignments. Anything else goes to eval, inside which it can't end the
# construct around it, but the shell then creates one more process.
_RESERVED = "case|coproc|do|done|elif|else|esac|fi|for|function|if|in|select|then|time|until|while"
_PLAIN = re.compile(rf"(?!(?:{_RESERVED})\b)[\w/](?:[\w@%+=:,./ -]|'[^'\n]*')*", re.ASCII)


class ShellEndedError(OSError):
    """The shell or the connection is gone, so the command's effect isn't known.

    ``last_line`` is the last line received from it; ``lost`` means that it was the connection.
    """

    def __init__(self, message: str, last_line: str = "", *, lost: bool = False) -> None:
        super().__init__(message)
        self.last_line = last_line
        self.lost = lost


class Shell:
    """A shell over a connection that others may use too.

    On each stream, a word that the command can't know marks the end of its output. It has no standard input, and it
    runs in a subshell: variables that it sets and directories that it changes to are gone afterwards.
    """

    def __init__(self, transport: paramiko.Transport, *, sudo: bool, seconds: float) -> None:
        """Start it, through ``sudo -n`` or as the logged-in user.

        ``seconds`` is how long the other side may take for that. Raises SSHException.
        """
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
        """End it; programs still running in it have their standard streams closed."""
        self._channel.close()

    def run(self, command: str, seconds: float, limit: int | None = None) -> tuple[int, bytes, bytes]:
        """Return a command's status (128 plus the number for a signal) and its output on both streams.

        Only the first ``limit`` bytes of each stream are kept. Raises TimeoutError if it takes longer than ``seconds``,
        ShellEndedError; in both cases the shell is closed.
        """
        out, err = _Stream(limit), _Stream(limit)
        try:
            status = self._run(command, time.monotonic() + seconds, out, err)
        except (OSError, EOFError, paramiko.SSHException) as error:
            # Before closing the channel, which also ends its input.
            lost = not self._channel.eof_received
            while self._channel.recv_stderr_ready():
                err.add(self._channel.recv_stderr(_BYTES))
            self.close()
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"timed out after {seconds:g} s: {command}") from error
            message = f"{error or type(error).__name__}: {command}"
            # A login shell that refuses to work says so on standard output.
            raise ShellEndedError(message, _last_line(err.head) or _last_line(out.head), lost=lost) from error
        return status, out.head, err.head

    def _run(self, command: str, deadline: float, out: _Stream, err: _Stream) -> int:
        end = f"'\\n%s %d\\n' {self._word} $s"
        body = command if _PLAIN.fullmatch(command) else f"eval {shlex.quote(command)}"
        script = f"({body}) </dev/null; s=$?; printf {end}; printf {end} >&2\n"
        self._channel.settimeout(max(0.0, deadline - time.monotonic()))
        self._channel.sendall(script.encode())
        while (status := out.take_end(self._end)) is None:
            self._read(out, self._channel.recv, deadline)
            # If it weren't read, the command would block once the window is full.
            while self._channel.recv_stderr_ready():
                err.add(self._channel.recv_stderr(_BYTES))
        while err.take_end(self._end) is None:
            self._read(err, self._channel.recv_stderr, deadline)
        return status

    def _read(self, stream: _Stream, receive: Callable[[int], bytes], deadline: float) -> None:
        """Wait a moment for more output on a stream."""
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self._channel.settimeout(min(remaining, _LOOK_SECONDS))
        with contextlib.suppress(TimeoutError):
            part = receive(_BYTES)
            if not part:
                raise EOFError("the shell has ended")
            stream.add(part)


class _Stream:
    """What has arrived on one of a command's streams: its beginning, up to the limit, and its last bytes."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._bytes = bytearray()

    @property
    def head(self) -> bytes:
        return bytes(self._bytes[: self._limit])

    def add(self, part: bytes) -> None:
        self._bytes += part
        if self._limit is not None and len(self._bytes) > self._limit + _LONGEST_END:
            del self._bytes[self._limit : -_LONGEST_END]

    def take_end(self, end: re.Pattern[bytes]) -> int | None:
        """Remove the end mark and return the status in it; return None if it hasn't arrived yet."""
        match = end.search(self._bytes, max(0, len(self._bytes) - _LONGEST_END))
        if match is None:
            return None
        start, status = match.start(), int(match[1])
        del match  # it holds on to the buffer, which can't be resized until then
        del self._bytes[start:]
        return status


def _last_line(stream: bytes) -> str:
    lines = stream.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""
