"""Ask a pod's owner to save its work and end: an annotation of the pod, and an Event on its owner.

A pod reads its own annotations from a file (the downward API). It is answered when the pod ends. The shape follows
KEP-4563 (EvictionRequest): who asks, until when, and the end.
"""

from __future__ import annotations

from typing import Any

from image_builder.drain.pods import Pod
from image_builder.node.net.kube import MERGE_PATCH, NOT_FOUND, Client, KubeError, path_of_pod
from image_builder.text import stamp

CHECKPOINT = "image-builder/checkpoint-by"
_FORBIDDEN = 403


def event(pod: Pod, run: str, by: float, now: float) -> dict[str, Any]:
    """Return the Event on a pod's owner, on the pod itself where it has none."""
    target = {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}
    if owner := pod.owner:
        target = {"apiVersion": owner.api, "kind": owner.kind, "name": owner.name, "uid": owner.uid}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{pod.name[:200]}.", "namespace": pod.namespace},
        "involvedObject": {**target, "namespace": pod.namespace},
        "reason": "CheckpointRequested",
        "message": f"the host {pod.host} is drained ({run}): save the work of {pod.name} and end by {stamp(by)}",
        "type": "Normal",
        "source": {"component": "image-builder"},
        "firstTimestamp": stamp(now),
        "lastTimestamp": stamp(now),
        "count": 1,
    }


def ask(client: Client, pod: Pod, run: str, by: float, now: float) -> None:
    """Ask once, the annotation last: without it the next turn asks again. Raises KubeError.

    The status is the pod's part that may be patched without a right to change what runs in it.
    """
    try:
        client.request("POST", f"/api/v1/namespaces/{pod.namespace}/events", event(pod, run, by, now))
        mark = {"metadata": {"uid": pod.uid, "annotations": {CHECKPOINT: stamp(by)}}}
        client.request("PATCH", f"{path_of_pod(pod.namespace, pod.name)}/status", mark, MERGE_PATCH)
    except KubeError as error:
        # It is gone, or is going with its namespace.
        is_going = error.status == _FORBIDDEN and "NamespaceTerminating" in error.causes
        if error.status not in (NOT_FOUND, 409) and not is_going:
            raise
