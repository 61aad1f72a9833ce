"""Reasons not to delete a version: any single one is enough, and without one it is unused."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from image_builder.gallery.disks import UploadDisk, UploadImage
from image_builder.gallery.prune import judge, judge_disks, judge_images
from image_builder.gallery.uses import LATEST, Use
from image_builder.gallery.versions import Version

NOW = datetime(2026, 11, 25, tzinfo=UTC)
NEWEST = Version(
    "2026.1125.0", "ab" * 6, False, "2026-11-25T00:00:00Z", "2027-05-24T00:00:00Z", "Succeeded", {}
)
OLD = replace(NEWEST, name="2026.105.0", published="2026-01-05T00:00:00Z", end_of_life="2026-07-04T00:00:00Z")
SET = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachineScaleSets/gpu-a"


def _reasons(version: Version, *uses: Use) -> tuple[str, ...]:
    return judge([NEWEST, version], uses, NOW)[1].reasons


def test_an_old_version_that_nobody_uses_is_unused() -> None:
    assert _reasons(OLD) == ()
    assert _reasons(OLD, Use(SET, "machines", "2026.1125.0", 5), Use(SET, "model", LATEST)) == ()
    newest, old = judge([NEWEST, OLD], [], NOW)
    assert (newest.is_unused, old.is_unused) == (False, True)


@pytest.mark.parametrize(
    ("version", "uses", "reason"),
    [
        (replace(OLD, build=""), [], "it wasn't published by image-builder"),
        (replace(OLD, in_latest=True), [], "it is in latest"),
        (replace(OLD, end_of_life=""), [], "it has no end of life"),
        (replace(OLD, end_of_life="2026-11-26T00:00:00Z"), [], "its life ends 2026-11-26"),
        (OLD, [Use(SET, "model", "2026.105.0")], "gpu-a's model names it"),
        (OLD, [Use(SET, "machines", "2026.105.0", 3)], "3 machines of gpu-a run it"),
    ],
)
def test_one_reason_is_enough(version: Version, uses: list[Use], reason: str) -> None:
    assert _reasons(version, *uses) == (reason,)


def test_the_newest_is_kept_whatever_its_age() -> None:
    assert judge([OLD], [], NOW)[0].reasons == ("it is the newest",)


def test_whoever_takes_the_latest_keeps_those_in_latest() -> None:
    promoted = replace(OLD, in_latest=True)
    assert _reasons(promoted, Use(SET, "model", LATEST)) == (
        "it is in latest",
        "gpu-a follows `latest`",
    )


DISK = UploadDisk("/g/disks/image-builder-ab-12", "Unattached", NOW - timedelta(days=2), "12" * 32)
COPYING = replace(NEWEST, sha256="12" * 32, regions={"West US 3": "Completed", "East US": "Replicating"})


@pytest.mark.parametrize("state", ["ReadyToUpload", "ActiveUpload", "Unattached"])
def test_a_disk_that_an_upload_left_is_unused(state: str) -> None:
    copied = replace(COPYING, regions={"West US 3": "Completed"})
    (verdict,) = judge_disks([replace(DISK, state=state)], [copied, OLD], NOW)
    assert (verdict.kind, verdict.name, verdict.reasons) == ("disk", "image-builder-ab-12", ())


@pytest.mark.parametrize(
    ("disk", "reason"),
    [
        (replace(DISK, state="Attached"), "it is Attached"),
        (replace(DISK, owner="/g/virtualMachines/m"), "m uses it"),
        (
            replace(DISK, created=NOW - timedelta(hours=23)),
            "it is less than a day old: an upload may be in progress",
        ),
    ],
)
def test_one_reason_keeps_a_disk(disk: UploadDisk, reason: str) -> None:
    assert judge_disks([disk], [], NOW)[0].reasons == (reason,)


@pytest.mark.parametrize("version", [COPYING, replace(COPYING, state="Creating", regions={})])
def test_a_disk_that_a_version_is_still_copied_from_is_kept(version: Version) -> None:
    (verdict,) = judge_disks([DISK], [version], NOW)
    assert verdict.reasons == ("2026.1125.0 was made from it and isn't in every region yet",)


IMAGE = UploadImage("/g/images/image-builder-ab-12", "12" * 32)


@pytest.mark.parametrize(
    ("disks", "versions", "reasons"),
    [
        ([], [], ()),
        ([DISK], [], ()),
        ([replace(DISK, created=NOW)], [], ("its disk is kept",)),
        ([], [COPYING], ("2026.1125.0 was made from it and isn't in every region yet",)),
    ],
)
def test_an_image_goes_with_its_disk(
    disks: list[UploadDisk], versions: list[Version], reasons: tuple[str, ...]
) -> None:
    (verdict,) = judge_images([IMAGE], judge_disks(disks, versions, NOW), versions)
    assert (verdict.kind, verdict.name, verdict.reasons) == ("image", "image-builder-ab-12", reasons)
