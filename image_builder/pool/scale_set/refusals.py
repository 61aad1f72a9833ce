"""The reasons why a scale set must not be brought to a version: all at once, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime

from image_builder.pool.scale_set.model import ScaleSet, Version, is_same_id


def policy_refusals(scale_set: ScaleSet, *, force_ephemeral: bool = False) -> list[str]:
    """Return why this scale set's instances can't be replaced one by one; checked again before its model changes."""
    return list(_policy(scale_set, force_ephemeral=force_ephemeral))


def refusals(
    scale_set: ScaleSet,
    present: Version | None,
    target: Version,
    now: datetime,
    *,
    force_ephemeral: bool = False,
) -> list[str]:
    """Return why this scale set can't be brought from its ``present`` version (None: doesn't exist) to another one."""
    return [
        *_policy(scale_set, force_ephemeral=force_ephemeral),
        *_unfit(target, scale_set, now),
        *_differences(present, target),
        *_unsupported(scale_set, present, target),
    ]


def retirement(version: Version, now: datetime) -> Iterator[str]:
    """Yield why nothing may be brought to a version any more, however fit it was."""
    if version.withdrawn:
        yield f"version {version.name} was withdrawn: {version.withdrawn}"
    if version.end_of_life and datetime.fromisoformat(version.end_of_life) <= now:
        yield f"version {version.name} is past its end of life: {version.end_of_life}"


def _policy(scale_set: ScaleSet, *, force_ephemeral: bool) -> Iterator[str]:
    if scale_set.is_flexible:
        yield "its orchestration mode is Flexible: only Uniform scale sets are reimaged in place"
    elif scale_set.mode != "Manual":
        # Automatic replaces every instance as soon as the model changes.
        yield f"its upgrade policy is {scale_set.mode or 'unknown'}, not Manual: Azure would replace busy nodes"
    if scale_set.is_upgraded_by_azure:
        yield "automatic OS upgrade is on: Azure would replace busy nodes"
    if not scale_set.is_pinned:
        yield f"its model names no version of a gallery's image: {scale_set.image or 'an image of another kind'}"
    if scale_set.is_ephemeral and not force_ephemeral:
        yield "its OS disks are ephemeral: a reimage brings the old version back unless `roll.force_ephemeral` is set"


def _unfit(version: Version, scale_set: ScaleSet, now: datetime) -> Iterator[str]:
    if version.state != "Succeeded":
        yield f"version {version.name} is {version.state or 'in an unknown state'}"
    state = version.regions.get(scale_set.location, "not replicated")
    if state != "Completed":
        yield f"version {version.name} isn't in {scale_set.location}: {state}"
    yield from retirement(version, now)
    if not version.build:
        yield f"version {version.name} names no build: a node that runs it couldn't be recognized"
    if scale_set.disk_gib is not None and (version.disk_gib or 0) > scale_set.disk_gib:
        yield f"version {version.name} needs {version.disk_gib} GiB, its OS disks have {scale_set.disk_gib}"


def _unsupported(scale_set: ScaleSet, present: Version | None, target: Version) -> Iterator[str]:
    """Yield what the machines are and a version's definition doesn't support, unless the present one's doesn't either:
    Azure fills in features that a definition lacks.
    """
    before = dict(_missing(scale_set, present.features)) if present else {}
    for name, machines in _missing(scale_set, target.features):
        if present and name not in before:
            supported = target.features.get(name) or "nothing"
            yield f"its machines have {name} {machines}, version {target.name} is for {supported}"


def _missing(scale_set: ScaleSet, features: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the features of a definition that don't cover the machines, and what these have."""
    security = scale_set.security_type.removeprefix("Standard")
    secure = features.get("SecurityType", "")
    # `TrustedLaunchAndConfidentialVmSupported` covers both kinds, and machines without either.
    if security and security.removesuffix("VM").lower() not in secure.lower():
        yield "SecurityType", security
    if not security and secure in ("TrustedLaunch", "ConfidentialVM"):
        yield "SecurityType", "Standard"
    controllers = [name.strip().lower() for name in features.get("DiskControllerTypes", "SCSI").split(",")]
    if scale_set.disk_controller and scale_set.disk_controller.lower() not in controllers:
        yield "DiskControllerTypes", scale_set.disk_controller


def _differences(present: Version | None, target: Version) -> Iterator[str]:
    if present is None:
        yield "the version that its model names doesn't exist: a rollback would be impossible"
        return
    if present.architecture != target.architecture:
        yield f"version {target.name} is for {target.architecture}, its machines are {present.architecture}"
    if present.generation != target.generation:
        yield f"version {target.name} is of generation {target.generation}, its machines of {present.generation}"
    # For example, images that differ only in kernel arguments: a build's id is that of its tree.
    if present.build and present.build == target.build and not is_same_id(present.id, target.id):
        both = f"versions {target.name} and {present.name} are of the same build"
        yield f"{both}: a node couldn't tell which one it runs"
