"""The server that strangers reach: what it reads of a request before it knows who asks."""

from __future__ import annotations

import io
from typing import Any

import pytest

from image_builder.node.net import serving


class Endless(io.RawIOBase):
    """A connection whose client sends ``head``, and then ``line`` for as long as somebody reads."""

    def __init__(self, head: bytes, line: bytes = b"") -> None:
        self.data, self.line, self.sent = head, line, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while len(self.data) < len(buffer) and self.line:
            self.data += self.line
        part, self.data = self.data[: len(buffer)], self.data[len(buffer) :]
        buffer[: len(part)] = part
        self.sent += len(part)
        return len(part)


class Connection:
    """The part of a socket that a handler uses."""

    def __init__(self, client: Endless) -> None:
        self.client, self.answer = client, b""

    def makefile(self, _mode: str, _size: int) -> io.BufferedReader:
        return io.BufferedReader(self.client)

    def sendall(self, data: bytes) -> None:
        self.answer += bytes(data)


class Echo(serving.Handler):
    def respond(self) -> None:
        self.answer(200, {"body": len(self.body(int(self.headers["Content-Length"])))})

    def _heard(self) -> None:
        pass


def answer(client: Endless) -> str:
    """Return the answer to a client: its status, if it has one, and its body."""
    connection: Any = Connection(client)
    server: Any = None
    Echo(connection, ("192.0.2.1", 1), server)
    head, _, body = connection.answer.decode().rpartition("\r\n\r\n")
    return f"{head[9:12]} {body.strip()}"


LONG, SHORT = (b"a: " + b"x" * size + b"\r\n" for size in (65_000, 1_000))


@pytest.mark.parametrize(
    ("head", "line", "status"),
    [
        (b"GET / HTTP/1.1\r\n", LONG, "431"),
        (b"GET / HTTP/1.1\r\n", SHORT, "431"),
        # What has no version counts as HTTP/0.9, whose answers have no status.
        (b"GET /", b"x" * 1000, ""),
        (b"", b"x" * 1000, ""),
    ],
    ids=["long lines", "many lines", "a long path", "no line"],
)
def test_a_client_that_never_ends_its_headers_is_not_read_on(head: bytes, line: bytes, status: str) -> None:
    client = Endless(head, line)
    assert answer(client).startswith(f'{status} {{"error": "request"')
    assert client.sent <= serving.HEAD_BYTES + io.DEFAULT_BUFFER_SIZE


def test_a_long_token_and_a_long_body_are_read() -> None:
    token, length = b"Authorization: Bearer " + b"x" * 16_000, b"Content-Length: 100000"
    head = b"\r\n".join((b"POST / HTTP/1.1", token, length, b"", b""))
    assert answer(Endless(head + b"y" * 100_000)) == '200 {"body": 100000}'
