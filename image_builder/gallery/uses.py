"""Who uses which version: models of scale sets, their instances, and single machines, of whole subscriptions.

A list that can't be read whole, or a machine that doesn't say its version, is an error: what nobody knows isn't unused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from image_builder.errors import FetchError
from image_builder.gallery.azure import Service
from image_builder.gallery.plan import Target

_API = "2024-07-01"
LATEST = "latest"


@dataclass(frozen=True)
class Use:
    """``owner`` (an id) uses a version, or LATEST: as its model, or as ``machines`` that run it."""

    owner: str
    kind: Literal["model", "machines"]
    version: str
    machines: int = 0


def read(service: Service, target: Target, subscriptions: Iterable[str]) -> list[Use]:
    """Return every use of the definition's versions in these subscriptions; raises FetchError."""
    uses: list[Use] = []
    for subscription in subscriptions:
        provider = f"/subscriptions/{subscription}/providers/Microsoft.Compute"
        for scale_set in service.list(f"{provider}/virtualMachineScaleSets", _API):
            properties = scale_set["properties"]
            profile = properties.get("virtualMachineProfile") or {}
            if version := _version(target, profile, scale_set["id"], is_model=True):
                uses.append(Use(scale_set["id"], "model", version))
            if properties.get("orchestrationMode") != "Flexible":
                machines = service.list(f"{scale_set['id']}/virtualMachines", _API)
                uses += _counted(scale_set["id"], _versions(target, machines))
        # Those of Flexible scale sets are among them.
        for machine in service.list(f"{provider}/virtualMachines", _API):
            uses += _counted(machine["id"], _versions(target, [machine]))
    return uses


def _counted(owner: str, versions: Iterable[str]) -> list[Use]:
    names = list(versions)
    return [Use(owner, "machines", name, names.count(name)) for name in dict.fromkeys(names)]


def _versions(target: Target, machines: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for machine in machines:
        if version := _version(target, machine["properties"], machine["id"], is_model=False):
            yield version


def _version(target: Target, profile: Mapping[str, Any], owner: str, *, is_model: bool) -> str:
    """Return the version of the target's definition that a profile names, "" for another image; raises FetchError."""
    reference = (profile.get("storageProfile") or {}).get("imageReference") or {}
    image, definition = str(reference.get("id", "")).lower(), target.definition.lower()
    if image != definition and not image.startswith(f"{definition}/versions/"):
        return ""
    named = image.removeprefix(definition).removeprefix("/versions/")
    if is_model:
        return named if named and named != LATEST else LATEST
    version = str(reference.get("exactVersion") or named)
    if not version or version == LATEST:
        raise FetchError(
            f"{owner} runs an unknown version of {target.definition}", hint="nothing was changed"
        )
    return version
