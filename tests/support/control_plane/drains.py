"""Drains for a test: the commands, run by an account with the documented rights on a cluster of simulated nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from image_builder.drain import fence
from image_builder.node.net.kube import MERGE_PATCH, Client, path_of_node
from image_builder.node.net.kubeconfig import load
from tests.support.control_plane.gates import Cluster, bind, give_rights, wait_until
from tests.support.control_plane.kubelets import AGENT, Kubelets
from tests.support.control_plane.servers import ADMINISTRATORS
from tests.support.images.builds import REPO

RIGHTS = REPO / "deploy/drain.yml"
ACCOUNT = "system:serviceaccount:kube-system:image-builder-drain"
_AGENT = "image-builder-drain"
_QUICK = {"settle_seconds": 1.0, "poll_seconds": 0.3}


class Fleet:
    """A cluster of simulated nodes, and the commands, which run with an account of their own."""

    def __init__(self, cluster: Cluster, kubelets: Kubelets, directory: Path) -> None:
        self.cluster, self.kubelets, self.directory = cluster, kubelets, directory
        self.admin = cluster.admin
        self.log = directory / "stderr"
        self.unused = list(reversed(list(kubelets.nodes)))
        self.account = cluster.kubeconfig(ACCOUNT, "system:serviceaccounts")

    def argv(self, command: str, *arguments: str, policy: Mapping[str, Any] | None = None) -> list[str]:
        more: list[str] = []
        if command != "free":
            path = self.directory / "policy.yml"
            path.write_text(yaml.safe_dump({**_QUICK, **(policy or {})}))
            more = ["--policy", os.fspath(path)]
        account = ["--kubeconfig", os.fspath(self.account), "--json"]
        return [
            *(sys.executable, "-P", "-m", "image_builder.cli", "pool", command),
            *(*arguments, *more, *account),
        ]

    def start(
        self, command: str, *arguments: str, policy: Mapping[str, Any] | None = None
    ) -> subprocess.Popen[str]:
        argv = self.argv(command, *arguments, policy=policy)
        environment = {**os.environ, "PYTHONPATH": os.fspath(REPO)}
        with self.log.open("w") as log:
            return subprocess.Popen(
                argv, cwd=REPO, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def says(self, text: str, times: int = 1) -> bool:
        """Wait until the last command has logged ``text`` at least ``times`` times; return whether it did."""
        return wait_until(lambda: self.log.read_text().count(text) >= times)

    def ended(self, process: subprocess.Popen[str], status: int = 0) -> dict[str, dict[str, Any]]:
        """Wait until a command ends; return its result for each host."""
        out, _ = process.communicate(timeout=600)
        assert process.returncode == status, (process.returncode, out, self.log.read_text())
        return {host["host"]: host for host in json.loads(out)["hosts"]}

    def run(
        self, command: str, *arguments: str, status: int = 0, policy: Mapping[str, Any] | None = None
    ) -> dict[str, dict[str, Any]]:
        return self.ended(self.start(command, *arguments, policy=policy), status)

    def requests(self, host: str) -> int:
        """Return how many requests about a host the commands made."""
        about = (f"/nodes/{host}", f"spec.nodeName%3D{host}%2C")
        return sum(any(part in event["requestURI"] for part in about) for event in self.audit())

    def refusals(self, host: str) -> int:
        """Return how often a change to a Node was refused because the Node had changed since it was read."""
        return sum(
            f"/nodes/{host}" in event["requestURI"] and event["responseStatus"]["code"] in (409, 422)
            for event in self.audit()
        )

    def node(self, name: str) -> dict[str, Any]:
        return self.admin.request("GET", path_of_node(name))

    def is_fenced(self, name: str) -> bool:
        return fence.record_of(self.node(name)) is not None and fence.is_cordoned(self.node(name))

    def is_clean(self, name: str) -> bool:
        """Return whether a host accepts pods and has nothing of ours on it."""
        node = self.node(name)
        annotations = node["metadata"].get("annotations") or {}
        return not fence.is_cordoned(node) and not {fence.CORDON, fence.SCALE_DOWN} & annotations.keys()

    def is_ours_nowhere(self, name: str) -> bool:
        return fence.CORDON not in (self.node(name)["metadata"].get("annotations") or {})

    def audit(self) -> list[dict[str, Any]]:
        """Return the commands' requests, from the server's own log."""
        events = self.cluster.audit()
        return [e for e in events if e.get("userAgent") == _AGENT and e["stage"] == "ResponseComplete"]

    def cordon(self, name: str, *, on: bool = True) -> None:
        """Cordon or uncordon a host as kubectl does."""
        self.admin.request("PATCH", path_of_node(name), {"spec": {"unschedulable": on or None}}, MERGE_PATCH)


@contextmanager
def draining(cluster: Cluster, hosts: Sequence[str], directory: Path) -> Iterator[Fleet]:
    """Run the kubelets of these hosts."""
    give_rights(cluster.admin, RIGHTS)
    for role in ("image-builder-drain-evict", "image-builder-drain-ask"):
        bind(cluster.admin, role, ACCOUNT)
    access = load(cluster.kubeconfig("kubelets", ADMINISTRATORS))
    with Kubelets(lambda: Client(access, agent=AGENT)) as kubelets:
        kubelets.register(hosts)
        yield Fleet(cluster, kubelets, directory)


def asked(event: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the verb, the resource and the object's name of a request in the audit log."""
    target = event.get("objectRef") or {}
    resource = "/".join(target[key] for key in ("resource", "subresource") if target.get(key))
    return event["verb"], resource, target.get("name", "")
