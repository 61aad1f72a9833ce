"""The upload disks of a definition that still exist, from abandoned runs or from runs in progress.

Managed images that were made of them are here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from image_builder.errors import FetchError
from image_builder.gallery.azure import Service
from image_builder.gallery.plan import DISK_API, IMAGE_API, Call, Target
from image_builder.gallery.tags import DEFINITION_TAG, SHA256_TAG

_Left = TypeVar("_Left")


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


@dataclass(frozen=True)
class UploadImage:
    """A managed image made of a disk of the same name; ``sha256`` is that of its bytes."""

    id: str
    sha256: str

    @property
    def name(self) -> str:
        return self.id.rsplit("/", 1)[1]


def read(service: Service, target: Target) -> list[UploadDisk]:
    """Return the definition's upload disks, found by their tag. Raises FetchError if one can't be read."""
    return _tagged(service, target, "disks", DISK_API, _parse)


def read_images(service: Service, target: Target) -> list[UploadImage]:
    """Return the managed images of the definition's uploads, found by their tag; raises FetchError as ``read`` does."""
    return _tagged(
        service,
        target,
        "images",
        IMAGE_API,
        lambda image: UploadImage(image["id"], image["tags"][SHA256_TAG]),
    )


def _tagged(
    service: Service, target: Target, kind: str, api: str, parse: Callable[[Mapping[str, Any]], _Left]
) -> list[_Left]:
    parsed = []
    for resource in service.list(f"{target.group}/providers/Microsoft.Compute/{kind}", api):
        if (resource.get("tags") or {}).get(DEFINITION_TAG) == target.name:
            try:
                parsed.append(parse(resource))
            except (KeyError, TypeError, ValueError) as error:
                raise FetchError(
                    f"{resource.get('id')} can't be judged: {error!r}", hint="nothing was changed"
                ) from error
    return parsed


def _parse(disk: Mapping[str, Any]) -> UploadDisk:
    properties = disk.get("properties") or {}
    return UploadDisk(
        id=disk["id"],
        state=properties["diskState"],
        created=datetime.fromisoformat(properties["timeCreated"]),
        sha256=disk["tags"][SHA256_TAG],
        owner=disk.get("managedBy") or "",
    )


def delete(service: Service, left: UploadDisk | UploadImage) -> None:
    """Delete a disk or an image; the caller must have proved it unused. Raises PublishError."""
    api = DISK_API if isinstance(left, UploadDisk) else IMAGE_API
    service.change(Call("clean", "DELETE", left.id, api), lambda: service.get(left.id, api) is None)
