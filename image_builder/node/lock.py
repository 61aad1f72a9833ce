"""Be the only one: a lock that the kernel takes back from a process that ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What is done under a lock, a test or a filesystem that is made, ends within so many seconds.
LONGEST_WORK = 900.0
_POLL_SECONDS = 0.05


@contextmanager
def held(path: Path, seconds: float = LONGEST_WORK) -> Iterator[None]:
    """Hold the lock of a file, which is made where there is none.

    Another holder is waited for, ``seconds`` at most: one that hangs in the kernel keeps it until the machine is
    started again. Raises OSError; TimeoutError when the time is over.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _take(fd, path, seconds)
        try:
            yield
        finally:
            # A forked child has the same lock, and may outlive this process: closing alone would leave it held.
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _take(fd: int, path: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                what = f"another process has held it for more than {seconds:g} s"
                raise TimeoutError(errno.ETIMEDOUT, what, str(path)) from None
            time.sleep(_POLL_SECONDS)
        else:
            return
