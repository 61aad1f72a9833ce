"""The signed statement as another program reads it: Debian 13's cosign, in a Debian 13 tree without a network."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from image_builder.gallery import artefact
from image_builder.gallery.artefact import Artefact
from image_builder.gallery.statement import sign, statement
from tests.support.arm.place import MIB, write_build

pytestmark = pytest.mark.root

KEYS: dict[str, Callable[[], ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey]] = {
    "ed25519": ed25519.Ed25519PrivateKey.generate,
    "ecdsa": lambda: ec.generate_private_key(ec.SECP256R1()),
}
# Without COSIGN_MAX_ATTACHMENT_SIZE, cosign doesn't read files larger than 128 MiB.
SIZE = 160 * MIB


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a Debian 13 tree with cosign: unpacked packages, none of them configured."""
    tree = tmp_path_factory.mktemp("debian") / "tree"
    subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=extract", "--include=base-files,cosign", "trixie", tree],
        check=True,
    )
    return tree


@pytest.fixture
def built(tmp_path: Path) -> Artefact:
    build = write_build(tmp_path / "output", size=SIZE, data=2 * MIB).build_id[:12]
    return artefact.read(
        tmp_path / "output/worker" / build, tmp_path / "output/boot" / build, unverified=False
    )


class Verifier:
    """``cosign verify-blob-attestation`` as in docs/how-to/publish.md, with a key, on a VHD that it copies."""

    def __init__(self, tree: Path, disk: Path, public: bytes) -> None:
        self.tree, self.folder = tree, tree / "tmp"
        subprocess.run(["cp", "--sparse=always", disk, self.folder / "worker.vhd"], check=True)
        (self.folder / "key.pub").write_bytes(public)

    def __call__(self, envelope: bytes) -> subprocess.CompletedProcess[str]:
        (self.folder / "statement.json").write_bytes(envelope)
        argv = [
            "cosign",
            "verify-blob-attestation",
            "--key",
            "/tmp/key.pub",
            "--signature",
            "/tmp/statement.json",
        ]
        argv += ["--type", "slsaprovenance1", "--insecure-ignore-tlog=true", "/tmp/worker.vhd"]
        return subprocess.run(
            ["unshare", "--net", f"--root={self.tree}", *argv],
            env={"PATH": "/usr/bin", "HOME": "/root", "COSIGN_MAX_ATTACHMENT_SIZE": "4GB"},
            capture_output=True,
            text=True,
            check=False,
        )

    def require_refused(self, envelope: bytes, reason: str) -> None:
        done = self(envelope)
        assert done.returncode != 0 and reason in done.stderr, done.stderr


def _key(folder: Path, kind: str) -> tuple[Path, bytes]:
    """Write a private key; return its file and the public one (PEM)."""
    key, path = KEYS[kind](), folder / "key.pem"
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return path, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.mark.parametrize("kind", KEYS)
def test_cosign_takes_the_statement_and_refuses_what_was_changed(
    tmp_path: Path, debian: Path, built: Artefact, kind: str
) -> None:
    private, public = _key(tmp_path, kind)
    envelope = sign(statement(built), str(private))
    verify = Verifier(debian, built.disk, public)
    done = verify(envelope)
    assert done.returncode == 0 and "Verified OK" in done.stderr, done.stderr
    changed = json.loads(envelope)
    first = changed["payload"][40]
    changed["payload"] = changed["payload"][:40] + ("A" if first != "A" else "B") + changed["payload"][41:]
    verify.require_refused(json.dumps(changed).encode(), "signatures do not match")
    verify.require_refused(sign(statement(built), str(_key(tmp_path, kind)[0])), "signatures do not match")
    with (verify.folder / "worker.vhd").open("r+b") as disk:
        disk.seek(SIZE // 2)
        disk.write(b"changed")
    verify.require_refused(envelope, "no matching subject digest")
