"""Ensures that only one process acts: a Lease, taken and renewed as in client-go's leader election.

The gate's controllers share one. Each scale set has one too, for as long as a rollout drives it: other rollouts are
refused, and the gate starts nothing on its nodes.

Clocks of two machines are never compared: a lease has expired when nobody has renewed it for its whole duration by our
own clock.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Self

from image_builder.errors import PoolError
from image_builder.node.errors import NodeError
from image_builder.node.net.kube import CONFLICT, Client, KubeError
from image_builder.system.identity import is_dead, name_of

# Of the Leases of scale sets. A namespace of their own allows granting access to them but not to any others.
NAMESPACE = "image-builder"


@dataclass(frozen=True)
class Settings:
    """In seconds: how long a lease lasts, when a leader that couldn't renew it gives up, the pause between attempts."""

    name: str = "image-builder-gate"
    namespace: str = "kube-system"
    duration: float = 30.0
    deadline: float = 20.0
    pause: float = 8.0


@dataclass
class Observation:
    """The lease as it was after its last change, and when (by our clock) that change was seen."""

    record: tuple[str, str] = ("", "")
    since: float = 0.0


class Election:
    """The caller calls ``attempt`` every ``pause`` seconds; ``leads`` is whether we may act now."""

    def __init__(self, client: Client, identity: str, settings: Settings, clock: Callable[[], float]) -> None:
        self.settings = settings
        self._client, self._identity, self._clock = client, identity, clock
        self._observed = Observation()
        self._renewed = float("-inf")

    @property
    def leads(self) -> bool:
        """Return whether the lease is ours: renewed so recently that nobody else can have taken it."""
        return self._clock() - self._renewed < self.settings.deadline

    @property
    def record(self) -> tuple[str, str]:
        """Return who held the lease when it was last read, and that holder's last renewal; empty if nobody did."""
        return self._observed.record

    def attempt(self) -> None:
        """Take the lease if it is free, or renew it if it is ours. Raises KubeError."""
        now = self._clock()
        lease = self._client.find(self._path)
        if lease is None:
            self._write("POST", self._collection, {"metadata": self._meta}, now)
            return
        spec = lease.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        record = (holder, str(spec.get("renewTime") or ""))
        if record != self._observed.record:
            # Not the time of the request: it may have been renewed while the answer was on its way.
            self._observed = Observation(record, self._clock())
        lasts = float(spec.get("leaseDurationSeconds") or self.settings.duration)
        if holder in ("", self._identity) or is_dead(holder) or now - self._observed.since > lasts:
            self._write("PUT", self._path, lease, now)

    def seize(self) -> None:
        """Take the lease from whoever holds it, who leads until its own deadline nevertheless. Raises KubeError."""
        lease = self._client.request("GET", self._path)
        self._write("PUT", self._path, lease, self._clock())

    def release(self) -> None:
        """Give the lease back, so that the next holder needn't wait for it to expire. Raises KubeError."""
        if self.leads:
            lease = self._client.request("GET", self._path)
            if (lease.get("spec") or {}).get("holderIdentity") == self._identity:
                lease["spec"]["holderIdentity"] = ""
                self._client.request("PUT", self._path, lease)
        self._renewed = float("-inf")

    def close(self) -> None:
        self._client.close()

    def _write(self, method: str, path: str, lease: Mapping[str, Any], now: float) -> None:
        old = lease.get("spec") or {}
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_ours = old.get("holderIdentity") == self._identity
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(self.settings.duration),
            "acquireTime": old.get("acquireTime") if is_ours else stamp,
            "renewTime": stamp,
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + (0 if is_ours else 1),
        }
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **lease, "spec": spec}
        try:
            # It has the resourceVersion that was read: if two take the lease at once, one is refused.
            self._client.request(method, path, body)
        except KubeError as error:
            if error.status != CONFLICT:
                raise
            return
        # The time before the request was sent: others count from a later one.
        self._renewed = now

    @property
    def _meta(self) -> dict[str, str]:
        return {"name": self.settings.name, "namespace": self.settings.namespace}

    @property
    def _collection(self) -> str:
        return leases_path(self.settings.namespace)

    @property
    def _path(self) -> str:
        return f"{self._collection}/{self.settings.name}"


def leases_path(namespace: str) -> str:
    """Return the API server's path of a namespace's Leases."""
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


# -- leases of scale sets --------------------------------------------------------------------------------------


def lease_of(scale_set: str) -> str:
    """Return the name of a scale set's Lease, by its id in Azure."""
    return f"set-{hashlib.sha256(scale_set.lower().encode()).hexdigest()[:16]}"


class Holders:
    """Who holds which Lease, for observers that take none. ``clock`` is monotonic.

    A Lease that is seen for the first time counts as held for its whole duration.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._observed: dict[str, tuple[Observation, float]] = {}

    def look(self, client: Client) -> None:
        """Read all Leases. Raises KubeError."""
        leases: dict[str, tuple[tuple[str, str], float]] = {}

        def take(lease: Mapping[str, Any]) -> None:
            spec = lease.get("spec") or {}
            record = (str(spec.get("holderIdentity") or ""), str(spec.get("renewTime") or ""))
            leases[lease["metadata"]["name"]] = record, float(spec.get("leaseDurationSeconds") or 0)

        client.each(leases_path(NAMESPACE), take)
        for name in self._observed.keys() - leases.keys():
            del self._observed[name]
        for name, (record, seconds) in leases.items():
            known = self._observed.get(name)
            is_same = known is not None and known[0].record == record
            since = known[0].since if known and is_same else self._clock()
            self._observed[name] = Observation(record, since), seconds

    def holder(self, name: str) -> str:
        """Return who holds a Lease, empty if nobody does."""
        observation, seconds = self._observed.get(name, (Observation(), 0.0))
        return observation.record[0] if self._clock() - observation.since <= seconds else ""


class Leases:
    """Leases of scale sets, held and renewed in a thread until the ``with`` block ends. Thread-safe.

    ``connect`` opens a connection to the API server; ``holder`` identifies this process. A process on this machine that
    has ended holds nothing any more.
    """

    def __init__(self, connect: Callable[[], Client], holder: str, settings: Settings | None = None) -> None:
        self._connect, self._holder = connect, holder
        self._settings = settings or Settings(namespace=NAMESPACE, duration=120.0, deadline=80.0, pause=30.0)
        self._client: Client | None = None
        self._elections: dict[str, Election] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="leases", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for election in self._elections.values():
            with suppress(NodeError):  # it expires by itself
                election.release()
        if self._client:
            self._client.close()

    def hold(self, scale_set: str) -> None:
        """Hold a scale set's Lease, taking it if necessary. Raises PoolError naming another holder, KubeError."""
        with self._lock:
            if scale_set not in self._elections:
                # One connection for all, used only under the lock.
                self._client = self._client or self._connect()
                settings = replace(self._settings, name=lease_of(scale_set))
                self._elections[scale_set] = Election(self._client, self._holder, settings, time.monotonic)
            election = self._elections[scale_set]
            if election.leads:
                return
            election.attempt()
            if not election.leads:
                raise PoolError(
                    f"the scale set {scale_set} is held by {election.record[0] or 'another'} (Lease {NAMESPACE}/"
                    f"{election.settings.name})",
                    hint="wait until it ends; if it hangs: image-builder pool resume --takeover",
                )

    def take(
        self, *scale_sets: str, tell: Callable[[str], None] = lambda _: None, takes_over: bool = False
    ) -> None:
        """Hold each, as ``hold`` does, but wait until Leases whose holder is gone expire, all at the same time. A live
        holder renews its Lease, which counts as a refusal, unless this process ``takes_over`` from others of its run:
        it takes the Leases, and waits until their former holders can't act any longer. ``tell`` gets what is waited
        for.
        """
        others: dict[str, str] = {}
        for path in scale_sets:
            try:
                self.hold(path)
            except PoolError:  # from now on its Lease is observed
                others[path] = self._elections[path].record[0]
        names = ", ".join(sorted(set(others.values())))
        # Another run's process is never dismissed.
        if others and takes_over and {name_of(other) for other in others.values()} == {name_of(self._holder)}:
            for path in others:
                with self._lock:
                    self._elections[path].seize()
            tell(f"{names} could act for {self._settings.deadline:.0f} s more, which pass first")
            self._stop.wait(self._settings.deadline)
        elif others:
            tell(f"{names} held Leases, which expire in {self._settings.duration:.0f} s if it is dead")
        for path in scale_sets:
            self._take(path)

    def _take(self, scale_set: str) -> None:
        record: tuple[str, str] | None = None
        while True:
            try:
                self.hold(scale_set)
            except PoolError:
                current = self._elections[scale_set].record
                if record not in (None, current):
                    raise
                record = current
            else:
                return
            self._stop.wait(self._settings.pause / 3)

    def _renew(self) -> None:
        while not self._stop.wait(self._settings.pause):
            with self._lock:
                elections = list(self._elections.values())
            for election in elections:
                # An election that can't renew its lease no longer leads, which ``hold`` notices.
                with suppress(NodeError), self._lock:
                    election.attempt()
