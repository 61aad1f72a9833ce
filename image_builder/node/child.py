"""Running programs: the agent's only way to start them.

``run`` waits until a program ends and returns its output. ``Child`` is a program that runs while its caller watches it.
Both kill a program that takes too long, and abandon one that can't be killed: no signal interrupts a system call that
is stuck on a dead disk or in a driver.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess  # noqa: TID251 (the node's door, as image_builder.system.process is the bake's)
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from image_builder.node.errors import ABSENT_STATUS, ProgramError

_TAIL_LINES = 20
# How long to wait for a killed program, in seconds: one that takes longer hangs in the kernel.
END_SECONDS = 10.0
# The exit status of a program that timed out, and of one that can't be started now.
LATE, REFUSED = 124, 126
# Programs that could not be killed, kept so that Python doesn't wait for them either.
_abandoned: list[subprocess.Popen[bytes]] = []
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
    "HOME": "/root",
}

Output = int | IO[bytes]
PIPE = subprocess.PIPE


class Child:
    """A running program. Used as a context manager, it is killed if it is still running when the block is left.

    ``stdout`` and ``stderr`` are files or ``PIPE``; no environment is inherited. ``own_group``: the program leads its
    own process group, and its descendants are killed with it. Raises OSError if it can't be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        stdout: Output,
        stderr: Output,
        stdin: Output = subprocess.DEVNULL,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        own_group: bool = False,
    ) -> None:
        self.argv = list(argv)
        self._own_group = own_group
        self._is_abandoned = False
        self._process = subprocess.Popen(
            self.argv,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=ENVIRONMENT if environment is None else environment,
            cwd=directory,
            start_new_session=own_group,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.returncode is None and not self._is_abandoned:
            self.end()
        self.close()

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Return the exit status, negative for a signal; None until the program has been reaped."""
        return self._process.returncode

    @property
    def stdout(self) -> IO[bytes] | None:
        """Return the read end of its standard output's pipe, if it has one."""
        return self._process.stdout

    @property
    def stderr(self) -> IO[bytes] | None:
        """Return the read end of its standard error's pipe, if it has one."""
        return self._process.stderr

    def wait(self, seconds: float) -> int | None:
        """Return the exit status; None if the program is still running after ``seconds``."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def communicate(self, data: bytes | None, seconds: float | None) -> tuple[bytes, bytes] | None:
        """Write its input, read its pipes to the end and reap it; return None if that takes longer than ``seconds``."""
        try:
            return self._process.communicate(data, seconds)
        except subprocess.TimeoutExpired:
            return None

    def has_ended(self) -> bool:
        """Return whether it has ended, without reaping it: until it is reaped, its process group id isn't reused."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self) -> None:
        """Send SIGKILL, with ``own_group`` to its whole process group; don't wait."""
        if self._own_group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        else:
            self._process.kill()

    def end(self, seconds: float | None = None) -> bool:
        """Kill it and return whether it died within ``seconds`` (default ``END_SECONDS``); abandon it otherwise.

        Wait only for the program itself, not for its children, which may keep its output open; and not forever, as
        Python does.
        """
        self.kill()
        try:
            self._process.wait(END_SECONDS if seconds is None else seconds)
        except subprocess.TimeoutExpired:
            self._is_abandoned = True
            _abandoned.append(self._process)
            return False
        finally:
            self.close()
        return True

    def close(self) -> None:
        """Close the pipes."""
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


@dataclass(frozen=True)
class Completed:
    """A program's exit status and output."""

    status: int
    stdout: str
    stderr: str


def run(
    argv: Sequence[str],
    *,
    ok: Container[int] = (0,),
    timeout: float | None = 60,
    input: str | None = None,
) -> Completed:
    """Run a program to completion, without inheriting the environment.

    ``timeout`` is in seconds; a program that can't be killed then is abandoned. Raises ProgramError with the command
    and the last lines of its output if the status isn't in ``ok``, the program is missing (127) or can't be started
    (126), or it timed out (124).
    """
    pipe = subprocess.PIPE
    try:
        child = Child(argv, stdin=pipe if input is not None else subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise cannot_start(argv, error) from error
    with child:
        output = child.communicate(None if input is None else input.encode(), timeout)
        if output is None:
            message = f"`{' '.join(argv)}` did not end within {timeout:g} s"
            if not child.end():
                message += f", and can't be killed: process {child.pid} hangs in the kernel and is left there"
            raise ProgramError(message, LATE, "")
    stdout, stderr = (data.decode("utf-8", "replace") for data in output)
    status = child.status
    assert status is not None
    if status not in ok:
        raise failed(argv, status, stderr + stdout)
    return Completed(status, stdout, stderr)


def watch(
    argv: Sequence[str],
    progress: Callable[[int], tuple[object, str]],
    report: Callable[[str], None],
    interval: float,
    patience: float,
) -> None:
    """Run a program that has no time limit as long as it makes progress; report that every ``interval`` seconds.

    ``progress`` is called with the process id and returns a value that changes as the program advances, and a text for
    people. Raises ProgramError, also (status 124) if the value stays the same for ``patience`` seconds.
    """
    import tempfile  # only here: it takes as long to load as everything else together

    with tempfile.TemporaryFile() as output:
        try:
            child = Child(argv, stdout=output, stderr=subprocess.STDOUT)
        except OSError as error:
            raise cannot_start(argv, error) from error
        started = moved = time.monotonic()
        position: object = None
        with child:
            while (status := child.wait(interval)) is None:
                before, (position, text) = position, progress(child.pid)
                now = time.monotonic()
                if position != before:
                    moved = now
                elif now - moved >= patience:
                    message = f"`{' '.join(argv)}` got no further for {patience:g} s, {text}"
                    raise ProgramError(message, LATE, "")
                report(f"{text}, {now - started:.0f} s")
        if status:
            output.seek(0)
            raise failed(argv, status, output.read().decode("utf-8", "replace"))


def cannot_start(argv: Sequence[str], error: OSError) -> ProgramError:
    """Return the error for a program that could not be started."""
    is_absent = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC)
    status = ABSENT_STATUS if is_absent else REFUSED
    return ProgramError(f"`{' '.join(argv)}`: {error.strerror}", status, "")


def failed(argv: Sequence[str], status: int, output: str) -> ProgramError:
    """Return the error for a program that ended with an unexpected status."""
    lines = tail(output).splitlines()
    message = "\n  ".join([f"`{' '.join(argv)}` ended with {status}", *(lines or ["(no output)"])])
    return ProgramError(message, status, tail(output))


def tail(output: str) -> str:
    """Return the last lines of a program's output."""
    return "\n".join(output.strip().splitlines()[-_TAIL_LINES:])
