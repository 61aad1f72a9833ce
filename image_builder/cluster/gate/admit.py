"""The gate's manual controls: an overview, and admitting nodes by hand."""

from __future__ import annotations

import json
import time
import urllib.parse
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from image_builder.cluster.gate import breaker
from image_builder.cluster.gate.abandoned import Marks, abandoned
from image_builder.cluster.gate.bad_hosts import on_known
from image_builder.cluster.gate.decide import Action, is_tainted, may_work, patch
from image_builder.cluster.gate.model import ADMITTED, Node, Rules, node_from
from image_builder.drain import fence, hosts, quarantine
from image_builder.drain.fence import pointer
from image_builder.drain.hosts import BadHost
from image_builder.errors import ImageBuilderError, UsageError
from image_builder.node.errors import NodeError
from image_builder.node.net.kube import Client
from image_builder.node.preflight.hold import OPEN, Hold, of_node
from image_builder.text import stamp

# Other controllers may change a node's taints between reading and patching it.
_TRIES = 5


def admit(client: Client, name: str, rules: Rules, *, who: str, reason: str, code: str = "") -> Node:
    """Admit this boot of a node, whatever its preflight said; with ``code``, only if this is what keeps it out.

    Returns the node as it was. This works without the controller, which honors the annotation until the node is
    restarted. Raises KubeError, UsageError if the node has not reported its boot id or isn't out because of ``code``,
    and ImageBuilderError if it changes all the time.
    """
    for _ in range(_TRIES):
        document = client.node(name)
        node = node_from(document, rules)
        if not node.boot_id:
            raise UsageError(f"{name} has not reported its boot id: its kubelet is not running yet")
        if code and not is_out(node, rules, code):
            raise UsageError(f"{name} is no longer out because of {code}: {why(node)}")
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


def admit_each(
    client: Client, nodes: Iterable[Node], rules: Rules, code: str, *, who: str, reason: str
) -> tuple[list[Node], dict[str, str]]:
    """Admit nodes that ``code`` keeps out; return them as they were, and why others couldn't be, by name."""
    before: list[Node] = []
    problems: dict[str, str] = {}
    for node in nodes:
        try:
            before.append(admit(client, node.name, rules, who=who, reason=reason, code=code))
        except (ImageBuilderError, NodeError) as error:
            problems[node.name] = str(error.message)
    return before, problems


def failing(client: Client, rules: Rules, code: str, pool: str | None) -> list[Node]:
    """Return the nodes that are out and whose current boot fails with this code, by name. Raises KubeError.

    Raises UsageError if there is none, or if they are of several pools and none is named.
    """
    nodes: list[Node] = []
    client.each(_all(rules), lambda document: nodes.append(node_from(document, rules)))
    matches = [
        node
        for node in sorted(nodes, key=lambda node: node.name)
        if is_out(node, rules, code) and pool in (None, node.pool)
    ]
    if not matches:
        raise UsageError(f"no node{f' of pool {pool}' if pool else ''} is out because of {code}")
    pools = sorted({node.pool for node in matches})
    if len(pools) > 1:
        raise UsageError(
            f"nodes of several pools are out because of {code}: {', '.join(map(repr, pools))}",
            hint="--pool POOL names one",
        )
    return matches


def is_out(node: Node, rules: Rules, code: str) -> bool:
    """Return whether this code keeps a node out in its present boot, and nobody has admitted it."""
    codes = (breaker.code_of(node), *(ailment.reason for ailment in node.health.ailments))
    is_kept_out = is_tainted(node, rules) or node.health.is_tainted
    return code in codes and is_kept_out and node.admitted_boot != node.boot_id


def _all(rules: Rules) -> str:
    query = urllib.parse.urlencode({"labelSelector": rules.label, "resourceVersion": "0"})
    return f"/api/v1/nodes?{query}"


def _annotate(document: dict[str, Any], value: str) -> list[dict[str, Any]]:
    if not document["metadata"].get("annotations"):
        return [{"op": "add", "path": "/metadata/annotations", "value": {ADMITTED: value}}]
    return [{"op": "add", "path": pointer(ADMITTED), "value": value}]


def overview(client: Client, rules: Rules) -> tuple[list[dict[str, str]], list[Marks]]:
    """Return what the gate knows about each node, and what rolls have left that nobody drives; a few requests."""
    holds, known = breaker.read(client) or {}, hosts.read(client) or {}
    lines: list[dict[str, str]] = []
    nodes: list[Node] = []

    def take(document: Mapping[str, Any]) -> None:
        nodes.append(node_from(document, rules))
        lines.append(_line(document, rules, holds, known))

    client.each(_all(rules), take)
    left = abandoned(client, nodes, time.time())
    return sorted(lines, key=lambda line: line["node"]), left


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
