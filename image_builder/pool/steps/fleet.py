"""The real fleet: the driver's ``Steps`` over SSH, Ansible, the verification suite, and a control plane.

Whatever happens elsewhere (in a connection's thread, a slice's process, a suite's run) reaches ``wait`` through one
queue, and all decisions here are made in the driver's thread.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from image_builder.drain.policy import Policy
from image_builder.node.net.kube import Client as Kube
from image_builder.pool.plan.model import Host, Joined, Outcome, Step, Target, ended
from image_builder.pool.plan.policy import Deadlines
from image_builder.pool.reach import provision
from image_builder.pool.reach.provision import JoinStatus
from image_builder.pool.reach.reach import Access, Answer, Reach
from image_builder.pool.run.driver import Event, Work
from image_builder.pool.run.gates import Reading
from image_builder.pool.run.records import Emptied
from image_builder.pool.scale_set.client import Client as Azure
from image_builder.pool.scale_set.roll import Patience
from image_builder.pool.steps import ansible
from image_builder.pool.steps.ansible import Slice
from image_builder.pool.steps.control_plane import ControlPlane
from image_builder.pool.steps.slice import Worker
from image_builder.pool.steps.suite import Runs, Suite
from image_builder.system.trees import remove_tree

# Timeout of a query to a host, not counting the login: it starts an interpreter there.
_ASK_SECONDS = 30.0
# Between two queries to a host that is still joining: this minimum, later a fraction of the time that it has taken.
_AGAIN_SECONDS, _AGAIN_PART, _AGAIN_MOST = 2.0, 0.1, 15.0
# Concurrent runs of the suite per core.
_SUITES = 4
# Between the taint and the final check: a pod that was bound before the taint has appeared by then.
_SETTLE_SECONDS = 30.0


@dataclass(frozen=True)
class Setup:
    """The connections and settings used to work on a fleet.

    ``configurations`` are the node configurations of hosts that don't get theirs from user data. ``workers`` run the
    slices in turn; without workers they run here.
    """

    access: Access
    deadlines: Deadlines
    python: Path
    control_plane: ControlPlane
    suite: Suite | None = None
    configurations: Mapping[str, Path] = field(default_factory=dict)
    workers: Sequence[Worker] = ()
    at_once: int = 200
    # A suite run spends most of its time waiting for its host.
    suites: int = field(default_factory=lambda: _SUITES * len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class Change:
    """The target, connections and limits of a roll.

    ``run`` names it on nodes, ``holder`` this process on scale sets; ``takes_over``: another process that holds them is
    dismissed. ``kube`` opens a connection to the API server, one per thread; ``journal`` records what is sent to Azure.
    ``max_fenced``: the maximum number of hosts of the last wave that are cordoned while they work. After ``deadline``,
    in seconds since the epoch, busy hosts are emptied regardless of what the owners of their pods say. ``asks_nodes``:
    a node that reports itself busy isn't empty. ``force_ephemeral``: ephemeral OS disks are replaced too.
    """

    target: Target
    run: str
    holder: str
    kube: Callable[[], Kube]
    azure: Azure
    journal: Path
    policy: Policy
    max_fenced: int = 0
    deadline: float = math.inf
    asks_nodes: bool = True
    force_ephemeral: bool = False
    takes_over: bool = False
    patience: Patience = field(default_factory=Patience)
    settle_seconds: float = _SETTLE_SECONDS


class _Begun(NamedTuple):
    """A step in progress on a host. ``at`` is when it began, after the delay of its join slot."""

    work: Work
    step: Step
    at: float


class _Slice(NamedTuple):
    process: ansible.Process
    thread: threading.Thread
    unfinished: set[str]


_T = TypeVar("_T")
_Key = tuple[str, Step, int]
# A message in the queue: something to do in the driver's thread, or None, which only wakes it.
_Message = Callable[[], None] | None


class Fleet:
    """Hosts that are reached over SSH; a context manager. See ``driver.Steps`` for the contract of its methods."""

    def __init__(self, setup: Setup, folder: Path, on_wait: Callable[[], None] = lambda: None) -> None:
        """Read the private key and the hosts' keys; raises UsageError if they can't be read.

        ``folder`` holds the private data of the slices while they run and is removed at the end. ``on_wait`` is called
        in each round, in the driver's thread.
        """
        self._setup, self._folder, self._on_wait = setup, folder, on_wait
        self._reach = Reach(setup.access, at_once=setup.at_once)
        self._suites = ThreadPoolExecutor(setup.suites, thread_name_prefix="suite")
        self._runs = Runs(setup.suite, self._reach) if setup.suite else None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="gate")
        self._reading: Future[Reading] | None = None
        self._queue: SimpleQueue[_Message] = SimpleQueue()
        self._begun: dict[_Key, _Begun] = {}
        self._again: list[tuple[float, _Key]] = []
        self._slices: list[_Slice] = []
        self._number = 0
        self._events: list[Event] = []
        # Setting the clock while hosts are in work neither delays their deadlines nor makes all of them expire.
        self._since_1970 = time.time() - time.monotonic()

    def __enter__(self) -> Self:
        """Raises ImageBuilderError while an earlier run's processes are still running, OSError."""
        ansible.clear(self._folder)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._reach.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for slice_ in self._slices:
            slice_.process.end()
        # A reading in progress is no longer needed, and ends by its own timeouts.
        for executor in (self._suites, self._reader):
            executor.shutdown(wait=False, cancel_futures=True)
        self._reach.__exit__(kind, error, trace)
        for slice_ in self._slices:
            slice_.thread.join()
        # Don't wait for the results of the remaining suites.
        if self._runs:
            self._runs.__exit__(kind, error, trace)
        self._suites.shutdown()
        remove_tree(self._folder)

    def wake(self) -> None:
        """Let ``wait`` return soon; may be called from any thread."""
        self._queue.put(None)

    def now(self) -> float:
        return self._since_1970 + time.monotonic()

    def wait(self, until: float) -> Sequence[Event]:
        self._on_wait()
        self._ask_again()
        due = min([until, *(at for at, _ in self._again)])
        try:
            message = self._queue.get(timeout=max(0.0, due - self.now()))
            while True:
                if message is not None:
                    message()
                message = self._queue.get_nowait()
        except Empty:
            pass
        events, self._events = self._events, []
        return events

    def begin(self, step: Step, work: Sequence[Work]) -> None:
        {"probe": self.probe, "bootstrap": self.bootstrap, "verify": self.verify}[step](work)

    def turn(self) -> str | None:
        """Do nothing: only a roll has changed scale sets."""
        return ""

    def missing(self, hosts: Sequence[Host]) -> Mapping[str, str] | None:  # noqa: ARG002
        """Return nobody: only a roll asks."""
        return {}

    def idle(self, cells: Sequence[Sequence[Host]], each: int) -> Collection[str] | None:  # noqa: ARG002
        """Return nobody: only a roll asks."""
        return ()

    def probe(self, work: Sequence[Work]) -> None:
        for w in work:
            key = self._begin(w, "probe")
            self._ask(key)

    def bootstrap(self, work: Sequence[Work]) -> None:
        for w in work:
            self._begin(w, "bootstrap")
            # Ansible has its own connection, and the step takes longer than an idle one is kept.
            self._reach.release(w.host)
        setup = self._setup
        self._number += 1
        # In turn, so that hosts lost with one worker are retried on another.
        worker = setup.workers[(self._number - 1) % len(setup.workers)] if setup.workers else None
        slice_ = Slice(tuple(work), setup.access, setup.deadlines.bootstrap, setup.configurations, worker)
        process = ansible.Process(slice_, self._folder / f"slice-{self._number}", setup.python)
        attempts = {w.host.name: w.attempt for w in work}

        def on_end(name: str, status: JoinStatus) -> None:
            self._queue.put(partial(self._joined, (name, "bootstrap", attempts[name]), status))

        thread = threading.Thread(target=process.run, args=(on_end,), name=f"slice-{self._number}")
        self._slices = [s for s in self._slices if s.thread.is_alive()]
        self._slices.append(_Slice(process, thread, set(attempts)))
        thread.start()

    def verify(self, work: Sequence[Work]) -> None:
        for w in work:
            key = self._begin(w, "verify")
            future = self._suites.submit(self._run_suite, key)
            future.add_done_callback(self._answered(self._verified, key))

    def give_up(self, host: str, step: Step, attempt: int) -> Joined:
        self._begun.pop((host, step, attempt), None)
        self._leave_slice(host, step)
        return "unknown"

    def conclude(self) -> None:
        """Do nothing: nothing is held."""

    def unplanned(self, _hosts: Sequence[Host]) -> Mapping[str, str]:
        return {}

    def room(self, step: Step) -> int:
        # A host waiting to be asked again holds no connection.
        resting = {key for _, key in self._again}
        busy = sum(key[1] == step for key in self._begun.keys() - resting)
        return (self._setup.suites if step == "verify" else self._setup.at_once) - busy

    def gate(self) -> Reading | None:
        if self._reading is None:
            self._reading = self._reader.submit(self._setup.control_plane.read)
            self._reading.add_done_callback(lambda _: self.wake())
        if not self._reading.done():
            return None
        reading, self._reading = self._reading.result(), None
        return reading

    def _begin(self, work: Work, step: Step) -> _Key:
        key = (work.host.name, step, work.attempt)
        self._begun[key] = _Begun(work, step, self.now() + work.delay)
        return key

    def _end(
        self,
        key: _Key,
        outcome: Outcome,
        joined: Joined,
        phases: Sequence[tuple[str, float]] = (),
        emptied: Emptied = Emptied(),  # noqa: B008 (it never changes)
    ) -> None:
        """Report that a step ended, unless it was given up."""
        begun = self._begun.pop(key, None)
        if begun is None:
            return
        name, step, attempt = key
        seconds = max(0.0, self.now() - begun.at)
        event = Event(name, step, attempt, outcome, joined, seconds, tuple(phases), emptied)
        self._events.append(event)
        self._leave_slice(name, step)

    def _leave_slice(self, host: str, step: Step) -> None:
        """End the process of a slice once none of its hosts is waited for."""
        for slice_ in self._slices if step == "bootstrap" else ():
            if host in slice_.unfinished:
                slice_.unfinished.discard(host)
                if not slice_.unfinished:
                    slice_.process.end()

    def _answered(self, take: Callable[[_Key, _T], None], key: _Key) -> Callable[[Future[_T]], None]:
        """Return a callback that passes a thread's result to the driver's thread; its exception is raised there."""

        def done(future: Future[_T]) -> None:
            if not future.cancelled():
                self._queue.put(lambda: take(key, future.result()))

        return done

    def _ask(self, key: _Key) -> None:
        host = self._begun[key].work.host
        # Hosts that the suite verifies are verified next, so keep the connection.
        keep = self._runs is not None
        future = self._reach.submit(host, provision.ASK, root=True, seconds=_ASK_SECONDS, keep=keep)
        future.add_done_callback(self._answered(self._probed, key))

    def _ask_again(self) -> None:
        now = self.now()
        for _, key in (late := [item for item in self._again if item[0] <= now]):
            if key in self._begun:
                self._ask(key)
        self._again = [item for item in self._again if item not in late]

    def _probed(self, key: _Key, answer: Answer) -> None:
        begun = self._begun.get(key)
        if begun is None:
            return
        if not answer.outcome.ok:
            self._end(key, answer.outcome, "unknown")
            return
        assert answer.status is not None  # it ran
        status = provision.read(answer.status, answer.stdout, answer.stderr)
        if status.busy:
            # Whether it joins is known only when it has ended; wait for that until the deadline.
            now = self.now()
            pause = min(_AGAIN_MOST, max(_AGAIN_SECONDS, _AGAIN_PART * (now - begun.at)))
            self._again.append((now + pause, key))
        else:
            self._end(key, status.outcome, status.joined, status.phases)

    def _joined(self, key: _Key, status: JoinStatus) -> None:
        self._end(key, status.outcome, status.joined, status.phases)

    def _verified(self, key: _Key, outcome: Outcome) -> None:
        self._end(key, outcome, "unknown")

    def _run_suite(self, key: _Key) -> Outcome:
        """Run the suite, in a thread of the pool."""
        begun = self._begun.get(key)
        if begun is None:
            return ended("unknown", "abandoned before it started")  # its result is ignored
        assert self._runs is not None  # the command ensures that nothing is verified without a suite
        return self._runs.run(begun.work.host, self._setup.deadlines.verify)
