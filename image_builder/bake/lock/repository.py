"""A flat apt repository of exactly the locked packages, for a sandbox without a network; packages' control files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from debian.arfile import ArError
from debian.deb822 import Deb822
from debian.debfile import DebError, DebFile

from image_builder.bake.lock.model import LockedPackage
from image_builder.errors import FetchError

# Where stages find it, and the configuration that makes apt see nothing else.
MOUNT_POINT = "/run/image-builder/repo"
SOURCES_LINE = f"deb [trusted=yes] copy:{MOUNT_POINT} ./"
APT_CONFIG_PATH = "/run/image-builder/apt/apt.conf"
# The packages were verified against the lock before they were put here, hence `trusted=yes`.
APT_CONFIG = """\
Dir::Etc::SourceList "/run/image-builder/apt/sources.list";
Dir::Etc::SourceParts "-";
Dir::State::Lists "/run/image-builder/apt/lists";
Dir::Cache "/run/image-builder/apt/cache";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Acquire::Languages "none";
Dpkg::Use-Pty "false";
Dpkg::Options { "--force-unsafe-io"; "--force-confdef"; "--force-confold"; };
"""


class NotAPackageError(ValueError):
    """The file is not a Debian package."""


def write_repository(packages: Iterable[LockedPackage], suite: str, cache: Path, target: Path) -> int:
    """Fill ``target`` with hard links to the cached packages and an index; return the bytes of packages.

    ``suite`` goes into the Release file: mmdebstrap looks for essential packages by the suite's name.

    ``cache`` holds the packages by SHA-256 and, next to each, the control stanza that was read from it. Raises
    FetchError for a file that is not a Debian package.
    """
    target.mkdir(parents=True)
    size = 0
    with (target / "Packages").open("w", encoding="utf-8") as index:
        for package in packages:
            name = f"{package.name}_{package.architecture}_{package.sha256[:16]}.deb"
            os.link(cache / package.sha256, target / name)
            control = _control(cache, package, target)
            index.write(f"{control}Filename: ./{name}\nSize: {package.size}\nSHA256: {package.sha256}\n\n")
            size += package.size
    packages_file = (target / "Packages").read_bytes()
    sha256 = hashlib.sha256(packages_file).hexdigest()
    (target / "Release").write_text(
        f"Suite: {suite}\nCodename: {suite}\nSHA256:\n {sha256} {len(packages_file)} Packages\n",
        encoding="utf-8",
    )
    return size


def _control(cache: Path, package: LockedPackage, scratch: Path) -> str:
    """Return a package's control stanza, from the cache if it was read before."""
    cached = cache / f"{package.sha256}.control"
    with suppress(FileNotFoundError):
        if text := cached.read_text(encoding="utf-8"):
            return text
    try:
        text = read_control(cache / package.sha256)
    except (NotAPackageError, OSError) as error:
        raise FetchError(f"{package.name} {package.version} is not a Debian package: {error}") from error
    partial = scratch / cached.name
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(cached)
    return text


def known_control(cache: Path, sha256: str) -> str:
    """Return a package's control stanza, from its control file or itself; empty if the cache has no sound one."""
    with suppress(FileNotFoundError):
        if text := (cache / f"{sha256}.control").read_text(encoding="utf-8", errors="replace"):
            return text
    with suppress(NotAPackageError, OSError):
        return read_control(cache / sha256)
    return ""


def read_control(package: Path) -> str:
    """Return a package's control stanza. Raises NotAPackageError, OSError."""
    try:
        with DebFile(filename=os.fspath(package)) as deb:
            return str(deb.debcontrol().dump())
    except (DebError, ArError) as error:
        raise NotAPackageError(str(error)) from error


def fields(control: str) -> dict[str, str]:
    """Return the fields of a control stanza, or none if it lacks a name, a version or an architecture."""
    try:
        stanza = {str(name): str(value) for name, value in Deb822(control).items()}
    except ValueError:
        return {}
    return stanza if {"Package", "Version", "Architecture"} <= stanza.keys() else {}
