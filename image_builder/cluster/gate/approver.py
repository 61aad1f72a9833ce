"""The gate's approver: approves the first certificate of a node's kubelet, if its token is bound to exactly that node.

It approves; the controller manager signs. It reads no secrets and denies nothing: requests that it may not approve are
left to other approvers. What a request claims (its subject) is compared with what the API server wrote into it: whose
token it was, and what that token is bound to. The comparison does no I/O.
https://kubernetes.io/docs/reference/access-authn-authz/certificate-signing-requests/.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from image_builder.cluster.gate.watcher import Watcher
from image_builder.drain.pods import moment
from image_builder.node.errors import NodeError
from image_builder.node.join import binding
from image_builder.node.net.kube import CONFLICT, MERGE_PATCH, NOT_FOUND, Client, KubeError, path_of_node
from image_builder.text import stamp

SIGNER = "kubernetes.io/kube-apiserver-client-kubelet"
# The usages of a kubelet's certificate, with an RSA key and with others.
_USAGES = (
    frozenset({"digital signature", "key encipherment", "client auth"}),
    frozenset({"digital signature", "client auth"}),
)
_USER = re.compile(r"system:bootstrap:[a-z0-9]{6}")
_GROUPS = frozenset({"system:bootstrappers", "system:authenticated"})
_NODES, _NODE = "system:nodes", "system:node:"
_PATH = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
# The time until another look at a request that waits for a node to go, or whose approval failed.
_PAUSE = 5.0
# A node that joins again waits until its old self has missed its lease: 50 s by default. A request that is made long
# before that isn't the machine's own: whoever made it waits for the node to fall.
_KEPT = 120.0
_IDLE = 0.5

Connect = Callable[[], Client]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Pending:
    """An undecided request. ``groups``, ``user`` and ``created`` (Unix time) were written by the API server."""

    name: str
    version: str
    signer: str
    user: str
    groups: frozenset[str]
    usages: tuple[str, ...]
    request: bytes
    created: float = 0.0


@dataclass(frozen=True)
class Bound:
    """A request that may be approved: for this node, and the machine (as a group of ``binding``)."""

    node: str
    machine: str


@dataclass(frozen=True)
class Member:
    """A Node object: its name, whether it is Ready and since when (Unix time, 0: unknown), and the machine, for each
    way in which firmware writes its id.
    """

    name: str
    is_ready: bool
    machines: frozenset[str]
    since: float = 0.0


class UnboundError(Exception):
    """The gate may not approve a request, and leaves it as it is: another approver may decide about it."""


def pending_from(document: Mapping[str, Any]) -> Pending | None:
    """Return the part of a CertificateSigningRequest that matters; None if it has been decided."""
    spec, status = document.get("spec") or {}, document.get("status") or {}
    if status.get("conditions") or status.get("certificate"):
        return None
    try:
        request = base64.b64decode(spec.get("request") or "", validate=True)
    except binascii.Error:
        request = b""
    return Pending(
        document["metadata"]["name"],
        str(document["metadata"].get("resourceVersion", "")),
        str(spec.get("signerName", "")),
        str(spec.get("username", "")),
        frozenset(map(str, spec.get("groups") or ())),
        tuple(map(str, spec.get("usages") or ())),
        request,
        moment(document["metadata"].get("creationTimestamp")) or 0.0,
    )


def member_from(document: Mapping[str, Any]) -> Member:
    """Return the part of a Node object that matters."""
    status = document.get("status") or {}
    ready: Mapping[str, Any] = next(
        (c for c in status.get("conditions") or [] if c.get("type") == "Ready"), {}
    )
    return Member(
        document["metadata"]["name"],
        ready.get("status") == "True",
        _machines(str((status.get("nodeInfo") or {}).get("systemUUID", ""))),
        moment(ready.get("lastTransitionTime")) or 0.0,
    )


def _machines(system_uuid: str) -> frozenset[str]:
    """Return the groups of a machine's tokens. Older firmware reverses the bytes of the id's first three parts."""
    try:
        machine_id = uuid.UUID(system_uuid)
    except ValueError:
        return frozenset()
    return frozenset(
        binding.of_machine(str(form)) for form in (machine_id, uuid.UUID(bytes=machine_id.bytes_le))
    )


def check(pending: Pending) -> Bound:
    """Return the node and machine that a request is for. Raises UnboundError if the gate may not approve it."""
    if pending.signer != SIGNER:
        raise UnboundError(f"it is for the signer {pending.signer}")
    if not _USER.fullmatch(pending.user) or not pending.groups >= _GROUPS:
        raise UnboundError(f"{pending.user} is not a bootstrap token")
    machines, nodes = (
        [group for group in pending.groups if group.startswith(prefix)]
        for prefix in (binding.MACHINE, binding.NODE)
    )
    if len(machines) != 1 or len(nodes) != 1:
        raise UnboundError("its token is not bound to one machine and one node")
    if len(set(pending.usages)) != len(pending.usages) or frozenset(pending.usages) not in _USAGES:
        raise UnboundError(f"its usages are not a kubelet's: {', '.join(pending.usages)}")
    name = _subject(pending.request)
    if binding.of_node(name) != nodes[0]:
        raise UnboundError(f"its token is not for the node {name}")
    return Bound(name, machines[0])


def _subject(request: bytes) -> str:
    """Return the node that a request (PEM) names. Raises UnboundError."""
    try:
        csr = x509.load_pem_x509_csr(request)
        is_signed, attributes = csr.is_signature_valid, list(csr.attributes)
        subject = [(attribute.oid, attribute.value) for attribute in csr.subject]
    except (ValueError, TypeError, x509.InvalidVersion, UnsupportedAlgorithm) as error:
        raise UnboundError("it is not a certificate request") from error
    # The signer's parser finds a block by other rules: of two, or with text around it, it may sign another request.
    if csr.public_bytes(Encoding.PEM) != request:
        raise UnboundError("it is not exactly one PEM block")
    if not is_signed:
        raise UnboundError("it is not signed with its own key")
    # Further names would be extensions, in any number of attributes; a kubelet's request has none at all.
    if attributes:
        raise UnboundError("it asks for extensions")
    named = [value for oid, value in subject if oid == NameOID.COMMON_NAME]
    groups = [value for oid, value in subject if oid == NameOID.ORGANIZATION_NAME]
    if len(subject) != 2 or groups != [_NODES] or len(named) != 1:
        raise UnboundError("its subject is not a node's")
    name = str(named[0])
    if not name.startswith(_NODE) or name == _NODE:
        raise UnboundError("its subject is not a node's")
    return name.removeprefix(_NODE)


def check_age(pending: Pending, bound: Bound, members: Iterable[Member], seen: float) -> None:
    """Raise UnboundError if a request was made while its node was Ready, and long before that fell.

    ``seen`` is for how many seconds the request has been known here. Times of the API server and of the controller
    manager, which wrote when the node fell, are compared with each other only.
    """
    member = next((member for member in members if member.name == bound.node), None)
    if member is None:
        return
    age = seen if member.is_ready else member.since - pending.created
    if age > _KEPT and (member.is_ready or (member.since and pending.created)):
        raise UnboundError(
            f"the node {bound.node} was Ready for more than {_KEPT:.0f} s after it: if that is to join, delete it"
        )


def reason_to_wait(bound: Bound, members: Iterable[Member]) -> str:
    """Return why a request can't be approved as long as these nodes exist; empty if it can."""
    for member in members:
        if member.name == bound.node and member.is_ready:
            return f"the node {bound.node} is Ready"
        # A reimaged machine keeps its id. Each node writes only its own: this one is that of the name's machine.
        if member.name == bound.node and member.machines and bound.machine not in member.machines:
            return f"the node {bound.node} is another machine: if that is gone, delete its Node object"
        if member.name != bound.node and bound.machine in member.machines:
            return f"its machine is the node {member.name}"
    return ""


def path_of(name: str = "") -> str:
    """Return the API server's path of the signing requests, or of the approval of one of them."""
    return f"{_PATH}/{name}/approval" if name else _PATH


def approval(pending: Pending, bound: Bound, now: str) -> dict[str, Any]:
    """Return the merge patch that approves a request, provided that it hasn't changed since it was read."""
    condition = {
        "type": "Approved",
        "status": "True",
        "reason": "BoundToken",
        "message": f"{pending.user} is bound to the node {bound.node} and its machine",
        "lastUpdateTime": now,
        "lastTransitionTime": now,
    }
    return {
        "metadata": {"resourceVersion": pending.version},
        "status": {"conditions": [condition]},
    }


# -- approving -------------------------------------------------------------------------------------------------


class Approver:
    """Runs until it is stopped. ``leads`` returns whether this process may act; ``connect`` opens a connection.

    ``see`` is to be called with each Node object, by name, and None for one that is gone; ``nodes_known`` returns
    whether all are known.
    """

    def __init__(
        self, connect: Connect, leads: Callable[[], bool], nodes_known: Callable[[], bool], tell: Tell
    ) -> None:
        self._client = connect()
        self._leads, self._nodes_known, self._tell = leads, nodes_known, tell
        self._lock = threading.Condition()
        self._due: dict[str, float] = {}
        # When each request was first seen, on the monotonic clock, and those that are left pending for good.
        self._seen: dict[str, float] = {}
        self._left: set[str] = set()
        self._members: dict[str, Member] = {}
        self._reports: dict[str, str] = {}
        selector = {"fieldSelector": f"spec.signerName={SIGNER}"}
        self._requests = Watcher(
            connect(), path_of(), selector, pending_from, self._changed, self._removed, tell
        )

    def see(self, name: str, document: Mapping[str, Any] | None) -> None:
        """Take note of a Node object, from any thread."""
        if document is None:
            self._members.pop(name, None)
            return
        try:
            self._members[name] = member_from(document)
        except (
            Exception
        ) as error:  # nodes write their own objects; one that can't be read is looked at when it joins
            self._tell(f"{name} can't be read: {error!r:.300}")

    def run(self, stop: threading.Event) -> None:
        """Run until ``stop`` is set; return early only if the watcher's thread has died."""
        thread = threading.Thread(target=self._requests.run, args=(stop,), daemon=True)
        thread.start()
        try:
            while not stop.is_set() and thread.is_alive():
                self._once(stop)
        finally:
            self._requests.interrupt()
            self._client.close()

    def _once(self, stop: threading.Event) -> None:
        ready = self._requests.synced.is_set() and self._nodes_known()
        name = self._next() if ready and self._leads() else None
        pending = self._requests.objects.get(name) if name else None
        if pending is None:
            stop.wait(_IDLE / 5)
        else:
            self._settle(pending)

    def _changed(self, pending: Pending) -> None:
        with self._lock:
            self._due[pending.name] = time.monotonic()
            self._seen.setdefault(pending.name, time.monotonic())
            self._lock.notify()

    def _removed(self, name: str) -> None:
        with self._lock:
            self._due.pop(name, None)
            self._seen.pop(name, None)
            self._left.discard(name)
            self._reports.pop(name, None)

    def _next(self) -> str | None:
        """Return the name of the next request to look at; None after a short while without one."""
        with self._lock:
            now = time.monotonic()
            name = min(self._due, key=self._due.__getitem__, default=None)
            if name is None or self._due[name] > now:
                self._lock.wait(_IDLE)
                return None
            del self._due[name]
        return name

    def _settle(self, pending: Pending) -> None:
        """Approve a request, or report why not, and look again later if that may change."""
        if pending.name in self._left:
            return
        try:
            bound = check(pending)
            members = self._nodes(bound)
            check_age(pending, bound, members, time.monotonic() - self._seen.get(pending.name, math.inf))
            if reason := reason_to_wait(bound, members):
                self._say(pending, f"waits: {reason}")
                self._later(pending)
                return
            self._client.request(
                "PATCH", path_of(pending.name), approval(pending, bound, _now()), MERGE_PATCH
            )
        except UnboundError as error:
            # What it says, and that it is old, never changes.
            self._left.add(pending.name)
            self._say(pending, f"left pending: {error}")
            return
        except NodeError as error:
            if not isinstance(error, KubeError) or error.status not in (NOT_FOUND, CONFLICT):
                self._say(pending, f"not approved: {error.message}")
            self._later(pending)
            return
        self._say(pending, f"approved for the node {bound.node}")

    def _nodes(self, bound: Bound) -> list[Member]:
        """Return all nodes, the one that the request is for freshly read. Raises KubeError."""
        others = [member for name, member in list(self._members.items()) if name != bound.node]
        document = self._client.find(path_of_node(bound.node))
        return [member_from(document), *others] if document else others

    def _later(self, pending: Pending) -> None:
        with self._lock:
            if pending.name in self._requests.objects:
                self._due.setdefault(pending.name, time.monotonic() + _PAUSE)

    def _say(self, pending: Pending, text: str) -> None:
        with self._lock:
            is_new = self._reports.get(pending.name) != text
            # The watcher may already have removed a request that was approved.
            if is_new and pending.name in self._requests.objects:
                self._reports[pending.name] = text
        if is_new:
            self._tell(f"{pending.name} of {pending.user}: {text}")


def _now() -> str:
    return stamp(time.time())
