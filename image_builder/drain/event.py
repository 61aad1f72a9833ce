"""Kubernetes Events on a Node, one for each step of what is done to it.

An Event's name is derived from its contents, so a step that is done twice, by a process and by its successor, produces
a single Event.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from image_builder.node.net.kube import CONFLICT, Client, KubeError
from image_builder.text import stamp

Kind = Literal["Normal", "Warning"]
# Nodes have no namespace. Their Events go into this one, as the kubelet's do.
PATH = "/api/v1/namespaces/default/events"


def event(
    node: str, uid: str, reason: str, message: str, now: float, *, kind: Kind = "Normal", step: str = ""
) -> dict[str, Any]:
    """Return an Event on a Node. ``step`` distinguishes Events that have the same text."""
    digest = hashlib.sha256("\0".join((uid, reason, message, step)).encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{node[:200]}.{digest}", "namespace": "default"},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid},
        "reason": reason,
        "message": message[:1024],
        "type": kind,
        "source": {"component": "image-builder"},
        "firstTimestamp": stamp(now),
        "lastTimestamp": stamp(now),
        "count": 1,
    }


def post(client: Client, document: dict[str, Any]) -> None:
    """Post an Event, unless it exists already. Raises KubeError."""
    try:
        client.request("POST", PATH, document)
    except KubeError as error:
        if error.status != CONFLICT:
            raise
