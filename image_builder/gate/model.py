"""A node as the gate sees it: the few fields of a Node object that count."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from image_builder.node.preflight.model import CONDITION, boot_of
from image_builder.node.status import PREFLIGHT_LABEL

EFFECT = "NoSchedule"
ADMITTED = "image-builder/admitted"


@dataclass(frozen=True)
class Rules:
    """What the gate goes by. ``label``: only nodes that have it are its business."""

    taint: str = PREFLIGHT_LABEL
    label: str = PREFLIGHT_LABEL
    condition: str = CONDITION


@dataclass(frozen=True)
class Node:
    """``boot_id`` is what the kubelet says, ``tested_boot`` what the condition speaks of, ``admitted_boot`` what a
    person let in; each is empty where there is none. ``taints`` are the API's own objects, in their order."""

    name: str
    boot_id: str = ""
    status: str = ""
    tested_boot: str = ""
    message: str = ""
    admitted_boot: str = ""
    taints: tuple[Mapping[str, Any], ...] = ()


def node_from(found: Mapping[str, Any], rules: Rules) -> Node:
    """Return what counts of a Node object. Whatever is missing or malformed counts as not there."""
    meta, spec, status = (found.get(name) or {} for name in ("metadata", "spec", "status"))
    conditions = [c for c in status.get("conditions") or [] if c.get("type") == rules.condition]
    condition = conditions[0] if conditions else {}
    message = str(condition.get("message", ""))
    return Node(
        name=meta["name"],
        boot_id=str((status.get("nodeInfo") or {}).get("bootID", "")),
        status=str(condition.get("status", "")),
        tested_boot=boot_of(message),
        message=message,
        admitted_boot=_admitted_boot((meta.get("annotations") or {}).get(ADMITTED, "")),
        taints=tuple(spec.get("taints") or ()),
    )


def _admitted_boot(annotation: str) -> str:
    try:
        return str(json.loads(annotation)["boot_id"])
    except (ValueError, KeyError, TypeError):
        return ""
