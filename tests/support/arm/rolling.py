"""Instances of the simulated scale set that are rolled in simulated time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from image_builder.pool.scale_set.client import HOLD_TAG, Client
from image_builder.pool.scale_set.records import Replacement, open_journal, read_journal
from image_builder.pool.scale_set.roll import SERVICES, Patience, driving, roll_instance
from image_builder.pool.scale_set.upgrades import Ending
from tests.support.arm.direct import Direct
from tests.support.arm.fleet import NEW, Fleet, fleet

PATIENCE = Patience()


class Clock:
    """A clock whose time passes only when something waits."""

    def __init__(self) -> None:
        self.at = 1.8e9

    def __call__(self) -> float:
        return self.at

    def wait(self, seconds: float) -> None:
        self.at += max(seconds, 0.1)


class Rolling:
    """A fleet in simulated time, and a driver that may be started again and again."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.clock = Clock()
        seconds = {"upgrade": 20.0, "reimage": 240.0, "service": 5.0}
        self.fleet: Fleet = fleet(clock=self.clock, seconds=seconds, **settings)
        self.client = Client(Direct(self.fleet.arm), self.clock.wait, self.clock)
        self.journal = folder / "roll.jsonl"

    def __call__(self, number: str = "1", vm_id: str = "") -> Ending:
        path = self.fleet.path
        with (
            open_journal(self.journal) as journal,
            driving(self.client, path, "run-1", journal, patience=PATIENCE) as drive,
        ):
            before = self.client.scale_set(path)
            drive.set_image(before, NEW)
            version = self.client.version(NEW)
            assert version is not None
            planned = vm_id or self.fleet.machine(number).vm_id
            return roll_instance(drive, number, planned, version, self.fleet.node(number))

    def replacements(self) -> list[str]:
        return [record.verb for record in read_journal(self.journal) if isinstance(record, Replacement)]

    def require_clean(self) -> None:
        """Check what must hold in every ending."""
        group = self.fleet.group
        assert group.services == dict.fromkeys(SERVICES, "Running")
        assert HOLD_TAG not in group.content["tags"]
        # At most one POST for each intent (I3), and each names its instances (I4).
        posts = self.fleet.posts("/manualupgrade") + self.fleet.posts("/reimage")
        assert len(posts) <= len(self.replacements())
        assert all(body["instanceIds"] == ["1"] for body in self.fleet.posts("/manualupgrade"))
