"""The suite's query to name servers, sent to real sockets: only a server that answers it counts."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from image_builder.settings import SUITE

pytestmark = pytest.mark.root

ANSWERS, IS_SILENT, MISTAKES, IS_AWAY = (f"127.0.3.{number}" for number in range(1, 5))


@contextmanager
def servers() -> Iterator[int]:
    """Run name servers at the addresses, all on one port: one is silent, one answers a different query."""
    with ExitStack() as stack:
        sockets = {
            address: stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            for address in (ANSWERS, IS_SILENT, MISTAKES)
        }
        port = 0
        for address, one in sockets.items():
            one.bind((address, port))
            port = one.getsockname()[1]
        threads = [
            threading.Thread(target=_serve, args=(sockets[address], flaw))
            for address, flaw in ((ANSWERS, 0), (MISTAKES, 1))
        ]
        for thread in threads:
            thread.start()
        try:
            yield port
        finally:
            for address in (ANSWERS, MISTAKES):
                sockets[IS_SILENT].sendto(b"", (address, port))
            for thread in threads:
                thread.join()


def _serve(server: socket.socket, flaw: int) -> None:
    """Answer until an empty datagram arrives."""
    query, client = server.recvfrom(512)
    while query:
        server.sendto(bytes([query[0] ^ flaw]) + query[1:2] + b"\x81\x80" + query[4:], client)
        query, client = server.recvfrom(512)


@pytest.mark.parametrize(
    ("named", "answering"),
    [
        ((IS_AWAY, ANSWERS), [ANSWERS]),
        ((IS_SILENT,), []),
        ((MISTAKES, IS_AWAY), []),
        ((), []),
    ],
    ids=["the second", "silent", "wrong or away", "none"],
)
def test_only_a_name_server_that_answers_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: tuple[str, ...], answering: list[str]
) -> None:
    monkeypatch.syspath_prepend(os.fspath(SUITE))
    script = importlib.import_module("test_boot").NAME_SERVERS
    lines = ["# made by hand", "search cluster.test", *(f"nameserver {address}" for address in named)]
    (tmp_path / "resolv.conf").write_text("".join(f"{line}\n" for line in lines))
    with servers() as port:
        argv = [sys.executable, "-c", script, tmp_path / "resolv.conf", str(port)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == answering
