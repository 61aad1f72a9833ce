"""The gate's one rule, without any I/O."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from typing import Any

from image_builder.cluster.gate.model import ADMITTED, EFFECT, Node, Rules
from image_builder.drain.fence import pointer
from image_builder.node.preflight.model import ANSWER, HELD, WISH

PENDING, FAILED, RETEST = "pending", "failed", "retest"


class Action(enum.Enum):
    NONE = "none"
    ADMIT = "admit"  # remove the taint
    GATE = "gate"  # put it back
    FORGET = "forget"  # remove findings that are gone from the admission: if they come back, they count


def is_tainted(node: Node, rules: Rules) -> bool:
    return any(_is_ours(taint, rules) for taint in node.taints)


def may_work(node: Node) -> bool:
    """Return whether this boot of the node passed and isn't under a re-test, or was admitted by a person.

    Until the kubelet has reported its boot id, no test counts as this boot's.
    """
    passed = node.status == "True" and node.tested_boot == node.boot_id and not node.is_under_test
    return bool(node.boot_id) and (passed or node.admitted_boot == node.boot_id)


def decide(node: Node, rules: Rules) -> Action:
    """Return the action that makes the node's taint agree with whether it may work, or its admission with its state."""
    tainted = is_tainted(node, rules)
    if may_work(node) == tainted:
        return Action.ADMIT if tainted else Action.GATE
    return Action.FORGET if _gone(node) else Action.NONE


def _gone(node: Node) -> frozenset[str]:
    """Return the findings that a person admitted with this boot and that the node no longer has."""
    # A condition whose message has no room for all of its findings doesn't say which are gone.
    if node.admitted_boot != node.boot_id or node.health.is_cut:
        return frozenset()
    return node.admitted - {ailment.reason for ailment in node.health.ailments}


def patch(node: Node, action: Action, rules: Rules) -> list[dict[str, Any]]:
    """Return the JSON patch that carries out an action other than ``NONE``.

    It tests what the decision was based on, boot id and taints or admission, so that the API server refuses it (422) if
    that has changed meanwhile. Other fields may change: a busy node's status does so all the time.
    """
    if action is Action.FORGET:
        record = {**dict(json.loads(node.admission)), "findings": sorted(node.admitted - _gone(node))}
        path = pointer(ADMITTED)
        test = {"op": "test", "path": path, "value": node.admission}
        return [*_same_boot(node), test, {"op": "add", "path": path, "value": json.dumps(record)}]
    if action is Action.ADMIT:
        return [*_same_boot(node), *_set_taints(node, _without_ours(node, rules))]
    value = FAILED if node.status == "False" else PENDING
    return [*_same_boot(node), *_set_taints(node, [*node.taints, _taint(value, rules)])]


def answered(node: Node, nonce: str, state: str, now: float, rules: Rules) -> list[dict[str, Any]]:
    """Return the JSON patch that answers a node's wish with this nonce, with the same tests as ``patch``.

    ``held`` also takes the node out of service, before it is looked at again and the re-test is granted.
    """
    answer = {"boot_id": node.boot_id, "nonce": nonce, "state": state, "at": int(now)}
    same = [{"op": "test", "path": pointer(WISH), "value": node.wish.text}] if node.wish else []
    reply = {"op": "add", "path": pointer(ANSWER), "value": json.dumps(answer)}
    held = _set_taints(node, [*node.taints, _taint(RETEST, rules)]) if state == HELD else []
    return [*_same_boot(node), *same, reply, *held]


def _same_boot(node: Node) -> list[dict[str, Any]]:
    return [{"op": "test", "path": "/status/nodeInfo/bootID", "value": node.boot_id}] if node.boot_id else []


def _taint(value: str, rules: Rules) -> dict[str, str]:
    return {"key": rules.taint, "value": value, "effect": EFFECT}


def _without_ours(node: Node, rules: Rules) -> list[Mapping[str, Any]]:
    return [taint for taint in node.taints if not _is_ours(taint, rules)]


def _set_taints(node: Node, taints: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the operations that replace all taints, provided that they haven't changed. Without any taints, the API
    has no list, which a test expresses as null."""
    path = "/spec/taints"
    return [
        {"op": "test", "path": path, "value": [dict(taint) for taint in node.taints] or None},
        {"op": "add", "path": path, "value": [dict(taint) for taint in taints]},
    ]


def _is_ours(taint: Mapping[str, Any], rules: Rules) -> bool:
    return taint.get("key") == rules.taint and taint.get("effect") == EFFECT
