"""Inventory variables -> node configurations, as ``node-agent join`` reads them.

Each variable is a part of the configuration (docs/reference/node-config.md). What the node would refuse is refused
here by the same rules, and so is any secret: user data is readable by every process on a machine.
"""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from image_builder.canonical import JSON
from image_builder.definition.placeholders import placeholders
from image_builder.definition.values import Place, is_vaulted
from image_builder.errors import DefinitionError, Problem, UsageError
from image_builder.node.join import config as node_config
from image_builder.pool.plan.plan import doubles
from image_builder.pool.plan.source import opened, values_of, where
from image_builder.settings import VaultId
from image_builder.text import did_you_mean, short_list

PREFIX = "join_"
# variable -> where its value goes
VARIABLES: Mapping[str, tuple[str, ...]] = {
    "join_generation": ("generation",),
    "join_server": ("cluster", "server"),
    "join_ca": ("cluster", "ca"),
    "join_dns": ("cluster", "dns"),
    "join_credentials": ("credentials",),
    "join_azure": ("azure",),
    "join_node_name": ("node", "name"),
    "join_node_ip": ("node", "ip"),
    "join_provider_id": ("node", "provider_id"),
    "join_max_pods": ("node", "max_pods"),
    "join_labels": ("node", "labels"),
    "join_platform_labels": ("node", "platform_labels"),
    "join_taints": ("node", "taints"),
    "join_hosts": ("join", "hosts"),
    "join_rate": ("join", "rate"),
    "join_budget_seconds": ("join", "budget_seconds"),
    "join_deadlines": ("join", "deadlines"),
}
_PLACES = {".".join(path): name for name, path in VARIABLES.items()}
# Parts of `node` that must be unique to one node.
_ITS_OWN = ("name", "ip", "provider_id")


@dataclass(frozen=True)
class Rendered:
    """A host's configuration as text, and its size as user data, which is base64."""

    host: str
    text: str

    @property
    def user_data_bytes(self) -> int:
        return len(base64.b64encode(self.text.encode()))


@dataclass
class _Reading:
    """An inventory being read. ``faults``: (variable, fault) -> the hosts; ``nodes``: each host's `node` part."""

    source: Any
    faults: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    nodes: dict[str, Mapping[str, object]] = field(default_factory=dict)


def render(
    paths: Sequence[Path],
    names: Sequence[str],
    vault: Sequence[VaultId] = (),
) -> list[Rendered]:
    """Return the configuration of each of these hosts, and of those of these groups, each once.

    Raises UsageError if no inventory or name is given, DefinitionError with every problem, VaultError for a file that
    can't be decrypted.
    """
    if not paths or not names:
        raise UsageError("no inventory, or no host or group of it", hint="-i INVENTORY GROUP")
    absolute = [path.absolute() for path in paths]
    with opened(absolute, vault) as source:
        reading = _Reading(source)
        problems, hosts = _hosts(source, names, str(Place(str(absolute[0]))))
        rendered = [_render(reading, host) for host in hosts]
        for (key, value), alike in one_nodes_of_several(reading.nodes).items():
            reading.faults[_variable(f"node.{key}"), f"{value} can belong to only one node"] += alike
        problems += [*_problems(reading), *placeholders(absolute)]
    if problems:
        raise DefinitionError(problems)
    return rendered


def render_host(source: Any, host: str) -> tuple[Rendered, list[Problem]]:
    """Return the configuration of one host of an open inventory, and everything that is wrong with it."""
    reading = _Reading(source)
    return _render(reading, host), _problems(reading)


def write(rendered: Iterable[Rendered], directory: Path) -> None:
    """Write ``HOST.json`` for each host."""
    directory.mkdir(parents=True, exist_ok=True)
    for configuration in rendered:
        (directory / f"{configuration.host}.json").write_text(configuration.text, encoding="utf-8")


def one_nodes_of_several(nodes: Mapping[str, Mapping[str, object]]) -> dict[tuple[str, str], list[str]]:
    """Return values that can belong to only one node but that several have: (key of ``node``, value) -> the hosts.

    If two kubelets have the same name, the second takes over the first one's Node object.
    """
    users = (((key, node.get(key, "")), host) for host, node in nodes.items() for key in _ITS_OWN)
    none = ("", node_config.PLATFORM, node_config.NONE)
    return doubles(
        ((key, value), host) for (key, value), host in users if isinstance(value, str) and value not in none
    )


def _hosts(source: Any, names: Sequence[str], here: str) -> tuple[list[Problem], list[str]]:
    problems: list[Problem] = []
    matches: dict[str, None] = {}
    for name in names:
        hosts = source.group(name)
        if hosts is None and name in source.manager.hosts:
            hosts = [name]
        if hosts is None:
            names = [*map(str, source.manager.groups), *map(str, source.manager.hosts)]
            reason = f"unknown group or host `{name}`{did_you_mean(name, names)}"
            problems.append(Problem(here, "pool", reason))
        elif not hosts:
            problems.append(Problem(here, name, "no host in this group"))
        matches.update(dict.fromkeys(hosts or []))
    return problems, list(matches)


def _render(reading: _Reading, host: str) -> Rendered:
    """Return a host's configuration; note what is wrong with it."""
    values = _values(reading, host)
    if "/" in host:
        reading.faults["inventory_hostname", "can't be the name of a file"].append(host)
    document: dict[str, Any] = {"format": 1, "cluster": {}}
    for name, path in VARIABLES.items():
        if name in values:
            _set(document, path, values[name])
    for place, secret in node_config.secrets(document):
        reading.faults[_variable(place), f"{secret} must not be in user data"].append(host)
    for problem in node_config.problems(document):
        place, _, reason = problem.partition(": ")
        reading.faults[_variable(place), reason].append(host)
    reading.nodes[host] = document.get("node", {})
    rendered = Rendered(host, json.dumps(document, indent=1) + "\n")
    if len(rendered.text.encode()) > node_config.MOST_BYTES:
        reading.faults["join_*", f"more than {node_config.MOST_BYTES} bytes in all"].append(host)
    return rendered


def _set(document: dict[str, Any], path: tuple[str, ...], value: JSON) -> None:
    for part in path[:-1]:
        document = document.setdefault(part, {})
    document[path[-1]] = value


def _values(reading: _Reading, host: str) -> dict[str, JSON]:
    """Return the variables of a host that are parts of its configuration, evaluated; note those that can't be."""
    variables, failures = values_of(reading.source, host, lambda name: name.startswith(PREFIX))
    for name in sorted((variables.keys() | failures.keys()) - VARIABLES.keys()):
        reading.faults[name, f"unknown variable{did_you_mean(name, VARIABLES)}"].append(host)
    values = {name: value for name, value in variables.items() if name in VARIABLES}
    for name in failures.keys() & VARIABLES.keys():
        reading.faults[name, failures[name]].append(host)
    for name in [name for name, value in values.items() if is_vaulted(value)]:
        reading.faults[name, "a vaulted value must not be in user data"].append(host)
        del values[name]
    return values


def _variable(path: str) -> str:
    """Return the variable that a path of the configuration comes from, with the rest of the path."""
    for place, name in _PLACES.items():
        if path == place or path.startswith((f"{place}.", f"{place}[")):
            return name + path.removeprefix(place)
    return path


def _problems(reading: _Reading) -> list[Problem]:
    problems = []
    for (variable, reason), hosts in reading.faults.items():
        top = variable.partition(".")[0].partition("[")[0]
        place = where(reading.source, hosts[0], top)
        problems.append(Problem(place, variable, f"{reason}: {short_list(hosts)}"))
    return sorted(problems)
