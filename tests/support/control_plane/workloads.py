"""Workloads for simulated nodes: pods, and the controllers and budgets around them, as manifests for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from image_builder.node.net.kube import Client
from tests.support.control_plane.gates import wait_until

Manifest = dict[str, Any]
GPUS = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
CONTAINER = {
    "name": "main",
    "image": "registry.example.com/work:1",
    "resources": {"requests": {"cpu": "100m"}},
}


def namespace(admin: Client, name: str) -> str:
    """Create a namespace, and wait until pods can be created in it."""
    admin.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    assert wait_until(lambda: admin.find(f"/api/v1/namespaces/{name}/serviceaccounts/default") is not None)
    return name


def template(hosts: Sequence[str], *, labels: Mapping[str, str], gpus: bool = False, **more: Any) -> Manifest:
    """Return a pod template for one of these hosts; with ``gpus`` the pod takes all GPUs of a host.

    ``annotations`` are the pod's; all other keywords go into its spec.
    """
    terms = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [*hosts]}]}]
    affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    annotations = more.pop("annotations", {})
    return {
        "metadata": {"labels": dict(labels), "annotations": annotations},
        "spec": {
            "containers": [{**CONTAINER, **(GPUS if gpus else {})}],
            "affinity": {"nodeAffinity": affinity},
            "terminationGracePeriodSeconds": 1,
            **more,
        },
    }


def replica_set(name: str, replicas: int, hosts: Sequence[str], **more: Any) -> Manifest:
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": template(hosts, labels=labels, **more),
        },
    }


def daemon_set(name: str) -> Manifest:
    made = replica_set(name, 0, [])
    del made["spec"]["replicas"], made["spec"]["template"]["spec"]["affinity"]
    return {**made, "kind": "DaemonSet"}


def job(name: str, pods: int, hosts: Sequence[str], *, seconds: int | None = None, **more: Any) -> Manifest:
    """Return a Job of ``pods`` pods at once, which must end within ``seconds``."""
    limit = {"activeDeadlineSeconds": seconds} if seconds else {}
    body = template(hosts, labels={"app": name}, restartPolicy="Never", **more)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"parallelism": pods, "completions": pods, "backoffLimit": 9, "template": body, **limit},
    }


def pod(name: str, host: str, **more: Any) -> Manifest:
    """Return a pod without a controller, bound to its host without the scheduler."""
    body = template([host], labels={"app": name}, **more)
    del body["spec"]["affinity"]
    body["metadata"]["name"] = name
    return {"apiVersion": "v1", "kind": "Pod", **body, "spec": {**body["spec"], "nodeName": host}}


def budget(name: str, app: str, available: int | str) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name},
        "spec": {"minAvailable": available, "selector": {"matchLabels": {"app": app}}},
    }


def create(admin: Client, space: str, *manifests: Manifest) -> None:
    for manifest in manifests:
        version, plural = manifest["apiVersion"], f"{manifest['kind'].lower()}s"
        root = "/api/v1" if version == "v1" else f"/apis/{version}"
        admin.request("POST", f"{root}/namespaces/{space}/{plural}", manifest)


def pods_of(admin: Client, space: str, app: str = "") -> list[Manifest]:
    """Return the running pods of a namespace, or only those of one workload."""
    selector = f"?labelSelector=app%3D{app}" if app else ""
    items: list[Manifest] = admin.request("GET", f"/api/v1/namespaces/{space}/pods{selector}")["items"]
    return [item for item in items if item.get("status", {}).get("phase") == "Running"]


def await_running(
    admin: Client, space: str, count: int, app: str = "", seconds: float = 120
) -> list[Manifest]:
    assert wait_until(lambda: len(pods_of(admin, space, app)) == count, seconds), (
        f"{len(pods_of(admin, space, app))} of {count} pods of {space} run"
    )
    return pods_of(admin, space, app)


def await_budget(admin: Client, space: str, name: str, allowed: int) -> None:
    """Wait until a budget reports that ``allowed`` of its pods may be disrupted."""
    path = f"/apis/policy/v1/namespaces/{space}/poddisruptionbudgets/{name}"

    def is_settled() -> bool:
        made = admin.request("GET", path)
        status = made.get("status") or {}
        generation = made["metadata"].get("generation")
        is_current: bool = status.get("observedGeneration") == generation
        return (
            is_current and status.get("disruptionsAllowed") == allowed and status.get("expectedPods", 0) > 0
        )

    assert wait_until(is_settled), admin.request("GET", path)
