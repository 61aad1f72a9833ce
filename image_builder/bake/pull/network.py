"""Access to registries: through the mirrors, proxy and CAs declared for the nodes or, outside DNS, by address."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from image_builder.system.web import NOTHING_DECLARED, Outbound


@dataclass(frozen=True)
class Endpoint:
    """The actual address of the registry called ``host``: the lab's has no name in DNS."""

    host: str
    address: str
    port: int
    ca: Path


Endpoints = Mapping[str, Endpoint]


@dataclass(frozen=True)
class Mirror:
    """A mirror as in containerd's ``hosts.toml``; its CA is among the declared ones."""

    url: str
    skip_verify: bool = False
    override_path: bool = False

    @classmethod
    def declared(cls, variable: Mapping[str, object]) -> Self:
        """Return a mirror as declared in the role's variable."""
        return cls(
            str(variable["url"]),
            bool(variable.get("skip_verify", False)),
            bool(variable.get("override_path", False)),
        )

    @property
    def host(self) -> str:
        """Return its host, with a port if it has one."""
        return urllib.parse.urlsplit(self.url).netloc

    @property
    def server(self) -> str:
        """Return its address without a path."""
        parts = urllib.parse.urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def api(self) -> str:
        """Return the path of its API."""
        path = urllib.parse.urlsplit(self.url).path.rstrip("/")
        return path if self.override_path else f"{path}/v2"


Mirrors = Mapping[str, Sequence[Mirror]]


@dataclass(frozen=True)
class Network:
    """The mirrors of each registry, in order, and how to get out to them and to the registries."""

    mirrors: Mirrors = field(default_factory=dict)
    outbound: Outbound = NOTHING_DECLARED


NOTHING_SPECIAL = Network()
