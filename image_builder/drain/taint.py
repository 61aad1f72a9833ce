"""A taint that keeps every pod off an empty host, even one that a scheduler bound before it knew of the cordon.

Only schedulers heed a cordon. The kubelet itself refuses pods that don't tolerate a ``NoExecute`` taint, so none starts
between the last look at a host and what is then done to its machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from image_builder.drain.fence import attempts, send
from image_builder.node.net.kube import Client, path_of_node

TAINT = "image-builder/roll"
_TAINTS = "/spec/taints"

Node = dict[str, Any]


def bar(client: Client, name: str, run: str, seen: Node | None = None) -> Node | None:
    """Put the taint on a Node and return the Node, None if there is none. Raises KubeError.

    ``seen`` is the Node as it was last read: it is read again only if it has changed.
    """
    return _change(client, name, {"key": TAINT, "value": run, "effect": "NoExecute"}, seen)


def lift(client: Client, name: str, seen: Node | None = None) -> Node | None:
    """Remove the taint from a Node and return the Node, None if there is none; see ``bar``. Raises KubeError."""
    return _change(client, name, None, seen)


def is_barred(document: Mapping[str, Any], run: str) -> bool:
    """Return whether a Node has the taint of this run."""
    return any(taint["key"] == TAINT and taint.get("value") == run for taint in _taints(document))


def _taints(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((document.get("spec") or {}).get("taints") or ())


def _change(client: Client, name: str, taint: Mapping[str, Any] | None, seen: Node | None) -> Node | None:
    """Make a Node carry this taint or none of ours, though its taints may change meanwhile (``attempts``)."""
    document = seen or client.find(path_of_node(name))
    for _ in attempts(name):
        if document is None:
            return None
        before = _taints(document)
        if [t for t in before if t["key"] == TAINT] == ([taint] if taint else []):
            return document
        test = {"op": "test", "path": "/metadata/uid", "value": document["metadata"]["uid"]}
        if changed := send(client, name, [test, *_patch(before, taint)]):
            return changed
        document = client.find(path_of_node(name))
    raise AssertionError("attempts() ends")


def _patch(before: Sequence[Mapping[str, Any]], taint: Mapping[str, Any] | None) -> Iterator[Node]:
    """Yield the operations that leave this taint, or none, as ours.

    Others may append their taints before ours is removed, but not before it is added: a patch that is sent again since
    its answer was lost must fail its test, not add a duplicate.
    """
    if taint:
        yield {"op": "test", "path": _TAINTS, "value": list(before) or None}
        yield {"op": "add", "path": _TAINTS, "value": [t for t in before if t["key"] != TAINT] + [taint]}
        return
    for place in reversed(range(len(before))):
        if before[place]["key"] == TAINT:
            yield {"op": "test", "path": f"{_TAINTS}/{place}", "value": before[place]}
            yield {"op": "remove", "path": f"{_TAINTS}/{place}"}
