"""Shared by the tests of node health: a look at this machine, its findings, and Hyper-V's records."""

from __future__ import annotations

import time
from typing import Any

from image_builder.node.health import physical_host
from image_builder.node.health.model import Look, Outcome, Places
from image_builder.node.health.settings import Settings


def look(settings: Settings | None = None, places: Places | None = None, **memory: Any) -> Look:
    """Return a look that begins now; ``memory`` is what the previous one kept."""
    return Look(settings or Settings(), places or Places(), time.monotonic(), memory)


def found(outcome: Outcome) -> dict[str, str]:
    """Return the severity of each finding, by its code."""
    return {one.code: one.severity for one in outcome.findings}


def kvp_record(key: str, value: str) -> bytes:
    """Return a record as Hyper-V's daemon writes it."""
    fields = ((key, physical_host.KEY_BYTES), (value, physical_host.VALUE_BYTES))
    return b"".join(text.encode().ljust(size, b"\0") for text, size in fields)
