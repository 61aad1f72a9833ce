"""The breaker: if many boots of a pool fail with one code, the test or the image is likelier to blame than machines.

Then reboots and replacements for that code are held until no node fails with it any longer, or a person releases it; so
is whatever would be done about nodes in service that all ail for one reason. The holds are in one ConfigMap, which
nodes and people read; a new leader continues with it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from image_builder.cluster.gate.model import Node
from image_builder.errors import UsageError
from image_builder.node.errors import NodeError
from image_builder.node.net.kube import MERGE_PATCH, Client
from image_builder.node.preflight import hold
from image_builder.node.preflight.hold import Hold
from image_builder.node.preflight.model import failure_of

# With a pool's name it is the key in a ConfigMap, at most 253 characters: up to 63 are the pool's, a label's value.
_CODE = re.compile(r"(?!.{189})[-_a-zA-Z0-9]+(\.[-_a-zA-Z0-9]+)*")


@dataclass(frozen=True)
class Limits:
    """The breaker opens when, within ``window`` seconds, more than ``share`` of a pool's nodes, and at least ``least``,
    failed with one code. A share of 1 never opens it."""

    share: float = 0.05
    window: float = 3600.0
    least: int = 3


def code_of(node: Node) -> str:
    """Return the code with which a node's present boot failed; empty if it didn't, or a person admitted it."""
    return _reported(node) if node.boot_id and node.tested_boot == node.boot_id else ""


def _reported(node: Node) -> str:
    """Return the code of the failure that a node reported last, for whichever boot."""
    is_open = node.status == "False" and not node.retested and node.tested_boot != node.admitted_boot
    code = failure_of(node.message) if is_open else ""
    return code if _CODE.fullmatch(code) else ""


def _counted(node: Node, now: float, window: float) -> dict[str, bool]:
    """Return the codes with which a node counts as failed, by its boot and its health, and whether each is new.

    A node that restarts itself does so before its kubelet reports the new boot's id, so its report counts while it is
    new.
    """
    is_new = now - node.reported <= window  # its clock may be ahead of ours
    code = code_of(node) or (_reported(node) if is_new else "")
    codes = {code: is_new} if code else {}
    for ailment in node.health.ailments:
        if _CODE.fullmatch(ailment.reason):
            codes[ailment.reason] = now - ailment.since <= window
    return codes


def step(
    nodes: Sequence[Node], current: Mapping[str, Hold], now: float, limits: Limits, label: str
) -> dict[str, Hold]:
    """Return the holds that there should be now, by key. ``label`` names the pools.

    An existing hold stays, open or released, while a node of its pool fails with its code.
    """
    failing: dict[tuple[str, str], list[bool]] = {}
    for node in nodes:
        for code, is_new in _counted(node, now, limits.window).items():
            failing.setdefault((node.pool, code), []).append(is_new)
    sizes = Counter(node.pool for node in nodes)
    holds = {key: held for key, held in current.items() if (held.pool, held.code) in failing}
    for (pool, code), news in failing.items():
        count = sum(news)
        new = Hold(code, label, pool, count, sizes[pool], int(now))
        if new.key not in holds and count >= limits.least and count > limits.share * sizes[pool]:
            holds[new.key] = new
    return holds


# -- the ConfigMap ---------------------------------------------------------------------------------------------


def read(client: Client) -> dict[str, Hold] | None:
    """Return the holds by key, None if there is no ConfigMap yet. Raises NodeError."""
    config_map = client.find(hold.PATH)
    return None if config_map is None else hold.parse(config_map)


def release(client: Client, code: str, pool: str | None, *, who: str, reason: str) -> Hold:
    """Let nodes of a pool that fail with this code be restarted and replaced; return the hold.

    Raises UsageError if the code isn't held, or is held for several pools and none is named. Raises KubeError.
    """
    held = chosen((read(client) or {}).values(), code, pool)
    released = replace(held, state=hold.RELEASED, by=who, reason=reason)
    client.request("PATCH", hold.PATH, {"data": {held.key: released.text()}}, MERGE_PATCH)
    return held


def chosen(holds: Collection[Hold], code: str, pool: str | None) -> Hold:
    """Return the only hold of a code, in a pool if one is named. Raises UsageError."""
    matches = [candidate for candidate in holds if candidate.code == code and pool in (None, candidate.pool)]
    if not matches:
        names = ", ".join(sorted(candidate.name for candidate in holds)) or "none"
        raise UsageError(f"{code} is not held{f' for pool {pool}' if pool else ''}; held are: {names}")
    if len(matches) > 1:
        pools = ", ".join(sorted(repr(candidate.pool) for candidate in matches))
        raise UsageError(f"{code} is held for several pools: {pools}", hint="--pool POOL names one")
    return matches[0]


class Holder:
    """Carries out ``step``. ``label`` names the pools. ``advises``: it only reports what it would hold."""

    def __init__(
        self, client: Client, limits: Limits, label: str, tell: Callable[[str], None], *, advises: bool
    ) -> None:
        self._client, self._limits, self._label = client, limits, label
        self._tell, self._advises = tell, advises
        self._reported: dict[str, Hold] = {}
        # The holds as of the last turn, None if they are unknown.
        self.holds: Mapping[str, Hold] | None = None

    def turn(self, nodes: Sequence[Node], now: float) -> None:
        """Look at all nodes and write what has changed. Failures are reported, and retried at another turn."""
        try:
            current = self._reported if self._advises else read(self._client)
            holds = step(nodes, current or {}, now, self._limits, self._label)
            if not self._advises:
                self._write(current, holds)
        except NodeError as error:
            self._tell(f"the breaker: {error.message}")
            self.holds = None
            return
        self._say(current or {}, holds)
        self._reported = holds
        self.holds = holds

    def _write(self, current: Mapping[str, Hold] | None, holds: Mapping[str, Hold]) -> None:
        changed: dict[str, str | None] = dict.fromkeys((current or {}).keys() - holds.keys())
        changed |= {key: added.text() for key, added in holds.items() if key not in (current or {})}
        if not changed:
            return
        if current is None:
            document = {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": hold.NAME},
                "data": changed,
            }
            self._client.request("POST", hold.COLLECTION, document)
        else:
            self._client.request("PATCH", hold.PATH, {"data": changed}, MERGE_PATCH)

    def _say(self, current: Mapping[str, Hold], holds: Mapping[str, Hold]) -> None:
        would = "would be " if self._advises else ""
        for key in holds.keys() - current.keys():
            opened = holds[key]
            self._tell(f"BREAKER OPEN: {opened.code}: {opened.words}: reboots and replacements {would}held")
        for key in current.keys() - holds.keys():
            self._tell(f"breaker closed: {current[key].name}: no node fails with it any more")
