"""Only the right machine becomes a node: broker, gate and today's Kubernetes, against everyone who tries.

API server and controller manager are 1.36.2, with the permissions that the documentation says to grant.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from image_builder.cluster.gate.approver import SIGNER
from image_builder.node.join import binding
from image_builder.node.net import kubeconfig
from image_builder.node.net.kube import STRATEGIC_MERGE, Client, KubeError
from image_builder.node.net.kubeconfig import Access, Pem
from image_builder.pool.steps.control_plane import REQUESTS
from tests.support.azure import attested, identities
from tests.support.control_plane.brokers import (
    GROUP,
    OTHER_VM,
    RIGHTS,
    SECRETS,
    SERVICE_ACCOUNT,
    Broker,
    World,
    brokering,
    open_world,
    whoami,
)
from tests.support.control_plane.gates import (
    GATE,
    Cluster,
    add_policies,
    become_ready,
    give_rights,
    new_node,
    refusal,
    wait_until,
)
from tests.support.images import programs
from tests.support.images.builds import REPO
from tests.support.nodes import joins

pytestmark = pytest.mark.root

JOINING = REPO / "docs/how-to/join-nodes.md"
NODE_A, NODE_B = "vmss-h100-a00000a", "vmss-h100-a00000b"
USAGES = ("digital signature", "client auth")


class Gate:
    """The gate's process. ``lines`` holds its output."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: queue.Queue[str] = queue.Queue()
        self.heard: list[str] = []
        self._process = process
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.put(line)

    def says(self, *words: str) -> bool:
        """Wait until it has logged a line with all of these words."""

        def heard() -> bool:
            while not self.lines.empty():
                self.heard.append(self.lines.get())
            return any(all(word in line for word in words) for line in self.heard)

        return wait_until(heard)


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if programs.DIRECTORY is None:
        pytest.skip(programs.ABSENT)
    cluster: Cluster = request.getfixturevalue("cluster")
    for page in (RIGHTS, JOINING, REPO / "docs/how-to/gate-a-pool.md"):
        give_rights(cluster.admin, page)
    add_policies(cluster.admin, RIGHTS, groups=json.dumps([base64.b64encode(GROUP.encode()).decode()]))
    with open_world(cluster, tmp_path_factory.mktemp("broker")) as state:
        yield state


@pytest.fixture(scope="module")
def broker(world: World) -> Iterator[Broker]:
    with brokering(world) as found:
        yield found


@pytest.fixture(scope="module")
def gate(world: World) -> Iterator[Gate]:
    argv = [sys.executable, "-P", "-m", "image_builder.cli", "gate", "run", "--approve", "--kubeconfig"]
    account = world.cluster.kubeconfig(GATE, "system:serviceaccounts")
    with subprocess.Popen(
        [*argv, os.fspath(account)],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": os.fspath(REPO)},
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            yield Gate(child)
        finally:
            child.terminate()
            assert child.wait(60) == 0


def as_token(world: World, token: str) -> Client:
    """Return a connection of a client that has a bootstrap token."""
    admin = kubeconfig.load(world.cluster.kubeconfig("lab:admin"))
    assert wait_until(lambda: bool(whoami(world, token)))
    return Client(Access(admin.server, admin.authority, token=Pem(token)))


class Asked:
    """A signing request of a client that has a token, and its outcome."""

    def __init__(
        self,
        world: World,
        token: str,
        name: str,
        common: str,
        *,
        groups: Sequence[str] = ("system:nodes",),
        usages: Sequence[str] = USAGES,
        signer: str = SIGNER,
        dns: Sequence[str] = (),
    ) -> None:
        self.world, self.name, self.key = world, name, ec.generate_private_key(ec.SECP256R1())
        subject = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        subject.append(x509.NameAttribute(NameOID.COMMON_NAME, common))
        request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name(subject))
        if dns:
            names = x509.SubjectAlternativeName([x509.DNSName(one) for one in dns])
            request = request.add_extension(names, critical=False)
        manifest = {
            "apiVersion": "certificates.k8s.io/v1",
            "kind": "CertificateSigningRequest",
            "metadata": {"name": name},
            "spec": {
                "request": base64.b64encode(
                    request.sign(self.key, SHA256()).public_bytes(Encoding.PEM)
                ).decode(),
                "signerName": signer,
                "usages": list(usages),
            },
        }
        with as_token(world, token) as client:
            client.request("POST", REQUESTS, manifest)

    @property
    def status(self) -> dict[str, Any]:
        found = self.world.cluster.admin.request("GET", f"{REQUESTS}/{self.name}")
        return dict(found.get("status") or {})

    def certificate(self) -> x509.Certificate:
        """Wait for the signed certificate."""
        assert wait_until(lambda: bool(self.status.get("certificate"))), self.status
        return x509.load_pem_x509_certificate(base64.b64decode(self.status["certificate"]))

    @property
    def is_pending(self) -> bool:
        return self.status == {}


def test_the_machine_that_is_meant_becomes_the_node(world: World, broker: Broker, gate: Gate) -> None:
    node = "vmss-h100-a000001"
    token = broker.ask(node).text
    assert {binding.of_machine(joins.VM_ID), binding.of_node(node)} <= set(as_groups(world, token))
    asked = Asked(world, token, "meant", f"system:node:{node}")
    certificate = asked.certificate()
    assert certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == f"system:node:{node}"
    assert gate.says("meant", f"approved for the node {node}")


def as_groups(world: World, token: str) -> list[str]:
    assert wait_until(lambda: bool(whoami(world, token)))
    return list(whoami(world, token)["groups"])


ATTACKS: dict[str, tuple[dict[str, Any], str]] = {
    "another-node": ({"common": f"system:node:{NODE_B}"}, "not for the node"),
    "control-plane": ({"common": "system:node:control-plane-0"}, "not for the node"),
    "administrator": ({"groups": ("system:masters",)}, "subject"),
    "two-groups": ({"groups": ("system:nodes", "system:masters")}, "subject"),
    "no-group": ({"groups": ()}, "subject"),
    "server": ({"usages": (*USAGES, "server auth")}, "usages"),
    "one-usage": ({"usages": ("client auth",)}, "usages"),
    "names": ({"dns": ("kubernetes.default.svc",)}, "extensions"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_token_is_good_for_one_nodes_certificate(
    world: World, broker: Broker, gate: Gate, attack: str, token_of_a: str
) -> None:
    parts, reason = ATTACKS[attack]
    asked = Asked(world, token_of_a, attack, **{"common": f"system:node:{NODE_A}", **parts})
    assert gate.says(attack, "left pending", reason), gate.heard
    assert asked.is_pending


@pytest.fixture(scope="module")
def token_of_a(broker: Broker, world: World) -> str:
    world.identity = identities.token()
    return broker.ask(NODE_A).text


def test_another_signer_is_not_the_gates_business(world: World, gate: Gate, token_of_a: str) -> None:
    signer = "kubernetes.io/kube-apiserver-client"
    asked = Asked(world, token_of_a, "client", f"system:node:{NODE_A}", signer=signer)
    after = Asked(world, token_of_a, "after", f"system:node:{NODE_B}")
    assert gate.says("after", "left pending") and asked.is_pending and after.is_pending
    assert not any(line.startswith("client ") for line in gate.heard)


def test_a_token_that_no_broker_bound_is_good_for_nothing(world: World, gate: Gate) -> None:
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "bootstrap.kubernetes.io/token",
        "metadata": {"name": "bootstrap-token-abcdef"},
        "stringData": {
            "token-id": "abcdef",
            "token-secret": "0123456789abcdef",
            "usage-bootstrap-authentication": "true",
        },
    }
    world.cluster.admin.request("POST", SECRETS, secret)
    asked = Asked(world, "abcdef.0123456789abcdef", "unbound", "system:node:control-plane-0")
    assert gate.says("unbound", "left pending", "not bound") and asked.is_pending


def test_a_node_that_is_ready_is_nobody_elses_until_it_is_gone(
    world: World, broker: Broker, gate: Gate
) -> None:
    node = "vmss-h100-a000002"
    admin = world.cluster.admin
    admin.request("POST", "/api/v1/nodes", new_node(node))
    become_ready(admin, node, "boot")
    asked = Asked(world, broker.ask(node, OTHER_VM).text, "taken", f"system:node:{node}")
    assert gate.says("taken", "waits", "is Ready") and asked.is_pending
    # The same request is approved as soon as the name is free: a machine that was rebuilt doesn't have to ask again.
    admin.request("DELETE", f"/api/v1/nodes/{node}")
    assert asked.certificate()


def test_a_machine_that_is_a_node_becomes_no_second_one(world: World, broker: Broker, gate: Gate) -> None:
    """A pod that got through to its machine's metadata service only has a document for that machine."""
    vm, node = "0a0b0c0d-1111-4222-8333-444455556666", "vmss-h100-a000003"
    admin = world.cluster.admin
    admin.request("POST", "/api/v1/nodes", new_node(node))
    become_ready(admin, node, "boot")
    # As the firmware of older machines reports it: with the first parts byte-swapped.
    swapped = {"status": {"nodeInfo": {"systemUUID": "0D0C0B0A-1111-2242-8333-444455556666"}}}
    admin.request("PATCH", f"/api/v1/nodes/{node}/status", swapped, "application/merge-patch+json")
    asked = Asked(world, broker.ask("vmss-h100-a000004", vm).text, "second", "system:node:vmss-h100-a000004")
    assert gate.says("second", "waits", f"its machine is the node {node}") and asked.is_pending


def test_a_node_that_is_down_is_no_other_machines(world: World, broker: Broker, gate: Gate) -> None:
    """Each node writes its own id, so a machine that hides its id still doesn't get the name of another one."""
    vm, node = "0a0b0c0d-5555-4222-8333-444455556666", "vmss-h100-a000007"
    admin = world.cluster.admin
    admin.request("POST", "/api/v1/nodes", new_node(node))
    become_ready(admin, node, "boot")
    down = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": ""}
    status = {"conditions": [down], "nodeInfo": {"systemUUID": vm}}
    admin.request("PATCH", f"/api/v1/nodes/{node}/status", {"status": status}, STRATEGIC_MERGE)
    asked = Asked(world, broker.ask(node, OTHER_VM).text, "hidden", f"system:node:{node}")
    assert gate.says("hidden", "waits", "another machine") and asked.is_pending
    # The node's own machine, which was reimaged.
    assert Asked(world, broker.ask(node, vm).text, "reimaged", f"system:node:{node}").certificate()


def test_a_document_is_good_once_for_its_machine_and_its_node(world: World, broker: Broker) -> None:
    node = "vmss-h100-a000005"
    document = broker.document(node)
    assert broker.post("vmss-h100-a000006", document=document)[2]["error"] == "document.nonce"
    assert broker.post(node, OTHER_VM, document)[2]["error"] == "document.machine"
    assert broker.post(node, document=document)[0] == 200
    # Again, and at another broker, which knows nothing about the first one.
    status, after, told = broker.post(node, document=document)
    assert (status, told["error"]) == (409, "document.used") and 1 <= int(after) <= 60
    with brokering(world) as other:
        assert other.post(node, document=document)[2]["error"] == "document.used"
    made_up = attested.document(attested.content("0123456789"))
    assert broker.post(node, document=made_up)[2]["error"] == "document.nonce"


def test_the_gate_reads_no_secret(world: World, gate: Gate) -> None:
    with Client(kubeconfig.load(world.cluster.kubeconfig(GATE, "system:serviceaccounts"))) as client:
        for path in (SECRETS, f"{SECRETS}/bootstrap-token-abcdef"):
            assert refusal(partial(client.request, "GET", path))["status"] == 403


BOUND = f"{binding.of_machine('a')},{binding.of_node('b')}"
KUBEADM = "system:bootstrappers:kubeadm:default-node-token"


def bootstrap(**parts: Any) -> dict[str, Any]:
    """Return a secret as the broker makes it; ``parts`` replace keys of its data, and ``type`` and ``name``."""
    data = {
        "token-id": "zzzzzz",
        "token-secret": "0123456789abcdef",
        "expiration": _in(1800),
        "usage-bootstrap-authentication": "true",
        "usage-bootstrap-signing": "false",
        "auth-extra-groups": BOUND,
    }
    replaced = {name.replace("_", "-"): value for name, value in parts.items()}
    kind = replaced.pop("type", "bootstrap.kubernetes.io/token")
    meta = {
        "name": replaced.pop("name", "bootstrap-token-zzzzzz"),
        "labels": {"app.kubernetes.io/managed-by": "image-builder-broker"},
        **replaced.pop("metadata", {}),
    }
    whole = {name: value for name, value in {**data, **replaced}.items() if value is not None}
    return {"apiVersion": "v1", "kind": "Secret", "type": kind, "metadata": meta, "stringData": whole}


def _in(seconds: float) -> str:
    from datetime import UTC, datetime, timedelta

    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


OTHER_SECRETS: dict[str, dict[str, Any]] = {
    "an account's token": {
        "type": "kubernetes.io/service-account-token",
        "name": "loot",
        "metadata": {"annotations": {"kubernetes.io/service-account.name": "default"}},
    },
    "anything": {"type": "Opaque", "name": "anything"},
    "a token by a name that is none": {"name": "bootstrap-token-abc"},
    "a token that lives for a day": {"expiration": _in(86400)},
    "a token that lives for ever": {"expiration": None},
    "a token that signs": {"usage-bootstrap-signing": "true"},
    "a token that is bound to nothing": {"auth-extra-groups": None},
    "a token that is bound to a machine alone": {"auth-extra-groups": binding.of_machine("a")},
    "somebody else's token": {"metadata": {"labels": {}}},
    **{
        f"a token whose groups end with {more}": {"auth-extra-groups": f"{BOUND}{more}"}
        for more in (
            f",{KUBEADM}",
            f",{GROUP},{KUBEADM}",
            f",{KUBEADM},{GROUP}",
            ",",
            f",{GROUP},",
            f",{GROUP}0",
        )
    },
    # As long as the digits that belong there.
    "a token with a group for digits": {
        "auth-extra-groups": f"{binding.MACHINE}{f'0,{KUBEADM},':f<64},{binding.of_node('b')}"
    },
    "a token with a group for the last digits": {
        "auth-extra-groups": f"{binding.of_machine('a')},{binding.NODE}{f',{KUBEADM}':f>64}"
    },
}


@pytest.mark.parametrize("parts", OTHER_SECRETS.values(), ids=OTHER_SECRETS)
def test_the_broker_makes_no_other_secret(world: World, parts: dict[str, Any]) -> None:
    client = world.cluster.client(SERVICE_ACCOUNT, "system:serviceaccounts")
    # The policy takes effect a moment after its creation.
    assert wait_until(lambda: _status(client, bootstrap(type="Opaque", name="probe")) == 422)
    found = refusal(lambda: client.request("POST", SECRETS, bootstrap(**parts)))
    assert found["status"] == 422 and "image-builder-broker" in found["message"], found


def _status(client: Client, secret: dict[str, Any]) -> int:
    try:
        client.request("POST", SECRETS, secret)
    except KubeError as error:
        return error.status
    return 200


def test_the_broker_reads_and_changes_and_deletes_nothing(world: World) -> None:
    client = world.cluster.client(SERVICE_ACCOUNT, "system:serviceaccounts")
    world.cluster.admin.request("POST", SECRETS, bootstrap())
    path, others = f"{SECRETS}/bootstrap-token-zzzzzz", f"{SECRETS}/others"
    opaque = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "others"}}
    world.cluster.admin.request("POST", SECRETS, opaque)
    for method, where in (("GET", SECRETS), ("GET", path), ("DELETE", path), ("DELETE", SECRETS)):
        assert refusal(partial(client.request, method, where))["status"] == 403
    # Whatever else a role grants it, the policy still holds.
    _give_more(world.cluster.admin)
    assert wait_until(lambda: _can_read(client, others))
    patch = {"stringData": {"a": "b"}}
    denied = refusal(lambda: client.request("PATCH", path, patch, "application/merge-patch+json"))
    assert denied["status"] == 422 and "changes no secret" in denied["message"]
    denied = refusal(lambda: client.request("DELETE", others))
    assert denied["status"] == 422 and "deletes" in denied["message"]
    client.request("DELETE", path)


def _can_read(client: Client, path: str) -> bool:
    try:
        client.request("GET", path)
    except KubeError:
        return False
    return True


def _give_more(admin: Client) -> None:
    base = "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system"
    rule = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["*"]}
    admin.request("POST", f"{base}/roles", {"metadata": {"name": "more"}, "rules": [rule]})
    _, _, _, account = SERVICE_ACCOUNT.split(":")
    binding_ = {
        "metadata": {"name": "more"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "more"},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": "kube-system"}],
    }
    admin.request("POST", f"{base}/rolebindings", binding_)
