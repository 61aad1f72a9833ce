"""Ansible inventory -> the hosts of pools; everything that is wrong with them is found before any is touched.

A pool is a group of the inventory. A scale set is a group within it (or the pool itself) whose hosts have these
variables:

    pool_image      the image that they run, a host of the group `images`
    pool_vm_size    Azure's name of the size
    pool_zone       the availability zone; unset if there are no zones
    pool_capacity   how many hosts there must be; if unset, they aren't counted
    pool_scale_set  the scale set's name, if it isn't the group's
    pool_vm_id      Azure's id of the machine
    pool_scale_set_id, pool_instance_id  ids of both in Resource Manager; only a roll needs them
    pool_power_state  Azure's power state: hosts that are stopped or deallocated, or about to be, are skipped

How to connect to a host is in Ansible's own variables (definition/connection.py).
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from image_builder.canonical import JSON, digest
from image_builder.definition import connection
from image_builder.definition.connection import Connection, Hop
from image_builder.definition.placeholders import placeholders
from image_builder.definition.values import Place, is_vaulted
from image_builder.errors import DefinitionError, Problem, UsageError
from image_builder.pool.plan.model import Host, Pool, ScaleSet
from image_builder.pool.plan.plan import PlannedFrom, doubles
from image_builder.pool.plan.snapshot import SCALE_SET_ID
from image_builder.pool.plan.source import opened, values_of, where
from image_builder.settings import VaultId
from image_builder.text import did_you_mean, short_list

_TEXTS = (
    "pool_image",
    "pool_vm_size",
    "pool_zone",
    "pool_scale_set",
    "pool_scale_set_id",
    "pool_instance_id",
    "pool_vm_id",
    "pool_power_state",
)
_READ = frozenset({*_TEXTS, "pool_capacity", *connection.NAMES})
# Hosts in these states don't answer: they would time out and use up the failure budget.
_OFF = ("stopping", "stopped", "deallocating", "deallocated")
_REQUIRED = ("pool_image", "pool_vm_size")
_VARIABLES_BESIDE = ("group_vars", "host_vars")


@dataclass(frozen=True)
class Fleet:
    """The requested pools, as they are in the inventory now.

    ``skipped`` are hosts that are off, by power state; they count toward capacities, but aren't in ``hosts``.
    """

    inventory: PlannedFrom
    pools: tuple[Pool, ...]
    hosts: tuple[Host, ...]
    skipped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        """Return a line for each power state because of which hosts are skipped."""
        return [f"skipped: {state}: {short_list(names)}" for state, names in self.skipped.items()]


@dataclass
class _Reading:
    """An inventory while it is being read. Faults are grouped first, so that many hosts can share one problem."""

    source: Any
    here: str
    images: frozenset[str]
    problems: list[Problem] = field(default_factory=list)
    # (variable, what is wrong with it) -> the hosts
    faults: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    # (pool, scale set) -> declared capacity -> the hosts that declare it
    capacities: dict[tuple[str, str], dict[JSON, list[str]]] = field(default_factory=dict)
    # What must be unique to a host, as (variable, value, port), and the host that has it.
    own: list[tuple[tuple[str, str, str], str]] = field(default_factory=list)
    # power state -> the hosts that are off
    skipped: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def read_fleet(
    paths: Sequence[Path],
    pools: Sequence[str],
    vault: Sequence[VaultId] = (),
) -> Fleet:
    """Return the hosts of these pools.

    Raises UsageError if no inventory or pool is given, DefinitionError with every problem, VaultError for a file that
    can't be decrypted, since it may contain a host's size or zone.
    """
    if not paths:
        raise UsageError("no inventory was given", hint="give it with -i: pools have no default inventory")
    if not pools:
        raise UsageError("no pool was given", hint="name groups of the inventory, or `pools` for all")
    absolute = [path.absolute() for path in paths]
    with opened(absolute, vault) as source:
        reading = _Reading(source, str(Place(str(absolute[0]))), frozenset(source.group("images") or ()))
        hosts = _hosts(reading, list(dict.fromkeys(pools)))
        counted_pools = _pools(reading, dict.fromkeys(pools))
        reading.problems += [*_doubles(reading), *placeholders(absolute)]
        skipped = {state: tuple(sorted(names)) for state, names in sorted(reading.skipped.items())}
        if skipped and not hosts:
            states = "; ".join(f"{state}: {short_list(names)}" for state, names in skipped.items())
            reading.problems.append(Problem(reading.here, "pool_power_state", f"no host runs: {states}"))
        reading.problems += [
            Problem(where(source, names[0], variable), variable, f"{reason}: {short_list(names)}")
            for (variable, reason), names in reading.faults.items()
        ]
    if reading.problems:
        raise DefinitionError(reading.problems)
    planned_from = PlannedFrom(paths=tuple(str(p) for p in paths), digest=inventory_digest(absolute, hosts))
    return Fleet(planned_from, counted_pools, tuple(hosts), skipped)


def read_connection(paths: Sequence[Path], name: str, vault: Sequence[VaultId] = ()) -> Connection:
    """Return how to connect to a host; raises UsageError if it isn't in the inventory, else as ``read_fleet`` does."""
    with opened([path.absolute() for path in paths], vault) as source:
        # Host names in URLs are case-insensitive.
        host = next((host for host in map(str, source.manager.hosts) if host.lower() == name.lower()), None)
        if host is None:
            raise UsageError(f"no host `{name}` in the inventory{did_you_mean(name, source.manager.hosts)}")
        values, failures = values_of(source, host, connection.NAMES.__contains__)
        way, faults = connection.read(values)
        if problems := [*failures.items(), *faults]:
            raise DefinitionError([Problem(where(source, host, key), key, why) for key, why in problems])
    return way


def _hosts(reading: _Reading, pools: Sequence[str]) -> list[Host]:
    """Return the hosts of all pools, each once."""
    groups = reading.source.manager.groups
    hosts: list[Host] = []
    pool_of: dict[str, str] = {}
    for pool in pools:
        if pool not in groups:
            names = [str(name) for name in groups if name not in ("all", "ungrouped", "images")]
            reason = f"unknown pool `{pool}`{did_you_mean(pool, names)}"
            reading.problems.append(Problem(reading.here, "pool", reason))
            continue
        sets = _scale_set_groups(reading, groups[pool])
        for name in (str(host.name) for host in groups[pool].get_hosts()):
            if name in pool_of:
                reading.faults["pool", f"is in pool `{pool_of[name]}` and in `{pool}`"].append(name)
                continue
            pool_of[name] = pool
            if name in reading.images:
                reading.faults["pool", f"is an image, not a host: `{pool}` has more than a pool's"].append(
                    name
                )
                continue
            host = _host(reading, name, pool, sets[name])
            if host:
                hosts.append(host)
    return hosts


def _scale_set_groups(reading: _Reading, pool: Any) -> dict[str, list[str]]:
    """Return, for each host, the groups of a pool that list it; note groups without any host."""
    listed: dict[str, list[str]] = defaultdict(list)
    visited: set[str] = set()
    todo = [pool]
    while todo:
        group = todo.pop()
        if group.name in visited:
            continue
        visited.add(group.name)
        todo += group.child_groups
        if not group.get_hosts():
            reading.problems.append(Problem(reading.here, str(group.name), "no host in this group"))
        for host in group.hosts:
            listed[str(host.name)].append(str(group.name))
    return listed


def _host(reading: _Reading, name: str, pool: str, groups: list[str]) -> Host | None:
    """Return a host, or None if it is off or a variable is missing or wrong, which is noted."""
    values, wrong = _values(reading, name)

    def fault(variable: str, reason: str) -> None:
        wrong.add(variable)
        reading.faults[variable, reason].append(name)

    if "/" in name or name in (".", ".."):
        # Its reports are in a directory of this name, which is removed if all is well.
        fault("inventory_hostname", "can't be the name of a directory")
    texts: dict[str, str] = {}
    for key in _TEXTS:
        value = values.get(key)
        if value is None or value == "":
            if key in _REQUIRED and key not in wrong:
                fault(key, "is missing")
        elif is_vaulted(value):
            fault(key, "can't be a vaulted value")
        elif isinstance(value, str | int) and not isinstance(value, bool):
            texts[key] = str(value)
        else:
            fault(key, f"must be a text, got {json.dumps(value)}")
    image = texts.get("pool_image")
    if image and reading.images and image not in reading.images:
        fault("pool_image", f"unknown image `{image}`{did_you_mean(image, reading.images)}")
    if (path := texts.get("pool_scale_set_id")) and not SCALE_SET_ID.fullmatch(path):
        fault("pool_scale_set_id", f"isn't a scale set's id in Resource Manager: `{path}`")
    if "pool_scale_set" not in texts and len(groups) > 1:
        fault("pool_scale_set", f"is missing, and the host is in {', '.join(sorted(groups))}")
    way, faults = connection.read({key: value for key, value in values.items() if key not in wrong})
    for variable, reason in faults:
        fault(variable, reason)
    scale_set = texts.get("pool_scale_set", groups[0] if groups else pool)
    reading.own.append((("ansible_host", f"{way.address or name}{_behind(way.hops)}", str(way.port)), name))
    if "pool_vm_id" in texts:
        reading.own.append((("pool_vm_id", texts["pool_vm_id"], ""), name))
    capacities = reading.capacities.setdefault((pool, scale_set), {})
    capacities.setdefault(_hashable(values.get("pool_capacity")), []).append(name)
    if wrong:
        return None
    if (state := texts.get("pool_power_state", "").lower()) in _OFF:
        reading.skipped[state].append(name)
        return None
    return Host(
        name=name,
        address=way.address or name,
        port=way.port,
        pool=pool,
        scale_set=scale_set,
        vm_size=texts["pool_vm_size"],
        zone=texts.get("pool_zone", ""),
        image=texts["pool_image"],
        vm_id=texts.get("pool_vm_id", ""),
        user=way.user,
        key=way.key,
        hops=way.hops,
        scale_set_id=texts.get("pool_scale_set_id", ""),
        instance=texts.get("pool_instance_id", ""),
    )


def _behind(hops: Sequence[Hop]) -> str:
    """Return a suffix that distinguishes an address from the same one behind another bastion."""
    return f" behind {hops[-1].address}" if hops else ""


def _hashable(value: JSON) -> JSON:
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)


def _values(reading: _Reading, name: str) -> tuple[dict[str, JSON], set[str]]:
    """Return the relevant variables of a host, evaluated, and those that can't be evaluated, which are noted."""
    values, failures = values_of(reading.source, name, _READ.__contains__)
    for key, why in failures.items():
        reading.faults[key, why].append(name)
    return values, set(failures)


def _pools(reading: _Reading, names: Iterable[str]) -> tuple[Pool, ...]:
    sets: dict[str, list[ScaleSet]] = defaultdict(list)
    for (pool, name), capacities in reading.capacities.items():
        count = sum(len(hosts) for hosts in capacities.values())
        sets[pool].append(ScaleSet(name=name, capacity=_capacity(reading, pool, name, count), hosts=count))
    return tuple(Pool(name=name, scale_sets=tuple(sets[name])) for name in names if name in sets)


def _capacity(reading: _Reading, pool: str, name: str, count: int) -> int | None:
    capacities = reading.capacities[pool, name]
    first = next(iter(capacities.values()))[0]
    place = where(reading.source, first, "pool_capacity")
    fault = ""
    (capacity, *others) = capacities
    if others:
        fault = f"differs within scale set `{name}`: {', '.join(str(c) for c in capacities)}"
    elif capacity is None:
        return None
    elif not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 0:
        fault = f"must be a number of hosts, got {json.dumps(capacity)}"
    elif count < capacity:
        fault = f"scale set `{name}` has {count} of {capacity} hosts in this inventory: {capacity - count} are lost"
    if fault:
        reading.problems.append(Problem(place, "pool_capacity", fault))
    return capacity if isinstance(capacity, int) and not fault else None


def _doubles(reading: _Reading) -> list[Problem]:
    return [
        Problem(
            where(reading.source, names[0], variable), variable, f"{value} is that of {short_list(names)}"
        )
        for (variable, value, _), names in doubles(reading.own).items()
    ]


def inventory_digest(paths: Sequence[Path], hosts: Iterable[Host]) -> str:
    """Return the SHA-256 of an inventory: of its files, by their names in it, and its hosts.

    The hosts cover what isn't in any file, such as the output of a dynamic inventory; the files cover variables that
    only a playbook reads.
    """
    files = [
        [
            f"{number}/{file.relative_to(path if path.is_dir() else path.parent)}",
            hashlib.sha256(file.read_bytes()).hexdigest(),
        ]
        for number, path in enumerate(paths)
        for file in inventory_files(path)
    ]
    facts = [host.model_dump(mode="json") for host in sorted(hosts, key=lambda h: h.name)]
    return digest([files, facts])


def inventory_files(path: Path) -> list[Path]:
    """Return the files of an inventory, in order: those of a directory, or a file and the variables next to it.

    Ansible ignores hidden files and those that end with ``~``, and so does this: editors leave both.
    """
    if path.is_dir():
        return _files_below(path)
    beside = [file for name in _VARIABLES_BESIDE for file in _files_below(path.parent / name)]
    return [path, *sorted(beside)]


def _files_below(folder: Path) -> list[Path]:
    files = (f for f in folder.rglob("*") if f.is_file() and not f.name.endswith("~"))
    return sorted(f for f in files if not any(part.startswith(".") for part in f.relative_to(folder).parts))
