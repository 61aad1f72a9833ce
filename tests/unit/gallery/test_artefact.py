"""Only a VHD that belongs to its build and passed both verifications is published."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from image_builder.bake.manifest import SecureBoot
from image_builder.errors import PublishError, UsageError
from image_builder.gallery import artefact
from image_builder.gallery.artefact import Artefact
from image_builder.lab import certificate
from tests.support.arm.place import MIB, suite, write_build
from tests.support.images.manifests import DISK

Damage = Callable[[Path, Path], object]


def _build(tmp_path: Path) -> tuple[Path, Path]:
    build = write_build(tmp_path / "output", size=2 * MIB, data=MIB).build_id[:12]
    return tmp_path / "output/worker" / build, tmp_path / "output/boot" / build


def _read(tmp_path: Path, *, unverified: bool = False) -> Artefact:
    return artefact.read(*_build(tmp_path), unverified=unverified)


def test_a_verified_build_is_taken(tmp_path: Path) -> None:
    built = _read(tmp_path)
    assert built.suite == "offline 5/5, booted 5/5"
    assert set(built.verdicts) == {"offline", "booted"}
    assert built.size == 2 * MIB + 512


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def _set_suite(boot: Path, result: object) -> None:
    record = json.loads((boot / "boot.json").read_text())
    (boot / "boot.json").write_text(json.dumps({**record, "suite": result}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder, _: (folder / "verify.json").write_bytes(suite("offline") + b" "), "build's manifest"),
        (lambda folder, _: (folder / "verify.json").unlink(), "No such file"),
        (lambda _, boot: (boot / "verify.json").write_bytes(suite("booted", failed=1)), "1 of 5 checks"),
        (lambda _, boot: (boot / "verify.json").write_bytes(suite("offline")), "checks `offline`"),
        (lambda _, boot: (boot / "verify.json").write_bytes(b"{"), "verify.json"),
        (lambda _, boot: (boot / "verify.json").write_bytes(b"[]"), "verify.json"),
        (lambda _, boot: (boot / "boot.json").unlink(), "No such file"),
        (
            lambda _, boot: (boot / "boot.json").write_text(
                json.dumps({"build_id": "0", "console_problems": []})
            ),
            "another build was booted",
        ),
        (
            lambda _, boot: (boot / "boot.json").write_text(
                (boot / "boot.json").read_text().replace('problems": []', 'problems": ["oops"]')
            ),
            "console had problems",
        ),
        (lambda _, boot: _set_suite(boot, None), "without --verify"),
        (lambda _, boot: _set_suite(boot, json.loads(suite("booted", failed=1))), "of another boot"),
    ],
)
def test_an_unverified_build_is_taken_only_when_that_is_asked_for(
    tmp_path: Path, damage: Damage, reason: str
) -> None:
    folder, boot = _build(tmp_path)
    damage(folder, boot)
    with pytest.raises(PublishError, match=reason):
        artefact.read(folder, boot, unverified=False)
    assert "missing" in artefact.read(folder, boot, unverified=True).suite


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda disk: _flip(disk, disk.stat().st_size - 512), "cookie"),
        (lambda disk: _flip(disk, 12345), "SHA-256"),
        (
            lambda disk: disk.write_bytes(disk.read_bytes()[: -MIB - 512] + disk.read_bytes()[-512:]),
            "declares",
        ),
        (lambda disk: disk.write_bytes(b""), "too small"),
        (lambda disk: disk.unlink(), "No such file"),
    ],
)
@pytest.mark.parametrize("unverified", [False, True])
def test_a_disk_that_is_not_the_builds_is_never_taken(
    tmp_path: Path, damage: Callable[[Path], object], reason: str, unverified: bool
) -> None:
    folder, boot = _build(tmp_path)
    damage(folder / "worker.vhd")
    with pytest.raises(PublishError, match=reason):
        artefact.read(folder, boot, unverified=unverified)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    folder, boot = _build(tmp_path)
    (folder / "verify.json").unlink()
    (boot / "verify.json").unlink()
    _flip(folder / "worker.vhd", 0)
    with pytest.raises(PublishError) as caught:
        artefact.read(folder, boot, unverified=False)
    assert len(caught.value.message.splitlines()) == 4


def test_a_directory_without_a_build_is_a_mistake_of_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no published build"):
        artefact.read(tmp_path, tmp_path, unverified=True)


def test_a_file_that_was_written_to_is_seen(tmp_path: Path) -> None:
    built = _read(tmp_path)
    built.require_unchanged()
    _flip(built.disk, 0)
    with pytest.raises(PublishError, match="was changed"):
        built.require_unchanged()


SECURE = SecureBoot(
    firmware_authorities=("Microsoft",), shim_sha256="0" * 64, grub_sha256="0" * 64, kernel_sha256="0" * 64
)


@pytest.mark.parametrize("is_secure", [True, False])
def test_the_certificate_of_the_images_modules_is_taken_where_secure_boot_asks_for_it(
    tmp_path: Path, is_secure: bool
) -> None:
    pem = certificate.make("modules", tmp_path).ca.read_text()
    facts = json.dumps({"variables": {"nvidia_certificate": pem}}).encode()
    disk = DISK.model_copy(update={"secure_boot": SECURE if is_secure else None})
    build = write_build(tmp_path / "output", size=2 * MIB, data=MIB, facts=facts, disk=disk).build_id[:12]
    folder, boot = tmp_path / "output/worker" / build, tmp_path / "output/boot" / build
    built = artefact.read(folder, boot, unverified=False)
    der = x509.load_pem_x509_certificate(pem.encode()).public_bytes(Encoding.DER)
    assert base64.b64decode(built.certificate) == (der if is_secure else b"")
    (folder / "facts.json").write_bytes(b"{}")
    with pytest.raises(PublishError, match=r"facts\.json: it isn't the one of this build's manifest"):
        artefact.read(folder, boot, unverified=True)
