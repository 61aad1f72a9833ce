"""The common parts of the pages of results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def machine(record: Mapping[str, Any], node: Mapping[str, Any], more: str) -> str:
    """Return when and on what it ran. ``node`` is the node's nodeInfo, ``more`` any further text."""
    emulated = ", emulated" if record["accelerator"] == "tcg" else ""
    return (
        f"{record['date']}, {record['minutes']:.0f} minutes: a QEMU machine with 2 cores{emulated}, on a host with "
        f"{record['cores']} cores and a load of {record['load']}. Kubelet {node['kubeletVersion']}, "
        f"{node['containerRuntimeVersion']}, {node['osImage']}{more}."
    )


def held(what: str, facts: Mapping[str, bool]) -> list[str]:
    """Return a table of facts in Markdown; ``what`` is its heading."""
    rows = (f"| {words} | {'holds' if holds else '**does not hold**'} |" for words, holds in facts.items())
    return [f"| {what} | |", "|---|---|", *rows]
