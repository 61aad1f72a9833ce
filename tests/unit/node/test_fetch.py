"""The trusted authority: one like those of clusters, on a Python like that of nodes."""

from __future__ import annotations

import ssl
from http.client import HTTPMessage
from pathlib import Path
from typing import Any

import pytest

from image_builder.node.net import fetch
from tests.support.control_plane.pki import Authority

NAME = "127.0.0.1"


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Complete the handshake of both sides in memory. Raises ssl.SSLError."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(back, there, server_hostname=NAME),
        server.wrap_bio(there, back, server_side=True),
    ]
    while sides:
        for side in list(sides):
            try:
                side.do_handshake()
                sides.remove(side)
            except ssl.SSLWantReadError:
                pass


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def server(authority: Authority, tmp_path: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server", addresses=[NAME]).write(tmp_path, "server"))
    return context


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify as strictly as Python 3.13, whichever version this is."""
    made = ssl.create_default_context

    def default(*words: Any, **names: Any) -> ssl.SSLContext:
        context = made(*words, **names)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", default)


@pytest.mark.usefixtures("strict")
def test_an_authority_without_key_usages_is_believed(authority: Authority, server: ssl.SSLContext) -> None:
    text = authority.certificate.decode()
    with pytest.raises(ssl.SSLCertVerificationError, match="key usage"):
        shake_hands(ssl.create_default_context(cadata=text), server)
    shake_hands(fetch.proven_by(text), server)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("120", 120.0),
        ("86401", 86400.0),
        # More than a float can hold.
        ("9" * 400, 86400.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
        ("Thu, 01 Jan 1970 00:00:05 GMT", 0.0),
        ("soon", None),
        # Headers are Latin-1, and to Python its ² is a digit, but it can't be converted to a number.
        ("\xb2", None),
        (None, None),
    ],
)
def test_how_long_a_server_wants_to_be_left_alone(said: str | None, seconds: float | None) -> None:
    headers = HTTPMessage()
    if said is not None:
        headers["Retry-After"] = said
    assert fetch.retry_after(headers, 10.0) == seconds


def test_another_authority_is_not_believed(server: ssl.SSLContext) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(fetch.proven_by(Authority().certificate.decode()), server)
