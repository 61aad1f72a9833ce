"""Keeps unit tests free of side effects: no processes, no sockets, nothing that only root may do.

Python's audit events report processes and sockets wherever they come from, including libraries. Root's powers
are dropped from the thread as capabilities, except those to read and write other users' files, since a checkout
may belong to someone else.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_FORBIDDEN = frozenset(
    [
        "subprocess.Popen",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "pty.spawn",
        "socket.__new__",
        "socket.bind",
        "socket.connect",
        "socket.getaddrinfo",
        "socket.gethostbyname",
    ]
)
_CAP_VERSION_3 = 0x20080522
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2
_LEFT = 1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH

_state = {"installed": False, "active": False}
_libc = ctypes.CDLL(None, use_errno=True)


class SideEffectError(BaseException):
    """A unit test did what only a marked test may. Not an Exception: code under test must not swallow it."""


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if _state["active"] and event in _FORBIDDEN:
        raise SideEffectError(f"a unit test can't do this: {event}{arguments!r}; mark it root, boot or gpu")


@contextmanager
def guarded() -> Iterator[None]:
    """Raise SideEffectError for anything that a unit test may not do, until the block ends."""
    if not _state["installed"]:
        sys.addaudithook(_hook)  # can't be removed again, hence the state
        _state["installed"] = True
    before = _capabilities()
    _set_capabilities(before, _LEFT)
    _state["active"] = True
    try:
        yield
    finally:
        _state["active"] = False
        _set_capabilities(before, None)


def _capabilities() -> bytes:
    """Return this thread's capabilities: effective, permitted, inheritable, low words then high words."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAP_VERSION_3, 0))
    data = ctypes.create_string_buffer(24)
    if _libc.capget(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    return data.raw[:24]


def _set_capabilities(known: bytes, limit: int | None) -> None:
    """Set the effective capabilities to the permitted ones, or only to those that are also in ``limit``."""
    low, permitted, inheritable, high, permitted_high, inheritable_high = struct.unpack("=6I", known)
    if limit is not None:
        low, high = low & limit, high & (limit >> 32)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAP_VERSION_3, 0))
    data = struct.pack("=6I", low, permitted, inheritable, high, permitted_high, inheritable_high)
    if _libc.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")
