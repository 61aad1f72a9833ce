"""Objects as the API returns them, as far as a drain reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The API server's message, with status 422, about a JSON patch of which an operation fails.
PATCH_FAILED = "PATCH /api/v1/nodes/gpu-1: 422 the server rejected our request due to an error in our request"


def pod_object(name: str = "a", *, owner: str = "ReplicaSet", **parts: Any) -> dict[str, Any]:
    """Return a Pod with a controller of kind ``owner``, if not empty; ``parts`` go where the API has them."""
    references = [
        {"apiVersion": "apps/v1", "kind": owner, "name": "x", "uid": f"uid-{owner}", "controller": True}
    ]
    return {
        "metadata": {
            "name": name,
            "namespace": "work",
            "uid": f"uid-{name}",
            "ownerReferences": references if owner else [],
            "labels": parts.get("labels", {}),
            "annotations": parts.get("annotations", {}),
            **parts.get("meta", {}),
        },
        "spec": {"nodeName": "gpu-1", "containers": [{"name": "main"}], **parts.get("spec", {})},
        "status": {"phase": "Running", "startTime": "2026-01-01T00:00:00Z", **parts.get("status", {})},
    }


def node_object(annotations: Mapping[str, str] | None = None, *, cordoned: bool = False) -> dict[str, Any]:
    return {
        "metadata": {"name": "gpu-1", "uid": "uid-1", "annotations": dict(annotations or {})},
        "spec": {"unschedulable": True} if cordoned else {},
    }
