"""The upload disks of a definition that still exist, from abandoned runs or from runs in progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from image_builder.errors import FetchError
from image_builder.gallery.azure import Service
from image_builder.gallery.plan import DISK_API, Call, Target
from image_builder.gallery.tags import DEFINITION_TAG, SHA256_TAG


@dataclass(frozen=True)
class UploadDisk:
    """A disk: Azure's ``state``, its ``owner`` (a machine, or empty), and the ``sha256`` of what is uploaded to it."""

    id: str
    state: str
    created: datetime
    sha256: str
    owner: str = ""

    @property
    def name(self) -> str:
        return self.id.rsplit("/", 1)[1]


def read(service: Service, target: Target) -> list[UploadDisk]:
    """Return the definition's upload disks, found by their tag. Raises FetchError if one can't be read."""
    path = f"{target.group}/providers/Microsoft.Compute/disks"
    return [
        _parse(disk)
        for disk in service.list(path, DISK_API)
        if (disk.get("tags") or {}).get(DEFINITION_TAG) == target.name
    ]


def _parse(disk: Mapping[str, Any]) -> UploadDisk:
    properties = disk.get("properties") or {}
    try:
        return UploadDisk(
            id=disk["id"],
            state=properties["diskState"],
            created=datetime.fromisoformat(properties["timeCreated"]),
            sha256=disk["tags"][SHA256_TAG],
            owner=disk.get("managedBy") or "",
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FetchError(
            f"{disk.get('id')} can't be judged: {error!r}", hint="nothing was changed"
        ) from error


def delete(service: Service, disk: UploadDisk) -> None:
    """Delete a disk; the caller must have proved it unused. Raises PublishError."""
    call = Call("clean", "DELETE", disk.id, DISK_API)
    service.change(call, lambda: service.get(disk.id, DISK_API) is None)
