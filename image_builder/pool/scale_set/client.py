"""A rollout's client for a scale set: what it reads and changes. Requests for instances always name them, never all.

Each request that changes something is sent once. The model, tags and services are read before a request to change
them, and again after an inconclusive response: if they aren't as they should be, the request is sent again. A request
that replaces an instance's disk is never repeated here: ``verdict`` finds out what became of it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol

from image_builder.errors import DefinitionError, FetchError, PoolError, Problem
from image_builder.pool.plan.model import Host
from image_builder.pool.scale_set import model
from image_builder.pool.scale_set.model import COMPUTE_API, GALLERY_API, Instance, ScaleSet, Version
from image_builder.pool.scale_set.refusals import policy_refusals
from image_builder.pool.scale_set.verdict import Operation
from image_builder.system.identity import name_of
from image_builder.system.resource_manager import ResourceManager
from image_builder.text import stamp

Json = dict[str, Any]
HOLD_TAG = "image-builder-roll"

_TRIES, _RACES = 6, 60
_LONGEST_WAIT = 300.0
_LOOK_SECONDS = 5.0
_AGAIN = "rerun the same command to resume"
_THROTTLED, _CONFLICT, _CHANGED = 429, 409, 412


class Manager(Protocol):
    """Resource Manager, as ``system.resource_manager`` reaches it."""

    def get(self, path: str, api: str, **query: str) -> Json | None: ...
    def list(self, path: str, api: str, **query: str) -> Iterator[Json]: ...
    def send(
        self,
        method: str,
        path: str,
        api: str,
        body: Mapping[str, Any] | None = None,
        *,
        if_match: str | None = None,
    ) -> tuple[Any, str]: ...


@dataclass(frozen=True)
class Answer:
    """How Azure answered a request; ``status`` is 0 if no response arrived. ``wait`` is how many seconds to wait."""

    status: int
    problem: str = ""
    operation: str = ""
    wait: float = _LOOK_SECONDS

    @property
    def is_accepted(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_refused(self) -> bool:
        """Return whether it is certain that nothing was done."""
        return 400 <= self.status < 500

    @property
    def is_throttled(self) -> bool:
        return self.status == _THROTTLED

    @property
    def is_passing(self) -> bool:
        """Return whether the same request may be accepted later."""
        return self.status in (_THROTTLED, _CONFLICT, _CHANGED) or not (self.is_accepted or self.is_refused)


@dataclass(frozen=True)
class Client:
    """Reads and changes scale sets.

    ``wait`` sleeps for a number of seconds, ``now`` returns the time in seconds since 1970; ``pause`` is how long to
    wait for Azure if it doesn't say.
    """

    manager: Manager
    wait: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.time
    pause: float = _LOOK_SECONDS

    # -- reading ---------------------------------------------------------------------------------------------

    def scale_set(self, path: str) -> ScaleSet:
        """Return a scale set; raises PoolError if it doesn't exist, FetchError."""
        answer = self.manager.get(path, COMPUTE_API)
        if answer is None:
            raise PoolError(f"there is no scale set {path}", hint="nothing was changed")
        return model.scale_set(answer)

    def instances(self, path: str) -> list[Instance]:
        """Return all instances of a scale set; raises FetchError."""
        listed = self.manager.list(f"{path}/virtualMachines", COMPUTE_API, **{"$expand": "instanceView"})
        return [model.instance(answer) for answer in listed]

    def versions_beside(self, paths: Iterable[str], known: Collection[str]) -> dict[str, str]:
        """Return the instances of scale sets whose VM ids aren't ``known``, and their versions, by id.

        A set that can't be read is included by its own id, without a version.
        """
        versions: dict[str, str] = {}
        for path in paths:
            try:
                listed = self.instances(path)
            except FetchError:
                versions[path] = ""
            else:
                others = (instance for instance in listed if instance.vm_id not in known)
                versions |= {f"{path}/virtualMachines/{other.id}": other.image for other in others}
        return versions

    def instance(self, path: str, number: str) -> Instance | None:
        """Return an instance, None if it no longer exists; raises FetchError."""
        target = f"{path}/virtualMachines/{_decimal(number)}"
        answer = self.manager.get(target, COMPUTE_API, **{"$expand": "instanceView"})
        return None if answer is None else model.instance(answer)

    def version(self, path: str) -> Version | None:
        """Return a gallery image version, None if it doesn't exist; raises FetchError."""
        answer = self.manager.get(path, GALLERY_API, **{"$expand": "ReplicationStatus"})
        definition = self.manager.get(path.rpartition("/versions/")[0], GALLERY_API)
        return None if answer is None or definition is None else model.version(answer, definition)

    def operation(self, address: str) -> Operation | None:
        """Return a long-running operation, None if there is nothing at its address (any longer); raises FetchError."""
        answer = self.manager.get(address, COMPUTE_API) if address else None
        if answer is None:
            return None
        error = answer.get("error") or {}
        return Operation(
            str(answer.get("status", "")), str(error.get("code", "")), str(error.get("message", ""))
        )

    def services(self, path: str) -> dict[str, str]:
        """Return the states of the services that act on a scale set by themselves; raises FetchError."""
        view = self.manager.get(f"{path}/instanceView", COMPUTE_API) or {}
        return {
            service["serviceName"]: service["serviceState"]
            for service in view.get("orchestrationServices") or ()
        }

    # -- instances -------------------------------------------------------------------------------------------

    def upgrade(self, path: str, numbers: Iterable[str]) -> Answer:
        """Upgrade instances to the model, once; may replace their OS disks. Raises ValueError if none are given."""
        named = [_decimal(number) for number in numbers]
        if not named:
            raise ValueError("an upgrade that names no instance is one of all")
        return self._send("POST", f"{path}/manualupgrade", {"instanceIds": named})

    def reimage(self, path: str, number: str, *, force_ephemeral: bool = False) -> Answer:
        """Replace the OS disk of an instance with a new one of the version that it has, once."""
        body = {"forceUpdateOSDiskForEphemeral": True} if force_ephemeral else {}
        return self._send("POST", f"{path}/virtualMachines/{_decimal(number)}/reimage", body)

    def restart(self, path: str, number: str) -> Answer:
        """Restart an instance, once."""
        return self._send("POST", f"{path}/virtualMachines/{_decimal(number)}/restart", {})

    # -- the scale set ---------------------------------------------------------------------------------------

    def set_image(self, before: ScaleSet, version: str, *, force_ephemeral: bool = False) -> ScaleSet:
        """Make the model name a version (an id), and return the scale set.

        Raises PoolError for a scale set that must not be touched or that somebody else changed, FetchError.
        """

        def change(present: ScaleSet) -> Json | None:
            if problems := policy_refusals(present, force_ephemeral=force_ephemeral):
                raise PoolError(
                    "\n".join([f"{present.id} is left alone:", *(f"  {problem}" for problem in problems)]),
                    hint="its model was not changed",
                )
            if model.is_same_id(present.image, version):
                return None
            if present.policy != before.policy:
                raise PoolError(
                    f"{present.id} was changed by another: its model names {present.image}",
                    hint="make a new plan",
                )
            reference = {"imageReference": {"id": version}}
            return {"properties": {"virtualMachineProfile": {"storageProfile": reference}}}

        return self._patch(before.id, change)

    def hold(self, path: str, holder: str, until: float, *, renews: bool = False) -> None:
        """Mark a scale set as driven by ``holder`` until a time; raises PoolError if another run's process drives it.

        A process takes the mark of an earlier one of its run, which has lost its Lease, but doesn't take it back: one
        that ``renews`` it must find its own.
        """
        value = f"{holder} until {stamp(until)}"

        def change(present: ScaleSet) -> Json | None:
            self.require_free(present, holder)
            if renews and claim_of(present)[0] not in ("", holder):
                raise PoolError(
                    f"{path} is driven by {present.tags[HOLD_TAG]}", hint="it took over from this process"
                )
            mark = present.tags.get(HOLD_TAG, "")
            return None if mark == value else {"tags": {**present.tags, HOLD_TAG: value}}

        self._patch(path, change, read=False)

    def require_free(self, present: ScaleSet, holder: str) -> None:
        """Raise PoolError if a scale set, as it was read, is driven by a run other than that of ``holder``."""
        other, end = claim_of(present)
        if name_of(other) not in ("", name_of(holder)) and end > self.now():
            raise PoolError(
                f"{present.id} is driven by {present.tags[HOLD_TAG]}",
                hint="one rollout drives a scale set: wait for it, or abort it",
            )

    def release(self, path: str, holder: str) -> None:
        """Remove the mark of ``holder`` from a scale set, if it is there; raises PoolError, FetchError."""

        def change(present: ScaleSet) -> Json | None:
            if claim_of(present)[0] != holder:
                return None
            return {"tags": {name: value for name, value in present.tags.items() if name != HOLD_TAG}}

        self._patch(path, change, read=False)

    def set_services(
        self,
        path: str,
        services: Iterable[str],
        action: Literal["Suspend", "Resume"],
        states: Mapping[str, str] | None = None,
    ) -> None:
        """Suspend or resume services of a scale set, and wait until that is done; raises PoolError, FetchError.

        A service that somebody disabled can't be resumed, and is left alone. ``states`` are the current states, if they
        were just read.
        """
        state = {"Suspend": "Suspended", "Resume": "Running"}[action]
        over = (state,) if action == "Suspend" else (state, "NotRunning", None)
        problem, names = "", sorted(services)
        for attempt in range(_TRIES + 1):
            states = self.services(path) if states is None or attempt else states
            if not (names := [service for service in names if states.get(service) not in over]):
                return
            if attempt == _TRIES:  # only to see what became of the last request
                break
            for service in names:
                body = {"serviceName": service, "action": action}
                answer = self._send("POST", f"{path}/setOrchestrationServiceState", body)
                problem = answer.problem or problem
                if answer.is_refused and not answer.is_passing:
                    raise PoolError(f"{path}: {service} is not {state}: {problem}", hint=_AGAIN)
                self.wait(answer.wait * (attempt + 1))
                while (operation := self.operation(answer.operation)) and not operation.has_ended:
                    self.wait(self.pause)
        raise PoolError(f"{path}: {', '.join(names)} is not {state}: {problem}", hint=_AGAIN)

    def _patch(self, path: str, change: Callable[[ScaleSet], Json | None], *, read: bool = True) -> ScaleSet:
        """Patch a scale set with what ``change`` makes of it, unless that is None; never overwrite others' changes.

        Return the scale set as it is then or, if what was accepted doesn't have to be ``read``, as it was before.
        """
        problem, attempt, raced = "", 0, 0
        while True:
            present = self.scale_set(path)
            body = change(present)
            if body is None:
                return present
            if attempt == _TRIES or raced == _RACES:  # only to see what became of the last request
                break
            if not present.etag:
                raise PoolError(
                    f"{path} has no ETag: another's change could be overwritten", hint="nothing was changed"
                )
            answer = self._send("PATCH", path, body, if_match=present.etag)
            problem = answer.problem
            if answer.is_refused and not answer.is_passing:
                break
            if answer.is_accepted and not read:
                return present
            # Others may write to it all the time; as long as ``change`` doesn't object, that is no failure.
            is_raced = answer.status == _CHANGED
            raced, attempt = raced + is_raced, attempt + (not is_raced)
            if not answer.is_accepted:
                self.wait(answer.wait * max(1, attempt))
        raise PoolError(f"{path} was not changed: {problem}", hint=_AGAIN)

    def _send(self, method: str, path: str, body: Json, *, if_match: str | None = None) -> Answer:
        answer, problem = self.manager.send(method, path, COMPUTE_API, body, if_match=if_match)
        if answer is None:
            return Answer(0, problem, wait=self.pause)
        pause = str(answer.headers.get("Retry-After", ""))
        return Answer(
            answer.status_code,
            problem if answer.status_code >= 300 else "",
            answer.headers.get("Azure-AsyncOperation") or "",
            min(float(pause), _LONGEST_WAIT) if pause.isdigit() else self.pause,
        )


def claim_of(scale_set: ScaleSet) -> tuple[str, float]:
    """Return the holder in a scale set's tag, empty if there is none, and when that claim ends (seconds since 1970)."""
    mark = scale_set.tags.get(HOLD_TAG, "")
    holder, separator, end = mark.rpartition(" until ")
    # A tag of another form is an unknown holder's claim that never ends.
    return (holder, _seconds(end)) if separator else (mark, float("inf") if mark else 0.0)


def _decimal(number: str) -> str:
    """Return an instance's number; raises ValueError for anything else, such as the `*` that means all."""
    if not re.fullmatch(r"[0-9]+", number, re.ASCII):
        raise ValueError(f"not the number of an instance: {number!r}")
    return number


def _seconds(text: str) -> float:
    """Return a time in seconds since 1970; infinity if it can't be parsed."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return float("inf")


@contextmanager
def open_client(
    hosts: Sequence[Host], endpoint: str | None = None, *, rights: str = "docs/how-to/roll.md"
) -> Iterator[Client]:
    """Open a client for the scale sets of hosts; raises DefinitionError unless they share a subscription, HostError."""
    subscriptions = {host.scale_set_id.split("/")[2].lower() for host in hosts if host.scale_set_id}
    if len(subscriptions) != 1:
        names = ", ".join(sorted(subscriptions)) or "none"
        reason = f"the scale sets of one command must be in one subscription, got {names}"
        raise DefinitionError([Problem("", "pool_scale_set_id", reason)], hint="nothing was changed")
    with ResourceManager(subscriptions.pop(), endpoint=endpoint) as manager:
        manager.rights = rights
        yield Client(manager)
