"""The regions that a version is in: which are added to it, and that nothing else in its profile changes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

from image_builder.definition.model import ImageGallery
from image_builder.events import Monitor
from image_builder.gallery import artefact
from image_builder.gallery.azure import Service
from image_builder.gallery.journal import open_journal
from image_builder.gallery.plan import Call, Target, make_plan
from image_builder.gallery.run import Run
from image_builder.gallery.tags import SHA256_TAG
from tests.support.arm.direct import Direct
from tests.support.arm.fleet import NoDisks, add_version
from tests.support.arm.limits import Limits
from tests.support.arm.model import Json
from tests.support.arm.place import MIB, SETTINGS, write_build
from tests.support.arm.service import Arm

TARGET = Target(ImageGallery.model_validate_json(json.dumps(SETTINGS)))
THREE = Target(
    ImageGallery.model_validate_json(
        json.dumps({**SETTINGS, "regions": [*SETTINGS["regions"], {"name": "northeurope"}]})
    )
)
NAME = "2026.1125.0"
PROFILE = {"excludeFromLatest": False, "endOfLifeDate": "2099-01-01T00:00:00Z"}


@dataclass
class Straight(Direct):
    """Publishing's requests, each sent once and without a wait; a run that waits for ever fails."""

    waits: int = 0

    def change(self, call: Call, _is_done: object, **_: object) -> Json:
        answer, problem = self.send(call.method, call.path, call.api, call.body)
        assert answer is not None and answer.status_code < 300, problem
        return {}

    def wait(self, *_: object, **__: object) -> None:
        self.waits += 1
        assert self.waits < 20


class Publishing:
    """A build that is already published as a version in some regions."""

    def __init__(self, folder: Path, *regions: str, target: Target = TARGET) -> None:
        build = write_build(folder, size=2 * MIB, data=MIB).build_id[:12]
        built = artefact.read(folder / "worker" / build, folder / "boot" / build, unverified=False)
        now = datetime(2026, 11, 25, tzinfo=UTC)
        self.plan = make_plan(target, built, NAME, [(0, MIB)], now=now, creates_definition=False)
        self.arm = Arm(NoDisks(), limits=Limits.boundless())
        self.version = add_version(
            self.arm,
            target.version(NAME),
            publishingProfile={
                **PROFILE,
                "publishedDate": "2026-11-25T01:00:00Z",
                "targetRegions": [{"name": name, "regionalReplicaCount": 2} for name in regions],
            },
        )
        self.version["tags"][SHA256_TAG] = built.sha256
        self.arm._set_regions(self.version, self.version["properties"]["publishingProfile"]["targetRegions"])
        self.folder = folder

    def __call__(self) -> dict[str, Any]:
        service = Straight(self.arm)
        with open_journal(self.folder / "journal.jsonl") as journal:
            return Run(self.plan, cast(Service, service), journal, Monitor()).perform()

    def profiles(self) -> list[Json]:
        """Return the publishing profiles that were sent."""
        return [(entry.body or {})["properties"]["publishingProfile"] for entry in self.arm.log]


def _names(profile: Json) -> list[str]:
    return [region["name"] for region in profile["targetRegions"]]


@pytest.mark.parametrize("others", [[], ["northeurope"]])
def test_a_region_that_the_version_does_not_name_is_added_once(tmp_path: Path, others: list[str]) -> None:
    """A repair that was killed took it out, or the inventory has it since. Others' regions stay."""
    publishing = Publishing(tmp_path, "westus3", *others)
    assert set(publishing()["regions"].values()) == {"Completed"}
    (profile,) = publishing.profiles()
    assert _names(profile) == ["westus3", *others, "eastus"]
    assert [region["regionalReplicaCount"] for region in profile["targetRegions"]] == [
        2,
        *(2 for _ in others),
        3,
    ]
    assert {name: profile[name] for name in PROFILE} == PROFILE and "publishedDate" not in profile
    assert publishing()["regions"] and len(publishing.profiles()) == 1


def test_a_repaired_version_keeps_the_rest_of_its_profile(tmp_path: Path) -> None:
    publishing = Publishing(tmp_path, "westus3", "eastus", "northeurope")
    publishing.arm.failing_regions = {"eastus": 1}
    assert set(publishing()["regions"].values()) == {"Completed"}
    without, whole = publishing.profiles()
    assert _names(without) == ["westus3", "northeurope"]
    assert _names(whole) == ["westus3", "eastus", "northeurope"]
    for profile in (without, whole):
        assert {name: profile[name] for name in PROFILE} == PROFILE and "publishedDate" not in profile


@pytest.mark.parametrize(
    ("regions", "failing", "progress"),
    [
        (("westus3", "northeurope"), {"northeurope": 1}, 0),
        (("westus3", "eastus", "northeurope"), {"eastus": 1, "northeurope": 1}, 0),
        # It fails while the others are still replicated.
        (("westus3", "eastus", "northeurope"), {"northeurope": 1}, 75),
    ],
)
def test_a_region_is_repaired_once_no_change_is_in_progress(
    tmp_path: Path, regions: tuple[str, ...], failing: dict[str, int], progress: int
) -> None:
    """The service refuses another change before that. ``progress``: the last region's, in percent."""
    publishing = Publishing(tmp_path, *regions, target=THREE)
    publishing.arm.percent, publishing.arm.failing_regions = 25, failing
    publishing.version["properties"]["replicationStatus"]["summary"][-1]["progress"] = progress
    assert set(publishing()["regions"].values()) == {"Completed"}
    assert all(entry.status == 200 for entry in publishing.arm.log)
