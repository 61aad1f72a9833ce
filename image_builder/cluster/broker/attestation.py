"""Attested documents of Azure's metadata service: they prove a machine if signed by Azure, for our nonce, and current.

https://learn.microsoft.com/azure/virtual-machines/instance-metadata-service#attested-data. Every process on a machine
can get such a document for that machine, and for no other. Pure, apart from the arithmetic of certificates.

The nonce differs for each machine, node and minute. None is stored: it is derived from a key that all replicas have.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from image_builder.cluster.broker import signed_data
from image_builder.cluster.broker.refusal import forbidden, unproven
from image_builder.errors import HostError
from image_builder.node.join import schema

MOST_CHARACTERS = 12288
_GUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TIME = "%m/%d/%y %H:%M:%S %z"
# Documents have been seen that expire in the very second of their timestamp. Our own nonce shows how fresh one is.
_GRACE = 300.0
# How long a nonce is given out; it is accepted for as long again.
NONCE_SECONDS = 60.0
_NONCE_DIGITS = 10  # as many as the metadata service accepts


@dataclass(frozen=True)
class Rules:
    """Whose signatures are trusted (``authorities``, and the certificate's ``names``), and whose machines.

    ``leeway`` is how far apart clocks may be, in seconds.
    """

    authorities: Store
    names: tuple[str, ...]
    subscriptions: tuple[str, ...]
    leeway: float


@dataclass(frozen=True)
class Machine:
    """The machine that a document proves, and the nonce that it was requested with."""

    vm_id: str
    nonce: str


def load_authorities(path: Path) -> Store:
    """Return the certificates in a PEM file; each of them is trusted. Raises HostError."""
    try:
        return Store(x509.load_pem_x509_certificates(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise HostError(f"{path}: no certificates can be read from it: {error}") from error


def verify(document: str, rules: Rules, now: float) -> Machine:
    """Return the machine that a document proves. Raises RefusedError (401, 403). ``now`` is Unix time."""
    if len(document) > MOST_CHARACTERS:
        raise unproven("document.malformed", "the attested document is too long")
    try:
        message = signed_data.parse(base64.b64decode(document, validate=True))
    except (binascii.Error, ValueError, IndexError, x509.InvalidVersion) as error:
        raise unproven(
            "document.malformed", "the attested document is not a PKCS#7 message of Azure's"
        ) from error
    _check_signer(message, rules, now)
    return _check_content(message.content, rules, now)


def _check_signer(message: signed_data.SignedData, rules: Rules, now: float) -> None:
    try:
        key = message.signer.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise unproven("document.signer", "the attested document's certificate has an unknown key") from error
    name = _name(message.signer, rules.names)
    if name is None:
        raise unproven("document.signer", "the attested document is not signed by Azure")
    policy = (
        PolicyBuilder().store(rules.authorities).time(datetime.fromtimestamp(now, UTC).replace(tzinfo=None))
    )
    try:
        policy.build_server_verifier(x509.DNSName(name)).verify(message.signer, list(message.others))
    except (VerificationError, ValueError) as error:
        raise unproven(
            "document.signer",
            "the attested document's certificate leads to none of `attestation.authorities`",
        ) from error
    try:
        if not isinstance(key, rsa.RSAPublicKey):
            raise InvalidSignature
        key.verify(message.signature, message.content, padding.PKCS1v15(), hashes.SHA256())
    except InvalidSignature as error:
        raise unproven("document.signature", "the attested document's signature is wrong") from error


def _name(certificate: x509.Certificate, names: tuple[str, ...]) -> str | None:
    """Return a name in a certificate that is one of ``names``, or below one of them: each region has its own."""
    try:
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        return None
    for pattern in alternatives.value.get_values_for_type(x509.DNSName):
        name = pattern.lower().replace("*.", "any.", 1)
        if any(name == suffix or name.endswith(f".{suffix}") for suffix in names):
            return name
    return None


def _check_content(content: bytes, rules: Rules, now: float) -> Machine:
    try:
        claims = schema.load(content)
        vm_id, subscription = (str(claims[name]).lower() for name in ("vmId", "subscriptionId"))
        created, expires = (_moment(claims["timeStamp"], name) for name in ("createdOn", "expiresOn"))
        nonce = str(claims["nonce"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise unproven("document.malformed", "the attested document lacks a field") from error
    if not _GUID.fullmatch(vm_id):
        raise unproven("document.malformed", "the attested document names no machine")
    if not created - rules.leeway <= now <= expires + _GRACE:
        raise unproven(
            "document.expired",
            "the attested document is not valid now, or a clock is off",
        )
    if subscription not in rules.subscriptions:
        raise forbidden("document.subscription", f"no machine of the subscription {subscription} may join")
    return Machine(vm_id, nonce)


def _moment(stamps: Mapping[str, Any], name: str) -> float:
    return datetime.strptime(str(stamps[name]), _TIME).astimezone(UTC).timestamp()


# -- nonces ----------------------------------------------------------------------------------------------------


class Nonces:
    """The nonces that the broker gives out. ``key`` returns a secret that all replicas share; its errors propagate."""

    def __init__(self, key: Callable[[], bytes]) -> None:
        self._key = key

    def current(self, vm_id: str, node: str, now: float) -> str:
        """Return the nonce that is given out at ``now`` (Unix time)."""
        return self._of(vm_id, node, int(now // NONCE_SECONDS))

    def is_valid(self, nonce: str, vm_id: str, node: str, now: float) -> bool:
        """Return whether a nonce was given out for this machine and node, at most a minute or two ago."""
        turn = int(now // NONCE_SECONDS)
        current = [self._of(vm_id, node, at) for at in (turn, turn - 1)]
        return any(hmac.compare_digest(nonce.encode(), number.encode()) for number in current)

    def _of(self, vm_id: str, node: str, turn: int) -> str:
        message = f"image-builder nonce\n{turn}\n{vm_id}\n{node}".encode()
        value = int.from_bytes(hmac.new(self._key(), message, hashlib.sha256).digest()[:16])
        return f"{value % 10**_NONCE_DIGITS:0{_NONCE_DIGITS}d}"


def until_next(now: float) -> float:
    """Return the seconds until another nonce is given out."""
    return NONCE_SECONDS - now % NONCE_SECONDS
