"""A logged-in connection to a host: its shell, its time limit, and keeping it between two commands."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import paramiko

from image_builder.errors import ImageBuilderError
from image_builder.machine.shell import Shell, ShellEndedError
from image_builder.pool.plan.model import Class, Host, ended

OUTPUT_LIMIT = 1 << 20  # bytes of each stream that are kept
GRACE_SECONDS = 2.0  # how much longer the watch waits for what should end by itself
_WATCH_SECONDS = 0.25
_SETTLE_SECONDS = 0.5


class NotReachedError(Exception):
    """A host wasn't reached, or no longer is: ``outcome`` has its class."""

    def __init__(self, kind: Class, detail: object) -> None:
        super().__init__(kind)
        self.outcome = ended(kind, str(detail) or type(detail).__name__)

    def of_bastion(self, address: str) -> NotReachedError:
        """Return the error for the hosts behind it, if a bastion is what wasn't reached."""
        if self.outcome.kind == "bastion":  # it is itself behind another one
            return self
        return NotReachedError("bastion", f"bastion {address}: {self.outcome.kind}: {self.outcome.detail}")


class Session:
    """Runs commands on a connected host, one after the other; for one thread at a time."""

    def __init__(self, transport: paramiko.Transport, *, sudo: bool, seconds: float) -> None:
        """Take over a connection; a shell (with ``sudo``, root's) has ``seconds`` to answer."""
        self.transport = transport
        self._sudo, self._seconds = sudo, seconds
        self._shell: Shell | None = None

    def run(self, command: str, seconds: float, limit: int) -> tuple[int, bytes, bytes]:
        """Run a command in the shell's language; see ``Shell.run``.

        Raises TimeoutError, ShellEndedError if the shell is gone but the connection isn't (the next command gets
        another shell), NotReachedError if there is no shell, EOFError and SSHException if the connection is lost.
        """
        try:
            if self._shell is None:
                self._shell = self._start()
            return self._shell.run(command, seconds, limit)
        except OSError as error:
            self._shell = None
            self._raise_lost(error)
            raise

    def cut(self) -> None:
        """End the connection, and with it what runs over it; may be called from any thread."""
        _cut(self.transport)

    def _start(self) -> Shell:
        """Start a shell, and check that it is one. Raises as ``run`` does."""
        who = "sudo" if self._sudo else "the shell"
        kind: Class = "sudo" if self._sudo else "auth"  # an account may not allow a shell
        # Longer than the watch waits: what paramiko finally raises doesn't say that it is a timeout.
        shell = Shell(self.transport, sudo=self._sudo, seconds=self._seconds + 2 * GRACE_SECONDS)
        try:
            shell.run(":", self._seconds, OUTPUT_LIMIT)
        except TimeoutError as error:
            raise NotReachedError(kind, f"{who} doesn't answer") from error
        except ShellEndedError as error:
            self._raise_lost(error)
            raise NotReachedError(kind, error.last_line or f"{who} ended without a message") from error
        return shell

    def _raise_lost(self, error: OSError) -> None:
        """Raise the error that ended the connection, if the connection was lost."""
        if isinstance(error, ShellEndedError) and error.lost:
            raise self.transport.get_exception() or EOFError(
                "the connection broke during the command"
            ) from error


class _Connection(NamedTuple):
    session: Session
    root: bool
    stack: ExitStack
    """Closes it."""


class Kept:
    """Connections that wait for their hosts' next commands, at most ``most`` of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._guard = threading.Lock()
        self._connections: dict[Host, _Connection] = {}

    def put(self, host: Host, root: bool, session: Session, stack: ExitStack) -> None:
        """Keep a connection, or close it if there is no room."""
        connection = _Connection(session, root, stack)
        with self._guard:
            gone = {
                h: c for h, c in self._connections.items() if h == host or not c.session.transport.is_active()
            }
            for each in gone:
                del self._connections[each]
            if len(self._connections) < self._most:
                self._connections[host] = connection
            else:
                gone[host] = connection
        for _, _, open_stack in gone.values():
            open_stack.close()

    def take(self, stack: ExitStack, host: Host, root: bool) -> Session | None:
        """Return the session that is kept for a host, if any, which the stack then closes."""
        with self._guard:
            connection = self._connections.pop(host, None)
        if connection is None:
            return None
        if connection.root != root or not connection.session.transport.is_active():
            connection.stack.close()
            return None
        stack.enter_context(connection.stack)
        return connection.session

    def close(self, host: Host | None = None) -> None:
        """Close the connection that is kept for a host, or all of them."""
        with self._guard:
            hosts = list(self._connections) if host is None else [host]
            connections = [c for h in hosts if (c := self._connections.pop(h, None))]
        for connection in connections:
            connection.stack.close()


class Watch:
    """Cuts connections that have exceeded their time, so that threads that wait for one wake up."""

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
        """Limit a connection to ``seconds`` from now on; raises NotReachedError once all are cut."""
        with self._guard:
            if self._all:
                raise NotReachedError("dropped", "given up")
            self._times[transport] = time.monotonic() + seconds

    def cut_all(self) -> None:
        """Cut every connection, and make new ones fail early."""
        with self._guard:
            self._all = True
            transports = list(self._times)
        for transport in transports:
            _cut(transport)

    @contextmanager
    def over(self, transport: paramiko.Transport, via: paramiko.Transport | None = None) -> Iterator[None]:
        """Watch a connection and close it in the end; what paramiko raises in the block becomes NotReachedError.

        ``via`` is the connection to a bastion that it leads through: if that is lost, it is the cause.
        """
        try:
            yield
        except ImageBuilderError:
            raise
        except Exception as error:  # a broken peer's bytes can make paramiko's parsers raise anything
            if via is not None and is_lost(via):
                raise NotReachedError("bastion", "the connection to the bastion is lost") from error
            if isinstance(error, NotReachedError):
                raise
            kind: Class = "timeout" if transport in self._late else "dropped"
            raise NotReachedError(kind, error) from error
        finally:
            _cut(transport)  # otherwise its thread holds the connection until it polls again
            transport.close()
            with self._guard:
                self._times.pop(transport, None)
                self._late.discard(transport)


def is_lost(transport: paramiko.Transport) -> bool:
    """Return whether a connection has ended; what ran over it may notice that a moment earlier."""
    transport.join(_SETTLE_SECONDS)
    return not transport.is_alive()


def _cut(transport: paramiko.Transport) -> None:
    # Not the transport's close(): that waits for its thread, which waits for this.
    with suppress(OSError, EOFError, paramiko.SSHException):
        if isinstance(transport.sock, paramiko.Channel):  # whose shutdown() wakes no reader
            transport.sock.close()
        else:
            transport.sock.shutdown(socket.SHUT_RDWR)
