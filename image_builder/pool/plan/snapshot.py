"""Scale sets as Azure lists them -> a static inventory, and everything that is wrong with it.

A listing can lose a host silently in two ways: by omitting it, or by omitting its address. So the number of hosts is
compared with the capacity of the scale set, and the instances with the owners of the network interfaces, which are
listed by another service. No value from the cloud becomes part of an inventory unless it is well-formed: Ansible
evaluates what it reads there, and a tag may contain a template.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from image_builder.definition.placeholders import is_placeholder
from image_builder.errors import DefinitionError, Problem, UsageError
from image_builder.gallery.tags import BUILD_TAG
from image_builder.pool.plan.plan import doubles
from image_builder.text import short_list

Json = Mapping[str, Any]

SCALE_SET_ID = re.compile(
    r"/subscriptions/(?P<subscription>[0-9a-f-]{36})/resourceGroups/(?P<group>[\w.()-]{1,90})"
    r"/providers/Microsoft\.Compute/virtualMachineScaleSets/(?P<name>[\w.-]{1,64})",
    re.IGNORECASE | re.ASCII,
)
_GALLERY = re.compile(r"/galleries/[^/]+/images/(?P<definition>[^/]+)(?:/versions/[^/]+)?$", re.IGNORECASE)
_POOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# Ansible's own groups, the group of image definitions, and the group of all pools.
_RESERVED = frozenset({"all", "ungrouped", "images", "pools"})
# A name, number, version or state, without spaces, braces or other characters that are special in YAML or a template.
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_MACHINE_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_GONE = ("deleting", "deleted")


@dataclass(frozen=True)
class ScaleSetId:
    """A scale set that belongs to a pool. ``id`` is its Resource Manager id."""

    pool: str
    id: str
    subscription: str
    group: str
    name: str

    @property
    def inventory_group(self) -> str:
        """Return the group that its hosts are in; a pool has one for each scale set."""
        return re.sub(r"[^a-z0-9_]", "_", f"{self.pool}_{self.name}".lower())


@dataclass(frozen=True)
class Listing:
    """A scale set's model, its instances with their instance views, and its network interfaces, as Azure's JSON."""

    scale_set: Json
    instances: Sequence[Json]
    interfaces: Sequence[Json]


@dataclass(frozen=True)
class Machine:
    """A host of an inventory: its name, its variables, and its instance's id in Resource Manager, in lower case."""

    name: str
    id: str
    variables: Mapping[str, str | bool]


@dataclass(frozen=True)
class Snapshot:
    """A scale set that was read. ``expected`` is its capacity (None: unknown), ``missing`` says what is lost."""

    source: ScaleSetId
    image: str
    expected: int | None
    machines: tuple[Machine, ...]
    missing: tuple[str, ...]
    wrong: tuple[str, ...] = ()

    @property
    def problems(self) -> list[Problem]:
        return [Problem(self.source.id, self.source.pool, fault) for fault in self.wrong]

    @property
    def shortfalls(self) -> list[Problem]:
        return [Problem(self.source.id, self.source.pool, reason) for reason in self.missing]


def parse(text: str) -> ScaleSetId:
    """Return the scale set and pool in ``POOL=SCALE_SET_ID``; raises UsageError."""
    pool, _, name = text.partition("=")
    if is_placeholder(text):
        raise UsageError(f"{text} is marked REPLACE", hint="put in your own value, and remove the mark")
    match = SCALE_SET_ID.fullmatch(name.rstrip("/"))
    if not match or not _POOL.fullmatch(pool):
        form = "POOL=/subscriptions/…/resourceGroups/…/providers/Microsoft.Compute/virtualMachineScaleSets/…"
        raise UsageError(
            f"not a pool and a scale set: {text}", hint=f"{form}, as `az vmss list` shows its id"
        )
    if pool in _RESERVED:
        raise UsageError(
            f"no pool can be called `{pool}`: that is a group already", hint="give it another name"
        )
    return ScaleSetId(pool=pool, id=name.rstrip("/"), **match.groupdict())


def is_flexible(scale_set: Json) -> bool:
    """Return whether a scale set's machines are ordinary VMs, that is, its orchestration mode is Flexible."""
    return str(_part(scale_set, "properties").get("orchestrationMode", "")).lower() == "flexible"


def take(scale_set_id: ScaleSetId, listing: Listing) -> Snapshot:
    """Return the hosts of a scale set, sorted by name, and what is missing or wrong."""
    addresses, owners = _addresses(listing.interfaces)
    tags = _part(listing.scale_set, "tags")
    present: dict[str, Json] = {}
    wrong: list[str] = []
    for instance in listing.instances:
        before = present.setdefault(_id(instance), instance)
        # While machines come and go, one may be on two pages. It only matters that it is the same machine.
        if _identity(before) != _identity(instance):
            wrong.append(f"two machines have the id {_id(instance)}")
    machines, missing = [], []
    for key, instance in present.items():
        state = str(_part(instance, "properties").get("provisioningState", "unknown"))
        if state.lower() in _GONE:
            continue
        if key not in addresses:
            missing.append(f"{_last(key)} has no network interface with a private address; it is {state}")
            continue
        variables = _variables(instance, addresses[key], tags)
        name = variables.pop("name")
        wrong += _malformed(str(name), variables)
        machines.append(Machine(str(name), key, variables))
    model = _part(listing.scale_set, "properties", "virtualMachineProfile")
    image = _definition(_part(model, "storageProfile", "imageReference"))
    if image and not _PLAIN.fullmatch(image):
        wrong.append(f"the scale set's image can't be {json.dumps(image)}")
    expected = _part(listing.scale_set, "sku").get("capacity")
    lost = sorted(
        owner for owner in owners - present.keys() if owner.startswith(f"{scale_set_id.id}/".lower())
    )
    missing += [f"{_last(owner)} has a network interface and isn't among the instances" for owner in lost]
    if not isinstance(expected, int):
        missing.append("the scale set reports no capacity, so the number of hosts can't be checked")
    elif len(machines) < expected:
        missing.append(
            f"{len(machines)} of {expected} hosts were listed: {expected - len(machines)} are lost"
        )
    return Snapshot(
        source=scale_set_id,
        image=image,
        expected=expected if isinstance(expected, int) else None,
        machines=tuple(sorted(machines, key=lambda machine: machine.name)),
        missing=tuple(missing),
        wrong=tuple(wrong),
    )


def _variables(instance: Json, address: str, tags: Json) -> dict[str, Any]:
    """Return an instance's name and variables; omit what Azure doesn't report."""
    properties = _part(instance, "properties")
    view = _part(properties, "instanceView")
    reference = _part(properties, "storageProfile", "imageReference")
    size = _part(instance, "sku").get("name") or _part(properties, "hardwareProfile").get("vmSize")
    computer = _part(properties, "osProfile").get("computerName") or instance.get("name", "")
    variables = {
        "name": str(computer).lower(),
        "ansible_host": address,
        "pool_vm_id": str(properties.get("vmId", "")).lower(),
        "pool_vm_size": size,
        "pool_zone": next(iter(instance.get("zones") or ()), None),
        "pool_instance_id": instance.get("instanceId") or instance.get("name"),
        "pool_fault_domain": _text(view.get("platformFaultDomain", properties.get("platformFaultDomain"))),
        "pool_image_definition": _definition(reference),
        "pool_image_version": reference.get("exactVersion") or reference.get("version"),
        "pool_build_id": _part(instance, "tags").get(BUILD_TAG) or tags.get(BUILD_TAG),
        "pool_provisioning_state": properties.get("provisioningState"),
        "pool_power_state": _state(view, "PowerState"),
        "pool_latest_model": properties.get("latestModelApplied"),
    }
    return {key: value for key, value in variables.items() if value is not None and value != ""}


def _malformed(name: str, variables: Mapping[str, Any]) -> list[str]:
    """Return what is malformed; the address has already been checked."""
    wrong = [] if _PLAIN.fullmatch(name) else [f"can't be a host's name: {json.dumps(name)}"]
    if not _MACHINE_ID.fullmatch(str(variables.get("pool_vm_id", ""))):
        wrong.append(f"{name} has no id of a machine: {json.dumps(variables.get('pool_vm_id'))}")
    for key, value in variables.items():
        if key != "ansible_host" and not isinstance(value, bool) and not _PLAIN.fullmatch(str(value)):
            wrong.append(f"{name}: {key} can't be {json.dumps(value)}")
    return wrong


def _addresses(interfaces: Iterable[Json]) -> tuple[dict[str, str], set[str]]:
    """Return the private address of each instance that has one, and all instances that own an interface."""
    ranked: dict[str, tuple[tuple[bool, bool], str]] = {}
    owners = set()
    for interface in interfaces:
        properties = _part(interface, "properties")
        owner = str(_part(properties, "virtualMachine").get("id", "")).lower()
        owners.add(owner)
        for configuration in properties.get("ipConfigurations") or ():
            inner = _part(configuration, "properties")
            address = str(inner.get("privateIPAddress", ""))
            if not _is_address(address):
                continue
            # Prefer the primary address of the primary interface; a machine with only one may mark neither as primary.
            rank = (bool(properties.get("primary")), bool(inner.get("primary")))
            if owner not in ranked or rank > ranked[owner][0]:
                ranked[owner] = (rank, address)
    return {owner: address for owner, (_, address) in ranked.items()}, owners - {""}


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _definition(reference: Json) -> str:
    """Return the name of the gallery image definition; empty for any other kind of image."""
    match = _GALLERY.search(str(reference.get("id", "")))
    return match["definition"] if match else ""


def _state(view: Json, kind: str) -> str | None:
    codes = [str(status.get("code", "")) for status in view.get("statuses") or ()]
    return next((code.partition("/")[2] for code in codes if code.startswith(f"{kind}/")), None)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _part(value: Json, *keys: str) -> Json:
    """Return a nested object; an empty one if it doesn't exist."""
    for key in keys:
        inner = value.get(key)
        value = inner if isinstance(inner, Mapping) else {}
    return value


def _id(instance: Json) -> str:
    return str(instance.get("id", "")).lower()


def _identity(instance: Json) -> object:
    return _part(instance, "properties").get("vmId")


def _last(key: str) -> str:
    return key.rpartition("/")[2]


def check(snapshots: Sequence[Snapshot], *, fewer: bool) -> None:
    """Raise DefinitionError with everything that is wrong with these hosts; ``fewer`` accepts missing ones."""
    problems = [
        p for snapshot in snapshots for p in (*snapshot.problems, *(() if fewer else snapshot.shortfalls))
    ]
    groups = Counter(snapshot.source.inventory_group for snapshot in snapshots)
    groups.update({snapshot.source.pool for snapshot in snapshots})
    problems += [
        Problem("", group, "would be the group of two scale sets, or of one and of a pool")
        for group, count in groups.items()
        if count > 1
    ]
    machines = [machine for snapshot in snapshots for machine in snapshot.machines]
    shared = doubles((own, machine.id) for machine in machines for own in _unique(machine))
    problems += [
        Problem("", key, f"{value} is that of {short_list(sorted(ids))}")
        for (key, value), ids in shared.items()
    ]
    if problems:
        hint = "nothing was written"
        if not fewer and any(snapshot.missing for snapshot in snapshots):
            hint += "; try again, or accept fewer hosts with --allow-fewer"
        raise DefinitionError(problems, hint=hint)


def _unique(machine: Machine) -> list[tuple[str, str]]:
    """Return what must be unique to a machine, as (variable, value)."""
    own = [(key, str(machine.variables[key])) for key in ("ansible_host", "pool_vm_id")]
    return [("name", machine.name), *own]


def document(snapshots: Sequence[Snapshot], at: str) -> bytes:
    """Return the inventory of these scale sets, a line per host: the same bytes for the same hosts and time ``at``.

    If fewer hosts than the capacity were accepted, ``pool_capacity`` is their number: that was decided here.
    """
    lines = [
        "# Made by `image-builder pool snapshot`; the next one replaces it. Put variables for these hosts",
        "# into group_vars.",
        "---",
        "all:",
        "  children:",
        "    pools:",
        f"      vars: {_flow({'pool_snapshot_taken': at})}",
        "      children:",
    ]
    by_pool: dict[str, list[Snapshot]] = defaultdict(list)
    for snapshot in sorted(snapshots, key=lambda t: (t.source.pool, t.source.inventory_group)):
        by_pool[snapshot.source.pool].append(snapshot)
    for pool, sets in by_pool.items():
        lines += [f"        {pool}:", "          children:"]
        for snapshot in sets:
            lines += [f"            {snapshot.source.inventory_group}:", *_group(snapshot)]
    return ("\n".join(lines) + "\n").encode()


def _group(snapshot: Snapshot) -> list[str]:
    variables: dict[str, object] = {
        "pool_scale_set": snapshot.source.name,
        "pool_scale_set_id": snapshot.source.id,
    }
    if snapshot.expected is not None:
        variables["pool_capacity"] = min(snapshot.expected, len(snapshot.machines))
    if snapshot.image:
        variables["pool_image"] = snapshot.image
    lines = [f"              vars: {_flow(variables)}", "              hosts:"]
    for machine in snapshot.machines:
        own = dict(machine.variables)
        definition = own.pop("pool_image_definition", "")
        if definition != snapshot.image:
            # It runs a different image from the one in its scale set's model: the one it runs counts.
            own["pool_image"] = definition
        lines.append(f"                {json.dumps(machine.name)}: {_flow(own)}")
    return lines


def _flow(values: Mapping[str, object]) -> str:
    """Return an object as JSON, which is also YAML."""
    return json.dumps(values, sort_keys=True)
