"""The gate's controller: one informer, one queue, one that acts.

Several may run: all of them watch, and the one that has the lease acts. Each action is what ``decide`` says about the
latest known state, which the API server itself tests: an action that is repeated has no further effect.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from image_builder.cluster.gate import abandoned, breaker
from image_builder.cluster.gate.breaker import Holder
from image_builder.cluster.gate.decide import Action, decide, patch
from image_builder.cluster.gate.model import Node, Rules
from image_builder.cluster.gate.remedies import Remedies
from image_builder.cluster.gate.retest import Limits, Retester
from image_builder.cluster.gate.watcher import Beside, watch_nodes
from image_builder.cluster.limits import Queue
from image_builder.drain.lease import Election
from image_builder.drain.lease import Settings as LeaseSettings
from image_builder.node.errors import NodeError
from image_builder.node.net.kube import JSON_PATCH, NOT_FOUND, Client, KubeError, path_of_node
from image_builder.node.net.retry import backoff

# Statuses that concern one node's change; all others concern the API server.
_OF_THE_NODE = frozenset({400, 403, 409, 422})
_LONGEST_PAUSE = 60.0
_chance: Callable[[], float] = random.random

Connect = Callable[[], Client]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """``rate`` is the most changes per second, ``burst`` how many may come at once after a pause. The breaker,
    re-tests and remedies have a turn every ``turn`` seconds, if nothing else is to be done at most ``idle`` later.
    ``advises``: the controller only reports what it would change, and needs no lease."""

    rules: Rules = field(default_factory=Rules)
    rate: float = 50.0
    burst: int = 100
    limits: Limits = field(default_factory=Limits)
    turn: float = 30.0
    idle: float = 0.5
    lease: LeaseSettings = field(default_factory=LeaseSettings)
    breaker: breaker.Limits = field(default_factory=breaker.Limits)
    advises: bool = False


class Controller:
    """Runs until it is stopped. ``connect`` opens a separate connection for each of the three threads. ``beside`` gets
    all Node objects (``Watcher``)."""

    def __init__(
        self, connect: Connect, identity: str, settings: Settings, tell: Tell, beside: Beside | None = None
    ) -> None:
        self.settings = settings
        self._tell = tell
        self._client = connect()
        self._lock = threading.Condition()
        self._queue = Queue(settings.rate, settings.burst, _chance)
        self.election = Election(connect(), identity, settings.lease, time.monotonic)
        self.informer = watch_nodes(connect(), settings.rules, self._changed, self._removed, tell, beside)
        self._failures = 0
        self._retester = Retester(self._client, settings.rules, settings.limits, tell)
        self._holder = Holder(
            self._client, settings.breaker, settings.rules.pool, tell, advises=settings.advises
        )
        self._remedies = Remedies(self._client, settings.rules, tell, time.monotonic)
        self._rolls = abandoned.Watch(self._client, tell, time.monotonic)
        self._advised: dict[str, Node] = {}
        self._turned = float("-inf")

    def run(self, stop: threading.Event, *parts: Callable[[threading.Event], None]) -> None:
        """Run until ``stop`` is set, along with ``parts``, each in its own thread.

        Raises NodeError if one of the threads has died: no controller is better than half of one.
        """
        threads = [
            *(threading.Thread(target=part, args=(stop,), daemon=True) for part in parts),
            threading.Thread(target=self.informer.run, args=(stop,), name="informer", daemon=True),
            threading.Thread(target=self._elect, args=(stop,), name="election", daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            while not stop.is_set():
                if not all(thread.is_alive() for thread in threads):
                    raise NodeError("gate", "a part of the controller died: restart it")
                self._once(stop)
        finally:
            stop.set()
            self.informer.interrupt()
            for thread in threads:
                thread.join(5)
            self._client.close()

    @property
    def _acts(self) -> bool:
        """Return whether this is the controller that acts; one that only advises doesn't compete with any."""
        return self.settings.advises or self.election.leads

    def _once(self, stop: threading.Event) -> None:
        """Take the next step if this controller acts; return after a short while in any case."""
        if not self._acts or not self.informer.synced.is_set():
            stop.wait(self.settings.idle / 5)
            return
        self._turn(stop)
        node = self._next()
        if node is not None:
            stop.wait(self._settle(node))

    def _turn(self, stop: threading.Event) -> None:
        """Give breaker, re-tests and remedies a turn, seldom enough that each sees the results of the one before."""
        now = time.monotonic()
        if now - self._turned >= self.settings.turn:
            nodes = list(self.informer.objects.values())
            self._holder.turn(nodes, time.time())

            def may_act() -> bool:
                return self.election.leads and not stop.is_set()

            if not self.settings.advises:
                self._retester.turn(nodes, time.time(), may_act)
            self._rolls.turn(nodes, time.time(), advises=self.settings.advises)
            # While the breaker can't be read, it is unknown what is held.
            if (holds := self._holder.holds) is not None:
                if self.settings.advises:
                    self._remedies.advise(nodes, holds, time.time())
                else:
                    self._remedies.turn(nodes, holds, time.time(), may_act)
            self._turned = time.monotonic()

    def _elect(self, stop: threading.Event) -> None:
        """Take and renew the lease; only ``stop`` may end this, or the lease would no longer be renewed."""
        led = False
        if self.settings.advises:
            stop.wait()
        while not stop.is_set():
            try:
                self.election.attempt()
            except NodeError as error:
                self._tell(f"the lease: {error.message}")
            if self.election.leads != led:
                led = not led
                self._tell("this is the leader" if led else "this is no longer the leader")
            stop.wait(self.settings.lease.pause * (0.8 + 0.4 * _chance()))
        try:
            self.election.release()
        except NodeError as error:
            self._tell(f"the lease was not released: {error.message}")
        self.election.close()

    def _changed(self, node: Node) -> None:
        with self._lock:
            if decide(node, self.settings.rules) is Action.NONE:
                self._queue.drop(node.name)
            else:
                self._queue.add(node.name, time.monotonic())
                self._lock.notify()

    def _removed(self, name: str) -> None:
        with self._lock:
            self._queue.drop(name)

    def _next(self) -> Node | None:
        """Return the next node to act on; None after a short while without one."""
        with self._lock:
            name, wait = self._queue.take(time.monotonic())
            if name is None:
                self._lock.wait(min(wait, self.settings.idle))
                return None
        return self.informer.objects.get(name)

    def _settle(self, node: Node) -> float:
        """Carry out the decision about a node; return for how many seconds to leave the API server alone."""
        action = decide(node, self.settings.rules)
        if action is Action.NONE:
            return 0.0
        if self.settings.advises:
            self._advise(node, action)
            return 0.0
        changes = patch(node, action, self.settings.rules)
        try:
            self._client.request("PATCH", path_of_node(node.name), changes, JSON_PATCH)
        except NodeError as error:
            return self._put_back(node, error)
        self._failures = 0
        with self._lock:
            self._queue.drop(node.name)
            # The node may have changed during the request, before it was dropped.
            newest = self.informer.objects.get(node.name)
            if (
                newest is not None
                and newest != node
                and decide(newest, self.settings.rules) is not Action.NONE
            ):
                self._queue.add(node.name, time.monotonic())
        self._tell(f"{node.name}: {_DONE[action]} (boot {node.boot_id})")
        return 0.0

    def _advise(self, node: Node, action: Action) -> None:
        """Report what would be done, once for each boot, test and admission of a node."""
        with self._lock:
            self._queue.drop(node.name)
        before = self._advised.get(node.name)
        self._advised[node.name] = node
        compared = ("boot_id", "status", "tested_boot", "admitted_boot")
        if before and all(getattr(before, name) == getattr(node, name) for name in compared):
            return
        self._tell(f"{node.name}: would be {_DONE[action]} (boot {node.boot_id})")

    def _put_back(self, node: Node, error: NodeError) -> float:
        status = error.status if isinstance(error, KubeError) else 0
        retry_after = error.retry_after if isinstance(error, KubeError) else None
        with self._lock:
            if status == NOT_FOUND:
                self._queue.drop(node.name)
            elif status in _OF_THE_NODE:
                self._queue.failed(node.name, time.monotonic())
            else:
                self._queue.add(node.name, time.monotonic())
        self._tell(f"{node.name}: not done: {error.message}")
        if status == NOT_FOUND or status in _OF_THE_NODE:
            return 0.0
        self._failures += 1
        return backoff(self._failures, retry_after=retry_after, cap=_LONGEST_PAUSE)


_DONE = {
    Action.ADMIT: "admitted",
    Action.GATE: "gated",
    Action.FORGET: "admitted without the findings that are gone",
}
