"""Commands on hundreds of hosts at once over SSH: each host ends in exactly one class.

    refused    something there says no: no server at the port, or one that hangs up or isn't SSH
    timeout    nothing answers in time, or there is no way there
    host key   its key is not the one it may show; nothing was sent that could tell it who we are
    auth       it doesn't let us in
    sudo       sudo asks for a password, refuses, or doesn't answer
    dropped    the connection broke after it was made
    ok         the command ran, whatever its exit status

Commands run in one shell of a connection, which may be kept for the host's next one. Whatever waits, waits until a
time: a watch closes a connection that is past it, since some of paramiko's waits have none.
"""

from __future__ import annotations

import errno
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

from image_builder.errors import HostError, UsageError
from image_builder.machine.ssh import dial
from image_builder.pool.plan.model import OK, Host, Outcome
from image_builder.pool.reach.hostkeys import HostKeyError, HostKeys, Verifier
from image_builder.pool.reach.session import (
    GRACE_SECONDS,
    OUTPUT_LIMIT,
    Kept,
    NotReachedError,
    Session,
    Watch,
)

_MISSED_KEEPALIVES = 3
# How often a connection that waits is looked after: hundreds do, and paramiko's tenth of a second is a core's work.
_IDLE_SECONDS = 1.0
_KEPT_SECONDS = 60.0  # a connection for its host's next command


@dataclass(frozen=True)
class Access:
    """How hosts are reached: by one private key, without agent, key search or password.

    Seconds: until a TCP connection stands, until the server has shown its banner, for the key exchange and again for
    the login, between two signs of life (after three without an answer the connection counts as broken), and until
    a shell answers, root's by sudo.
    """

    user: str
    key: Path
    host_keys: HostKeys
    connect_seconds: float = 10.0
    banner_seconds: float = 10.0
    auth_seconds: float = 15.0
    keepalive_seconds: float = 15.0
    sudo_seconds: float = 10.0

    @property
    def answer_seconds(self) -> float:
        """Return the seconds until a shell answers, at most."""
        return self.connect_seconds + self.banner_seconds + 2 * self.auth_seconds + self.sudo_seconds


@dataclass(frozen=True)
class Answer:
    """What became of one command on one host.

    ``outcome`` is OK when the command ran, whatever its ``status`` (None: it did not run; 128 and its number: a signal
    ended it). Of each stream the first MiB is kept. ``seconds`` count from the first packet on.
    """

    outcome: Outcome
    status: int | None
    stdout: bytes
    stderr: bytes
    seconds: float


class _Transport(paramiko.Transport):
    """Asks for the algorithms that it is told; paramiko's own list prefers plain keys to certificates."""

    algorithms: tuple[str, ...] = ()

    @property
    def preferred_keys(self) -> tuple[str, ...]:
        return self.algorithms

    @property
    def preferred_ciphers(self) -> tuple[str, ...]:
        # First those that need no sum beside them, which Python makes anew for each packet.
        return tuple(sorted(super().preferred_ciphers, key=lambda name: "-gcm@" not in name))


class Reach:
    """Reaches so many hosts at once; a context manager. Leaving it waits for the commands that still run.

    Leaving it by an exception closes the connections: what runs ends as ``dropped``, what waits is cancelled.
    """

    def __init__(self, access: Access, *, at_once: int = 200) -> None:
        """Read the key and the hosts' keys; raises UsageError when they can't be had."""
        self._access = access
        self._key = read_key(access.key)
        self._verifier = Verifier(access.host_keys)
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="reach")
        self._watch = Watch()
        self._kept = Kept(at_once)

    @property
    def user(self) -> str:
        """As whom hosts are logged in to."""
        return self._access.user

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
        self._watch.stop()

    def submit(
        self, host: Host, argv: Sequence[str], *, root: bool = False, seconds: float, keep: bool = False
    ) -> Future[Answer]:
        """Run a command on a host; with ``root`` by ``sudo -n``, unless the user is root.

        ``seconds`` are for the command alone, from the login on; given up, it may still run on the host. With
        ``keep`` the connection is kept for a while for the host's next command. The future raises what is no host's
        fault: UsageError for a name that can't have keys or a file of them that can't be written, HostError for too
        many open files here.
        """
        return self._pool.submit(self._ask, host, shlex.join(argv), root, seconds, keep)

    @contextmanager
    def session(self, host: Host, *, root: bool, seconds: float) -> Iterator[Session]:
        """Reach a host for so long, in the caller's thread; who runs commands is as with ``submit``.

        Raises NotReachedError, also for what breaks in the block, and what is no host's fault.
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
        """Return a host's kept connection, or a new one, for so long; the stack closes it."""
        session = self._kept.take(stack, host, root) or self._connect(stack, host, root)
        self._watch.until(session.transport, seconds + GRACE_SECONDS)
        return session

    def _connect(self, stack: ExitStack, host: Host, root: bool) -> Session:
        access = self._access
        try:
            algorithms = self._verifier.algorithms(host)
            sock = stack.enter_context(_dial(host, access))
            transport = _Transport(sock)
            stack.enter_context(self._watch.over(transport))
            sock.settimeout(_IDLE_SECONDS)
            transport.algorithms = algorithms
            self._log_in(transport, host)
        except HostKeyError as error:
            raise NotReachedError("host key", error) from error
        return Session(transport, sudo=root and access.user != "root", seconds=access.sudo_seconds)

    def _log_in(self, transport: _Transport, host: Host) -> None:
        """Exchange keys, check the host's, and only then say who we are."""
        access = self._access
        self._watch.until(transport, access.auth_seconds + GRACE_SECONDS)
        _exchange_keys(transport, access.auth_seconds)
        key = transport.get_remote_server_key()
        shown = key.public_blob.key_blob if key.public_blob else key.asbytes()
        if self._verifier.check(host, shown) != key.asbytes():
            raise HostKeyError("its certificate is for another key than it has")
        self._watch.until(transport, access.auth_seconds + GRACE_SECONDS)
        _authenticate(transport, access.user, self._key, access.auth_seconds)
        transport.set_keepalive(max(1, round(access.keepalive_seconds)))


def read_key(path: Path) -> paramiko.PKey:
    """Return a private key; raises UsageError."""
    try:
        return paramiko.PKey.from_path(path)
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}", hint="it is the private key that hosts let in"
        ) from error
    except (paramiko.SSHException, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(
            f"{path}: not a private key that can be used: {error}", hint="a key without passphrase is needed"
        ) from error


def _dial(host: Host, access: Access) -> socket.socket:
    """Connect, and see that a server is there."""
    try:
        sock = dial(host.address, host.port, access.connect_seconds, access.banner_seconds)
    except (ConnectionRefusedError, ConnectionResetError) as error:
        raise NotReachedError("refused", error) from error
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise HostError(f"this host can't open a connection more: {error}", hint="ulimit -n") from error
        raise NotReachedError("timeout", error) from error
    except UnicodeError as error:  # a name that DNS can't have, such as `gpu..example`
        raise NotReachedError("timeout", error) from error
    # Signs of life that nobody acknowledges: paramiko itself doesn't wait for an answer to them.
    patience = round(access.keepalive_seconds * _MISSED_KEEPALIVES * 1000)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, patience))
    return sock


def _exchange_keys(transport: paramiko.Transport, seconds: float) -> None:
    done = threading.Event()
    # Longer than ours: of two that end together, paramiko's would look like a broken connection.
    transport.banner_timeout = transport.handshake_timeout = 2 * seconds
    transport.start_client(event=done)
    if not done.wait(seconds):
        raise NotReachedError("timeout", f"no key exchange within {seconds:g} s")
    if transport.is_active():
        return
    error = transport.get_exception() or EOFError("the server hung up during the key exchange")
    if not transport.remote_version:
        raise NotReachedError("refused", error)
    # The server has no key of the kind that it may show, or can't sign with the one that it shows.
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
        raise NotReachedError("auth", f"{user} is not let in by this key" + (f": {error}" if error else ""))
    raise error or EOFError("the server hung up during the login")
