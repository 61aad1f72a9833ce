"""QEMU's monitor (QMP): JSON lines over a Unix socket, one connection per command."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from image_builder.errors import BootError

_LONGEST_PATH = 107  # of a Unix socket, in bytes, on Linux


def socket_path(path: Path) -> Path:
    """Return ``path``. Raises BootError if it is too long for a socket."""
    if len(str(path).encode()) > _LONGEST_PATH:
        raise BootError(f"{path} is too long for a socket ({_LONGEST_PATH} bytes)")
    return path


def listens(path: Path) -> bool:
    """Return whether QEMU accepts commands: its socket file exists a moment before QEMU listens on it."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


def execute(
    path: Path, command: str, arguments: Mapping[str, Any] | None = None, *, timeout: float = 20
) -> Any:
    """Run one command and return its result. Raises BootError if QEMU refuses it or isn't there."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        try:
            connection.connect(str(path))
            with connection.makefile("rwb") as stream:
                stream.readline()  # the greeting
                _ask(stream, "qmp_capabilities", {})
                return _ask(stream, command, arguments or {})
        except OSError as error:
            raise BootError(f"QEMU's monitor doesn't answer to {command}: {error}") from error


def gave_up(path: Path) -> bool:
    """Return whether QEMU stopped its guest because KVM can't continue; False if it doesn't answer (yet)."""
    try:
        return bool(execute(path, "query-status", timeout=1)["status"] == "internal-error")
    except BootError:
        return False


def _ask(stream: Any, command: str, arguments: Mapping[str, Any]) -> Any:
    stream.write(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
    stream.flush()
    while line := stream.readline():
        answer = json.loads(line)
        if "error" in answer:
            raise BootError(f"QEMU refuses {command}: {answer['error'].get('desc', answer['error'])}")
        if "return" in answer:
            return answer["return"]
    raise BootError(f"QEMU ended during {command}")
