"""A taint that keeps every pod off an empty host: also one that a scheduler bound before it knew of the cordon.

A cordon is heeded by schedulers alone. The kubelet itself refuses pods that don't tolerate a taint ``NoExecute``, so
none starts between the last look at a host and what is then done to its machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from image_builder.drain.fence import send
from image_builder.node.net.kube import Client, path_of_node

TAINT = "image-builder/roll"
_TAINTS = "/spec/taints"

Node = dict[str, Any]


def bar(client: Client, name: str, run: str, seen: Node | None = None) -> Node | None:
    """Put the taint on a Node and return that, None where there is none. Raises KubeError.

    ``seen`` is the Node as it was last read: it is read once more only where it has changed.
    """
    return _change(client, name, {"key": TAINT, "value": run, "effect": "NoExecute"}, seen)


def lift(client: Client, name: str, seen: Node | None = None) -> Node | None:
    """Take the taint off a Node and return that, None where there is none; see ``bar``. Raises KubeError."""
    return _change(client, name, None, seen)


def is_barred(document: Mapping[str, Any], run: str) -> bool:
    """Tell whether a Node has the taint of this run."""
    return any(taint["key"] == TAINT and taint.get("value") == run for taint in _taints(document))


def _taints(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((document.get("spec") or {}).get("taints") or ())


def _change(client: Client, name: str, taint: Mapping[str, Any] | None, seen: Node | None) -> Node | None:
    """Have a Node carry the taint or none, whatever else changes its taints meanwhile."""
    document = seen or client.find(path_of_node(name))
    while document is not None:
        before = _taints(document)
        after = [*(t for t in before if t["key"] != TAINT), *([taint] if taint else [])]
        if before == after:
            return document
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": document["metadata"]["uid"]},
            {"op": "test", "path": _TAINTS, "value": before or None},
            {"op": "add", "path": _TAINTS, "value": after} if after else {"op": "remove", "path": _TAINTS},
        ]
        if changed := send(client, name, patch):
            return changed
        document = client.find(path_of_node(name))
    return None
