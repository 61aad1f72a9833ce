"""A control plane of today's Kubernetes: API server and controller manager 1.36.2, as a cluster has them.

The programs are not Debian's; they lie beside the checkout where somebody put them. etcd is that of the lab.
"""

from __future__ import annotations

import lzma
import shutil
from pathlib import Path

import pytest

from tests.builds import REPO
from tests.support.control_plane.servers import ControlPlane

_PLACE = REPO.parent / "shared" / "programs" / "kubernetes-1.36.2"
_PROGRAMS = ("kube-apiserver", "kube-controller-manager")
_DROPPED = ("--port=0",)


def programs(directory: Path) -> Path:
    """Unpack the programs; skips the test where nobody has them."""
    if not _PLACE.is_dir():
        pytest.skip("no programs of Kubernetes 1.36.2 beside the checkout")
    for name in _PROGRAMS:
        with lzma.open(_PLACE / f"{name}.xz") as packed, (directory / name).open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
        (directory / name).chmod(0o755)
    return directory


class Today(ControlPlane):
    """The lab's control plane with these programs, without a scheduler: nothing runs there."""

    def _clients(self) -> list[tuple[str, list[str]]]:
        manager = [word for word in self._controller_manager() if word not in _DROPPED]
        return [("kube-controller-manager", manager)]
