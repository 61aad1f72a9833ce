"""The real fleet of a roll: hosts are emptied, get another image from Azure, and are let back to work.

What a host runs it tells itself, over SSH. Drains share one thread, which goes round over all of them; each host that
is reimaged, restored or freed has one of its own for as long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from image_builder.drain import bar, fence
from image_builder.drain import run as drains
from image_builder.drain.lease import Leases
from image_builder.drain.look import Looker
from image_builder.drain.policy import Policy
from image_builder.drain.run import Drain
from image_builder.errors import FetchError, PoolError
from image_builder.node.net.kube import Client as Kube
from image_builder.node.net.kube import KubeError
from image_builder.node.net.retry import backoff
from image_builder.node.settings import RELEASE
from image_builder.pool.plan.model import OK, Host, Joined, Outcome, Step, Target, ended, failed
from image_builder.pool.run.driver import Work
from image_builder.pool.scale_set import records
from image_builder.pool.scale_set.client import Client as Azure
from image_builder.pool.scale_set.model import ScaleSet, Version
from image_builder.pool.scale_set.roll import Drive, Ending, Patience, driving, roll_instance
from image_builder.pool.scale_set.verdict import Node
from image_builder.pool.steps.fleet import Fleet, Setup

# A host's boot, and the build of its image (node/settings.py).
ASK_IMAGE = (
    "sh",
    "-c",
    f"cat /proc/sys/kernel/random/boot_id; sed -n 's/^IMAGE_BUILD=//p' {RELEASE} | tr -d '\"'",
)
_ASK_SECONDS = 20.0
# Between the taint and the last look: a pod that was bound before it has appeared by then.
_SETTLE_SECONDS = 30.0
_TROUBLE_SECONDS = 60.0
_TURNS, _TURNED_AT_ONCE = 10, 16
# Numbers of failures that have no other.
_FAILED, _BROKEN_OFF = 1, 2

Key = tuple[str, Step, int]


@dataclass(frozen=True)
class Change:
    """What a roll is done with.

    ``run`` names it on nodes and scale sets. ``kube`` opens a connection to the API server, for one thread each;
    ``journal`` holds what is sent to Azure.
    """

    target: Target
    run: str
    kube: Callable[[], Kube]
    azure: Azure
    journal: Path
    policy: Policy
    patience: Patience = field(default_factory=Patience)
    settle_seconds: float = _SETTLE_SECONDS


class _Journal:
    """The journal of requests, for threads that share it."""

    def __init__(self, journal: records.Journal) -> None:
        self._journal, self._lock = journal, threading.Lock()
        self.records = list(journal.records)

    def append(self, record: records.Record) -> None:
        with self._lock:
            self._journal.append(record)
            self.records.append(record)


class RollFleet(Fleet):
    """Hosts at work that get another image. See ``driver.Steps`` for what its methods promise."""

    def __init__(
        self, setup: Setup, change: Change, folder: Path, on_wait: Callable[[], None] = lambda: None
    ) -> None:
        """As ``Fleet``. Raises PoolError for a version that is gone."""
        super().__init__(setup, folder, on_wait)
        self._change = change
        self._stack = ExitStack()
        self._threads = ThreadPoolExecutor(setup.at_once, thread_name_prefix="roll")
        self._drains = _Drains(change, self._report)
        self._leases = Leases(change.kube, change.run)
        self._guard, self._models = threading.Lock(), threading.Lock()
        self._drives: dict[str, Drive] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._over: set[Key] = set()
        self._ending = threading.Event()
        self._versions: dict[str, Version] = {}
        self._planned: dict[str, ScaleSet] = {}
        # Scale sets whose models this process has had name the new version.
        self._changed: set[str] = set()
        self._is_turned = False

    def __enter__(self) -> Self:
        """Raises PoolError for a version that isn't there and for a scale set that another drives, ImageBuilderError
        for a journal that can't be written."""
        try:
            self._stack.enter_context(self._leases)
            self._hold_all()
            self._read_azure()
            self._journal = _Journal(self._stack.enter_context(records.open_journal(self._change.journal)))
            # What another process was at work on, and has left as it was when it was killed.
            sets = sorted({r.scale_set for r in self._journal.records if isinstance(r, records.Suspension)})
            for path in sets:
                if records.suspended(self._journal.records, path):
                    self._drive(path)
            super().__enter__()
        except BaseException:
            self._stack.close()
            raise
        self._drains.start()
        return self

    def _hold_all(self) -> None:
        try:
            for path in self._change.target.before:
                self._leases.take(path)
        except KubeError as error:
            raise PoolError(error.message, hint="the rights that it needs are in deploy/roll.yml") from error

    def _read_azure(self) -> None:
        target = self._change.target
        for path in {target.version, *target.before.values()}:
            if (version := self._change.azure.version(path)) is None:
                raise PoolError(f"there is no version {path}", hint="nothing was changed")
            self._versions[path] = version
        for path, before in target.before.items():
            self._planned[path] = self._change.azure.scale_set(path)
            if (image := self._planned[path].image) not in (before, target.version):
                raise PoolError(f"the model of {path} names {image} since the plan", hint="make a new plan")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._drains.end()
        self._threads.shutdown(cancel_futures=True)
        try:
            self._stack.close()
        finally:
            super().__exit__(kind, error, trace)

    def begin(self, step: Step, work: Sequence[Work]) -> None:
        if step == "verify":
            self.verify(work)
            return
        keys = [self._begin(w, step) for w in work]
        if step == "drain":
            self._drains.add(keys)
            return
        does: Mapping[Step, Callable[[Host, Key], tuple[Outcome, Joined]]] = {
            "probe": self._look,
            "reimage": self._reimage,
            "free": self._free,
            "restore": self._restore,
        }
        for w, key in zip(work, keys, strict=True):
            self._threads.submit(self._do, does[step], w.host, key)

    def turn(self) -> None:
        """Let the models of all scale sets that this roll changed name their previous version again."""
        with self._models:
            # Nothing is sent any more for a host that has yet to get the new version.
            self._is_turned = True
            last = {r.scale_set: r.after for r in self._journal.records if isinstance(r, records.Model)}
        changed = [path for path, version in last.items() if version == self._change.target.version]
        # Not in the threads of hosts, all of which may be at work for long.
        with ThreadPoolExecutor(_TURNED_AT_ONCE, thread_name_prefix="turn") as threads:
            list(threads.map(self._turn, changed))

    def _turn(self, path: str) -> None:
        for attempt in range(_TURNS):
            try:
                before = self._change.target.before[path]
                self._drive(path).set_image(self._change.azure.scale_set(path), before)
            except (FetchError, KubeError):
                if attempt == _TURNS - 1:
                    raise
                self._ending.wait(backoff(attempt, cap=_TROUBLE_SECONDS))
            else:
                self._changed.discard(path)
                return

    def give_up(self, host: str, step: Step, attempt: int) -> None:
        super().give_up(host, step, attempt)
        self._over.add((host, step, attempt))
        self._drains.give_up((host, step, attempt))

    # -- in threads of their own -----------------------------------------------------------------------------------

    def _report(self, key: Key, outcome: Outcome, joined: Joined = "unknown") -> None:
        """Tell the driver's thread how a step ended."""
        self._queue.put(partial(self._end, key, outcome, joined))

    def _do(self, work: Callable[[Host, Key], tuple[Outcome, Joined]], host: Host, key: Key) -> None:
        """Do a step, again while Azure or the cluster is away; whatever else happens ends it."""
        failures = 0
        while not self._ending.is_set() and key not in self._over:
            try:
                outcome, joined = work(host, key)
            except (FetchError, KubeError) as error:
                if isinstance(error, KubeError) and (error.status in (401, 403) or error.is_hopeless):
                    self._report(key, failed(key[1], _BROKEN_OFF, str(error)))
                    return
                failures += 1
                self._ending.wait(backoff(failures, cap=_TROUBLE_SECONDS))
            except PoolError as error:
                self._report(key, failed(key[1], _BROKEN_OFF, error.message))
                return
            except Exception as error:  # a thread's would be lost
                self._queue.put(partial(_raise, error))
                return
            else:
                self._report(key, outcome, joined)
                return

    def read(self, host: Host) -> Node | None:
        """Ask a host what it runs; None where it doesn't answer."""
        answer = self._reach.submit(host, ASK_IMAGE, seconds=_ASK_SECONDS).result()
        lines = answer.stdout.decode("utf-8", "replace").split()
        return Node(lines[0], lines[1]) if answer.status == 0 and len(lines) == 2 else None

    def _look(self, host: Host, key: Key) -> tuple[Outcome, Joined]:
        node = self.read(host)
        # Who may be about to boot the new image is waited for, as long as that may take.
        while node is None and self._was_touched(host) and key not in self._over:
            if self._ending.wait(self._change.patience.look):
                break
            node = self.read(host)
        if node is None:
            return ended("timeout", "it doesn't tell which image it runs"), "unknown"
        return OK, "yes" if node.build == self._change.target.build else "no"

    def _was_touched(self, host: Host) -> bool:
        return bool(records.requests(list(self._journal.records), host.scale_set_id, host.instance))

    def _reimage(self, host: Host, key: Key) -> tuple[Outcome, Joined]:
        kube = self._change.kube()
        try:
            bar.bar(kube, host.name, self._change.run)
            self._ending.wait(self._change.settle_seconds)
            drive = self._drive(host.scale_set_id)
            version = self._versions[self._change.target.version]
            self._set_image(drive, version)
            outcome, joined = _outcome(
                self._bring(drive, host, version, partial(self._busy, kube, host, key))
            )
            if outcome.ok:
                # What runs on each node must be there again before it is verified; the cordon stays.
                bar.lift(kube, host.name)
            return outcome, joined
        finally:
            kube.close()

    def _set_image(self, drive: Drive, version: Version) -> None:
        """Have a scale set's model name the new version, once."""
        with self._models:
            if drive.path not in self._changed and not self._is_turned:
                drive.set_image(self._planned[drive.path], version.id)
                self._changed.add(drive.path)

    def _restore(self, host: Host, _key: Key) -> tuple[Outcome, Joined]:
        drive = self._drive(host.scale_set_id)
        version = self._versions[self._change.target.before[host.scale_set_id]]
        outcome, joined = _outcome(self._bring(drive, host, version, partial(self._held, host)))
        return self._free(host, _key) if outcome.ok else (outcome, joined)

    def _free(self, host: Host, _key: Key) -> tuple[Outcome, Joined]:
        self._drains.drop(host.name)
        kube = self._change.kube()
        try:
            bar.lift(kube, host.name)
            drains.free(kube, host.name, self._change.run)
        finally:
            kube.close()
        return OK, "unknown"

    def _bring(self, drive: Drive, host: Host, version: Version, busy: Callable[[], str]) -> Ending:
        def node() -> Node | None:
            if self._ending.is_set():
                raise FetchError("the run ends", hint="image-builder pool resume")
            return self.read(host)

        return roll_instance(drive, host.instance, host.vm_id, version, node, busy)

    def _held(self, host: Host) -> str:
        """Hold a host's scale set: without that nothing is sent. Raises PoolError where another does, KubeError."""
        self._leases.hold(host.scale_set_id)
        return ""

    def _busy(self, kube: Kube, host: Host, key: Key) -> str:
        """Return what a request would cost: the last look, right before it is sent."""
        self._held(host)
        if self._is_turned or self._ending.is_set() or key in self._over:
            return "the run goes back, or ends"
        looker = Looker(kube, self._change.policy)
        document = looker.node(host.name)
        if document is None:
            return "there is no such node"
        record = fence.record_of(document)
        if record is None or record.run != self._change.run or not fence.is_cordoned(document):
            return "somebody uncordoned it"
        if not bar.is_barred(document, self._change.run):
            return "somebody took its taint away"
        tenants = looker.tenants(host.name, time.time())
        return f"{tenants[0].pod} runs on it" if tenants else ""

    def _drive(self, path: str) -> Drive:
        """Return the scale set's drive; it is held until the run ends. Raises PoolError where another holds it."""
        with self._guard:
            lock = self._locks.setdefault(path, threading.Lock())
        with lock:
            if path not in self._drives:
                self._leases.hold(path)
                change = self._change
                context = driving(change.azure, path, change.run, self._journal, patience=change.patience)
                self._drives[path] = self._stack.enter_context(context)
            return self._drives[path]


def _raise(error: Exception) -> None:
    raise error


def _outcome(ending: Ending) -> tuple[Outcome, Joined]:
    """Return how a step ended that brought an instance to a version, and whether its host runs that."""
    match ending.kind:
        case "ok":
            return OK, "yes"
        case "busy":
            return ended("skipped", ending.reason), "no"
        case "failed":
            # What equal failures have in common: Azure's own code.
            what = ending.reason.rpartition(": ")[2] or ending.reason
            return failed(f"reimage {what}", _FAILED, ending.reason), "unknown"
        case _:
            return ended("unknown", ending.reason), "unknown"


def why(outcome: drains.Outcome) -> str:
    """Return why a host was skipped: the reason, and the first pod that it was for."""
    first = next((tenant.pod for tenant in outcome.tenants), None)
    return f"{outcome.reason}: {first}" if first else outcome.reason


class _Drains:
    """All drains of a roll, in one thread. Hosts that are begun together are one drain: gangs in it go together."""

    def __init__(self, change: Change, report: Callable[[Key, Outcome], None]) -> None:
        self._change, self._report = change, report
        # Hosts to drain, or one to let go of and what says that nothing more is done to it.
        self._new: SimpleQueue[list[Key] | tuple[str, threading.Event]] = SimpleQueue()
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._over: set[Key] = set()
        self._thread = threading.Thread(target=self._run, name="drains")

    def start(self) -> None:
        self._thread.start()

    def add(self, keys: Iterable[Key]) -> None:
        self._new.put(list(keys))
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
        """End the thread; cordons stay, and are freed by whoever goes on."""
        self._ending.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        work: list[tuple[Drain, dict[str, Key]]] = []
        kube, failures = self._change.kube(), 0
        try:
            while not self._ending.is_set():
                self._take(work, kube)
                pause = _TROUBLE_SECONDS
                try:
                    for drain, keys_of in work:
                        drain.turn()
                        self._tell(drain, keys_of)
                        pause = min(pause, drain.pause)
                    failures = 0
                except KubeError as error:
                    if error.status in (401, 403) or error.is_hopeless:
                        self._fail(work, error)
                        work = []
                    failures += 1
                    pause = backoff(failures, retry_after=error.retry_after, cap=_TROUBLE_SECONDS)
                work = [item for item in work if item[1]]
                self._wake.wait(pause)
                self._wake.clear()
        finally:
            kube.close()

    def _take(self, work: list[tuple[Drain, dict[str, Key]]], kube: Kube) -> None:
        """Begin what was asked for meanwhile, and let go of hosts."""
        while True:
            try:
                asked = self._new.get_nowait()
            except Empty:
                return
            if isinstance(asked, tuple):
                name, gone = asked
                for drain, keys in work:
                    if keys.pop(name, None):
                        drain.drop(name)
                gone.set()
                continue
            drain = Drain(kube, self._change.run, self._change.policy, lambda _: None)
            drain.add(name for name, _, _ in asked)
            work.append((drain, {key[0]: key for key in asked}))

    def _tell(self, drain: Drain, keys: dict[str, Key]) -> None:
        """Report the hosts of a drain that ended; partners of gangs that nobody asked for are freed again."""
        for name, outcome in list(drain.outcomes.items()):
            key = keys.pop(name, None)
            if key and key not in self._over:
                is_empty = outcome.state == "empty"
                self._report(key, OK if is_empty else ended("skipped", why(outcome)))

    def _fail(self, work: Iterable[tuple[Drain, dict[str, Key]]], error: KubeError) -> None:
        for _, keys in work:
            for key in keys.values():
                self._report(key, failed("drain", _BROKEN_OFF, str(error)))
