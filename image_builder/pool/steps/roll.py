"""The real fleet of a roll: hosts are emptied, get another image from Azure, and are returned to work.

Each host reports over SSH what it runs. Drains share one thread that cycles through all of them; each host that is
reimaged, restored or freed has a thread of its own meanwhile.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from image_builder.drain import event, fence, taint
from image_builder.drain import run as drains
from image_builder.drain.lease import Leases
from image_builder.drain.observe import CURRENT, REMEMBERED, Looker, version_of
from image_builder.errors import FetchError, PoolError
from image_builder.node.errors import NodeError
from image_builder.node.net.kube import Client as Kube
from image_builder.node.net.kube import path_of_node
from image_builder.node.net.retry import backoff
from image_builder.pool.plan.model import OK, Host, Joined, Outcome, Step, ended, failed
from image_builder.pool.plan.plan import ROLL
from image_builder.pool.run.driver import Work
from image_builder.pool.run.records import Emptied
from image_builder.pool.scale_set import records
from image_builder.pool.scale_set.model import ScaleSet, Version, is_same_id
from image_builder.pool.scale_set.roll import IMAGE_REQUESTS, Drive, driving, roll_instance
from image_builder.pool.scale_set.upgrades import Ending
from image_builder.pool.scale_set.verdict import Node
from image_builder.pool.steps.drains import BROKEN_OFF, TROUBLE_SECONDS, Drains, Key, is_final
from image_builder.pool.steps.fleet import Change, Fleet, Setup
from image_builder.pool.steps.nodes import ASK_IMAGE, ASK_SECONDS, ask_work, image_in, work_in
from image_builder.pool.steps.survey import idle_hosts, missing_hosts

_TURNS, _TURNED_AT_ONCE = 10, 16
# How long the models' way back is tried at most.
_TURN_SECONDS = 1800.0
# How often a host's attached volumes are looked at.
_DETACH_LOOKS = 10
# How many expensive looks are reported together.
_TOLD_READS = 100
# The failure number where no other applies.
_FAILED = 1
_T = TypeVar("_T")


class _Journal:
    """The journal of requests, shared by several threads."""

    def __init__(self, journal: records.Journal) -> None:
        self._journal, self._lock = journal, threading.Lock()
        self.records = list(journal.records)
        # Hosts that were given up before anything was sent for them: from then on, nothing is.
        self._closed: set[tuple[str, str]] = set()

    def append(self, record: records.Record) -> None:
        """Raises FetchError for a request that is no longer wanted."""
        with self._lock:
            if (
                isinstance(record, records.Replacement)
                and (record.scale_set, record.instance) in self._closed
            ):
                raise FetchError(f"instance {record.instance} was given up", hint="nothing was sent")
            self._journal.append(record)
            self.records.append(record)

    def close(self, host: Host) -> bool:
        """Return whether nothing was sent for a host; nothing is then, until it is opened again."""
        with self._lock:
            if records.requests(self.records, host.scale_set_id, host.instance):
                return False
            self._closed.add((host.scale_set_id, host.instance))
            return True

    def open(self, host: Host) -> None:
        """Let requests for a host through again."""
        with self._lock:
            self._closed.discard((host.scale_set_id, host.instance))


class RollFleet(Fleet):
    """Hosts at work that get another image. See ``driver.Steps`` for what its methods promise."""

    def __init__(
        self,
        setup: Setup,
        change: Change,
        folder: Path,
        on_wait: Callable[[], None] = lambda: None,
        on_note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """As ``Fleet``; ``on_note`` gets sentences for people, in the driver's thread."""
        super().__init__(setup, folder, on_wait)
        self._change, self._on_note = change, on_note
        self._stack = ExitStack()
        # Contexts of the scale sets that are driven; closing it releases them.
        self._driven = ExitStack()
        self._threads = ThreadPoolExecutor(setup.at_once, thread_name_prefix="roll")
        # Hosts that don't answer may hold all other threads until long after a host must be free.
        self._freeing = ThreadPoolExecutor(setup.at_once, thread_name_prefix="free")
        self._local, self._connections = threading.local(), list[Kube]()
        self._drains = Drains(
            change.kube,
            change.run,
            change.policy,
            change.max_fenced,
            report=self._drained,
            crash=self._crash,
            deadline=change.deadline,
        )
        self._leases = Leases(change.kube, change.holder)
        self._guard, self._models = threading.Lock(), threading.Lock()
        self._drives: dict[str, Drive] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._over: set[Key] = set()
        self._ending = threading.Event()
        self._versions: dict[str, Version] = {}
        self._planned: dict[str, ScaleSet] = {}
        # Nodes as last read or changed, so that the next change doesn't need to read them.
        self._nodes: dict[str, dict[str, Any]] = {}
        # Scale sets whose models this process has set to the new version.
        self._changed: set[str] = set()
        self._is_turned = False
        self._turner = ThreadPoolExecutor(1, thread_name_prefix="turn back")
        self._turning: Future[None] | None = None
        self._full_reads = 0
        self._sought: Future[list[str]] | None = None
        self._surveyed: Future[dict[str, str]] | None = None

    def __enter__(self) -> Self:
        """Raises PoolError for a version that doesn't exist or a scale set that another roll drives, ImageBuilderError
        for a journal that can't be written.
        """
        try:
            self._stack.enter_context(self._leases)
            self._hold_all()
            self._read_azure()
            self._journal = _Journal(self._stack.enter_context(records.open_journal(self._change.journal)))
            self._stack.enter_context(self._driven)
            # Scale sets that a killed process left with suspended services.
            sets = sorted({r.scale_set for r in self._journal.records if isinstance(r, records.Suspension)})
            for path in sets:
                if records.suspended(self._journal.records, path):
                    self._drive(path)
            if self._change.target.undoes:
                # Before the first host is drained, so that nothing new starts with the version being rolled back.
                version = self._change.target.version
                others = [p for p, s in self._planned.items() if not is_same_id(s.image, version)]
                self._set_images(dict.fromkeys(others, version))
                self._changed |= self._planned.keys()
            super().__enter__()
        except BaseException:
            self._stack.close()
            raise
        self._drains.start()
        return self

    def _hold_all(self) -> None:
        try:
            change = self._change
            self._leases.take(*change.target.before, tell=self._on_note, takes_over=change.takes_over)
        except NodeError as error:
            raise PoolError(error.message, hint="the rights that it needs are in deploy/roll.yml") from error

    def _read_azure(self) -> None:
        target = self._change.target
        for path in {target.version, *(() if target.undoes else target.before.values())}:
            if (version := self._change.azure.version(path)) is None:
                raise PoolError(f"there is no version {path}", hint="nothing was changed")
            self._versions[path] = version
        for path, before in target.before.items():
            self._planned[path] = self._change.azure.scale_set(path)
            self._change.azure.require_free(self._planned[path], self._change.holder)
            image = self._planned[path].image
            if not any(is_same_id(image, known) for known in (before, target.version)):
                raise PoolError(f"the model of {path} names {image} since the plan", hint="make a new plan")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._drains.end()
        for threads in (self._threads, self._freeing, self._turner):
            threads.shutdown(cancel_futures=True)
        for connection in self._connections:
            connection.close()
        try:
            self._stack.close()
        finally:
            super().__exit__(kind, error, trace)

    def begin(self, step: Step, work: Sequence[Work]) -> None:
        if step == "verify":
            self.verify(work)
            return
        keys = [self._begin(w, step) for w in work]
        if step == "await":
            self._drains.wait_for({key: w.until for key, w in zip(keys, work, strict=True)})
            return
        if step == "drain":
            broken = self._change.target.broken
            self._drains.add([key for key in keys if key[0] not in broken])
            for w, key in zip(work, keys, strict=True):
                if key[0] in broken:
                    self._threads.submit(self._do, self._look_at_held, w.host, key)
            return
        does: Mapping[Step, Callable[[Host, Key], tuple[Outcome, Joined]]] = {
            "probe": self._look,
            "reimage": self._reimage,
            "free": self._free,
            "restore": self._restore,
        }
        threads = self._freeing if step == "free" else self._threads
        for w, key in zip(work, keys, strict=True):
            threads.submit(self._do, does[step], w.host, key)

    def room(self, step: Step) -> int:
        # One thread looks at all awaited or drained hosts in turn.
        return sys.maxsize if step in ("await", "drain") else super().room(step)

    def missing(self, hosts: Sequence[Host]) -> Mapping[str, str] | None:
        if self._change.target.undoes:
            # The image being rolled back may be the reason why they are missing.
            return {}
        if self._surveyed is None:
            names, run = [host.name for host in hosts], self._change.run
            self._surveyed = self._seek(lambda: missing_hosts(self._kube(), names, run, self._ending))
        return self._surveyed.result() if self._surveyed.done() else None

    def idle(self, cells: Sequence[Sequence[Host]], each: int) -> Collection[str] | None:
        if self._sought is None:
            policy = self._change.policy
            self._sought = self._seek(
                lambda: idle_hosts(Looker(self._kube(), policy), cells, each, self._ending)
            )
        return self._sought.result() if self._sought.done() else None

    def _seek(self, look: Callable[[], _T]) -> Future[_T]:
        """Run ``look`` in a thread, and let ``wait`` return once it is done."""
        future = self._threads.submit(look)
        future.add_done_callback(lambda _: self.wake())
        return future

    def turn(self) -> str | None:
        # From now on nothing is sent for hosts that don't have the new version yet.
        self._is_turned = True
        if self._turning is None:
            self._turning = self._turner.submit(self._turn_back)
            self._turning.add_done_callback(lambda _: self.wake())
        if not self._turning.done():
            return None
        turning, self._turning = self._turning, None
        try:
            turning.result()
        except (FetchError, PoolError, NodeError) as error:
            return str(error.message)
        return ""

    def _turn_back(self) -> None:
        """Set the models of all scale sets that this roll changed back to their previous version."""
        with self._models:
            last = {r.scale_set: r.after for r in self._journal.records if isinstance(r, records.Model)}
        target = self._change.target
        changed = [path for path, version in last.items() if is_same_id(version, target.version)]
        self._set_images({path: target.before[path] for path in changed})
        self._changed -= set(changed)

    def _set_images(self, versions: Mapping[str, str]) -> None:
        """Set the models of scale sets to versions; raises PoolError, FetchError."""
        # Not in the threads of hosts, all of which may be busy for a long time.
        with ThreadPoolExecutor(_TURNED_AT_ONCE, thread_name_prefix="turn") as threads:
            list(threads.map(self._turn, versions, versions.values()))

    def _turn(self, path: str, version: str) -> None:
        began = time.monotonic()
        for attempt in range(_TURNS):
            try:
                self._drive(path).set_image(self._change.azure.scale_set(path), version)
            except (FetchError, NodeError):
                if attempt == _TURNS - 1 or time.monotonic() - began > _TURN_SECONDS:
                    raise
                self._ending.wait(backoff(attempt, cap=TROUBLE_SECONDS))
            else:
                return

    def conclude(self) -> None:
        """Resume the services of all scale sets, and release the scale sets; raises PoolError."""
        self._driven.close()
        self._drives.clear()
        if self._full_reads:
            # The driver waits for nothing more, and so for no sentence either.
            self._on_note(_full_reads_text(self._full_reads))

    def unplanned(self, hosts: Sequence[Host]) -> Mapping[str, str]:
        target = self._change.target
        # A rollback may cover only some hosts of a scale set: the others keep their image.
        sets = () if target.undoes else target.before
        return self._change.azure.versions_beside(sets, {host.vm_id.lower() for host in hosts})

    def give_up(self, host: str, step: Step, attempt: int) -> Joined:
        begun = self._begun.get((host, step, attempt))
        joined = super().give_up(host, step, attempt)
        self._over.add((host, step, attempt))
        self._drains.give_up((host, step, attempt))
        if begun and step == "reimage" and self._journal.close(begun.work.host):
            return "no"
        return joined

    # -- in threads of their own -----------------------------------------------------------------------------------

    def _report(self, key: Key, outcome: Outcome, joined: Joined = "unknown") -> None:
        """Tell the driver's thread how a step ended."""
        self._queue.put(partial(self._end, key, outcome, joined))

    def _drained(self, key: Key, outcome: Outcome, emptied: Emptied) -> None:
        self._queue.put(partial(self._end, key, outcome, "unknown", emptied=emptied))

    def _crash(self, error: Exception) -> None:
        """Let the driver's thread raise an error from another thread."""
        self._queue.put(partial(_raise, error))

    def _do(self, work: Callable[[Host, Key], tuple[Outcome, Joined]], host: Host, key: Key) -> None:
        """Do a step, with retries while Azure or the cluster is unavailable; any other error ends it."""
        failures = 0
        while not self._ending.is_set() and key not in self._over:
            try:
                outcome, joined = work(host, key)
            except (FetchError, NodeError) as error:
                if isinstance(error, NodeError) and is_final(error, failures):
                    self._report(key, failed(key[1], BROKEN_OFF, str(error)))
                    return
                failures += 1
                self._ending.wait(backoff(failures, cap=TROUBLE_SECONDS))
            except PoolError as error:
                self._report(key, failed(key[1], BROKEN_OFF, error.message))
                return
            except Exception as error:  # it would be lost in this thread
                self._crash(error)
                return
            else:
                self._report(key, outcome, joined)
                return

    def read(self, host: Host) -> Node | Outcome:
        """Ask a host what it runs; return why that isn't known if it doesn't say."""
        return image_in(self._reach.submit(host, ASK_IMAGE, seconds=ASK_SECONDS).result())

    def works(self, host: Host) -> str:
        """Ask a host itself what it is working on; return nothing if it doesn't know or doesn't answer."""
        if not self._change.asks_nodes:
            return ""
        return work_in(self._reach.submit(host, ask_work(), seconds=ASK_SECONDS).result())

    def _look(self, host: Host, key: Key) -> tuple[Outcome, Joined]:
        node = self.read(host)
        # Wait for a host that may be about to boot the new image, however long it takes.
        while isinstance(node, Outcome) and self._was_touched(host) and key not in self._over:
            if self._ending.wait(self._change.patience.look):
                break
            node = self.read(host)
        if isinstance(node, Outcome):
            return (OK, "no") if host.name in self._change.target.broken else (node, "unknown")
        return OK, "yes" if node.build == self._change.target.build else "no"

    def _was_touched(self, host: Host) -> bool:
        return bool(records.requests(list(self._journal.records), host.scale_set_id, host.instance))

    def _look_at_held(self, host: Host, _key: Key) -> tuple[Outcome, Joined]:
        """Check that a host that failed in the roll being rolled back is as it was left: cordoned and empty."""
        # Waiting wouldn't help: the host was empty when it failed.
        reason = self._occupied(self._kube(), host)
        return (ended("skipped", reason) if reason else OK), "unknown"

    def _kube(self) -> Kube:
        """Return this thread's connection to the API server, reused for the next host."""
        if not hasattr(self._local, "kube"):
            self._local.kube = self._change.kube()
            self._connections.append(self._local.kube)
        kube: Kube = self._local.kube
        return kube

    def _reimage(self, host: Host, key: Key) -> tuple[Outcome, Joined]:
        kube = self._kube()
        self._journal.open(host)
        barred = self._bar(kube, host, self._drains.nodes.pop(host.name, None))
        self._ending.wait(self._change.settle_seconds)
        self._await_detached(kube, host, barred or {})
        drive = self._drive(host.scale_set_id)
        version = self._versions[self._change.target.version]
        self._set_image(drive, version)
        busy = partial(self._busy, kube, host, key, version_of(barred))
        outcome, joined = self._bring(drive, host, version, busy, partial(self.works, host))
        if outcome.kind in ("failed", "unknown"):
            self._post(kube, host, "ReimageFailed", outcome.detail)
        if outcome.ok:
            # The pods that run on every node must be back before it is verified; the cordon stays.
            self._nodes[host.name] = taint.lift(kube, host.name, self._nodes.pop(host.name, None)) or {}
        return outcome, joined

    def _await_detached(self, kube: Kube, host: Host, node: Mapping[str, Any]) -> None:
        """Wait until volumes are detached from an empty host, whose machine Azure wouldn't change meanwhile.

        Those of pods that tolerate its taint, such as a DaemonSet's, stay: it isn't waited for them for ever.
        """
        for looks in count():
            attached = (node.get("status") or {}).get("volumesAttached")
            if not attached:
                return
            if looks == _DETACH_LOOKS:
                self._tell(f"{host.name}: {attached[0].get('name')} is still attached; its image is changed")
                return
            if self._ending.wait(self._change.patience.look):
                return
            node = kube.find(path_of_node(host.name)) or {}

    def _post(self, kube: Kube, host: Host, reason: str, message: str) -> None:
        """Post an Event about what went wrong with a host; nothing depends on it."""
        if node := self._nodes.get(host.name):
            warning = event.event(
                host.name, node["metadata"]["uid"], reason, message, time.time(), kind="Warning"
            )
            with suppress(NodeError):
                event.post(kube, warning)

    def _set_image(self, drive: Drive, version: Version) -> None:
        """Set a scale set's model to the new version, once."""
        with drive.changing:
            if drive.path in self._changed or self._is_turned:
                return
            drive.take(IMAGE_REQUESTS)
            with self._models:
                if not self._is_turned:
                    drive.set_image(self._planned[drive.path], version.id)
                    self._changed.add(drive.path)

    def _restore(self, host: Host, key: Key) -> tuple[Outcome, Joined]:
        drive = self._drive(host.scale_set_id)
        version = self._versions[self._change.target.before[host.scale_set_id]]
        kube = self._kube()
        barred = self._bar(kube, host)
        self._ending.wait(self._change.settle_seconds)

        def busy() -> str:
            self._leases.hold(host.scale_set_id)
            if self._ending.is_set() or key in self._over:
                return "the run ends, or has given it up"
            return self._occupied(kube, host, version_of(barred)) if barred else ""

        outcome, joined = self._bring(drive, host, version, busy)
        # A host that was given up is reported as still cordoned, and stays so.
        return self._free(host, key) if outcome.ok and key not in self._over else (outcome, joined)

    def _bar(self, kube: Kube, host: Host, seen: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Keep all pods off an empty host; return its Node from then on, None if it has none."""
        node = taint.bar(kube, host.name, self._change.run, seen)
        self._nodes[host.name] = node or {}
        return node

    def _free(self, host: Host, _key: Key) -> tuple[Outcome, Joined]:
        target = self._change.target
        if host.name in target.broken:
            if isinstance(reading := self.read(host), Outcome):
                return reading, "unknown"
            if reading.build != target.build:
                # It stays as it was: it failed with the image that it runs now.
                return OK, "unknown"
        self._drains.drop(host.name)
        kube = self._kube()
        node = taint.lift(kube, host.name, self._nodes.pop(host.name, None))
        record = fence.record_of(node) if node else None
        # This roll holds the scale set, so a cordon of another roll can't belong to a live one.
        run = record.run if record and record.run.startswith(ROLL) else self._change.run
        drains.free(kube, host.name, run, node)
        return OK, "unknown"

    def _bring(
        self,
        drive: Drive,
        host: Host,
        version: Version,
        busy: Callable[[], str],
        works: Callable[[], str] = lambda: "",
    ) -> tuple[Outcome, Joined]:
        silence = ""

        def node() -> Node | None:
            nonlocal silence
            if self._ending.is_set():
                raise FetchError("the run ends", hint="image-builder pool resume")
            reading = self.read(host)
            if isinstance(reading, Node):
                silence = ""
                return reading
            silence = f"{reading.signature}: {reading.detail}"
            return None

        ending = roll_instance(drive, host.instance, host.vm_id, version, node, busy, works)
        return _outcome(ending, silence)

    def _busy(self, kube: Kube, host: Host, key: Key, barred: str) -> str:
        """Return why a request must not be sent; the last check, right before it is. ``barred``: the taint's version.

        Without the Lease of its scale set nothing is sent: raises PoolError if another process holds it, KubeError.
        """
        self._leases.hold(host.scale_set_id)
        if self._is_turned or self._ending.is_set() or key in self._over:
            return "the run is rolling back, or ending"
        return self._occupied(kube, host, barred)

    def _occupied(self, kube: Kube, host: Host, barred: str | None = None) -> str:
        """Return why a host isn't empty with our cordon; empty if it is.

        A last look has ``barred``, the version of the Node since its taint keeps pods off: no later one can come.
        """
        looker = Looker(kube, self._change.policy, self._drains.cordoned)
        since = REMEMBERED if barred is None else barred or CURRENT
        document = looker.node(host.name, is_cordoned=True, since=since)
        if document is None:
            return "there is no such node"
        if barred is not None and not taint.is_barred(document, self._change.run):
            return "somebody removed its taint"
        self._nodes[host.name] = document
        reason = drains.occupied(looker, document, self._change.run, since)
        if looker.full_reads:
            self._count_full_read()
        return reason

    def _count_full_read(self) -> None:
        with self._guard:
            self._full_reads += 1
            count = self._full_reads
        if count == 1 or count % _TOLD_READS == 0:
            self._tell(_full_reads_text(count))

    def _tell(self, text: str) -> None:
        """Show a sentence next to the state."""
        self._queue.put(partial(self._on_note, text))

    def _drive(self, path: str) -> Drive:
        """Return the scale set's drive, held until the run ends. Raises PoolError if another process holds it."""
        with self._guard:
            lock = self._locks.setdefault(path, threading.Lock())
        with lock:
            if path not in self._drives:
                self._leases.hold(path)
                change = self._change
                context = driving(
                    change.azure,
                    path,
                    change.holder,
                    self._journal,
                    patience=change.patience,
                    force_ephemeral=change.force_ephemeral and self._planned[path].is_ephemeral,
                    wait=self._pause,
                    tell=self._tell,
                )
                self._drives[path] = self._driven.enter_context(context)
            return self._drives[path]

    def _pause(self, seconds: float) -> None:
        """Wait between two looks at an instance; raises FetchError as soon as the run ends."""
        if self._ending.wait(seconds):
            raise FetchError("the run ends", hint="image-builder pool resume")


def _full_reads_text(number: int) -> str:
    return f"last looks for which the API server had to read all pods from etcd: {number}"


def _raise(error: Exception) -> None:
    raise error


def _outcome(ending: Ending, silence: str) -> tuple[Outcome, Joined]:
    """Return the outcome of a step that brings an instance to a version, and whether its host runs that version.

    ``silence`` is why the host didn't answer in the end.
    """
    match ending.kind:
        case "ok":
            return OK, "yes"
        case "busy":
            return ended("busy", ending.reason), "no"
        case "failed":
            # The part that failures of the same kind share: Azure's own code.
            what = ending.reason.rpartition(": ")[2] or ending.reason
            detail = f"{ending.reason} ({silence})" if silence else ending.reason
            return failed(f"reimage {what}", _FAILED, detail), "unknown"
        case _:
            return ended("unknown", ending.reason), "unknown"
