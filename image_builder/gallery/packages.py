"""The packages of a published version that are out of date in the image's repositories: compares two locks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from debian.debian_support import version_compare

from image_builder.bake.lock.model import SECURITY, Lock, LockedPackage
from image_builder.canonical import digest
from image_builder.errors import LockError
from image_builder.gallery.versions import Version
from image_builder.text import short_list


@dataclass(frozen=True)
class Behind:
    """Packages that have newer versions, each as ``openssl 3.0.15-1 -> 3.0.17-1``.

    ``security`` is how many of them are in Debian's security archive. ``unknown`` is why they can't be compared.
    """

    packages: tuple[str, ...] = ()
    security: int = 0
    unknown: str = ""

    def __str__(self) -> str:
        """Return a description for people, empty if everything is up to date."""
        if self.unknown:
            return f"its packages can't be compared: {self.unknown}"
        if not self.packages:
            return ""
        return (
            f"{len(self.packages)} packages are behind, {self.security} of them security updates: "
            f"{short_list(self.packages, 3)}"
        )


def behind(builds: Path, version: Version, today: Lock, groups: Iterable[str]) -> Behind:
    """Return which packages of a version's image are behind today's lock.

    ``builds`` has a directory for each build; the lock in it must match the version's tag. ``groups`` are the lock's
    groups that are in the image.
    """
    try:
        published = Lock.load(builds / version.build / "lock.json")
    except LockError as error:
        return Behind(unknown=error.message)
    if not version.lock_sha256 or digest(published.as_json()) != version.lock_sha256:
        return Behind(unknown=f"the lock of build {version.build} isn't the one of the version's tag")
    names = list(groups)
    old, new = _packages(published, names), _packages(today, names)
    newer = [
        name
        for name in sorted(old.keys() & new.keys())
        if version_compare(new[name].version, old[name].version) > 0
    ]
    return Behind(
        tuple(f"{name} {old[name].version} -> {new[name].version}" for name in newer),
        sum(new[name].repository == SECURITY for name in newer),
    )


def _packages(lock: Lock, groups: Iterable[str]) -> dict[str, LockedPackage]:
    present = (lock.groups[name] for name in groups if name in lock.groups)
    return {package.name: package for group in present for package in group.packages}
