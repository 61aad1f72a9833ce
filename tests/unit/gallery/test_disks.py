"""The disks of a resource group that are a definition's uploads; one that can't be judged is an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from image_builder.definition.model import ImageGallery
from image_builder.errors import FetchError
from image_builder.gallery import disks
from image_builder.gallery.azure import Service
from image_builder.gallery.plan import Target
from tests.support.arm.place import SETTINGS

TARGET = Target(ImageGallery.model_validate_json(json.dumps(SETTINGS)))
OURS: dict[str, Any] = {
    "id": "/g/disks/image-builder-ab-12",
    "tags": {"image-builder-definition": "nodes/worker", "image-builder-vhd-sha256": "12" * 32},
    "properties": {"diskState": "ActiveUpload", "timeCreated": "2026-11-25T01:02:03.1234567+00:00"},
}


class Listing:
    """The disks that the service lists."""

    def __init__(self, *items: dict[str, Any], kind: str = "disks") -> None:
        self.items, self.kind = items, kind

    def list(self, path: str, _api: str) -> Iterator[dict[str, Any]]:
        assert path == f"{TARGET.group}/providers/Microsoft.Compute/{self.kind}"
        yield from self.items


def _read(*items: dict[str, Any]) -> list[disks.UploadDisk]:
    return disks.read(cast(Service, Listing(*items)), TARGET)


def test_only_uploads_of_this_definition_are_looked_at() -> None:
    others = [{"id": "/g/disks/data"}, {**OURS, "tags": {"image-builder-definition": "nodes/worker2"}}]
    (disk,) = _read(*others, OURS)
    assert (disk.name, disk.state, disk.owner) == ("image-builder-ab-12", "ActiveUpload", "")
    assert disk.created == datetime(2026, 11, 25, 1, 2, 3, 123456, tzinfo=UTC)


def test_only_images_of_this_definition_are_looked_at_and_one_without_a_digest_is_an_error() -> None:
    ours = {"id": "/g/images/image-builder-ab-12", "tags": OURS["tags"]}
    listing = Listing({"id": "/g/images/theirs"}, ours, kind="images")
    (image,) = disks.read_images(cast(Service, listing), TARGET)
    assert (image.name, image.sha256) == ("image-builder-ab-12", "12" * 32)
    listing.items = ({**ours, "tags": {"image-builder-definition": "nodes/worker"}},)
    with pytest.raises(FetchError, match="can't be judged"):
        disks.read_images(cast(Service, listing), TARGET)


@pytest.mark.parametrize(
    "broken",
    [
        {"properties": None},
        {"properties": {"diskState": "ActiveUpload"}},
        {"properties": {"diskState": "ActiveUpload", "timeCreated": "yesterday"}},
        {"tags": {"image-builder-definition": "nodes/worker"}},
    ],
)
def test_one_that_cannot_be_judged_is_an_error(broken: dict[str, Any]) -> None:
    with pytest.raises(FetchError, match="can't be judged"):
        _read({**OURS, **broken})
