"""The token broker as an operator runs it: its command, real TLS, a real API server, and the node's own client.

tests/support/control_plane/brokers.py describes what surrounds it, and which parts of that are simulated.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from image_builder.cluster.broker.keys import source
from image_builder.node.join import binding, config, credentials
from image_builder.node.join.codes import JoinError
from image_builder.node.net import kubeconfig
from image_builder.node.net.kube import KubeError
from image_builder.node.net.retry import Deadline
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
    drain,
    open_world,
    whoami,
)
from tests.support.control_plane.gates import Cluster, give_rights, wait_until
from tests.support.nodes import joins

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def world(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    give_rights(cluster.admin, RIGHTS)
    with open_world(cluster, tmp_path_factory.mktemp("broker")) as state:
        yield state


@pytest.fixture(scope="module")
def broker(world: World) -> Iterator[Broker]:
    with brokering(world) as found:
        yield found


@pytest.fixture(autouse=True)
def _known_identity(world: World) -> None:
    world.identity = identities.token()


def test_a_node_gets_a_token_that_the_cluster_takes(world: World, broker: Broker) -> None:
    node = "vmss-h100-a000017"
    drain(broker)
    token = broker.ask(node)
    assert 1700 < token.expires - time.time() <= 1800
    # An API server learns of a new secret a moment after its creation.
    assert wait_until(lambda: bool(whoami(world, token.text)))
    found = whoami(world, token.text)
    assert found["username"] == f"system:bootstrap:{token.text[:6]}"
    assert {"system:bootstrappers", GROUP} <= set(found["groups"])
    # What the node does before its kubelet starts.
    admin = kubeconfig.load(world.cluster.kubeconfig("lab:reader"))
    told = joins.document(admin.authority.read(), admin.server, node={})
    credentials.prove(
        config.parse(json.dumps(told).encode()), token.text, 60, Deadline(time.monotonic() + 30)
    )
    nonce, line = broker.next(), broker.next()
    told = {"status": 200, "node": node, "vm_id": joins.VM_ID, "pool": "h100"}
    assert {name: nonce[name] for name in told} == told and "token_id" not in nonce
    assert {name: line[name] for name in told} == told and line["token_id"] == token.text[:6]
    assert line["mirid"] == identities.SCALE_SET.lower() and line["client"] == "127.0.0.1"
    kept = world.secret(token.text)
    assert kept["type"] == "bootstrap.kubernetes.io/token"
    assert base64.b64decode(kept["data"]["usage-bootstrap-signing"]) == b"false"


def _answer(broker: Broker, node: str, document: str) -> tuple[int, str, dict[str, Any]]:
    """Retry until the broker has a definite answer: with a slow API server, it returns 503 at first."""
    answer = broker.post(node, document=document)
    for _ in range(10):
        if answer[0] != 503:
            break
        time.sleep(0.5)
        answer = broker.post(node, document=document)
    return answer


def test_of_many_at_once_one_gets_a_token(world: World, broker: Broker) -> None:
    node = "vmss-h100-a000019"
    document = broker.document(node)
    with brokering(world) as other, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda one: _answer(one, node, document), [broker, other] * 8))
    assert sorted(status for status, _, _ in answers) == [200] + [409] * 15
    assert all(1 <= int(after) <= 60 for status, after, _ in answers if status == 409)


def _is_known(world: World, token: str) -> bool:
    return bool(whoami(world, token))


def test_nobody_has_a_name_but_the_machine_that_proves_itself(world: World, broker: Broker) -> None:
    """The first machine doesn't lock out another one; which one owns the name is up to the approver."""
    node = "vmss-h100-a00001b"
    first, second = broker.ask(node), broker.ask(node, OTHER_VM)
    for token, vm_id in ((first, joins.VM_ID), (second, OTHER_VM)):
        assert wait_until(partial(_is_known, world, token.text))
        groups = set(whoami(world, token.text)["groups"])
        assert {binding.of_machine(vm_id), binding.of_node(node)} <= groups
        assert world.secret(token.text)["metadata"]["annotations"]["image-builder/vm-id"] == vm_id


def test_a_machine_is_what_its_document_says(world: World, broker: Broker) -> None:
    node = "vmss-h100-a00001c"
    drain(broker)
    theirs = broker.document(node, OTHER_VM)
    foreign = attested.document(attested.content("0123456789"), attested.signer(authority="mallory"))
    for document, status, code in (
        (theirs, 403, "document.machine"),
        (foreign, 401, "document.signer"),
        ("MIIB", 401, "document.malformed"),
    ):
        found = broker.post(node, document=document)
        assert (found[0], found[2]["error"]) == (status, code)
    assert "token_id" not in "".join(map(json.dumps, broker.lines.queue))


WRONG: dict[str, tuple[dict[str, Any], int, str]] = {
    "it is expired": ({"exp": int(time.time()) - 3600}, 401, "token.expired"),
    "it is for somebody else": ({"aud": "https://management.azure.com/"}, 401, "token.audience"),
    "a clock is a day off": (identities.claims(time.time() + 86400), 401, "token.early"),
    "it is another tenant's": ({"tid": identities.OBJECT}, 401, "token.tenant"),
    "it is of no pool": ({"xms_mirid": identities.SCALE_SET + "-b"}, 403, "identity"),
}


@pytest.mark.parametrize(("parts", "status", "code"), WRONG.values(), ids=WRONG)
def test_an_identity_that_will_not_do_ends_the_phase(
    world: World, broker: Broker, parts: dict[str, Any], status: int, code: str
) -> None:
    drain(broker)
    world.identity = identities.token(identities.claims(**parts))
    with pytest.raises(JoinError, match=f"the broker answered {status}") as caught:
        broker.ask("vmss-h100-a00001d")
    assert caught.value.number == 62
    line = broker.next()
    assert (line["status"], line["code"]) == (status, code)
    # Unproven claims aren't logged as if they were true.
    assert ("mirid" in line) == (status == 403) and "token_id" not in line


def test_a_stolen_pools_name_is_refused(broker: Broker) -> None:
    with pytest.raises(JoinError, match="403"):
        broker.ask("control-plane-1")


def test_a_forged_token_asks_the_provider_no_more_than_once(world: World, broker: Broker) -> None:
    asked = world.keys_asked
    for number in range(10):
        world.identity = identities.token(by="mallory", header={"kid": f"made-up-{number}"})
        status, _, told = broker.post("vmss-h100-a00001e")
        assert (status, told["error"]) == (401, "token.key")
    assert world.keys_asked - asked <= 1


def test_a_provider_that_is_not_proven_has_no_keys(world: World) -> None:
    (world.directory / "other.pem").write_text(joins.authority().certificate)
    url = f"https://127.0.0.1:{world.provider_port}/keys"
    with pytest.raises(OSError, match="certificate verify failed"):
        source(url, os.fspath(world.directory / "other.pem"))()
    assert source(url, os.fspath(world.directory / "ca.pem"))() == identities.jwks("one", "two")


def test_a_broker_that_is_not_proven_is_told_nothing(world: World, broker: Broker) -> None:
    drain(broker)
    with pytest.raises(JoinError, match="can't be verified") as caught:
        broker.ask("vmss-h100-a00001f", ca=joins.authority().certificate)
    assert caught.value.number == 62 and broker.lines.empty()


def test_who_asks_too_often_is_told_when_to_come_back(world: World) -> None:
    def ask(one: Broker, node: str, vm_id: str) -> tuple[int, str, str]:
        status, after, told = one.post(node, vm_id, one.document(node, vm_id))
        return status, after, told.get("error", "")

    # Limits apply per machine, whatever name it uses: one machine's requests don't use up another's.
    with brokering(world, limits={"node": {"burst": 2, "per_second": 1.0}}) as limited:
        for name in ("g", "h"):
            assert ask(limited, f"vmss-h100-a00001{name}", OTHER_VM)[0] == 200
        assert ask(limited, "vmss-h100-a00001i", OTHER_VM) == (429, "1", "limit.node")
        assert ask(limited, "vmss-h100-a00001i", joins.VM_ID)[0] == 200
        # The node waits that long, and then gets its token.
        drain(limited)
        assert limited.ask("vmss-h100-a00001i", OTHER_VM).text
        lines = [limited.next()]
        while "token_id" not in lines[-1]:
            lines.append(limited.next())
        assert {line["status"] for line in lines} <= {200, 429}
    with brokering(world, limits={"pool": {"burst": 1, "per_second": 0.001}}) as limited:
        assert ask(limited, "vmss-h100-a00001j", joins.VM_ID)[0] == 200
        assert ask(limited, "vmss-h100-a00001k", OTHER_VM)[2] == "limit.pool"
        # A node that would have to wait longer than its deadline ends its phase and says why.
        with pytest.raises(JoinError, match="answered 429"):
            limited.ask("vmss-h100-a00001l", seconds=5)


def test_a_cluster_that_says_no_is_asked_again(world: World, broker: Broker) -> None:
    binding = "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/rolebindings"
    before = world.cluster.admin.request("GET", f"{binding}/image-builder-broker")
    world.cluster.admin.request("DELETE", f"{binding}/image-builder-broker")
    drain(broker)
    node = "vmss-h100-a00001m"
    try:
        document = broker.document(node)
        assert wait_until(lambda: broker.post(node, document=document)[0] == 503)
        _, after, told = broker.post(node, document=document)
        assert (after, told["error"]) == ("5", "cluster")
        while "403" not in broker.next().get("cause", ""):  # ends within the time allowed for a line
            pass
    finally:
        again = {name: before[name] for name in ("apiVersion", "kind", "roleRef", "subjects")}
        again["metadata"] = {"name": "image-builder-broker"}
        world.cluster.admin.request("POST", binding, again)
    assert broker.ask(node, seconds=60).text


def test_the_broker_may_do_nothing_else(world: World) -> None:
    client = world.cluster.client(SERVICE_ACCOUNT, "system:serviceaccounts")
    for method, path in (
        ("GET", SECRETS),
        ("GET", f"{SECRETS}/bootstrap-token-abcdef"),
        ("DELETE", f"{SECRETS}/bootstrap-token-abcdef"),
        ("GET", "/api/v1/namespaces/default/secrets/x"),
        ("GET", "/api/v1/nodes"),
        ("DELETE", SECRETS),
    ):
        with pytest.raises(KubeError) as caught:
            client.request(method, path)
        assert caught.value.status == 403


REQUESTS: dict[str, tuple[str, str, dict[str, str], bytes, int, str]] = {
    "no identity": ("POST", "/token", {"Content-Length": "2"}, b"{}", 401, "token.none"),
    "a password": (
        "POST",
        "/token",
        {"Content-Length": "2", "Authorization": "Basic eA=="},
        b"{}",
        401,
        "token.none",
    ),
    "another method": ("GET", "/token", {}, b"", 405, "method"),
    "a method that nobody has": ("BREW", "/token", {}, b"", 501, "request"),
    "another path": ("POST", "/tokens", {"Content-Length": "0"}, b"", 404, "path"),
    "no length": ("POST", "/token", {}, b"", 411, "body"),
    "a length of its own": ("POST", "/token", {"Content-Length": "+2"}, b"{}", 411, "body"),
    "a length of a thousand digits": ("POST", "/token", {"Content-Length": "9" * 5000}, b"", 413, "body"),
    "too much": ("POST", "/token", {"Content-Length": "999999"}, b"", 413, "body"),
}


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status", "code"), REQUESTS.values(), ids=REQUESTS
)
def test_what_is_no_request(
    broker: Broker, method: str, path: str, headers: dict[str, str], body: bytes, status: int, code: str
) -> None:
    assert broker.send(method, path, headers, body)[::2] == (status, code)


def test_a_body_that_is_none(world: World, broker: Broker) -> None:
    headers = {"Authorization": f"Bearer {world.identity}", "Content-Length": "2"}
    assert broker.send("POST", "/token", headers, b"[]")[::2] == (400, "body")


def test_the_probe_needs_no_identity(world: World, broker: Broker) -> None:
    said = credentials.ask(f"https://127.0.0.1:{broker.port}/healthz", world.authority.certificate)
    assert (said.status, json.loads(said.body)) == (200, {"ready": True})


def test_the_silent_keep_nobody_waiting_for_ever(world: World) -> None:
    listen = {**world.settings()["listen"], "connections": 3, "seconds": 1.0}
    with brokering(world, listen=listen) as small, ExitStack() as stack:
        for _ in range(6):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", small.port)))
            silent.sendall(b"\x16\x03\x01")  # TLS, and then nothing
        assert small.ask("vmss-h100-a00001n", seconds=120).text


def test_a_new_certificate_is_taken_up(world: World) -> None:
    with brokering(world) as one:
        assert one.ask("vmss-h100-a00001p")
        new = joins.authority()
        before = {name: (world.directory / name).read_text() for name in ("tls.crt", "tls.key")}
        pair = joins.issued(new, "broker")
        try:
            # One file after the other, unlike those of a mounted secret: for a moment the two don't match.
            (world.directory / "tls.crt").write_text(pair.certificate)
            with pytest.raises(JoinError, match="can't be verified"):
                one.ask("vmss-h100-a00001p", ca=new.certificate)
            (world.directory / "tls.key").write_text(pair.key)
            # A new key also means new nonces.
            assert one.ask("vmss-h100-a00001p", ca=new.certificate)
        finally:
            for name, text in before.items():
                (world.directory / name).write_text(text)
