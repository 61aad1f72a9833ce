"""One list and one watch over the objects of a kind: the API server's state, kept up to date."""

from __future__ import annotations

import random
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from image_builder.cluster.gate.model import Node, Rules, node_from
from image_builder.node.net.kube import Client, KubeError
from image_builder.node.net.retry import backoff
from image_builder.text import printable

# The server ends a watch after some minutes; bookmarks break its silence every minute.
_WATCH_SECONDS = 300
_IDLE_SECONDS = 90.0
_NODES = "/api/v1/nodes"
_GONE = 410
_chance: Callable[[], float] = random.random

T = TypeVar("T")
Beside = Callable[[str, Mapping[str, Any] | None], None]


class GoneError(Exception):
    """The watched version is no longer known: list again."""


class Watcher(Generic[T]):
    """Keeps ``objects`` by name, and calls ``changed`` and ``removed`` for each change, in the thread of ``run``.

    ``path`` is what is listed and watched, ``query`` its selectors. ``read`` returns the part of an object that
    matters, None if the object doesn't; ``unread`` does so for one with which ``read`` fails. ``beside`` gets each
    object as it is, by name, and None for one that is gone. A list with resourceVersion=0 is served from the API
    server's memory, and a watch continues where it broke off.
    """

    def __init__(
        self,
        client: Client,
        path: str,
        query: Mapping[str, str],
        read: Callable[[Mapping[str, Any]], T | None],
        changed: Callable[[T], None],
        removed: Callable[[str], None],
        tell: Callable[[str], None],
        unread: Callable[[Mapping[str, Any]], T | None] = lambda _: None,
        beside: Beside = lambda _name, _item: None,
    ) -> None:
        self.objects: dict[str, T] = {}
        self.synced = threading.Event()
        self._client, self._path, self._query, self._read = client, path, dict(query), read
        self._changed, self._removed, self._tell = changed, removed, tell
        self._unread, self._beside = unread, beside
        self._names: set[str] = set()
        self._unreadable: dict[str, str] = {}
        self._version = ""

    def run(self, stop: threading.Event) -> None:
        """List and watch until ``stop`` is set, waiting and retrying after failures."""
        with self._client:
            self._run(stop)

    def interrupt(self) -> None:
        """Interrupt the wait for the next change, once ``stop`` is set."""
        self._client.interrupt()

    def _run(self, stop: threading.Event) -> None:
        failures = 0
        while not stop.is_set():
            try:
                if not self._version:
                    self._list()
                self._watch(stop)
                failures = 0
            except GoneError:
                self._version = ""
            except KubeError as error:
                if error.status == _GONE:
                    self._version = ""
                wait = backoff(failures, retry_after=error.retry_after, cap=30.0, chance=_chance)
                if not stop.is_set():
                    self._tell(f"{error.message}; again in {wait:.1f} s")
                failures += 1
                stop.wait(wait)

    def _url(self, **more: str) -> str:
        return f"{self._path}?{urllib.parse.urlencode({**self._query, **more})}"

    def _list(self) -> None:
        listed = set()

        def take(item: Mapping[str, Any]) -> None:
            listed.add(item["metadata"]["name"])
            self._take(item)

        version = self._client.each(self._url(resourceVersion="0"), take)
        for name in self._names - listed:
            self._gone(name)
        self._version = version
        self.synced.set()

    def _watch(self, stop: threading.Event) -> None:
        url = self._url(
            watch="1",
            resourceVersion=self._version,
            allowWatchBookmarks="true",
            timeoutSeconds=str(int(_WATCH_SECONDS + 60 * _chance())),
        )
        began = time.monotonic()
        for event in self._client.watch(url, idle=_IDLE_SECONDS):
            self._event(event)
            if stop.is_set():
                return
        # If the server ends the watch at once, don't retry at network speed.
        if time.monotonic() - began < 1:
            stop.wait(1 + _chance())

    def _event(self, event: Mapping[str, Any]) -> None:
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            if item.get("code") == _GONE:
                raise GoneError
            raise KubeError(f"the watch failed: {item.get('message')}", int(item.get("code") or 0))
        self._version = item["metadata"]["resourceVersion"]
        if kind == "DELETED":
            self._gone(item["metadata"]["name"])
        elif kind in ("ADDED", "MODIFIED"):
            self._take(item)

    def _take(self, item: Mapping[str, Any]) -> None:
        name = item["metadata"]["name"]
        self._names.add(name)
        self._beside(name, item)
        try:
            value = self._read(item)
            self._unreadable.pop(name, None)
        except Exception as error:  # nodes write their own objects: none may stop this for all the others
            value = self._unread(item)
            self._complain(name, f"{type(error).__name__}: {error}")
        if value is None:
            self._drop(name)
        # Most changes of an object don't matter here, such as a node's heartbeats.
        elif self.objects.get(name) != value:
            self.objects[name] = value
            self._changed(value)

    def _complain(self, name: str, problem: str) -> None:
        """Report an object that can't be read once, not at each of its changes."""
        if self._unreadable.get(name) != problem:
            self._unreadable[name] = problem
            self._tell(
                f"{name} can't be read, and counts as one that says nothing: {printable(problem[:300])}"
            )

    def _gone(self, name: str) -> None:
        self._unreadable.pop(name, None)
        self._names.discard(name)
        self._beside(name, None)
        self._drop(name)

    def _drop(self, name: str) -> None:
        if self.objects.pop(name, None) is not None:
            self._removed(name)


def watch_nodes(
    client: Client,
    rules: Rules,
    changed: Callable[[Node], None],
    removed: Callable[[str], None],
    tell: Callable[[str], None],
    beside: Beside | None = None,
) -> Watcher[Node]:
    """Return the watcher of all the nodes that the gate handles; ``beside`` gets all others, too."""

    def is_handled(item: Mapping[str, Any]) -> bool:
        return rules.label in (item["metadata"].get("labels") or {})

    def read(item: Mapping[str, Any]) -> Node | None:
        return node_from(item, rules) if not beside or is_handled(item) else None

    def unread(item: Mapping[str, Any]) -> Node | None:
        """Return a node of which no report is known: whatever it was before, it is gated."""
        if beside and not is_handled(item):
            return None
        return Node(item["metadata"]["name"], taints=tuple((item.get("spec") or {}).get("taints") or ()))

    if beside:
        return Watcher(client, _NODES, {}, read, changed, removed, tell, unread, beside)
    return Watcher(client, _NODES, {"labelSelector": rules.label}, read, changed, removed, tell, unread)
