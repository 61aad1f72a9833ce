"""The lab's certificates, as a TLS client judges them; the handshake happens in memory."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from image_builder.lab import certificate

HOST = "registry.lab.internal"


def _handshake(made: certificate.Certificate, ca: Path, name: str) -> None:
    """Connect a strict client that trusts only ``ca`` to a server with the certificate. Raises ssl.SSLError."""
    trusting = ssl.create_default_context(cafile=str(ca))
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT  # the default of Python 3.13
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(made.server, made.key)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server, server_hostname=name)
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    done: set[ssl.SSLObject] = set()
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                continue
    assert done == {client, server}


def _make(path: Path, **validity: datetime.datetime) -> certificate.Certificate:
    path.mkdir(exist_ok=True)
    return certificate.make(HOST, path, **validity)


def test_a_client_that_trusts_the_authority_believes_the_name(tmp_path: Path) -> None:
    made = _make(tmp_path)
    _handshake(made, made.ca, HOST)


def test_another_name_is_refused(tmp_path: Path) -> None:
    made = _make(tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        _handshake(made, made.ca, "registry.example.org")


def test_the_authority_of_another_start_is_refused(tmp_path: Path) -> None:
    made, other = _make(tmp_path / "one"), _make(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
        _handshake(made, other.ca, HOST)


def test_an_expired_one_can_be_made_and_is_refused(tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    made = _make(tmp_path, not_before=now - 2 * day, not_after=now - day)
    with pytest.raises(ssl.SSLCertVerificationError, match="certificate has expired"):
        _handshake(made, made.ca, HOST)


def test_what_lies_there_afterwards(tmp_path: Path) -> None:
    made = _make(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"ca.pem", "server.pem", "server-key.pem"}
    assert made.key.stat().st_mode & 0o777 == 0o600
    ca = x509.load_pem_x509_certificate(made.ca.read_bytes())
    server = x509.load_pem_x509_certificate(made.server.read_bytes())
    server.verify_directly_issued_by(ca)
    assert ca.public_key() != server.public_key()
    # The only private key is the server's; the authority's isn't stored anywhere.
    private = [p for p in tmp_path.iterdir() if b"PRIVATE KEY" in p.read_bytes()]
    assert private == [made.key]
    with pytest.raises(FileExistsError):
        certificate.make(HOST, tmp_path)
