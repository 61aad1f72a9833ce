"""A machine reached by SSH: ``ssh://USER@HOST:PORT?key=FILE&known_hosts=FILE&jump=[USER@]HOST[:PORT][,…]``.

Keys come only from that address: no agent, no ``~/.ssh``. Without ``known_hosts``, a host key that was never seen is
pinned for the lifetime of the connection object, and a different one is refused later.
"""

from __future__ import annotations

import contextlib
import logging
import posixpath
import shlex
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import paramiko

from image_builder.definition.connection import Connection, Hop, parse_jump
from image_builder.errors import BootError, CommandError, UsageError
from image_builder.system.process import TAIL_LINES, Completed

# paramiko logs every refused attempt with a traceback; what matters is raised as an exception.
logging.getLogger("paramiko").setLevel(logging.CRITICAL)

_CONNECT_SECONDS = 10.0
_BANNER_SECONDS = 30.0  # an emulated machine takes seconds to fork its sshd
_AUTH_SECONDS = 60.0
_KEEPALIVE_SECONDS = 15
# Standard output wakes its reader; standard error, which fills the same window, is polled this often.
_LOOK_SECONDS = 0.25


@dataclass(frozen=True)
class SshAddress:
    """Where a machine is and how to log in. ``key`` is a private key file without a passphrase.

    ``jump`` lists the bastions on the way, in order, which accept the same key.
    """

    user: str
    host: str
    port: int = 22
    key: Path | None = None
    known_hosts: Path | None = None
    jump: tuple[Hop, ...] = ()

    @property
    def url(self) -> str:
        """Return the address in the form that ``parse`` takes."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        jump = ",".join(hop.text for hop in self.jump)
        options = {"key": self.key, "known_hosts": self.known_hosts, "jump": jump}
        query = urlencode(
            {name: str(value) for name, value in options.items() if value}, safe="/", quote_via=quote
        )
        return f"ssh://{quote(self.user, safe='')}@{host}:{self.port}" + (f"?{query}" if query else "")

    @property
    def command(self) -> list[str]:
        """Return the OpenSSH command line for people to use."""
        argv = ["ssh", "-p", str(self.port)]
        if self.key:
            argv += ["-i", str(self.key), "-o", "IdentitiesOnly=yes"]
        if self.known_hosts:
            argv += ["-o", f"UserKnownHostsFile={self.known_hosts}"]
        return [*argv, f"{self.user}@{self.host}"]


def parse(url: str, inventory: Callable[[str], Connection] = lambda _: Connection()) -> SshAddress:
    """Return the address in ``url``. Raises UsageError saying what is wrong.

    ``inventory`` returns what applies to a host where the URL says nothing; it is called with the URL's host.
    """
    hint = "an address looks like ssh://user@host:22?key=/path/to/private/key"
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        raise UsageError(f"{url}: the port is not a number below 65536", hint=hint) from None
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(query) - {"key", "known_hosts", "jump"})
    if (
        parts.scheme != "ssh"
        or not parts.hostname
        or parts.path not in ("", "/")
        or parts.password
        or unknown
    ):
        reason = f"unknown option {', '.join(unknown)}" if unknown else "not an SSH address"
        raise UsageError(f"{url}: {reason}", hint=hint)
    files = {name: Path(query[name]) for name in ("key", "known_hosts") if query.get(name)}
    try:
        jump = parse_jump(query["jump"]) if query.get("jump") else ()
    except ValueError as error:
        raise UsageError(f"{url}: {error}", hint=hint) from None
    known = inventory(parts.hostname)
    return SshAddress(
        user=unquote(parts.username or known.user or "root"),
        host=known.address or parts.hostname,
        port=port or known.port,
        key=files.get("key", Path(known.key) if known.key else None),
        known_hosts=files.get("known_hosts"),
        jump=jump or known.hops,
    )


class _PinFirst(paramiko.MissingHostKeyPolicy):
    """Accepts the first key of a host and keeps it; paramiko itself refuses a different one later."""

    def __init__(self, keys: paramiko.HostKeys) -> None:
        self.keys = keys

    def missing_host_key(self, _client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        if self.keys.lookup(hostname) is not None:
            raise paramiko.SSHException(f"{hostname} shows a host key of another type than before")
        self.keys.add(hostname, key.get_name(), key)


class SshTarget:
    """A connection to a booted machine; a context manager. Commands run through sudo unless the user is root."""

    def __init__(self, address: SshAddress) -> None:
        self.address = address
        self._pinned = paramiko.HostKeys()
        self._client: paramiko.SSHClient | None = None

    @property
    def url(self) -> str:
        return self.address.url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection; ``connect`` may follow."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def connect(self, *, banner_seconds: float = _BANNER_SECONDS) -> None:
        """Log in. Raises BootError if the host is unreachable, has another host key, or rejects the key.

        ``banner_seconds`` is how long a server may take to send its first byte.
        """
        self.close()
        address = self.address
        client = paramiko.SSHClient()
        if address.known_hosts:
            try:
                client.load_host_keys(str(address.known_hosts))
            except OSError as error:
                raise BootError(f"{address.known_hosts}: {error.strerror}") from error
            client.set_missing_host_key_policy(paramiko.RejectPolicy())
        else:
            client.set_missing_host_key_policy(_PinFirst(self._pinned))
            for host, keys in self._pinned.items():
                for name, key in keys.items():
                    client.get_host_keys().add(host, name, key)
        try:
            client.connect(
                address.host,
                address.port,
                username=address.user,
                key_filename=str(address.key) if address.key else None,
                sock=dial(address.host, address.port, _CONNECT_SECONDS, banner_seconds),
                look_for_keys=False,
                allow_agent=False,
                timeout=_CONNECT_SECONDS,
                banner_timeout=_BANNER_SECONDS,
                auth_timeout=_AUTH_SECONDS,
                channel_timeout=_AUTH_SECONDS,
            )
        except (OSError, EOFError, paramiko.SSHException) as error:
            client.close()
            raise BootError(
                f"{address.user}@{address.host}:{address.port}: {error or type(error).__name__}"
            ) from error
        transport = client.get_transport()
        if transport is not None:
            transport.set_keepalive(_KEEPALIVE_SECONDS)
        self._client = client

    def save_known_hosts(self, path: Path) -> None:
        """Write the pinned host key to ``path`` and use it from now on."""
        self._connected()
        self._pinned.save(str(path))
        self.address = replace(self.address, known_hosts=path)

    def _connected(self) -> paramiko.SSHClient:
        if self._client is None:
            self.connect()
        assert self._client is not None
        return self._client

    def run(
        self,
        argv: Sequence[str],
        *,
        ok: Sequence[int] = (0,),
        input: str | None = None,
        timeout: float = 120,
        root: bool = True,
    ) -> Completed:
        """Run a command, as root unless ``root`` is False; ``timeout`` (seconds) covers the whole run."""
        arguments = list(argv)
        if root and self.address.user != "root":
            arguments = ["sudo", "-n", "--", *arguments]
        command = shlex.join(arguments)
        started = time.monotonic()
        try:
            status, out, err = self._execute(command, input, started + timeout)
        except TimeoutError as error:
            raise CommandError(
                f"timed out after {timeout:g} s on {self.address.host}: {command}", argv=arguments
            ) from error
        except (OSError, EOFError, paramiko.SSHException) as error:
            self.close()
            raise CommandError(f"lost {self.address.host} ({error}): {command}", argv=arguments) from error
        done = Completed(tuple(arguments), status, out, err, time.monotonic() - started)
        if status not in ok:
            tail = "\n".join((out + err).rstrip().splitlines()[-TAIL_LINES:])
            raise CommandError(
                f"exit status {status} on {self.address.host}: {command}", argv=arguments, tail=tail
            )
        return done

    def _execute(self, command: str, input: str | None, deadline: float) -> tuple[int, str, str]:
        transport = self._connected().get_transport()
        if transport is None:
            raise EOFError("the connection is closed")
        channel = transport.open_session(timeout=_AUTH_SECONDS)
        try:
            channel.settimeout(_AUTH_SECONDS)
            channel.exec_command(command)
            if input is not None:
                channel.sendall(input.encode())
            channel.shutdown_write()
            out, err = (stream.decode("utf-8", "replace") for stream in drain(channel, deadline))
            return channel.recv_exit_status(), out, err
        finally:
            channel.close()

    def put(self, content: bytes, path: str, *, mode: int = 0o644) -> None:
        """Write a root-owned file: by SFTP to the user's home, then into place in one step."""
        staging = f".image-builder.{time.monotonic_ns():x}"
        try:
            with self._connected().open_sftp() as sftp:
                channel = sftp.get_channel()
                if channel is not None:
                    channel.settimeout(_AUTH_SECONDS)
                with sftp.open(staging, "wb") as file:
                    file.set_pipelined(True)
                    file.write(content)
                home = sftp.normalize(".")
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise CommandError(f"can't copy {path} to {self.address.host}: {error}") from error
        source = posixpath.join(home, staging)
        # Written under another name next to the target and renamed: a daemon that watches the directory
        # (kubelet for static pods, which skips names with a leading dot) never reads half a file.
        partial = posixpath.join(posixpath.dirname(path), f".{posixpath.basename(path)}.partial")
        script = (
            """trap 'rm -f "$2" "$3"' EXIT; """
            """install -D -o root -g root -m "$1" "$2" "$3" && mv -f "$3" "$4" """
        )
        self.run(["sh", "-c", script, "put", f"{mode:o}", source, partial, path])


def dial(host: str, port: int, connect_seconds: float, banner_seconds: float) -> socket.socket:
    """Connect and wait for the server's first byte, which a port forward to nowhere never sends.

    Raises OSError: TimeoutError after either timeout, ConnectionRefusedError also if the server hangs up at once.
    """
    sock = socket.create_connection((host, port), connect_seconds)
    try:
        sock.settimeout(banner_seconds)
        if not sock.recv(1, socket.MSG_PEEK):
            raise ConnectionRefusedError("the port is open but no SSH server answers")
    except BaseException:
        sock.close()
        raise
    return sock


def drain(channel: paramiko.Channel, deadline: float) -> tuple[bytes, bytes]:
    """Read both streams until the command has ended; raises TimeoutError at ``deadline`` (monotonic seconds)."""
    out, err = bytearray(), bytearray()
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        channel.settimeout(min(remaining, _LOOK_SECONDS))
        part = None
        with contextlib.suppress(TimeoutError):
            part = channel.recv(65536)
            out += part
        # Both streams end at once: by then, the rest of this one has arrived.
        while channel.recv_stderr_ready():
            err += channel.recv_stderr(65536)
        if part == b"":
            break
    if not channel.status_event.wait(max(0.0, deadline - time.monotonic())):
        raise TimeoutError
    return bytes(out), bytes(err)
