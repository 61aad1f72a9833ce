"""The guard of ``ansible-runner worker`` on a worker host: nothing of a slice outlives the connection that brought it.

    python3 -c SOURCE RUNNER SECONDS SILENT_SECONDS

Standard input has a line with a number, that many bytes for the runner, and then a byte every few seconds for as long
as the slice is wanted. Standard output is the runner's. When input ends, or is silent for too long (a partitioned
network sends no EOF), or time is up, everything that was started is killed and the directory removed: otherwise a slice
that was given up would still tell hosts to join, at the same time as the slice that replaced it.

The source is sent along, so image-builder doesn't need to be on the worker: standard library only, Python 3.11.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGALRM)
_GIVEN_UP = 75
_CHUNK = 65536
_ASKED_SECONDS = 2.0
_libc = ctypes.CDLL(None, use_errno=True)


def main(argv: list[str]) -> int:
    """Run the slice; return the runner's exit status, or 75 if the slice is no longer wanted."""
    runner, seconds, silent_seconds = argv[0], float(argv[1]), float(argv[2])
    folder = tempfile.mkdtemp(prefix="image-builder-slice-", dir=_memory())
    try:
        with adopting(asked_seconds=_ASKED_SECONDS):
            signal.setitimer(signal.ITIMER_REAL, seconds)
            return _run(runner, folder, silent_seconds)
    finally:
        shutil.rmtree(folder)


@contextmanager
def adopting(*, asked_seconds: float = 0.0) -> Iterator[None]:
    """Adopt all processes started in the block, and end them with the block; signals end the block, too.

    With ``asked_seconds``, the processes are first asked to end. Signals don't interrupt the cleanup.
    """
    for number in _ENDS:
        signal.signal(number, _end)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        for number in _ENDS:
            signal.signal(number, signal.SIG_IGN)
        if asked_seconds:
            _ask_children_to_end(asked_seconds)
        end_children()


def _memory() -> str:
    """Return where the directory goes: it will hold the key that hosts accept, which must not be on a disk."""
    for place in (os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm"):
        if place and os.access(place, os.W_OK | os.X_OK):
            return place
    raise SystemExit("neither $XDG_RUNTIME_DIR nor /dev/shm can be written: a key is kept only in memory")


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel for this signal when this process's parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _run(runner: str, folder: str, silent_seconds: float) -> int:
    path = f"{Path(runner).parent}:/usr/local/bin:/usr/bin:/bin" if "/" in runner else os.environ["PATH"]
    inherited = {name: value for name, value in os.environ.items() if name in ("LANG", "PYTHONPATH")}
    with subprocess.Popen(
        [runner, "worker", "--private-data-dir", folder],
        stdin=subprocess.PIPE,
        env={"PATH": path, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **inherited},
        bufsize=0,
        preexec_fn=die_with_parent,
    ) as child:
        try:
            return _attend(child, silent_seconds)
        finally:
            child.kill()


def _attend(child: subprocess.Popen[bytes], silent_seconds: float) -> int:
    """Feed the runner its input, then wait until it ends or is no longer wanted."""
    assert child.stdin
    remaining = _announced()
    ended = os.pidfd_open(child.pid)
    try:
        while True:
            ready, _, _ = select.select([0, ended], [], [], silent_seconds)
            if ended in ready:
                return child.wait()
            data = os.read(0, _CHUNK) if ready else b""
            if not data:
                return _GIVEN_UP
            if remaining:
                child.stdin.write(data[:remaining])
                remaining = max(0, remaining - len(data))
                if not remaining:
                    child.stdin.close()
    except BrokenPipeError:
        return child.wait()  # it ended before it had read everything
    finally:
        os.close(ended)


def _announced() -> int:
    """Read the line with the number, byte by byte, since what follows is for the runner."""
    digits = b""
    while (byte := os.read(0, 1)).isdigit():
        digits += byte
    return int(digits or b"0")


def _ask_children_to_end(seconds: float) -> None:
    """Let agents remove their sockets, whose location can't be set: set-group-ID programs ignore such variables."""
    for pid in children():
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.02)
        except ChildProcessError:
            return


def end_children() -> None:
    """Kill every descendant of this process, which adopts their orphans; return when none is left."""
    while True:
        for pid in children():
            # Not reaped yet, so the PID can't have been reused.
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children() -> list[int]:
    """Return the children of this process, including zombies."""
    own_pid = str(os.getpid())
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # pid (name) state ppid: the name may contain anything, even a parenthesis.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if fields[1] == own_pid:
            pids.append(int(entry.name))
    return pids


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
