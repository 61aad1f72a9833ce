"""The gate's manual controls: an overview, and admitting one node by hand."""

from __future__ import annotations

import json
import time
import urllib.parse
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from image_builder.cluster.gate import breaker
from image_builder.cluster.gate.bad_hosts import on_known
from image_builder.cluster.gate.decide import Action, is_tainted, may_work, patch
from image_builder.cluster.gate.model import ADMITTED, Node, Rules, node_from
from image_builder.drain import fence, hosts, quarantine
from image_builder.drain.fence import pointer
from image_builder.drain.hosts import BadHost
from image_builder.errors import ImageBuilderError, UsageError
from image_builder.node.net.kube import Client
from image_builder.node.preflight.hold import OPEN, Hold, of_node
from image_builder.text import stamp

# Other controllers may change a node's taints between reading and patching it.
_TRIES = 5


def admit(client: Client, name: str, rules: Rules, *, who: str, reason: str) -> Node:
    """Admit this boot of a node, whatever its preflight said; return the node as it was.

    This works without the controller, which honors the annotation until the node is restarted. Raises KubeError,
    UsageError if the node has not reported its boot id, and ImageBuilderError if it changes all the time.
    """
    for _ in range(_TRIES):
        document = client.node(name)
        node = node_from(document, rules)
        if not node.boot_id:
            raise UsageError(f"{name} has not reported its boot id: its kubelet is not running yet")
        record = {
            "by": who,
            "at": stamp(time.time()),
            "reason": reason,
            "boot_id": node.boot_id,
            "findings": sorted({ailment.reason for ailment in node.health.ailments}),
        }
        changes = _annotate(document, json.dumps(record))
        if is_tainted(node, rules):
            changes = [*patch(node, Action.ADMIT, rules), *changes]
        if fence.send(client, name, changes):
            break
    else:
        raise ImageBuilderError(f"{name} changed meanwhile, {_TRIES} times", hint="run the command again")
    # A running controller sends the same patch: one of the two is refused, and the other does the work.
    if changes := quarantine.give_back(client.node(name)):
        fence.send(client, name, changes)
    return node


def _annotate(document: dict[str, Any], value: str) -> list[dict[str, Any]]:
    if not document["metadata"].get("annotations"):
        return [{"op": "add", "path": "/metadata/annotations", "value": {ADMITTED: value}}]
    return [{"op": "add", "path": pointer(ADMITTED), "value": value}]


def overview(client: Client, rules: Rules) -> list[dict[str, str]]:
    """Return what the gate knows about each node; three requests."""
    query = urllib.parse.urlencode({"labelSelector": rules.label, "resourceVersion": "0"})
    holds, known = breaker.read(client) or {}, hosts.read(client) or {}
    lines: list[dict[str, str]] = []
    client.each(f"/api/v1/nodes?{query}", lambda item: lines.append(_line(item, rules, holds, known)))
    return sorted(lines, key=lambda line: line["node"])


def _line(
    document: Mapping[str, Any], rules: Rules, holds: Mapping[str, Hold], known: Mapping[str, BadHost]
) -> dict[str, str]:
    node = node_from(document, rules)
    host = on_known(node, known)
    labels = document["metadata"].get("labels") or {}
    codes = [breaker.code_of(node), *(ailment.reason for ailment in node.health.ailments)]
    matches = [of_node(code, labels, holds) for code in codes]
    held = next((hold for hold in matches if hold and hold.state == OPEN), None)
    notice = f"HELD, {held.words}: don't replace it: " if held else ""
    return {
        "node": node.name,
        "gate": "out" if is_tainted(node, rules) or node.health.is_tainted else "in",
        "may_work": "no" if node.health.record or not may_work(node) else "yes",
        "why": notice + why(node) + (f"; {host.words}" if host else ""),
    }


def why(node: Node) -> str:
    """Return in words what the gate knows about a node's present boot."""
    if not node.boot_id:
        return "it has not reported its boot id"
    if node.admitted_boot == node.boot_id:
        return "admitted by hand"
    if node.is_under_test:
        return "it is tested again"
    if not node.status:
        return "nothing was reported yet"
    if node.tested_boot != node.boot_id:
        return "the report is from another boot"
    if node.health.record:
        return node.health.record.words
    # A node with an ailment may still be in: it is new, or no more nodes may be out, or the breaker holds it.
    groups = [list(group) for _, group in groupby(node.health.ailments, lambda ailment: ailment.condition)]
    conditions = [
        f"{group[0].condition} {', '.join(ailment.reason for ailment in group)}: {group[0].detail}"
        for group in groups
    ]
    return "; ".join(conditions) or node.message
