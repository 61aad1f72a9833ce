"""Bring an instance of a scale set to an exact version: upgrade it, reimage it if it needs that, wait for its node.

Everything is journaled before it is sent, so that a process that was killed at any point is followed by one that knows
what may have been sent, finds out what came of it, and goes on from there.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, Protocol

from image_builder.errors import PoolError
from image_builder.pool.scale_set.client import Client
from image_builder.pool.scale_set.model import Instance, ScaleSet, Version
from image_builder.pool.scale_set.records import (
    Accepted,
    Model,
    Record,
    Replacement,
    Request,
    Result,
    Settled,
    Suspension,
    Verb,
    requests,
    suspended,
)
from image_builder.pool.scale_set.verdict import SETTLE_SECONDS, Look, Node, judge, shows

# Of what takes minutes, and of an instance whose node boots, so many looks are one: Azure counts them all.
_LOOKS: dict[Verb, int] = {"upgrade": 1, "reimage": 4}
_RARELY = 10
# What acts on instances by itself: the former replaces what doesn't answer, the latter moves machines between zones.
SERVICES = ("AutomaticRepairs", "AutomaticZoneRebalancing")


@dataclass(frozen=True)
class Patience:
    """Seconds between two looks, for an instance that is read as untouched, for a request, for a node's boot; for how
    long a scale set is held. ``repetitions``: how often a request that never arrived is sent again.
    """

    look: float = 30.0
    settle: float = SETTLE_SECONDS
    request: float = 1800.0
    boot: float = 1800.0
    hold: float = 1800.0
    repetitions: int = 2


@dataclass(frozen=True)
class Ending:
    """How an instance ended; what equal failures have in common is their ``reason``. `busy`: nothing was sent."""

    kind: Literal["ok", "failed", "gone", "unknown", "busy"]
    reason: str = ""


class Log(Protocol):
    """A journal of requests, whoever else writes it."""

    @property
    def records(self) -> Sequence[Record]: ...

    def append(self, record: Record) -> None: ...


@dataclass
class Drive:
    """A scale set that is driven: nobody else does, and no service of Azure's replaces its instances."""

    client: Client
    path: str
    holder: str
    journal: Log
    patience: Patience
    force_ephemeral: bool = False
    records: list[Record] = field(default_factory=list)
    held_until: float = 0.0
    # Two operations of a whole scale set preempt each other, and an upgrade is one.
    upgrading: threading.Lock = field(default_factory=threading.Lock)
    # One list of its instances, for all that are in work: Azure counts each look at one of them.
    reading: threading.Lock = field(default_factory=threading.Lock)
    listed: dict[str, Instance] = field(default_factory=dict)
    listed_at: float = -math.inf

    def append(self, record: Record) -> None:
        self.journal.append(record)
        self.records.append(record)

    def settle(self, number: str, outcome: Result, detail: str) -> Settled:
        """Journal what became of the last request for an instance."""
        record = Settled(
            at=self.client.now(), scale_set=self.path, instance=number, outcome=outcome, detail=detail
        )
        self.append(record)
        return record

    def instance(self, number: str, since: float = -math.inf, *, looks: int = 1) -> Instance | None:
        """Return an instance as it was read after ``since``, and some looks ago at most; None where it isn't there.

        Raises FetchError.
        """
        with self.reading:
            now = self.client.now()
            if self.listed_at <= since or now - self.listed_at >= self.patience.look * looks:
                self.listed = {instance.id: instance for instance in self.client.instances(self.path)}
                self.listed_at = now
            return self.listed.get(number)

    def is_still(self, instance: Instance) -> bool:
        """Tell whether an instance is as it was read, at most a look ago; raises FetchError."""
        return self.instance(instance.id) == instance

    def requests(self, number: str) -> list[Request]:
        return requests(self.records, self.path, number)

    def renew(self) -> None:
        """Hold the scale set for longer, where half of the time is over; raises PoolError if another took it."""
        if self.held_until - self.client.now() < self.patience.hold / 2:
            until = self.client.now() + self.patience.hold
            self.client.hold(self.path, self.holder, until)
            self.held_until = until

    def set_image(self, before: ScaleSet, version: str) -> ScaleSet:
        """Have the model name a version; raises PoolError, FetchError."""
        self.renew()
        self.append(Model(at=self.client.now(), scale_set=self.path, before=before.image, after=version))
        return self.client.set_image(before, version, force_ephemeral=self.force_ephemeral)


@contextmanager
def driving(
    client: Client,
    path: str,
    holder: str,
    journal: Log,
    *,
    patience: Patience | None = None,
    force_ephemeral: bool = False,
) -> Iterator[Drive]:
    """Drive a scale set until the block ends, however it does; raises PoolError where another does, FetchError.

    Services that are resumed at the end are those that the journal says were suspended: also by a process that was
    killed.
    """
    drive = Drive(
        client, path, holder, journal, patience or Patience(), force_ephemeral, list(journal.records)
    )
    drive.renew()
    try:
        states = client.services(path)
        for service in SERVICES:
            if states.get(service) == "Running":
                drive.append(Suspension(at=client.now(), scale_set=path, service=service))
                client.set_service(path, service, "Suspend")
        yield drive
    finally:
        for service in sorted(suspended(drive.records, path)):
            client.set_service(path, service, "Resume")
            drive.append(Suspension(at=client.now(), scale_set=path, service=service, over=True))
        client.release(path, holder)


def roll_instance(
    drive: Drive,
    number: str,
    vm_id: str,
    version: Version,
    node: Callable[[], Node | None],
    busy: Callable[[], str] = lambda: "",
) -> Ending:
    """Bring an empty instance to the version that its scale set's model names, and return how that ended.

    ``vm_id`` is the machine that is meant, by the plan. ``node`` asks the node itself for its boot and build, since
    what others know of it may be of the boot before: None where it doesn't answer. ``busy`` is asked right before each
    request, and says what would be lost by it; requests for another version are waited for, and don't count.

    Raises PoolError where another took the scale set or changed its model, FetchError where Azure can't be reached; the
    same call goes on.
    """
    began, looks = drive.client.now(), 1
    while True:
        history = _settled(drive, number, node)
        if history and history[-1].settled and history[-1].settled.outcome == "unknown":
            return Ending("unknown", history[-1].settled.detail)
        history = [request for request in history if request.sent.version == version.id]
        last = history[-1] if history else None
        if ending := _ending(history, drive.patience):
            return ending
        instance = drive.instance(number, looks=looks)
        if instance is None or instance.vm_id != vm_id.lower():
            return Ending("gone", "it was deleted, or is another machine")
        reading = node()
        step = _next(history, instance, version, reading)
        since = last.settled.at if last and last.settled else began
        if step == "wait" and drive.client.now() - max(since, began) > drive.patience.boot:
            # A node that didn't answer before has nothing to lose, and has its old disk yet.
            if reading is not None or not last or last.sent.boot_id or last.sent.verb == "reimage":
                return Ending("failed", "timeout: the node doesn't come back")
            step = "reimage"
        if isinstance(step, Ending):
            return step
        looks = _RARELY if step == "wait" else 1
        if step == "wait":
            drive.client.wait(drive.patience.look)
            continue
        is_late = drive.client.now() - began > drive.patience.request
        if is_late and last and last.settled and last.settled.outcome == "refused":
            return Ending("failed", f"refused: {last.settled.detail}")
        with drive.upgrading if step == "upgrade" else nullcontext():
            # Others' upgrades may have taken long: what was read before them doesn't count any more.
            if not drive.is_still(instance):
                continue
            drive.renew()
            if step == "upgrade":
                _require_model(drive, version)
            if reason := busy():
                return Ending("busy", reason)
            _send(drive, step, instance, version, reading)
            _settled(drive, number, node)


def _settled(drive: Drive, number: str, node: Callable[[], Node | None]) -> list[Request]:
    """Return the requests for an instance, after finding out what became of the last one; raises FetchError."""
    history = drive.requests(number)
    if history and (history[-1].settled is None or history[-1].settled.outcome == "unknown"):
        history[-1] = _settle(drive, history[-1], node)
    return history


def _next(
    history: list[Request], instance: Instance, version: Version, reading: Node | None
) -> Verb | Ending | Literal["wait"]:
    """Return what an instance needs next, none of whose requests is open."""
    if not instance.runs(version.id):
        return "upgrade"
    done = [request.sent for request in history if request.settled and request.settled.outcome == "done"]
    has_new_boot = reading is not None and all(reading.boot_id != sent.boot_id for sent in done)
    if reading is not None and reading.build == version.build and (has_new_boot or not history):
        return Ending("ok")
    if reading is None and done:
        return "wait"
    reimages = [sent for sent in done if sent.verb == "reimage"]
    if reimages and not has_new_boot:
        return "wait"
    if len(reimages) > 1:
        return Ending("failed", "old build")
    return "reimage"


def _ending(history: list[Request], patience: Patience) -> Ending | None:
    """Return how an instance ended whose last request says so."""
    if not history or (settled := history[-1].settled) is None:
        return None
    verb = history[-1].sent.verb
    match settled.outcome:
        case "failed":
            return Ending("failed", f"{verb}: {settled.detail}")
        case "gone" | "unknown":
            return Ending(settled.outcome, settled.detail)
        case "not accepted":
            repeated = _lost(history, verb)
            return Ending("failed", f"{verb}: never accepted") if repeated > patience.repetitions else None
        case _:
            return None


def _lost(history: Iterable[Request], verb: Verb) -> int:
    return sum(
        request.sent.verb == verb
        and request.settled is not None
        and request.settled.outcome == "not accepted"
        for request in history
    )


def _require_model(drive: Drive, version: Version) -> None:
    """Raise PoolError where the model of a scale set names another version."""
    if drive.client.scale_set(drive.path).image.lower() != version.id.lower():
        raise PoolError(f"the model of {drive.path} doesn't name {version.name}", hint="nothing was sent")


def _send(drive: Drive, verb: Verb, instance: Instance, version: Version, reading: Node | None) -> None:
    """Send a request for an instance, once, as soon as it is in the journal: its host was just looked at."""
    client = drive.client
    drive.append(
        Replacement(
            at=client.now(),
            verb=verb,
            vm_id=instance.vm_id,
            boot_id=reading.boot_id if reading else "",
            version=version.id,
            build=version.build,
            scale_set=drive.path,
            instance=instance.id,
        )
    )
    if verb == "upgrade":
        answer = client.upgrade(drive.path, [instance.id])
    else:
        answer = client.reimage(drive.path, instance.id, force_ephemeral=drive.force_ephemeral)
    if answer.is_accepted:
        drive.append(
            Accepted(at=client.now(), scale_set=drive.path, instance=instance.id, operation=answer.operation)
        )
    elif answer.is_refused:
        drive.settle(instance.id, "refused" if answer.is_passing else "failed", answer.problem)
        client.wait(answer.wait)


def _settle(drive: Drive, request: Request, node: Callable[[], Node | None]) -> Request:
    """Find out what became of a request, journal it and return it; raises FetchError."""
    client, sent = drive.client, request.sent
    began, looks = client.now(), list[Look]()
    pause = drive.patience.look * _LOOKS[sent.verb]
    # Who has just sent it knows that it isn't over.
    client.wait(min(pause, max(0.0, sent.at + drive.patience.look - began)))
    while True:
        instance = drive.instance(sent.instance, since=sent.at)
        # A node whose instance is in work says nothing that counts.
        is_at_rest = instance is not None and instance.is_at_rest
        looks.append(Look(client.now(), instance, node() if is_at_rest else None))
        # Its own address is asked for the error, once the list shows an end that isn't what was asked for.
        is_asked = is_at_rest and not shows(sent, looks[-1])
        operation = client.operation(request.operation) if is_asked else None
        verdict = judge(sent, operation, looks, drive.patience.settle)
        if verdict in ("running", "unknown") and client.now() - began <= drive.patience.request:
            client.wait(pause)
            continue
        detail = ""
        if verdict == "failed":
            detail = (operation.code if operation else "") or (instance.code if instance else "")
        outcome: Result = "unknown" if verdict == "running" else verdict
        return Request(sent, request.operation, drive.settle(sent.instance, outcome, detail))
