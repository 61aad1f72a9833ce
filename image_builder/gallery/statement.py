"""The signed statement that goes with a version: which inputs a VHD was made from, and how its verifications ended.

An in-toto statement (v1) with SLSA provenance (v1) in a DSSE envelope, as cosign reads it. By itself it is SLSA level
1: anything higher depends on where a build runs and who holds the key, which a document can't say about itself.

Anyone with write access to a gallery can change tags, but not this.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from image_builder.canonical import canonical
from image_builder.errors import HostError, PublishError, UsageError
from image_builder.system import host

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes

    from image_builder.gallery.artefact import Artefact

PAYLOAD_TYPE = "application/vnd.in-toto+json"
_STATEMENT, _PROVENANCE = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"
# The environment variable with the PIN of an HSM's key, kept off the command line and out of inventories.
_PIN = "IMAGE_BUILDER_SIGN_PIN"
_BUILD_TYPE = "https://github.com/image-builder/build/v1"


def statement(artefact: Artefact) -> dict[str, Any]:
    """Return the statement about an artifact, to be signed."""
    manifest = artefact.manifest
    return {
        "_type": _STATEMENT,
        "subject": [{"name": artefact.disk.name, "digest": {"sha256": artefact.sha256}}],
        "predicateType": _PROVENANCE,
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD_TYPE,
                "externalParameters": {
                    "image": manifest.image,
                    "definition": {"sha256": manifest.definition_sha256},
                },
                "internalParameters": {
                    "stages": {stage.name: stage.id for stage in manifest.stages},
                    "verdicts": artefact.verdicts,
                },
                "resolvedDependencies": [
                    {"name": "lock.json", "digest": {"sha256": manifest.lock_sha256}},
                    {"name": "manifest.json", "digest": {"sha256": artefact.manifest_sha256}},
                ],
            },
            "runDetails": {
                "builder": {"id": f"image-builder {manifest.tools.get('image-builder', '')}".strip()},
                "metadata": {"invocationId": manifest.build_id, "finishedOn": manifest.created},
            },
        },
    }


def sign(content: Mapping[str, Any], key: str, public_key: Path | None = None) -> bytes:
    """Return the envelope of a statement, signed with a key: a file (PEM), or one that a KMS or an HSM keeps.

    The latter is given by securesystemslib's URI (``azurekms:``, ``hsm:`` and others) and the file of its public key.
    Raises UsageError, HostError, PublishError.
    """
    dsse, signers = _library()
    scheme, colon, _ = key.partition(":")
    is_file = not colon or Path(key).exists()
    signer = _file_signer(signers, Path(key)) if is_file else _uri_signer(signers, key, scheme, public_key)
    envelope = dsse.Envelope(canonical(content), PAYLOAD_TYPE, {})
    try:
        envelope.sign(signer)
        envelope.verify([signer.public_key], 1)
    except Exception as error:  # whatever a KMS, an HSM and their libraries raise
        raise PublishError(
            f"can't sign with {key}: {_shown(error)}",
            hint=""
            if is_file
            else f"is {public_key} its public key, {_PIN} its PIN, and may you sign with it?",
        ) from None  # its text may contain the PIN
    return (json.dumps(envelope.to_dict(), indent=1) + "\n").encode()


def _file_signer(signers: Any, key: Path) -> Any:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        private: PrivateKeyTypes = load_pem_private_key(key.read_bytes(), None)
        return signers.CryptoSigner(private)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{key} is no private key to sign with: {error}") from error


def _uri_signer(signers: Any, key: str, scheme: str, public_key: Path | None) -> Any:
    """Return a signer for a key that stays where it is. Nothing is signed yet, and the PIN isn't read yet."""
    from securesystemslib.exceptions import UnsupportedLibraryError

    if scheme not in signers.SIGNER_FOR_URI_SCHEME:
        known = ", ".join(sorted(signers.SIGNER_FOR_URI_SCHEME))
        raise UsageError(f"{key} is neither a file nor a key's URI", hint=f"URIs begin with one of: {known}")
    if public_key is None:
        raise UsageError(f"{key} needs its public key", hint="--public-key FILE (PEM)")
    trusted = _trusted(signers, public_key)
    try:
        return signers.Signer.from_priv_key_uri(key, trusted, lambda _: os.environ[_PIN])
    except UnsupportedLibraryError as error:
        hint = f"pip install 'securesystemslib[{scheme}]'"
        raise HostError(f"{scheme}: keys need an extra library: {error}", hint=hint) from error
    except Exception as error:  # whatever a KMS, an HSM and their libraries raise
        raise UsageError(
            f"{key} is no key to sign with: {_shown(error)}"
        ) from None  # its text may contain the PIN


def _shown(error: BaseException) -> str:
    """Return an error on one line, without the PIN."""
    text = " ".join(f"{type(error).__name__} {error}".split())
    return text.replace(pin, "…") if (pin := os.environ.get(_PIN)) else text


def _trusted(signers: Any, key: Path) -> Any:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        public: PublicKeyTypes = load_pem_public_key(key.read_bytes())
        return signers.SSlibKey.from_crypto(public)
    except (OSError, ValueError) as error:
        raise UsageError(f"{key} is no public key: {error}") from error


def read(file: Path) -> bytes:
    """Return the envelope in a file. Raises PublishError if it can't be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        hint = "it was written where the version was published, with --sign-key"
        raise PublishError(f"no signed statement: {file}: {error.strerror}", hint=hint) from error


def verified(envelope: bytes, key: Path) -> dict[str, Any]:
    """Return the statement in an envelope. Raises PublishError unless this public key (PEM) verifies it."""
    dsse, signers = _library()
    trusted = _trusted(signers, key)
    try:
        document = json.loads(envelope)
        # The key decides who signed: other programs name keys differently, or not at all.
        signatures = [{**signature, "keyid": trusted.keyid} for signature in document["signatures"]]
        parsed = dsse.Envelope.from_dict({**document, "signatures": signatures})
        parsed.verify([trusted], 1)
        content = json.loads(parsed.payload)
    except Exception as error:  # whatever the library raises for bytes that aren't an envelope
        raise PublishError(f"the statement is not signed by {key}: {error}") from error
    is_statement = isinstance(content, dict) and content.get("_type") == _STATEMENT
    if document["payloadType"] != PAYLOAD_TYPE or not is_statement:
        raise PublishError("the statement is of another kind")
    return dict(content)


def require_same(content: Mapping[str, Any], sha256: str, build: str) -> None:
    """Raise PublishError unless a statement covers these bytes and this build, with both verdicts."""
    predicate = content["predicate"]
    problems = []
    if [subject["digest"].get("sha256") for subject in content["subject"]] != [sha256]:
        problems.append("another VHD")
    if not build or not predicate["runDetails"]["metadata"]["invocationId"].startswith(build):
        problems.append("another build")
    if set(predicate["buildDefinition"]["internalParameters"]["verdicts"]) != {"offline", "booted"}:
        problems.append("an image without both verifications")
    if problems:
        raise PublishError(f"the statement is about {', '.join(problems)}")


def _library() -> tuple[Any, Any]:
    host.check_azure()
    from securesystemslib import dsse, signer

    return dsse, signer
