"""Processes that aren't children of the test."""

from __future__ import annotations

from pathlib import Path


def is_over(pid: int) -> bool:
    """Return whether a process is gone, or is a zombie that another process has to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
