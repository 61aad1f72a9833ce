"""The uses of each version: models of scale sets, their instances, and single machines, in whole subscriptions.

A list that can't be read in full, or a machine that doesn't report its version, is an error: unknown isn't unused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from image_builder.errors import FetchError, PublishError
from image_builder.gallery.azure import Service
from image_builder.gallery.plan import Target

_API = "2024-07-01"
LATEST = "latest"


@dataclass(frozen=True)
class Use:
    """A use by ``owner`` (an id) of a version, or LATEST: as its model, or by ``machines`` that run it."""

    owner: str
    kind: Literal["model", "machines"]
    version: str
    machines: int = 0


def read(
    service: Service, target: Target, subscriptions: Iterable[str], lacking: Sequence[str] = ()
) -> list[Use]:
    """Return every use of the definition's versions in these subscriptions.

    Raises FetchError with everything that can't be read, after the rights that are already ``lacking``, or PublishError
    if there are only those.
    """
    reading = _Reading(service, target)
    for subscription in subscriptions:
        provider = f"/subscriptions/{subscription}/providers/Microsoft.Compute"
        for scale_set in reading.items(f"{provider}/virtualMachineScaleSets"):
            reading.note_scale_set(scale_set)
        # These include the machines of Flexible scale sets.
        for machine in reading.items(f"{provider}/virtualMachines"):
            reading.note_machines(machine["id"], [machine])
    if problems := [*lacking, *reading.problems]:
        kind = FetchError if reading.problems else PublishError
        raise kind(
            "\n".join(["nothing was changed:", *(f"  {problem}" for problem in problems)]),
            hint="docs/how-to/publish.md has the rights; what can't be read is never unused",
        )
    return reading.uses


@dataclass
class _Reading:
    """The uses found, and what can't be read."""

    service: Service
    target: Target
    uses: list[Use] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def items(self, path: str) -> list[Mapping[str, Any]]:
        """Return a whole list; if it can't be read, note that and return an empty one."""
        try:
            return list(self.service.list(path, _API))
        except FetchError as error:
            self.problems.append(error.message)
            return []

    def note_scale_set(self, scale_set: Mapping[str, Any]) -> None:
        properties = scale_set["properties"]
        profile = properties.get("virtualMachineProfile") or {}
        if version := _version(self.target, profile, is_model=True):
            self.uses.append(Use(scale_set["id"], "model", version))
        if properties.get("orchestrationMode") != "Flexible":
            self.note_machines(scale_set["id"], self.items(f"{scale_set['id']}/virtualMachines"))

    def note_machines(self, owner: str, machines: Sequence[Mapping[str, Any]]) -> None:
        versions = []
        for machine in machines:
            version = _version(self.target, machine["properties"], is_model=False)
            if version == LATEST:
                self.problems.append(f"{machine['id']} runs an unknown version of {self.target.definition}")
            elif version:
                versions.append(version)
        self.uses += [Use(owner, "machines", name, versions.count(name)) for name in dict.fromkeys(versions)]


def _shared(reference: Mapping[str, Any], target: Target) -> str:
    """Return the id of what a reference names by its gallery's unique or public name, if that may be the definition.

    The unique name has subscription and gallery: https://learn.microsoft.com/azure/virtual-machines/share-gallery-direct.
    A public name says nothing of either: an image of the same name counts as the target's.
    """
    shared = str(reference.get("sharedGalleryImageId") or "").lower()
    name, _, image = (shared or str(reference.get("communityGalleryImageId") or "").lower()).partition(
        "/images/"
    )
    settings = target.settings
    if shared and name != f"/sharedgalleries/{settings.subscription}-{settings.gallery}".lower():
        return ""
    wanted = target.definition.lower().rpartition("/images/")[2]
    if image != wanted and not image.startswith(f"{wanted}/versions/"):
        return ""
    return f"{target.definition}{image.removeprefix(wanted)}"


def _version(target: Target, profile: Mapping[str, Any], *, is_model: bool) -> str:
    """Return the version of the target's definition that a profile names, LATEST if none, "" for another image."""
    reference = (profile.get("storageProfile") or {}).get("imageReference") or {}
    definition = target.definition.lower()
    image = str(reference.get("id") or _shared(reference, target)).lower()
    if image != definition and not image.startswith(f"{definition}/versions/"):
        return ""
    named = image.removeprefix(definition).removeprefix("/versions/")
    return str((not is_model and reference.get("exactVersion")) or named or LATEST)
