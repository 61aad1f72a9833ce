"""A gallery to publish to, and builds to publish: sparse disks with a footer, and the records of their checks."""

from __future__ import annotations

import hashlib
import json
import random
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from image_builder.bake.formats import vhd
from image_builder.bake.manifest import Artefact, Document, Manifest
from image_builder.definition.model import ImageGallery
from image_builder.gallery.plan import Target
from image_builder.system import sparse
from tests.support.arm.import_host import ImportHost, import_host
from tests.support.arm.model import SUBSCRIPTION
from tests.support.arm.pages import Store
from tests.support.arm.service import Arm
from tests.support.arm.serving import served
from tests.support.images.manifests import manifest

MIB = 1 << 20
SETTINGS: dict[str, Any] = {
    "subscription": SUBSCRIPTION,
    "resource_group": "images",
    "gallery": "nodes",
    "definition": "worker",
    "regions": [{"name": "westus3", "replicas": 12}, {"name": "eastus", "replicas": 3}],
}
TRUSTED = "TrustedLaunchSupported"


@dataclass(frozen=True)
class Place:
    """The simulated service, its import host, and the environment in which Azure's SDK finds both."""

    arm: Arm
    host: ImportHost
    environment: Mapping[str, str]

    @property
    def store(self) -> Store:
        return self.host.store

    @property
    def target(self) -> Target:
        return Target(ImageGallery.model_validate_json(json.dumps(SETTINGS)))

    def changes(self) -> list[tuple[str, str]]:
        """Return the method and path of each change that was requested from the service."""
        return [(entry.method, entry.path) for entry in self.arm.log]


@contextmanager
def place(store: Store, folder: Path) -> Iterator[Place]:
    """Serve a subscription with the gallery ``nodes``, which contains the definition ``worker``."""
    with import_host(store) as host, served(Arm(store), folder) as service:
        target = Place(service.arm, host, {}).target
        service.arm.add(target.gallery)
        features = {"IsAcceleratedNetworkSupported": "True", "DiskControllerTypes": "SCSI, NVMe"}
        if secure := SETTINGS.get("security_type"):
            features["SecurityType"] = secure
        service.arm.add(
            target.definition,
            properties={
                "provisioningState": "Succeeded",
                "osType": "Linux",
                "osState": "Generalized",
                "hyperVGeneration": "V2",
                "architecture": "x64",
                "identifier": {"publisher": "p", "offer": "o", "sku": "s"},
                "features": [{"name": name, "value": value} for name, value in features.items()],
            },
        )
        yield Place(service.arm, host, service.environment)


def write_disk(path: Path, size: int, data: int, seed: int = 0) -> None:
    """Write a fixed VHD of ``size`` bytes: sparse, with a total of ``data`` random bytes in scattered pieces."""
    chance = random.Random(seed)
    with path.open("wb") as file:
        for at in sorted(chance.sample(range(size // MIB), data // MIB)):
            file.seek(at * MIB)
            file.write(chance.randbytes(MIB))
        file.seek(size)
        file.write(vhd.build_footer(size, 1735689600, uuid.UUID(int=seed)))


def suite(marker: str, failed: int = 0) -> bytes:
    """Return a verify.json with five checks, ``failed`` of which failed."""
    checks = [
        {"name": f"test_{n}", "outcome": "failed" if n < failed else "passed", "seconds": 0.1}
        for n in range(5)
    ]
    record = {"target": "t", "marker": marker, "checks": checks, "not_applicable": [], "seconds": 1.0}
    return json.dumps(record).encode()


def write_build(
    output: Path,
    *,
    size: int = 64 * MIB,
    data: int = 8 * MIB,
    seed: int = 0,
    facts: bytes = b"{}",
    **changes: Any,
) -> Manifest:
    """Write a build of `worker` and its boot record below an output directory, as the program does.

    ``changes`` are fields of its manifest.
    """
    build_id = hashlib.sha256(bytes([seed])).hexdigest()
    folder = output / "worker" / build_id[:12]
    folder.mkdir(parents=True)
    disk = folder / "worker.vhd"
    write_disk(disk, size, data, seed)
    artefact = Artefact(
        name=disk.name,
        format="vhd",
        bytes=disk.stat().st_size,
        virtual_size=size,
        sha256=sparse.sha256(disk),
    )
    documents = []
    for name, content in (("verify.json", suite("offline")), ("facts.json", facts)):
        (folder / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        documents.append(Document(name=name, bytes=len(content), sha256=digest))
    record = manifest({}, build_id=build_id, artefacts=(artefact,), documents=tuple(documents), **changes)
    (folder / "manifest.json").write_bytes(record.render())
    latest = folder.parent / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(folder.name)
    boot = output / "boot" / build_id[:12]
    boot.mkdir(parents=True)
    (boot / "verify.json").write_bytes(suite("booted"))
    (boot / "boot.json").write_text(
        json.dumps({"build_id": build_id, "suite": json.loads(suite("booted")), "console_problems": []})
    )
    return record


def write_inventory(path: Path, **base: str) -> Path:
    """Write an inventory with the image `worker` and its gallery; ``base`` adds to its `image_base`."""
    base = {"distribution": "debian", "suite": "trixie"} | base
    host = {
        "image_base": base,
        "image_layers": ["system"],
        "image_formats": ["vhd"],
        "image_gallery": SETTINGS,
    }
    path.write_text(yaml.safe_dump({"images": {"hosts": {"worker": host}}}))
    return path
