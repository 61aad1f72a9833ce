"""The uses of versions: what can't be read is never unused."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from image_builder.definition.model import ImageGallery
from image_builder.errors import FetchError, PublishError
from image_builder.gallery.azure import Service
from image_builder.gallery.plan import Target
from image_builder.gallery.uses import read
from tests.unit.gallery.test_gallery_plan import SETTINGS

TARGET = Target(ImageGallery.model_validate_json(json.dumps(SETTINGS)))


class Lists:
    """A subscription without machines; some lists can't be read."""

    def __init__(self, *denied: str) -> None:
        self.denied = denied

    def list(self, path: str, _api: str) -> list[dict[str, Any]]:
        if path.rsplit("/", 1)[-1] in self.denied:
            raise FetchError(f"403 {path}")
        return []


@pytest.mark.parametrize(
    ("denied", "lacking", "kind"),
    [
        (["virtualMachineScaleSets"], [], FetchError),
        (["virtualMachines"], [], FetchError),
        (["virtualMachines", "virtualMachineScaleSets"], ["a right"], FetchError),
        ([], ["a right"], PublishError),
    ],
)
def test_a_list_that_can_not_be_read_is_an_error(denied: list[str], lacking: list[str], kind: type) -> None:
    with pytest.raises(kind) as raised:
        read(cast("Service", Lists(*denied)), TARGET, ["a"], lacking)
    assert [name for name in denied if name not in raised.value.message] == []


def test_an_empty_subscription_uses_nothing() -> None:
    assert read(cast("Service", Lists()), TARGET, ["a", "b"]) == []
