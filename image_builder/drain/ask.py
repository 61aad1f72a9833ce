"""Asks a pod's owner to save its work and end, by an annotation of the pod and an Event on its owner.

A pod can read its own annotations from a file (the downward API). The answer is the end of the pod. The format follows
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
    """Return the Event on a pod's owner, or on the pod itself if it has no owner."""
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
    """Ask once, and set the annotation last: without it, the next turn asks again. Raises KubeError.

    The patch is sent to the pod's status, which doesn't take the right to change what runs in the pod.
    """
    try:
        client.request("POST", f"/api/v1/namespaces/{pod.namespace}/events", event(pod, run, by, now))
        mark = {"metadata": {"uid": pod.uid, "annotations": {CHECKPOINT: stamp(by)}}}
        client.request("PATCH", f"{path_of_pod(pod.namespace, pod.name)}/status", mark, MERGE_PATCH)
    except KubeError as error:
        # The pod is gone, or is being deleted with its namespace.
        is_going = error.status == _FORBIDDEN and "NamespaceTerminating" in error.causes
        if error.status not in (NOT_FOUND, 409) and not is_going:
            raise
