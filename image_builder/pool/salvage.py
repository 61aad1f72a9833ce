"""Clean up after a roll whose driver and journal are lost: cordons, claims on scale sets, suspended services.

All that is known of the roll is what is recorded on nodes and scale sets. So only a host that, according to Azure, runs
another version than the roll's is freed: any other host with the roll's marks is reported, and stays as it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from image_builder.drain import fence, taint
from image_builder.drain import run as drains
from image_builder.drain.lease import Leases
from image_builder.errors import PoolError
from image_builder.node.net.kube import Client as Kube
from image_builder.node.net.kube import KubeError
from image_builder.pool.plan.model import Host
from image_builder.pool.plan.plan import BACK
from image_builder.pool.scale_set.client import Client as Azure
from image_builder.pool.scale_set.client import claim_of
from image_builder.pool.scale_set.model import Instance, ScaleSet, is_same_id
from image_builder.pool.scale_set.roll import SERVICES
from image_builder.pool.scale_set.verdict import SETTLE_SECONDS
from image_builder.pool.steps.control_plane import NODES
from image_builder.system.identity import name_of

_VERSION = re.compile(
    r"/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft\.Compute"
    r"/galleries/[^/]+/images/[^/]+/versions/[0-9]+\.[0-9]+\.[0-9]+",
    re.ASCII | re.IGNORECASE,
)


@dataclass(frozen=True)
class Marks:
    """The marks of a run: the nodes that carry them (with whether they have its taint), and the scale sets' holders."""

    nodes: Mapping[str, bool]
    holders: Mapping[str, str]


@dataclass(frozen=True)
class Salvage:
    """The result of a salvage. ``remaining`` are hosts that keep their marks, with the reason; ``unsure`` is for a
    person to judge. ``models`` are the versions that models name now, ``versions`` how many instances run each version.
    """

    freed: tuple[str, ...]
    remaining: Mapping[str, str]
    released: tuple[str, ...]
    unsure: tuple[str, ...]
    models: Mapping[str, str]
    versions: Mapping[str, Mapping[str, int]]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def salvage(
    kube: Kube,
    azure: Azure,
    hosts: Sequence[Host],
    run: str,
    version: str,
    *,
    before: str = "",
    leases: Leases | None = None,
    settle: float = SETTLE_SECONDS,
) -> Salvage:
    """Remove a run's marks from the nodes and scale sets of an inventory; hosts that have its ``version`` keep theirs.

    Without the version from ``before`` only hosts with an older version than the roll's are freed.

    A Lease that is still renewed belongs to a live driver and is respected; the Leases are held from then on. Without
    ``leases`` the driver counts as lost. Raises PoolError for such a Lease, and for a version that isn't one, before
    anything is changed; KubeError, FetchError.
    """
    paths = sorted({host.scale_set_id for host in hosts if host.scale_set_id})
    sets = {path: azure.scale_set(path) for path in paths}
    _require_version(azure, sets, version)
    if before:
        _require_version(azure, sets, before)
        if is_same_id(before, version):
            raise PoolError("the version from before and the roll's are the same", hint="nothing was changed")
    inventory = {host.name: host for host in hosts}
    marks = Marks(_marked(kube, run), _held(sets, run))
    if leases:
        marked = {inventory[name].scale_set_id for name in marks.nodes if name in inventory}
        leases.take(*sorted((marked | marks.holders.keys()) - {""}))
    instances = {path: {i.id: i for i in azure.instances(path)} for path in paths}
    if any(marks.nodes.values()):
        # The last request for a tainted host may have been accepted without showing yet.
        azure.wait(settle)
        instances = {path: {i.id: i for i in azure.instances(path)} for path in paths}
    paths_of_run = {inventory[name].scale_set_id for name in marks.nodes if name in inventory} | {
        *marks.holders
    }
    is_elsewhere = not before and _moved_elsewhere(version, paths_of_run & sets.keys(), sets, instances)
    wrong = "nothing has the version of --to, but versions are mixed: --from VERSION" if is_elsewhere else ""
    remaining = {
        name: reason
        for name in marks.nodes
        if (reason := _reason(inventory.get(name), instances, version, before) or wrong)
    }
    for name in [name for name in marks.nodes if name not in remaining]:
        if refusal := _free(kube, name, run, barred=marks.nodes[name]):
            remaining[name] = refusal
    unsure = [text for path, holder in marks.holders.items() for text in _release(azure, path, holder)]
    return Salvage(
        freed=tuple(name for name in marks.nodes if name not in remaining),
        remaining=remaining,
        released=tuple(marks.holders),
        unsure=tuple(unsure),
        models={path: sets[path].image for path in paths},
        versions={path: dict(Counter(i.image for i in instances[path].values())) for path in paths},
    )


def _require_version(azure: Azure, sets: Mapping[str, ScaleSet], version: str) -> None:
    """Raise PoolError unless a version exists, or was deleted and is still named by a model or an instance.

    No host seems to have a misspelled version: all would be freed.
    """
    if not _VERSION.fullmatch(version):
        raise PoolError(
            f"{version} isn't the id of a version", hint="/subscriptions/…/versions/2026.1126.0, in full"
        )
    if azure.version(version) or any(is_same_id(group.image, version) for group in sets.values()):
        return
    if not any(instance.runs(version) for path in sets for instance in azure.instances(path)):
        raise PoolError(f"there is no version {version}, and no instance has it", hint="nothing was changed")


def _moved_elsewhere(
    version: str,
    paths: Iterable[str],
    sets: Mapping[str, ScaleSet],
    instances: Mapping[str, Mapping[str, Instance]],
) -> bool:
    """Return whether scale sets were moved to a version, but not to this one: the roll was to another."""
    has_moved = False
    for path in paths:
        images = {instance.image.lower() for instance in instances[path].values() if instance.is_known}
        images |= {sets[path].image.lower()} if sets[path].is_pinned else set()
        if any(is_same_id(image, version) for image in images):
            return False
        has_moved |= len(images) > 1
    return has_moved


def _marked(kube: Kube, run: str) -> dict[str, bool]:
    """Return the nodes that a run cordoned or tainted, and whether they have its taint."""
    nodes: dict[str, bool] = {}

    def take(document: dict[str, Any]) -> None:
        record, is_barred = fence.record_of(document), taint.is_barred(document, run)
        if is_barred or (record is not None and record.run == run):
            nodes[document["metadata"]["name"]] = is_barred

    kube.each_page(NODES, {}, take)
    return dict(sorted(nodes.items()))


def _held(sets: Mapping[str, ScaleSet], run: str) -> dict[str, str]:
    """Return the scale sets that a run or its rollback has claimed, with the holder as recorded there."""
    holders: dict[str, str] = {}
    for path, scale_set in sets.items():
        holder, _ = claim_of(scale_set)
        name = name_of(holder)
        if name != run and not name.startswith(f"{run}{BACK}"):
            continue
        holders[path] = holder
    return holders


def _reason(
    host: Host | None, instances: Mapping[str, Mapping[str, Instance]], version: str, before: str
) -> str:
    """Return why a host with a run's marks can't be freed; empty if it has its image from before the run."""
    if host is None:
        return "the inventory doesn't have it: its image is unknown"
    instance = instances.get(host.scale_set_id, {}).get(host.instance)
    if instance is None or instance.vm_id != host.vm_id.lower():
        return "its instance was deleted, or is another machine"
    if not instance.is_at_rest:
        return f"its instance is {instance.state}"
    if instance.state.lower() == "failed":
        return f"its instance failed: {instance.code or 'no code'}"
    if not instance.is_known:
        return "its version is unknown"
    if instance.runs(version):
        return "it has the roll's version"
    name = instance.image.rpartition("/")[2]
    if before:
        return (
            "" if instance.runs(before) else f"it has {name}, neither the roll's version nor that from before"
        )
    # If `version` is that from before, the host may be one whose new image nobody has verified.
    return "" if _is_older(instance.image, version) else f"it has {name}, which isn't older: --from VERSION"


def _is_older(one: str, other: str) -> bool:
    """Return whether a version (an id) precedes another one of the same image definition."""
    (image, _, number), (other_image, _, other_number) = (
        path.lower().partition("/versions/") for path in (one, other)
    )
    if image != other_image:
        return False
    numbers = [[int(part) for part in text.split(".")] for text in (number, other_number)]
    return numbers[0] < numbers[1]


def _free(kube: Kube, name: str, run: str, *, barred: bool) -> str:
    """Remove a run's marks from a node; return why that is denied. Raises KubeError."""
    try:
        if barred:
            taint.lift(kube, name)
        drains.free(kube, name, run)
    except KubeError as error:
        if not fence.is_denied(error):
            raise
        return f"freeing it is denied: {error.message}"
    return ""


def _release(azure: Azure, path: str, holder: str) -> list[str]:
    """Resume the services of a scale set, and remove the claim from it; return what isn't certain."""
    states = azure.services(path)
    suspended = [service for service in SERVICES if states.get(service) == "Suspended"]
    azure.set_services(path, suspended, "Resume", states)
    azure.release(path, holder)
    return [
        f"{path}: {service} was suspended, maybe by somebody else, and is resumed" for service in suspended
    ]
