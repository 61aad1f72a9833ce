"""Counters of links that went down: how often of late. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def observe(
    before: Mapping[str, Any], counts: Mapping[str, int], now: float, window: float
) -> dict[str, dict[str, Any]]:
    """Return what is to be remembered of links: the last count, and ``[when, how many]`` within ``window`` seconds.

    ``before`` is what this returned last. A link that is new, or whose counter went back, starts over: what happened
    before is another device's, or of a boot whose first seconds were not looked at.
    """
    found = {}
    for name, count in counts.items():
        known = before.get(name, {})
        last, recent = known.get("count", count), known.get("recent", [])
        kept = [[when, times] for when, times in recent if now - when <= window]
        if count > last:
            kept.append([now, count - last])
        found[name] = {"count": count, "recent": kept if count >= last else []}
    return found


def too_many(seen: Mapping[str, Any], limit: int) -> list[tuple[str, int]]:
    """Return the links that went down at least ``limit`` times, and how often."""
    times = {name: sum(count for _, count in one["recent"]) for name, one in seen.items()}
    return [(name, count) for name, count in times.items() if count >= limit]
