"""Keeps what the breaker holds in one ConfigMap, which nodes and people read. A new leader goes on with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from image_builder.errors import UsageError
from image_builder.gate.breaker import Limits, step
from image_builder.gate.model import Node
from image_builder.node.errors import NodeError
from image_builder.node.kube import Client, KubeError
from image_builder.node.preflight import hold
from image_builder.node.preflight.hold import Hold

_NOT_FOUND = 404
_MERGE_PATCH = "application/merge-patch+json"


def read(client: Client) -> dict[str, Hold] | None:
    """Return the holds by code, None where there is no ConfigMap yet. Raises NodeError."""
    try:
        return hold.parse(client.request("GET", hold.PATH))
    except KubeError as error:
        if error.status != _NOT_FOUND:
            raise
        return None


def release(client: Client, code: str, *, who: str, reason: str) -> Hold:
    """Let nodes that fail by this code be started again and replaced; return what was held.

    Raises UsageError: it isn't held. Raises KubeError.
    """
    known = read(client) or {}
    if code not in known:
        raise UsageError(f"{code} is not held; held are: {', '.join(sorted(known)) or 'none'}")
    released = replace(known[code], state=hold.RELEASED, by=who, reason=reason)
    client.request("PATCH", hold.PATH, {"data": {code: released.text()}}, _MERGE_PATCH)
    return known[code]


class Holder:
    """Carries out ``breaker.step``. ``advises``: it only says what it would hold."""

    def __init__(self, client: Client, limits: Limits, tell: Callable[[str], None], *, advises: bool) -> None:
        self._client, self._limits, self._tell, self._advises = client, limits, tell, advises
        self._said: dict[str, Hold] = {}

    def turn(self, nodes: Sequence[Node], now: float) -> None:
        """Look at all nodes and write down what has changed; what can't be done is said, and done at another turn."""
        try:
            known = self._said if self._advises else read(self._client)
            holds = step(nodes, known or {}, now, self._limits)
            if not self._advises:
                self._write(known, holds)
        except NodeError as error:
            self._tell(f"the breaker: {error.message}")
            return
        self._say(known or {}, holds)
        self._said = holds

    def _write(self, known: Mapping[str, Hold] | None, holds: Mapping[str, Hold]) -> None:
        changed: dict[str, str | None] = dict.fromkeys((known or {}).keys() - holds.keys())
        changed |= {code: one.text() for code, one in holds.items() if code not in (known or {})}
        if not changed:
            return
        if known is None:
            made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": hold.NAME}, "data": changed}
            self._client.request("POST", hold.COLLECTION, made)
        else:
            self._client.request("PATCH", hold.PATH, {"data": changed}, _MERGE_PATCH)

    def _say(self, known: Mapping[str, Hold], holds: Mapping[str, Hold]) -> None:
        would = "would be " if self._advises else ""
        for code in holds.keys() - known.keys():
            self._tell(f"BREAKER OPEN: {code}: {holds[code].words}: reboots and replacements {would}held")
        for code in known.keys() - holds.keys():
            self._tell(f"breaker closed: {code}: no node fails by it any more")
