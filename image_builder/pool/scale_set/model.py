"""A scale set, its instances and a gallery image version, as Azure Resource Manager reports them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from image_builder.gallery.tags import BUILD_TAG, SHA256_TAG, UNVERIFIED_TAG, WITHDRAWN_TAG
from image_builder.pool.plan.snapshot import is_flexible

Json = Mapping[str, Any]

# The first version of the API that knows both services that act on a scale set by themselves.
COMPUTE_API, GALLERY_API = "2025-04-01", "2024-03-03"
_LATEST = "latest"


def is_same_id(one: str, other: str) -> bool:
    """Return whether two ids are the same: Resource Manager ignores their case, and may return another."""
    return one.lower() == other.lower()


@dataclass(frozen=True)
class Version:
    """A gallery image version. ``regions`` are the states of its replication, by short region name.

    ``withdrawn`` and ``unverified`` are the reasons for that, from its tags. ``is_protected``: Azure doesn't delete it
    before its end of life. ``features`` are its definition's, by name.
    """

    id: str
    build: str = ""
    state: str = ""
    regions: Mapping[str, str] = field(default_factory=dict)
    end_of_life: str = ""
    withdrawn: str = ""
    sha256: str = ""
    unverified: str = ""
    disk_gib: int | None = None
    architecture: str = "x64"
    generation: str = ""
    is_protected: bool = False
    features: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.id.rpartition("/")[2]


@dataclass(frozen=True)
class ScaleSet:
    """A scale set's model. ``image`` is the id that its model names, empty for an image of another kind."""

    id: str
    etag: str
    location: str
    image: str
    mode: str
    is_upgraded_by_azure: bool
    is_flexible: bool
    is_ephemeral: bool
    disk_gib: int | None
    tags: Mapping[str, str]
    extensions: tuple[str, ...] = ()
    security_type: str = ""
    disk_controller: str = ""

    @property
    def is_pinned(self) -> bool:
        """Return whether the model names a specific version of a gallery image."""
        definition, _, version = self.image.lower().partition("/versions/")
        return "/galleries/" in definition and bool(version) and version != _LATEST

    @property
    def policy(self) -> tuple[object, ...]:
        """Return the settings that decide what replaces an instance, and with which image."""
        return self.image.lower(), self.mode, self.is_upgraded_by_azure, self.is_flexible, self.is_ephemeral


@dataclass(frozen=True)
class Instance:
    """An instance: ``image`` is the id of the version that Azure intends it to run, ``state`` its provisioning state.

    ``code`` is the error of the last operation that failed.
    """

    id: str
    vm_id: str
    image: str
    state: str
    code: str = ""
    has_latest_model: bool = False

    @property
    def is_at_rest(self) -> bool:
        return self.state.lower() in ("succeeded", "failed")

    @property
    def is_known(self) -> bool:
        """Return whether Azure says which version it runs."""
        return not self.image.endswith("/versions/")

    def runs(self, version: str) -> bool:
        return is_same_id(self.image, version)


def scale_set(answer: Json) -> ScaleSet:
    """Return a scale set from its JSON."""
    properties = answer["properties"]
    profile = properties.get("virtualMachineProfile") or {}
    storage = profile.get("storageProfile") or {}
    disk = storage.get("osDisk") or {}
    policy = properties.get("upgradePolicy") or {}
    extensions = (profile.get("extensionProfile") or {}).get("extensions") or ()
    return ScaleSet(
        id=answer["id"],
        etag=str(answer.get("etag") or ""),
        location=_short(answer["location"]),
        image=str((storage.get("imageReference") or {}).get("id") or ""),
        mode=str(policy.get("mode") or ""),
        is_upgraded_by_azure=bool(
            (policy.get("automaticOSUpgradePolicy") or {}).get("enableAutomaticOSUpgrade")
        ),
        is_flexible=is_flexible(answer),
        is_ephemeral="diffDiskSettings" in disk,
        disk_gib=disk.get("diskSizeGB"),
        tags=dict(answer.get("tags") or {}),
        extensions=tuple(str(extension.get("name")) for extension in extensions),
        security_type=str((profile.get("securityProfile") or {}).get("securityType") or ""),
        disk_controller=str(storage.get("diskControllerType") or ""),
    )


def instance(answer: Json) -> Instance:
    """Return an instance from its JSON, which includes its instance view if that was requested."""
    properties = answer["properties"]
    reference = (properties.get("storageProfile") or {}).get("imageReference") or {}
    statuses = (properties.get("instanceView") or {}).get("statuses") or ()
    codes = [str(status.get("code", "")).split("/") for status in statuses]
    definition = str(reference.get("id") or "").partition("/versions/")[0]
    return Instance(
        id=str(answer["instanceId"]),
        vm_id=str(properties.get("vmId") or "").lower(),
        # The reference may name no version, or that of the model; the one that runs is exactVersion.
        image=f"{definition}/versions/{reference.get('exactVersion') or ''}",
        state=str(properties.get("provisioningState") or ""),
        code=next((code[2] for code in codes if code[0] == "ProvisioningState" and len(code) > 2), ""),
        has_latest_model=bool(properties.get("latestModelApplied")),
    )


def version(answer: Json, definition: Json) -> Version:
    """Return a version from its JSON (with its replication status) and that of its image definition."""
    properties, tags = answer["properties"], answer.get("tags") or {}
    summary = (properties.get("replicationStatus") or {}).get("summary") or ()
    return Version(
        id=answer["id"],
        build=tags.get(BUILD_TAG, ""),
        state=str(properties.get("provisioningState") or ""),
        regions={_short(region["region"]): region["state"] for region in summary},
        end_of_life=(properties.get("publishingProfile") or {}).get("endOfLifeDate") or "",
        withdrawn=tags.get(WITHDRAWN_TAG, ""),
        sha256=tags.get(SHA256_TAG, ""),
        unverified=tags.get(UNVERIFIED_TAG, ""),
        disk_gib=((properties.get("storageProfile") or {}).get("osDiskImage") or {}).get("sizeInGB"),
        # A response without an architecture means x64.
        architecture=definition["properties"].get("architecture") or "x64",
        generation=definition["properties"].get("hyperVGeneration") or "V1",
        features={
            str(feature.get("name")): str(feature.get("value") or "")
            for feature in definition["properties"].get("features") or ()
        },
        is_protected=bool((properties.get("safetyProfile") or {}).get("blockDeletionBeforeEndOfLife")),
    )


def _short(region: str) -> str:
    """Return a region's short name: Azure writes `West US 3` as well as `westus3`."""
    return region.replace(" ", "").lower()
