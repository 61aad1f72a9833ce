"""The kernel's list of mounts, and mount(2), called directly: starting mount(8) would cost more than the mount."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# The flags of mount(2) that are used here (linux/mount.h).
RDONLY, NOSUID, NODEV, NOEXEC, NOATIME, BIND = 1, 2, 4, 8, 1024, 4096
PRIVATE, SHARED = 1 << 18, 1 << 20
# For looking at filesystems whose origin is unknown.
READ_ONLY = RDONLY | NOSUID | NODEV | NOEXEC
# How mountinfo escapes a space, a tab, a newline, a backslash and a hash.
_ESCAPE = re.compile(r"\\([0-7]{3})")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (*[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_char_p)


@dataclass(frozen=True)
class Mount:
    """A line of mountinfo: ``device`` is ``major:minor``, ``root`` the part of the filesystem mounted at ``target``.

    ``read_only`` is about the filesystem itself: a bind mount, or a sandboxed service's view, can be read-only while
    the filesystem isn't.
    """

    device: str
    root: str
    target: str
    filesystem: str
    source: str
    read_only: bool = False


def listed(proc: Path = Path("/proc")) -> list[Mount]:
    """Return the mounts that this process sees."""
    text = (proc / "self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    return [_parse(line) for line in text.splitlines()]


def _parse(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    fields, rest = before.split(" "), after.split(" ")
    read_only = "ro" in rest[2].split(",")
    return Mount(fields[2], _plain(fields[3]), _plain(fields[4]), rest[0], _plain(rest[1]), read_only)


def _plain(word: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), word)


def at(target: str | Path) -> Mount | None:
    """Return the topmost mount on a directory; None if nothing is mounted there."""
    matches = [mount for mount in listed() if mount.target == os.fspath(target)]
    return matches[-1] if matches else None


def below(path: str | Path) -> list[str]:
    """Return the mount points at and below a path, after resolving symbolic links in it."""
    real = os.path.realpath(path)
    return [mount.target for mount in listed() if mount.target == real or mount.target.startswith(f"{real}/")]


def check(result: int, call: str, path: str | Path) -> None:
    """Raise OSError, naming the call and the path, if a C library function did not return 0."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}", os.fspath(path))


def mount(source: str | Path, target: str | Path, filesystem: str, flags: int = 0, options: str = "") -> None:
    """Mount a filesystem. Raises OSError with the target's name."""
    result = _libc.mount(
        os.fsencode(source), os.fsencode(target), filesystem.encode(), flags, options.encode()
    )
    check(result, f"mount {filesystem or 'bind'} {source}", target)


def bind(source: str | Path, target: str | Path, *, apart: bool = False) -> None:
    """Bind-mount ``source`` at ``target``. Raises OSError.

    ``apart``: it is shared in a peer group of its own. In that of the filesystem of ``source``, whatever is mounted
    below ``target`` would appear below ``source`` too.
    """
    mount(source, target, "", BIND)
    if apart:
        mount("none", target, "", PRIVATE)
        mount("none", target, "", SHARED)


def unmount(target: str | Path) -> None:
    """Unmount. Raises OSError (EBUSY if the mount is still in use)."""
    check(_libc.umount2(os.fsencode(target), 0), "umount", target)


@contextmanager
def read_only(source: Path, filesystem: str, target: Path) -> Iterator[Path]:
    """Mount a filesystem read-only for inspection; the mount point is created if needed. Raises OSError."""
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    mount(source, target, filesystem, READ_ONLY)
    try:
        yield target
    finally:
        unmount(target)
