"""One list and one watch over all nodes of the gate: what the API server knows, kept up to date."""

from __future__ import annotations

import random
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from image_builder.gate.model import Node, Rules, node_from
from image_builder.node.kube import Client, KubeError, backoff

# A watch is ended by the server after some minutes; its silence is broken by bookmarks every minute.
_WATCH_SECONDS = 300
_IDLE_SECONDS = 90.0
_GONE = 410
_chance: Callable[[], float] = random.random

Changed = Callable[[Node], None]


class GoneError(Exception):
    """What was watched from is no longer known: list again."""


class Informer:
    """Keeps ``nodes`` by name, and calls ``changed`` and ``removed`` for each change, in the thread of ``run``.

    Nothing else asks for nodes. A list with resourceVersion=0 is served from the API server's memory, and a watch goes
    on where it broke off.
    """

    def __init__(
        self,
        client: Client,
        rules: Rules,
        changed: Changed,
        removed: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        self.nodes: dict[str, Node] = {}
        self.synced = threading.Event()
        self._client, self._rules = client, rules
        self._changed, self._removed, self._tell = changed, removed, tell
        self._version = ""

    def run(self, stop: threading.Event) -> None:
        """List and watch until ``stop`` is set; what goes wrong is waited out."""
        with self._client:
            self._run(stop)

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

    def interrupt(self) -> None:
        """End the wait for the next change: ``stop`` is set."""
        self._client.interrupt()

    def _path(self, **more: str) -> str:
        return "/api/v1/nodes?" + urllib.parse.urlencode({"labelSelector": self._rules.label, **more})

    def _list(self) -> None:
        listed = set()

        def take(item: Mapping[str, Any]) -> None:
            listed.add(item["metadata"]["name"])
            self._take(item)

        version = self._client.each(self._path(resourceVersion="0"), take)
        for name in self.nodes.keys() - listed:
            self._drop(name)
        self._version = version
        self.synced.set()

    def _watch(self, stop: threading.Event) -> None:
        path = self._path(
            watch="1",
            resourceVersion=self._version,
            allowWatchBookmarks="true",
            timeoutSeconds=str(int(_WATCH_SECONDS + 60 * _chance())),
        )
        began = time.monotonic()
        for event in self._client.watch(path, idle=_IDLE_SECONDS):
            self._event(event)
            if stop.is_set():
                return
        # One that the server ends at once is no watch: don't ask at the speed of the network.
        if time.monotonic() - began < 1:
            stop.wait(1 + _chance())

    def _event(self, event: Mapping[str, Any]) -> None:
        kind, found = event["type"], event["object"]
        if kind == "ERROR":
            if found.get("code") == _GONE:
                raise GoneError
            raise KubeError(f"the watch says: {found.get('message')}", int(found.get("code") or 0))
        self._version = found["metadata"]["resourceVersion"]
        if kind == "DELETED":
            self._drop(found["metadata"]["name"])
        elif kind in ("ADDED", "MODIFIED"):
            self._take(found)

    def _take(self, item: Mapping[str, Any]) -> None:
        node = node_from(item, self._rules)
        # Most changes of a Node object are none of what counts here: heartbeats.
        if self.nodes.get(node.name) != node:
            self.nodes[node.name] = node
            self._changed(node)

    def _drop(self, name: str) -> None:
        self.nodes.pop(name, None)
        self._removed(name)
