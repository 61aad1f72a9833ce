"""What the accounts may change, whatever a role gives them: deploy/admission.yml, on a current API server."""

from __future__ import annotations

import base64
import time
from functools import partial
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from image_builder.cluster.gate import approver
from image_builder.drain import fence, quarantine, taint
from image_builder.node.join import binding
from image_builder.node.net.kube import MERGE_PATCH, Client, KubeError, path_of_node
from image_builder.pool.steps.control_plane import REQUESTS, SIGNER
from image_builder.text import stamp
from tests.support.control_plane.gates import (
    GATE,
    Cluster,
    collection,
    give_rights,
    new_node,
    refusal,
    wait_until,
)
from tests.support.images import programs
from tests.support.images.builds import REPO

pytestmark = [pytest.mark.root, programs.needs_programs]

ACCOUNTS = ("gate", "drain", "roll", "repair")
NODE, CONTROL = "gpu-1", "control-1"
FOREIGN = {"key": "example.com/broken", "effect": "NoSchedule"}
PROVIDER = "azure:///subscriptions/s/virtualMachines/1"
BOUND = [binding.of_machine("a"), binding.of_node("b")]


@pytest.fixture(scope="module")
def admin(cluster: Cluster) -> Client:
    """Give each account its documented rights, and then all that a mistaken role could."""
    give_rights(cluster.admin)
    give_rights(cluster.admin, REPO / "docs/how-to/join-nodes.md")
    for command in ACCOUNTS[1:]:
        give_rights(cluster.admin, REPO / f"deploy/{command}.yml")
    rules = [
        {"apiGroups": ["", "certificates.k8s.io"], "resources": ["*"], "verbs": ["*"]},
        {"apiGroups": ["certificates.k8s.io"], "resources": ["signers"], "verbs": ["*"]},
    ]
    meta = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "mistaken"}}
    subjects = [
        {"kind": "User", "name": account(name), "apiGroup": "rbac.authorization.k8s.io"} for name in ACCOUNTS
    ]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "mistaken"}
    for manifest in (
        {**meta, "kind": "ClusterRole", "rules": rules},
        {**meta, "kind": "ClusterRoleBinding", "roleRef": role, "subjects": subjects},
    ):
        cluster.admin.request("POST", collection(manifest), manifest)
    for name, labels in ((NODE, {}), (CONTROL, {"node-role.kubernetes.io/control-plane": ""})):
        node = new_node(name, **labels)
        node["metadata"]["annotations"] = {"example.com/rack": "7"}
        node["spec"] = {"taints": [FOREIGN], "providerID": PROVIDER}
        cluster.admin.request("POST", "/api/v1/nodes", node)
    return cluster.admin


def account(name: str) -> str:
    return f"{GATE.removesuffix('gate')}{name}"


@pytest.fixture(scope="module", params=ACCOUNTS)
def client(request: pytest.FixtureRequest, cluster: Cluster, admin: Client) -> Client:
    """An account's connection, once the policy has taken effect for it."""
    made = cluster.client(account(request.param), "system:serviceaccounts")
    patch = partial(
        made.request, "PATCH", path_of_node(NODE), {"metadata": {"labels": {"a": "b"}}}, MERGE_PATCH
    )

    def is_refused() -> bool:
        try:
            patch()
        except KubeError as error:
            return error.status == 422
        admin.request("PATCH", path_of_node(NODE), {"metadata": {"labels": {"a": None}}}, MERGE_PATCH)
        return False

    assert wait_until(is_refused)
    return made


def test_what_the_code_does_is_admitted(client: Client, admin: Client) -> None:
    """Cordon, taint, quarantine and the way back, by the code's own patches."""
    record, patch = fence.cordon(client.node(NODE), "roll-1", time.time())
    assert fence.send(client, NODE, patch) and record
    assert taint.bar(client, NODE, "roll-1")
    out = quarantine.Record("NodeHealthy", "GpuLost", "", "drain", time.time(), "boot", 0.0)
    assert fence.send(client, NODE, quarantine.take_out(client.node(NODE), out))
    assert fence.send(client, NODE, quarantine.give_back(client.node(NODE)))
    assert taint.lift(client, NODE) and fence.free(client, NODE, "roll-1")
    node = admin.node(NODE)
    assert node["spec"]["taints"][0] == FOREIGN and fence.record_of(node) is None
    assert not fence.is_cordoned(node) and node["metadata"]["annotations"]["example.com/rack"] == "7"


REFUSED: dict[str, tuple[str, Any, str]] = {
    "a label": (NODE, {"metadata": {"labels": {"pool": "other"}}}, "neither labels"),
    "a foreign annotation": (NODE, {"metadata": {"annotations": {"a": "b"}}}, "own annotations"),
    "a foreign annotation's value": (
        NODE,
        {"metadata": {"annotations": {"example.com/rack": "8"}}},
        "own annotations",
    ),
    "a foreign annotation's end": (
        NODE,
        {"metadata": {"annotations": {"example.com/rack": None}}},
        "own annotations",
    ),
    "a foreign taint's end": (NODE, {"spec": {"taints": []}}, "own taints"),
    "another foreign taint": (
        NODE,
        {"spec": {"taints": [FOREIGN, {"key": "example.com/more", "effect": "NoExecute"}]}},
        "own taints",
    ),
    "a finalizer": (NODE, {"metadata": {"finalizers": ["example.com/never"]}}, "finalizers"),
    "an owner": (
        NODE,
        {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"}]}},
        "owners",
    ),
    "an address range": (
        NODE,
        {"spec": {"podCIDR": "10.0.0.0/24", "podCIDRs": ["10.0.0.0/24"]}},
        "Node's spec",
    ),
    "a cordon of the control plane": (CONTROL, {"spec": {"unschedulable": True}}, "control plane"),
}


@pytest.mark.parametrize(("name", "patch", "said"), REFUSED.values(), ids=REFUSED)
def test_anything_else_is_refused(client: Client, admin: Client, name: str, patch: Any, said: str) -> None:
    denied = refusal(partial(client.request, "PATCH", path_of_node(name), patch, MERGE_PATCH))
    assert (
        denied["status"] == 422 and "image-builder-nodes" in denied["message"] and said in denied["message"]
    )
    # Controllers write to it, too.
    node = admin.node(name)
    assert FOREIGN in node["spec"]["taints"] and node["metadata"]["annotations"]["example.com/rack"] == "7"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "new"}}),
        ("DELETE", path_of_node(NODE), None),
        ("PATCH", f"{path_of_node(NODE)}/status", {"status": {"conditions": []}}),
    ],
)
def test_nodes_are_neither_made_nor_deleted_nor_reported_about(
    client: Client, method: str, path: str, body: Any
) -> None:
    denied = refusal(
        partial(client.request, method, path, body, MERGE_PATCH if method == "PATCH" else "application/json")
    )
    assert denied["status"] == 422 and "neither creates nor deletes" in denied["message"]


def test_nobody_else_is_concerned(admin: Client) -> None:
    for value in ("b", None):
        admin.request("PATCH", path_of_node(NODE), {"metadata": {"labels": {"other": value}}}, MERGE_PATCH)


def signing_request(cluster: Cluster, name: str, groups: list[str]) -> str:
    """Make a signing request as a bootstrap token with these groups; return the path of its approval."""
    pem = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name.from_rfc4514_string("CN=system:node:b,O=system:nodes"))
        .sign(ec.generate_private_key(ec.SECP256R1()), SHA256())
        .public_bytes(Encoding.PEM)
    )
    # The API server writes who asked; here the groups are those of a certificate.
    token = cluster.client("system:bootstrap:abcdef", "system:bootstrappers", *groups)
    spec = {
        "request": base64.b64encode(pem).decode(),
        "signerName": SIGNER,
        "usages": ["digital signature", "client auth"],
    }
    kind = {"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest"}
    token.request("POST", REQUESTS, {**kind, "metadata": {"name": name}, "spec": spec})
    return approver.path_of(name)


def approved(kind: str = "Approved") -> dict[str, Any]:
    condition = {
        "type": kind,
        "status": "True",
        "reason": "r",
        "message": "",
        "lastUpdateTime": stamp(time.time()),
    }
    return {"status": {"conditions": [condition]}}


@pytest.mark.parametrize(
    ("groups", "kind", "said"),
    [
        (BOUND, "Approved", ""),
        (BOUND, "Denied", "nothing else"),
        ([], "Approved", "bound to one machine"),
        (BOUND[:1], "Approved", "bound to one machine"),
        (["system:bootstrappers:kubeadm:default-node-token"], "Approved", "bound to one machine"),
        ([*BOUND, binding.of_machine("c")], "Approved", "bound to one machine"),
    ],
)
def test_the_gate_approves_tokens_of_the_broker_only(
    cluster: Cluster, admin: Client, groups: list[str], kind: str, said: str
) -> None:
    gate = cluster.client(GATE, "system:serviceaccounts")
    name = f"r-{len(groups)}-{kind.lower()}-{int(time.time() * 1000)}"
    path = signing_request(cluster, name, groups)
    send = partial(gate.request, "PATCH", path, approved(kind), MERGE_PATCH)
    if said:
        denied = refusal(send)
        assert denied["status"] == 422 and said in denied["message"], denied
        assert not admin.request("GET", f"{REQUESTS}/{name}")["status"].get("conditions")
    else:
        send()
    denied = refusal(partial(gate.request, "DELETE", f"{REQUESTS}/{name}"))
    assert denied["status"] == 422 and "nothing else" in denied["message"]
