"""The lab's cluster authority: certificates for servers and for clients of the API server.

Its key is only in memory unless another program signs with it too; what it signs is written where its owner reads it.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_SKEW = datetime.timedelta(hours=1)
_LIFETIME = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Signed:
    """A certificate and its private key, both as PEM."""

    certificate: bytes
    key: bytes

    def write(self, directory: Path, name: str) -> tuple[Path, Path]:
        """Write both to files; return their paths (certificate, key)."""
        paths = directory / f"{name}.pem", directory / f"{name}-key.pem"
        for path, content in zip(paths, (self.certificate, self.key), strict=True):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
                stream.write(content)
        return paths


class Authority:
    """A certificate authority for one cluster. Like those of old clusters, its certificate declares no key usage."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "image-builder lab cluster")])
        self._identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(self._identifier, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def signed(self) -> Signed:
        """Return the authority's own certificate and key."""
        return Signed(self.certificate, private_pem(self._key))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + _LIFETIME)
        )

    def issue(self, name: str, *, groups: Sequence[str] = (), addresses: Sequence[str] = ()) -> Signed:
        """Sign a certificate for the user ``name`` in ``groups``; with ``addresses``, for a server as well."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name(
            [
                *(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups),
                x509.NameAttribute(NameOID.COMMON_NAME, name),
            ]
        )
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if addresses else [])]
        builder = (
            self._builder(subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._identifier),
                critical=False,
            )
        )
        if addresses:
            names = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return Signed(certificate.public_bytes(serialization.Encoding.PEM), private_pem(key))

    def kubeconfig(self, server: str, name: str, *, groups: Sequence[str] = ()) -> str:
        """Return a kubeconfig (JSON, which is YAML) for the user ``name``, with a new certificate."""
        signed = self.issue(name, groups=groups)
        user = {"client-certificate-data": _data(signed.certificate), "client-key-data": _data(signed.key)}
        cluster = {"server": server, "certificate-authority-data": _data(self.certificate)}
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "lab", "cluster": cluster}],
                "users": [{"name": name, "user": user}],
                "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": name}}],
                "current-context": "lab",
            }
        )


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as PEM (SEC 1, which old programs read too)."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


def _data(pem: bytes) -> str:
    return base64.b64encode(pem).decode("ascii")
