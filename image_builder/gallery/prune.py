"""The versions and uploads that may be deleted, and why others may not. Pure functions of what was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from image_builder.canonical import JSON
from image_builder.gallery.disks import UploadDisk, UploadImage
from image_builder.gallery.uses import LATEST, Use
from image_builder.gallery.versions import Version

# Azure's states of a disk whose upload has begun or is complete, and that no machine has.
_LEFT_OVER = ("ReadyToUpload", "ActiveUpload", "Unattached")
_LONGEST_UPLOAD = timedelta(days=1)


@dataclass(frozen=True)
class Verdict:
    """A version, a disk or an image, and every reason to keep it; without any, it is proved unused."""

    kind: Literal["version", "disk", "image"]
    name: str
    reasons: tuple[str, ...]

    @property
    def is_unused(self) -> bool:
        return not self.reasons

    def as_json(self) -> dict[str, JSON]:
        return {self.kind: self.name, "unused": self.is_unused, "reasons": list(self.reasons)}


def judge(versions: Sequence[Version], uses: Sequence[Use], now: datetime) -> list[Verdict]:
    """Return a verdict on each of a definition's versions, which are sorted newest first."""
    return [
        Verdict("version", version.name, tuple(_reasons(version, is_newest=number == 0, uses=uses, now=now)))
        for number, version in enumerate(versions)
    ]


def judge_disks(disks: Sequence[UploadDisk], versions: Sequence[Version], now: datetime) -> list[Verdict]:
    """Return a verdict on each upload disk of a definition that publishing hasn't deleted."""
    return [Verdict("disk", disk.name, tuple(_disk_reasons(disk, versions, now))) for disk in disks]


def _disk_reasons(disk: UploadDisk, versions: Sequence[Version], now: datetime) -> list[str]:
    reasons = []
    if disk.state not in _LEFT_OVER:
        reasons.append(f"it is {disk.state}")
    if disk.owner:
        reasons.append(f"{disk.owner.rsplit('/', 1)[1]} uses it")
    if now - disk.created < _LONGEST_UPLOAD:
        reasons.append("it is less than a day old: an upload may be in progress")
    return reasons + _copies(disk.sha256, versions)


def judge_images(
    images: Sequence[UploadImage], disks: Sequence[Verdict], versions: Sequence[Version]
) -> list[Verdict]:
    """Return a verdict on each managed image; Azure doesn't tell its age, but publishing deletes it before its disk.

    ``disks`` are the verdicts on all upload disks, which must have been read after the images.
    """
    kept = {disk.name for disk in disks if not disk.is_unused}
    return [
        Verdict(
            "image",
            image.name,
            (*(["its disk is kept"] if image.name in kept else ()), *_copies(image.sha256, versions)),
        )
        for image in images
    ]


def _copies(sha256: str, versions: Sequence[Version]) -> list[str]:
    """Return why an upload is kept that versions are still being copied from."""
    return [
        f"{version.name} was made from it and isn't in every region yet"
        for version in versions
        if version.sha256 == sha256 and not version.is_everywhere
    ]


def _reasons(version: Version, *, is_newest: bool, uses: Sequence[Use], now: datetime) -> list[str]:
    reasons = []
    if not version.build:
        reasons.append("it wasn't published by image-builder")
    if is_newest:
        reasons.append("it is the newest")
    if version.in_latest:
        reasons.append("it is in latest")
    if not version.end_of_life:
        reasons.append("it has no end of life")
    elif datetime.fromisoformat(version.end_of_life) > now:
        reasons.append(f"its life ends {version.end_of_life[:10]}")
    for use in uses:
        owner = use.owner.rsplit("/", 1)[1]
        if use.version == version.name:
            reasons.append(
                f"{owner}'s model names it"
                if use.kind == "model"
                else f"{use.machines} machines of {owner} run it"
            )
        elif use.version == LATEST and version.in_latest:
            reasons.append(f"{owner} follows `latest`")
    return reasons
