"""Drains by the real API server, scheduler and controllers, with simulated kubelets and the documented rights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from image_builder.drain import fence
from image_builder.node.net.kube import MERGE_PATCH, Client, path_of_node, path_of_pod
from image_builder.node.net.kubeconfig import load
from tests.support.control_plane.gates import Cluster, give_rights, running, wait_until
from tests.support.control_plane.kubelets import AGENT, Kubelets
from tests.support.control_plane.servers import ADMINISTRATORS
from tests.support.images.builds import REPO

pytestmark = [pytest.mark.root, pytest.mark.process, pytest.mark.image("control_plane")]

RIGHTS = REPO / "deploy/drain.yml"
ACCOUNT = "system:serviceaccount:kube-system:image-builder-drain"
QUICK = {"settle_seconds": 1.0, "poll_seconds": 0.3}
HOSTS = [f"gpu-{number}" for number in range(100)]


class Fleet:
    """A cluster of simulated nodes, and the commands by their own account."""

    def __init__(self, cluster: Cluster, kubelets: Kubelets, directory: Path) -> None:
        self.cluster, self.kubelets, self.directory = cluster, kubelets, directory
        self.admin = cluster.admin
        self.account = cluster.kubeconfig(ACCOUNT, "system:serviceaccounts")

    def argv(self, command: str, *arguments: str, policy: Mapping[str, Any] | None = None) -> list[str]:
        more: list[str] = []
        if command != "free":
            path = self.directory / "policy.yml"
            path.write_text(yaml.safe_dump({**QUICK, **(policy or {})}))
            more = ["--policy", os.fspath(path)]
        account = ["--kubeconfig", os.fspath(self.account), "--json"]
        return [
            *(sys.executable, "-P", "-m", "image_builder.cli", "pool", command),
            *(*arguments, *more, *account),
        ]

    def start(
        self, command: str, *arguments: str, policy: Mapping[str, Any] | None = None
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.argv(command, *arguments, policy=policy),
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": os.fspath(REPO)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ended(self, process: subprocess.Popen[str], status: int = 0) -> dict[str, dict[str, Any]]:
        """Return what a command said of each host."""
        out, err = process.communicate(timeout=180)
        assert process.returncode == status, (process.returncode, out, err)
        return {host["host"]: host for host in json.loads(out)["hosts"]}

    def run(
        self, command: str, *arguments: str, status: int = 0, policy: Mapping[str, Any] | None = None
    ) -> dict[str, dict[str, Any]]:
        return self.ended(self.start(command, *arguments, policy=policy), status)

    def node(self, name: str) -> dict[str, Any]:
        return self.admin.request("GET", path_of_node(name))

    def is_fenced(self, name: str) -> bool:
        return fence.record_of(self.node(name)) is not None and fence.is_cordoned(self.node(name))

    def is_clean(self, name: str) -> bool:
        """Tell whether nothing of ours is on a host, and it takes pods."""
        node = self.node(name)
        annotations = node["metadata"].get("annotations") or {}
        return not fence.is_cordoned(node) and not {fence.CORDON, fence.SCALE_DOWN} & annotations.keys()

    def cordon(self, name: str, *, on: bool = True) -> None:
        """Cordon or uncordon a host as kubectl does."""
        self.admin.request("PATCH", path_of_node(name), {"spec": {"unschedulable": on or None}}, MERGE_PATCH)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running(controllers=True) as cluster:
        give_rights(cluster.admin, RIGHTS)
        access = load(cluster.kubeconfig("kubelets", ADMINISTRATORS))
        with Kubelets(lambda: Client(access, agent=AGENT)) as kubelets:
            kubelets.register(HOSTS)
            yield Fleet(cluster, kubelets, tmp_path_factory.mktemp("drain"))


def test_idle_hosts_are_cordoned_and_freed(fleet: Fleet) -> None:
    names = HOSTS[:3]
    drained = fleet.run("drain", *names)
    assert {host["state"] for host in drained.values()} == {"empty"}
    assert all(map(fleet.is_fenced, names))
    assert {host["state"] for host in fleet.run("free", *names).values()} == {"freed"}
    assert all(map(fleet.is_clean, names))
