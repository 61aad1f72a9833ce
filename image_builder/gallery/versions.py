"""The versions of an image definition: those in the gallery, those eligible for `latest`, and those withdrawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from image_builder.canonical import JSON
from image_builder.errors import PublishError
from image_builder.gallery.azure import Service
from image_builder.gallery.plan import GALLERY_API, Call, Target
from image_builder.gallery.tags import (
    BUILD_TAG,
    LOCK_TAG,
    PROMOTED_TAG,
    SHA256_TAG,
    UNVERIFIED_TAG,
    WITHDRAWN_TAG,
)
from image_builder.text import stamp

# The longest tag value that Azure allows.
_LONGEST_TAG = 256


@dataclass(frozen=True)
class Version:
    """A version. ``build`` is empty if it isn't one of ours; times are as Azure writes them, or empty."""

    name: str
    build: str
    in_latest: bool
    published: str
    end_of_life: str
    state: str
    regions: Mapping[str, str]
    sha256: str = ""
    withdrawn: str = ""
    unverified: str = ""
    lock_sha256: str = ""

    @property
    def is_everywhere(self) -> bool:
        """Return whether every region has it."""
        return self.state == "Succeeded" and all(state == "Completed" for state in self.regions.values())

    def as_json(self) -> dict[str, JSON]:
        return asdict(self)


def read(service: Service, target: Target) -> list[Version]:
    """Return all versions, newest first, each with its replication. Raises FetchError."""
    listed = [str(version["name"]) for version in service.list(f"{target.definition}/versions", GALLERY_API)]
    answers = [
        service.get(target.version(name), GALLERY_API, **{"$expand": "ReplicationStatus"})
        for name in sorted(listed, key=_order, reverse=True)
    ]
    return [parse(answer) for answer in answers if answer is not None]


def parse(answer: Mapping[str, Any]) -> Version:
    """Return a version parsed from the service's JSON."""
    properties = answer["properties"]
    profile, tags = properties.get("publishingProfile") or {}, answer.get("tags") or {}
    summary = (properties.get("replicationStatus") or {}).get("summary") or ()
    return Version(
        name=answer["name"],
        build=tags.get(BUILD_TAG, ""),
        in_latest=not profile.get("excludeFromLatest", False),
        published=profile.get("publishedDate", ""),
        end_of_life=profile.get("endOfLifeDate", ""),
        state=properties.get("provisioningState", ""),
        regions={region["region"]: region["state"] for region in summary},
        sha256=tags.get(SHA256_TAG, ""),
        withdrawn=tags.get(WITHDRAWN_TAG, ""),
        unverified=tags.get(UNVERIFIED_TAG, ""),
        lock_sha256=tags.get(LOCK_TAG, ""),
    )


def find(service: Service, target: Target, name: str) -> Version:
    """Return a version. Raises PublishError if there is none, FetchError."""
    return parse(_get(service, target, name))


def promote(service: Service, target: Target, name: str, because: str, now: datetime) -> None:
    """Include a version in `latest`, which means the newest. Raises PublishError if it isn't fit, FetchError."""
    answer = _get(service, target, name)
    if problems := list(_unfit(parse(answer), now)):
        raise PublishError(
            "\n".join([f"{name} is not promoted:", *(f"  {problem}" for problem in problems)]),
            hint="nothing was changed",
        )
    _update(service, target, answer, {"excludeFromLatest": False}, {PROMOTED_TAG: because})


def withdraw(service: Service, target: Target, name: str, because: str, now: datetime) -> None:
    """Take a version out of `latest` and end its life; raises PublishError, FetchError."""
    profile = {"excludeFromLatest": True, "endOfLifeDate": stamp(now.timestamp())}
    _update(service, target, _get(service, target, name), profile, {WITHDRAWN_TAG: because})


def delete(service: Service, target: Target, name: str) -> None:
    """Delete a version; the caller must have proved it unused. Raises PublishError."""
    path = target.version(name)
    call = Call("clean", "DELETE", path, GALLERY_API)
    service.change(call, lambda: service.get(path, GALLERY_API) is None)


def _unfit(version: Version, now: datetime) -> Iterator[str]:
    if not version.build or not version.sha256:
        yield "it wasn't published by image-builder: its tags name no build"
    if version.withdrawn:
        yield f"it was withdrawn: {version.withdrawn}"
    if version.unverified:
        yield f"it wasn't verified: {version.unverified}"
    if version.end_of_life and datetime.fromisoformat(version.end_of_life) <= now:
        yield f"its life ended at {version.end_of_life}"
    if missing := [name for name, state in version.regions.items() if state != "Completed"]:
        yield f"it isn't in every region: {', '.join(missing)}"
    if version.state != "Succeeded":
        yield f"it is {version.state}"


def _get(service: Service, target: Target, name: str) -> Mapping[str, Any]:
    answer = service.get(target.version(name), GALLERY_API, **{"$expand": "ReplicationStatus"})
    if answer is None:
        raise PublishError(
            f"no version {name} in {target.definition}", hint="image-builder publish status IMAGE"
        )
    return answer


def _update(
    service: Service,
    target: Target,
    answer: Mapping[str, Any],
    profile: Mapping[str, Any],
    tags: Mapping[str, str],
) -> None:
    """Change a version: its profile and tags are sent in full, since Azure removes what isn't sent."""
    whole = whole_profile(answer, profile)
    short = {name: value[:_LONGEST_TAG] for name, value in tags.items()}
    body = {"tags": (answer.get("tags") or {}) | short, "properties": {"publishingProfile": whole}}
    path = target.version(answer["name"])

    def is_done() -> bool:
        present = (service.get(path, GALLERY_API) or {}).get("tags") or {}
        return short.items() <= present.items()

    service.change(Call("version", "PATCH", path, GALLERY_API, body), is_done)


def whole_profile(answer: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a version's publishing profile with some changes, as it has to be sent."""
    whole = {**answer["properties"]["publishingProfile"], **changes}
    whole.pop("publishedDate", None)  # set by the service
    return whole


def _order(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdigit()]
