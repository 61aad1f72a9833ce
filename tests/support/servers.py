"""A server that runs alongside the test that uses it."""

from __future__ import annotations

import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any, TypeVar

S = TypeVar("S", bound=socketserver.BaseServer)


class PatientServer(ThreadingHTTPServer):
    """A server whose clients may be killed at any time or never receive the end of an answer."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def running(server: S) -> Iterator[S]:
    """Serve in a thread until the block ends, then close the server."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
