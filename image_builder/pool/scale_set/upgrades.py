"""Upgrades of a scale set's instances: each is an operation on the whole set, so one request is for all that wait.

Two of them at once would preempt each other. An instance that arrives while one is open waits, and is then upgraded
with all others that have arrived meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from image_builder.pool.scale_set.model import Instance, Version
from image_builder.pool.scale_set.verdict import Node


@dataclass(frozen=True)
class Ending:
    """How an instance ended; identical failures have the same ``reason``. `busy`: nothing was sent."""

    kind: Literal["ok", "failed", "gone", "unknown", "busy"]
    reason: str = ""


@dataclass(eq=False)
class Member:
    """An instance that a request will name, as it was read, and its node.

    ``busy`` is the last look: it returns why nothing may be sent, or an empty string; before that, ``works`` asks the
    node itself. An instance gets a request of its own (``is_single``) after a refusal or a delay for which another
    instance may be the reason. In the end, it has an ``ending`` (`busy`) or an ``error``, or its request was sent, or
    its last look took too long (``late``, in seconds), or it has to be read again because it has changed.
    """

    instance: Instance
    version: Version
    reading: Node | None
    busy: Callable[[], str]
    works: Callable[[], str] = lambda: ""
    is_single: bool = False
    ending: Ending | None = None
    error: Exception | None = None
    late: float = 0.0
    is_over: bool = False


class Upgrades:
    """The upgrades of one scale set, for the threads of its instances."""

    def __init__(self, gather: Callable[[Member], None] = lambda _: None) -> None:
        """``gather`` lets a member wait for others to arrive, before a request is sent for all that have."""
        self._gather = gather
        self._turn = threading.Condition()
        self._waiting: list[Member] = []
        self._open: list[Member] = []

    @contextmanager
    def joined(self, member: Member, send: Callable[[Sequence[Member]], None]) -> Iterator[None]:
        """Have a member sent by one of those that wait together; the next ones are sent when all blocks have ended.

        Raises what ``send`` raised.
        """
        with self._turn:
            self._waiting.append(member)
            self._turn.wait_for(lambda: member.is_over or not self._open)
            leads = not member.is_over
            self._open += [member] if leads else []
        if leads:
            self._send(member, send)
        try:
            if member.error:
                raise member.error
            yield
        finally:
            with self._turn:
                self._open.remove(member)
                self._turn.notify_all()

    def _chosen(self, first: Member) -> list[Member]:
        """Return the members of the next request, which then no longer wait."""
        batch = [
            member
            for member in self._waiting
            if member is first
            or (not (first.is_single or member.is_single) and member.version == first.version)
        ]
        self._waiting = [member for member in self._waiting if member not in batch]
        return batch

    def _send(self, first: Member, send: Callable[[Sequence[Member]], None]) -> None:
        batch, error = [first], None
        try:
            self._gather(first)
            with self._turn:
                self._open = batch = self._chosen(first)
            send(list(batch))
        except Exception as raised:  # each member's thread raises it
            error = raised
        finally:
            with self._turn:
                for member in batch:
                    member.error, member.is_over = member.error or error, True
                self._waiting = [member for member in self._waiting if not member.is_over]
                self._turn.notify_all()
