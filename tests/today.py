"""A control plane of today's Kubernetes: API server and controller manager 1.36.2, as a cluster has them.

The programs are those of ``tests/programs.py``; etcd is that of the lab.
"""

from __future__ import annotations

from pathlib import Path

from tests.programs import unpack
from tests.support.control_plane.servers import ControlPlane

_PROGRAMS = ("kube-apiserver", "kube-controller-manager")
_DROPPED = ("--port=0",)


def programs(directory: Path) -> Path:
    """Unpack the programs; skips the test where nobody has them."""
    for name in _PROGRAMS:
        unpack(f"kubernetes-1.36.2/{name}", directory)
    return directory


class Today(ControlPlane):
    """The lab's control plane with these programs, without a scheduler: nothing runs there."""

    def _clients(self) -> list[tuple[str, list[str]]]:
        manager = [word for word in self._controller_manager() if word not in _DROPPED]
        return [("kube-controller-manager", manager)]
