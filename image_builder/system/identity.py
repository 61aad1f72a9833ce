"""The identity of a process among all machines: whose it is (its run's name), its boot, its number and its start.

Another process on the same machine can tell whether it is still alive; from elsewhere, only its silence shows that.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SEPARATOR = "@"


def identity(name: str) -> str:
    """Return this process's identity as the holder of something for a run of that name."""
    number = os.getpid()
    return f"{name}{_SEPARATOR}{_machine()}.{number}.{_start(number)}"


def name_of(holder: str) -> str:
    """Return the run's name in an identity; a holder of another form is its own name."""
    return holder.partition(_SEPARATOR)[0]


def is_dead(holder: str) -> bool:
    """Return whether a process has ended for certain; never for one of another machine, boot or container."""
    _, _, process = holder.partition(_SEPARATOR)
    machine, _, rest = process.partition(".")
    number, _, start = rest.partition(".")
    if machine != _machine() or not number.isdecimal():
        return False
    if now := _start(int(number)):
        return now != start
    # It has ended, or is another user's, whose processes /proc may hide (`hidepid`).
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return True


def _machine() -> str:
    """Return the boot and the namespace in which a process's number counts."""
    return f"{_BOOT_ID.read_text().strip()}-{Path('/proc/self/ns/pid').stat().st_ino}"


def _start(number: int) -> str:
    """Return when a process started, in clock ticks since the boot; empty if it has ended."""
    with suppress(OSError):
        # Its name is in brackets, and may have any characters.
        state, *fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        if state not in ("Z", "X"):
            return fields[18]
    return ""
