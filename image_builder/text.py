"""Text for people: numbers, durations, times, names, rows, suggestions, JSON."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

_UNITS = ("B", "kB", "MB", "GB", "TB")


def human_bytes(count: float) -> str:
    """Return a number of bytes in decimal units with three digits: ``1.23 GB``."""
    for unit in _UNITS[:-1]:
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {_UNITS[-1]}"


def human_seconds(seconds: float) -> str:
    """Return a duration: ``0.4 s``, ``42 s``, ``3:07 min``, ``1:02:03 h``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02} h"


def stamp(seconds: float) -> str:
    """Return a Unix time in UTC, as Kubernetes and Azure write it: ``2026-01-31T12:00:00Z``."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def short_list(names: Sequence[str], most: int = 5) -> str:
    """Return names for a message: all of them, or the first few and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def printable(text: str) -> str:
    """Return a text that can't control a terminal; its source may be another machine."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def columns(rows: Sequence[tuple[str, ...]]) -> str:
    """Align rows of printable text in columns, two spaces apart; cells are never cut or wrapped."""
    if not rows:
        return ""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return ``, did you mean `x`?`` for the closest candidate, or an empty string."""
    close = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return f", did you mean `{close[0]}`?" if close else ""


def json_lines(content: Mapping[str, Any]) -> str:
    """Return an object as JSON text: one line per key, and one per item of a list directly below it."""
    lines = []
    for key, value in content.items():
        items = ",\n  ".join(map(json.dumps, value)) if isinstance(value, list) else ""
        lines.append(f'"{key}": ' + (f"[\n  {items}\n ]" if items else json.dumps(value)))
    return "{\n " + ",\n ".join(lines) + "\n}\n"
