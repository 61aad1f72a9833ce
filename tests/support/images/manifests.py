"""A small manifest for tests, with files of a few bytes each."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from image_builder.bake.manifest import (
    Artefact,
    Disk,
    Document,
    Manifest,
    Package,
    Partition,
    Stage,
)
from image_builder.bake.verification import Verification

BUILD_ID = "ab" * 32
DISK = Disk(
    disk_uuid="40a4a6b2-d4b0-48b9-9d20-226ca6b985e1",
    bytes=1 << 30,
    partitions=(Partition(number=1, name="esp", type="t", uuid="u", start=1 << 20, size=512 << 20),),
    kernel="6.12.107+deb13-cloud-amd64",
    kernel_args=("root=PARTUUID=u", "rw"),
    secure_boot=None,
)
DOCUMENTS = {"verify.json": b'{"verdict": "passed"}\n', "facts.json": b"{}\n"}


def artefact(name: str, data: bytes) -> Artefact:
    kind: Any = name.rsplit(".", 1)[1]
    return Artefact(
        name=name,
        format=kind,
        bytes=len(data),
        virtual_size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def manifest(files: dict[str, bytes], **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "image": "worker",
        "build_id": BUILD_ID,
        "created": "2026-01-31T12:00:00Z",
        "source_date_epoch": 1735689600,
        "definition_sha256": "cd" * 32,
        "lock_sha256": "ef" * 32,
        "artefacts": tuple(artefact(name, data) for name, data in files.items()),
        "documents": tuple(
            Document(name=n, bytes=len(d), sha256=hashlib.sha256(d).hexdigest()) for n, d in DOCUMENTS.items()
        ),
        "disk": DISK,
        "verification": Verification(
            marker="offline", verdict="passed", passed=60, not_applicable=2, seconds=3.5
        ),
        "stages": (Stage(name="seal", kind="seal", id=BUILD_ID, seconds=1.5, bytes=1000, cached=False),),
        "packages": (Package(name="bash", version="5.2-1", architecture="amd64", sha256="01" * 32),),
        "tools": {"image-builder": "0.1.0"},
        **changes,
    }
    return Manifest(**values)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder
