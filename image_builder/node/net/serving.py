"""An HTTP server: a client that is slow, rude or silent can't keep others waiting forever.

The standard library's threading server starts a thread for every connection, and its timeout restarts with each byte.
Here the number of threads is limited, each connection has one deadline that nothing postpones, and a connection that
hasn't sent its request yet gives way to the next one when there is no room.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import io
import json
import socket
import socketserver
import ssl
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# How often the server checks for connections whose time is over, and whether it should stop.
TICK = 0.25
# Seconds from connecting to the complete request: more than a handshake over the worst network takes.
PATIENCE = 3.0
# For a request's line and headers together. The standard library reads 100 lines of 64 KiB for any client.
HEAD_BYTES = 32 << 10


@dataclass
class _Connection:
    """A connection, silent until its whole request has been read. ``deadline`` is a time of the monotonic clock."""

    address: str
    began: float
    deadline: float
    thread: threading.Thread
    is_silent: bool = True
    is_ended: bool = False


class Server(socketserver.TCPServer):
    """A server of at most ``most`` connections at once, at most ``per_address`` of them per address (0: no such limit).

    If there is no room, the connection that has been silent the longest is ended, one of the same address if that has
    used up its share. If all are being served, a new one waits in the kernel's queue, or is closed if its address has
    used up its share. A connection has ``patience`` seconds for its request, and ``seconds`` in all, whatever it is
    doing. ``tls`` returns the context for a new connection. The base class isn't http.server's own, which looks up the
    name of its address before it serves.
    """

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[Handler],
        *,
        most: int,
        seconds: float,
        per_address: int = 0,
        patience: float = PATIENCE,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._tls, self._seconds, self._patience = tls, seconds, min(patience, seconds)
        self._per_address = per_address
        self._free, self._lock = threading.Semaphore(most), threading.Lock()
        self._open: dict[socket.socket, _Connection] = {}
        super().__init__(address, handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; the handshake is left to its own thread."""
        connection, client = super().get_request()
        try:
            connection.settimeout(self._seconds)
            if self._tls is not None:
                connection = self._tls().wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
        except BaseException:
            connection.close()
            raise
        return connection, client

    def process_request(self, request: Any, client_address: Any) -> None:
        address = str(client_address[0])
        if not self._has_share(address):
            self.shutdown_request(request)
            return
        while not self._free.acquire(blocking=False):
            with self._lock:
                self._end_oldest(self._open.values())
            if self._free.acquire(timeout=TICK):
                break
            self.service_actions()
        thread = threading.Thread(target=self._serve, args=(request, client_address), daemon=True)
        now = time.monotonic()
        with self._lock:
            self._open[request] = _Connection(address, now, now + self._patience, thread)
        try:
            thread.start()
        except (
            RuntimeError
        ):  # the system has no more threads: the caller reports that and closes this connection
            with self._lock:
                del self._open[request]
            self._free.release()
            raise

    def _has_share(self, address: str) -> bool:
        """Return whether an address may have another connection; its oldest silent one is ended if necessary."""
        if not self._per_address:
            return True
        with self._lock:
            own = [
                connection
                for connection in self._open.values()
                if connection.address == address and not connection.is_ended
            ]
            return len(own) < self._per_address or self._end_oldest(own)

    def _end_oldest(self, among: Iterable[_Connection]) -> bool:
        """End the connection that has been silent the longest; return whether there was one. Needs the lock."""
        silent = [connection for connection in among if connection.is_silent and not connection.is_ended]
        if not silent:
            return False
        oldest = min(silent, key=lambda connection: connection.began)
        oldest.is_ended = True
        _hang_up(next(request for request, connection in self._open.items() if connection is oldest))
        return True

    def heard(self, request: socket.socket) -> None:
        """Note that a connection's request has been read: from now on it has the time of one that is being served."""
        with self._lock:
            if connection := self._open.get(request):
                connection.is_silent, connection.deadline = False, connection.began + self._seconds

    def _serve(self, request: socket.socket, client: Any) -> None:
        try:
            if isinstance(request, ssl.SSLSocket):
                request.do_handshake()
            self.finish_request(request, client)
        except OSError:
            pass  # it hung up, was silent, or speaks no TLS that we do: there is no one to tell
        except Exception:
            self.handle_error(request, client)  # a bug, which affects only this request
        finally:
            with self._lock:
                del self._open[request]
            self.shutdown_request(request)
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Say where a bug is, without its message: what a request holds may be in that."""
        kind, _, trace = sys.exc_info()
        lines = "".join(traceback.format_tb(trace))
        sys.stderr.write(f"a request ended with {kind.__name__ if kind else 'nothing'}:\n{lines}")
        sys.stderr.flush()

    def service_actions(self) -> None:
        """End the connections whose time is over. Called in each iteration of ``serve_forever``."""
        now = time.monotonic()
        with self._lock:
            for request, connection in self._open.items():
                if connection.deadline < now:
                    _hang_up(request)

    def server_close(self) -> None:
        """Close the port, end all connections, and wait for their threads."""
        super().server_close()
        with self._lock:
            requests = dict(self._open)
            for request in requests:
                _hang_up(request)
        for connection in requests.values():
            connection.thread.join()


def _hang_up(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        # Not the TLS socket's own method, which takes the session away from the thread that uses it.
        socket.socket.shutdown(request, socket.SHUT_RDWR)


class _Reader(io.BufferedReader):
    """A connection to read from, of which only the first bytes may be read by lines."""

    _left = HEAD_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        """Return a line; one that is too long is cut off. Raises http.client.LineTooLong when no more may follow."""
        if self._left < 0:
            raise http.client.LineTooLong("request")
        most = self._left + 1
        line = super().readline(most if size is None or size < 0 else min(size, most))
        self._left -= len(line)
        return line


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET and POST in JSON, and logs nothing to standard error: requests contain what no log may."""

    server_version, sys_version = "node-agent", ""

    def setup(self) -> None:
        super().setup()
        self.rfile = _Reader(self.rfile.detach())

    def respond(self) -> None:
        """Answer the request: its method is ``command``."""
        raise NotImplementedError

    def do_GET(self) -> None:
        self._heard()
        self.respond()

    def do_POST(self) -> None:
        self.respond()

    def body(self, length: int) -> bytes:
        """Read the request's body."""
        data = self.rfile.read(length)
        self._heard()
        return data

    def _heard(self) -> None:
        assert isinstance(self.server, Server)
        self.server.heard(self.request)

    def answer(self, status: int, value: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        """Send an object as the whole answer."""
        body = json.dumps(value).encode() + b"\n"
        self.send_response(status)
        own = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
        }
        for name, text in {**own, **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Refuse what is not a request, or has a method that is not served."""
        self.close_connection = True
        text = message or self.responses.get(code, ("",))[0]
        self.answer(code, {"error": "request", "message": text})

    def log_message(self, format: str, *args: Any) -> None:
        pass
