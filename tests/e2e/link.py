"""A link between a machine and a registry: all bytes to the machine share one rate, and the link can stall.

It is a TCP relay, so its payload is unchanged, including TLS. ``RegistryProxy`` limits each connection; a node's whole
path to its registry has a limit too, and a stalled network doesn't close connections.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Self

BLOCK = 16 * 1024
# The kernel's own buffer on each side. A link that held megabytes would still deliver data while it is stalled.
_BUFFER = 64 * 1024


class Link:
    """Relays connections from ``listen`` to ``target`` between ``__enter__`` and ``__exit__``.

    ``rate`` is for all connections together, in bytes per second towards the client.
    """

    def __init__(self, listen: tuple[str, int], target: tuple[str, int], rate: float) -> None:
        self.listen, self.target, self.rate = listen, target, rate
        self.carried = 0  # bytes towards the clients
        self._flows = threading.Event()
        self._flows.set()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._due = 0.0
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._server = socket.socket()
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._server.bind(self.listen)
        self._server.listen(64)
        self._start(self._accept)
        return self

    def __exit__(self, *_error: object) -> None:
        self._closing.set()
        self._flows.set()
        # shutdown wakes the thread in accept; closing alone would not.
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._server.close()

    @property
    def address(self) -> tuple[str, int]:
        """The address and the port that it listens on."""
        ip, port = self._server.getsockname()
        return ip, port

    def freeze(self) -> None:
        """Stop relaying in both directions, without closing anything."""
        self._flows.clear()

    def thaw(self) -> None:
        """Resume relaying where it stopped."""
        self._flows.set()

    def _start(self, work: object, *words: object) -> None:
        thread = threading.Thread(target=work, args=words, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            self._start(self._carry, near)

    def _carry(self, near: socket.socket) -> None:
        with near, socket.socket() as far, contextlib.suppress(OSError):
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            far.connect(self.target)
            with self._lock:
                if self._closing.is_set():
                    return
                self._sockets |= {near, far}
            try:
                up = threading.Thread(target=self._pump, args=(near, far, False), daemon=True)
                up.start()
                self._pump(far, near, True)
                up.join()
            finally:
                with self._lock:
                    self._sockets -= {near, far}

    def _pump(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while block := source.recv(BLOCK):
                if counted:
                    self._wait(len(block))
                self._flows.wait()
                sink.sendall(block)
        # One direction has ended; the other may still have data to send.
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _wait(self, size: int) -> None:
        """Wait for this block's turn on the link."""
        with self._lock:
            # Oversleeping is made up for, idle time isn't.
            self._due = max(self._due, time.monotonic() - 0.05) + size / self.rate
            due = self._due
            self.carried += size
        if (left := due - time.monotonic()) > 0:
            self._closing.wait(left)
