"""The kernel's clock: whether something keeps it synchronized, and how far it may be off (adjtimex(2))."""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from image_builder.node.health.model import Finding, Look, Outcome, Sample
from image_builder.node.health.settings import Settings

# struct timex of 64-bit machines (linux/timex.h): modes, offset, freq, maxerror, esterror, status; 208 bytes in all.
_FIELDS, _SIZE = struct.Struct("=I4xqqqqi4x"), 208
_TIME_ERROR = 5
_STA_UNSYNC, _STA_NANO = 0x0040, 0x2000
# A machine that has just come up may not have found its time servers yet.
_GRACE_SECONDS = 600
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Clock:
    """The clock's state, in seconds: ``offset`` is still to be corrected, ``error`` is estimated, ``worst`` a bound."""

    synchronized: bool
    offset: float
    error: float
    worst: float
    uptime: float


def check(look: Look) -> Outcome:
    """Query the kernel. Raises OSError."""
    clock = read(look.places.proc)
    samples = (
        Sample("clock_synchronized", float(clock.synchronized)),
        Sample("clock_offset_seconds", clock.offset),
        Sample("clock_estimated_error_seconds", clock.error),
        Sample("clock_maximum_error_seconds", clock.worst),
    )
    return Outcome(tuple(rule(clock, look.settings)), samples)


def read(proc: Path) -> Clock:
    """Return the state of the kernel's clock; changes nothing. Raises OSError."""
    data = ctypes.create_string_buffer(_SIZE)  # modes 0: only read
    state = _libc.adjtimex(data)
    if state < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"adjtimex: {os.strerror(code)}")
    uptime = float((proc / "uptime").read_text(encoding="ascii").split()[0])
    return parse(data.raw, state, uptime)


def parse(data: bytes, state: int, uptime: float) -> Clock:
    """Return the clock's state from a ``struct timex`` and the call's result."""
    _modes, offset, _frequency, worst, error, status = _FIELDS.unpack_from(data)
    unit = 1e-9 if status & _STA_NANO else 1e-6
    is_kept = state != _TIME_ERROR and not status & _STA_UNSYNC
    return Clock(is_kept, offset * unit, error * 1e-6, worst * 1e-6, uptime)


def rule(clock: Clock, settings: Settings) -> list[Finding]:
    """Return what is wrong with the clock.

    An unsynchronized clock is only a warning: time servers are shared, and a clock keeps time for hours without them.
    """
    if not clock.synchronized:
        if clock.uptime < _GRACE_SECONDS:
            return []
        return [
            Finding("clock.unsynchronized", "clock", "warn", "the clock is not synchronized", patient=True)
        ]
    off = max(abs(clock.offset), clock.error)
    if off <= settings.clock_error_seconds:
        return []
    detail = f"the clock is off by about {off:.3g} s"
    return [Finding("clock.off", "clock", "fail", detail, patient=True)]
