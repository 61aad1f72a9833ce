"""Kubernetes' version rules: for an image's kubelet, the API servers of the pools that run it, and its cgroups.

A pool lists the versions of its API servers in ``pool_api_server_versions``; during an upgrade there are two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from image_builder.canonical import JSON
from image_builder.definition import engine
from image_builder.definition.engine import Source
from image_builder.definition.evaluate import resolved_variables
from image_builder.definition.host_variables import HostVariables
from image_builder.definition.model import ImageDefinition
from image_builder.definition.pools import API_SERVERS, IMAGE, evaluated_variables
from image_builder.errors import Problem

_VERSION = re.compile(r"1\.(\d+)(\.\d+)?")
# How many minor versions a kubelet may be older than its API server (kubernetes.io, "Version Skew Policy").
_OLDER, _OLDER_BEFORE_1_25 = 3, 2
# The first kubelet that doesn't start with cgroup v1 unless it is told to.
_CGROUP_V2 = 35
_CGROUP_V1 = re.compile(r"systemd\.unified_cgroup_hierarchy=(0|n|no|f|false|off)")


def version_problems(definition: ImageDefinition, variables: HostVariables, source: Source) -> list[Problem]:
    """Return what an image's kubelet can't work with: API servers of its pools, or the kernel's cgroup version."""
    resolved = resolved_variables(definition)
    kubelet = str(resolved.get("kubelet_version", ""))
    if not (found := _VERSION.fullmatch(kubelet)):
        return []
    minor = int(found[1])
    problems = _cgroup_problems(variables, resolved, minor)
    for pool in source.inherited_variables():
        if pool.get(IMAGE) == definition.name and API_SERVERS in pool:
            where = str(engine.place_in(pool, [API_SERVERS]) or "")
            (servers,) = evaluated_variables(pool, API_SERVERS)
            reasons = _skew(definition.name, kubelet, minor, servers)
            problems += [Problem(where, API_SERVERS, reason) for reason in reasons]
    return list(dict.fromkeys(problems))


def unknown_api_servers(definition: ImageDefinition, source: Source) -> list[Problem]:
    """Return the pools that don't list the versions of their API servers to compare with an image's kubelet."""
    resolved = resolved_variables(definition)
    kubelet = resolved.get("kubelet_version")
    if not kubelet or resolved.get("kubelet_mode") != "cluster":
        return []
    reason = (
        f"is missing: nobody checks whether the kubelet {kubelet} of `{definition.name}` works with the pool's API "
        'servers; list their versions, such as ["1.36.2"]'
    )
    places = [
        str(engine.place_in(pool, [IMAGE]) or "")
        for pool in source.inherited_variables()
        if pool.get(IMAGE) == definition.name and API_SERVERS not in pool
    ]
    return [Problem(place, API_SERVERS, reason) for place in dict.fromkeys(places)]


def _skew(image: str, kubelet: str, minor: int, servers: JSON) -> list[str]:
    """Return why a kubelet and a pool's API servers, which may have several versions, are too far apart."""
    listed = servers if isinstance(servers, list) else [servers]
    texts = [text for text in listed if isinstance(text, str) and _VERSION.fullmatch(text)]
    versions = {int(text.split(".")[1]): text for text in texts}
    if not versions or texts != listed:
        return [f'must be a list of Kubernetes versions in quotes, such as ["1.36.2"], not {servers!r}']
    oldest, newest = min(versions), max(versions)
    allowed = _allowed(minor)
    reasons = []
    if minor > oldest:
        reasons.append(
            f"the kubelet {kubelet} of `{image}` is newer than the API server {versions[oldest]}: upgrade every API "
            f"server first, or set kubelet_version to 1.{oldest} or older"
        )
    if newest - minor > allowed:
        least = next(kubelet for kubelet in range(minor, newest + 1) if newest - kubelet <= _allowed(kubelet))
        reasons.append(
            f"the kubelet {kubelet} of `{image}` is more than {allowed} minor versions older than the API server "
            f"{versions[newest]}: set kubelet_version to 1.{least} or later"
        )
    return reasons


def _allowed(minor: int) -> int:
    """Return how many minor versions a kubelet may be older than its API server."""
    return _OLDER if minor >= 25 else _OLDER_BEFORE_1_25


def _cgroup_problems(variables: HostVariables, resolved: Mapping[str, JSON], minor: int) -> list[Problem]:
    arguments, config = resolved.get("image_kernel_args"), resolved.get("kubelet_config")
    allowed = isinstance(config, Mapping) and config.get("failCgroupV1") is False
    if minor < _CGROUP_V2 or allowed or not isinstance(arguments, list):
        return []
    return [
        Problem(
            variables.where(["image_kernel_args", number]),
            f"image_kernel_args[{number}]",
            f"a kubelet 1.{minor} does not start with cgroup v1, which `{argument}` chooses: remove it, or set "
            "kubelet_config: {failCgroupV1: false}",
        )
        for number, argument in enumerate(arguments)
        if _CGROUP_V1.fullmatch(str(argument))
    ]
