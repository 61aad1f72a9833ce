"""The kernel's list of mounts, and mount(2): a program for it would cost more than the mount."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_NOATIME, _MS_BIND = 1, 2, 4, 8, 1024, 4096
READ_ONLY = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
NOATIME = _MS_NOATIME
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (*[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_char_p)


@dataclass(frozen=True)
class Mount:
    """A line of mountinfo: ``device`` is ``major:minor``, ``root`` what of the filesystem is seen at ``target``."""

    device: str
    root: str
    target: str
    filesystem: str
    source: str


def listed(proc: Path = Path("/proc")) -> list[Mount]:
    """Return what is mounted, as this process sees it."""
    text = (proc / "self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    return [_parse(line) for line in text.splitlines()]


def _parse(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    words, rest = before.split(" "), after.split(" ")
    return Mount(words[2], _plain(words[3]), _plain(words[4]), rest[0], _plain(rest[1]))


def _plain(word: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        word = word.replace(code, character)
    return word


def _call(source: str, target: Path, filesystem: str, flags: int, options: str) -> None:
    made = _libc.mount(source.encode(), os.fsencode(target), filesystem.encode(), flags, options.encode())
    if made != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount {filesystem or 'bind'} {source}: {os.strerror(code)}", os.fspath(target))


def mount(source: Path, target: Path, filesystem: str, flags: int, options: str = "") -> None:
    """Mount a filesystem; raises OSError."""
    _call(os.fspath(source), target, filesystem, flags, options)


def bind(source: Path, target: Path) -> None:
    """Show ``source`` at ``target`` too; raises OSError."""
    _call(os.fspath(source), target, "", _MS_BIND, "")


def unmount(target: Path) -> None:
    """Unmount; raises OSError."""
    if _libc.umount2(os.fsencode(target), 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"umount: {os.strerror(code)}", os.fspath(target))


@contextmanager
def read_only(source: Path, filesystem: str, target: Path) -> Iterator[Path]:
    """Mount a filesystem for a look at it, at a place that is made for that; raises OSError."""
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    mount(source, target, filesystem, READ_ONLY)
    try:
        yield target
    finally:
        unmount(target)
