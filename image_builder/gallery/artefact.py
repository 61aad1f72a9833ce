"""A built image that may be published: its VHD is the one that was built, and both verifications passed.

A build's directory contains the verification of the sealed tree, bound by the manifest's digests. The booted one is
where ``boot IMAGE --verify`` wrote it, OUTPUT/boot/BUILD; it names the build that the machine ran.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from image_builder.bake import manifest as manifests
from image_builder.bake.formats import vhd
from image_builder.bake.manifest import Manifest
from image_builder.bake.publish import BUILD_DIGITS, MANIFEST
from image_builder.errors import PublishError, UsageError, VerifyError
from image_builder.system import sparse
from image_builder.verify import result as verification

_VERIFY, _FACTS = "verify.json", "facts.json"
# The certificate (PEM) of the key that signs the image's kernel modules; the firmware must know it.
_CERTIFICATE = "nvidia_certificate"


@dataclass(frozen=True)
class Artefact:
    """A VHD and what is known about it. ``suite`` has the result of each verification, in one line.

    ``verdicts`` are the digests of the verify.json files, by marker. ``identity`` distinguishes the file from a
    changed one. ``certificate`` is the one that firmware with Secure Boot must know in addition to Microsoft's: DER
    in Base64, or empty.
    """

    manifest: Manifest
    manifest_sha256: str
    disk: Path
    sha256: str
    size: int
    identity: tuple[int, ...]
    suite: str
    verdicts: dict[str, str]
    certificate: str = ""

    @property
    def build(self) -> str:
        """Return the build's id as used in directory names and tags."""
        return self.manifest.build_id[:BUILD_DIGITS]

    def require_unchanged(self) -> None:
        """Raise PublishError if the file has been written to since its digest was taken."""
        if identity(self.disk) != self.identity:
            raise PublishError(
                f"{self.disk} was changed while it was read",
                hint="build it again, then start over: image-builder publish run --restart",
            )


def identity(path: Path) -> tuple[int, ...]:
    """Return values that differ once a file has changed."""
    info = path.stat()
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def read(
    folder: Path, booted: Path, progress: sparse.Progress | None = None, *, unverified: bool
) -> Artefact:
    """Return the artifact in a build's directory; ``booted`` is the directory of the booted verification.

    All problems are in one PublishError. ``unverified`` accepts an image that lacks one or both verifications.
    """
    try:
        data = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise UsageError(f"{folder} is no published build: {MANIFEST}: {error.strerror}") from error
    manifest = manifests.load(data)
    disks = [file for file in manifest.artefacts if file.format == "vhd"]
    if not disks:
        raise PublishError(
            f"{folder} has no VHD", hint="image_formats must name vhd; then image-builder build"
        )
    disk, problems = folder / disks[0].name, list[str]()
    verdicts: dict[str, str] = {}
    lines, certificate = [], ""
    try:
        certificate = _certificate(manifest, folder / _FACTS)
    except (PublishError, OSError, ValueError) as error:
        problems.append(f"{folder / _FACTS}: {error}")
    for marker, file in (("offline", folder / _VERIFY), ("booted", booted / _VERIFY)):
        try:
            document = file.read_bytes()
            lines.append(f"{marker} {_passed(manifest, marker, document, booted)}")
            verdicts[marker] = hashlib.sha256(document).hexdigest()
        except (PublishError, VerifyError, OSError, ValueError) as error:
            lines.append(f"{marker} missing")
            problems += [] if unverified else [f"{file}: {error}"]
    before = identity(disk) if disk.exists() else ()
    problems += _disk_problems(disk, disks[0].sha256, progress)
    if problems:
        raise PublishError(
            "\n".join(["not published:", *(f"  {problem}" for problem in problems)]),
            hint=f"image-builder build {manifest.image}; image-builder boot {manifest.image} --verify",
        )
    return Artefact(
        manifest,
        hashlib.sha256(data).hexdigest(),
        disk,
        disks[0].sha256,
        disk.stat().st_size,
        before,
        ", ".join(lines),
        verdicts,
        certificate,
    )


def _passed(manifest: Manifest, marker: str, document: bytes, booted: Path) -> str:
    """Return how many checks passed. Raises PublishError or VerifyError if that doesn't prove this build."""
    content = json.loads(document)
    suite = verification.from_json(content)
    if suite.marker != marker:
        raise PublishError(f"it is of the checks `{suite.marker}`, not `{marker}`")
    verification.require_passed(suite)
    if marker == "offline":
        _require_listed(manifest, _VERIFY, document)
    else:
        _require_boot(manifest, booted / "boot.json", content)
    return f"{len(suite.passed)}/{len(suite.checks)}"


def _require_boot(manifest: Manifest, file: Path, suite: dict[str, Any]) -> None:
    """Raise PublishError unless boot.json is of a boot of this build with this suite and a clean console."""
    record: dict[str, Any] = json.loads(file.read_bytes())
    if record.get("build_id") != manifest.build_id:
        raise PublishError("another build was booted")
    if record.get("suite") != suite:
        raise PublishError(f"{file} is of another boot, or of one without --verify")
    if record.get("console_problems") != []:
        raise PublishError("the console had problems")


def _require_listed(manifest: Manifest, name: str, document: bytes) -> None:
    """Raise PublishError if a document isn't the one that the manifest lists."""
    listed = {file.name: file.sha256 for file in manifest.documents}
    if listed.get(name) != hashlib.sha256(document).hexdigest():
        raise PublishError("it isn't the one of this build's manifest")


def _certificate(manifest: Manifest, facts: Path) -> str:
    """Return the certificate of the image's own kernel modules if Secure Boot needs it. Raises ValueError."""
    document = facts.read_bytes()
    _require_listed(manifest, _FACTS, document)
    pem = json.loads(document).get("variables", {}).get(_CERTIFICATE)
    if not pem or manifest.secure_boot is None:
        return ""
    der = x509.load_pem_x509_certificate(str(pem).encode()).public_bytes(serialization.Encoding.DER)
    return base64.b64encode(der).decode()


def _disk_problems(disk: Path, sha256: str, progress: sparse.Progress | None) -> list[str]:
    try:
        with disk.open("rb") as file:
            vhd.read(file)
        if (actual := sparse.sha256(disk, progress)) != sha256:
            return [f"{disk}: its SHA-256 is {actual}, not the manifest's {sha256}"]
    except OSError as error:
        return [f"{disk}: {os.strerror(error.errno or 0)}"]
    except vhd.VhdError as error:
        return [f"{disk}: {error}"]
    return []
