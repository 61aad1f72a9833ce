"""Our cordon: set on a Node and removed in one request each, whose preconditions the API server tests.

An annotation set along with it says whose it is and what was there before. The mark that keeps the cluster autoscaler
from removing a host that is being worked on comes and goes with the cordon. A cordon without our annotation is somebody
else's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from image_builder.node.net.kube import JSON_PATCH, Client, KubeError, path_of_node

CORDON = "image-builder/cordon"
SCALE_DOWN = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
# Statuses of a JSON patch whose test fails, and of one whose path doesn't exist.
CHANGED = frozenset({409, 422})


@dataclass(frozen=True)
class Record:
    """The contents of the annotation. ``since``: Unix time; ``scale_down``: the autoscaler's mark from before."""

    run: str
    since: float
    was_unschedulable: bool = False
    scale_down: str | None = None

    def text(self) -> str:
        return json.dumps(vars(self), sort_keys=True)


def record_of(document: Mapping[str, Any]) -> Record | None:
    """Return the record in a Node's annotation; None if there is none, or it is malformed."""
    try:
        fields = json.loads(_annotations(document)[CORDON])
        since = float(fields["since"])
        mark = fields["scale_down"]
        if not math.isfinite(since):
            return None
        return Record(
            str(fields["run"]),
            since,
            fields["was_unschedulable"] is True,
            None if mark is None else str(mark),
        )
    except (KeyError, TypeError, ValueError):
        return None


def is_cordoned(document: Mapping[str, Any]) -> bool:
    """Return whether a Node takes no new pods."""
    return bool((document.get("spec") or {}).get("unschedulable"))


def _annotations(document: Mapping[str, Any]) -> Mapping[str, str]:
    return document["metadata"].get("annotations") or {}


def pointer(annotation: str) -> str:
    """Return the path of an annotation as a JSON pointer (RFC 6901)."""
    return "/metadata/annotations/" + annotation.replace("~", "~0").replace("/", "~1")


def cordon(document: Mapping[str, Any], run: str, now: float) -> tuple[Record, list[dict[str, Any]]]:
    """Return the record of a new cordon, and the patch that sets it on exactly this Node.

    The patch is refused if the cordon or our annotation has changed meanwhile, so two drains can't both take a Node.
    """
    annotations = _annotations(document)
    record = Record(run, now, is_cordoned(document), annotations.get(SCALE_DOWN))
    return record, recordon(document, record)


def recordon(document: Mapping[str, Any], record: Record) -> list[dict[str, Any]]:
    """Return the patch that sets a cordon with this record, as on a Node that was deleted and registered again."""
    ours = {CORDON: record.text(), SCALE_DOWN: "true"}
    tests: list[dict[str, Any]] = [
        {"op": "test", "path": "/metadata/uid", "value": document["metadata"]["uid"]},
        {"op": "test", "path": "/spec/unschedulable", "value": True if is_cordoned(document) else None},
    ]
    annotations = _annotations(document)
    if annotations:
        tests.append({"op": "test", "path": pointer(CORDON), "value": annotations.get(CORDON)})
        marks: list[dict[str, Any]] = [
            {"op": "add", "path": pointer(key), "value": value} for key, value in ours.items()
        ]
    else:
        tests.append({"op": "test", "path": "/metadata/annotations", "value": None})
        marks = [{"op": "add", "path": "/metadata/annotations", "value": ours}]
    return [*tests, *marks, {"op": "add", "path": "/spec/unschedulable", "value": True}]


def uncordon(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the patch that removes what is ours and restores what was there before; empty if there is no record.

    If somebody has already uncordoned the host, only our marks are removed.
    """
    record, annotations = record_of(document), _annotations(document)
    if record is None:
        return []
    patch: list[dict[str, Any]] = [
        {"op": "test", "path": pointer(CORDON), "value": annotations[CORDON]},
        {"op": "remove", "path": pointer(CORDON)},
    ]
    if is_cordoned(document) and not record.was_unschedulable:
        patch += [
            {"op": "test", "path": "/spec/unschedulable", "value": True},
            {"op": "remove", "path": "/spec/unschedulable"},
        ]
    if SCALE_DOWN in annotations and record.scale_down is None:
        patch.append({"op": "remove", "path": pointer(SCALE_DOWN)})
    elif record.scale_down is not None:
        patch.append({"op": "add", "path": pointer(SCALE_DOWN), "value": record.scale_down})
    return patch


def send(client: Client, name: str, patch: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Send a patch of a Node; return the patched Node, None if a test of the patch failed. Raises KubeError."""
    try:
        return client.request("PATCH", path_of_node(name), patch, JSON_PATCH)
    except KubeError as error:
        if error.status in CHANGED:
            return None
        raise


def free(client: Client, name: str, run: str, seen: dict[str, Any] | None = None) -> str:
    """Remove our cordon, however often the Node changes meanwhile; return the Node's uid, empty if it has no cordon of
    this run. Raises KubeError.

    ``seen`` is the Node as it was last read: it is read again only if it has changed.
    """
    document = seen or client.find(path_of_node(name))
    while document is not None:
        record = record_of(document)
        if record is None or record.run != run:
            return ""
        if send(client, name, uncordon(document)):
            return str(document["metadata"]["uid"])
        document = client.find(path_of_node(name))
    return ""
