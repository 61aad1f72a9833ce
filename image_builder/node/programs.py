"""The one door to other programs on the node."""

from __future__ import annotations

import subprocess  # noqa: TID251 (the node's door, as image_builder.process is the bake's)
from collections.abc import Container, Sequence
from dataclasses import dataclass

from image_builder.node.errors import ProgramError

_TAIL_LINES = 20
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

    ``timeout`` is in seconds. Raises ProgramError with the command and the last lines of its output: a status
    that is not in ``ok`` (127 where there is no such program), or too late.
    """
    words = " ".join(argv)
    try:
        done = subprocess.run(
            list(argv),
            stdin=None if input is not None else subprocess.DEVNULL,
            input=input,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=ENVIRONMENT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ProgramError(f"`{words}` did not end within {timeout:g} s", 124, "") from error
    except OSError as error:
        raise ProgramError(f"`{words}`: {error.strerror}", 127, "") from error
    if done.returncode not in ok:
        raise ProgramError(
            failure(argv, done.returncode, done.stderr + done.stdout),
            done.returncode,
            tail(done.stderr + done.stdout),
        )
    return Completed(done.returncode, done.stdout, done.stderr)


def tail(output: str) -> str:
    """Return the last lines of what a program said."""
    return "\n".join(output.strip().splitlines()[-_TAIL_LINES:])


def failure(argv: Sequence[str], status: int, output: str) -> str:
    """Return what to say of a command that failed."""
    lines = tail(output).splitlines()
    return "\n  ".join([f"`{' '.join(argv)}` ended with {status}", *(lines or ["it said nothing"])])
