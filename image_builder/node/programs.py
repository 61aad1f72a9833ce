"""The one door to other programs on the node."""

from __future__ import annotations

import contextlib
import subprocess  # noqa: TID251 (the node's door, as image_builder.system.process is the bake's)
from collections.abc import Container, Sequence
from dataclasses import dataclass

from image_builder.node.errors import ProgramError

_TAIL_LINES = 20
# Seconds that a killed program is waited for: longer, and it hangs in the kernel.
END_SECONDS = 10.0
# Programs that could not be killed, kept so that Python doesn't wait for them either.
_left: list[subprocess.Popen[str]] = []
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
    "HOME": "/root",
}


@dataclass(frozen=True)
class Completed:
    """What a program said, and its exit status."""

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
    """Run a program to its end, with an environment made from nothing.

    ``timeout`` is in seconds; what can't be killed then is left behind. Raises ProgramError with the command and the
    last lines of its output: a status that is not in ``ok`` (127 where there is no such program), or too late.
    """
    words = " ".join(argv)
    try:
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE if input is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=ENVIRONMENT,
        )
    except OSError as error:
        raise ProgramError(f"`{words}`: {error.strerror}", 127, "") from error
    try:
        stdout, stderr = child.communicate(input, timeout)
    except subprocess.TimeoutExpired as error:
        what = f"`{words}` did not end within {timeout:g} s"
        if not _end(child):
            what += f", and can't be killed: process {child.pid} hangs in the kernel and is left there"
        raise ProgramError(what, 124, "") from error
    except BaseException:
        _end(child)
        raise
    if child.returncode not in ok:
        said = stderr + stdout
        raise ProgramError(failure(argv, child.returncode, said), child.returncode, tail(said))
    return Completed(child.returncode, stdout, stderr)


def _end(child: subprocess.Popen[str]) -> bool:
    """Kill a program; tell whether it died.

    It is waited for, not what it started, which may keep its output open; and not for ever, as Python does: a system
    call on a dead disk ends with no signal.
    """
    child.kill()
    try:
        child.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        _left.append(child)
        return False
    finally:
        for stream in (child.stdin, child.stdout, child.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
    return True


def tail(output: str) -> str:
    """Return the last lines of what a program said."""
    return "\n".join(output.strip().splitlines()[-_TAIL_LINES:])


def failure(argv: Sequence[str], status: int, output: str) -> str:
    """Return what to say of a command that failed."""
    lines = tail(output).splitlines()
    return "\n  ".join([f"`{' '.join(argv)}` ended with {status}", *(lines or ["it said nothing"])])
