"""Commands on hundreds of hosts at once over SSH: each host ends in exactly one class.

    refused    the connection is rejected: no server at the port, or one that hangs up or isn't SSH
    timeout    nothing answers in time, or there is no route
    host key   its key isn't one that it may show; nothing was sent that could reveal who we are
    bastion    the fault is on the way: a bastion isn't reached, doesn't let us in or through, or was lost
    auth       it doesn't let us in
    sudo       sudo asks for a password, refuses, or doesn't answer
    dropped    the connection broke after it was established
    ok         the command ran, whatever its exit status

Commands run in one shell per connection, which may be kept for the host's next command. Every wait has a time limit: a
watch closes connections that exceed theirs, since some of paramiko's waits have none.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import shlex
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm

from image_builder.definition.connection import Hop
from image_builder.errors import HostError, UsageError
from image_builder.machine.ssh import dial
from image_builder.pool.plan.model import OK, Class, Host, Outcome
from image_builder.pool.reach.bastions import Bastions
from image_builder.pool.reach.hostkeys import HostKeyError, HostKeys, Verifier
from image_builder.pool.reach.session import (
    GRACE_SECONDS,
    OUTPUT_LIMIT,
    Kept,
    NotReachedError,
    Session,
    Watch,
    is_lost,
)

_MISSED_KEEPALIVES = 3
# How often a waiting connection polls: hundreds do, and paramiko's tenth of a second would keep a core busy.
_IDLE_SECONDS = 1.0
_KEPT_SECONDS = 60.0  # how long a connection is kept for its host's next command
# RFC 4254: the other reasons for not opening a channel say nothing about the host.
_CONNECT_FAILED = 2
KEY_HINT = "give --key, or ansible_ssh_private_key_file; SSH agents and default keys are not used"


@dataclass(frozen=True)
class Access:
    """How hosts are reached: with one private key each, without an agent, key search or password.

    ``user`` and ``key`` override the inventory's.

    Times in seconds: until a TCP connection is established, until the server has shown its banner, for the key exchange
    and again for the login, between two keepalives (after three without an answer the connection counts as broken), and
    until a shell answers, which for root is reached through sudo.
    """

    host_keys: HostKeys
    user: str = ""
    key: Path | None = None
    connect_seconds: float = 10.0
    banner_seconds: float = 10.0
    auth_seconds: float = 15.0
    keepalive_seconds: float = 15.0
    sudo_seconds: float = 10.0

    @property
    def answer_seconds(self) -> float:
        """Return the maximum number of seconds until a shell answers, if there is no bastion on the way."""
        return self._login_seconds + self.sudo_seconds

    @property
    def _login_seconds(self) -> float:
        return self.connect_seconds + self.banner_seconds + 2 * self.auth_seconds

    def way_seconds(self, host: Host) -> float:
        """Return the maximum number of seconds until all bastions on the way to a host have let us in."""
        return len(host.hops) * self._login_seconds

    def login(self, host: Host) -> Host:
        """Return a host with the user and key to use for it and for each hop on the way to it. Raises UsageError."""
        user = self.user or host.user or "root"
        key = _absolute(self.key or host.key)
        if not key:
            raise UsageError(f"{host.name}: no private key", hint=KEY_HINT)
        hops = tuple(
            hop.model_copy(update={"user": hop.user or user, "key": _absolute(hop.key) or key})
            for hop in host.hops
        )
        return host.model_copy(update={"user": user, "key": key, "hops": hops})


@dataclass(frozen=True)
class Answer:
    """The result of one command on one host.

    ``outcome`` is OK if the command ran, whatever its ``status`` (None: it did not run; 128 plus its number: a signal
    ended it). The first MiB of each stream is kept. ``seconds`` count from the first packet.
    """

    outcome: Outcome
    status: int | None
    stdout: bytes
    stderr: bytes
    seconds: float


class _Transport(paramiko.Transport):
    """Requests the given key algorithms; paramiko's own list prefers plain keys to certificates."""

    algorithms: tuple[str, ...] = ()

    @property
    def preferred_keys(self) -> tuple[str, ...]:
        return self.algorithms

    @property
    def preferred_ciphers(self) -> tuple[str, ...]:
        # First the ciphers that need no separate MAC, which Python sets up again for each packet.
        return tuple(sorted(super().preferred_ciphers, key=lambda name: "-gcm@" not in name))


class Reach:
    """Reaches ``at_once`` hosts at the same time; a context manager. Leaving it waits for commands still running.

    Leaving it with an exception closes the connections: running commands end as ``dropped``, waiting ones are canceled.
    """

    def __init__(self, access: Access, *, at_once: int = 200) -> None:
        """Read the key and the hosts' keys; raises UsageError if they can't be read."""
        self._access = access
        self._read_key = functools.cache(read_key)
        if access.key:
            self._read_key(access.key)
        self._verifier = Verifier(access.host_keys)
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="reach")
        self._watch = Watch()
        self._kept = Kept(at_once)
        self._bastions = Bastions(self._connect_hop)

    def login(self, host: Host) -> Host:
        """Return a host with the user and keys to log in with; see ``Access.login``."""
        return self._access.login(host)

    def __enter__(self) -> Self:
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._watch.cut_all()
        self._pool.shutdown()
        self._watch.cut_all()
        self._kept.close()
        self._bastions.close()
        self._watch.stop()

    def submit(
        self, host: Host, argv: Sequence[str], *, root: bool = False, seconds: float, keep: bool = False
    ) -> Future[Answer]:
        """Run a command on a host; with ``root`` through ``sudo -n``, unless the user is root.

        ``seconds`` are for the command only, counted from the login; after a timeout, it may still be running on the
        host. With ``keep``, the connection is kept for a while for the host's next command. The future raises errors
        that aren't the host's fault: UsageError for a name that can't have keys or a key file that can't be written,
        HostError for too many open files on this machine.
        """
        return self._pool.submit(self._ask, host, shlex.join(argv), root, seconds, keep)

    @contextmanager
    def session(self, host: Host, *, root: bool, seconds: float) -> Iterator[Session]:
        """Reach a host for ``seconds``, in the caller's thread; commands run as the same user as with ``submit``.

        Raises NotReachedError, also for what breaks in the block, and errors that aren't the host's fault.
        """
        with ExitStack() as stack:
            yield self._enter(stack, host, root, seconds)

    def release(self, host: Host) -> None:
        """Close the connection that is kept for a host, if any."""
        self._kept.close(host)

    def _ask(self, host: Host, command: str, root: bool, seconds: float, keep: bool) -> Answer:
        started = time.monotonic()
        outcome, status, out, err = OK, None, b"", b""
        try:
            with ExitStack() as stack:
                session = self._enter(stack, host, root, seconds)
                try:
                    status, out, err = session.run(command, seconds, OUTPUT_LIMIT)
                except TimeoutError as error:
                    raise NotReachedError(
                        "timeout", f"the command didn't end within {seconds:g} s"
                    ) from error
                if keep:
                    self._watch.until(session.transport, _KEPT_SECONDS)
                    self._kept.put(host, root, session, stack.pop_all())
        except NotReachedError as error:
            outcome = error.outcome
        return Answer(outcome, status, out, err, time.monotonic() - started)

    def _enter(self, stack: ExitStack, host: Host, root: bool, seconds: float) -> Session:
        """Return a host's kept connection, or a new one, for ``seconds``; the stack closes it."""
        session = self._kept.take(stack, host, root) or self._connect(stack, host, root)
        self._watch.until(session.transport, seconds + GRACE_SECONDS)
        return session

    def _connect(self, stack: ExitStack, host: Host, root: bool) -> Session:
        host = self._access.login(host)
        transport = self._log_in(stack, host, host.hops)
        return Session(transport, sudo=root and host.user != "root", seconds=self._access.sudo_seconds)

    def _connect_hop(self, stack: ExitStack, hops: tuple[Hop, ...]) -> paramiko.Transport:
        """Connect to the last of these bastions, without a time limit."""
        transport = self._log_in(stack, hops[-1], hops[:-1])
        self._watch.until(transport, math.inf)
        return transport

    def _log_in(self, stack: ExitStack, host: Host | Hop, hops: tuple[Hop, ...]) -> paramiko.Transport:
        """Exchange keys, check the host's, and only then say who we are."""
        access = self._access
        try:
            algorithms = self._verifier.algorithms(host)
            via = self._bastions.through(hops) if hops else None
            sock = _open_channel(via, host, access) if via else stack.enter_context(_dial(host, access))
            transport = _Transport(sock)
            stack.enter_context(self._watch.over(transport, via))
            sock.settimeout(_IDLE_SECONDS)
            transport.algorithms = algorithms
            self._watch.until(transport, access.auth_seconds + GRACE_SECONDS)
            _exchange_keys(transport, access.auth_seconds)
            key = transport.get_remote_server_key()
            shown = key.public_blob.key_blob if key.public_blob else key.asbytes()
            if self._verifier.check(host, shown) != key.asbytes():
                raise HostKeyError("its certificate is for another key than it has")
        except HostKeyError as error:
            raise NotReachedError("host key", error) from error
        self._watch.until(transport, access.auth_seconds + GRACE_SECONDS)
        _authenticate(transport, host.user, self._read_key(Path(host.key)), access.auth_seconds)
        transport.set_keepalive(max(1, round(access.keepalive_seconds)))
        return transport


def _absolute(key: Path | str | None) -> str:
    return os.fspath(Path(key).expanduser().absolute()) if key else ""


def read_key(path: Path) -> paramiko.PKey:
    """Return a private key; raises UsageError."""
    try:
        return paramiko.PKey.from_path(path)
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}", hint="it is the private key that hosts accept"
        ) from error
    except (paramiko.SSHException, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(
            f"{path}: not a private key that can be used: {error}", hint="a key without passphrase is needed"
        ) from error


def _open_channel(via: paramiko.Transport, host: Host | Hop, access: Access) -> paramiko.Channel:
    """Have a bastion connect to a host."""
    to = (host.address, host.port)
    try:
        return via.open_channel("direct-tcpip", to, ("127.0.0.1", 0), timeout=access.connect_seconds)
    except paramiko.ChannelException as error:
        kind: Class = "refused" if error.code == _CONNECT_FAILED else "bastion"
        raise NotReachedError(kind, f"the bastion opens no connection: {error.text}") from error
    except (OSError, EOFError, paramiko.SSHException) as error:
        kind = "bastion" if is_lost(via) else "timeout"
        raise NotReachedError(kind, f"the bastion opens no connection: {error}") from error


def _dial(host: Host | Hop, access: Access) -> socket.socket:
    """Connect, and check that a server is there."""
    try:
        sock = dial(host.address, host.port, access.connect_seconds, access.banner_seconds)
    except (ConnectionRefusedError, ConnectionResetError) as error:
        raise NotReachedError("refused", error) from error
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise HostError(f"this host can't open more connections: {error}", hint="ulimit -n") from error
        raise NotReachedError("timeout", error) from error
    except UnicodeError as error:  # a name that DNS can't have, such as `gpu..example`
        raise NotReachedError("timeout", error) from error
    # For keepalives that aren't acknowledged: paramiko itself doesn't wait for an answer to them.
    patience = round(access.keepalive_seconds * _MISSED_KEEPALIVES * 1000)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, patience))
    return sock


def _exchange_keys(transport: paramiko.Transport, seconds: float) -> None:
    done = threading.Event()
    # Longer than ours: if both ended at the same time, paramiko's would look like a broken connection.
    transport.banner_timeout = transport.handshake_timeout = 2 * seconds
    transport.start_client(event=done)
    if not done.wait(seconds):
        raise NotReachedError("timeout", f"no key exchange within {seconds:g} s")
    if transport.is_active():
        return
    error = transport.get_exception() or EOFError("the server hung up during the key exchange")
    if not transport.remote_version:
        raise NotReachedError("refused", error)
    # The server has no key of a kind that it may show, or can't sign with the one that it shows.
    if "host key" in str(error) or "Signature verification" in str(error):
        raise NotReachedError("host key", error)
    raise error


def _authenticate(transport: paramiko.Transport, user: str, key: paramiko.PKey, seconds: float) -> None:
    done = threading.Event()
    transport.auth_publickey(user, key, done)
    if not done.wait(seconds):
        raise NotReachedError("timeout", f"no answer to the login within {seconds:g} s")
    if transport.is_authenticated():
        return
    error = transport.get_exception()
    if isinstance(error, paramiko.AuthenticationException) or (error is None and transport.is_active()):
        raise NotReachedError("auth", f"{user} can't log in with this key" + (f": {error}" if error else ""))
    raise error or EOFError("the server hung up during the login")
