"""An SSH server that speaks the real protocol (paramiko's own) and runs real commands, here, as this user."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

import paramiko
from paramiko.common import AUTH_FAILED, AUTH_SUCCESSFUL, OPEN_SUCCEEDED

_BYTES = 1 << 16


class _Session(paramiko.ServerInterface):
    def __init__(self, server: Server) -> None:
        self.server = server

    def get_allowed_auths(self, _username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        same = key.get_base64() == self.server.allowed.split()[1]
        return AUTH_SUCCESSFUL if same and username == self.server.user else AUTH_FAILED

    def check_channel_request(self, _kind: str, _chanid: int) -> int:
        return OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        argv = ["sh", "-c", self.server.instead or command.decode()]
        threading.Thread(target=_execute, args=(channel, argv), daemon=True).start()
        return True


def _execute(channel: paramiko.Channel, argv: list[str]) -> None:
    pipe = subprocess.PIPE
    with channel, subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe) as child:
        assert child.stdin and child.stdout and child.stderr
        threading.Thread(target=_feed, args=(channel, child.stdin), daemon=True).start()
        errors = threading.Thread(target=_copy, args=(child.stderr, channel.sendall_stderr), daemon=True)
        errors.start()
        _copy(child.stdout, channel.sendall)
        errors.join()
        with contextlib.suppress(OSError):
            channel.send_exit_status(child.wait())


def _feed(channel: paramiko.Channel, stdin: IO[bytes]) -> None:
    with contextlib.suppress(OSError), stdin:
        while part := channel.recv(_BYTES):
            stdin.write(part)
            stdin.flush()


def _copy(stream: IO[bytes], send: Callable[[bytes], object]) -> None:
    with contextlib.suppress(OSError):
        while part := stream.read1(_BYTES):  # type: ignore[attr-defined]
            send(part)


class _Files(paramiko.SFTPServerInterface):
    """Takes files for the user's home."""

    def __init__(self, session: _Session) -> None:
        super().__init__(session)
        self.home = session.server.home

    def canonicalize(self, path: str) -> str:
        return os.path.normpath(self.home / path)

    def open(self, path: str, flags: int, _attributes: paramiko.SFTPAttributes) -> paramiko.SFTPHandle:
        handle = paramiko.SFTPHandle(flags)
        handle.writefile = (self.home / path).open("wb")  # type: ignore[attr-defined]  # its close() closes it
        return handle


class Server:
    """Serves on one port; its host key can be changed.

    ``allowed`` is the public key's line, ``home`` takes uploads, ``instead`` is a command that runs in place of each
    requested one, ``next_key`` the host key of later connections. ``connections`` counts also those without a login.
    """

    def __init__(self, allowed: str, home: Path, user: str = "root") -> None:
        self.key: paramiko.PKey = paramiko.ECDSAKey.generate()
        self.next_key: paramiko.PKey | None = None
        self.allowed, self.home, self.user = allowed, home, user
        self.instead = ""
        self.connections = 0
        self.transports: list[paramiko.Transport] = []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.connections += 1
            transport = paramiko.Transport(connection)
            transport.add_server_key(self.key)
            transport.set_subsystem_handler("sftp", paramiko.SFTPServer, _Files)
            self.key = self.next_key or self.key
            self.transports.append(transport)
            # A client that doesn't like the host key hangs up, by FIN or by RST.
            with contextlib.suppress(EOFError, OSError, paramiko.SSHException):
                transport.start_server(server=_Session(self))

    def drop(self) -> None:
        for transport in self.transports:
            transport.close()
            # Transport.close() leaves the socket alone if its thread has already ended.
            transport.sock.close()
        self.transports.clear()

    def close(self) -> None:
        self.socket.close()
        self.drop()
