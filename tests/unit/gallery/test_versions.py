"""A version as the service's JSON has it."""

from __future__ import annotations

from image_builder.gallery.versions import parse


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
