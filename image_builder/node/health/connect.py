"""TCP connections, all at once and with one deadline; nothing is sent."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Address = tuple[str, int]


@dataclass(frozen=True)
class Connected:
    """What became of an endpoint: ``error`` is empty where one of its addresses took the connection."""

    error: str = ""
    seconds: float = 0.0


def all_of(targets: Mapping[str, Sequence[Address]], seconds: float) -> dict[str, Connected]:
    """Connect to every address of every endpoint, and hang up; the first that is taken counts."""
    done: dict[str, Connected] = {}
    began = time.monotonic()
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for name, addresses in targets.items():
            for address in addresses:
                _begin(name, address, done, selector, stack)
        while selector.get_map() and (left := began + seconds - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                opened = key.fileobj
                assert isinstance(opened, socket.socket)
                selector.unregister(opened)
                code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                _note(done, key.data, os.strerror(code) if code else "", time.monotonic() - began)
        waiting = {key.data for key in selector.get_map().values()}
    for name in waiting:
        _note(done, name, f"no answer within {seconds:g} s", seconds)
    return done


def _begin(
    name: str,
    address: Address,
    done: dict[str, Connected],
    selector: selectors.BaseSelector,
    stack: contextlib.ExitStack,
) -> None:
    try:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        opened = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        opened.setblocking(False)
        code = opened.connect_ex(address)
    except OSError as error:  # a family that this kernel doesn't have
        _note(done, name, error.strerror or str(error), 0.0)
        return
    if code in (0, errno.EINPROGRESS):
        selector.register(opened, selectors.EVENT_WRITE, name)
    else:
        _note(done, name, os.strerror(code), 0.0)


def _note(done: dict[str, Connected], name: str, error: str, seconds: float) -> None:
    """Keep the first success, else the first error."""
    if name not in done or (done[name].error and not error):
        done[name] = Connected(error, seconds)
