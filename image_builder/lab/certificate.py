"""A certificate authority and a server certificate, created at every start of a server.

The authority's private key is never written: once it has signed the one certificate, it is gone.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# A slightly slow clock (a machine that has just booted) must not reject a certificate made this minute.
_SKEW = datetime.timedelta(hours=1)
# The longest lifetime that all clients accept.
_LIFETIME = datetime.timedelta(days=397)


@dataclass(frozen=True)
class Certificate:
    """PEM files: the authority's certificate, the server's, and the server's private key (mode 0600)."""

    ca: Path
    server: Path
    key: Path


def make(
    host: str,
    directory: Path,
    *,
    not_before: datetime.datetime | None = None,
    not_after: datetime.datetime | None = None,
) -> Certificate:
    """Create an authority and a certificate signed by it for the name ``host``, and write both to ``directory``.

    Keys are ECDSA P-256. ``not_before`` and ``not_after`` (with a time zone) are for the server's certificate:
    by default from an hour ago, for 397 days. The authority's own certificate is always valid now.
    """
    now = datetime.datetime.now(datetime.UTC)
    since, until = now - _SKEW, now + _LIFETIME
    ca_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    # Two authorities of the same name in one trust store would differ only in their keys, so each gets its own name.
    ca_name = _name(f"image-builder lab CA {serial:040x}")
    identifier = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca = (
        x509.CertificateBuilder()
        .subject_name(ca_name)
        .issuer_name(ca_name)
        .public_key(ca_key.public_key())
        .serial_number(serial)
        .not_valid_before(since)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    server = (
        x509.CertificateBuilder()
        .subject_name(_name(host))
        .issuer_name(ca_name)
        .public_key(server_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(not_before or since)
        .not_valid_after(not_after or until)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(server_key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    private = server_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    files = Certificate(directory / "ca.pem", directory / "server.pem", directory / "server-key.pem")
    _write(files.ca, ca.public_bytes(serialization.Encoding.PEM), 0o644)
    _write(files.server, server.public_bytes(serialization.Encoding.PEM), 0o644)
    _write(files.key, private, 0o600)
    return files


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a new file whose permissions never exceed ``mode``. Raises FileExistsError."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
        stream.write(content)
