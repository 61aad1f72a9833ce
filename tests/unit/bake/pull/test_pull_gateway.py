"""The reason why a pull through the gateway failed: the last failed request, and none that was recovered from."""

from __future__ import annotations

import io
from typing import Any

import pytest
import urllib3

from image_builder.bake.pull.gateway import Gateway, _Handler, _Server
from image_builder.bake.pull.reference import parse
from image_builder.bake.pull.registry import RegistryClient

MANIFEST, LAYER = "/v2/app/manifests/1", "/v2/app/blobs/2"


class Registry(RegistryClient):
    """A registry that answers each request with the next status."""

    def __init__(self) -> None:
        super().__init__(parse("registry.example/app:1"), {})
        self.statuses: list[int] = []

    def stream(self, *_: object, **__: object) -> urllib3.BaseHTTPResponse:
        status = self.statuses.pop(0)
        return urllib3.HTTPResponse(
            io.BytesIO(b"{}"), {"Content-Length": "2"}, status, reason="Denied", preload_content=False
        )


class Connection:
    """The connection from which a handler reads its request and to which it writes its answer."""

    def __init__(self, request: bytes) -> None:
        self.request, self.answer = request, b""

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self.request)

    def sendall(self, data: bytes) -> None:
        self.answer += bytes(data)


@pytest.fixture
def way() -> Gateway:
    return Gateway(Registry(), "Bearer key")


def ask(way: Gateway, path: str, status: int) -> bytes:
    """Send a request through the gateway that the registry answers with ``status``; return the answer's first line."""
    assert isinstance(way.client, Registry)
    way.client.statuses = [status]
    server: Any = object.__new__(_Server)  # created without a socket
    server.gateway = way
    lines = (
        f"GET {path}?ns=registry.example HTTP/1.1\r\nAuthorization: Bearer key\r\nConnection: close\r\n\r\n"
    )
    connection: Any = Connection(lines.encode())
    _Handler(connection, ("127.0.0.1", 1), server)
    return bytes(connection.answer).split(b"\r\n", 1)[0]


@pytest.mark.parametrize("status", [200, 206, 307])
def test_a_refusal_that_was_overcome_is_no_reason_for_what_fails_later(way: Gateway, status: int) -> None:
    assert ask(way, MANIFEST, 403) == b"HTTP/1.1 403 Forbidden"
    assert way.failure == "registry.example answered 403 Denied"
    ask(way, MANIFEST, status)
    assert way.failure == ""
    ask(way, LAYER, 500)
    assert way.failure == "", "ctr tells that itself"


def test_a_refusal_is_the_reason_whatever_else_succeeds_beside_it(way: Gateway) -> None:
    ask(way, LAYER, 401)
    ask(way, MANIFEST, 200)
    assert way.failure == "registry.example answered 401 Denied"
