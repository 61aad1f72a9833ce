"""A version, read from the service's JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from image_builder.definition.model import ImageGallery
from image_builder.gallery.azure import Service
from image_builder.gallery.plan import Call, Target
from image_builder.gallery.versions import _unfit, _update, parse
from tests.support.arm.place import SETTINGS


def test_a_version_of_ours_is_read() -> None:
    version = parse(
        {
            "name": "2026.1125.0",
            "tags": {"image-builder-build": "6e340b9cffb3"},
            "properties": {
                "provisioningState": "Succeeded",
                "publishingProfile": {"excludeFromLatest": True, "endOfLifeDate": "2027-05-24T00:00:00Z"},
                "replicationStatus": {"summary": [{"region": "West US 3", "state": "Completed"}]},
            },
        }
    )
    assert (version.build, version.in_latest) == ("6e340b9cffb3", False)
    assert version.regions == {"West US 3": "Completed"}


def test_a_version_that_says_nothing_is_in_latest_and_nobodys() -> None:
    version = parse({"name": "1.0.0", "properties": {}})
    assert version.in_latest and version.build == "" and version.regions == {}


WHOLE: dict[str, Any] = {
    "name": "2026.1125.0",
    "tags": {"image-builder-build": "6e340b9cffb3", "image-builder-vhd-sha256": "0" * 64},
    "properties": {
        "provisioningState": "Succeeded",
        "publishingProfile": {"endOfLifeDate": "2027-05-24T00:00:00Z"},
        "replicationStatus": {"summary": [{"region": "West US 3", "state": "Completed"}]},
    },
}
REPLICATING = {"summary": [{"region": "East US", "state": "Replicating"}]}


@pytest.mark.parametrize(
    ("tags", "properties", "day", "reasons"),
    [
        ({}, {}, 1, []),
        ({"image-builder-build": ""}, {}, 1, ["tags name no build"]),
        ({"image-builder-withdrawn": "bad"}, {}, 1, ["was withdrawn: bad"]),
        ({"image-builder-unverified": "a fire"}, {}, 1, ["wasn't verified: a fire"]),
        ({}, {}, 365, ["its life ended"]),
        ({}, {"replicationStatus": REPLICATING}, 1, ["isn't in every region: East US"]),
        ({}, {"provisioningState": "Failed"}, 1, ["it is Failed"]),
        ({"image-builder-vhd-sha256": ""}, {"provisioningState": "Failed"}, 1, ["no build", "it is Failed"]),
    ],
)
def test_every_reason_not_to_promote_is_named(
    tags: dict[str, str], properties: dict[str, Any], day: int, reasons: list[str]
) -> None:
    version = parse(
        WHOLE | {"tags": {**WHOLE["tags"], **tags}, "properties": {**WHOLE["properties"], **properties}}
    )
    named = list(_unfit(version, datetime(2026, 11, 25, tzinfo=UTC) + timedelta(days=day)))
    assert len(named) == len(reasons)
    assert all(reason in text for reason, text in zip(reasons, named, strict=True))


@pytest.mark.parametrize(
    ("present", "is_done"),
    [
        ({"a": "1"}, True),
        ({"a": "1", "b": "2"}, True),
        ({"a": "2"}, False),
        ({"b": "2"}, False),
        (None, False),
    ],
)
def test_a_change_was_made_if_the_version_has_all_tags_that_were_sent(
    present: dict[str, str] | None, is_done: bool
) -> None:
    verdicts: list[bool] = []

    class Answers:
        def get(self, path: str, _api: str) -> dict[str, Any]:
            assert path == target.version("2026.1125.0")
            return {"tags": present}

        def change(self, call: Call, done: Callable[[], bool]) -> None:
            assert call.body and call.body["tags"]["a"] == "1"
            verdicts.append(done())

    target = Target(ImageGallery.model_validate_json(json.dumps(SETTINGS)))
    _update(cast("Service", Answers()), target, WHOLE, {}, {"a": "1"})
    assert verdicts == [is_done]
