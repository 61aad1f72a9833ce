"""Reachability of names and endpoints, as every program on this machine sees it: the C library's resolver, and TCP.

All are tried in parallel, with one deadline. A call that doesn't return in time goes on in a thread that is left
behind: the resolver has no timeout.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

Address = tuple[str, int]
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True)
class Lookup:
    """The result of resolving a name: its ``addresses``, or in ``error`` why there are none."""

    addresses: tuple[str, ...] = ()
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Connection:
    """The result of connecting to an endpoint: ``error`` is empty if one of its addresses accepted."""

    error: str = ""
    seconds: float = 0.0


def is_address(text: str) -> bool:
    """Return whether this is an IPv4 or IPv6 address."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, text)
        except OSError:
            continue
        return True
    return False


def together(tasks: Mapping[K, Callable[[], T]], seconds: float) -> dict[K, T]:
    """Run all tasks in parallel, and return the results of those that finish within ``seconds``.

    A task must not raise; one whose thread can't be started has no result. Afterwards, fork only to start a program: a
    thread that is left behind can hold one of the C library's locks.
    """
    results: dict[K, T] = {}

    def work(key: K, task: Callable[[], T]) -> None:
        results[key] = task()

    deadline = time.monotonic() + seconds
    threads = []
    for item in tasks.items():
        thread = threading.Thread(target=work, args=item, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # too many threads
            continue
        threads.append(thread)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(results)


def lookup(name: str) -> Lookup:
    """Resolve a name, however long that takes."""
    began = time.monotonic()
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return Lookup(error=_reason(error), seconds=time.monotonic() - began)
    addresses = dict.fromkeys(str(entry[4][0]) for entry in entries)
    return Lookup(tuple(addresses), seconds=time.monotonic() - began)


def resolve(names: Iterable[str], seconds: float) -> dict[str, Lookup]:
    """Resolve each name within ``seconds``."""
    tasks = {name: partial(lookup, name) for name in names}
    results = together(tasks, seconds)
    return {name: results.get(name, Lookup(error=_late(seconds), seconds=seconds)) for name in tasks}


def connection(address: Address, seconds: float) -> Connection:
    """Connect, and hang up without sending anything. A host may be a name."""
    began = time.monotonic()
    try:
        socket.create_connection(address, timeout=seconds).close()
    except TimeoutError:
        return Connection(_late(seconds), seconds)
    except (OSError, UnicodeError) as error:
        return Connection(_reason(error), time.monotonic() - began)
    return Connection(seconds=time.monotonic() - began)


def connect(targets: Mapping[str, Sequence[Address]], seconds: float) -> dict[str, Connection]:
    """Connect to every address of every endpoint within ``seconds``; one that accepts is enough."""
    attempts = [(name, address) for name, addresses in targets.items() for address in addresses]
    results = together({key: partial(connection, key[1], seconds) for key in attempts}, seconds)
    late = Connection(_late(seconds), seconds)
    return {
        name: min(
            (results.get((name, address), late) for address in addresses),
            key=lambda attempt: (bool(attempt.error), attempt.seconds),
        )
        for name, addresses in targets.items()
    }


def _late(seconds: float) -> str:
    return f"no answer within {seconds:g} s"


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
