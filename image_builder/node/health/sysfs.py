"""Files of /sys, which come and go with the devices."""

from __future__ import annotations

from pathlib import Path


def text(path: Path) -> str:
    """Return a file's words without the line's end; empty where there is none or it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def number(path: Path) -> int:
    """Return a file's number, 0 where there is none."""
    value = text(path)
    return int(value) if value.isdigit() else 0
