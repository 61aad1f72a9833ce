"""Bring an instance of a scale set to an exact version: upgrade it, reimage it if necessary, wait for its node.

Everything is journaled before it is sent: if the process is killed at any point, the next one knows what may have been
sent, finds out what became of it, and continues from there.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from image_builder.errors import FetchError, PoolError
from image_builder.pool.scale_set.client import Answer, Client, claim_of
from image_builder.pool.scale_set.model import Instance, ScaleSet, Version, is_same_id
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
from image_builder.pool.scale_set.upgrades import Ending, Member, Upgrades
from image_builder.pool.scale_set.verdict import SETTLE_SECONDS, Look, Node, Operation, judge
from image_builder.system.identity import name_of

# In units of ``Patience.look``: the time until the first look at a request, before which none is over, and between
# later ones; RARELY is for an instance whose node is booting. Azure counts every look.
_FIRST: dict[Verb, int] = {"upgrade": 2, "reimage": 10, "restart": 2}
_LOOKS: dict[Verb, int] = {"upgrade": 1, "reimage": 4, "restart": 1}
RARELY = 10
# The requests to a scale set that a roll makes in a minute: half of what Azure lets through permanently.
_A_MINUTE = 6
_FIRST_REQUESTS, IMAGE_REQUESTS = 6, 3
_REQUESTS: dict[Verb, int] = {"upgrade": 2, "reimage": 1, "restart": 1}
# Looks between two upgrades of a set: hosts that are upgraded together need fewer requests.
_APART = 10
# How long the last looks at the hosts of one request may take together, and how much later than the first of them,
# which counts for two seconds, the request may be.
_LAST_LOOKS_SECONDS, _LATE_SECONDS = 0.5, 1.2
# How many last looks at an instance may be late before it is left as it is.
_LATE_LOOKS = 5
# Services that act on instances by themselves: the former replaces those that don't answer, the latter moves machines
# between zones.
REPAIRS = "AutomaticRepairs"
SERVICES = (REPAIRS, "AutomaticZoneRebalancing")


@dataclass(frozen=True)
class Patience:
    """Times in seconds: between two looks, until an instance counts as untouched, for a request, for a node's boot, and
    for a hold on a scale set. ``repetitions``: how often a request that never arrived is sent again. ``minute``: the
    minute of Azure's limits, plus what a request may take longer than the next.
    """

    look: float = 30.0
    settle: float = SETTLE_SECONDS
    request: float = 1800.0
    boot: float = 1800.0
    # Each renewal of a hold is a write in the way of others'.
    hold: float = 6 * 3600.0
    minute: float = 65.0
    repetitions: int = 2


class Log(Protocol):
    """A journal of requests, which may have other writers."""

    @property
    def records(self) -> Sequence[Record]: ...

    def append(self, record: Record) -> None: ...


class NoJournal:
    """A stand-in for a journal, for callers that keep one elsewhere."""

    records: Sequence[Record] = ()

    def append(self, record: Record) -> None:
        """Do nothing: the drive itself remembers the record."""


@dataclass
class Drive:
    """A scale set that is driven: nothing else drives it, and no service of Azure's replaces its instances."""

    client: Client
    path: str
    holder: str
    journal: Log
    patience: Patience
    # Sleeps for some seconds, as the client does; raises if the run ends meanwhile.
    wait: Callable[[float], None]
    # Tells people why nothing happens.
    tell: Callable[[str], None] = lambda _: None
    force_ephemeral: bool = False
    records: list[Record] = field(default_factory=list)
    held_until: float = 0.0
    upgrades: Upgrades = field(init=False)
    upgraded_at: float = -math.inf
    # One list of its instances, for all that are in progress: Azure counts each look at a single one.
    reading: threading.Lock = field(default_factory=threading.Lock)
    listed: dict[str, Instance] = field(default_factory=dict)
    listed_at: float = -math.inf
    # Instances with an upgrade sent by another process, which this one hasn't waited for yet.
    inherited: set[str] = field(default_factory=set)
    # Instances that are sent by themselves, and those that met a conflict since one was accepted.
    singles: set[str] = field(default_factory=set)
    conflicted: set[str] = field(default_factory=set)
    taking: threading.Lock = field(default_factory=threading.Lock)
    changing: threading.Lock = field(default_factory=threading.Lock)
    taken: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.upgrades = Upgrades(self.gather)

    def gather(self, first: Member) -> None:
        """Wait for instances that are nearly ready, so that they join the same upgrade."""
        look, now = self.patience.look, self.client.now()
        self.wait(look if first.is_single else max(look, self.upgraded_at + _APART * look - now))
        self.upgraded_at = self.client.now()

    def append(self, record: Record) -> None:
        self.journal.append(record)
        self.records.append(record)

    def single_out(self, numbers: set[str], answer: Answer) -> None:
        """Note who is sent by itself, since one may be why all were refused; after a conflict only if it lasts."""
        if answer.is_accepted:
            self.singles -= numbers
            self.conflicted -= numbers
        elif answer.is_refused and not answer.is_throttled:
            self.singles |= numbers & self.conflicted if answer.is_passing else numbers
            self.conflicted |= numbers

    def settle(self, number: str, outcome: Result, detail: str) -> Settled:
        """Journal what became of the last request for an instance."""
        record = Settled(
            at=self.client.now(), scale_set=self.path, instance=number, outcome=outcome, detail=detail
        )
        self.append(record)
        return record

    def instance(self, number: str, *, looks: int = 1) -> Instance | None:
        """Return an instance as it was read at most ``looks`` ago; None if it doesn't exist. Raises FetchError."""
        return self.read(number, looks=looks)[1]

    def read(self, number: str, since: float = -math.inf, *, looks: int = 1) -> tuple[float, Instance | None]:
        """Return an instance as ``instance`` does, but read after ``since``, and the time when it was read."""
        with self.reading:
            now = self.client.now()
            if self.listed_at <= since or now - self.listed_at >= self.patience.look * looks:
                self.listed = {instance.id: instance for instance in self.client.instances(self.path)}
                self.listed_at = now
            return self.listed_at, self.listed.get(number)

    def is_still(self, instance: Instance) -> bool:
        """Return whether an instance is still as it was read, as of at most one look ago; raises FetchError."""
        return self.instance(instance.id) == instance

    def requests(self, number: str) -> list[Request]:
        return requests(self.records, self.path, number)

    def is_shared(self, operation: str) -> bool:
        """Return whether an operation is on more than one instance."""
        return sum(isinstance(r, Accepted) and r.operation == operation for r in self.records) > 1

    def await_others(self, members: Iterable[str]) -> None:
        """Wait until no other instance is still in an upgrade that another process sent before it was killed."""
        others = self.inherited - set(members)
        while any((instance := self.instance(n)) and not instance.is_at_rest for n in sorted(others)):
            self.wait(self.patience.look)
        self.inherited -= others

    def renew(self) -> None:
        """Extend the hold on the scale set once half of its time is over; raises PoolError if another holder has it."""
        if self.held_until - self.client.now() < self.patience.hold / 2:
            until = self.client.now() + self.patience.hold
            self.client.hold(self.path, self.holder, until, renews=self.held_until > 0)
            self.held_until = until

    def take(self, count: int) -> None:
        """Wait until ``count`` more requests stay within a roll's limit per minute; lists have limits of their own.

        Requests that change the models back after a failed roll aren't counted.
        """
        with self.taking:
            while True:
                now = self.client.now()
                self.taken = [at for at in self.taken if at > now - self.patience.minute]
                over = len(self.taken) + count - _A_MINUTE
                if over <= 0:
                    break
                self.wait(self.taken[over - 1] + self.patience.minute - now)
            self.taken += [now] * count

    def set_image(self, before: ScaleSet, version: str) -> ScaleSet:
        """Make the model name a version; raises PoolError, FetchError."""
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
    wait: Callable[[float], None] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[Drive]:
    """Drive a scale set until the block ends, however it ends; raises PoolError if another holder does, FetchError.

    The services that are resumed at the end are those that were suspended according to the journal, including by a
    process that was killed. If that process's journal is lost but its claim on the set isn't, all suspended ones are
    resumed. ``wait`` sleeps between looks, and may raise FetchError.
    """
    drive = Drive(
        client,
        path,
        holder,
        journal,
        patience or Patience(),
        wait or client.wait,
        tell,
        force_ephemeral,
        list(journal.records),
    )
    drive.take(_FIRST_REQUESTS)
    is_new = not any(record.scale_set == path for record in drive.records)
    has_lost = is_new and name_of(claim_of(client.scale_set(path))[0]) == name_of(holder)
    drive.renew()
    drive.inherited = {number for number in _instances(drive) if _is_upgraded(drive.requests(number))}
    try:
        states = client.services(path)
        running = [service for service in SERVICES if states.get(service) == "Running"]
        lost = [service for service in SERVICES if has_lost and states.get(service) == "Suspended"]
        for service in (*running, *lost):
            drive.append(Suspension(at=client.now(), scale_set=path, service=service))
        client.set_services(path, running, "Suspend", states)
        yield drive
    finally:
        # A process that took over needs what was suspended, and has marked the set.
        if claim_of(client.scale_set(path))[0] in ("", holder):
            if services := suspended(drive.records, path):
                client.set_services(path, services, "Resume")
            for service in sorted(services):
                drive.append(Suspension(at=client.now(), scale_set=path, service=service, over=True))
            client.release(path, holder)


def roll_instance(
    drive: Drive,
    number: str,
    vm_id: str,
    version: Version,
    node: Callable[[], Node | None],
    busy: Callable[[], str] = lambda: "",
    works: Callable[[], str] = lambda: "",
) -> Ending:
    """Bring an empty instance to the version that its scale set's model names, and return how that ended.

    ``vm_id`` is the machine according to the plan. ``node`` asks the node itself for its boot and build, since what
    others know about it may be from the previous boot; it returns None if the node doesn't answer. ``works`` and then
    ``busy`` are called right before each request, and return what it would destroy: the former asks the node itself,
    which takes a moment, the latter the cluster. Requests for another version are waited for, and don't count.

    Raises PoolError if the scale set was taken or its model changed by somebody else, FetchError if Azure can't be
    reached; the same call resumes.
    """
    began, looks, late = drive.client.now(), 1, 0
    rested = began
    while True:
        history = settled_requests(drive, number, node)
        if history and history[-1].settled and history[-1].settled.outcome == "unknown":
            return Ending("unknown", history[-1].settled.detail)
        history = [request for request in history if is_same_id(request.sent.version, version.id)]
        last = history[-1] if history else None
        if ending := _ending(history, drive.patience):
            return ending
        instance = drive.instance(number, looks=looks)
        if instance is None or instance.vm_id != vm_id.lower():
            return Ending("gone", "it was deleted, or is another machine")
        reading = node()
        step = _next(history, instance, version, reading)
        if last is None and not instance.is_at_rest:
            rested = drive.client.now()
        if step == "wait":
            since = last.settled.at if last and last.settled else began
            step = _waited(
                drive, last, instance, reading, began, rested if last is None else max(began, since)
            )
        if isinstance(step, Ending):
            return step
        looks = RARELY if step == "wait" else 1
        if step == "wait":
            drive.wait(drive.patience.look)
            continue
        refusal = last.settled if last and last.settled and last.settled.outcome == "refused" else None
        if refusal and drive.client.now() - began > drive.patience.request:
            return Ending("failed", f"refused: {refusal.detail}")
        member = Member(instance, version, reading, busy, works, is_single=number in drive.singles)
        if step == "upgrade":
            with drive.upgrades.joined(member, partial(send, drive, step)):
                settled_requests(drive, number, node)
        else:
            send(drive, step, [member])
            settled_requests(drive, number, node)
        if member.error:
            raise member.error
        if member.ending:
            return member.ending
        if member.late:
            late += 1
            reason = (
                f"the API server took {member.late:.1f} s for the last look; {_LATE_SECONDS:g} s is the most"
            )
            drive.tell(f"instance {number}: nothing was sent, {late} of {_LATE_LOOKS} times: {reason}")
            if late == _LATE_LOOKS:
                return Ending("busy", reason)


def settled_requests(drive: Drive, number: str, node: Callable[[], Node | None]) -> list[Request]:
    """Return the requests for an instance, after finding out what became of the last one; raises FetchError."""
    history = drive.requests(number)
    if history and (history[-1].settled is None or history[-1].settled.outcome == "unknown"):
        history[-1] = _settle(drive, history[-1], node)
    return history


def _next(
    history: list[Request], instance: Instance, version: Version, reading: Node | None
) -> Verb | Ending | Literal["wait"]:
    """Return what an instance without an open request needs next."""
    # A driver whose journal is lost may have sent something: its disk is being replaced, or its node is booting.
    is_booting = reading is None and instance.runs(version.id)
    if not history and (is_booting or not instance.is_at_rest):
        return "wait"
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


def _waited(
    drive: Drive, last: Request | None, instance: Instance, reading: Node | None, began: float, since: float
) -> Verb | Ending | Literal["wait"]:
    """Return what an instance needs that has been waited for, since the call ``began`` and for its node ``since``."""
    now, patience = drive.client.now(), drive.patience
    if last is None and not instance.is_at_rest:
        reason = f"its instance is {instance.state}, for whatever reason"
        return Ending("unknown", reason) if now - began > patience.request else "wait"
    if now - since <= patience.boot:
        return "wait"
    # A node that didn't answer before the request has nothing to lose, and still has its old disk.
    if last and (reading is not None or last.sent.boot_id or last.sent.verb == "reimage"):
        return Ending("failed", "timeout: the node doesn't come back")
    return "reimage"


def _ending(history: list[Request], patience: Patience) -> Ending | None:
    """Return how an instance ended, if its last request says so."""
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


def _instances(drive: Drive) -> set[str]:
    """Return the instances that something was sent for."""
    return {r.instance for r in drive.records if isinstance(r, Replacement) and r.scale_set == drive.path}


def _is_upgraded(history: Sequence[Request]) -> bool:
    """Return whether the last request for an instance is an upgrade whose end isn't known."""
    return bool(history) and history[-1].sent.verb == "upgrade" and history[-1].settled is None


def _lost(history: Iterable[Request], verb: Verb) -> int:
    return sum(
        request.sent.verb == verb
        and request.settled is not None
        and request.settled.outcome == "not accepted"
        for request in history
    )


def _require_model(drive: Drive, version: Version) -> None:
    """Raise PoolError if the model of a scale set names another version."""
    if not is_same_id(drive.client.scale_set(drive.path).image, version.id):
        raise PoolError(f"the model of {drive.path} doesn't name {version.name}", hint="nothing was sent")


def send(drive: Drive, verb: Verb, members: Sequence[Member]) -> None:
    """Send one request for the instances that are as they were read and may be replaced, after a last look at each.

    Nothing is sent for instances whose last look isn't over in time.
    """
    client = drive.client
    drive.renew()
    drive.take(_REQUESTS[verb])
    if verb == "upgrade":
        drive.await_others(member.instance.id for member in members)
        _require_model(drive, members[0].version)
    # Waiting for others' upgrades and for nodes may have taken long: what was read before that no longer counts.
    still = [member for member in _idle(members) if drive.is_still(member.instance)]
    began, ready = client.now(), list[Member]()
    for member in still:
        if client.now() - began > _LAST_LOOKS_SECONDS:
            break
        if _is_free(member, member.busy):
            ready.append(member)
    if (took := client.now() - began) > _LATE_SECONDS:
        if len(ready) > 1:
            drive.singles |= {member.instance.id for member in ready}
        elif ready:
            ready[0].late = took
        return
    if not ready:
        return
    for member in list(ready):
        try:
            drive.append(_intent(drive, verb, member))
        except FetchError as error:  # it was given up meanwhile, and the others continue
            member.error = error
            ready.remove(member)
    if not ready:
        return
    numbers = [member.instance.id for member in ready]
    if verb == "upgrade":
        answer = client.upgrade(drive.path, numbers)
    elif verb == "restart":
        answer = client.restart(drive.path, numbers[0])
    else:
        answer = client.reimage(drive.path, numbers[0], force_ephemeral=drive.force_ephemeral)
    drive.single_out(set(numbers), answer)
    for number in numbers:
        if answer.is_accepted:
            drive.append(
                Accepted(at=client.now(), scale_set=drive.path, instance=number, operation=answer.operation)
            )
        elif answer.is_refused:
            # With several instances, one may be the reason for the refusal.
            is_passing = answer.is_passing or len(numbers) > 1
            drive.settle(number, "refused" if is_passing else "failed", answer.problem)
    if answer.is_refused:
        drive.wait(answer.wait)


def _idle(members: Sequence[Member]) -> list[Member]:
    """Return the members whose nodes don't report that they are working; all nodes are asked at once."""
    with ThreadPoolExecutor(max(1, len(members)), thread_name_prefix="ask") as threads:
        idle = threads.map(_is_free, members, [member.works for member in members])
        return [member for member, is_idle in zip(members, idle, strict=True) if is_idle]


def _is_free(member: Member, look: Callable[[], str]) -> bool:
    """Look at an instance's host, note the result, and return whether the host is free."""
    try:
        reason = look()
    except Exception as error:  # its own thread raises it, and the others continue
        member.error = error
        return False
    member.ending = Ending("busy", reason) if reason else None
    return not reason


def _intent(drive: Drive, verb: Verb, member: Member) -> Replacement:
    """Return the record of a request that is about to be sent."""
    return Replacement(
        at=drive.client.now(),
        verb=verb,
        vm_id=member.instance.vm_id,
        boot_id=member.reading.boot_id if member.reading else "",
        version=member.version.id,
        build=member.version.build,
        scale_set=drive.path,
        instance=member.instance.id,
    )


def _settle(drive: Drive, request: Request, node: Callable[[], Node | None]) -> Request:
    """Find out what became of a request, journal it and return it; raises FetchError."""
    client, sent = drive.client, request.sent
    began, looks = client.now(), list[Look]()
    first, pause = (drive.patience.look * looks_of[sent.verb] for looks_of in (_FIRST, _LOOKS))
    # A request that was just sent can't be over yet.
    drive.wait(min(first, max(0.0, sent.at + first - began)))
    while True:
        at, instance = drive.read(sent.instance, since=sent.at, looks=_LOOKS[sent.verb])
        # While its instance is in progress, nothing that a node reports counts.
        is_at_rest = instance is not None and instance.is_at_rest
        looks.append(Look(at, instance, node() if is_at_rest else None))
        operation = _operation(drive, request, looks)
        verdict = judge(sent, operation, looks, drive.patience.settle)
        if verdict in ("running", "unknown") and client.now() - began <= drive.patience.request:
            drive.wait(pause)
            continue
        detail = ""
        if verdict == "failed":
            detail = (instance.code if instance else "") or (operation.code if operation else "")
        outcome: Result = "unknown" if verdict == "running" else verdict
        return Request(sent, request.operation, drive.settle(sent.instance, outcome, detail))


def _operation(drive: Drive, request: Request, looks: Sequence[Look]) -> Operation | None:
    """Return how a request's own operation ended, once the list shows an end that isn't the requested one.

    If it failed for several instances, that says nothing about an instance that Azure doesn't report as failed.
    """
    look = looks[-1]
    instance = look.instance
    if instance is None or not instance.is_at_rest or judge(request.sent, None, looks) == "done":
        return None
    operation = drive.client.operation(request.operation)
    has_failed = operation is not None and operation.has_ended and operation.status.lower() != "succeeded"
    return None if has_failed and drive.is_shared(request.operation) else operation
