"""The plan for publishing: every request that changes something, in order, as data that ``run`` executes as is.

The API versions of Microsoft.Compute below are the oldest that have everything needed. Newer ones make a definition
Trusted Launch by default and start an hour-long validation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from image_builder.bake.formats.vhd import FOOTER_SIZE
from image_builder.canonical import JSON
from image_builder.definition.model import ImageGallery
from image_builder.errors import PublishError
from image_builder.gallery.artefact import Artefact
from image_builder.gallery.pages import Range
from image_builder.gallery.tags import BUILD_TAG, DEFINITION_TAG, LOCK_TAG, SHA256_TAG, SUITE_TAG

GALLERY_API, DISK_API, IMAGE_API = "2024-03-03", "2024-03-02", "2024-07-01"
# How long an upload's signed URL is valid; then another one is requested.
ACCESS_SECONDS = 4 * 3600
# Bytes per second that Azure writes to a Standard HDD of up to 64 GiB, which an upload's disk is.
_DISK_SPEED = 60 << 20
_PREFIX = "image-builder"
# The security type whose versions Azure makes of a managed image, but of no disk (400 InvalidParameter: "Currently only
# Vhd Blob, User Image and Gallery Image Version sources are supported for 'TrustedLaunchSupported' images").
_OF_IMAGES = "TrustedLaunchSupported"

Step = Literal["definition", "disk", "access", "pages", "footer", "release", "image", "version", "clean"]


@dataclass(frozen=True)
class Call:
    """A request to Resource Manager, with path, API version and body as they are sent."""

    step: Step
    method: Literal["PUT", "POST", "PATCH", "DELETE"]
    path: str
    api: str
    body: Mapping[str, Any] | None = None

    def as_json(self) -> dict[str, JSON]:
        return {
            "step": self.step,
            "method": self.method,
            "path": self.path,
            "api_version": self.api,
            "body": self.body,
        }


@dataclass(frozen=True)
class Pages:
    """Put Page requests to the disk, one for each of ``ranges``."""

    step: Literal["pages", "footer"]
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        return sum(end - start for start, end in self.ranges)

    def as_json(self) -> dict[str, JSON]:
        return {
            "step": self.step,
            "method": "PUT",
            "path": "?comp=page",
            "requests": len(self.ranges),
            "bytes": self.size,
            "ranges": self.ranges,
        }


@dataclass(frozen=True)
class Target:
    """An image definition in a gallery, by Azure's ids."""

    settings: ImageGallery

    @property
    def group(self) -> str:
        return f"/subscriptions/{self.settings.subscription}/resourceGroups/{self.settings.resource_group}"

    @property
    def gallery(self) -> str:
        return f"{self.group}/providers/Microsoft.Compute/galleries/{self.settings.gallery}"

    @property
    def definition(self) -> str:
        return f"{self.gallery}/images/{self.settings.definition}"

    @property
    def name(self) -> str:
        """Return the name that distinguishes the definition from others in its resource group."""
        return f"{self.settings.gallery}/{self.settings.definition}"

    @property
    def location(self) -> str:
        return self.settings.regions[0].name

    @property
    def public_key(self) -> Path | None:
        """Return the file of the key with which the inventory wants statements verified."""
        return Path(self.settings.public_key) if self.settings.public_key else None

    def version(self, name: str) -> str:
        return f"{self.definition}/versions/{name}"

    def disk(self, artefact: Artefact) -> str:
        """Return the id of an upload's disk: the same for the same bytes, no matter who uploads them."""
        return f"{self.group}/providers/Microsoft.Compute/disks/{_name(artefact)}"

    def image(self, artefact: Artefact) -> str:
        """Return the id of the managed image made of an upload's disk."""
        return f"{self.group}/providers/Microsoft.Compute/images/{_name(artefact)}"


def _name(artefact: Artefact) -> str:
    return f"{_PREFIX}-{artefact.build}-{artefact.sha256[:12]}"


@dataclass(frozen=True)
class Plan:
    """Everything that is sent for one image."""

    target: Target
    artefact: Artefact
    version: str
    steps: tuple[Call | Pages, ...]
    unverified: str = ""

    @property
    def disk(self) -> str:
        return self.target.disk(self.artefact)

    @property
    def size(self) -> int:
        """Return the number of bytes that are sent."""
        return sum(step.size for step in self.steps if isinstance(step, Pages))

    def estimate(self) -> dict[str, float]:
        """Return the upload's minimum seconds and, given the user's prices, the replicas' monthly and one-time cost.

        Azure bills each replica by the space it occupies, and a copy to each additional region.
        """
        settings, gib = self.target.settings, self.size / (1 << 30)
        estimate = {"seconds": round(self.size / _DISK_SPEED, 1)}
        if settings.prices:
            replicas = sum(region.replicas for region in settings.regions)
            estimate["month"] = round(gib * replicas * settings.prices.gib_month, 2)
            estimate["once"] = round(gib * (len(settings.regions) - 1) * settings.prices.gib_egress, 2)
        return estimate

    def as_json(self) -> dict[str, JSON]:
        return {
            "image": self.artefact.manifest.image,
            "build": self.artefact.build,
            "version": self.target.version(self.version),
            "bytes": self.size,
            "requests": sum(len(step.ranges) if isinstance(step, Pages) else 1 for step in self.steps),
            "estimate": self.estimate(),
            "calls": [step.as_json() for step in self.steps],
        }


def next_version(existing: Iterable[str], today: date) -> str:
    """Return a day's next version, ``YYYY.MMDD.N``: three integers, so January 5 is 105."""
    prefix = f"{today.year}.{today.month * 100 + today.day}."
    numbers = [int(name.removeprefix(prefix)) for name in existing if name.startswith(prefix)]
    return f"{prefix}{max(numbers, default=-1) + 1}"


def _security_type(target: Target, artefact: Artefact) -> str:
    default = "TrustedLaunchSupported" if artefact.manifest.secure_boot else "Standard"
    return target.settings.security_type or default


def needs_image(target: Target, artefact: Artefact) -> bool:
    """Return whether versions of the definition are made of a managed image instead of a disk."""
    return _security_type(target, artefact) == _OF_IMAGES


def definition_properties(target: Target, artefact: Artefact) -> dict[str, Any]:
    """Return the properties that the definition must have for this image."""
    settings = target.settings
    secure = _security_type(target, artefact)
    features = {
        "IsAcceleratedNetworkSupported": "True",
        "DiskControllerTypes": ",".join(settings.disk_controllers),
    }
    if secure != "Standard":
        features["SecurityType"] = secure
    return {
        "osType": "Linux",
        "osState": "Generalized",
        "hyperVGeneration": "V2",
        "architecture": "x64",
        "identifier": {
            "publisher": settings.publisher,
            "offer": settings.definition,
            "sku": "gen2",
        },
        "features": [{"name": name, "value": value} for name, value in sorted(features.items())],
    }


def definition_problems(actual: Mapping[str, Any], planned: Mapping[str, Any]) -> list[str]:
    """Return how a definition differs from what the image needs. Its identifier is up to its owner."""

    def comparable(properties: Mapping[str, Any]) -> dict[str, Any]:
        features = {f["name"]: f["value"] for f in properties.get("features") or ()}
        if "DiskControllerTypes" in features:
            features["DiskControllerTypes"] = ",".join(
                sorted(part.strip() for part in features["DiskControllerTypes"].split(","))
            )
        plain = {name: properties.get(name) for name in ("osType", "osState", "hyperVGeneration")}
        # An answer without an architecture means x64.
        return (
            plain
            | {"architecture": properties.get("architecture") or "x64"}
            | {
                name: features.get(name, "Standard" if name == "SecurityType" else None)
                for name in ("SecurityType", "IsAcceleratedNetworkSupported", "DiskControllerTypes")
            }
        )

    ours, others = comparable(planned), comparable(actual)
    return [
        f"{name} is {others[name]}, the image needs {ours[name]}"
        for name in ours
        if ours[name] != others[name]
    ]


def make_plan(
    target: Target,
    artefact: Artefact,
    version: str,
    ranges: Sequence[Range],
    *,
    now: datetime,
    creates_definition: bool,
    unverified: str = "",
) -> Plan:
    """Return the plan for publishing an artifact as a version from scratch; the version's life begins ``now``.

    ``unverified`` is why an image without its verifications is published.
    """
    disk, image = target.disk(artefact), target.image(artefact)
    of_image = needs_image(target, artefact)
    tags = {
        BUILD_TAG: artefact.build,
        SHA256_TAG: artefact.sha256,
        f"{_PREFIX}-manifest-sha256": artefact.manifest_sha256,
        LOCK_TAG: artefact.manifest.lock_sha256,
        SUITE_TAG: artefact.suite,
        **({f"{_PREFIX}-unverified": unverified[:256]} if unverified else {}),
    }
    location = {"location": target.location}
    source = {**location, "tags": {**tags, DEFINITION_TAG: target.name}}
    steps: list[Call | Pages] = []
    if creates_definition:
        body = {**location, "properties": definition_properties(target, artefact)}
        steps.append(Call("definition", "PUT", target.definition, GALLERY_API, body))
    end = artefact.size - FOOTER_SIZE
    steps += [
        Call("disk", "PUT", disk, DISK_API, {**source, **_disk(artefact)}),
        Call(
            "access",
            "POST",
            f"{disk}/beginGetAccess",
            DISK_API,
            {"access": "Write", "durationInSeconds": ACCESS_SECONDS},
        ),
        Pages("pages", tuple(ranges)),
        Pages("footer", ((end, artefact.size),)),
        Call("release", "POST", f"{disk}/endGetAccess", DISK_API),
        *([Call("image", "PUT", image, IMAGE_API, {**source, **_image(disk)})] if of_image else []),
        Call(
            "version",
            "PUT",
            target.version(version),
            GALLERY_API,
            {**location, "tags": tags, "properties": _version(target, artefact, now)},
        ),
        *([Call("clean", "DELETE", image, IMAGE_API)] if of_image else []),
        Call("clean", "DELETE", disk, DISK_API),
    ]
    return Plan(target, artefact, version, tuple(steps), unverified)


def _disk(artefact: Artefact) -> dict[str, Any]:
    return {
        "sku": {"name": "Standard_LRS"},
        "properties": {
            "osType": "Linux",
            "hyperVGeneration": "V2",
            "creationData": {"createOption": "Upload", "uploadSizeBytes": artefact.size},
        },
    }


def _image(disk: str) -> dict[str, Any]:
    os_disk = {"osType": "Linux", "osState": "Generalized", "managedDisk": {"id": disk}}
    return {"properties": {"hyperVGeneration": "V2", "storageProfile": {"osDisk": os_disk}}}


def _source(target: Target, artefact: Artefact) -> dict[str, Any]:
    """Return a version's storage profile, in which a managed image and a disk have different places."""
    if needs_image(target, artefact):
        return {"source": {"id": target.image(artefact)}}
    return {"osDiskImage": {"source": {"id": target.disk(artefact)}}}


def _version(target: Target, artefact: Artefact, now: datetime) -> dict[str, Any]:
    end = now.astimezone(UTC) + timedelta(days=target.settings.end_of_life_days)
    return {
        "publishingProfile": {
            "excludeFromLatest": True,
            "endOfLifeDate": end.strftime("%Y-%m-%dT00:00:00Z"),
            "storageAccountType": "Standard_LRS",
            "targetRegions": [
                {"name": region.name, "regionalReplicaCount": region.replicas}
                for region in target.settings.regions
            ],
        },
        "storageProfile": _source(target, artefact),
        "safetyProfile": {
            "allowDeletionOfReplicatedLocations": True,
            "blockDeletionBeforeEndOfLife": True,
        },
        **({"securityProfile": _firmware(artefact.certificate)} if artefact.certificate else {}),
    }


def _firmware(certificate: str) -> dict[str, Any]:
    """Return a security profile for firmware that knows Microsoft's certificates and one more."""
    return {
        "uefiSettings": {
            "signatureTemplateNames": ["MicrosoftUefiCertificateAuthorityTemplate"],
            "additionalSignatures": {"db": [{"type": "x509", "value": [certificate]}]},
        }
    }


def require_free(version: Mapping[str, Any], artefact: Artefact) -> None:
    """Raise PublishError if a version contains other bytes than this artifact."""
    sha256 = (version.get("tags") or {}).get(SHA256_TAG)
    if sha256 != artefact.sha256:
        raise PublishError(
            f"{version.get('id')} is of another image: {SHA256_TAG} is {sha256 or 'missing'}",
            hint="nothing was changed; a version is never written again: publish with the next number",
        )
