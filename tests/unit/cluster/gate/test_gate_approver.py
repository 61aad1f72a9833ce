"""The signing requests that the gate approves: those of a node for itself, with a token that is bound to it."""

from __future__ import annotations

import base64
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import AttributeOID, NameOID

from image_builder.cluster.gate.approver import (
    SIGNER,
    Approver,
    Bound,
    Member,
    UnboundError,
    approval,
    check,
    member_from,
    path_of,
    pending_from,
    reason_to_wait,
)
from image_builder.cluster.gate.model import Rules
from image_builder.cluster.gate.watcher import watch_nodes
from image_builder.node.join import binding
from image_builder.node.net.kube import Client
from tests.support.nodes.joins import VM_ID

MADE = 1_700_000_000.0
NODE = "vmss-h100-a000017"
MACHINE = binding.of_machine(VM_ID)
GROUPS = ["system:authenticated", "system:bootstrappers", MACHINE, binding.of_node(NODE)]
BOUND = Bound(NODE, MACHINE)
# The machine's id as firmware reports it: in older machines with the bytes of the first parts reversed.
IDS = [VM_ID, VM_ID.upper(), "a4b8aa02-ef74-6e47-8182-f6d2ba4166a6"]


def pem(
    common: Sequence[str] = (f"system:node:{NODE}",),
    groups: Sequence[str] = ("system:nodes",),
    units: Sequence[str] = (),
    extension: x509.ExtensionType | None = None,
    attribute: tuple[x509.ObjectIdentifier, bytes] | None = None,
) -> bytes:
    names = [
        *(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups),
        *(x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit) for unit in units),
        *(x509.NameAttribute(NameOID.COMMON_NAME, name) for name in common),
    ]
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name(names))
    if extension:
        builder = builder.add_extension(extension, critical=False)
    if attribute:
        builder = builder.add_attribute(*attribute)
    return builder.sign(ec.generate_private_key(ec.SECP256R1()), SHA256()).public_bytes(Encoding.PEM)


def changed(old: bytes, new: bytes) -> bytes:
    """Return a request of which some bytes were changed, before it became PEM."""
    der = x509.load_pem_x509_csr(pem()).public_bytes(Encoding.DER)
    assert der.count(old) == 1
    text = base64.b64encode(der.replace(old, new)).decode()
    lines = "\n".join(text[at : at + 64] for at in range(0, len(text), 64))
    return f"-----BEGIN CERTIFICATE REQUEST-----\n{lines}\n-----END CERTIFICATE REQUEST-----\n".encode()


def at(seconds: float) -> str:
    """Return a time after the request was made, as the API server writes it."""
    return datetime.fromtimestamp(MADE + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def request(data: bytes | None = None, **parts: Any) -> dict[str, Any]:
    """Return a request as the API server returns it; ``parts`` replace keys of its spec."""
    spec = {
        "request": base64.b64encode(pem() if data is None else data).decode(),
        "signerName": SIGNER,
        "username": "system:bootstrap:abcdef",
        "groups": GROUPS,
        "usages": ["digital signature", "client auth"],
        **parts,
    }
    meta = {"name": "node-csr-x", "resourceVersion": "7", "creationTimestamp": at(0)}
    return {"metadata": meta, "spec": spec, "status": {}}


def test_a_node_that_asks_for_itself_is_meant() -> None:
    pending = pending_from(request())
    assert pending and check(pending) == BOUND
    rsa = pending_from(request(usages=["key encipherment", "digital signature", "client auth"]))
    assert rsa and check(rsa) == BOUND
    patch = approval(pending, BOUND, "2026-11-23T00:00:00Z")
    # The patch covers the version that was checked, and no later one.
    assert patch["metadata"] == {"resourceVersion": "7"}
    assert [condition["type"] for condition in patch["status"]["conditions"]] == ["Approved"]


def test_what_is_decided_is_left_alone() -> None:
    for status in ({"conditions": [{"type": "Denied"}]}, {"certificate": "LS0t"}):
        assert pending_from({**request(), "status": status}) is None


OTHER_NODE, OTHER_MACHINE = binding.of_node("vmss-h100-a000018"), binding.of_machine("0" * 36)
SAN = x509.SubjectAlternativeName([x509.DNSName("kubernetes.default.svc")])
PENDING: dict[str, tuple[dict[str, Any], str]] = {
    "another signer": (request(signerName="kubernetes.io/kube-apiserver-client"), "signer"),
    "a serving certificate": (request(signerName="kubernetes.io/kubelet-serving"), "signer"),
    "a node that renews": (request(username=f"system:node:{NODE}"), "not a bootstrap token"),
    "an account": (request(username="system:serviceaccount:a:b"), "not a bootstrap token"),
    "nobody": (request(groups=GROUPS[1:]), "not a bootstrap token"),
    "no bootstrapper": (request(groups=[GROUPS[0], *GROUPS[2:]]), "not a bootstrap token"),
    "a token that is bound to nothing": (request(groups=GROUPS[:2]), "not bound"),
    "a token of no machine": (request(groups=[*GROUPS[:2], GROUPS[3]]), "not bound"),
    "a token of no node": (request(groups=GROUPS[:3]), "not bound"),
    "a token of two nodes": (request(groups=[*GROUPS, OTHER_NODE]), "not bound"),
    "a token of two machines": (request(groups=[*GROUPS, OTHER_MACHINE]), "not bound"),
    "another node's token": (request(groups=[*GROUPS[:3], OTHER_NODE]), "not for the node"),
    "the control plane": (request(pem(["system:node:control-plane-0"])), "not for the node"),
    "a usage more": (request(usages=["digital signature", "client auth", "server auth"]), "usages"),
    "a usage less": (request(usages=["client auth"]), "usages"),
    "a usage twice": (request(usages=["digital signature", "client auth", "client auth"]), "usages"),
    "no usage": (request(usages=[]), "usages"),
    "another group": (request(pem(groups=["system:masters"])), "subject"),
    "a group more": (request(pem(groups=["system:nodes", "system:masters"])), "subject"),
    "no group": (request(pem(groups=[])), "subject"),
    "no name": (request(pem([])), "subject"),
    "two names": (request(pem([f"system:node:{NODE}", "system:node:control-plane-0"], [])), "subject"),
    "a user": (request(pem(["kubernetes-admin"])), "subject"),
    "a node without a name": (request(pem(["system:node:"])), "subject"),
    "a unit": (request(pem(units=["system:masters"])), "subject"),
    "names of a server": (request(pem(extension=SAN)), "extensions"),
    "any extension": (request(pem(extension=x509.BasicConstraints(True, None))), "extensions"),
    "any attribute": (request(pem(attribute=(AttributeOID.CHALLENGE_PASSWORD, b"x"))), "extensions"),
    "no request": (request(b""), "not a certificate request"),
    "text": (request(b"-----BEGIN CERTIFICATE REQUEST-----\n"), "not a certificate request"),
    "no base64": (request(request="%"), "not a certificate request"),
    "another version": (request(changed(b"\2\1\0\x30", b"\2\1\1\x30")), "not a certificate request"),
    "another kind of key": (
        request(changed(b"\x2a\x86\x48\xce\x3d\2\1", b"\x2a\x86\x48\xce\x3d\2\x7f")),
        "not a certificate request",
    ),
    "a request the signer skips": (request(b"x" + pem() + pem(["system:node:other"])), "one PEM block"),
    "two requests": (request(pem() + pem(["system:node:other"])), "one PEM block"),
    "a block with text behind its end": (request(pem().rstrip() + b"x\n"), "one PEM block"),
    "a line of text before it": (request(b"x\n" + pem()), "one PEM block"),
    "another kind of block": (request(pem().replace(b"CERTIFICATE", b"NEW CERTIFICATE")), "one PEM block"),
}


@pytest.mark.parametrize(("changes", "reason"), PENDING.values(), ids=PENDING)
def test_everything_else_stays_pending(changes: dict[str, Any], reason: str) -> None:
    pending = pending_from(changes)
    assert pending
    with pytest.raises(UnboundError, match=reason):
        check(pending)


def test_a_request_that_is_not_signed_by_its_own_key_stays_pending() -> None:
    data = changed(NODE.encode(), b"vmss-h100-a000018")
    pending = pending_from(request(data, groups=[*GROUPS[:3], OTHER_NODE]))
    assert pending
    with pytest.raises(UnboundError, match="not signed with its own key"):
        check(pending)


def node(name: str, ready: str = "True", uuid: str = "") -> Member:
    conditions = [{"type": "MemoryPressure", "status": "True"}, {"type": "Ready", "status": ready}]
    status = {"conditions": conditions, "nodeInfo": {"systemUUID": uuid}}
    return member_from({"metadata": {"name": name}, "status": status})


def test_a_name_that_a_ready_node_has_is_waited_for() -> None:
    assert reason_to_wait(BOUND, []) == ""
    assert "is Ready" in reason_to_wait(BOUND, [node("other"), node(NODE)])
    assert reason_to_wait(BOUND, [node(NODE, "Unknown"), node("other")]) == ""


@pytest.mark.parametrize("uuid", IDS)
def test_a_reimaged_machine_becomes_its_own_node_again(uuid: str) -> None:
    assert reason_to_wait(BOUND, [node(NODE, "False", uuid)]) == ""


def test_a_name_that_another_machine_has_is_waited_for() -> None:
    """Root of a pool's node writes another id into its own status, and requests the name of a node that is down."""
    liar = node("other", uuid="99999999-2222-4333-8444-555555555555")
    for status in ("False", "Unknown"):
        victim = node(NODE, status, "11111111-2222-4333-8444-555555555555")
        assert "another machine" in reason_to_wait(BOUND, [victim, liar])


@pytest.mark.parametrize("uuid", IDS)
def test_a_machine_that_is_a_node_is_no_second_one(uuid: str) -> None:
    for ready in ("True", "False"):
        assert "its machine is the node other" in reason_to_wait(BOUND, [node("other", ready, uuid)])
    assert reason_to_wait(BOUND, [node("other", uuid="11111111-2222-4333-8444-555555555555")]) == ""
    assert node("other", uuid="no id").machines == frozenset()


def test_a_request_that_is_gone_leaves_nothing_behind() -> None:
    """The watcher may hear of an approval before the approver has its answer."""
    said: list[str] = []
    connect: Any = lambda: None  # noqa: E731
    approver = Approver(connect, lambda: True, lambda: True, said.append)
    pending = pending_from(request())
    assert pending
    approver._requests.objects[pending.name] = pending
    for text in ("waits", "waits"):
        approver._say(pending, text)
    assert len(said) == 1 and approver._reports
    approver._requests._drop(pending.name)
    approver._say(pending, "approved")
    assert said[1:] == ["node-csr-x of system:bootstrap:abcdef: approved"] and not approver._reports


class Api:
    """An API server without nodes. ``patched`` has the path of each patch and the types of its conditions."""

    def __init__(self) -> None:
        self.patched: list[tuple[str, list[str]]] = []

    def find(self, _path: str) -> None:
        return None

    def request(self, method: str, path: str, body: Any, *_: object) -> None:
        assert method == "PATCH"
        self.patched.append((path, [condition["type"] for condition in body["status"]["conditions"]]))


def approver_of(api: Api, said: list[str], lacks: str = "") -> Approver:
    """Return an approver that knows one request."""
    approver = Approver(
        lambda: cast("Client", api), lambda: lacks != "the lease", lambda: lacks != "the nodes", said.append
    )
    pending = pending_from(request())
    assert pending
    approver._requests.objects[pending.name] = pending
    approver._changed(pending)
    if lacks != "the requests":
        approver._requests.synced.set()
    return approver


def once(approver: Approver) -> None:
    over = threading.Event()
    over.set()
    approver._once(over)


@pytest.mark.parametrize("lacks", ["", "the lease", "the requests", "the nodes"])
def test_nothing_is_approved_without_the_lease_or_before_everything_was_read(lacks: str) -> None:
    api = Api()
    once(approver_of(api, [], lacks))
    path = path_of("node-csr-x")
    assert path.endswith("/certificatesigningrequests/node-csr-x/approval")
    assert api.patched == ([] if lacks else [(path, ["Approved"])])


class Standing(Api):
    """An API server with the node that the request is for. ``fell`` is when it stopped to be Ready (0: it hasn't)."""

    fell = 0.0

    def find(self, _path: str) -> Any:
        ready = {
            "type": "Ready",
            "status": "Unknown" if self.fell else "True",
            "lastTransitionTime": at(self.fell),
        }
        return {"metadata": {"name": NODE}, "status": {"conditions": [ready]}}


@pytest.mark.parametrize(
    ("fell", "approved"), [(-3600, True), (1, True), (50, True), (120, True), (121, False), (86_400, False)]
)
def test_a_request_that_waited_for_its_node_to_fall_is_left(
    monkeypatch: pytest.MonkeyPatch, fell: float, *, approved: bool
) -> None:
    """Looked at every five seconds, by an approver that sees everything, and by one that starts when the node fell."""
    monkeypatch.setattr("image_builder.cluster.gate.approver._IDLE", 0.0)
    for begins in (0.0, fell):
        api, clock, said = Standing(), [0.0], list[str]()
        monkeypatch.setattr("image_builder.cluster.gate.approver.time.monotonic", lambda: clock[0])  # noqa: B023
        approver = approver_of(api, said)
        ends = max(fell, begins)
        for now in (*range(int(begins), min(int(ends), 300), 5), ends, ends + 6):
            clock[0] = now - begins
            api.fell = fell if now >= fell else 0.0
            once(approver)
        assert bool(api.patched) is approved, begins
        assert any("left pending: the node" in line for line in said) is not approved


def test_a_request_that_is_made_again_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    api, clock, said = Standing(), [0.0], list[str]()
    monkeypatch.setattr("image_builder.cluster.gate.approver.time.monotonic", lambda: clock[0])
    approver = approver_of(api, said)
    clock[0] = 121.0
    once(approver)
    pending = approver._requests.objects["node-csr-x"]
    assert "left pending" in said[-1]
    approver._requests._drop(pending.name)
    approver._requests.objects[pending.name] = pending
    approver._changed(pending)
    api.fell = 20.0
    once(approver)
    assert api.patched


def test_all_nodes_are_seen_by_the_one_watch() -> None:
    """Also those that the gate doesn't handle: a machine may be a node of another kind."""
    approver = Approver(lambda: cast("Client", Api()), lambda: True, lambda: True, print)
    handled: list[str] = []
    watch = watch_nodes(
        cast("Client", Api()), Rules(), lambda n: handled.append(n.name), handled.remove, print, approver.see
    )
    status = {"nodeInfo": {"systemUUID": VM_ID}}
    mine = {
        "metadata": {"name": "a", "labels": {Rules().label: ""}, "resourceVersion": "1"},
        "status": status,
    }
    other = {"metadata": {"name": "b", "resourceVersion": "2"}, "status": status}
    for item in (mine, other):
        watch._event({"type": "ADDED", "object": item})
    assert handled == ["a"] and [member.name for member in approver._nodes(BOUND)] == ["a", "b"]
    assert "its machine is the node b" in reason_to_wait(
        BOUND, [m for m in approver._nodes(BOUND) if m.name == "b"]
    )
    for item in (mine, other):
        watch._event({"type": "DELETED", "object": item})
    assert not handled and approver._nodes(BOUND) == []
