"""Commands on hundreds of hosts at once over SSH: each host ends in exactly one class.

    refused    something there says no: no server at the port, or one that hangs up or isn't SSH
    timeout    nothing answers in time, or there is no way there
    host key   its key is not the one it may show; nothing was sent that could tell it who we are
    auth       it doesn't let us in
    sudo       sudo asks for a password, refuses, or doesn't answer
    dropped    the connection broke after it was made
    ok         the command ran, whatever its exit status

A command has a connection of its own. Whatever waits, waits until a time: a watch closes a connection that is past it,
since some of paramiko's waits have none.
"""

from __future__ import annotations

import errno
import shlex
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm

from image_builder.errors import HostError, ImageBuilderError, UsageError
from image_builder.pool.hostkeys import Entry, HostKeyError, HostKeys, Verifier
from image_builder.pool.model import OK, Class, Host, Outcome, ended
from image_builder.target.ssh import dial, drain

OUTPUT_LIMIT = 1 << 20  # bytes of each stream that are kept
_MISSED_KEEPALIVES = 3
_WATCH_SECONDS = 0.25
_GRACE_SECONDS = 2.0  # what ends by itself gets this much before the watch ends it
# Printed by root's shell before the command: without it, what failed is sudo and not the command.
_MARK = b"\x1eimage-builder is root\x1e\n"
_AS_ROOT = "printf '\\036image-builder is root\\036\\n'; exec \"$@\""


@dataclass(frozen=True)
class Access:
    """How hosts are reached: by one private key, without agent, key search or password.

    Seconds: until a TCP connection stands, until the server has shown its banner, for the key exchange and again for
    the login, between two signs of life (after three without an answer the connection counts as broken), and until
    sudo has let a command through.
    """

    user: str
    key: Path
    host_keys: HostKeys
    connect_seconds: float = 10.0
    banner_seconds: float = 10.0
    auth_seconds: float = 15.0
    keepalive_seconds: float = 15.0
    sudo_seconds: float = 10.0


@dataclass(frozen=True)
class Answer:
    """What became of one command on one host.

    ``outcome`` is OK when the command ran, whatever its ``status`` (None: a signal ended it). Of each stream the first
    MiB is kept. ``seconds`` count from the first packet on.
    """

    outcome: Outcome
    status: int | None
    stdout: bytes
    stderr: bytes
    seconds: float


class _ReachError(Exception):
    """The end of a host's command that didn't run to its own end."""

    def __init__(self, kind: Class, detail: object) -> None:
        super().__init__(kind)
        self.outcome = ended(kind, str(detail) or type(detail).__name__)


class _Transport(paramiko.Transport):
    """Asks for the algorithms that it is told; paramiko's own list prefers plain keys to certificates."""

    algorithms: tuple[str, ...] = ()

    @property
    def preferred_keys(self) -> tuple[str, ...]:
        return self.algorithms


class Reach:
    """Reaches so many hosts at once; a context manager. Leaving it waits for what still runs.

    Leaving it by an exception closes the connections: what runs ends as ``dropped``, what waits is cancelled.
    """

    def __init__(self, access: Access, *, at_once: int = 200) -> None:
        """Read the key and the hosts' keys; raises UsageError when they can't be had."""
        self._access = access
        self._key = _read_key(access.key)
        self._verifier = Verifier(access.host_keys)
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="reach")
        self._watch = _Watch()

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
        self._watch.stop()

    def submit(
        self, host: Host, argv: Sequence[str], *, input: bytes = b"", root: bool = False, seconds: float
    ) -> Future[Answer]:
        """Run a command on a host; with ``root`` by ``sudo -n``, unless the user is root.

        ``seconds`` are for the command alone, from the login on; given up, it may still run on the host. The future
        raises what is no host's fault: UsageError for a name that can't have keys or a file of them that can't be
        written, HostError for too many open files here.
        """
        sudo = self._access.sudo_seconds if root and self._access.user != "root" else None
        return self._pool.submit(self._ask, host, tuple(argv), input, sudo, seconds)

    def known(self, host: Host) -> Sequence[Entry]:
        """Return the keys by which a host is known itself."""
        return self._verifier.known(host)

    def _ask(
        self, host: Host, argv: tuple[str, ...], input: bytes, sudo: float | None, seconds: float
    ) -> Answer:
        started = time.monotonic()
        outcome, status, out, err = OK, None, b"", b""
        try:
            algorithms = self._verifier.algorithms(host)
            with _dial(host, self._access) as sock, self._watch.over(_Transport(sock)) as transport:
                transport.algorithms = algorithms
                self._log_in(transport, host)
                self._watch.until(transport, seconds + _GRACE_SECONDS)
                status, out, err = _execute(transport, argv, input, sudo, seconds)
        except HostKeyError as error:
            outcome = ended("host key", str(error))
        except _ReachError as error:
            outcome = error.outcome
        return Answer(outcome, status, out, err, time.monotonic() - started)

    def _log_in(self, transport: _Transport, host: Host) -> None:
        """Exchange keys, check the host's, and only then say who we are."""
        access = self._access
        self._watch.until(transport, access.auth_seconds + _GRACE_SECONDS)
        _exchange_keys(transport, access.auth_seconds)
        key = transport.get_remote_server_key()
        shown = key.public_blob.key_blob if key.public_blob else key.asbytes()
        if self._verifier.check(host, shown) != key.asbytes():
            raise HostKeyError("its certificate is for another key than it has")
        self._watch.until(transport, access.auth_seconds + _GRACE_SECONDS)
        _authenticate(transport, access.user, self._key, access.auth_seconds)
        transport.set_keepalive(max(1, round(access.keepalive_seconds)))


class _Watch:
    """Cuts connections that are past their time, so that whoever waits for one is woken."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._times: dict[paramiko.Transport, float] = {}
        self._late: set[paramiko.Transport] = set()
        self._all = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="reach-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stopped.wait(_WATCH_SECONDS):
            now = time.monotonic()
            with self._guard:
                late = [transport for transport, end in self._times.items() if end < now]
                self._late.update(late)
            for transport in late:
                _cut(transport)

    def until(self, transport: paramiko.Transport, seconds: float) -> None:
        """Let a connection be for so long from now on; raises _ReachError once all are cut."""
        with self._guard:
            if self._all:
                raise _ReachError("dropped", "given up")
            self._times[transport] = time.monotonic() + seconds

    def cut_all(self) -> None:
        """Cut every connection, and let no further one get far."""
        with self._guard:
            self._all = True
            transports = list(self._times)
        for transport in transports:
            _cut(transport)

    @contextmanager
    def over(self, transport: _Transport) -> Iterator[_Transport]:
        """Watch a connection and close it in the end; what paramiko raises inside becomes _ReachError."""
        try:
            yield transport
        except (_ReachError, HostKeyError, ImageBuilderError):
            raise
        except Exception as error:  # what a broken peer's bytes make of paramiko's parsers can be anything
            kind: Class = "timeout" if transport in self._late else "dropped"
            raise _ReachError(kind, error) from error
        finally:
            transport.close()
            with self._guard:
                self._times.pop(transport, None)
                self._late.discard(transport)


def _cut(transport: paramiko.Transport) -> None:
    # Not close(): that waits for the transport's thread, which waits for this.
    with suppress(OSError):
        transport.sock.shutdown(socket.SHUT_RDWR)


def _read_key(path: Path) -> paramiko.PKey:
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
        raise _ReachError("refused", error) from error
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise HostError(f"this host can't open a connection more: {error}", hint="ulimit -n") from error
        raise _ReachError("timeout", error) from error
    except UnicodeError as error:  # a name that DNS can't have, such as `gpu..example`
        raise _ReachError("timeout", error) from error
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
        raise _ReachError("timeout", f"no key exchange within {seconds:g} s")
    if transport.is_active():
        return
    error = transport.get_exception() or EOFError("the server hung up during the key exchange")
    if not transport.remote_version:
        raise _ReachError("refused", error)
    # The server has no key of the kind that it may show, or can't sign with the one that it shows.
    if "host key" in str(error) or "Signature verification" in str(error):
        raise _ReachError("host key", error)
    raise error


def _authenticate(transport: paramiko.Transport, user: str, key: paramiko.PKey, seconds: float) -> None:
    done = threading.Event()
    transport.auth_publickey(user, key, done)
    if not done.wait(seconds):
        raise _ReachError("timeout", f"no answer to the login within {seconds:g} s")
    if transport.is_authenticated():
        return
    error = transport.get_exception()
    if isinstance(error, paramiko.AuthenticationException) or (error is None and transport.is_active()):
        raise _ReachError("auth", f"{user} is not let in by this key" + (f": {error}" if error else ""))
    raise error or EOFError("the server hung up during the login")


def _execute(
    transport: paramiko.Transport, argv: tuple[str, ...], input: bytes, sudo: float | None, seconds: float
) -> tuple[int | None, bytes, bytes]:
    """Return a command's exit status and its output; raises _ReachError, or what paramiko raises.

    ``sudo`` are the seconds that it has to answer; None is without it.
    """
    deadline = time.monotonic() + seconds
    words = argv if sudo is None else ("sudo", "-n", "--", "sh", "-c", _AS_ROOT, "sh", *argv)
    # Longer than the watch waits: what paramiko raises in the end doesn't say that it is a timeout.
    channel = transport.open_session(timeout=seconds + 2 * _GRACE_SECONDS)
    with closing(channel):
        channel.settimeout(seconds)
        channel.exec_command(shlex.join(words))
        first = b"" if sudo is None else _await_root(channel, min(deadline, time.monotonic() + sudo))
        try:
            _send(channel, input, deadline)
            out, err = drain(channel, deadline, OUTPUT_LIMIT)
        except TimeoutError as error:
            raise _ReachError("timeout", f"the command didn't end within {seconds:g} s") from error
        status: int | None = channel.exit_status
        if status == -1:
            status = None
            # No status: the connection broke (its thread ends in a moment), or a signal ended the command.
            transport.join(_WATCH_SECONDS)
            if not channel.eof_received or not transport.is_alive():
                raise transport.get_exception() or EOFError("the connection broke during the command")
        return status, (first + out)[:OUTPUT_LIMIT], err


def _send(channel: paramiko.Channel, input: bytes, deadline: float) -> None:
    try:
        channel.settimeout(max(0.0, deadline - time.monotonic()))
        channel.sendall(input)
        channel.shutdown_write()
    except TimeoutError:
        raise
    except OSError:
        return  # the command ended without reading all: its status says what that means


def _await_root(channel: paramiko.Channel, deadline: float) -> bytes:
    """Wait until sudo has made us root; return what the command has written by then. Raises _ReachError."""
    seen = b""
    while _MARK not in seen:
        left = deadline - time.monotonic()
        if left <= 0:
            raise _ReachError("sudo", "sudo doesn't answer")
        channel.settimeout(left)
        with suppress(TimeoutError):
            part = channel.recv(65536)
            seen = (seen + part)[-OUTPUT_LIMIT:]
            if not part and not channel.eof_received:
                raise EOFError("the connection broke before sudo answered")
            if not part:
                # A shell that lets nobody work says so on standard output.
                said = (channel.recv_stderr(65536) or seen).decode("utf-8", "replace").strip().splitlines()
                raise _ReachError("sudo", said[-1] if said else "sudo ended without a word")
    return seen.partition(_MARK)[2]
