"""manifest.json: what an artifact is, what it was made of, and how that was verified.

The model is the format's definition; ``docs/reference/manifest.schema.json`` is generated from it
(``python -m image_builder.bake.manifest``) and a test compares the two.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import Field, ValidationError

from image_builder import __version__
from image_builder.bake.lock.model import Lock, Sha256
from image_builder.bake.plan.model import Plan
from image_builder.bake.verification import Count, Verification
from image_builder.canonical import digest
from image_builder.errors import PublishError
from image_builder.strict_yaml import Strict

if TYPE_CHECKING:  # it imports Ansible, which reading a manifest needn't wait for
    from image_builder.definition import ImageDefinition

SCHEMA_VERSION: Final = 1
SCHEMA_PATH: Final = "docs/reference/manifest.schema.json"


class Document(Strict):
    """A small file that describes the image."""

    name: str
    bytes: Count
    sha256: Sha256


class Artefact(Document):
    """The image in one format."""

    format: Literal["raw", "qcow2", "vhd", "tar"]
    virtual_size: Count = Field(
        description="Size in bytes of the disk that a machine sees; a tar's own size."
    )


class Stage(Strict):
    """A stage of the build."""

    name: str
    kind: str
    id: Sha256
    seconds: float = Field(
        ge=0, description="Wall time of the run that made it, which may be an earlier one."
    )
    bytes: Count = Field(description="Disk space of its product.")
    cached: bool = Field(description="Whether the stage was reused from an earlier build.")


class Package(Strict):
    """A Debian package that is installed in the image."""

    name: str
    version: str
    architecture: str
    sha256: Sha256 | None = Field(
        description="Digest of the .deb; null when it wasn't installed from the lock."
    )


class Partition(Strict):
    """A partition of the disk. Sizes are bytes."""

    number: Count
    name: str
    type: str
    uuid: str
    start: Count
    size: Count
    attributes: Count = 0


class SecureBoot(Strict):
    """What the build proved: each digest is the Authenticode SHA-256 that a signature was checked for."""

    firmware_authorities: tuple[str, ...] = Field(
        description="Microsoft's certificates that verify shim. Firmware without any of them refuses to boot it."
    )
    shim_sha256: Sha256
    grub_sha256: Sha256
    kernel_sha256: Sha256


class Disk(Strict):
    """The disk that raw, qcow2 and vhd hold."""

    disk_uuid: str
    bytes: Count
    partitions: tuple[Partition, ...]
    kernel: str
    kernel_args: tuple[str, ...]
    secure_boot: SecureBoot | None = Field(description="null when the definition doesn't declare it.")


class PreloadedImage(Strict):
    """A container image that a node of this image has before its first pod."""

    ref: str
    digest: str = Field(
        description="Digest of the manifest, or index, that the tag named when it was locked."
    )
    platform: str
    pin: bool


class Preload(Strict):
    """The container images in the image, and the program that pulled them."""

    engine: str
    version: str
    binary: str = Field(description="Its path in the image.")
    binary_sha256: Sha256
    images: tuple[PreloadedImage, ...]
    left_out: Mapping[str, str] = Field(description="Images that are not required, and why they are missing.")


class Manifest(Strict):
    """The manifest of one publication."""

    schema_version: Literal[1] = SCHEMA_VERSION
    image: str
    build_id: Sha256 = Field(
        description="Id of the sealed tree: same id, same tree, but for what the container engine drew at random or "
        "dated in its own records and its archive of the preloaded images, and for the layers that their containers "
        "were seen to read in the rehearsal."
    )
    created: str = Field(description="When this was published, UTC, to the second.")
    source_date_epoch: Count = Field(
        description="The date that the build's files bear, in seconds since 1970: that of the newest Release "
        "file of the locked repositories."
    )
    definition_sha256: Sha256 = Field(
        description="Digest of the definition; vaulted values count as ciphertext."
    )
    lock_sha256: Sha256 = Field(description="Digest of the lock's content.")
    artefacts: tuple[Artefact, ...]
    documents: tuple[Document, ...]
    disk: Disk | None = Field(description="null for an image that can't boot: there is only a tar.")
    preload: Preload | None = Field(None, description="null when nothing is preloaded.")
    verification: Verification
    stages: tuple[Stage, ...]
    packages: tuple[Package, ...]
    warnings: tuple[str, ...] = Field((), description="Warnings about the image for operators.")
    tools: Mapping[str, str] = Field(description="Programs that the build used, and their versions.")

    @property
    def secure_boot(self) -> SecureBoot | None:
        """Return what the build proved of the disk's boot loader."""
        return self.disk.secure_boot if self.disk else None

    def render(self) -> bytes:
        """Return manifest.json."""
        return (json.dumps(self.model_dump(mode="json"), indent=1) + "\n").encode()

    def same_content(self, other: Manifest) -> bool:
        """Return whether both describe the same bytes, no matter when and how fast these were made."""
        ours, others = (m.model_dump(exclude={"created", "stages"}) for m in (self, other))
        ids = [[(s.name, s.id) for s in m.stages] for m in (self, other)]
        return ours == others and ids[0] == ids[1]


def load(data: bytes) -> Manifest:
    """Parse manifest.json. Raises PublishError naming the first thing that is wrong with it."""
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PublishError(f"not a manifest: {where}: {first['msg']}") from error


def timestamp(seconds: float) -> str:
    """Return a time in seconds since 1970 as ``2026-01-31T12:00:00Z``."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def definition_digest(definition: ImageDefinition) -> str:
    """Return the digest of a whole definition."""
    return digest(
        {
            "name": definition.name,
            "base": definition.base.model_dump(mode="json", exclude={"mirror", "keyring"}),
            "layers": definition.layers,
            "disk": definition.disk.model_dump(mode="json"),
            "formats": definition.formats,
            "kernel_args": definition.kernel_args,
            "secure_boot": definition.secure_boot,
            "preload": [image.model_dump(mode="json") for image in definition.preload],
            "variables": definition.variables,
        }
    )


def installed(lock: Lock, present: list[Mapping[str, str]]) -> tuple[Package, ...]:
    """Join the packages that the checks found installed (name, version, architecture) with the lock's digests."""
    locked = {
        (p.name, p.version, p.architecture): p.sha256
        for group in lock.groups.values()
        for p in group.packages
    }
    packages = []
    for package in present:
        name, version, architecture = package["name"], package["version"], package["architecture"]
        plain = name.partition(":")[0]  # dpkg qualifies the names of Multi-Arch: same packages
        packages.append(
            Package(
                name=plain,
                version=version,
                architecture=architecture,
                sha256=locked.get((plain, version, architecture)),
            )
        )
    return tuple(sorted(packages, key=lambda p: (p.name, p.architecture)))


def tool_versions(plan: Plan, lock: Lock) -> dict[str, str]:
    """Return the versions of this program, of Ansible and of the packages in the tools tree."""
    tools = lock.groups.get("tools")
    requested = set(tools.requested) if tools else set()
    versions = {p.name: p.version for p in tools.packages if p.name in requested} if tools else {}
    ansible = plan.stage("seal").options.get("ansible")
    if ansible:
        versions["ansible-core"] = str(ansible)
    return {"image-builder": __version__, **dict(sorted(versions.items()))}


def schema() -> dict[str, Any]:
    """Return the JSON Schema of manifest.json."""
    document = Manifest.model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}


def render_schema() -> str:
    """Return the text of the schema's file."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render_schema())
