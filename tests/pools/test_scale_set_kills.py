"""A driver that is killed at some requests, and also loses answers, replaces a disk once and leaves nothing behind.

Real processes and their journals; tests/unit/pool/test_scale_set_roll.py has every request, in simulated time.
"""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import pytest

from image_builder.pool.scale_set.client import HOLD_TAG
from image_builder.pool.scale_set.records import Replacement, read_journal
from image_builder.pool.scale_set.roll import SERVICES
from tests.support.arm import roller
from tests.support.arm.fleet import BUILDS, NEW, OLD, Fleet, fleet
from tests.support.arm.model import Answer, Request
from tests.support.arm.scale_sets import Machine, SetState
from tests.support.arm.serving import Served, served

pytestmark = pytest.mark.root

KILLS = 6
NUMBER = "1"
_VERBS = {"/manualupgrade": "upgrade", f"/virtualMachines/{NUMBER}/reimage": "reimage"}
_processes = multiprocessing.get_context("forkserver")


class Driver:
    """A scale set, and the processes that roll one of its instances, one after another."""

    def __init__(self, machines: Fleet, service: Served, folder: Path) -> None:
        self.machines, self.service, self.folder = machines, service, folder
        self.count = 0
        self.posts: Counter[str] = Counter()
        self.violations: list[str] = []
        self._process: BaseProcess | None = None
        self._point, self._effect, self._lost = -1, "", False
        folder.mkdir()
        machines.scale_sets.reimaged = self.reimaged
        self.reimaged(machines.group, machines.machine(NUMBER))
        machines.arm.faults = [self.arrived]

    def reimaged(self, _: SetState, machine: Machine) -> None:
        """Bring an instance's node up with a new boot and the build on its disk."""
        content = {machine.id: {"boot_id": machine.boot_id, "build": BUILDS[machine.disk]}}
        draft = self.folder / "nodes.draft"
        draft.write_text(json.dumps(content))
        draft.rename(self.folder / "nodes.json")

    def arrived(self, request: Request) -> Answer | Literal["drop", "lose"] | None:
        """Check each request as it arrives: I3; kill its sender at the chosen point."""
        self.count += 1
        verb = next((v for part, v in _VERBS.items() if request.path.endswith(part)), None)
        if verb and request.method == "POST":
            self.posts[verb] += 1
            intents = self.intents()
            if self.posts[verb] > intents[verb]:
                self.violations.append(f"{verb} number {self.posts[verb]} with {intents} intents")
        if self.count == self._point:
            # The test starts the next process as soon as this one is dead.
            process, effect = self._process, self._effect
            assert process
            process.kill()
            wait([process.sentinel])
            return "drop" if effect == "before" else "lose"
        if verb and self._lost:
            self._lost = False
            return "lose"
        return None

    def intents(self) -> Counter[str]:
        journal = self.folder / "roll.jsonl"
        records = read_journal(journal) if journal.exists() else []
        return Counter(record.verb for record in records if isinstance(record, Replacement))

    def run(self, point: int = -1, effect: str = "before", *, lost: bool = False) -> int | None:
        """Run a driver that is killed at its request number ``point``; return its exit code."""
        self.count, self._point, self._effect, self._lost = 0, point, effect, lost
        address, environment = self.service.url, dict(self.service.environment)
        arguments = (address, environment, self.machines.path, NEW, self.folder, NUMBER)
        self._process = _processes.Process(target=roller.roll, args=arguments)
        self._process.start()
        self._process.join()
        return self._process.exitcode

    def require_rolled(self) -> None:
        group = self.machines.group
        assert (self.folder / "ending").read_text() == "ok"
        assert self.violations == []
        assert [machine.disk for machine in group.machines.values()] == [OLD, NEW]
        assert [machine.reimages for machine in group.machines.values()] == [0, 1]
        assert group.services == dict.fromkeys(SERVICES, "Running")
        assert HOLD_TAG not in group.content["tags"]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[Fleet, Served]]:
    _processes.set_forkserver_preload(["tests.support.arm.roller", "azure.mgmt.compute", "azure.identity"])
    machines = fleet(2, seconds={"upgrade": 0.05, "reimage": 0.1})
    (tmp_path / "cloud").mkdir()
    with served(machines.arm, tmp_path / "cloud") as serving:
        yield machines, serving


def test_killed_drivers_are_followed_by_others(service: tuple[Fleet, Served], tmp_path: Path) -> None:
    machines, serving = service
    clean = Driver(machines, serving, tmp_path / "clean")
    assert clean.run() == 0
    clean.require_rolled()
    total, killed = clean.count, 0
    for number in range(KILLS):
        path = machines.scale_sets.add(f"killed-{number}", OLD, 2)
        driver = Driver(
            Fleet(machines.arm, machines.scale_sets, path), serving, tmp_path / f"killed-{number}"
        )
        point = 1 + number // 2 * total // (KILLS // 2)
        assert driver.run(point, "before" if number % 2 else "after") == -9, point
        killed += 1
        assert driver.run(lost=number % 3 == 0) == 0
        driver.require_rolled()
    assert killed == KILLS
