"""The gate's breaker, as a node hears of it: what fails on many nodes at once condemns none of them.

The gate keeps one ConfigMap. Its keys are the codes that a suspicious share of a pool's boots failed by; a node that is
about to start itself again, or to ask for its replacement, reads it once before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
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
# What is held: starting the node again, and calling its hardware broken.
_CONDEMNING = ("reboot", "replace")
_SECONDS = 10.0


@dataclass(frozen=True)
class Hold:
    """A code by which ``failed`` of ``of`` nodes of a pool failed within the window, noticed at ``since`` (Unix time).

    ``state``: ``released`` by a person, who says in ``reason`` why the nodes are to blame after all.
    """

    pool: str
    failed: int
    of: int
    since: int
    state: str = OPEN
    by: str = ""
    reason: str = ""

    @property
    def words(self) -> str:
        pool = f" of pool {self.pool}" if self.pool else ""
        return f"{self.failed} of {self.of} nodes{pool} failed alike"

    def text(self) -> str:
        return json.dumps(asdict(self))


def parse(found: Mapping[str, Any]) -> dict[str, Hold]:
    """Return the holds of a ConfigMap by code; an entry that is malformed counts as not there."""
    holds = {}
    for code, text in (found.get("data") or {}).items():
        try:
            holds[code] = Hold(**json.loads(text))
        except (TypeError, ValueError, RecursionError):
            continue
    return holds


def applied(verdict: Verdict, holds: Mapping[str, Hold]) -> Verdict:
    """Return the verdict, without its reboot and its action where its code is held. It stays what it was: no pass."""
    hold = holds.get(verdict.code)
    if hold is None or hold.state != OPEN or verdict.action not in _CONDEMNING:
        return verdict
    reason = f"{verdict.reason}; {verdict.action} is held: {hold.words}"
    return replace(verdict, action="none", reboot=False, reason=reason)


def asked(verdict: Verdict, settings: Settings) -> Verdict:
    """Ask the API server whether the verdict is held, if it would do anything; who can't be asked holds nothing."""
    if verdict.action not in _CONDEMNING or not settings.kubeconfig or not Path(settings.kubeconfig).exists():
        return verdict
    try:
        client, _ = report.connect(settings, _SECONDS)
        with client:
            return applied(verdict, parse(client.request("GET", PATH)))
    except (NodeError, OSError, ValueError) as error:
        status.tell(f"preflight: the gate's breaker is not known: {error}")
        return verdict
