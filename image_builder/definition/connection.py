"""The connection to an inventory's hosts, according to the variables of Ansible's ``ssh`` and ``sudo`` plugins.

Variables that can't be honored are refused. The only supported arguments for OpenSSH describe a path through bastions:
``-J``, ``-o ProxyJump=``, or a ProxyCommand that is ``ssh -W %h:%p`` with its user, port, key and own bastions.
"""

from __future__ import annotations

import getopt
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field

from image_builder.canonical import JSON
from image_builder.definition.values import is_vaulted

ARGUMENTS = ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args")
# Each option of the plugin and its variables. As in Ansible, the last variable that is set wins.
VARIABLES: Mapping[str, tuple[str, ...]] = {
    "host": ("ansible_host", "ansible_ssh_host"),
    "port": ("ansible_port", "ansible_ssh_port"),
    "remote_user": ("ansible_user", "ansible_ssh_user"),
    "private_key_file": ("ansible_private_key_file", "ansible_ssh_private_key_file"),
}
# Everything on hosts is done as root, through OpenSSH and sudo.
_ONLY = {
    "ansible_connection": "ssh",
    "ansible_become_method": "sudo",
    "ansible_become_user": "root",
    "ansible_sudo_user": "root",
}
_BECOME = "ansible_become"
NAMES = frozenset({*ARGUMENTS, *_ONLY, _BECOME, *(name for names in VARIABLES.values() for name in names)})
_ADDRESS = re.compile(r"[A-Za-z0-9:][A-Za-z0-9._:-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_FORWARD = ("%h:%p", "[%h]:%p")


class Hop(BaseModel):
    """A bastion on the way to a host. If the user or the private key's file is empty, the host's own is used."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    address: str = Field(min_length=1)
    port: int = Field(default=22, ge=1, le=65535)
    user: str = ""
    key: str = ""

    @property
    def text(self) -> str:
        """Return the hop in the form that ``parse_jump`` accepts, which has no key."""
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self.user}@{address}:{self.port}".removeprefix("@")


class Connection(NamedTuple):
    """How an inventory says to connect to one host; unset values are empty. ``hops`` are in the order of connection."""

    address: str = ""
    port: int = 22
    user: str = ""
    key: str = ""
    hops: tuple[Hop, ...] = ()


Fault = tuple[str, str]
"""A variable, and what is wrong with it."""


def read(values: Mapping[str, JSON]) -> tuple[Connection, list[Fault]]:
    """Return the connection that a host's evaluated variables describe, and the variables that can't be honored."""
    faults: list[Fault] = []

    def text(names: Sequence[str]) -> tuple[str, str]:
        """Return the variable that wins, and its value."""
        name = next((name for name in reversed(names) if values.get(name) not in (None, "")), names[0])
        value = values.get(name)
        if value is not None and is_vaulted(value):
            faults.append((name, "can't be a vaulted value"))
        elif isinstance(value, str | int) and not isinstance(value, bool):
            return name, str(value)
        elif value is not None:
            faults.append((name, f"must be a text, got {json.dumps(value)}"))
        return name, ""

    (_, address), (port_name, port), (_, user), (_, key) = (text(names) for names in VARIABLES.values())
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        faults.append((port_name, f"must be a port, got {port}"))
        port = ""
    hops: tuple[Hop, ...] = ()
    for name in ARGUMENTS:
        try:
            way = parse_arguments(text([name])[1])
        except ValueError as error:
            faults.append((name, str(error)))
            continue
        if way and hops:
            faults.append((name, "is a second way through bastions"))
        hops = hops or way
    for name, only in _ONLY.items():
        if (value := text([name])[1]) and value != only:
            faults.append((name, f"must be {only}, got {value}"))
    if user not in ("", "root") and str(values.get(_BECOME, "")).lower() in ("false", "no", "off", "0"):
        faults.append((_BECOME, f"can't be off: what {user} does on a host is done as root"))
    return Connection(address, int(port or 22), user, key, hops), faults


def parse_arguments(text: str) -> tuple[Hop, ...]:
    """Return the bastions that arguments for OpenSSH describe. Raises ValueError if they contain anything else."""
    options, rest = _options(shlex.split(text), "J:o:")
    if rest:
        raise ValueError(f"`{rest[0]}` is not supported, {_SUPPORTED}")
    return _way(options)


_SUPPORTED = "only a way through bastions: -J, -o ProxyJump=, or -o ProxyCommand='ssh -W %h:%p …'"


def _options(arguments: Sequence[str], letters: str) -> tuple[list[tuple[str, str]], list[str]]:
    try:
        return getopt.gnu_getopt(list(arguments), letters)
    except getopt.GetoptError as error:
        raise ValueError(f"`-{error.opt}` is not supported, {_SUPPORTED}") from None


def _way(options: Sequence[tuple[str, str]]) -> tuple[Hop, ...]:
    ways: list[tuple[Hop, ...]] = []
    for letter, value in options:
        keyword, setting = ("proxyjump", value) if letter == "-J" else _setting(value)
        if keyword not in ("proxyjump", "proxycommand"):
            raise ValueError(f"`-o {value}` is not supported, {_SUPPORTED}")
        if setting.lower() != "none":
            ways.append(parse_jump(setting) if keyword == "proxyjump" else _parse_command(setting))
    if len(ways) > 1:
        raise ValueError("more than one way through bastions")
    return ways[0] if ways else ()


def _setting(text: str) -> tuple[str, str]:
    keyword, value, *_ = (*re.split(r"\s*=\s*|\s+", text.strip(), maxsplit=1), "")
    return keyword.lower(), value


def parse_jump(text: str) -> tuple[Hop, ...]:
    """Return the hops of ``[USER@]HOST[:PORT][,…]``, each optionally ``ssh://…``. Raises ValueError for all else."""
    return tuple(_hop(part.strip()) for part in text.split(","))


def _hop(text: str) -> Hop:
    try:
        parts = urlsplit(text if text.startswith("ssh://") else f"ssh://{text}")
        port = parts.port or 22
    except ValueError:
        raise ValueError(f"`{text}` is no bastion: [USER@]HOST[:PORT]") from None
    address, user = parts.hostname or "", unquote(parts.username or "")
    is_plain = parts.path in ("", "/") and not (parts.query or parts.fragment or parts.password)
    if not is_plain or not _ADDRESS.fullmatch(address) or (user and not _USER.fullmatch(user)):
        raise ValueError(f"`{text}` is no bastion: [USER@]HOST[:PORT]")
    return Hop(address=address, port=port, user=user)


def _parse_command(text: str) -> tuple[Hop, ...]:
    """Return the bastions of a ProxyCommand that runs OpenSSH. Raises ValueError for any other command."""
    refused = f"ProxyCommand `{text}` is not supported, {_SUPPORTED}"
    program, *arguments = shlex.split(text) or [""]
    if PurePath(program).name != "ssh":
        raise ValueError(refused)
    options, rest = _options(arguments, "qJ:W:i:l:o:p:")
    values = dict(options)
    if values.get("-W") not in _FORWARD or len(rest) != 1:
        raise ValueError(refused)
    user, _, host = rest[0].rpartition("@")
    user, port = values.get("-l", user), values.get("-p", "")
    hop = _hop((f"{user}@" if user else "") + host + (f":{port}" if port else ""))
    key = values.get("-i", "")
    if set(key) & set('"\n'):
        raise ValueError(f"`-i {key}` can't be a key's file")
    before = _way([(letter, value) for letter, value in options if letter in ("-J", "-o")])
    return (*before, hop.model_copy(update={"key": key}))
