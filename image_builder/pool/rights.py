"""The exact rights that a roll needs, in Azure and in the cluster, and which of them are missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from image_builder.drain.lease import NAMESPACE
from image_builder.errors import PoolError, Problem
from image_builder.gallery.survey import lacking_at
from image_builder.node.errors import NodeError
from image_builder.node.net import kubeconfig
from image_builder.node.net.kube import Client as Kube
from image_builder.pool.plan.model import Target
from image_builder.pool.plan.policy import Roll
from image_builder.pool.scale_set.client import Client as Azure
from image_builder.text import short_list

# Actions below Microsoft.Compute: on each scale set,
SCALE_SET = (
    "virtualMachineScaleSets/read",
    "virtualMachineScaleSets/write",
    "virtualMachineScaleSets/instanceView/read",
    "virtualMachineScaleSets/manualUpgrade/action",
    "virtualMachineScaleSets/setOrchestrationServiceState/action",
    "virtualMachineScaleSets/virtualMachines/read",
    "virtualMachineScaleSets/virtualMachines/reimage/action",
)
# and on the image definitions of the version and of the versions that it replaces.
DEFINITION = ("galleries/images/read", "galleries/images/versions/read")
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@dataclass(frozen=True)
class AzureRight:
    """An action, below Microsoft.Compute, on resources (their ids)."""

    action: str
    scopes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {"action": f"Microsoft.Compute/{self.action}", "scopes": list(self.scopes)}


@dataclass(frozen=True)
class ClusterRight:
    """An RBAC rule. ``resource`` may have a subresource (`pods/eviction`), or be a path (`/metrics`).

    Without a namespace the right applies to all namespaces, or to a resource that isn't namespaced.
    """

    verb: str
    resource: str
    group: str = ""
    namespace: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def name(self) -> str:
        """Return the right as `kubectl auth can-i` takes it."""
        kind = f"{self.resource}.{self.group}" if self.group else self.resource
        return f"{self.verb} {kind}"

    @property
    def review(self) -> dict[str, Any]:
        """Return the spec of its SelfSubjectAccessReview."""
        if self.resource.startswith("/"):
            return {"nonResourceAttributes": {"verb": self.verb, "path": self.resource}}
        resource, _, part = self.resource.partition("/")
        attributes = {"resource": resource, "subresource": part, "group": self.group}
        return {"resourceAttributes": {"verb": self.verb, "namespace": self.namespace, **attributes}}


ALWAYS = (
    *(ClusterRight(verb, "nodes") for verb in ("get", "list", "patch")),
    ClusterRight("list", "pods"),
    ClusterRight("get", "jobs", "batch"),
    ClusterRight("list", "certificatesigningrequests", "certificates.k8s.io"),
    ClusterRight("get", "/metrics"),
    *(ClusterRight(verb, "leases", "coordination.k8s.io", NAMESPACE) for verb in ("get", "create", "update")),
    ClusterRight("create", "events", namespace="default"),
)
EVICTING = (ClusterRight("create", "pods/eviction"),)
ASKING = (ClusterRight("patch", "pods/status"), ClusterRight("create", "events"))


def in_azure(sets: Iterable[str], versions: Iterable[str]) -> tuple[AzureRight, ...]:
    """Return the rights needed to move scale sets from and to versions, all given by their ids."""
    on_sets = tuple(sorted(set(sets)))
    on_definitions = tuple(sorted({version.partition("/versions/")[0] for version in versions if version}))
    return (
        *(AzureRight(action, on_sets) for action in SCALE_SET),
        *(AzureRight(action, on_definitions) for action in DEFINITION),
    )


def of_target(target: Target) -> tuple[AzureRight, ...]:
    """Return the Azure rights that a planned roll needs."""
    return in_azure(target.before, (target.version, *target.before.values()))


def in_cluster(roll: Roll) -> tuple[ClusterRight, ...]:
    """Return the rights needed in the cluster; those to evict pods or ask their owners only if the policy does so."""
    evicts = roll.drain.mode == "evict" or bool(roll.deadline)
    asks = roll.drain.mode == "ask" or (evicts and roll.drain.checkpoint_seconds > 0)
    return (*ALWAYS, *(EVICTING if evicts else ()), *(ASKING if asks else ()))


def missing_in_azure(client: Azure, rights: Sequence[AzureRight]) -> list[Problem]:
    """Return which rights are missing, and on which resources; raises FetchError."""
    lacking: dict[str, list[str]] = {}
    for scope in sorted({scope for right in rights for scope in right.scopes}):
        actions = [right.action for right in rights if scope in right.scopes]
        for reason in lacking_at(client.manager, scope, actions):
            lacking.setdefault(reason, []).append(scope)
    return [Problem("", "Azure", f"{reason} on {short_list(scopes)}") for reason, scopes in lacking.items()]


def missing_in_cluster(path: Path, roll: Roll) -> list[Problem]:
    """Return which rights the user of a kubeconfig lacks; raises PoolError if the API server doesn't answer."""
    try:
        with Kube(kubeconfig.load(path), agent="image-builder") as kube:
            missing = [right for right in in_cluster(roll) if not _is_allowed(kube, right)]
    except NodeError as error:
        raise PoolError(error.message, hint="the rights that it needs are in deploy/roll.yml") from error
    places = [
        (right.name, f" in namespace {right.namespace}" if right.namespace else "") for right in missing
    ]
    return [Problem("", "--kubeconfig", f"the right to {name} is missing{place}") for name, place in places]


def _is_allowed(kube: Kube, right: ClusterRight) -> bool:
    """Ask the API server for its own verdict, regardless of its authorizer. Raises KubeError."""
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": right.review,
    }
    return bool(kube.request("POST", _REVIEWS, body)["status"]["allowed"])
