"""The requests that a roll sends: all that change something in Azure or in the cluster, if everything goes well.

Reads aren't included, nor is anything that depends on the moment: renewals of a claim on a scale set, its Lease,
Events, requests that are refused and sent again, which hosts share an upgrade request, evictions by a policy that has
them. Evictions after a deadline are included, as one per host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from image_builder.node.net.kube import path_of_node
from image_builder.pool.plan.model import Host
from image_builder.pool.plan.plan import Plan
from image_builder.pool.scale_set.client import HOLD_TAG, Client
from image_builder.pool.scale_set.model import ScaleSet
from image_builder.pool.scale_set.roll import SERVICES

# Stands for the process in a claim and for its end, which depend on the run.
UNTIL = "…"
_EVICTION = "/api/v1/namespaces/…/pods/…/eviction"


@dataclass(frozen=True)
class Call:
    """A request. ``host`` is empty for a whole scale set; ``body`` is None if it depends on the Node at that time."""

    to: Literal["azure", "kubernetes"]
    purpose: str
    method: Literal["PATCH", "POST"]
    path: str
    body: Mapping[str, Any] | None = None
    host: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def calls(plan: Plan, client: Client) -> list[Call]:
    """Return the requests that the run of a plan sends, by scale set and host; raises PoolError, FetchError."""
    assert plan.target is not None
    listed: list[Call] = []
    for path in sorted(plan.target.before):
        scale_set, services = client.scale_set(path), client.services(path)
        running = [service for service in SERVICES if services.get(service) == "Running"]
        listed += _begun(scale_set, plan.holder, running)
        if scale_set.image.lower() != plan.target.version.lower():
            reference = {"imageReference": {"id": plan.target.version}}
            body = {"properties": {"virtualMachineProfile": {"storageProfile": reference}}}
            listed.append(Call("azure", "name the version", "PATCH", path, body))
        for host in plan.hosts:
            if host.scale_set_id == path:
                listed += _of_host(host, plan.deadline, is_forced=scale_set.is_ephemeral)
        listed += _over(scale_set, running)
    return listed


def _begun(scale_set: ScaleSet, holder: str, running: Iterable[str]) -> Iterator[Call]:
    tags = {**scale_set.tags, HOLD_TAG: f"{holder}@{UNTIL} until {UNTIL}"}
    yield Call("azure", "claim", "PATCH", scale_set.id, {"tags": tags})
    for service in running:
        yield _service(scale_set, service, "Suspend")


def _over(scale_set: ScaleSet, running: Iterable[str]) -> Iterator[Call]:
    for service in running:
        yield _service(scale_set, service, "Resume")
    tags = {name: value for name, value in scale_set.tags.items() if name != HOLD_TAG}
    yield Call("azure", "let go", "PATCH", scale_set.id, {"tags": tags})


def _service(scale_set: ScaleSet, service: str, action: str) -> Call:
    path = f"{scale_set.id}/setOrchestrationServiceState"
    return Call("azure", f"{action} {service}", "POST", path, {"serviceName": service, "action": action})


def _of_host(host: Host, deadline: str, *, is_forced: bool) -> Iterator[Call]:
    node = path_of_node(host.name)
    yield Call("kubernetes", "cordon", "PATCH", node, host=host.name)
    if deadline:
        # For each pod of a job that runs there at that time.
        yield Call("kubernetes", f"evict after {deadline}", "POST", _EVICTION, host=host.name)
    yield Call("kubernetes", "taint", "PATCH", node, host=host.name)
    upgrade = {"instanceIds": [host.instance]}
    yield Call("azure", "upgrade", "POST", f"{host.scale_set_id}/manualupgrade", upgrade, host.name)
    # Not sent if the upgrade already replaces the disk.
    machine = f"{host.scale_set_id}/virtualMachines/{host.instance}"
    force = {"forceUpdateOSDiskForEphemeral": True} if is_forced else {}
    yield Call("azure", "reimage", "POST", f"{machine}/reimage", force, host.name)
    yield Call("kubernetes", "untaint", "PATCH", node, host=host.name)
    yield Call("kubernetes", "uncordon", "PATCH", node, host=host.name)


def rows(listed: Iterable[Call]) -> list[tuple[str, ...]]:
    """Return a table of the requests: for each kind, whether one is sent per host or per scale set, and the total."""
    kinds = Counter(
        (call.to, call.method, call.purpose, "host" if call.host else "scale set") for call in listed
    )
    table = [("to", "method", "purpose", "one for each", "in all")]
    table += [(*kind, str(count)) for kind, count in kinds.items()]
    return [*table, ("", "", "", "", str(kinds.total()))]
