"""Be the only controller that acts: a Lease, taken and renewed as client-go's leader election does it.

Clocks of two machines are never compared: a lease has run out when nobody renewed it while our own clock went on for
its whole duration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from image_builder.node.net.kube import CONFLICT, Client, KubeError


@dataclass(frozen=True)
class Settings:
    """Seconds: how long a lease lasts, when a leader that couldn't renew it gives up, and between two attempts."""

    name: str = "image-builder-gate"
    namespace: str = "kube-system"
    duration: float = 30.0
    deadline: float = 20.0
    pause: float = 8.0


@dataclass
class Observation:
    """The lease as it was when it last changed, and when (by our clock) that was seen."""

    record: tuple[str, str] = ("", "")
    since: float = 0.0


class Election:
    """``attempt`` is called every ``pause`` seconds; ``leads`` tells whether we may act now."""

    def __init__(self, client: Client, identity: str, settings: Settings, clock: Callable[[], float]) -> None:
        self.settings = settings
        self._client, self._identity, self._clock = client, identity, clock
        self._observed = Observation()
        self._renewed = float("-inf")

    @property
    def leads(self) -> bool:
        """Tell whether the lease is ours, by a renewal that is recent enough for nobody else to have taken it."""
        return self._clock() - self._renewed < self.settings.deadline

    def attempt(self) -> None:
        """Take or renew the lease where that is ours to do. Raises KubeError."""
        now = self._clock()
        lease = self._client.find(self._path)
        if lease is None:
            self._write("POST", self._collection, {"metadata": self._meta}, now)
            return
        spec = lease.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        record = (holder, str(spec.get("renewTime") or ""))
        if record != self._observed.record:
            # Not when it was asked for: it may have been renewed while the answer was on its way.
            self._observed = Observation(record, self._clock())
        lasts = float(spec.get("leaseDurationSeconds") or self.settings.duration)
        if holder in ("", self._identity) or now - self._observed.since > lasts:
            self._write("PUT", self._path, lease, now)

    def release(self) -> None:
        """Give the lease back, so that the next one need not wait for its end. Raises KubeError."""
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
            # With the resourceVersion that was read: of two that take it at once, one is refused.
            self._client.request(method, path, body)
        except KubeError as error:
            if error.status != CONFLICT:
                raise
            return
        # From before the request was sent: the server counts from later.
        self._renewed = now

    @property
    def _meta(self) -> dict[str, str]:
        return {"name": self.settings.name, "namespace": self.settings.namespace}

    @property
    def _collection(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self.settings.namespace}/leases"

    @property
    def _path(self) -> str:
        return f"{self._collection}/{self.settings.name}"
