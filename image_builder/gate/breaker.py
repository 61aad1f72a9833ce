"""When many boots of a pool fail by one code: rather the test, the driver or the image than all these machines.

Then reboots and replacements for that code are held until no node fails by it any more, or a person releases it.
Nothing here does anything.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from image_builder.gate.model import Node
from image_builder.node.preflight.hold import Hold
from image_builder.node.preflight.model import failure_of

# What a ConfigMap takes as a key.
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")


@dataclass(frozen=True)
class Limits:
    """The breaker opens when, within ``window`` seconds, more than ``share`` of a pool's nodes, and at least ``least``,
    failed by one code. A share of 1 never opens it."""

    share: float = 0.05
    window: float = 3600.0
    least: int = 3


def code_of(node: Node) -> str:
    """Return by which code the present boot of a node failed; empty where it didn't, or a person let it in."""
    is_present = bool(node.boot_id) and node.tested_boot == node.boot_id != node.admitted_boot
    code = failure_of(node.message) if is_present and node.status == "False" and not node.retested else ""
    return code if _KEY.fullmatch(code) else ""


def step(nodes: Sequence[Node], known: Mapping[str, Hold], now: float, limits: Limits) -> dict[str, Hold]:
    """Return the holds as they are to be now. One that is known stays, open or released, while a node fails by it."""
    failing: dict[tuple[str, str], list[Node]] = {}
    for node in nodes:
        if code := code_of(node):
            failing.setdefault((node.pool, code), []).append(node)
    sizes = Counter(node.pool for node in nodes)
    present = {code for _, code in failing}
    holds = {code: hold for code, hold in known.items() if code in present}
    for (pool, code), failed in failing.items():
        count = _recent(failed, now, limits.window)
        if code not in holds and count >= limits.least and count > limits.share * sizes[pool]:
            holds[code] = Hold(pool, count, sizes[pool], int(now))
    return holds


def _recent(nodes: Iterable[Node], now: float, window: float) -> int:
    """Count reports of the last ``window`` seconds; a node's clock may be ahead of ours."""
    return sum(now - node.reported <= window for node in nodes)
