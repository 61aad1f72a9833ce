"""The breaker: where many boots of a pool fail by one code, rather the test or the image is wrong than the machines.

Then reboots and replacements for that code are held until no node fails by it any more, or a person releases it.
Nothing here does anything.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from image_builder.cluster.gate.model import Node
from image_builder.node.preflight.hold import Hold
from image_builder.node.preflight.model import failure_of

# With a pool's name it is the key of a ConfigMap, which has 253 characters at most: 63 are a label's.
_CODE = re.compile(r"(?!.{189})[-_a-zA-Z0-9]+(\.[-_a-zA-Z0-9]+)*")


@dataclass(frozen=True)
class Limits:
    """The breaker opens when, within ``window`` seconds, more than ``share`` of a pool's nodes, and at least ``least``,
    failed by one code. A share of 1 never opens it."""

    share: float = 0.05
    window: float = 3600.0
    least: int = 3


def code_of(node: Node) -> str:
    """Return by which code the present boot of a node failed; empty where it didn't, or a person let it in."""
    return _reported(node) if node.boot_id and node.tested_boot == node.boot_id else ""


def _reported(node: Node) -> str:
    """Return the code of the failure that a node reported last, of whichever boot."""
    is_open = node.status == "False" and not node.retested and node.tested_boot != node.admitted_boot
    code = failure_of(node.message) if is_open else ""
    return code if _CODE.fullmatch(code) else ""


def _counted(node: Node, now: float, window: float) -> str:
    """Return by which code a node counts as failed.

    A node that starts itself again does so before its kubelet reports the new boot's id: its report counts while it is
    new.
    """
    return code_of(node) or (_reported(node) if _is_recent(node, now, window) else "")


def step(
    nodes: Sequence[Node], current: Mapping[str, Hold], now: float, limits: Limits, label: str
) -> dict[str, Hold]:
    """Return the holds as they are to be now, by key. ``label`` names the pools.

    One that is known stays, open or released, while a node of its pool fails by it.
    """
    failing: dict[tuple[str, str], list[Node]] = {}
    for node in nodes:
        if code := _counted(node, now, limits.window):
            failing.setdefault((node.pool, code), []).append(node)
    sizes = Counter(node.pool for node in nodes)
    holds = {key: hold for key, hold in current.items() if (hold.pool, hold.code) in failing}
    for (pool, code), failed in failing.items():
        count = sum(_is_recent(node, now, limits.window) for node in failed)
        hold = Hold(code, label, pool, count, sizes[pool], int(now))
        if hold.key not in holds and count >= limits.least and count > limits.share * sizes[pool]:
            holds[hold.key] = hold
    return holds


def _is_recent(node: Node, now: float, window: float) -> bool:
    """Tell whether a node reported within the last ``window`` seconds; its clock may be ahead of ours."""
    return now - node.reported <= window
