"""The reasons why a host is not empty: its pods, their owners, the budgets that hold them, when their work ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from image_builder.drain import fence, hosts, quarantine
from image_builder.drain.evict import evict
from image_builder.drain.ladder import Tenant
from image_builder.drain.observe import Looker
from image_builder.node.net.kube import Client, KubeError
from image_builder.text import stamp

_FORBIDDEN = 403
HEAD = ("host", "pod", "owner", "gang", "what happens", "why", "ends")


def entry(tenant: Tenant) -> dict[str, str]:
    """Return the facts about a pod that keeps a host busy; ``budget`` is the server's answer to its eviction."""
    pod = tenant.pod
    return {
        "pod": str(pod),
        "owner": str(pod.owner or ""),
        "gang": tenant.gang,
        "class": "ending" if pod.is_leaving else tenant.verdict.kind.value,
        "reason": tenant.verdict.reason,
        "budget": tenant.refusal or tenant.blocked,
        "ends": "" if pod.deadline is None else stamp(pod.deadline),
    }


def bad_hosts(client: Client) -> Mapping[str, hosts.BadHost]:
    """Return the physical hosts known to be bad, none if the caller may not read them. Raises KubeError."""
    try:
        return hosts.read(client) or {}
    except KubeError as error:
        if error.status != _FORBIDDEN:  # a user who may drain needn't have access to the gate's list
            raise
        return {}


def explain(
    client: Client, looker: Looker, name: str, now: float, bad: Mapping[str, hosts.BadHost]
) -> dict[str, Any]:
    """Return a host's cordon and the pods that keep it busy; ``bad`` are physical hosts. Raises KubeError.

    A dry run of the eviction API itself shows whether a budget holds a pod.
    """
    document = looker.node(name)
    if document is None:
        return {"host": name, "state": "there is no such node", "pods": []}
    pods = []
    for tenant in looker.tenants(name, now):
        answer = evict(client, tenant.pod, dry_run=True).message if tenant.is_evictable else ""
        pods.append({**entry(tenant), "budget": answer})
    return {
        "host": name,
        "state": "; ".join(filter(None, (_state(document), _physical(document, bad)))),
        "pods": pods,
    }


def _physical(document: Mapping[str, Any], bad: Mapping[str, hosts.BadHost]) -> str:
    """Return what is known about a node's physical host, in words."""
    name = hosts.host_of(document)
    if known := bad.get(name):
        return known.words
    return f"on {name}" if name else ""


def _state(document: Mapping[str, Any]) -> str:
    cordon = _cordon(fence.record_of(document), fence.is_cordoned(document))
    mark = quarantine.record_of(document)
    return f"{cordon}; in quarantine for {mark.words}" if mark else cordon


def _cordon(record: fence.Record | None, is_cordoned: bool) -> str:
    if record is None:
        return "cordoned by somebody else" if is_cordoned else "schedulable"
    since = f"by {record.run} since {stamp(record.since)}"
    return f"cordoned {since}" if is_cordoned else f"cordoned {since}, and uncordoned by somebody else"


def rows(host: str, pods: Iterable[dict[str, str]]) -> list[tuple[str, ...]]:
    """Return a host's rows of the table, one for each pod."""
    return [
        (
            host,
            pod["pod"],
            pod["owner"],
            pod["gang"],
            pod["class"],
            pod["budget"] or pod["reason"],
            pod["ends"] or "unknown",
        )
        for pod in pods
    ]
