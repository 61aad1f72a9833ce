"""A subscription's remaining quota in a region, according to Azure's own counters of Microsoft.Compute.

A counter that Azure doesn't list has no limit that could be queried. The inventory's own rules ensure the limits of a
single version (100 replicas, 2 TiB): at most 100 replicas, and a VHD of at most 1023 GiB.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from image_builder.errors import FetchError
from image_builder.gallery.azure import Service
from image_builder.gallery.plan import Target

_API = "2024-07-01"
_VERSIONS = "GalleryImageVersion"


def problems(
    service: Service, target: Target, locations: Container[str], first: Mapping[str, int]
) -> list[str]:
    """Return the counters that a version would exceed in its regions. Raises FetchError.

    ``first`` has counters of the first region, where disk and definition are created, and how much each grows.
    """
    lines = []
    for number, region in enumerate(target.settings.regions):
        if region.name in locations:
            needs = {_VERSIONS: 1, **(first if number == 0 else {})}
            lines += [
                f"{region.name}: {line}" for line in exceeded(_usages(service, target, region.name), needs)
            ]
    return lines


def _usages(service: Service, target: Target, region: str) -> list[Mapping[str, Any]]:
    subscription = f"/subscriptions/{target.settings.subscription}"
    path = f"{subscription}/providers/Microsoft.Compute/locations/{region}/usages"
    return list(service.list(path, _API))


def exceeded(usages: Sequence[Mapping[str, Any]], needs: Mapping[str, int]) -> list[str]:
    """Return which counters would exceed their limit. Raises FetchError if one can't be read."""
    lines = []
    for usage in usages:
        name = str((usage.get("name") or {}).get("value"))
        if not (added := needs.get(name, 0)):
            continue
        try:
            current, limit = int(usage["currentValue"]), int(usage["limit"])
        except (KeyError, TypeError, ValueError) as error:
            raise FetchError(f"the counter {name} is invalid: {usage}") from error
        if current + added > limit:
            label = usage["name"].get("localizedValue") or name
            lines.append(f"no quota for {label}: {current} of {limit} are used, {added} more needed")
    return lines
