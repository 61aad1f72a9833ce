"""The versions of an image definition, as the gallery has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from image_builder.canonical import JSON
from image_builder.gallery.azure import Service
from image_builder.gallery.plan import BUILD_TAG, GALLERY_API, Target


@dataclass(frozen=True)
class Version:
    """A version. ``build`` is empty where it isn't one of ours; times are as Azure writes them, or empty."""

    name: str
    build: str
    in_latest: bool
    published: str
    end_of_life: str
    state: str
    regions: Mapping[str, str]

    def as_json(self) -> dict[str, JSON]:
        return asdict(self)


def read(service: Service, target: Target) -> list[Version]:
    """Return all versions, the newest first, each with its replication; raises FetchError."""
    listed = [str(version["name"]) for version in service.list(f"{target.definition}/versions", GALLERY_API)]
    answers = [
        service.get(target.version(name), GALLERY_API, **{"$expand": "ReplicationStatus"})
        for name in sorted(listed, key=_order, reverse=True)
    ]
    return [parse(answer) for answer in answers if answer is not None]


def parse(answer: Mapping[str, Any]) -> Version:
    """Return a version of the service's JSON."""
    properties = answer["properties"]
    profile = properties.get("publishingProfile") or {}
    summary = (properties.get("replicationStatus") or {}).get("summary") or ()
    return Version(
        name=answer["name"],
        build=(answer.get("tags") or {}).get(BUILD_TAG, ""),
        in_latest=not profile.get("excludeFromLatest", False),
        published=profile.get("publishedDate", ""),
        end_of_life=profile.get("endOfLifeDate", ""),
        state=properties.get("provisioningState", ""),
        regions={region["region"]: region["state"] for region in summary},
    )


def _order(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdigit()]
