"""OpenSSH's side of a slice: the options of its connections, and its way through bastions.

A slice has one connection to each bastion, wherever it runs: bastion.sh opens it if there is none yet, and connections
to hosts go through it. ssh_config describes the bastions; both files are next to the slice's environment.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from image_builder.definition.connection import Hop
from image_builder.pool.plan.model import Host
from image_builder.pool.reach.hostkeys import HostKeys, openssh_options
from image_builder.pool.reach.reach import Access
from image_builder.settings import REPO_ROOT

SCRIPT = REPO_ROOT / "image_builder" / "pool" / "steps" / "bastion.sh"
CONFIG = "ssh_config"
_KEEPALIVES = 3

Ways = Mapping[tuple[Hop, ...], str]
"""The ways to the hosts of a slice, and the beginnings of these, with a name of ssh_config for the last bastion."""


def ways(hosts: Iterable[Host]) -> Ways:
    """Return the ways to hosts, from their logins."""
    parts = (host.hops[: n + 1] for host in hosts for n in range(len(host.hops)))
    return {way: f"hop-{number}" for number, way in enumerate(dict.fromkeys(parts))}


def common(access: Access, *, agent: bool) -> dict[str, str]:
    """Return the options of all connections. With ``agent`` the only key is an agent's."""
    keys = {"IdentityFile": "none"} if agent else {"IdentitiesOnly": "yes", "IdentityAgent": "none"}
    return {
        "BatchMode": "yes",
        "ControlMaster": "auto",
        "ControlPersist": "60s",
        "ServerAliveInterval": f"{access.keepalive_seconds:.0f}",
        "ServerAliveCountMax": str(_KEEPALIVES),
        "PreferredAuthentications": "publickey",
        "LogLevel": "ERROR",
        **keys,
    }


def host_options(access: Access, host: Host, ways: Ways, env: str) -> dict[str, str]:
    """Return the options of one host; ``env`` is the directory of ssh_config as seen by Ansible."""
    options = openssh_options(access.host_keys, host)
    if host.hops:
        command = ["sh", f"{env}/{SCRIPT.name}", ways[host.hops], "[%h]:%p"]
        options |= {"ProxyCommand": shlex.join(command)}
    return options


def arguments(options: Mapping[str, str]) -> list[str]:
    """Return options as command-line arguments."""
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def config(access: Access, ways: Ways, known_hosts: Path, *, agent: bool) -> str:
    """Return the ssh_config of bastions. Its relative paths are relative to its own directory."""
    host_keys: HostKeys = replace(access.host_keys, path=known_hosts)
    lines: list[str] = []
    for way, name in ways.items():
        hop = way[-1]
        options = {
            "HostName": hop.address,
            "Port": str(hop.port),
            "User": hop.user,
            "ProxyJump": ways.get(way[:-1], "none"),
            "ConnectTimeout": f"{access.connect_seconds:.0f}",
            **openssh_options(host_keys, hop),
        }
        if not agent:
            options["IdentityFile"] = '"' + hop.key.replace("%", "%%") + '"'
        lines += [f"Host {name}", *(f"    {key} {value}" for key, value in options.items())]
    shared = {**common(access, agent=agent), "ControlPath": "%n"}
    return "\n".join([*lines, "Host *", *(f"    {key} {value}" for key, value in shared.items()), ""])
