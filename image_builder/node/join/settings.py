"""The join's settings: ``/etc/node-agent/join.json``, as the role node_join writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from image_builder.node import layout, settings
from image_builder.node.decode import absolute, one_of, shown, within


@dataclass(frozen=True)
class Settings:
    """``imds``: the metadata service, empty for none. ``custom_data`` and ``file``: where else a configuration may be.

    ``kubernetes``: where the kubelet looks for its files. ``engine``: the engine that must answer, empty for none.
    ``pod_network``: where the cluster's network add-on writes its configuration, empty if none is expected.
    ``clock_seconds``: how far this machine's clock may differ from the API server's.
    """

    imds: str = "http://169.254.169.254"
    custom_data: str = "/var/lib/cloud/instance/user-data.txt"
    file: str = "/etc/node-agent/node-config.json"
    kubernetes: str = "/etc/kubernetes"
    engine: str = ""
    healthz: str = settings.HEALTHZ
    pod_network: str = ""
    clock_seconds: float = 60.0

    def problems(self) -> Iterator[str]:
        """Yield the rules that these settings break."""
        yield from one_of("engine", self.engine, ("", *layout.ENGINES))
        if self.imds and not self.imds.startswith("http://"):
            yield f"imds must be an http address, not {shown(self.imds)}"
        yield from within("clock_seconds", self.clock_seconds, 1, 3600)
        for name in ("custom_data", "file", "kubernetes"):
            yield from absolute(name, getattr(self, name))
        if self.pod_network:
            yield from absolute("pod_network", self.pod_network)


def parse(document: Mapping[str, Any]) -> Settings:
    """Return the settings. Raises NodeError (``settings``) with all problems."""
    return settings.parse(Settings, document, "join")
