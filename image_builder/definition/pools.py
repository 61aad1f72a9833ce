"""Checks of whether an image fits an inventory's pools: the GPUs of their machines, and how nodes join.

A pool is a group that sets ``pool_image``, the image that its machines run, and ``pool_vm_size``, their size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from image_builder.canonical import JSON
from image_builder.definition import connection, engine
from image_builder.definition.engine import Source
from image_builder.definition.evaluate import resolved_variables
from image_builder.definition.model import ImageDefinition
from image_builder.definition.values import is_template
from image_builder.errors import Problem

IMAGE, SIZE = "pool_image", "pool_vm_size"
# What distinguishes a scale set from others if its groups don't, and its counterpart in Azure.
SCALE_SET_ID, SCALE_SET, AZURE_MODEL = "pool_scale_set_id", "pool_scale_set", "pool_azure"
# A variable that lists the versions of the API servers that the pool's nodes talk to.
API_SERVERS = "pool_api_server_versions"
# The variable that lists the sizes that an image's GPU driver was chosen for.
SIZES = "nvidia_vm_sizes"
_LAYER, _JOIN_LAYER = "gpu", "join"
CREDENTIALS, BLOCKED = "join_credentials", "azure_guest_blocked_for_pods"
# The source of the azure.json that joining writes, and the variables that say which programs read it and where it is.
AZURE, PROVIDERS, KUBERNETES = "join_azure", "kubelet_image_credential_providers", "node_join_kubernetes"
# A pool's subnet (subnets.py), how many machines it must have, and how many pods each may run.
SUBNET, CAPACITY, PODS = "pool_subnet", "pool_capacity", "join_max_pods"
METADATA_SERVICE = "169.254.169.254"
# Variables that pools read from their hosts, and Ansible from all hosts: a name that is nearly one of these is a typo.
POOL_NAMES = frozenset(
    {
        *(IMAGE, SIZE, API_SERVERS, "pool_zone", SCALE_SET, "pool_vm_id", CAPACITY, SUBNET),
        *(SCALE_SET_ID, "pool_instance_id", "pool_power_state", AZURE_MODEL),
        *(
            "join_generation",
            "join_server",
            "join_ca",
            "join_dns",
            "join_credentials",
            AZURE,
            "join_node_name",
        ),
        *("join_node_ip", "join_provider_id", PODS, "join_labels", "join_platform_labels"),
        *("join_taints", "join_hosts", "join_rate", "join_budget_seconds", "join_deadlines"),
    }
)
ANSIBLE_NAMES = frozenset(
    f"ansible_{name}"
    for name in (
        *("password", "group_priority", "python_interpreter", "remote_tmp"),
        *("become_password", "become_exe", "become_flags"),
        *("ssh_pipelining", "managed"),
    )
) | set(connection.NAMES)


def pool_problems(definition: ImageDefinition, source: Source) -> list[Problem]:
    """Return where an image doesn't fit an inventory's pools: their sizes, and how their nodes join.

    Only groups are checked, not their machines, of which there may be thousands.
    """
    return [
        *_size_problems(definition, source),
        *_join_problems(definition, source),
        *_azure_problems(definition, source),
        *_connection_problems(definition, source),
    ]


def _connection_problems(definition: ImageDefinition, source: Source) -> list[Problem]:
    """Return the connection variables of this image's pools that can't be honored."""
    problems = []
    for pool in source.inherited_variables():
        names = [name for name in connection.NAMES if name in pool]
        if pool.get(IMAGE) != definition.name or not names:
            continue
        values = dict(zip(names, evaluated_variables(pool, *names), strict=True))
        # A remaining template may use variables that only a host has: then the plan of its pool reports the problem.
        known = {name: value for name, value in values.items() if not is_template(value)}
        problems += [
            Problem(str(engine.place_in(pool, [name]) or ""), name, reason)
            for name, reason in connection.read(known)[1]
        ]
    return list(dict.fromkeys(problems))


def _join_problems(definition: ImageDefinition, source: Source) -> list[Problem]:
    """Return where nodes join through the token broker although this image's pods can get their machine's proof."""
    if _JOIN_LAYER not in definition.layers:
        return []
    groups = [
        group
        for group in source.own_variables()
        if isinstance(group.get(CREDENTIALS), Mapping)
        and engine.plain(group[CREDENTIALS].get("kind")) == "broker"
    ]
    if not groups or is_closed(resolved_variables(definition).get(BLOCKED)):
        return []
    reason = (
        f"no node of `{definition.name}` may join with the token broker: its {BLOCKED} leave "
        f"{METADATA_SERVICE} port 80 open, where a pod can get the proof that it is this machine"
    )
    return [
        Problem(str(engine.place_in(group, [CREDENTIALS]) or ""), CREDENTIALS, reason) for group in groups
    ]


def _azure_problems(definition: ImageDefinition, source: Source) -> list[Problem]:
    """Return where a credential provider of this image reads azure.json although no node would have one."""
    groups = source.own_variables()
    if _JOIN_LAYER not in definition.layers or any(AZURE in group for group in groups):
        return []
    resolved = resolved_variables(definition)
    path = f"{resolved.get(KUBERNETES)}/azure.json"
    providers = resolved.get(PROVIDERS)
    readers = [
        str(provider.get("name"))
        for provider in (providers if isinstance(providers, list) else [])
        if isinstance(provider, Mapping) and path in provider.get("args", [])
    ]
    reason = (
        f"is missing: {', '.join(readers)} of `{definition.name}` reads {path}, which joining writes from "
        f"{AZURE}: {{tenant_id: ..., client_id: ...}}"
    )
    return [
        Problem(str(engine.place_in(group, [CREDENTIALS]) or ""), AZURE, reason)
        for group in groups
        if readers and CREDENTIALS in group
    ]


def is_closed(blocked: JSON) -> bool:
    """Return whether the variable of the role azure_guest keeps pods from reaching the metadata service."""
    return any(
        target.get("address") == METADATA_SERVICE and 80 in target.get("ports", [])
        for target in (blocked if isinstance(blocked, list) else [])
        if isinstance(target, Mapping)
    )


def _size_problems(definition: ImageDefinition, source: Source) -> list[Problem]:
    if _LAYER not in definition.layers:
        return []
    problems = []
    for pool in source.inherited_variables():
        if pool.get(IMAGE) != definition.name or SIZE not in pool:
            continue
        (size,) = evaluated_variables(pool, SIZE)
        if not is_template(size) and not fits(str(size), resolved_variables(definition).get(SIZES)):
            reason = f"{size} runs `{definition.name}`, whose {SIZES} don't list it"
            problems.append(Problem(str(engine.place_in(pool, [SIZE]) or ""), SIZE, reason))
    return list(dict.fromkeys(problems))


def evaluated_variables(
    pool: Mapping[str, object], *names: str, defaults: Mapping[str, JSON] | None = None
) -> list[JSON]:
    """Return the values of a pool's variables, or else of ``defaults``; None where neither has one.

    A template that uses variables that neither sets is left as it is.
    """
    plain = {**(defaults or {}), **{str(key): engine.plain(value) for key, value in pool.items()}}
    evaluator = engine.Evaluator(plain)
    values = []
    for name in names:
        try:
            values.append(evaluator.evaluate(plain.get(name)))
        except engine.EvaluationError:
            values.append(plain[name])
    return values


def fits(size: str, sizes: JSON) -> bool:
    """Return whether a size is among others, compared as the role does it."""
    return isinstance(sizes, Iterable) and _bare(size) in {_bare(str(other)) for other in sizes}


def _bare(size: str) -> str:
    return size.lower().removeprefix("standard_")
