"""A proxy that opens tunnels for who has its password, to servers that it alone can find."""

from __future__ import annotations

import base64
import contextlib
import http.server
import socket
import threading
from collections.abc import Iterator, Mapping

from tests.servers import running

_BLOCK = 1 << 16


@contextlib.contextmanager
def connect_proxy(
    login: tuple[str, str], known: Mapping[str, tuple[str, int]]
) -> Iterator[tuple[tuple[str, int], list[str]]]:
    """Serve CONNECT; yields its address, and the list of the tunnels so far (``host:port``)."""
    tunnels: list[str] = []
    basic = f"Basic {base64.b64encode(':'.join(login).encode()).decode()}"

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            if self.headers.get("Proxy-Authorization") != basic:
                self.send_error(407)
                return
            tunnels.append(self.path)
            with socket.create_connection(known[self.path.partition(":")[0]]) as server:
                self.send_response(200)
                self.end_headers()
                there = threading.Thread(target=_copy, args=(self.connection, server))
                there.start()
                _copy(server, self.connection)
                there.join()
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    with running(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield (server.server_address[0], server.server_address[1]), tunnels  # type: ignore[misc]


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while block := source.recv(_BLOCK):
            target.sendall(block)
    for side in (source, target):
        with contextlib.suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)
