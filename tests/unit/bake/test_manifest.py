"""The manifest: read back as written, valid against its published schema, and refused when it's wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from image_builder.bake import manifest as manifests
from image_builder.bake.lock.model import Lock, LockedGroup, LockedPackage
from image_builder.bake.manifest import Package
from image_builder.definition.model import ImageBase, ImageDefinition, ImageDisk
from image_builder.errors import PublishError
from tests.support.images.manifests import manifest

SCHEMA = Path(__file__).resolve().parents[3] / manifests.SCHEMA_PATH
MADE = manifest({"worker.raw": b"disk"})


def test_a_manifest_is_read_back_as_it_was_written() -> None:
    assert manifests.load(MADE.render()) == MADE


def test_the_schema_file_is_the_models() -> None:
    hint = f"python -m image_builder.bake.manifest > {manifests.SCHEMA_PATH}"
    assert SCHEMA.read_text(encoding="utf-8") == manifests.render_schema(), hint


def test_a_manifest_fits_its_schema_and_a_wrong_one_does_not() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    good = json.loads(MADE.render())
    jsonschema.validate(good, schema)
    for path, value in [(("build_id",), "short"), (("artefacts", 0, "bytes"), -1), (("surprise",), 1)]:
        bad: Any = json.loads(MADE.render())
        at = bad
        for part in path[:-1]:
            at = at[part]
        at[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)
        with pytest.raises(PublishError, match=str(path[-1])):
            manifests.load(json.dumps(bad).encode())


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", MADE.render()[:-20]])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(PublishError, match="not a manifest"):
        manifests.load(data)


def test_only_verified_images_have_manifests() -> None:
    text = MADE.render().replace(b'"verdict": "passed"', b'"verdict": "failed"')
    with pytest.raises(PublishError, match="verdict"):
        manifests.load(text)


def test_time_and_duration_are_no_part_of_the_content() -> None:
    stage = MADE.stages[0].model_copy(update={"seconds": 99.0, "cached": True})
    later = MADE.model_copy(update={"created": "2027-01-01T00:00:00Z", "stages": (stage,)})
    assert MADE.same_content(later)
    assert not MADE.same_content(manifest({"worker.raw": b"Disk"}))
    other = MADE.stages[0].model_copy(update={"id": "0" * 64})
    assert not MADE.same_content(MADE.model_copy(update={"stages": (other,)}))


def test_times_are_utc() -> None:
    assert manifests.timestamp(1735689600.9) == "2025-01-01T00:00:00Z"


def _lock() -> Lock:
    def package(name: str, version: str, arch: str, sha: str) -> LockedPackage:
        return LockedPackage(
            name=name,
            version=version,
            architecture=arch,
            sha256=sha * 32,
            size=1,
            path="p",
            repository="debian",
        )

    packages = [package("libc6", "2.41-12", "amd64", "01"), package("tzdata", "2025b-4", "all", "02")]
    return Lock(
        image="worker",
        source_date_epoch=0,
        repositories={"debian": None},
        groups={
            "base": LockedGroup(suite="trixie", components=["main"], requested=["libc6"], packages=packages)
        },
    )


def test_installed_packages_get_the_digests_of_the_lock() -> None:
    present = [
        {"name": "tzdata", "version": "2025b-4", "architecture": "all"},
        {"name": "libc6:amd64", "version": "2.41-12", "architecture": "amd64"},
        {"name": "homemade", "version": "1", "architecture": "amd64"},
    ]
    assert manifests.installed(_lock(), list(present)) == (
        Package(name="homemade", version="1", architecture="amd64", sha256=None),
        Package(name="libc6", version="2.41-12", architecture="amd64", sha256="01" * 32),
        Package(name="tzdata", version="2025b-4", architecture="all", sha256="02" * 32),
    )


def test_the_definitions_digest_ignores_where_packages_come_from() -> None:
    def definition(**changes: Any) -> ImageDefinition:
        base = ImageBase.model_validate({"suite": "trixie", "mirror": changes.pop("mirror", None)})
        values: dict[str, Any] = {
            "name": "worker",
            "base": base,
            "layers": ("system",),
            "disk": ImageDisk.model_validate({}),
            "formats": ("raw",),
            "kernel_args": (),
            "secure_boot": False,
            "variables": {},
            "inventory_paths": (),
            **changes,
        }
        return ImageDefinition(**values)

    plain = manifests.definition_digest(definition())
    assert manifests.definition_digest(definition(mirror="http://mirror.example/debian")) == plain
    assert manifests.definition_digest(definition(variables={"a": 1})) != plain
    assert manifests.definition_digest(definition(formats=("vhd",))) != plain
