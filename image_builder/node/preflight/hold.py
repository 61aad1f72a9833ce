"""The gate's circuit breaker as a node reads it: a failure on many nodes at once condemns none of them.

The gate maintains one ConfigMap. Its entries are codes with which a suspicious share of a pool's boots failed; a node
that is about to reboot itself, or to request its replacement, reads it once before. A node's pool is determined by its
labels, as for the gate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from image_builder.node import status
from image_builder.node.errors import NodeError
from image_builder.node.preflight import report
from image_builder.node.preflight.model import Verdict
from image_builder.node.preflight.settings import Settings

NAMESPACE, NAME = "kube-system", "image-builder-breaker"
COLLECTION = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
PATH = f"{COLLECTION}/{NAME}"
OPEN, RELEASED = "open", "released"
# The actions that are held: rebooting the node, and calling its hardware broken.
_CONDEMNING = ("reboot", "replace")
_SECONDS = 10.0


@dataclass(frozen=True)
class Hold:
    """A code with which ``failed`` of ``of`` nodes of a pool failed within the window, noticed at ``since`` (Unix).

    ``pool`` is the value of the nodes' label ``label``, empty for nodes without that label.
    ``state`` is ``released`` once a person has decided that the nodes are to blame after all; ``reason`` says why.
    """

    code: str
    label: str
    pool: str
    failed: int
    of: int
    since: int
    state: str = OPEN
    by: str = ""
    reason: str = ""

    @property
    def key(self) -> str:
        """Return the entry's key. No code has two dots in a row, so every code and pool has a unique key."""
        return f"{self.code}..{self.pool}"

    @property
    def name(self) -> str:
        return f"{self.code}{self._of_pool}"

    @property
    def words(self) -> str:
        return f"{self.failed} of {self.of} nodes{self._of_pool} failed alike"

    @property
    def _of_pool(self) -> str:
        return f" of pool {self.pool}" if self.pool else ""

    def text(self) -> str:
        return json.dumps(asdict(self))


def parse(config_map: Mapping[str, Any]) -> dict[str, Hold]:
    """Return the holds in a ConfigMap by key, ignoring malformed entries."""
    holds = {}
    for key, text in (config_map.get("data") or {}).items():
        try:
            hold = Hold(**json.loads(text))
        except (TypeError, ValueError, RecursionError):
            continue
        if all(isinstance(word, str) for word in (hold.code, hold.label, hold.pool, hold.state)):
            holds[key] = hold
    return holds


def of_node(code: str, labels: Mapping[str, str], holds: Mapping[str, Hold]) -> Hold | None:
    """Return the hold for a code on a node with these labels; None if there is none."""
    return next(
        (hold for hold in holds.values() if (hold.code, hold.pool) == (code, labels.get(hold.label, ""))),
        None,
    )


def applied(verdict: Verdict, labels: Mapping[str, str], holds: Mapping[str, Hold]) -> Verdict:
    """Return the verdict, without its reboot and action if its code is held for a node with these labels.

    Its state doesn't change: a hold doesn't make it a pass.
    """
    hold = of_node(verdict.code, labels, holds)
    if hold is None or hold.state != OPEN or verdict.action not in _CONDEMNING:
        return verdict
    reason = f"{verdict.reason}; {verdict.action} is held: {hold.words}"
    return replace(verdict, action="none", reboot=False, reason=reason)


def asked(verdict: Verdict, settings: Settings) -> Verdict:
    """Return the verdict as held by the API server's ConfigMap; unchanged if that can't be read.

    Ask only if the verdict would have an effect on the node.
    """
    if verdict.action not in _CONDEMNING or not settings.has_joined:
        return verdict
    try:
        client, node = report.connect(settings, _SECONDS)
        with client:
            holds = parse(client.find(PATH) or {})
            if all(hold.code != verdict.code for hold in holds.values()):
                return verdict
            return applied(verdict, client.node(node)["metadata"].get("labels") or {}, holds)
    except (NodeError, OSError, ValueError) as error:
        status.tell(f"preflight: the gate's breaker can't be read: {error}")
        return verdict
