"""Documents as Azure's metadata service signs them for a machine, and the authority that they chain to.

The format follows Microsoft's documentation (Instance Metadata Service, attested data) and published documents of real
machines, including their quirks: no signed attributes, and the signature algorithm where the digest algorithm belongs.
The ids and keys are made up; no cloud is available here.
"""

from __future__ import annotations

import base64
import datetime
import functools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.support.nodes.joins import VM_ID

SUBSCRIPTION = "8d10da13-8125-4ba9-a717-bf7490507b3d"
_RSA, _SHA256_WITH_RSA = "2a864886f70d010101", "2a864886f70d01010b"
_SIGNED_DATA, _DATA = "2a864886f70d010702", "2a864886f70d010701"


@dataclass(frozen=True)
class Signer:
    """A signer of documents, and the authority (PEM) that its certificate chains to."""

    certificate: x509.Certificate
    key: rsa.RSAPrivateKey
    authority: str


@functools.cache
def _key(name: str) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


@functools.cache
def signer(
    *names: str, authority: str = "azure", days: tuple[float, float] = (-1, 30), usage: str = "server"
) -> Signer:
    """Return a signer with these DNS names (by default those of a region), the same one on each call."""
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, authority)])
    now = datetime.datetime.now(datetime.UTC)
    key, issuing = _key(f"signer {names}"), _key(f"authority {authority}")

    def made(subject: x509.Name, of: rsa.RSAPrivateKey, is_ca: bool) -> x509.CertificateBuilder:
        begins, ends = (-2.0, 60.0) if is_ca else days
        return (
            x509.CertificateBuilder(issuer, subject, of.public_key(), x509.random_serial_number())
            .not_valid_before(now + datetime.timedelta(days=begins))
            .not_valid_after(now + datetime.timedelta(days=ends))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(of.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(issuing.public_key()), critical=False
            )
            .add_extension(_usage(is_ca), critical=True)
        )

    top = made(issuer, issuing, True).add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    dns = names or ("metadata.azure.com", "westus3.metadata.azure.com")
    purpose = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "mail": ExtendedKeyUsageOID.EMAIL_PROTECTION}
    leaf = (
        made(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, dns[0])]), key, False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(one) for one in dns]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([purpose[usage]]), critical=False)
    )
    return Signer(
        leaf.sign(issuing, hashes.SHA256()),
        key,
        top.sign(issuing, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode(),
    )


def _usage(is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        content_commitment=False,
        key_encipherment=not is_ca,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        encipher_only=False,
        decipher_only=False,
    )


def content(nonce: str, vm_id: str = VM_ID, now: float | None = None, **parts: Any) -> dict[str, Any]:
    """Return the content of a document; ``parts`` replace fields, and None removes one."""
    at = time.time() if now is None else now
    whole = {
        "licenseType": "",
        "nonce": nonce,
        "plan": {"name": "", "product": "", "publisher": ""},
        "sku": "20_04-lts-gen2",
        "subscriptionId": SUBSCRIPTION,
        "timeStamp": {"createdOn": stamp(at), "expiresOn": stamp(at + 6 * 3600)},
        "vmId": vm_id,
        **parts,
    }
    return {name: value for name, value in whole.items() if value is not None}


def stamp(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%m/%d/%y %H:%M:%S -0000")


def document(said: Mapping[str, Any] | bytes, by: Signer | None = None, **parts: bytes) -> str:
    """Return a signed document. ``parts`` replace parts of the message: ``signature``, ``digest``, ``attributes``."""
    who = by or signer()
    data = said if isinstance(said, bytes) else json.dumps(said, separators=(",", ":")).encode()
    signature = parts.get("signature", who.key.sign(data, padding.PKCS1v15(), hashes.SHA256()))
    algorithm = parts.get("digest", _oid(_SHA256_WITH_RSA))
    info = der(
        0x30,
        der(0x02, b"\x01"),
        der(0x30, who.certificate.issuer.public_bytes(), _integer(who.certificate.serial_number)),
        der(0x30, algorithm, der(0x05)),
        parts.get("attributes", b""),
        der(0x30, _oid(_RSA), der(0x05)),
        der(0x04, signature),
    )
    inner = der(
        0x30,
        der(0x02, b"\x01"),
        der(0x31, der(0x30, _oid(_SHA256_WITH_RSA), der(0x05))),
        der(0x30, _oid(_DATA), der(0xA0, der(0x04, data))),
        der(0xA0, who.certificate.public_bytes(serialization.Encoding.DER)),
        der(0x31, info),
    )
    return base64.b64encode(der(0x30, _oid(_SIGNED_DATA), der(0xA0, inner))).decode()


def der(tag: int, *values: bytes) -> bytes:
    """Return a DER element."""
    value = b"".join(values)
    if len(value) < 0x80:
        return bytes([tag, len(value)]) + value
    size = len(value).to_bytes((len(value).bit_length() + 7) // 8)
    return bytes([tag, 0x80 | len(size)]) + size + value


def _oid(value: str) -> bytes:
    return der(0x06, bytes.fromhex(value))


def _integer(value: int) -> bytes:
    return der(0x02, value.to_bytes(value.bit_length() // 8 + 1))
