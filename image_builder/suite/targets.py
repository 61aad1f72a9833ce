"""The targets of the suite: a mounted root, a machine over SSH, or a deliberately damaged root.

A machine of a pool is reached through standard input, which is a socket: the process that holds the connection to the
machine runs each command.

Two kinds of target show that checks can fail: the user's checks and, in tests, the suite's own (tests/suite). With
``mutant:`` each check gets a fresh overlay of the image's trees with that check's mutation. With ``broken:`` before an
SSH address, each check runs on the machine as it is, and then on the broken one.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import paramiko
import pytest
import testinfra
from testinfra.backend.base import BaseBackend, CommandResult
from testinfra.backend.paramiko import ParamikoBackend
from testinfra.host import Host

from image_builder.errors import UsageError
from image_builder.machine import ssh
from image_builder.machine.shell import Shell, ShellEndedError
from image_builder.machine.ssh import SshAddress

TARGET = pytest.StashKey["Target"]()
# No command that a check runs takes this long, even on an emulated machine.
_COMMAND_SECONDS = 300.0
# What a login and a shell's start raise; the key's file may be damaged (ValueError).
_REFUSALS = (OSError, EOFError, ValueError, paramiko.SSHException)


@dataclass(frozen=True)
class Target:
    """A target, whose ``kind`` is sandbox, ssh, stdin, broken or mutant.

    ``path`` is a root (mutant: lower trees, topmost first, separated by colons).
    """

    kind: str
    path: str = ""
    work: str = ""
    address: SshAddress | None = None

    @property
    def booted(self) -> bool:
        return self.kind in ("ssh", "stdin", "broken")


def parse_target(url: str) -> Target:
    """Return the target that a URL names. Raises ValueError if the URL is invalid."""
    kind, _, rest = url.partition(":")
    if kind == "sandbox" and Path(rest).is_dir() and Path(rest).is_absolute():
        return Target("sandbox", path=rest)
    if url == "stdin:":
        return Target("stdin")
    if kind == "mutant":
        trees, _, options = rest.partition("?")
        return Target("mutant", path=trees, work=parse_qs(options)["work"][0])
    if kind in ("ssh", "broken"):
        try:
            address = ssh.parse(url.removeprefix("broken:"))
        except UsageError as error:
            raise ValueError(error.message) from error
        if address.known_hosts:
            return Target(kind, address=address)
        raise ValueError(f"{url}: give ssh://user@host:port?key=/path&known_hosts=/path")
    raise ValueError(
        f"{url}: neither sandbox:/path of a directory nor ssh://user@host:port?key=…&known_hosts=…"
    )


@cache
def open_target(target: Target) -> Host:
    """Return testinfra's host for a target that isn't a mutant: one connection for the whole run."""
    if not target.booted:
        return enter(target.path)
    backend = _StrictParamiko(target.address) if target.address else Relayed(socket.socket(fileno=0))
    machine = Host(backend)
    backend.set_host(machine)
    return machine


def enter(path: str | Path) -> Host:
    """Return testinfra's host for a mounted root."""
    host = testinfra.get_host(os.fspath(path), connection="chroot")
    # Otherwise it asks an interpreter in the root, for which it needs the encoding if the root's path isn't ASCII.
    host.backend._encoding = "utf-8"
    return host


class _StrictParamiko(ParamikoBackend):  # type: ignore[misc]
    """testinfra's backend, except that an unknown or changed host key ends the run, and that one shell serves it all.

    The original accepts any host key with a warning, reads the caller's ~/.ssh/config, waits for ever for a command,
    and logs in and calls sudo for each.
    """

    def __init__(self, address: SshAddress) -> None:
        super().__init__(f"{address.user}@{address.host}:{address.port}", timeout=60)
        self.address = address
        # Connections to the bastions on the way, and to the machine.
        self._clients: list[paramiko.SSHClient] = []
        # Otherwise it asks an interpreter on the machine as soon as something isn't ASCII.
        self._encoding = "utf-8"
        self._shell: Shell | None = None
        # Why the last login gave no shell; there is no further one.
        self._refusal = ""

    def run(self, command: str, *args: str, **kwargs: Any) -> CommandResult:  # noqa: ARG002 (testinfra's signature)
        """Run a command as root. Raises TimeoutError, ShellEndedError; the next one then gets another shell.

        If a new connection gives no shell, the run ends: each of the other checks would wait for the machine as long,
        or be refused by it once more.
        """
        line = _line(self, command, args)
        if self._shell is None:
            self._shell = self._start()
        try:
            status, out, err = self._shell.run(line, _COMMAND_SECONDS)
        except OSError:
            self._shell = None
            raise
        return self.result(status, self.encode(line), out, err)

    def _start(self) -> Shell:
        """Start a shell over the connection, or over a new one if it was lost, and check that it is one."""
        kept = self._kept_transport()
        if self._refusal:
            pytest.exit(self._refusal)
        try:
            transport = kept or self.client.get_transport()
            assert transport is not None
            shell = Shell(transport, sudo=self.address.user != "root", seconds=self.timeout)
            shell.run(":", _COMMAND_SECONDS)
        except _REFUSALS as error:
            self.__dict__.pop("client", None)
            if kept:
                raise
            self._refusal = self._explain(error)
            pytest.exit(self._refusal)
        return shell

    def _kept_transport(self) -> paramiko.Transport | None:
        """Return the connection; forget it if it was lost."""
        client: paramiko.SSHClient | None = self.__dict__.get("client")
        transport = client.get_transport() if client else None
        if transport is None or not transport.is_active():
            self.__dict__.pop("client", None)
            return None
        return transport

    def _explain(self, error: Exception) -> str:
        if isinstance(error, ConnectionError):
            return str(error)
        last_line = error.last_line if isinstance(error, ShellEndedError) else ""
        to = self.address
        return f"no root shell on {to.user}@{to.host}:{to.port}: {last_line or str(error) or type(error).__name__}"

    @cached_property
    def client(self) -> paramiko.SSHClient:
        while self._clients:
            self._clients.pop().close()
        to = self.address
        for user, host, port in (
            *((hop.user or to.user, hop.address, hop.port) for hop in to.jump),
            (to.user, to.host, to.port),
        ):
            try:
                self._clients.append(self._log_in(user, host, port))
            except _REFUSALS as error:
                reason = str(error) or type(error).__name__
                raise ConnectionError(f"can't log in to {user}@{host}:{port}: {reason}") from error
        transport = self._clients[-1].get_transport()
        assert transport is not None
        transport.set_keepalive(15)
        return self._clients[-1]

    def _log_in(self, user: str, host: str, port: int) -> paramiko.SSHClient:
        """Log in to the next host on the way, through the previous one."""
        via = self._clients[-1].get_transport() if self._clients else None
        channel = (
            via.open_channel("direct-tcpip", (host, port), ("127.0.0.1", 0), timeout=self.timeout)
            if via
            else None
        )
        client = paramiko.SSHClient()
        client.load_host_keys(str(self.address.known_hosts))
        client.set_missing_host_key_policy(paramiko.RejectPolicy())
        client.connect(
            host,
            port=port,
            username=user,
            key_filename=str(self.address.key) if self.address.key else None,
            sock=channel,
            allow_agent=False,
            look_for_keys=False,
            timeout=self.timeout,
            banner_timeout=self.timeout,
            auth_timeout=self.timeout,
        )
        return client


class Relayed(BaseBackend):  # type: ignore[misc]
    """Commands for the process that holds the connection; its reply is a message, and one for each stream.

    See image_builder/pool/steps/suite.py.
    """

    NAME = "relayed"

    def __init__(self, relay: socket.socket) -> None:
        super().__init__("relayed")
        self._encoding = "utf-8"
        self._connection = Connection(relay.detach())

    def run(self, command: str, *args: str, **kwargs: Any) -> CommandResult:  # noqa: ARG002 (testinfra's signature)
        """Run a command as root. Raises OSError where it was not run to its end, or no reply comes."""
        line = _line(self, command, args)
        try:
            self._connection.send_bytes(json.dumps([line, _COMMAND_SECONDS]).encode())
            message, out, err = (self._connection.recv_bytes() for _ in range(3))
        except EOFError as error:
            raise ConnectionAbortedError(f"the connection to the machine is lost: {line}") from error
        reply = json.loads(message)
        if "status" not in reply:
            raise OSError(f"{reply['error']}: {reply['message']}")
        return self.result(reply["status"], self.encode(line), out, err)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _line(backend: BaseBackend, command: str, args: Sequence[str]) -> str:
    """Return the line that root's shell runs."""
    line: str = backend.quote(command, *args)
    return backend.get_sudo_command(line, backend.sudo_user) if backend.sudo_user else line
