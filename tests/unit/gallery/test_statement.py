"""The signed statement: what it says, and who signed it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import securesystemslib.signer  # noqa: F401  # it looks for gpg when it is imported, which no unit test may
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from image_builder.errors import HostError, PublishError, UsageError
from image_builder.gallery import artefact
from image_builder.gallery import statement as statements
from image_builder.gallery.artefact import Artefact
from image_builder.gallery.statement import require_same, sign, statement, verified
from tests.support.arm.place import MIB, write_build


@pytest.fixture
def built(tmp_path: Path) -> Artefact:
    build = write_build(tmp_path / "output", size=2 * MIB, data=MIB).build_id[:12]
    folder = tmp_path / "output/worker" / build
    return artefact.read(folder, tmp_path / "output/boot" / build, unverified=False)


def _keys(folder: Path, key: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> tuple[Path, Path]:
    """Write a key pair; return the files of the private and the public key."""
    private, public = folder / "key.pem", folder / "key.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return _keys(tmp_path, ed25519.Ed25519PrivateKey.generate())


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_a_statement_is_read_by_the_key_that_signed_it(tmp_path: Path, built: Artefact, kind: str) -> None:
    key = (
        ed25519.Ed25519PrivateKey.generate() if kind == "ed25519" else ec.generate_private_key(ec.SECP256R1())
    )
    private, public = _keys(tmp_path, key)
    content = verified(sign(statement(built), str(private)), public)
    require_same(content, built.sha256, built.build)
    assert content["subject"] == [{"name": "worker.vhd", "digest": {"sha256": built.sha256}}]
    assert set(content["predicate"]["buildDefinition"]["internalParameters"]["verdicts"]) == {
        "offline",
        "booted",
    }


def test_a_signature_without_the_name_of_its_key_counts(built: Artefact, keys: tuple[Path, Path]) -> None:
    envelope = json.loads(sign(statement(built), str(keys[0])))
    envelope["signatures"][0]["keyid"] = ""
    verified(json.dumps(envelope).encode(), keys[1])


def test_what_is_read_is_what_was_verified(built: Artefact, keys: tuple[Path, Path]) -> None:
    """DSSE also permits URL-safe base64, whose characters a lenient decoder drops."""
    content = {**statement(built), "note": "~~~???>>>"}
    envelope = json.loads(sign(content, str(keys[0])))
    standard = envelope["payload"]
    envelope["payload"] = standard.translate(str.maketrans("+/", "-_"))
    assert envelope["payload"] != standard
    assert verified(json.dumps(envelope).encode(), keys[1]) == content


def test_every_changed_byte_of_the_payload_or_the_signature_is_refused(
    built: Artefact, keys: tuple[Path, Path]
) -> None:
    envelope = json.loads(sign(statement(built), str(keys[0])))
    for field, owner in (("payload", envelope), ("sig", envelope["signatures"][0])):
        text = owner[field]
        for at in range(0, len(text) - 4, 97):
            owner[field] = text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]
            with pytest.raises(PublishError, match="not signed by"):
                verified(json.dumps(envelope).encode(), keys[1])
        owner[field] = text
    verified(json.dumps(envelope).encode(), keys[1])


@pytest.mark.parametrize(
    "envelope", [b"", b"[]", b"{}", b'{"signatures": [], "payload": "", "payloadType": ""}']
)
def test_what_is_no_envelope_is_refused(keys: tuple[Path, Path], envelope: bytes) -> None:
    with pytest.raises(PublishError, match="not signed by"):
        verified(envelope, keys[1])


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (statements.PAYLOAD_TYPE, {"_type": "https://in-toto.io/Statement/v0.1", "predicate": {}}),
        (statements.PAYLOAD_TYPE, {"predicate": {}}),
        (statements.PAYLOAD_TYPE, []),
        ("application/json", {"_type": "https://in-toto.io/Statement/v1", "predicate": {}}),
    ],
)
def test_a_signed_statement_of_another_kind_is_refused(
    keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, kind: str, content: Any
) -> None:
    with monkeypatch.context() as another:
        another.setattr(statements, "PAYLOAD_TYPE", kind)
        envelope = sign(content, str(keys[0]))
    with pytest.raises(PublishError, match="another kind"):
        verified(envelope, keys[1])


def test_another_key_is_refused(tmp_path: Path, built: Artefact, keys: tuple[Path, Path]) -> None:
    envelope = sign(statement(built), str(keys[0]))
    (tmp_path / "other").mkdir()
    other = _keys(tmp_path / "other", ed25519.Ed25519PrivateKey.generate())
    with pytest.raises(PublishError, match="not signed by"):
        verified(envelope, other[1])
    for wrong in (keys[1], tmp_path / "missing"):
        with pytest.raises(UsageError, match="no private key"):
            sign({}, str(wrong))
    with pytest.raises(UsageError, match="no public key"):
        verified(envelope, keys[0])


def test_a_key_is_named_by_a_uri_and_its_public_key(built: Artefact, keys: tuple[Path, Path]) -> None:
    """Here the URI of a file: the only kind that needs nothing but a file."""
    envelope = sign(statement(built), f"file2:{keys[0]}", keys[1])
    require_same(verified(envelope, keys[1]), built.sha256, built.build)


def test_a_key_that_cannot_be_signed_with_is_refused_by_what_is_wrong_with_it(
    tmp_path: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    private, public = keys
    other = _keys(tmp_path / "other", ed25519.Ed25519PrivateKey.generate())[1]
    monkeypatch.setenv("IMAGE_BUILDER_SIGN_PIN", "missing")
    for uri, key, kind, reason in (
        ("azurkms://vault/key", public, UsageError, "neither a file nor a key's URI"),
        (f"file2:{private}", None, UsageError, "needs its public key"),
        (f"file2:{private}", private, UsageError, "is no public key"),
        (f"file2:{private}", other, UsageError, "is no key to sign with: KeyMismatchError"),
        (f"file2:{tmp_path}/missing", public, UsageError, "FileNotFoundError .*/…'"),
    ):
        with pytest.raises(kind, match=reason) as caught:
            sign({}, uri, key)
        assert caught.value.__cause__ is None or "missing" not in str(caught.value.__cause__)


@pytest.mark.parametrize("scheme", ["awskms", "azurekms", "gcpkms", "hsm"])
def test_a_library_that_a_kms_needs_is_named(keys: tuple[Path, Path], scheme: str) -> None:
    with pytest.raises(HostError) as caught:
        sign({}, f"{scheme}:2", keys[1])
    assert f"securesystemslib[{scheme}]" in str(caught.value.hint)


def test_a_statement_about_other_bytes_or_an_unverified_image_is_refused(
    tmp_path: Path, built: Artefact
) -> None:
    content = statement(built)
    for sha256, build, reason in (
        ("0" * 64, built.build, "another VHD"),
        (built.sha256, "0" * 12, "another build"),
        (built.sha256, "", "another build"),
    ):
        with pytest.raises(PublishError, match=reason):
            require_same(content, sha256, build)
    folder = built.disk.parent
    unverified = artefact.read(folder, tmp_path / "none", unverified=True)
    with pytest.raises(PublishError, match="without both verifications"):
        require_same(statement(unverified), built.sha256, built.build)
