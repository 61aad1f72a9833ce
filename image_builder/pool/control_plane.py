"""Readings of a Kubernetes control plane: what its API server counts, pending certificate requests, nodes.

The user of the kubeconfig needs ``get`` on /metrics, ``list`` on nodes and on certificatesigningrequests. Behind a
load balancer the counters are those of the API server that answered: one connection is kept, so that they stay
comparable, and one that restarted (or is another one) begins anew.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from image_builder.errors import UsageError
from image_builder.node import kube, kubeconfig
from image_builder.node.errors import NodeError
from image_builder.pool.gates import Reading

# What people see of nodes, as text, from the API server's memory: of thousands that is a hundredth of what the nodes
# themselves are, and nothing is asked of etcd.
# https://kubernetes.io/docs/reference/using-api/api-concepts/#receiving-resources-as-tables
NODES = "/api/v1/nodes?resourceVersion=0&includeObject=None"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
REQUESTS = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
# Who signs what joining nodes ask for. Others may leave requests to a person, who takes days: serving certificates of
# kubelets are never approved by Kubernetes itself, those of people neither.
SIGNER = "kubernetes.io/kube-apiserver-client-kubelet"
# Nodes that registered since may well not be Ready: they join.
JOINING_SECONDS = 300.0
# The driver waits meanwhile, for each of three requests.
_SECONDS = 5.0
# An age as the API server writes it: to the second up to ten minutes, `<invalid>` by a clock that was ahead.
_AGE = re.compile(r"(?:(\d+)y)?(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_AGE_SECONDS = (31_536_000, 86_400, 3_600, 60, 1)
_COUNTER = re.compile(r'apiserver_request_total\{[^}]*\bcode="(\d+)"[^}]*\} (\S+)')


class ControlPlane(Protocol):
    """Where readings come from. ``is_read``: whether they mean anything."""

    is_read: bool

    def read(self) -> Reading:
        """Return what happened since the last call. A failure to read is a reading with ``unread``."""

    def close(self) -> None:
        """Let go of what it holds."""


class Unwatched:
    """No control plane was named: nothing is known of it, which holds nobody up. Who runs it is told so."""

    is_read = False

    def read(self) -> Reading:
        return Reading(unwatched=True)

    def close(self) -> None:
        pass


class Kubernetes:
    """A control plane, by its API server; a context manager."""

    is_read = True

    def __init__(
        self, path: Path, *, clock: Callable[[], float] = time.time, joining_seconds: float = JOINING_SECONDS
    ) -> None:
        """Read the kubeconfig; raises UsageError. For so long a node that registered need not be Ready."""
        try:
            self._client = kube.Client(kubeconfig.load(path), agent="image-builder", timeout=_SECONDS)
        except NodeError as error:
            raise UsageError(str(error.message)) from error
        self._clock, self._joining_seconds = clock, joining_seconds
        self._before: Mapping[str, float] | None = None

    def read(self) -> Reading:
        try:
            return self._read()
        except NodeError as error:
            return Reading(unread=str(error.message)[:500])
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # JSON, and not what an API server says: something between here and there answered.
            return Reading(unread=f"the answer is not understood: {error!r}"[:500])

    def _read(self) -> Reading:
        counters = count_requests(self._client.text("/metrics"))
        certificates = _gather(self._client, REQUESTS)
        nodes = json.loads(self._client.text(NODES, TABLE))
        before, self._before = self._before, counters
        now = self._clock()
        answered = since(before, counters)
        return Reading(
            requests=answered.all,
            throttled=answered.throttled,
            errors=answered.errors,
            csr_seconds=oldest_pending(certificates, now),
            not_ready=count_not_ready(nodes, self._joining_seconds),
        )

    def close(self) -> None:
        self._client.close()


def _gather(client: kube.Client, path: str) -> list[dict[str, Any]]:
    """Return of each item what is looked at here."""
    found: list[dict[str, Any]] = []

    def take(item: dict[str, Any]) -> None:
        conditions = item.get("status", {}).get("conditions") or []
        found.append(
            {
                "created": item["metadata"]["creationTimestamp"],
                "signer": (item.get("spec") or {}).get("signerName", ""),
                "conditions": {c["type"]: c.get("status", "True") for c in conditions},
            }
        )

    client.each(path, take)
    return found


def count_requests(metrics: str) -> dict[str, float]:
    """Return how many requests an API server has answered, by HTTP status (``apiserver_request_total``)."""
    found: dict[str, float] = {}
    for code, value in _COUNTER.findall(metrics):
        found[code] = found.get(code, 0.0) + float(value)
    return found


class Answered(NamedTuple):
    """Requests between two counts: all, those with 429, those with 5xx."""

    all: int = 0
    throttled: int = 0
    errors: int = 0


def since(before: Mapping[str, float] | None, now: Mapping[str, float]) -> Answered:
    """Return what was answered between two counts; of a first one, or one that began anew, nothing is known."""
    if before is None or any(now.get(code, 0.0) < count for code, count in before.items()):
        return Answered()
    new = {code: count - before.get(code, 0.0) for code, count in now.items()}
    errors = sum(count for code, count in new.items() if code.startswith("5"))
    return Answered(round(sum(new.values())), round(new.get("429", 0.0)), round(errors))


def oldest_pending(requests: list[dict[str, Any]], now: float) -> float:
    """Return the age in seconds of the oldest request of a joining node that nobody decided on; 0 without one."""
    ages = [
        now - _moment(request["created"])
        for request in requests
        if request["signer"] == SIGNER and not request["conditions"]
    ]
    return max([0.0, *ages])


def count_not_ready(table: Mapping[str, Any], joining_seconds: float = JOINING_SECONDS) -> int:
    """Return how many nodes of a table aren't Ready, those aside that registered only just now.

    Raises ValueError and the like for what is no such table.
    """
    if table["kind"] != "Table":
        raise ValueError(f"a {table['kind']} of nodes, not a table")
    names = [column["name"] for column in table["columnDefinitions"]]
    status, age = names.index("Status"), names.index("Age")
    cells = [row["cells"] for row in table.get("rows") or []]
    return sum(
        # Such as `NotReady,SchedulingDisabled`.
        cell[status].partition(",")[0] != "Ready" and _age(cell[age]) > joining_seconds
        for cell in cells
    )


def _age(text: str) -> float:
    """Return seconds of an age such as `5m30s`, `3h` or `2y10d`."""
    if text == "<invalid>":
        return 0.0
    found = _AGE.fullmatch(text)
    if not found or not text:
        raise ValueError(f"no age: {text!r}")
    parts = zip(found.groups("0"), _AGE_SECONDS, strict=True)
    return float(sum(int(number) * seconds for number, seconds in parts))


def _moment(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()
