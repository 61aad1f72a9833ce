"""A gateway through which ctr pulls from a registry that requires credentials, as if it required none.

``ctr`` takes a password in its argument list, where everyone on the host can read it, or a header that stays the same
for the whole pull, while a registry's tokens live for minutes. So it asks a server on the loopback interface, with a
key that is made for this one pull, and the server asks the registry, with a new token as often as needed. Layers that
the registry stores elsewhere (a redirect) are fetched from there by ctr itself.
"""

from __future__ import annotations

import http.server
import secrets
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import urllib3

from image_builder.bake.pull.registry import RegistryClient
from image_builder.errors import PullError

_BLOCK = 1 << 20
_TO_REGISTRY = ("Accept", "Range", "User-Agent")
_TO_CTR = (
    "Accept-Ranges",
    "Content-Encoding",
    "Content-Length",
    "Content-Range",
    "Content-Type",
    "Docker-Content-Digest",
    "ETag",
    "Location",
    "Retry-After",
)


@dataclass
class Gateway:
    """A running gateway: ctr sends requests to ``url``, with ``authorization`` as that header's value."""

    client: RegistryClient
    authorization: str = field(repr=False)
    url: str = ""
    _failures: dict[str, str] = field(default_factory=dict)

    def note(self, path: str, failure: str = "") -> None:
        """Remember why a request failed, until one for the same path succeeds."""
        self._failures.pop(path, None)
        if failure:
            self._failures[path] = failure

    @property
    def failure(self) -> str:
        """Return the reason of the latest failure that no later success has resolved."""
        return next(reversed(list(self._failures.values())), "")


@contextmanager
def gateway(client: RegistryClient) -> Iterator[Gateway]:
    """Serve one repository until the block ends."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.gateway = Gateway(client, f"Bearer {secrets.token_urlsafe(32)}")
        server.gateway.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1})
        thread.start()
        try:
            yield server.gateway
        finally:
            server.shutdown()
            thread.join()


class _Server(http.server.ThreadingHTTPServer):
    # Don't wait for a request that the registry never answers: it ends at its own deadline.
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    gateway: Gateway

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: ctr, or the registry, may disconnect at any moment, and ctr reports the outcome."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        shared = self.server.gateway
        if not secrets.compare_digest(self.headers.get("Authorization", ""), shared.authorization):
            self._refuse(403)
            return
        headers = {name: self.headers[name] for name in _TO_REGISTRY if name in self.headers}
        try:
            answer = shared.client.stream(self.command, _path(self.path), headers)
        except (PullError, urllib3.exceptions.HTTPError) as error:
            refused = isinstance(error, PullError)
            shared.note(
                self.path, error.message if isinstance(error, PullError) else shared.client.unreachable(error)
            )
            self._refuse(401 if refused else 502)
            return
        with closing(answer):
            self._relay(answer)

    do_HEAD = do_GET  # noqa: N815

    def _relay(self, answer: urllib3.BaseHTTPResponse) -> None:
        shared = self.server.gateway
        if answer.status in (401, 403):
            shared.note(self.path, shared.client.refusal(answer, answer.read(_BLOCK)))
            self._refuse(answer.status)
            return
        if answer.status < 400:
            shared.note(self.path)
        self.send_response(answer.status)
        for name in _TO_CTR:
            if value := answer.headers.get(name):
                self.send_header(name, shared.client.local(value) if name == "Location" else value)
        if "Content-Length" not in answer.headers:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        if self.command == "GET":
            while block := answer.read1(_BLOCK, decode_content=False):
                self.wfile.write(block)
            # If the body was shorter than announced, ctr notices by the end of the connection.
            self.close_connection = self.close_connection or bool(answer.length_remaining)

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def _path(path: str) -> str:
    """Return a path without the registry's name, which containerd adds for mirrors."""
    parts = urllib.parse.urlsplit(path)
    query = [(name, value) for name, value in urllib.parse.parse_qsl(parts.query) if name != "ns"]
    return urllib.parse.urlunsplit(parts._replace(query=urllib.parse.urlencode(query)))
