"""The import host of managed disks: a proxy in front of Azurite that refuses what Azure refuses but Azurite accepts.

According to azcopy's source and the reference of Put Page: no Put Blob, no Delete, no setting of properties or
metadata; no page over 4 MiB or beyond the end. ``faults`` make requests fail on purpose; ``log`` has every Put Page
that was stored.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler
from threading import Event, Lock
from typing import Literal
from urllib.parse import parse_qs, urlsplit

from tests.support.arm.pages import Store
from tests.support.servers import PatientServer, running

LARGEST = 4 << 20
_HOP = {"connection", "host", "transfer-encoding", "keep-alive", "date", "server", "content-length"}


@dataclass(frozen=True)
class Page:
    """A Put Page request: its offset and length in bytes, and whether it clears them."""

    start: int
    length: int
    clears: bool = False


# What happens to a Put Page: it is answered with a status, its connection is reset or never answered, a byte is altered
# in transit, or its answer is lost after the page was stored. None lets it pass.
Fault = Callable[[Page], int | Literal["reset", "stall", "flip", "lose"] | None]


@dataclass
class ImportHost:
    """The import host; ``log`` lists the stored pages, ``received`` counts the bytes of all pages that were sent."""

    store: Store
    faults: list[Fault] = field(default_factory=list)
    log: list[Page] = field(default_factory=list)
    received: int = 0
    retry_after: str = ""
    ended: Event = field(default_factory=Event)
    lock: Lock = field(default_factory=Lock)

    def refusal(self, method: str, query: dict[str, list[str]], name: str, page: Page | None) -> int:
        """Return the status with which a request is refused, or 0 if it isn't."""
        operation = query.get("comp", [""])[0]
        if method == "GET" or method == "HEAD":
            return 0
        if method != "PUT" or operation != "page" or page is None:
            return 403
        if page.length > LARGEST:
            return 413
        return 416 if page.start + page.length > self.store.sizes.get(name, 0) else 0

    def fault(self, page: Page) -> int | str | None:
        with self.lock:
            return next((effect for fault in self.faults if (effect := fault(page)) is not None), None)


@contextmanager
def import_host(store: Store) -> Iterator[ImportHost]:
    """Serve the import host until the block ends; until then the store's URLs point to it."""
    host = ImportHost(store)
    served = {"host": host, "upstream": urlsplit(store.url).netloc}
    server = PatientServer(("127.0.0.1", 0), type("Handler", (_Handler,), served))
    store.host = f"http://127.0.0.1:{server.server_port}"
    with running(server):
        try:
            yield host
        finally:
            host.ended.set()
            store.host = ""


class _Handler(BaseHTTPRequestHandler):
    """Answers for the import host: handles refusals and faults itself, and forwards the rest to ``upstream``."""

    protocol_version = "HTTP/1.1"
    host: ImportHost
    upstream: str

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        page = _page(self.headers)
        name = parts.path.rsplit("/", 1)[1]
        if status := self.host.refusal(self.command, parse_qs(parts.query), name, page):
            self._refuse(status)
            return
        effect = self.host.fault(page) if page and self.command == "PUT" else None
        if page and self.command == "PUT":
            with self.host.lock:
                self.host.received += len(data)
        if effect == "stall":
            self.host.ended.wait()
        if effect in ("reset", "stall"):
            self._cut()
        elif isinstance(effect, int):
            self._refuse(effect)
        else:
            if effect == "flip":
                data = bytes([data[0] ^ 1]) + data[1:]
            self._forward(data, page, is_lost=effect == "lose")

    do_GET = do_HEAD = do_PUT = do_DELETE = _handle  # noqa: N815  # names of http.server

    def _forward(self, data: bytes, page: Page | None, *, is_lost: bool) -> None:
        connection = http.client.HTTPConnection(self.upstream)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
        connection.request(self.command, self.path, data, {**headers, "Host": self.upstream})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        if page and answer.status == 201:
            with self.host.lock:
                self.host.log.append(page)
        if is_lost:
            self._cut()
            return
        self.send_response_only(answer.status)
        for header, value in answer.getheaders():
            if header.lower() not in _HOP:
                self.send_header(header, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int) -> None:
        self.send_response_only(status)
        if self.host.retry_after:
            self.send_header("Retry-After", self.host.retry_after)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _cut(self) -> None:
        self.close_connection = True
        self.connection.close()

    def log_message(self, *_: object) -> None:
        return


def _page(headers: Message) -> Page | None:
    extent = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("x-ms-range") or headers.get("Range") or "")
    if not extent:
        return None
    start, end = int(extent[1]), int(extent[2]) + 1
    return Page(start, end - start, headers.get("x-ms-page-write") == "clear")
