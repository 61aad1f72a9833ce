"""The only way to run other programs.

Argument lists only, standard input closed unless given, an environment built from scratch, and errors
that carry the command and the last lines of its output.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.errors import CommandError
from image_builder.system.environment import environment

TAIL_LINES = 20
# How long a program has to end by itself before it is killed.
_STOP_SECONDS = 10.0
_TEXT: Mapping[str, Any] = {"text": True, "encoding": "utf-8", "errors": "replace"}
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)

Child = subprocess.Popen[bytes]
Arg = str | os.PathLike[str]
_refusing = threading.Event()
_stop: ContextVar[threading.Event | None] = ContextVar("stop", default=None)
_STOP_POLL_SECONDS = 0.2


def refuse_new() -> None:
    """Refuse to start any more programs (CommandError), since this process is about to end."""
    _refusing.set()


@contextmanager
def stopped_by(stop: threading.Event) -> Iterator[None]:
    """Within the block, make ``run`` in this thread end its program once ``stop`` is set, and start no more."""
    token = _stop.set(stop)
    try:
        yield
    finally:
        _stop.reset(token)


@contextmanager
def _stoppable(child: subprocess.Popen[Any]) -> Iterator[None]:
    """Kill a program and everything that it started as soon as the thread's ``stop`` is set."""
    stop, ended = _stop.get(), threading.Event()
    if stop is None:
        yield
        return

    def watch() -> None:
        while not ended.wait(_STOP_POLL_SECONDS):
            if stop.is_set():
                _kill_group(child)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _start(
    argv: Sequence[Arg], *, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start a program with an environment built from scratch. Raises CommandError."""
    args = _strings(argv)
    stop = _stop.get()
    if _refusing.is_set() or (stop and stop.is_set()):
        raise CommandError(f"not started, the work is ending: {shlex.join(args)}", argv=args)
    try:
        return subprocess.Popen(args, env=environment(env), **options)
    except OSError as error:
        raise CommandError(f"can't run {args[0]}: {error.strerror}", argv=args) from error


def _strings(argv: Sequence[Arg]) -> tuple[str, ...]:
    return tuple(os.fspath(arg) for arg in argv)


@dataclass(frozen=True)
class Completed:
    """A program that has ended: its output as text, its wall time in seconds."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float


def die_with_parent() -> None:
    """Make the kernel SIGKILL this process when its parent ends (``PR_SET_PDEATHSIG``)."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def run(
    argv: Sequence[Arg],
    *,
    ok: Sequence[int] = (0,),
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    input: str | None = None,
    timeout: float | None = None,
    log: Path | None = None,
    on_line: Callable[[str], None] | None = None,
) -> Completed:
    """Run ``argv`` to completion.

    The command and its whole output are appended to ``log``; ``on_line`` gets each line as it arrives.
    With either, standard error is merged into standard output, and ``input`` isn't possible. ``timeout`` is in
    seconds; a timeout or an interrupt kills the program and everything that it started. Raises CommandError for a
    status outside ``ok``, a program that doesn't exist, or a timeout.
    """
    args = _strings(argv)
    shown = shlex.join(args)
    streaming = log is not None or on_line is not None
    assert input is None or not streaming
    started = time.monotonic()
    child = _start(
        args,
        stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if streaming else subprocess.PIPE,
        env=env,
        cwd=cwd,
        process_group=0,
        **_TEXT,
    )
    try:
        with _stoppable(child):
            if streaming:
                out, err = _stream(child, shown, timeout, log, on_line), ""
            else:
                out, err = child.communicate(input, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        _kill_group(child)
        if streaming:
            child.wait()
        else:
            child.communicate()
        raise CommandError(f"timed out after {timeout:g} s: {shown}", argv=args) from error
    except BaseException:
        _kill_group(child)
        child.wait()
        raise
    done = Completed(args, child.returncode, out, err, time.monotonic() - started)
    if done.returncode not in ok:
        tail = "\n".join((out + err).rstrip().splitlines()[-TAIL_LINES:])
        raise CommandError(f"exit status {done.returncode}: {shown}", argv=args, tail=tail)
    return done


def _stream(
    child: subprocess.Popen[str],
    shown: str,
    timeout: float | None,
    log: Path | None,
    on_line: Callable[[str], None] | None,
) -> str:
    """Copy the child's lines to the log and the callback, and return the last of them."""
    assert child.stdout is not None
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        _kill_group(child)

    timer = threading.Timer(timeout or 0, expire)
    lines: deque[str] = deque(maxlen=2000)
    sink = log.open("a", encoding="utf-8") if log else None
    try:
        if timeout is not None:
            timer.start()
        if sink:
            sink.write(f"+ {shown}\n")
        for line in child.stdout:
            lines.append(line)
            if sink:
                sink.write(line)
            if on_line:
                on_line(line.rstrip("\n"))
        child.wait()
    finally:
        timer.cancel()
        child.stdout.close()
        if sink:
            sink.close()
    if expired.is_set():
        raise subprocess.TimeoutExpired(child.args, timeout or 0)
    return "".join(lines)


@contextmanager
def background(
    argv: Sequence[Arg],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stop_seconds: float = _STOP_SECONDS,
    with_all: bool = False,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a daemon alongside the caller; at the end, send it SIGTERM, then SIGKILL. It is also killed if we die.

    ``with_all`` is for a program that starts others: it gets SIGINT, as from a terminal, and then everything left in
    its process group is killed.
    """
    with log.open("ab") as sink:
        child = _start(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            preexec_fn=die_with_parent,
            process_group=0 if with_all else None,
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGINT if with_all else signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(stop_seconds)
        if with_all:
            _kill_group(child)
        elif child.poll() is None:
            child.kill()
        child.wait()


@contextmanager
def conversation(
    argv: Sequence[Arg],
    *,
    stdin: int,
    log: Path,
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that talks over ``stdin``, a socket; ``log`` gets its output.

    It ends at the end of its input, which the caller must bring about before leaving the block; one that doesn't end
    is killed. Raises CommandError for a program that doesn't exist.
    """
    with log.open("ab") as sink:
        child = _start(argv, stdin=stdin, stdout=sink, stderr=subprocess.STDOUT, env=env, process_group=0)
    try:
        yield child
    finally:
        try:
            child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            _kill_group(child)
            child.wait()


def tail(log: Path) -> str:
    """Return the last lines of a program's log, indented; empty if there is none."""
    lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
    return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:])


def detach(argv: Sequence[Arg], *, log: Path) -> subprocess.Popen[bytes]:
    """Start a program that outlives its caller, in its own session; its output goes to ``log``."""
    with log.open("ab") as sink:
        return _start(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def shell(argv: Sequence[Arg]) -> int:
    """Give the terminal to an interactive program; return its status."""
    sys.stdout.flush()
    return subprocess.call(_strings(argv))


def _kill_group(child: subprocess.Popen[Any]) -> None:
    """SIGKILL a child and everything it started: a grandchild may hold the output open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
