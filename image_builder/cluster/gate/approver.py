"""The gate's approver: the certificate of a node's first kubelet, for a token that is bound to this very node.

It approves; the controller manager signs. It reads no secret, and denies nothing: what it may not approve is left to
whoever else decides about signing requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from image_builder.cluster.gate.model import path_of as node_path
from image_builder.cluster.gate.signing import (
    SIGNER,
    Bound,
    Member,
    Pending,
    UnboundError,
    approval,
    check,
    member_from,
    path_of,
    pending_from,
    reason_to_wait,
)
from image_builder.cluster.gate.watcher import Watcher
from image_builder.node.errors import NodeError
from image_builder.node.net.kube import MERGE_PATCH, Client, KubeError

# Until a request is looked at again that waits for a node to go, or that the API server would not have approved.
_PAUSE = 5.0
_IDLE = 0.5
_NOT_FOUND, _CONFLICT = 404, 409

Connect = Callable[[], Client]
Tell = Callable[[str], None]


class Approver:
    """Runs until it is stopped. ``leads`` tells whether this process may act; ``connect`` opens a connection."""

    def __init__(self, connect: Connect, leads: Callable[[], bool], tell: Tell) -> None:
        self._client = connect()
        self._leads, self._tell = leads, tell
        self._lock = threading.Condition()
        self._due: dict[str, float] = {}
        self._reports: dict[str, str] = {}
        selector = {"fieldSelector": f"spec.signerName={SIGNER}"}
        self._requests = Watcher(
            connect(), path_of(), selector, pending_from, self._changed, self._removed, tell
        )
        self._members = Watcher(connect(), "/api/v1/nodes", {}, member_from, _pass, _pass, tell)

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop`` is set; ends early only when a part of it has died."""
        watchers = (self._requests, self._members)
        threads = [threading.Thread(target=watcher.run, args=(stop,), daemon=True) for watcher in watchers]
        for thread in threads:
            thread.start()
        try:
            while not stop.is_set() and all(thread.is_alive() for thread in threads):
                self._once(stop)
        finally:
            for watcher in watchers:
                watcher.interrupt()
            self._client.close()

    def _once(self, stop: threading.Event) -> None:
        ready = all(watcher.synced.is_set() for watcher in (self._requests, self._members))
        name = self._next() if ready and self._leads() else None
        pending = self._requests.objects.get(name) if name else None
        if pending is None:
            stop.wait(_IDLE / 5)
        else:
            self._settle(pending)

    def _changed(self, pending: Pending) -> None:
        with self._lock:
            self._due[pending.name] = time.monotonic()
            self._lock.notify()

    def _removed(self, name: str) -> None:
        with self._lock:
            self._due.pop(name, None)
            self._reports.pop(name, None)

    def _next(self) -> str | None:
        """Return the request whose turn it is; None after a short while without one."""
        with self._lock:
            now = time.monotonic()
            name = min(self._due, key=self._due.__getitem__, default=None)
            if name is None or self._due[name] > now:
                self._lock.wait(_IDLE)
                return None
            del self._due[name]
        return name

    def _settle(self, pending: Pending) -> None:
        """Approve a request, or say why not, and look again where that may change."""
        try:
            bound = check(pending)
        except UnboundError as error:
            # What it says never changes.
            self._say(pending, f"left pending: {error}")
            return
        try:
            if reason := reason_to_wait(bound, self._nodes(bound)):
                self._say(pending, f"waits: {reason}")
                self._later(pending)
                return
            self._client.request(
                "PATCH", path_of(pending.name), approval(pending, bound, _now()), MERGE_PATCH
            )
        except NodeError as error:
            if not isinstance(error, KubeError) or error.status not in (_NOT_FOUND, _CONFLICT):
                self._say(pending, f"not approved: {error.message}")
            self._later(pending)
            return
        self._say(pending, f"approved for the node {bound.node}")

    def _nodes(self, bound: Bound) -> list[Member]:
        """Return all nodes, the one of that name as it is at this moment. Raises KubeError."""
        others = [member for name, member in list(self._members.objects.items()) if name != bound.node]
        try:
            return [member_from(self._client.request("GET", node_path(bound.node))), *others]
        except KubeError as error:
            if error.status != _NOT_FOUND:
                raise
            return others

    def _later(self, pending: Pending) -> None:
        with self._lock:
            if pending.name in self._requests.objects:
                self._due.setdefault(pending.name, time.monotonic() + _PAUSE)

    def _say(self, pending: Pending, text: str) -> None:
        if self._reports.get(pending.name) != text:
            self._reports[pending.name] = text
            self._tell(f"{pending.name} of {pending.user}: {text}")


def _pass(_: object) -> None:
    """Nobody waits for a node's change: it is looked up."""


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
