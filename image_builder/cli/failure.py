"""A failure as people and programs see it: the message, the place, the last lines, a hint, the exit code."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from image_builder.cli import ci
from image_builder.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    CommandError,
    DefinitionError,
    HostError,
    ImageBuilderError,
    SpaceError,
    StageError,
)

_SIGNALS = {
    signal.SIGHUP: "ended by SIGHUP: its terminal was closed",
    signal.SIGPIPE: "ended because nobody reads its output any more",
    signal.SIGTERM: "ended by SIGTERM",
}
# The CI service that errors are shown to, in addition to readers of the log.
service: ci.Service | None = None


def exit_codes() -> list[tuple[int, str, str]]:
    """Return the table of exit codes: (code, name, meaning), in order of the codes."""
    classes: list[type[ImageBuilderError]] = [ImageBuilderError, *ImageBuilderError.__subclasses__()]
    return sorted(
        [
            (0, "", "success"),
            *((error.exit_code, error.__name__, error.meaning) for error in classes),
            (EXIT_BUG, "", "a bug in image-builder; it shows a traceback"),
            (EXIT_INTERRUPTED, "", "interrupted by Ctrl-C"),
            *((128 + number, "", meaning) for number, meaning in _SIGNALS.items()),
        ]
    )


def text(error: ImageBuilderError, command: str = "") -> str:
    """Return an error as text for people. ``command`` is the command line that led to it, for a retry."""
    cause = error.cause if isinstance(error, StageError) else error
    lines = [f"error: {error.message}"]
    if isinstance(cause, CommandError) and cause.tail:
        lines += [f"  | {line}" for line in cause.tail.splitlines()]
    if isinstance(error, StageError):
        if error.log:
            lines.append(f"log: {error.log}")
        if command and error.enterable and "--shell-on-failure" not in command:
            lines.append(f"to enter the sandbox: {command} --shell-on-failure")
    if error.hint:
        lines.append(f"hint: {error.hint}")
    return "\n".join(lines)


def as_json(error: ImageBuilderError) -> dict[str, Any]:
    """Return an error as ``--json`` prints it."""
    cause = error.cause if isinstance(error, StageError) else error
    report: dict[str, Any] = {
        "kind": type(error).__name__,
        "exit_code": error.exit_code,
        "message": error.message,
        "hint": error.hint,
    }
    if isinstance(error, StageError):
        report |= {"stage": error.stage, "log": error.log, "cause": type(cause).__name__}
    if isinstance(cause, CommandError):
        report |= {"command": list(cause.argv), "last_lines": cause.tail.splitlines()}
    if isinstance(cause, DefinitionError):
        report["problems"] = [{"where": p.where, "path": p.path, "what": p.reason} for p in cause.problems]
    return {"error": report}


def _expected(error: OSError) -> ImageBuilderError | None:
    """Return the expected error for a refusal by the operating system, or None if it is a bug of ours."""
    where = error.filename or "a file"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SpaceError(
            f"no space left: {where}",
            hint="free some space; in a store, with image-builder store gc --keep 1",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return HostError(f"not permitted: {where}", hint="run as root, or use your own files and directories")
    if error.errno == errno.EROFS:
        return HostError(f"read-only filesystem: {where}")
    return None


def guard(work: Callable[[], int], *, json_wanted: bool, command: str = "") -> int:
    """Run ``work`` and return its exit status; show errors that it raises. SystemExit passes through."""
    try:
        return _shown(work, json_wanted, command)
    except BrokenPipeError:
        # The reader of our results has gone: `image-builder plan worker | head -3`. There is nothing to report.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _shown(work: Callable[[], int], json_wanted: bool, command: str) -> int:
    try:
        status = work()
        sys.stdout.flush()  # at exit it would be too late to report a failure
        return status
    except ImageBuilderError as error:
        return _show(error, json_wanted, command)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and (expected := _expected(error)):
            return _show(expected, json_wanted, command)
        traceback.print_exc()
        print(
            "error: this is a bug in image-builder; please report it with the lines above",
            file=sys.stderr,
        )
        return EXIT_BUG


def _show(error: ImageBuilderError, json_wanted: bool, command: str) -> int:
    sys.stdout.flush()
    report(error, command, on_stdout=not json_wanted)
    if json_wanted:
        print(json.dumps(as_json(error), indent=1), flush=True)
    return error.exit_code


def report(error: ImageBuilderError, command: str = "", *, on_stdout: bool) -> None:
    """Print an error for people, and for the CI service if there is one.

    Services read both streams. Without ``on_stdout``, a JSON result remains the only document there.
    """
    print(text(error, command), file=sys.stderr, flush=True)
    for line in ci.annotate(error, service) if service else ():
        print(line, file=sys.stdout if on_stdout else sys.stderr, flush=True)


def end_on_sigterm() -> None:
    """Make SIGTERM and SIGHUP unwind the stack, so that open contexts are cleaned up, and set the exit status."""

    def end(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def command_line() -> str:
    """Return this run's command as the user would type it again; in a log, without repeating the values of ``-e``."""
    import shlex
    import shutil

    started = os.environ.get("_IMAGE_BUILDER_NAME") or sys.argv[0]
    program = [started]
    if started.endswith("__main__.py"):
        program = [sys.executable, "-m", "image_builder.cli"]
    elif (
        (found := shutil.which(Path(started).name))
        and Path(started).exists()
        and Path(found).samefile(started)
    ):
        program = [Path(started).name]
    if not sys.stderr.isatty() and any(
        _has_values(*pair) for pair in zip(sys.argv, sys.argv[1:], strict=False)
    ):
        return "the same command with"
    return shlex.join([*program, *sys.argv[1:]])


def _has_values(before: str, word: str) -> bool:
    """Return whether a word of the command line, after another one, holds extra variables, not just their file."""
    if before in ("-e", "--extra-vars"):
        return not word.startswith("@")
    option, _, value = word.partition("=") if word.startswith("--") else (word[:2], "", word[2:])
    return option in ("-e", "--extra-vars") and bool(value) and not value.startswith("@")
