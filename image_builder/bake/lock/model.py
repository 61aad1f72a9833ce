"""The lock: every byte that a bake takes from outside, by name, version and SHA-256.

A lock is made by ``resolve.py`` and used by everything else. Where the bytes are stored (the mirror) is not part of
it, except for third-party repositories, whose address identifies the bytes.
"""

from __future__ import annotations

import datetime
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, ValidationError

from image_builder.canonical import JSON, digest
from image_builder.errors import LockError
from image_builder.node import files as node_files
from image_builder.strict_yaml import Strict

FORMAT: Final = 1
# The ids of Debian's own repositories; those of third parties have their own names.
DEBIAN, SECURITY = "debian", "debian-security"
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class LockedFile(Strict):
    """A file of a repository: ``path`` is relative to the repository's base address."""

    name: str
    sha256: Sha256
    size: int = Field(ge=0)
    path: str
    repository: str


class LockedPackage(LockedFile):
    """A binary package (.deb)."""

    version: str
    architecture: str


class LockedArchive(Strict):
    """A file fetched by its address."""

    url: str
    sha256: Sha256


Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class LockedLayer(Strict):
    """A layer of a container image: ``digest`` and ``size`` of the compressed blob, ``diff_id`` of the tar."""

    digest: Digest
    size: int = Field(ge=0)
    diff_id: Digest


class LockedImage(Strict):
    """A container image as its tag was resolved when it was locked.

    ``digest`` is that of the index or manifest that the tag named, ``manifest`` that of the manifest for ``platform``,
    and ``config`` that of its configuration, which is Docker's image ID.
    """

    ref: str
    platform: str
    digest: Digest
    manifest: Digest
    config: Digest
    layers: list[LockedLayer]

    @property
    def size(self) -> int:
        """Return the bytes of all layers, compressed."""
        return sum(layer.size for layer in self.layers)


# Settings that matter only to nodes, not to an engine: changing them causes no pull.
_OF_THE_NODE = frozenset({"mode"})


class Image(LockedImage):
    """An image to preload: the definition's settings for it, and what it was locked to.

    A pull doesn't include the ``mode``: what nodes do with an image concerns only the store. It includes ``required``:
    a pull that left an image out must not count once the image is required.
    """

    pin: bool
    required: bool = True
    mode: Literal["copy", "reference", "archive"] = "reference"

    @classmethod
    def listed(cls, options: Sequence[Mapping[str, JSON]]) -> list[Self]:
        """Return the images in a stage's options."""
        return [cls.model_validate(image) for image in options]

    def for_pull(self) -> dict[str, JSON]:
        """Return the image as the option of a pull."""
        return self.model_dump(mode="json", exclude=set(_OF_THE_NODE))

    def for_store(self) -> dict[str, JSON]:
        """Return the image as the option of the preload store."""
        return self.model_dump(mode="json")


class Question(Strict):
    """A request to apt for one stage: package names, and where they may come from.

    ``repositories`` lists those of third parties, one line each: address, suites, components, digest of the key.
    """

    suite: str
    components: list[str]
    repositories: list[str] = Field(default_factory=list)
    requested: list[str]


class LockedGroup(Question):
    """The packages that one stage installs: the request, and everything that it resolved to.

    ``below`` is the digest of the groups that it was resolved on top of (see ``Lock.digest_of``); earlier versions
    didn't lock it.
    """

    packages: list[LockedPackage]
    below: Sha256 | None = None

    @property
    def digest(self) -> str:
        """Return the SHA-256 over the packages' own digests; order and origin don't count."""
        return digest(sorted(p.sha256 for p in self.packages))

    def differences(self, question: Question) -> list[str]:
        """Return why this doesn't answer a question, one sentence per difference."""
        reasons = []
        if question.suite != self.suite:
            reasons.append(f"locked for {self.suite}, not for {question.suite}")
        for field, requested, locked in (
            ("components", question.components, self.components),
            ("repositories", question.repositories, self.repositories),
        ):
            if sorted(requested) != sorted(locked):
                reasons.append(
                    f"{field}: locked {', '.join(locked) or 'none'}, asked for {', '.join(requested) or 'none'}"
                )
        if added := sorted(set(question.requested) - set(self.requested)):
            reasons.append(f"not locked: {', '.join(added)}")
        if gone := sorted(set(self.requested) - set(question.requested)):
            reasons.append(f"no longer asked for: {', '.join(gone)}")
        return reasons


class LockedSource(Strict):
    """A source package: its .dsc and the files that the .dsc names."""

    suite: str
    version: str
    files: list[LockedFile]


class Lock(Strict):
    """The lock of an image. ``source_date_epoch`` (seconds since 1970, UTC) is the date of a build's files.

    It is the newest of Debian's ``release_dates`` (those of the Release files that were read), or that of the last lock
    with the same base.
    """

    format: Literal[1] = FORMAT
    image: str
    source_date_epoch: int = Field(ge=0)
    repositories: dict[str, str | None]
    groups: dict[str, LockedGroup]
    release_dates: dict[str, int] = Field(default_factory=dict)
    sources: dict[str, LockedSource] = Field(default_factory=dict)
    archives: list[LockedArchive] = Field(default_factory=list)
    images: list[LockedImage] = Field(default_factory=list)
    # Images that aren't required and that no registry had.
    left_out: list[str] = Field(default_factory=list)

    def locked_image(self, ref: str) -> LockedImage | None:
        """Return what a reference is locked to; None for one that was left out."""
        return next((image for image in self.images if image.ref == ref), None)

    @property
    def without_address(self) -> set[str]:
        """Return third parties' repositories that files are locked from without their address.

        Earlier versions locked ``debian-backports`` that way.
        """
        files = [file for group in self.groups.values() for file in group.packages]
        used = {file.repository for file in (*files, *(f for s in self.sources.values() for f in s.files))}
        return {n for n, uri in self.repositories.items() if uri is None and n in used - {DEBIAN, SECURITY}}

    def group(self, name: str) -> LockedGroup:
        """Return a group; raises LockError when the lock was made for other stages."""
        try:
            return self.groups[name]
        except KeyError:
            raise LockError(
                f"the lock of {self.image} has no packages for stage {name}",
                hint="make a new one: image-builder lock",
            ) from None

    def digest_of(self, names: Sequence[str]) -> str:
        """Return the digest of the packages of groups, in the order in which they are installed."""
        return digest([self.groups[name].digest for name in names])

    def misfit(
        self,
        questions: Mapping[str, Question],
        sources: Mapping[str, str],
        archives: Sequence[LockedArchive],
    ) -> list[str]:
        """Return why this lock doesn't fit what a definition requires, one sentence per difference.

        ``sources`` maps the names of Debian source packages to their suites.
        """
        reasons = []
        for name in sorted(questions):
            if name not in self.groups:
                reasons.append(f"{name}: not locked")
            else:
                reasons += [
                    f"{name}: {difference}" for difference in self.groups[name].differences(questions[name])
                ]
        locked = {name: source.suite for name, source in self.sources.items()}
        if locked != dict(sources):
            reasons.append(f"source packages: locked {_pairs(locked)}, asked for {_pairs(sources)}")
        missing = {(a.url, a.sha256) for a in archives} - {(a.url, a.sha256) for a in self.archives}
        reasons += [f"archive not locked: {url}" for url, _ in sorted(missing)]
        reasons += [f"repository locked without its address: {name}" for name in sorted(self.without_address)]
        return reasons

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return warnings about an image of this lock that an operator should see, one sentence each."""
        base = self.groups.get("base")
        if base and DEBIAN in self.repositories and SECURITY not in self.repositories:
            return (f"{base.suite} was locked without its security updates: the mirror in use has none",)
        return ()

    def older_than(self, before: Lock) -> list[str]:
        """Return which Release files are older than those of an earlier lock, one sentence each.

        Debian's stable Release files never expire, so apt accepts an outdated mirror as current.
        """
        return [
            f"{name} is of {_date(date)} here, and was of {_date(earlier)} when it was locked before: "
            "the mirror in use has an old state"
            for name, date in sorted(self.release_dates.items())
            if date < (earlier := before.release_dates.get(name, date))
        ]

    def as_json(self) -> JSON:
        """Return the lock as JSON values."""
        value: JSON = self.model_dump(mode="json")
        return value

    def save(self, path: Path) -> None:
        """Write the lock, replacing ``path`` in one step, even with concurrent writers. Raises LockError."""
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
        text = json.dumps(self.as_json(), indent=1, sort_keys=True) + "\n"
        try:
            with partial.open("w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            partial.rename(path)
            node_files.sync_directory(path.parent)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise LockError(f"can't write the lock {path}: {error.strerror}") from error
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def remembered(cls, path: Path) -> Lock | None:
        """Read a lock, or return None if it is missing or in another format. Raises LockError."""
        with suppress(OSError, ValueError, AttributeError):
            if json.loads(path.read_bytes()).get("format", FORMAT) != FORMAT:
                return None
        return cls.load(path) if path.exists() else None

    @classmethod
    def load(cls, path: Path) -> Lock:
        """Read a lock. Raises LockError when it is missing or malformed."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise LockError(f"can't read the lock {path}: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise LockError(
                f"{path} is not a lock: {where}: {first['msg']}",
                hint="if it was one, of another version or cut short, remove it: image-builder lock makes a new one",
            ) from error


def _date(seconds: int) -> str:
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M}"


def _pairs(suites: Mapping[str, str]) -> str:
    return ", ".join(f"{name} of {suite}" for name, suite in sorted(suites.items())) or "none"
