"""Addresses of the subnets that pools are in: each machine takes one, plus one for each of its pods.

A pool names its subnet in ``pool_subnet``; both kinds of addresses come from it. Several scale sets may be in one
subnet.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from image_builder.definition import engine
from image_builder.definition.engine import Source
from image_builder.definition.evaluate import resolved_variables
from image_builder.definition.model import ImageDefinition
from image_builder.definition.pools import (
    AZURE_MODEL,
    CAPACITY,
    IMAGE,
    PODS,
    SCALE_SET,
    SCALE_SET_ID,
    SUBNET,
    evaluated_variables,
)
from image_builder.errors import Problem

# Addresses that Azure reserves in each subnet: the first four and the last.
_RESERVED = 5
_MORE = "a larger subnet, or fewer pods (kubelet_max_pods, join_max_pods)"
# How many scale sets a problem names at most; a pool may have a hundred.
_NAMED = 8


@dataclass(frozen=True)
class _ScaleSet:
    """A scale set in a subnet. ``id`` is Azure's id of the subnet, which also names its network; it may be empty."""

    key: str
    name: str
    image: str
    network: ipaddress.IPv4Network | ipaddress.IPv6Network
    id: str
    variables: Mapping[str, Any]


def address_problems(definition: ImageDefinition, source: Source) -> list[Problem]:
    """Return each pool of this image whose machines and pods need more addresses than its subnet has."""
    problems = []
    for pool in source.inherited_variables():
        if pool.get(IMAGE) != definition.name or SUBNET not in pool:
            continue
        if reason := address_problem(*_counts(pool, definition, SUBNET, CAPACITY, PODS)):
            problems.append(Problem(str(engine.place_in(pool, [SUBNET]) or ""), SUBNET, reason))
    return list(dict.fromkeys(problems))


def address_problem(subnet: object, hosts: object, pods: object) -> str:
    """Return why a subnet can't hold ``hosts`` machines with ``pods`` pods each, or an empty string if it can."""
    if not _is_count(hosts) or not _is_count(pods):
        return f"needs {CAPACITY}, the number of machines, and a number of pods: {hosts!r}, {pods!r}"
    try:
        has = _addresses(ipaddress.ip_network(str(subnet)))
    except ValueError as error:
        return f"must be a subnet such as 10.40.0.0/16: {error}"
    needed = _needed(hosts, pods)
    if needed <= has:
        return ""
    machines = f"{hosts} machines, each with one and {pods} for its pods"
    return f"{subnet} has {has} addresses for {needed}: {machines}; {_MORE}"


def shared_subnet_problems(
    source: Source, images: Collection[str], define: Callable[[str], ImageDefinition | None]
) -> list[Problem]:
    """Return each subnet with too few addresses for all its scale sets together, if one of them runs any of ``images``.

    ``define`` returns an image's definition, which says how many pods its nodes have, or None if it is invalid. A
    scale set whose number of pods or machines is unknown is left out.
    """
    problems = []
    for scale_sets in _by_subnet(source):
        if len({s.key for s in scale_sets}) < 2 or not any(s.image in images for s in scale_sets):
            continue
        needed = _needed_by_each(scale_sets, define)
        has, total = _addresses(scale_sets[0].network), sum(count for _, count in needed)
        if len(needed) > 1 and total > has:
            named = [f"`{name}` {count}" for name, count in needed[:_NAMED]]
            rest = [f"{len(needed) - _NAMED} more"] * (len(needed) > _NAMED)
            reason = (
                f"{scale_sets[0].network} has {has} addresses for {total} of {len(needed)} scale sets: "
                f"{', '.join([*named, *rest])}; another subnet for some of them, {_MORE}"
            )
            where = str(engine.place_in(scale_sets[0].variables, [SUBNET]) or "")
            problems.append(Problem(where, SUBNET, reason))
    return problems


def _by_subnet(source: Source) -> list[list[_ScaleSet]]:
    """Return the scale sets of an inventory, grouped by subnet.

    Several networks may use the same addresses; then Azure's id distinguishes their subnets. A scale set without an id
    is in the subnet with the same addresses, if there is only one.
    """
    by_network: dict[object, dict[str, list[_ScaleSet]]] = defaultdict(lambda: defaultdict(list))
    for groups, variables in source.inherited_variables_by_group(IMAGE):
        subnet, azure, *keys = evaluated_variables(variables, SUBNET, AZURE_MODEL, SCALE_SET_ID, SCALE_SET)
        try:
            network = ipaddress.ip_network(str(subnet))
        except ValueError:
            continue
        name = ", ".join(groups)
        key = next((str(key) for key in keys if key), name)
        of_azure = azure.get("subnet") if isinstance(azure, Mapping) else None
        found = _ScaleSet(key, name, str(variables[IMAGE]), network, str(of_azure or "").lower(), variables)
        by_network[network][found.id].append(found)
    subnets = []
    for by_id in by_network.values():
        if len(by_id) == 2 and "" in by_id:
            subnets.append([scale_set for scale_sets in by_id.values() for scale_set in scale_sets])
        else:
            subnets += by_id.values()
    return subnets


def _needed_by_each(
    scale_sets: list[_ScaleSet], define: Callable[[str], ImageDefinition | None]
) -> list[tuple[str, int]]:
    """Return the name of each scale set and how many addresses it needs, where that is known."""
    needed: dict[str, tuple[str, int]] = {}
    for scale_set in scale_sets:
        hosts, pods = _counts(scale_set.variables, define(scale_set.image), CAPACITY, PODS)
        if _is_count(hosts) and _is_count(pods):
            # Hosts of one scale set may also be in different groups.
            name, before = needed.get(scale_set.key, (scale_set.name, 0))
            needed[scale_set.key] = name, max(before, _needed(hosts, pods))
    return list(needed.values())


def _counts(pool: Mapping[str, Any], definition: ImageDefinition | None, *names: str) -> list[Any]:
    """Return variables of a pool, or else of its image; by default nodes have as many pods as their kubelet allows."""
    defaults = {PODS: "{{ kubelet_max_pods }}", **resolved_variables(definition)} if definition else None
    return list(evaluated_variables(pool, *names, defaults=defaults))


def _addresses(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> int:
    return max(0, network.num_addresses - _RESERVED)


def _needed(hosts: int, pods: int) -> int:
    return hosts * (pods + 1)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0
