"""A scale set in the simulated service, two versions of its image, and a node for each of its instances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from image_builder.pool.rights import DEFINITION as DEFINITION_RIGHTS
from image_builder.pool.rights import SCALE_SET
from image_builder.pool.scale_set.verdict import Node
from tests.support.arm.limits import Limits
from tests.support.arm.model import SUBSCRIPTION, Json
from tests.support.arm.scale_sets import Machine, ScaleSets, SetState
from tests.support.arm.service import Arm

GROUP = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/images"
DEFINITION = f"{GROUP}/providers/Microsoft.Compute/galleries/nodes/images/worker"
OLD, NEW = f"{DEFINITION}/versions/1.7.0", f"{DEFINITION}/versions/1.8.0"
BUILDS = {OLD: "0" * 12, NEW: "1" * 12}


class NoDisks:
    """Disks for tests that upload nothing."""

    def create(self, name: str, size: int) -> None:
        raise NotImplementedError

    def sas(self, name: str, seconds: int) -> str:
        raise NotImplementedError

    def footer(self, name: str) -> bytes:
        raise NotImplementedError

    def delete(self, name: str) -> None:
        raise NotImplementedError


def add_version(arm: Arm, path: str, **properties: Any) -> Json:
    """Add a version that is replicated to westus3, and its definition."""
    definition = path.partition("/versions/")[0]
    if definition.lower() not in arm.resources:
        arm.add(definition, properties={"architecture": "x64", "hyperVGeneration": "V2"})
    summary = [{"region": "West US 3", "state": "Completed", "details": "", "progress": 100}]
    return arm.add(
        path,
        tags={"image-builder-build": BUILDS.get(path, "2" * 12)},
        properties={
            "provisioningState": "Succeeded",
            "publishingProfile": {"endOfLifeDate": "2099-01-01T00:00:00Z"},
            "storageProfile": {"osDiskImage": {"sizeInGB": 32}},
            "replicationStatus": {"aggregatedState": "Completed", "summary": summary},
            **properties,
        },
    )


def actions() -> list[str]:
    """Return exactly the rights that a rollout needs; every other request is refused."""
    return [f"Microsoft.Compute/{action}" for action in (*SCALE_SET, *DEFINITION_RIGHTS)]


@dataclass
class Fleet:
    """A scale set with its nodes. The nodes of ``silent`` instances don't answer; ``boots`` maps an image to the build
    that it runs instead of its own.
    """

    arm: Arm
    scale_sets: ScaleSets
    path: str
    silent: set[str] = field(default_factory=set)
    boots: dict[str, str] = field(default_factory=dict)

    @property
    def group(self) -> SetState:
        return self.scale_sets.sets[self.path.lower()]

    def machine(self, number: str) -> Machine:
        return self.group.machines[number]

    def node(self, number: str) -> Callable[[], Node | None]:
        """Return a function that queries the node of an instance."""

        def ask() -> Node | None:
            machine = self.group.machines.get(number)
            if machine is None or number in self.silent or machine.state == "Updating":
                return None
            return Node(machine.boot_id, self.boots.get(machine.disk, BUILDS[machine.disk]))

        return ask

    def posts(self, part: str) -> list[Json]:
        """Return the bodies of the POST requests that arrived and have ``part`` in their path."""
        return [e.body or {} for e in self.arm.log if e.method == "POST" and part in e.path and e.status]


def fleet(count: int = 3, *, name: str = "gpu", **settings: Any) -> Fleet:
    """Return a service with a scale set that runs the old version."""
    arm = Arm(NoDisks(), url="https://arm", limits=Limits.boundless(), actions=actions())
    for path in (OLD, NEW):
        add_version(arm, path)
    scale_sets = ScaleSets(arm, **settings)
    return Fleet(arm, scale_sets, scale_sets.add(name, OLD, count))
