"""The drains of a roll: one thread cycles through all hosts that are being emptied or awaited."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from image_builder.drain import event
from image_builder.drain import run as drains
from image_builder.drain.fence import is_denied
from image_builder.drain.handover import Handover
from image_builder.drain.ladder import PATIENCE
from image_builder.drain.observe import Cordoned
from image_builder.drain.overdue import Overdue
from image_builder.drain.pods import count_gpus
from image_builder.drain.policy import Policy
from image_builder.drain.run import Drain
from image_builder.node.errors import NodeError
from image_builder.node.net.kube import Client as Kube
from image_builder.node.net.kube import KubeError, path_of_node
from image_builder.node.net.retry import backoff
from image_builder.pool.plan.model import OK, Outcome, Step, ended, failed
from image_builder.pool.run.records import Emptied

# Maximum seconds between two attempts while the API server, or Azure, is unavailable.
TROUBLE_SECONDS = 60.0
# The failure number of a step that was broken off.
BROKEN_OFF = 2
_REFUSALS = 5

Key = tuple[str, Step, int]


def is_final(error: NodeError, failures: int) -> bool:
    """Return whether the API server's refusal is final. A server that has just started doesn't know any rights yet, and
    a certificate that can't be read may be about to be renewed.
    """
    if not isinstance(error, KubeError):
        return False
    return error.is_hopeless or (error.status in (401, 403) and failures >= _REFUSALS)


def why(outcome: drains.Outcome) -> str:
    """Return why a host was skipped: the reason, and the first pod responsible."""
    first = next((tenant.pod for tenant in outcome.tenants), None)
    return f"{outcome.reason}: {first}" if first else outcome.reason


def _ending(outcome: drains.Outcome) -> Outcome:
    """Return the outcome of a host's drain."""
    if outcome.state == "empty":
        return OK
    # A host skipped without a pod is held or cordoned by somebody else, or is gone.
    is_busy = bool(outcome.tenants) and not outcome.is_final
    return ended("busy" if is_busy else "skipped", why(outcome))


class Drains:
    """All drains of a roll, and the hosts that are awaited, in one thread.

    ``run`` is the roll's name on nodes; ``report`` is called in this thread, and ``crash`` with an error that ends it.
    Hosts that are begun together are one drain: gangs in it are drained together. After ``deadline``, in seconds since
    the epoch, owners' objections no longer count.
    """

    def __init__(
        self,
        connect: Callable[[], Kube],
        run: str,
        policy: Policy,
        max_fenced: int,
        report: Callable[[Key, Outcome, Emptied], None],
        crash: Callable[[Exception], None],
        deadline: float = math.inf,
    ) -> None:
        self._connect, self._name, self._policy, self._max_fenced = connect, run, policy, max_fenced
        self._report, self._crash, self._deadline = report, crash, deadline
        # Hosts to drain, hosts to await with their deadlines, or a host to let go of with the event that confirms it.
        self._new: SimpleQueue[list[Key] | dict[Key, float] | tuple[str, threading.Event]] = SimpleQueue()
        self._awaited: dict[str, tuple[Key, float]] = {}
        self._due = 0.0
        # Hosts of the last wave.
        self._rested: set[str] = set()
        # Hosts that the run wants empty and has not let go of: this thread must not remove their cordons.
        self._asked: set[str] = set()
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._over: set[Key] = set()
        # Cordoned nodes, read once for all that look at them at the same time; also used by the final checks.
        self.cordoned = Cordoned()
        # Nodes of empty hosts, as they were when the drain ended.
        self.nodes: dict[str, dict[str, Any]] = {}
        self._thread = threading.Thread(target=self._run, name="drains")

    def start(self) -> None:
        self._thread.start()

    def add(self, keys: Iterable[Key]) -> None:
        self._new.put(list(keys))
        self._wake.set()

    def wait_for(self, keys: Mapping[Key, float]) -> None:
        """Report hosts as soon as they are idle, or when they still aren't at the given time."""
        self._new.put(dict(keys))
        self._wake.set()

    def give_up(self, key: Key) -> None:
        self._over.add(key)

    def drop(self, name: str) -> None:
        """Let go of a host; nothing more is done to it when this returns."""
        gone = threading.Event()
        self._new.put((name, gone))
        self._wake.set()
        while self._thread.is_alive() and not gone.wait(0.1):
            pass

    def end(self) -> None:
        """End the thread; cordons stay for the process that continues the run to remove."""
        self._ending.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._go_round()
        except Exception as error:  # it would be lost in this thread, and all hosts would wait forever
            self._crash(error)

    def _go_round(self) -> None:
        work: list[tuple[Drain, dict[str, Key]]] = []
        kube, failures = self._connect(), 0
        handover = Handover(kube, self._name, self._policy, self._max_fenced, deadline=self._deadline)
        overdue = Overdue(kube, self._deadline, time.time)
        try:
            while not self._ending.is_set():
                overdue.check()
                self._take(work, kube, handover, overdue)
                pause = TROUBLE_SECONDS
                try:
                    if self._awaited:
                        pause = self._turn(handover)
                    for drain, keys_of in work:
                        drain.turn()
                        self._tell(drain, keys_of)
                        pause = min(pause, drain.pause)
                    for item in [item for item in work if not item[1]]:
                        self._free_partners(kube, item[0])
                        work.remove(item)
                    failures = 0
                except NodeError as error:
                    if is_final(error, failures):
                        self._fail(work, handover, error)
                        work = []
                    failures += 1
                    retry_after = error.retry_after if isinstance(error, KubeError) else None
                    pause = backoff(failures, retry_after=retry_after, cap=TROUBLE_SECONDS)
                self._wake.wait(pause)
                self._wake.clear()
        finally:
            kube.close()

    def _turn(self, handover: Handover) -> float:
        """Look at the awaited hosts if that is due; return the seconds until the next look."""
        pause = self._due - time.monotonic()
        if pause > 0:
            return pause
        self._due = time.monotonic() + self._policy.poll_seconds
        for name, unit in handover.turn():
            self._answer(name, OK, unit)
        now = time.time()
        for name in [name for name, (_, until) in self._awaited.items() if until <= now]:
            outcome = ended("busy", f"{PATIENCE}: {handover.pod(name)}")
            handover.drop(name)
            self._answer(name, outcome)
        return max(0.0, self._due - time.monotonic())

    def _answer(self, name: str, outcome: Outcome, unit: tuple[str, ...] = ()) -> None:
        """Report an awaited host."""
        key, _ = self._awaited.pop(name)
        if key not in self._over:
            self._report(key, outcome, Emptied(unit=unit))

    def _take(
        self, work: list[tuple[Drain, dict[str, Key]]], kube: Kube, handover: Handover, overdue: Overdue
    ) -> None:
        """Begin what was requested meanwhile, and let go of hosts."""
        while True:
            try:
                asked = self._new.get_nowait()
            except Empty:
                return
            if isinstance(asked, tuple):
                name, gone = asked
                self._asked.discard(name)
                handover.drop(name)
                self._awaited.pop(name, None)
                for drain, keys in work:
                    if keys.pop(name, None):
                        drain.drop(name)
                gone.set()
                continue
            if isinstance(asked, dict):
                self._awaited |= {key[0]: (key, until) for key, until in asked.items()}
                self._rested |= {key[0] for key in asked}
                handover.add(key[0] for key in asked)
                continue
            self._asked |= {key[0] for key in asked}
            # Hosts of the last wave were idle a moment ago, so they aren't waited for again.
            is_over = overdue.is_over
            for hurry in (False, True):
                keys_of = {key[0]: key for key in asked if (key[0] in self._rested and not is_over) == hurry}
                policy = self._policy.model_copy(update={"max_wait_seconds": 0.0}) if hurry else self._policy
                drain = Drain(
                    kube,
                    self._name,
                    policy,
                    lambda _: None,
                    deadline=self._deadline,
                    cordoned=self.cordoned,
                    is_last=False,  # whatever is sent for a host, its own last look precedes
                )
                drain.add(keys_of)
                work.append((drain, keys_of))

    def _tell(self, drain: Drain, keys: dict[str, Key]) -> None:
        """Report the hosts of a drain that are done."""
        for name, outcome in list(drain.outcomes.items()):
            key = keys.pop(name, None)
            if key and key not in self._over:
                if outcome.node:
                    self.nodes[name] = outcome.node
                status = (outcome.node or {}).get("status") or {}
                gpus = count_gpus(status.get("allocatable"))
                self._report(key, _ending(outcome), Emptied(evicted=outcome.evicted, gpus=gpus))

    def _free_partners(self, kube: Kube, drain: Drain) -> None:
        """Free the hosts that a drain added because its gangs also run there. Raises KubeError."""
        for name in sorted(drain.partners - self._asked):
            try:
                drains.free(kube, name, self._name)
            except KubeError as error:
                if not is_denied(error):
                    raise  # all are tried again
                self._warn(kube, name, f"its cordon stays: {error.message} ({self._name})")

    def _warn(self, kube: Kube, name: str, message: str) -> None:
        """Post an Event on a host that isn't in the run, and so not in its report; nothing depends on it."""
        with suppress(KubeError):
            if node := kube.find(path_of_node(name)):
                uid, now = node["metadata"]["uid"], time.time()
                event.post(kube, event.event(name, uid, "CordonStays", message, now, kind="Warning"))

    def _fail(
        self, work: Iterable[tuple[Drain, dict[str, Key]]], handover: Handover, error: NodeError
    ) -> None:
        outcome = failed("drain", BROKEN_OFF, str(error))
        for _, keys in work:
            for key in keys.values():
                self._report(key, outcome, Emptied())
        for name in list(self._awaited):
            handover.drop(name)
            self._answer(name, outcome)
