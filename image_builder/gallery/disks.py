"""The disks of a definition's uploads that are still there: of runs that were given up, or that go on."""

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
    """``state`` is Azure's, ``owner`` the machine that has it or empty, ``sha256`` the digest of what is uploaded."""

    id: str
    state: str
    created: datetime
    sha256: str
    owner: str = ""

    @property
    def name(self) -> str:
        return self.id.rsplit("/", 1)[1]


def read(service: Service, target: Target) -> list[UploadDisk]:
    """Return the definition's upload disks, by their tag; raises FetchError for one that can't be read."""
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
    """Delete a disk, which is for its caller to prove unused; raises PublishError."""
    call = Call("clean", "DELETE", disk.id, DISK_API)
    service.change(call, lambda: service.get(disk.id, DISK_API) is None)
