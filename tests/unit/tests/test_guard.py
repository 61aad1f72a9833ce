"""Unit tests can't do what they mustn't: each attempt ends the test."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.guard import SideEffectError


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: subprocess.run(["true"]),
        lambda: os.system("true"),
        lambda: os.posix_spawn("/bin/true", ["true"], {}),
        os.fork,
        socket.socket,
        lambda: socket.getaddrinfo("localhost", 80),
    ],
)
def test_no_process_and_no_socket(attempt: Callable[[], object]) -> None:
    with pytest.raises(SideEffectError):
        attempt()


def test_root_has_no_powers_here(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(PermissionError):
        os.chown(file, 4242, 4242)
    with pytest.raises(PermissionError):
        os.mknod(tmp_path / "node", 0o020666, os.makedev(1, 3))
