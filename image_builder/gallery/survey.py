"""A survey of Azure for a target before anything is sent: what exists, and all that is in the way, in one go."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from image_builder.errors import PublishError
from image_builder.gallery import quota
from image_builder.gallery.artefact import Artefact
from image_builder.gallery.azure import Service
from image_builder.gallery.plan import (
    DISK_API,
    GALLERY_API,
    Target,
    definition_problems,
    definition_properties,
    needs_image,
)
from image_builder.gallery.tags import SHA256_TAG

_GROUP_API, _LOCATION_API, _PERMISSION_API = "2021-04-01", "2022-12-01", "2022-04-01"
# Azure rejects tokens and signed URLs from a clock that is further off.
_LARGEST_LAG = 300.0
# The rights that each command needs in the gallery's resource group, below Microsoft.Compute. The first ones are for
# definitions whose versions are made of a managed image.
IMAGE_RIGHTS = ("images/read", "images/write", "images/delete")
RIGHTS: Mapping[str, tuple[str, ...]] = {
    "run": (
        "galleries/read",
        "galleries/images/read",
        "galleries/images/versions/read",
        "galleries/images/versions/write",
        "disks/read",
        "disks/write",
        "disks/delete",
        "disks/beginGetAccess/action",
        "disks/endGetAccess/action",
    ),
    "promote": ("galleries/images/versions/read", "galleries/images/versions/write"),
    "withdraw": ("galleries/images/versions/read", "galleries/images/versions/write"),
    "age": ("galleries/images/versions/read",),
    "prune": ("galleries/images/versions/read", "disks/read", "images/read"),
    "prune --delete": (
        "galleries/images/versions/read",
        "galleries/images/versions/delete",
        "disks/read",
        "disks/delete",
        "images/read",
        "images/delete",
    ),
}


class Lister(Protocol):
    """A client that lists Azure resources, page by page."""

    def list(self, path: str, api: str, **query: str) -> Iterator[Any]: ...


@dataclass(frozen=True)
class Survey:
    """The definition, or None if it is to be created, and the versions in it."""

    definition: Mapping[str, Any] | None
    versions: tuple[Mapping[str, Any], ...]

    @property
    def names(self) -> list[str]:
        return [str(version["name"]) for version in self.versions]

    def published(self, artefact: Artefact) -> str | None:
        """Return the version that already has this artifact's bytes."""
        same = (v for v in self.versions if (v.get("tags") or {}).get(SHA256_TAG) == artefact.sha256)
        return next((str(version["name"]) for version in same), None)


def look(service: Service, target: Target, artefact: Artefact) -> Survey:
    """Return what exists. Raises PublishError with everything that is in the way, FetchError."""
    settings = target.settings
    if service.get(target.group, _GROUP_API) is None:
        raise PublishError(
            f"no resource group {settings.resource_group} in subscription {settings.subscription}",
            hint="image_gallery names another one, or you are signed in elsewhere: az account show",
        )
    problems = []
    if abs(service.clock_lag) > _LARGEST_LAG:
        problems.append(f"this host's clock is {abs(service.clock_lag):.0f} s off Azure's")
    if artefact.certificate and settings.security_type not in (None, "TrustedLaunchSupported"):
        problems.append("security_type must be TrustedLaunchSupported: no other takes a certificate")
    more = ["galleries/images/write"] if settings.create else []
    more += IMAGE_RIGHTS if needs_image(target, artefact) else ()
    problems += lacking_rights(service, target, "run", more)
    subscription = f"/subscriptions/{settings.subscription}"
    locations = {location["name"] for location in service.list(f"{subscription}/locations", _LOCATION_API)}
    problems += [
        f"the subscription has no region {region.name}"
        for region in settings.regions
        if region.name not in locations
    ]
    gallery = service.get(target.gallery, GALLERY_API)
    definition = service.get(target.definition, GALLERY_API) if gallery else None
    if gallery is None:
        problems.append(f"no gallery {settings.gallery} in resource group {settings.resource_group}")
    elif definition is None and not settings.create:
        problems.append(f"no image definition {settings.definition} in the gallery; `create: true` makes it")
    elif definition is not None:
        differences = definition_problems(definition["properties"], definition_properties(target, artefact))
        problems += [f"image definition {settings.definition}: {difference}" for difference in differences]
    is_readable = definition is not None and not problems
    versions = service.list(f"{target.definition}/versions", GALLERY_API) if is_readable else ()
    survey = Survey(definition, tuple(versions))
    if not survey.published(artefact):
        disk = None if problems else service.get(target.disk(artefact), DISK_API)
        problems += quota.problems(
            service,
            target,
            locations,
            {"StandardDiskCount": int(disk is None), "GalleryImage": int(definition is None)},
        )
    _refuse(problems)
    return survey


def require_rights(service: Service, target: Target, command: str) -> None:
    """Raise PublishError with all rights that a command lacks in the gallery's resource group, FetchError."""
    _refuse(lacking_rights(service, target, command))


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise PublishError(
            "\n".join(["nothing was changed:", *(f"  {problem}" for problem in problems)]),
            hint="prerequisites: docs/how-to/publish.md",
        )


def lacking_rights(service: Service, target: Target, command: str, more: Sequence[str] = ()) -> list[str]:
    """Return the rights that a command lacks in the gallery's resource group; raises FetchError."""
    return lacking_at(service, target.group, (*RIGHTS[command], *more))


def lacking_at(service: Lister, scope: str, actions: Iterable[str]) -> list[str]:
    """Return the rights that the caller lacks on a resource or a resource group (an id). Raises FetchError."""
    path = f"{scope}/providers/Microsoft.Authorization/permissions"
    return missing_rights(list(service.list(path, _PERMISSION_API)), actions)


def missing_rights(permissions: Sequence[Mapping[str, Any]], actions: Iterable[str]) -> list[str]:
    """Return the rights that a scope's permissions (as Microsoft.Authorization lists them) don't grant."""

    def is_allowed(action: str) -> bool:
        def matches(patterns: Sequence[str]) -> bool:
            return any(fnmatch.fnmatchcase(action.lower(), pattern.lower()) for pattern in patterns)

        return any(matches(p["actions"]) and not matches(p.get("notActions") or ()) for p in permissions)

    names = [f"Microsoft.Compute/{action}" for action in actions]
    return [f"the right {name} is missing" for name in names if not is_allowed(name)]
