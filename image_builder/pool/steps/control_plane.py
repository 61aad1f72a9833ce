"""Readings of a Kubernetes control plane: its API server's counters, pending certificate requests, nodes.

The user of the kubeconfig needs ``get`` on /metrics, ``list`` on nodes and on certificatesigningrequests. Behind a
load balancer the counters are those of the API server that answered: one connection is kept open, so that they stay
comparable; after a restart, or on another API server, counting starts over.
"""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from image_builder.errors import UsageError
from image_builder.node.errors import NodeError
from image_builder.node.join.credentials import check_clock
from image_builder.node.net import fetch, kube, kubeconfig
from image_builder.pool.run.gates import Reading

NODES = "/api/v1/nodes"
# Nodes as people see them, as text, from the API server's memory: etcd isn't queried, and the answer is a sixteenth of
# the size of simulated nodes (tests/bench/gate.py); real ones also have lists of images.
# https://kubernetes.io/docs/reference/using-api/api-concepts/#receiving-resources-as-tables
SHOWN_NODES = f"{NODES}?resourceVersion=0&includeObject=None"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
REQUESTS = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
# The signer of joining nodes' requests. Requests to other signers may wait days for a person: Kubernetes itself never
# approves serving certificates of kubelets, nor certificates of people.
SIGNER = "kubernetes.io/kube-apiserver-client-kubelet"
# Nodes that registered within this time may not be Ready yet: they are joining.
JOINING_SECONDS = 300.0
# Timeout of each of the three requests.
_SECONDS = 5.0
# An age as the API server writes it: to the second up to ten minutes, `<invalid>` if a clock was ahead.
_AGE = re.compile(r"(?:(\d+)y)?(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_AGE_SECONDS = (31_536_000, 86_400, 3_600, 60, 1)
# Maximum clock difference: the ages of requests and nodes depend on both clocks.
_CLOCK_SECONDS = 60.0
# The user is unknown or not permitted: waiting doesn't change that.
_NEVER = frozenset({401, 403})
_COUNTER = re.compile(r'apiserver_request_total\{[^}]*\bcode="(\d+)"[^}]*\} (\S+)')


class ControlPlane(Protocol):
    """The source of readings. ``is_read``: whether a control plane is actually read."""

    is_read: bool

    def read(self) -> Reading:
        """Return what happened since the last call. A failure is returned as a reading with ``unread``."""

    def close(self) -> None:
        """Release resources."""


class Unwatched:
    """No control plane was given: its gate passes everything, and a note says so."""

    is_read = False

    def read(self) -> Reading:
        return Reading(unwatched=True)

    def close(self) -> None:
        pass


class Kubernetes:
    """A control plane, read through its API server."""

    is_read = True

    def __init__(
        self, path: Path, *, clock: Callable[[], float] = time.time, joining_seconds: float = JOINING_SECONDS
    ) -> None:
        """Read the kubeconfig; raises UsageError. For ``joining_seconds`` a node that registered need not be Ready."""
        try:
            self._client = kube.Client(kubeconfig.load(path), agent="image-builder", timeout=_SECONDS)
        except NodeError as error:
            raise UsageError(str(error.message)) from error
        self._access, self._clock, self._joining_seconds = self._client.access, clock, joining_seconds
        self._before: Mapping[str, float] | None = None

    def faults(self) -> list[str]:
        """Return faults that waiting doesn't fix: an unproven server, an unknown or unauthorized user, a wrong clock.

        A server that doesn't answer now, or throttles, isn't one of them: the gate waits for it.
        """
        faults = list(self._faults())
        if faults:
            self.close()
        return faults

    def _faults(self) -> Iterator[str]:
        try:
            # A server that has another name can't be proven by its address only.
            context, is_named = kube.tls(self._access), bool(self._access.server_name)
            fault = "" if is_named else server_fault(self._access.server, context, self._clock())
            if fault:
                yield fault
            for path in ("/metrics", f"{REQUESTS}?limit=1", f"{NODES}?limit=1"):
                try:
                    self._client.text(path)
                except kube.KubeError as error:
                    is_unproven = isinstance(error.__cause__, ssl.SSLCertVerificationError)
                    if error.status in _NEVER or (is_unproven and not fault):
                        yield str(error.message)
                    if error.status != 403:
                        return  # the other paths would fail in the same way
        except ssl.SSLError as error:
            yield f"the certificates of the kubeconfig can't be used: {error}"
        except NodeError as error:
            yield str(error.message)

    def read(self) -> Reading:
        try:
            return self._read()
        except NodeError as error:
            return Reading(unread=str(error.message)[:500])
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # JSON, but not an API server's: something in between answered.
            return Reading(unread=f"the answer is not understood: {error!r}"[:500])

    def _read(self) -> Reading:
        counters = count_requests(self._client.text("/metrics"))
        certificates = _gather(self._client, REQUESTS)
        nodes = json.loads(self._client.text(SHOWN_NODES, TABLE))
        before, self._before = self._before, counters
        now = self._clock()
        answered = since(before, counters)
        return Reading(
            requests=answered.all,
            throttled=answered.throttled,
            errors=answered.errors,
            pending=pending_ages(certificates, now),
            fallen=not_ready(nodes, self._joining_seconds),
            nodes=len(shown_nodes(nodes)),
        )

    def close(self) -> None:
        self._client.close()


def server_fault(server: str, context: ssl.SSLContext, now: float) -> str:
    """Return why an API server isn't the one that ``context`` proves, or that our clock is off; otherwise nothing.

    A server that can't be reached from here also counts as without fault. The request carries no credentials.
    """
    try:
        response = fetch.ask(f"{server}/version", headers={}, seconds=_SECONDS, context=context)
        check_clock(response.date, now, _CLOCK_SECONDS)
    except NodeError as error:
        return str(error.message)
    except ssl.SSLCertVerificationError as error:
        return f"{server} is not proven by this CA: {error.verify_message}"
    except OSError:
        pass
    return ""


def _gather(client: kube.Client, path: str) -> list[dict[str, Any]]:
    """Return the fields of each item that are used here."""
    items: list[dict[str, Any]] = []

    def take(item: dict[str, Any]) -> None:
        conditions = item.get("status", {}).get("conditions") or []
        items.append(
            {
                "created": item["metadata"]["creationTimestamp"],
                "signer": (item.get("spec") or {}).get("signerName", ""),
                "conditions": {c["type"]: c.get("status", "True") for c in conditions},
            }
        )

    client.each(path, take)
    return items


def count_requests(metrics: str) -> dict[str, float]:
    """Return how many requests an API server has answered, by HTTP status (``apiserver_request_total``)."""
    counts: dict[str, float] = {}
    for code, value in _COUNTER.findall(metrics):
        counts[code] = counts.get(code, 0.0) + float(value)
    return counts


class Answered(NamedTuple):
    """Requests answered between two counts: all, those with 429, those with 5xx."""

    all: int = 0
    throttled: int = 0
    errors: int = 0


def since(before: Mapping[str, float] | None, now: Mapping[str, float]) -> Answered:
    """Return what was answered between two counts; nothing for a first count, or after the counters started over."""
    if before is None or any(now.get(code, 0.0) < count for code, count in before.items()):
        return Answered()
    new = {code: count - before.get(code, 0.0) for code, count in now.items()}
    errors = sum(count for code, count in new.items() if code.startswith("5"))
    return Answered(round(sum(new.values())), round(new.get("429", 0.0)), round(errors))


def pending_ages(requests: list[dict[str, Any]], now: float) -> tuple[float, ...]:
    """Return the ages in seconds of all undecided requests of joining nodes."""
    return tuple(
        max(0.0, now - _moment(request["created"]))
        for request in requests
        if request["signer"] == SIGNER and not request["conditions"]
    )


def not_ready(table: Mapping[str, Any], joining_seconds: float = JOINING_SECONDS) -> tuple[str, ...]:
    """Return the nodes of a table that aren't Ready, except those that registered only just now.

    Raises ValueError and the like for anything but such a table.
    """
    return tuple(
        node.name for node in shown_nodes(table) if not node.is_ready and _age(node.age) > joining_seconds
    )


class Shown(NamedTuple):
    """A node as people see it, with an ``age`` such as `5m30s`."""

    name: str
    is_ready: bool
    age: str


def shown_nodes(table: Mapping[str, Any]) -> list[Shown]:
    """Return the nodes of a table; raises ValueError and the like for anything but such a table."""
    if table["kind"] != "Table":
        raise ValueError(f"a {table['kind']} of nodes, not a table")
    columns = [column["name"] for column in table["columnDefinitions"]]
    name, status, age = (columns.index(column) for column in ("Name", "Status", "Age"))
    nodes = []
    for cells in (row["cells"] for row in table.get("rows") or []):
        # Such as `NotReady,SchedulingDisabled`.
        is_ready = cells[status].partition(",")[0] == "Ready"
        nodes.append(Shown(cells[name], is_ready, cells[age]))
    return nodes


def _age(text: str) -> float:
    """Return the seconds of an age such as `5m30s`, `3h` or `2y10d`."""
    if text == "<invalid>":
        return 0.0
    match = _AGE.fullmatch(text)
    if not match or not text:
        raise ValueError(f"no age: {text!r}")
    parts = zip(match.groups("0"), _AGE_SECONDS, strict=True)
    return float(sum(int(number) * seconds for number, seconds in parts))


def _moment(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()
