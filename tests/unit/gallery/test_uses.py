"""The uses of versions: what can't be read is never unused."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from image_builder.definition.model import ImageGallery
from image_builder.errors import FetchError, PublishError
from image_builder.gallery.azure import Service
from image_builder.gallery.plan import Target
from image_builder.gallery.uses import LATEST, Use, read
from tests.support.arm.place import SETTINGS

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
def test_a_list_that_can_not_be_read_is_an_error(
    denied: list[str], lacking: list[str], kind: type[FetchError | PublishError]
) -> None:
    with pytest.raises(kind) as raised:
        read(cast("Service", Lists(*denied)), TARGET, ["a"], lacking)
    assert [name for name in [*denied, *lacking] if name not in raised.value.message] == []


def test_an_empty_subscription_uses_nothing() -> None:
    assert read(cast("Service", Lists()), TARGET, ["a", "b"]) == []


VERSION = f"{TARGET.definition}/versions/1.0.0"


def _machine(image: str, exact: str = "") -> dict[str, Any]:
    reference = {"id": image, **({"exactVersion": exact} if exact else {})}
    return {"id": "/vm", "properties": {"storageProfile": {"imageReference": reference}}}


@pytest.mark.parametrize(
    ("image", "exact", "model", "machines"),
    [
        (VERSION, "", "1.0.0", "1.0.0"),
        (VERSION.upper(), "", "1.0.0", "1.0.0"),
        (TARGET.definition, "", LATEST, None),
        # A model names what comes next, a machine what it runs.
        (TARGET.definition, "1.0.0", LATEST, "1.0.0"),
        (VERSION, "0.9.0", "1.0.0", "0.9.0"),
        (f"{TARGET.definition}-b/versions/1.0.0", "", "", ""),
        ("", "", "", ""),
    ],
)
def test_a_model_and_its_machines_use_versions(
    image: str, exact: str, model: str, machines: str | None
) -> None:
    class Uses(Lists):
        def list(self, path: str, _api: str) -> list[dict[str, Any]]:
            machine = _machine(image, exact)
            if path.endswith("virtualMachineScaleSets"):
                return [{"id": "/set", "properties": {"virtualMachineProfile": machine["properties"]}}]
            return [machine, machine] if path == "/set/virtualMachines" else []

    if machines is None:
        with pytest.raises(FetchError):
            read(cast("Service", Uses()), TARGET, ["a"])
        return
    found = read(cast("Service", Uses()), TARGET, ["a"])
    expected = [Use("/set", "model", model)] if model else []
    assert found == expected + ([Use("/set", "machines", machines, 2)] if machines else [])


SHARED = f"/SharedGalleries/{TARGET.settings.subscription}-{TARGET.settings.gallery.upper()}"
IMAGE = f"Images/{TARGET.settings.definition}"


@pytest.mark.parametrize(
    ("key", "name", "version"),
    [
        ("sharedGalleryImageId", f"{SHARED}/{IMAGE}/Versions/1.0.0", "1.0.0"),
        ("sharedGalleryImageId", f"{SHARED}/{IMAGE}", LATEST),
        ("sharedGalleryImageId", f"{SHARED}/{IMAGE}-b/Versions/1.0.0", ""),
        ("sharedGalleryImageId", f"{SHARED}2/{IMAGE}/Versions/1.0.0", ""),
        ("communityGalleryImageId", f"/CommunityGalleries/any-123/{IMAGE}/Versions/1.0.0", "1.0.0"),
        ("communityGalleryImageId", f"/CommunityGalleries/any-123/{IMAGE}-b/Versions/1.0.0", ""),
    ],
)
def test_versions_that_are_named_by_their_gallery_s_other_names_are_used(
    key: str, name: str, version: str
) -> None:
    class Uses(Lists):
        def list(self, path: str, _api: str) -> list[dict[str, Any]]:
            if not path.endswith("virtualMachineScaleSets"):
                return []
            profile = {"storageProfile": {"imageReference": {key: name}}}
            return [{"id": "/set", "properties": {"virtualMachineProfile": profile}}]

    found = read(cast("Service", Uses()), TARGET, ["a"])
    assert found == ([Use("/set", "model", version)] if version else [])


@pytest.mark.parametrize(("mode", "owners"), [("Uniform", ["/set"]), ("Flexible", [])])
def test_machines_of_a_flexible_scale_set_are_listed_once(mode: str, owners: list[str]) -> None:
    """The subscription's own list has them."""

    class Sets(Lists):
        def list(self, path: str, _api: str) -> list[dict[str, Any]]:
            if path.endswith("virtualMachineScaleSets"):
                return [{"id": "/set", "properties": {"orchestrationMode": mode}}]
            return [_machine(VERSION)]

    found = read(cast("Service", Sets()), TARGET, ["a"])
    assert [use.owner for use in found] == [*owners, "/vm"]
