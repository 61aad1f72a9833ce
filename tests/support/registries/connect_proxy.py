"""A proxy that opens tunnels for clients with its password, to servers that only it can find; it may die."""

from __future__ import annotations

import base64
import contextlib
import http.server
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.support.servers import running

_BLOCK = 1 << 16


@dataclass
class ConnectProxy:
    """A running proxy: ``tunnels`` are those so far (``host:port``), ``refused`` those without the password."""

    address: tuple[str, int]
    server: http.server.HTTPServer
    tunnels: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    _open: set[socket.socket] = field(default_factory=set)
    _dead: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def die(self) -> None:
        """Refuse everything from now on and cut every tunnel, as if the proxy had crashed."""
        self.server.shutdown()
        self.server.server_close()
        with self._lock:
            self._dead = True
            for side in self._open:
                with contextlib.suppress(OSError):
                    side.shutdown(socket.SHUT_RDWR)

    def connect(self, client: socket.socket, server: socket.socket) -> None:
        """Copy in both directions until both have ended."""
        with self._lock:
            if self._dead:
                return
            self._open |= {client, server}
        there = threading.Thread(target=_copy, args=(client, server))
        there.start()
        _copy(server, client)
        there.join()
        with self._lock:
            self._open -= {client, server}


@contextlib.contextmanager
def connect_proxy(
    login: tuple[str, str] | None, known: Mapping[str, tuple[str, int]], address: str = "127.0.0.1"
) -> Iterator[ConnectProxy]:
    """Serve CONNECT until the block ends, to everyone if ``login`` is None; ``known`` are the servers by name."""
    basic = f"Basic {base64.b64encode(':'.join(login or ()).encode()).decode()}"

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            name = self.path.partition(":")[0]
            if login and self.headers.get("Proxy-Authorization") != basic:
                proxy.refused.append(self.path)
                self.send_error(407)
            elif name not in known:
                self.send_error(502, f"{name} has no address")
            else:
                proxy.tunnels.append(self.path)
                with socket.create_connection(known[name]) as server:
                    self.send_response(200)
                    self.end_headers()
                    proxy.connect(self.connection, server)
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    with running(http.server.ThreadingHTTPServer((address, 0), Handler)) as server:
        proxy = ConnectProxy((address, server.server_address[1]), server)
        yield proxy


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while block := source.recv(_BLOCK):
            target.sendall(block)
    for side in (source, target):
        with contextlib.suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)
