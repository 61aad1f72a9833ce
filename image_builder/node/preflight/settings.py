"""The preflight's settings: ``/etc/node-agent/preflight.json``, as the role gpu_preflight writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from image_builder.node import layout
from image_builder.node import settings as settings_files
from image_builder.node.decode import at_least, host_and_port, one_of, shown, within


@dataclass(frozen=True)
class Settings:
    """``hard``: the kubelet doesn't start on a node that did not pass. ``reboot``: the node may reboot itself, once per
    fault until a boot passes. ``dns`` are names to resolve, ``tcp`` endpoints (``HOST:PORT``) to connect to, ``engine``
    is the engine that must answer (empty: none); ``wait_seconds`` limits all three together. ``gpu_seconds`` is the
    smoke test's deadline.
    ``jitter_seconds`` spreads out the reports of nodes that started at the same time. GPUs whose last test is older
    than ``retest_days`` are tested again if the gate grants it; 0: never.
    """

    hard: bool = False
    reboot: bool = True
    taint: str = "image-builder/preflight"
    dns: tuple[str, ...] = ()
    tcp: tuple[str, ...] = ()
    engine: str = ""
    wait_seconds: float = 60.0
    gpu_tier: Literal["boot-quick", "boot-full"] = "boot-quick"
    gpu_seconds: float = 660.0
    kubeconfig: str = "/etc/kubernetes/kubelet.conf"
    node_name: str = ""
    healthz: str = settings_files.HEALTHZ
    jitter_seconds: float = 30.0
    retest_days: float = 7.0

    @property
    def has_joined(self) -> bool:
        """Return whether the kubelet has a kubeconfig: without one the API server can't be queried or reported to."""
        return bool(self.kubeconfig) and Path(self.kubeconfig).exists()

    def problems(self) -> Iterator[str]:
        """Yield the rules that these settings break."""
        yield from one_of("engine", self.engine, ("", *layout.ENGINES))
        _, _, name = self.taint.partition("/")
        if not name or "/" in name:
            yield f"taint must be PREFIX/NAME, not {shown(self.taint)}"
        for number, place in enumerate(self.tcp):
            yield from host_and_port(f"tcp[{number}]", place)
        yield from within("wait_seconds", self.wait_seconds, 1, 900)
        yield from within("gpu_seconds", self.gpu_seconds, 30, 3600)
        yield from within("jitter_seconds", self.jitter_seconds, 0, 600)
        yield from at_least("retest_days", self.retest_days, 0)


def parse(document: Mapping[str, Any]) -> Settings:
    """Return the settings. Raises NodeError (``settings``) with all problems."""
    return settings_files.parse(Settings, document, "preflight")
