"""Connections to bastions: one each, shared by all hosts behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack

import paramiko

from image_builder.definition.connection import Hop
from image_builder.pool.reach.session import NotReachedError

Way = tuple[Hop, ...]
"""Bastions in the order in which they are passed, the last one being that which hosts are behind."""

Connect = Callable[[ExitStack, Way], paramiko.Transport]
"""Logs in to the last bastion of a way, which the stack closes; raises NotReachedError."""


class Bastions:
    """Connections that threads share: those that ask for one while it is being made get that one, or its failure."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._guard = threading.Lock()
        self._connections: dict[Way, Future[paramiko.Transport]] = {}
        self._open: dict[Way, ExitStack] = {}

    def through(self, way: Way) -> paramiko.Transport:
        """Return the connection to the last bastion of a way, or a new one if it was lost.

        Raises NotReachedError of class `bastion`, whatever is wrong.
        """
        with self._guard:
            connection = self._connections.get(way)
            is_new = connection is None or (connection.done() and not _is_usable(connection))
            if is_new:
                connection = self._connections[way] = Future()
        assert connection is not None
        if is_new:
            try:
                connection.set_result(self._enter(way))
            except BaseException as error:
                connection.set_exception(error)
        return connection.result()

    def _enter(self, way: Way) -> paramiko.Transport:
        self._close(way)
        try:
            with ExitStack() as stack:
                transport = self._connect(stack, way)
                self._open[way] = stack.pop_all()
        except NotReachedError as error:
            raise error.of_bastion(way[-1].address) from error
        return transport

    def _close(self, way: Way) -> None:
        if stack := self._open.pop(way, None):
            stack.close()

    def close(self) -> None:
        """Close all connections, those that lead through others first."""
        for way in sorted(self._open, key=len, reverse=True):
            self._close(way)


def _is_usable(connection: Future[paramiko.Transport]) -> bool:
    return connection.exception() is None and connection.result().is_active()
