"""Keeps what the breaker holds in one ConfigMap, which nodes and people read. A new leader goes on with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from image_builder.cluster.gate.breaker import Limits, step
from image_builder.cluster.gate.model import Node
from image_builder.errors import UsageError
from image_builder.node.errors import NodeError
from image_builder.node.net.kube import Client, KubeError
from image_builder.node.preflight import hold
from image_builder.node.preflight.hold import Hold

_NOT_FOUND = 404
_MERGE_PATCH = "application/merge-patch+json"


def read(client: Client) -> dict[str, Hold] | None:
    """Return the holds by key, None where there is no ConfigMap yet. Raises NodeError."""
    try:
        return hold.parse(client.request("GET", hold.PATH))
    except KubeError as error:
        if error.status != _NOT_FOUND:
            raise
        return None


def release(client: Client, code: str, pool: str | None, *, who: str, reason: str) -> Hold:
    """Let nodes of a pool that fail by this code be started again and replaced; return what was held.

    Raises UsageError: it isn't held, or for several pools and none is named. Raises KubeError.
    """
    held = chosen((read(client) or {}).values(), code, pool)
    released = replace(held, state=hold.RELEASED, by=who, reason=reason)
    client.request("PATCH", hold.PATH, {"data": {held.key: released.text()}}, _MERGE_PATCH)
    return held


def chosen(holds: Collection[Hold], code: str, pool: str | None) -> Hold:
    """Return the one hold of a code, in a pool where one is named. Raises UsageError."""
    matches = [candidate for candidate in holds if candidate.code == code and pool in (None, candidate.pool)]
    if not matches:
        names = ", ".join(sorted(candidate.name for candidate in holds)) or "none"
        raise UsageError(f"{code} is not held{f' for pool {pool}' if pool else ''}; held are: {names}")
    if len(matches) > 1:
        pools = ", ".join(sorted(repr(candidate.pool) for candidate in matches))
        raise UsageError(f"{code} is held for several pools: {pools}", hint="--pool POOL names one")
    return matches[0]


class Holder:
    """Carries out ``breaker.step``. ``label`` names the pools. ``advises``: it only says what it would hold."""

    def __init__(
        self, client: Client, limits: Limits, label: str, tell: Callable[[str], None], *, advises: bool
    ) -> None:
        self._client, self._limits, self._label = client, limits, label
        self._tell, self._advises = tell, advises
        self._reported: dict[str, Hold] = {}

    def turn(self, nodes: Sequence[Node], now: float) -> None:
        """Look at all nodes and write down what has changed; what can't be done is said, and done at another turn."""
        try:
            current = self._reported if self._advises else read(self._client)
            holds = step(nodes, current or {}, now, self._limits, self._label)
            if not self._advises:
                self._write(current, holds)
        except NodeError as error:
            self._tell(f"the breaker: {error.message}")
            return
        self._say(current or {}, holds)
        self._reported = holds

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
            self._client.request("PATCH", hold.PATH, {"data": changed}, _MERGE_PATCH)

    def _say(self, current: Mapping[str, Hold], holds: Mapping[str, Hold]) -> None:
        would = "would be " if self._advises else ""
        for key in holds.keys() - current.keys():
            opened = holds[key]
            self._tell(f"BREAKER OPEN: {opened.code}: {opened.words}: reboots and replacements {would}held")
        for key in current.keys() - holds.keys():
            self._tell(f"breaker closed: {current[key].name}: no node fails by it any more")
