"""The gate's memory of bad physical hosts, and the nodes that are on one.

A host is remembered once a node on it is taken out for its hardware, or fails its preflight because of it. It is
forgotten when that same node passes its preflight there again, so the hosts that remain are those whose machines have
left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from image_builder.cluster.gate.breaker import code_of
from image_builder.cluster.gate.health import Ailment
from image_builder.cluster.gate.impact import category_of
from image_builder.cluster.gate.model import Node
from image_builder.cluster.gate.policy import HOST_CONDITION, HOST_REASON, Policy
from image_builder.drain import hosts
from image_builder.drain.hosts import BadHost
from image_builder.node.errors import NodeError
from image_builder.node.net.kube import Client

# A ConfigMap holds 1 MiB.
_MOST_BYTES = 900_000
# A node writes the name of its host itself: its entries must not displace those of others.
_MOST_OF_A_NODE = 5
_DETAIL = 300
_DAY = 86400.0


def step(
    nodes: Iterable[Node], current: Mapping[str, BadHost], now: float, policy: Policy
) -> dict[str, BadHost]:
    """Return the hosts to remember from now on, by name."""
    oldest = now - policy.remember_days * _DAY
    # A record is the node's own: one from the future would never expire.
    newest = now + _DAY
    entries = {name: entry for name, entry in current.items() if oldest <= entry.since <= newest}
    for node in nodes:
        host = node.health.host
        if not host:
            continue
        entry, known = _entry(node, host), entries.get(host)
        is_timely = entry is not None and oldest <= entry.since <= newest
        if entry is not None and is_timely and (known is None or entry.since > known.since):
            entries[host] = entry
        elif entry is None and known is not None and known.node == node.name and _has_passed(node, known):
            del entries[host]
    return _newest(entries.values())


def _newest(entries: Iterable[BadHost]) -> dict[str, BadHost]:
    """Return the newest entries by name, a few of each node, as far as there is room for them."""
    kept: dict[str, BadHost] = {}
    counts, size = Counter[str](), 0
    for entry in sorted(entries, key=lambda entry: (-entry.since, entry.name)):
        counts[entry.node] += 1
        if counts[entry.node] > _MOST_OF_A_NODE:
            continue
        size += len(entry.name) + len(entry.text())
        if size > _MOST_BYTES:
            break
        kept[entry.name] = entry
    return kept


def _entry(node: Node, host: str) -> BadHost | None:
    """Return the entry for a node's host if the node now shows that it is bad, else None."""
    record, code = node.health.record, code_of(node)
    # Another boot may be on another host.
    is_here = record is not None and record.boot_id == node.boot_id
    if record and is_here and category_of(record.condition, record.reason, record.detail):
        return BadHost(host, node.name, record.reason[:_DETAIL], record.detail[:_DETAIL], record.since)
    if code and category_of("", code):
        return BadHost(host, node.name, code, "it failed the preflight", node.reported)
    return None


def _has_passed(node: Node, known: BadHost) -> bool:
    passed = node.status == "True" and node.tested_boot == node.boot_id != ""
    return passed and node.reported >= int(known.since)  # a condition's times are whole seconds


def on_known(node: Node, known: Mapping[str, BadHost]) -> BadHost | None:
    """Return the entry of a node's host if another node showed that it is bad, else None."""
    entry = known.get(node.health.host)
    return entry if entry and entry.node != node.name else None


def judged(node: Node, known: Mapping[str, BadHost] | None, policy: Policy) -> Node:
    """Return a node with its host as an ailment if that is known to be bad, unless the policy ignores it.

    While the known hosts can't be read (None), the host counts neither as an ailment nor as well.
    """
    if known is None:
        return node
    health, entry = node.health, on_known(node, known)
    if entry is None or policy.rule(HOST_CONDITION, HOST_REASON).remedy == "ignore":
        return replace(node, health=replace(health, well=health.well | {HOST_CONDITION}))
    ailment = Ailment(HOST_CONDITION, HOST_REASON, entry.since, entry.words)
    return replace(node, health=replace(health, ailments=(*health.ailments, ailment)))


class Memory:
    """Carries out ``step``. ``known``: the hosts as of the last turn, None if they were never read."""

    def __init__(self, client: Client, policy: Policy, tell: Callable[[str], None]) -> None:
        self._client, self._policy, self._tell = client, policy, tell
        self.known: Mapping[str, BadHost] | None = None

    def turn(self, nodes: Iterable[Node], now: float, *, advises: bool = False) -> None:
        """Look at all nodes and write what has changed. Failures are reported, and retried at another turn."""
        try:
            current = hosts.read(self._client)
            entries = step(nodes, current or {}, now, self._policy)
            if not advises:
                hosts.write(self._client, current, entries)
        except NodeError as error:
            self._tell(f"the bad hosts: {error.message}")
            return
        before = self.known if advises and self.known is not None else current or {}
        would = "would be " if advises else ""
        for name in entries.keys() - before.keys():
            self._tell(f"{would}remembered: {entries[name].words}")
        for name in before.keys() - entries.keys():
            self._tell(f"{would}forgotten: {name} is no longer bad")
        self.known = entries
