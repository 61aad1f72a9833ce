"""Answer questions over HTTP: a client that is slow, rude or silent can't keep others waiting for ever.

The standard library's threading server starts a thread for everybody who connects, and waits for each byte anew.
Here the threads are few, and each connection has one end that nothing postpones.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import socketserver
import ssl
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

# How often the server looks for connections whose time is over, and whether it is to stop.
TICK = 0.25


class Server(socketserver.TCPServer):
    """Serves at most ``most`` connections at once; further ones wait in the kernel's queue.

    A connection ends after ``seconds``, whatever it was doing. ``tls`` gives the context of a new connection. The base
    is not http.server's own, which looks up the name of its address before it serves.
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
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._tls, self._seconds = tls, seconds
        self._free, self._lock = threading.Semaphore(most), threading.Lock()
        self._open: dict[socket.socket, tuple[float, threading.Thread]] = {}
        super().__init__(address, handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; the handshake is its own thread's business."""
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
        while not self._free.acquire(timeout=TICK):
            self.service_actions()
        thread = threading.Thread(target=self._serve, args=(request, client_address), daemon=True)
        with self._lock:
            self._open[request] = (time.monotonic() + self._seconds, thread)
        try:
            thread.start()
        except (
            RuntimeError
        ):  # the system has no more threads: this one's connection is closed, and told below
            with self._lock:
                del self._open[request]
            self._free.release()
            raise

    def _serve(self, request: socket.socket, client: Any) -> None:
        try:
            if isinstance(request, ssl.SSLSocket):
                request.do_handshake()
            self.finish_request(request, client)
        except OSError:
            pass  # it hung up, was silent, or speaks no TLS that we do: nobody is there to be told
        except Exception:
            self.handle_error(request, client)  # a bug, which is one request's alone
        finally:
            with self._lock:
                del self._open[request]
            self.shutdown_request(request)
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Say where a bug is, without its message: what a request holds may be in that."""
        kind, _, trace = sys.exc_info()
        words = "".join(traceback.format_tb(trace))
        sys.stderr.write(f"a request ended with {kind.__name__ if kind else 'nothing'}:\n{words}")
        sys.stderr.flush()

    def service_actions(self) -> None:
        """End the connections whose time is over. Called in each turn of ``serve_forever``."""
        now = time.monotonic()
        with self._lock:
            for request, (deadline, _) in self._open.items():
                if deadline < now:
                    _hang_up(request)

    def server_close(self) -> None:
        """Close the port; end what is being served, and wait for that."""
        super().server_close()
        with self._lock:
            left = dict(self._open)
            for request in left:
                _hang_up(request)
        for _, thread in left.values():
            thread.join()


def _hang_up(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is over already
        # Not the method of a TLS socket: that takes the session away from the thread that uses it.
        socket.socket.shutdown(request, socket.SHUT_RDWR)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET and POST in JSON, and says nothing on standard error: requests hold what no log may."""

    server_version, sys_version = "node-agent", ""

    def respond(self) -> None:
        """Answer the request: its method is ``command``."""
        raise NotImplementedError

    def do_GET(self) -> None:
        self.respond()

    def do_POST(self) -> None:
        self.respond()

    def answer(self, status: int, value: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        """Send an object, and nothing after it."""
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
        """Refuse what is no request, or of a method that is not served."""
        self.close_connection = True
        words = message or self.responses.get(code, ("",))[0]
        self.answer(code, {"error": "request", "message": words})

    def log_message(self, format: str, *args: Any) -> None:
        pass
