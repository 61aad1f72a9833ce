"""Nodes for which the gate requests a repair, for tests: the gate's own steps, Azure's simulator, and the command.

The command is the real one, in a separate process, with the documented rights; only its waits are shorter.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from image_builder.drain.lease import NAMESPACE, Leases, Settings
from image_builder.node.net.kube import MERGE_PATCH, path_of_node
from image_builder.pool import repair
from tests.support.arm.fleet import NEW, OLD, NoDisks, add_version
from tests.support.arm.limits import Limits
from tests.support.arm.model import Request
from tests.support.arm.scale_sets import Machine, ScaleSets, SetState
from tests.support.arm.service import Arm
from tests.support.arm.serving import Served, served
from tests.support.control_plane.gates import Cluster, give_rights
from tests.support.control_plane.wards import Ward, ward
from tests.support.images.builds import REPO
from tests.support.pools.rolls import PATIENCE

RIGHTS = REPO / "deploy/repair.yml"
PAGE = REPO / "docs/how-to/bad-nodes.md"
ACCOUNT = "system:serviceaccount:kube-system:image-builder-repair"
AGENT = "image-builder-repair"
OFTEN = Settings(namespace=NAMESPACE, duration=6.0, deadline=5.0, pause=0.5)
_DRAIN = {"settle_seconds": 0.0, "poll_seconds": 0.1, "max_wait_seconds": 60.0}
FINDINGS = {"reboot": "GpuLost", "reimage": "FilesystemReadOnly", "hand-over": "PciGone"}
POLICY: dict[str, Any] = {
    "rules": [{"reason": reason, "remedy": remedy} for remedy, reason in FINDINGS.items()],
    "drain": _DRAIN,
}


def actions() -> list[str]:
    """Return the rights in Azure that the page names."""
    return re.findall(r"^Microsoft\.Compute/\S+$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@dataclass
class Clinic:
    """A cluster and Azure."""

    plane: Ward
    served: Served
    scale_sets: ScaleSets
    folder: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.account = self.plane.cluster.kubeconfig(ACCOUNT, "system:serviceaccounts")
        self.machines: dict[str, Machine] = {}
        self.scale_sets.reimaged = self.scale_sets.restarted = self._boot

    def _boot(self, _: SetState, machine: Machine) -> None:
        name = next(name for name, each in self.machines.items() if each is machine)
        threading.Timer(0.3, self.plane.kubelets.boot, (name,)).start()

    def pool(self, count: int) -> Pool:
        """Return a new scale set with ``count`` nodes."""
        number, names = next(self._numbers), self.plane.nodes(count)
        path = self.scale_sets.add(f"set-{number}", OLD, count)
        self.scale_sets.sets[path.lower()].services["AutomaticRepairs"] = "Suspended"
        machines = self.scale_sets.sets[path.lower()].machines.values()
        for name, machine in zip(names, machines, strict=True):
            self.machines[name] = machine
            provider = {"spec": {"providerID": f"azure://{path}/virtualMachines/{machine.id}"}}
            self.plane.admin.request("PATCH", path_of_node(name), provider, MERGE_PATCH)
        pool = Pool(self, path, names, self.folder / f"hosts-{number}.yml")
        pool.write(names)
        return pool

    def sent(self, pool: Pool) -> list[str]:
        """Return the requests that changed anything in a pool's scale set, or tried to."""
        log = [entry for entry in self.served.arm.log if entry.path.lower().startswith(pool.path.lower())]
        return [f"{entry.method} {entry.path[len(pool.path) :]}" for entry in log]


@dataclass
class Pool:
    """A scale set and its nodes; ``inventory`` is the file that a snapshot of it would be."""

    clinic: Clinic
    path: str
    names: list[str]
    inventory: Path

    def write(self, names: Sequence[str]) -> None:
        hosts = {
            name: {
                "ansible_host": f"192.0.2.{number}",
                "pool_image": "worker",
                "pool_vm_size": "Standard_ND96isr_H100_v5",
                "pool_vm_id": self.clinic.machines[name].vm_id,
                "pool_instance_id": self.clinic.machines[name].id,
                "pool_scale_set_id": self.path,
            }
            for number, name in enumerate(names, 1)
        }
        self.inventory.write_text(yaml.safe_dump({"gpu": {"hosts": hosts}}))

    def ask(self, name: str, remedy: str) -> None:
        """Report a node as faulty, and run the gate step by step until it has drained the node and wants a remedy."""
        plane = self.clinic.plane
        plane.report(name, "False", FINDINGS[remedy])
        with plane.client() as client:
            for _ in range(30):
                if self.stage(name) == "asked":
                    return
                plane.turn(client, [name], **POLICY)
        raise AssertionError(plane.document(name))

    def stage(self, name: str) -> str:
        record = self.clinic.plane.record(name)
        return record.stage if record else ""

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = ["pool", "repair", "-i", os.fspath(self.inventory), "gpu", *arguments, "--json"]
        access = ["--kubeconfig", os.fspath(self.clinic.account), "--endpoint", self.clinic.served.url]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.pools.repairs", *command, *access],
            cwd=REPO,
            env={**os.environ, **self.clinic.served.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ended(self, process: subprocess.Popen[str], status: int) -> dict[str, dict[str, Any]]:
        """Wait until a command exits with ``status``; return what it reports of each node."""
        out, err = process.communicate(timeout=600)
        assert process.returncode == status, (process.returncode, out, err)
        return {node["node"]: node for node in json.loads(out)["nodes"]}

    def repair(self, *arguments: str, status: int = 0) -> dict[str, dict[str, Any]]:
        return self.ended(self.start(*arguments), status)

    @contextmanager
    def faulty(self, fault: Callable[[Request], Any]) -> Iterator[None]:
        """Apply a fault to the requests about the scale set."""
        faults = self.clinic.served.arm.faults

        def own(request: Request) -> Any:
            return fault(request) if request.path.lower().startswith(self.path.lower()) else None

        faults.append(own)
        try:
            yield
        finally:
            faults.remove(own)

    def killed(self, effect: Literal["drop", "lose"]) -> None:
        """Run the command, and kill it when its first request that isn't a GET arrives."""
        process = self.start()

        def fault(request: Request) -> Literal["drop", "lose"] | None:
            if request.method == "GET":
                return None
            process.kill()
            process.wait()
            return effect

        with self.faulty(fault):
            process.communicate(timeout=600)
        assert process.returncode < 0


@contextmanager
def clinic(cluster: Cluster, folder: Path) -> Iterator[Clinic]:
    """Give the gate and the command their rights in a cluster; run Azure's simulator with those on the page."""
    arm = Arm(NoDisks(), url="https://arm", limits=Limits.boundless(), actions=actions())
    for path in (OLD, NEW):
        add_version(arm, path)
    (folder / "cloud").mkdir()
    with ward(cluster) as plane, served(arm, folder / "cloud") as service:
        give_rights(plane.admin, RIGHTS)
        scale_sets = ScaleSets(arm, seconds={"restart": 0.5, "reimage": 1.0})
        yield Clinic(plane, service, scale_sets, folder)


class Impatient(repair.Repairs):
    """The real repairs, with shorter waits."""

    def __post_init__(self) -> None:
        self.patience = PATIENCE
        super().__post_init__()
        self._leases = Leases(self.kube, self._holder, OFTEN)


if __name__ == "__main__":
    from image_builder.cli.main import main

    repair.Repairs = Impatient  # type: ignore[misc]
    main()
