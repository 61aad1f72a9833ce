"""A reverse proxy in front of a container registry that fails according to a plan, and records what it sent.

To the client it speaks HTTP/1.1, with or without TLS, and keeps connections alive; to the registry it opens one
connection per request. Linux only: it asks the kernel how much is still unsent and whether the client has hung up.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import select
import socket
import socketserver
import ssl
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler
from typing import Any, Self

from tests.support.registries.plan import Fault, Kind, Request, Tokens, Upstream

BLOCK = 64 * 1024
FLIPPED = bytes(255 - byte for byte in range(256))
HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
CODES = {401: "UNAUTHORIZED", 403: "DENIED", 404: "BLOB_UNKNOWN", 429: "TOOMANYREQUESTS"}


class RegistryProxy:
    """Listens from ``__enter__`` to ``__exit__``, which ends every thread and closes every socket.

    ``listen`` may have port 0 (see ``address``); ``tls`` is the server's context, None for plain HTTP.
    ``rate`` limits the bodies sent on each client connection, in bytes per second. ``tokens`` may be set later: a
    request without one is refused before any fault.
    """

    def __init__(
        self,
        listen: tuple[str, int],
        tls: ssl.SSLContext | None,
        upstream: Upstream,
        *,
        faults: Sequence[Fault] = (),
        rate: float | None = None,
    ) -> None:
        self.upstream, self.rate, self.tls = upstream, rate, tls
        self.tokens: Tokens | None = None
        self.closing = threading.Event()
        self._listen = listen
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._requests: list[Request] = []
        self.faults = faults

    def __enter__(self) -> Self:
        self._server = _Server(self._listen, self)
        self._acceptor = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._acceptor.start()
        return self

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self.closing.set()
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    # Wakes its thread. SSLSocket's own method would pull the TLS state from under it.
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
        self._server.shutdown()
        self._acceptor.join()
        self._server.server_close()

    @property
    def address(self) -> tuple[str, int]:
        """The IP address and the port it listens on."""
        ip, port = self._server.socket.getsockname()
        return ip, port

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The plan: the first fault that is due applies to a request.

        For its ``skip`` and ``times``, a fault counts the requests that no fault before it took. A new plan
        applies to requests that arrive from then on, and its counts begin at 0.
        """
        return self._faults

    @faults.setter
    def faults(self, plan: Sequence[Fault]) -> None:
        with self._lock:
            self._faults, self._met = tuple(plan), [0] * len(plan)

    @property
    def requests(self) -> list[Request]:
        """All requests so far in the order of their arrival, including those in progress."""
        with self._lock:
            return list(self._requests)

    def bytes_sent(self, pattern: str = "/blobs/") -> int:
        """Return the bytes of answers' bodies put on the wire for paths in which the regular expression is found."""
        return sum(request.sent for request in self.requests if re.search(pattern, request.path))

    # The rest is for the threads of the connections.

    def begin(self, method: str, path: str, range_: str | None) -> tuple[int, Fault | None]:
        """Record a request; return its number and the fault it gets."""
        with self._lock:
            fault = self._due(method, path)
            request = Request(method, path, range_, fault.kind if fault else None, time.monotonic())
            self._requests.append(request)
            return len(self._requests) - 1, fault

    def arrived(self, method: str, path: str) -> int:
        """Record a request before it is known whether it is admitted; return its number."""
        with self._lock:
            self._requests.append(Request(method, f"/login{path}", None, None, time.monotonic()))
            return len(self._requests) - 1

    def _due(self, method: str, path: str) -> Fault | None:
        for number, fault in enumerate(self._faults):
            if fault.method != method or not re.search(fault.path, path):
                continue
            nth = self._met[number] - fault.skip
            self._met[number] += 1
            if nth >= 0 and (fault.times is None or nth < fault.times):
                return fault
        return None

    def note(self, number: int, *, status: int | None = None, sent: int = 0, ended: bool = False) -> None:
        """Record the progress of a request: its status, ``sent`` more bytes, and its end, the first time."""
        with self._lock:
            request = self._requests[number]
            if status is not None:
                request = replace(request, status=status)
            if ended and request.ended is None:
                request = replace(request, ended=time.monotonic())
            self._requests[number] = replace(request, sent=request.sent + sent)

    @contextlib.contextmanager
    def tracked(
        self, raw: socket.socket, tls: ssl.SSLContext | None, name: str | None = None
    ) -> Iterator[socket.socket]:
        """Track a connection while it is open, wrapped in TLS if set (as a client of ``name``, or as the server)."""
        with raw:
            sock = raw
            if tls is not None:
                sock = tls.wrap_socket(
                    raw, server_side=name is None, server_hostname=name, do_handshake_on_connect=False
                )
            try:
                with self._lock:
                    if self.closing.is_set():
                        raise ConnectionAbortedError("the proxy is closing")
                    self._sockets.add(sock)
                if isinstance(sock, ssl.SSLSocket):
                    sock.do_handshake()
                yield sock
            finally:
                with self._lock:
                    self._sockets.discard(sock)
                sock.close()

    @contextlib.contextmanager
    def connect(self) -> Iterator[HTTPConnection]:
        """Open a connection to the registry."""
        upstream = self.upstream
        raw = socket.create_connection((upstream.ip, upstream.port), timeout=10)
        raw.settimeout(None)
        with self.tracked(raw, upstream.tls, upstream.host.partition(":")[0]) as sock:
            connection = HTTPConnection(upstream.ip, upstream.port)
            connection.sock, connection.auto_open = sock, 0
            with contextlib.closing(connection):
                yield connection


class _Pacer:
    """Spreads bytes over time: ``block`` of them about 20 times a second, or 64 KiB more often; rate 0: no limit."""

    def __init__(self, rate: float, closing: threading.Event) -> None:
        self.block = max(1, min(BLOCK, int(rate / 20))) if rate else BLOCK
        self._rate, self._closing = rate, closing
        self._due = time.monotonic()

    def wait(self, size: int) -> None:
        if not self._rate:
            return
        now = time.monotonic()
        # Sleeping too long is made up for, being idle isn't.
        self._due = max(self._due, now - 0.05) + size / self._rate
        if self._due > now and self._closing.wait(self._due - now):
            raise ConnectionAbortedError("the proxy is closing")


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    request_queue_size = 128
    daemon_threads = False  # server_close() joins them

    def __init__(self, listen: tuple[str, int], proxy: RegistryProxy) -> None:
        self.proxy = proxy
        super().__init__(listen, _Connection)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # A client or a registry may hang up at any moment; any other error is a bug and isn't suppressed.
        with (
            contextlib.suppress(OSError, HTTPException),
            self.proxy.tracked(request, self.proxy.tls) as sock,
        ):
            _Connection(sock, client_address, self)


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.proxy = self.server.proxy
        self.pacer = _Pacer(self.proxy.rate or 0, self.proxy.closing)
        self.reset = False

    def finish(self) -> None:
        super().finish()
        if isinstance(self.connection, ssl.SSLSocket) and not self.reset:
            with contextlib.suppress(OSError):
                # Without waiting for the other side's close_notify.
                self.connection.settimeout(0)
                self.connection.unwrap()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _refuse(self, tokens: Tokens) -> bool:
        """Issue a token, or demand one; return whether that completes the request."""
        if self.path.startswith("/token"):
            form = b"".join(self._body()).decode()
            status, answer = tokens.answer(self.headers.get("Authorization"), form)
            body = json.dumps(answer).encode()
            headers = [("Content-Length", str(len(body)))]
        elif tokens.lets_in(self.headers.get("Authorization", "")):
            return False
        else:
            realm = f'Bearer realm="https://{self.headers["Host"]}/token",service="lab"'
            body, status = b"", 401
            headers = [("WWW-Authenticate", realm), ("Content-Length", "0")]
        self._head(status, headers)
        if self.command != "HEAD":
            self._put(body)
        return True

    def _serve(self) -> None:
        if self.proxy.tokens:
            self.number = self.proxy.arrived(self.command, self.path)
            if self._refuse(self.proxy.tokens):
                return
        self.number, fault = self.proxy.begin(self.command, self.path, self.headers.get("Range"))
        try:
            match fault:
                case Fault(kind="silence"):
                    self._part(fault.kind)
                case Fault(kind="status"):
                    deque(self._body(), maxlen=0)
                    self._error(fault.status, "as the plan says", fault.headers)
                case Fault(kind="redirect_loop" | "elsewhere"):
                    deque(self._body(), maxlen=0)
                    scheme = "http" if self.proxy.tls is None else "https"
                    place = f"{scheme}://{fault.host or self.headers['Host']}{self.path}"
                    self._head(307, [("Location", place), ("Content-Length", "0")])
                case _:
                    self._forward(fault)
        finally:
            self.proxy.note(self.number, ended=True)

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = _serve  # noqa: N815

    def _error(self, status: int, message: str, headers: Sequence[tuple[str, str]]) -> None:
        error = {"code": CODES.get(status, "UNAVAILABLE"), "message": message, "detail": None}
        body = json.dumps({"errors": [error]}).encode()
        typed = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        self._head(status, [*typed, *headers])
        if self.command != "HEAD":
            self._put(body)

    def _forward(self, fault: Fault | None) -> None:
        with contextlib.ExitStack() as stack:
            try:
                response = self._ask(stack.enter_context(self.proxy.connect()))
            except (OSError, HTTPException) as error:
                self._error(502, f"no answer from the registry: {error}", [("Connection", "close")])
                return
            self._relay(stack.enter_context(response), fault)

    def _ask(self, connection: HTTPConnection) -> HTTPResponse:
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", self.proxy.upstream.host)
        for name, value in self.headers.items():
            if name.lower() not in HOP_BY_HOP | {"host", "expect"}:
                connection.putheader(name, value)
        try:
            connection.endheaders(self._body())
        except BrokenPipeError:
            self.close_connection = True  # the registry may have answered before it had read everything
        return connection.getresponse()

    def _body(self) -> Iterator[bytes]:
        """Yield the request's body as it arrives."""
        size = int(self.headers.get("Content-Length", 0))
        while size:
            block = self.rfile.read(min(size, BLOCK))
            if not block:
                raise ConnectionError("the client ended within a body")
            size -= len(block)
            yield block

    def _relay(self, response: HTTPResponse, fault: Fault | None) -> None:
        length = response.length  # None if the registry doesn't say; 0 for HEAD, 204 and 304
        headers = [(name, value) for name, value in response.getheaders() if name.lower() not in HOP_BY_HOP]
        if length is None:
            headers.append(("Transfer-Encoding", "chunked"))
        self._head(response.status, headers, response.reason, last=length == 0)
        drip = _Pacer(fault.rate if fault and fault.kind == "drip" else 0, self.proxy.closing)
        sent = 0
        while sent != length:
            pacers, flipped = [self.pacer], False
            size = BLOCK if length is None else min(BLOCK, length - sent)
            if fault and sent < fault.after:
                size = min(size, fault.after - sent)
            elif fault and fault.kind in ("stall", "reset", "short"):
                self._part(fault.kind)
                return
            elif fault:
                flipped = fault.kind == "wrong"
                pacers.append(drip)
            block = response.read1(min(size, *(pacer.block for pacer in pacers)))
            if not block:
                break
            sent += len(block)
            for pacer in pacers:
                pacer.wait(len(block))
            block = block.translate(FLIPPED) if flipped else block
            self._put(block, last=sent == length, chunked=length is None)
        if length is None:
            self.proxy.note(self.number, ended=True)
            self.wfile.write(b"0\r\n\r\n")
        elif sent < length:
            self.close_connection = True  # the registry's own answer was short

    def _head(
        self, status: int, headers: Sequence[tuple[str, str]], reason: str | None = None, *, last: bool = True
    ) -> None:
        """Send an answer's head; with ``last`` the request counts as ended, since hardly any work follows."""
        self.proxy.note(self.number, status=status, ended=last)
        self.send_response_only(status, reason)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()

    def _put(self, block: bytes, *, last: bool = True, chunked: bool = False) -> None:
        # Recorded first, so that a client that has read the last byte finds it in the record.
        self.proxy.note(self.number, sent=len(block), ended=last)
        try:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(block), block) if chunked else block)
        except OSError:
            self.proxy.note(self.number, sent=-len(block))
            raise

    def _part(self, kind: Kind) -> None:
        """End the connection as this kind of fault requires."""
        self.close_connection = True
        left = select.poll()
        left.register(self.connection, select.POLLRDHUP)
        # What was sent must arrive: a reset would discard what is still in the kernel's buffer.
        waiting = kind in ("stall", "silence")
        while (waiting or _unsent(self.connection)) and not self.proxy.closing.is_set():
            if left.poll(500 if waiting else 2):
                break
        self.proxy.note(self.number, ended=True)
        if kind == "reset":
            self.reset = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _unsent(sock: socket.socket) -> int:
    """Return how many bytes the other side hasn't confirmed yet."""
    (size,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))
    return int(size)
