"""The token broker as an operator runs it: its command, real TLS, a real API server, and the node's own client.

What is around it, and what of that is played, says tests/brokers.py.
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
from typing import Any

import pytest

from image_builder.broker.keys import source
from image_builder.broker.tokens import token_id
from image_builder.node import kubeconfig
from image_builder.node.join import api, config, credentials
from image_builder.node.join.codes import JoinError
from image_builder.node.join.deadline import Deadline
from image_builder.node.kube import KubeError
from tests import identities, joins
from tests.brokers import (
    GROUP,
    OTHER_VM,
    PAGE,
    SECRETS,
    SERVICE_ACCOUNT,
    Broker,
    World,
    brokering,
    drain,
    whoami,
)
from tests.gates import give_rights, running, wait_until

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        cluster = stack.enter_context(running())
        give_rights(cluster.admin, PAGE)
        found = World(cluster, tmp_path_factory.mktemp("broker"))
        found.provider_port = stack.enter_context(joins.serving(found.provider, found.context())).port
        found.imds_port = stack.enter_context(joins.serving(joins.as_imds(found.imds))).port
        yield found


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
    # An API server hears of a new secret a moment after it is there.
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
    line = broker.next()
    assert {name: line[name] for name in ("status", "node", "vm_id", "pool", "known", "token_id")} == {
        "status": 200,
        "node": node,
        "vm_id": joins.VM_ID,
        "pool": "h100",
        "known": False,
        "token_id": token.text[:6],
    }
    assert line["mirid"] == identities.SCALE_SET.lower() and line["client"] == "127.0.0.1"
    kept = world.secret(node)
    assert kept["type"] == "bootstrap.kubernetes.io/token"
    assert base64.b64decode(kept["data"]["usage-bootstrap-signing"]) == b"false"


def test_a_node_that_asks_again_gets_the_same(world: World, broker: Broker) -> None:
    node = "vmss-h100-a000018"
    first = broker.ask(node)
    drain(broker)
    assert broker.ask(node) == first and broker.next()["known"] is True
    # Of a broker that was started again, too: it keeps nothing itself.
    with brokering(world) as other:
        assert other.ask(node) == first


def test_many_at_once_get_one_token(world: World, broker: Broker) -> None:
    node = "vmss-h100-a000019"
    with ThreadPoolExecutor(16) as pool:
        tokens = set(pool.map(lambda _: broker.ask(node, seconds=120), range(16)))
    assert len(tokens) == 1
    text = tokens.pop().text
    assert wait_until(lambda: whoami(world, text).get("username") == f"system:bootstrap:{text[:6]}")


def test_a_token_that_is_half_over_is_replaced(world: World, broker: Broker) -> None:
    node = "vmss-h100-a00001a"
    old = broker.ask(node)
    world.expire_in(node, 1000)
    assert broker.ask(node).text == old.text
    world.expire_in(node, 800)
    new = broker.ask(node)
    assert new.text != old.text and new.expires - time.time() > 1700
    assert wait_until(lambda: bool(whoami(world, new.text)) and not whoami(world, old.text))


def test_a_name_is_one_machines(world: World, broker: Broker) -> None:
    node = "vmss-h100-a00001b"
    broker.ask(node)
    with pytest.raises(JoinError, match="the broker answered 409") as caught:
        broker.ask(node, OTHER_VM)
    assert caught.value.number == 62
    # Until the first one's token is over: then the machine is another by the same name.
    world.expire_in(node, -1)
    assert broker.ask(node, OTHER_VM)
    assert world.secret(node)["metadata"]["annotations"]["image-builder/vm-id"] == OTHER_VM


def test_a_secret_that_is_not_ours_is_left_alone(world: World, broker: Broker) -> None:
    node = "vmss-h100-a00001c"
    name = f"bootstrap-token-{token_id(node, 0)}"
    theirs = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {"a": "b"}}
    before = world.cluster.admin.request("POST", SECRETS, theirs)
    assert broker.ask(node).text.startswith(token_id(node, 1))
    assert world.cluster.admin.request("GET", f"{SECRETS}/{name}") == before


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
    # What was not proven is not told as if it were.
    assert ("mirid" in line) == (status == 403) and "token_id" not in line


def test_a_stolen_pools_name_is_refused(broker: Broker) -> None:
    with pytest.raises(JoinError, match="403"):
        broker.ask("control-plane-1")


def test_a_forged_token_asks_the_provider_no_more_than_once(world: World, broker: Broker) -> None:
    asked = world.keys_asked
    for number in range(10):
        world.identity = identities.token(by="mallory", header={"kid": f"made-up-{number}"})
        assert broker.post("vmss-h100-a00001e")[::2] == (401, "token.key")
    assert world.keys_asked - asked <= 1


def test_a_provider_that_is_not_proven_has_no_keys(world: World) -> None:
    (world.directory / "other.pem").write_text(joins.authority().certificate)
    url = f"https://127.0.0.1:{world.provider_port}/keys"
    with pytest.raises(OSError, match="certificate verify failed"):
        source(url, os.fspath(world.directory / "other.pem"))()
    assert source(url, os.fspath(world.directory / "ca.pem"))() == identities.jwks("one", "two")


def test_a_broker_that_is_not_proven_is_told_nothing(world: World, broker: Broker) -> None:
    drain(broker)
    with pytest.raises(JoinError, match="not proven") as caught:
        broker.ask("vmss-h100-a00001f", ca=joins.authority().certificate)
    assert caught.value.number == 62 and broker.lines.empty()


def test_who_asks_too_often_is_told_when_to_come_back(world: World) -> None:
    with brokering(world, limits={"node": {"burst": 2, "per_second": 1.0}}) as limited:
        node = "vmss-h100-a00001g"
        assert [limited.post(node)[0] for _ in range(2)] == [200, 200]
        status, after, code = limited.post(node)
        assert (status, code) == (429, "limit.node") and after == "1"
        # The node waits so long, and has its token then; another node need not wait.
        assert limited.post("vmss-h100-a00001h")[0] == 200
        drain(limited)
        assert limited.ask(node).text
        lines = [limited.next()]
        while lines[-1]["status"] != 200:
            lines.append(limited.next())
        assert {line["status"] for line in lines} <= {200, 429}
    with brokering(world, limits={"pool": {"burst": 1, "per_second": 0.001}}) as limited:
        assert limited.post("vmss-h100-a00001i")[0] == 200
        assert limited.post("vmss-h100-a00001j")[2] == "limit.pool"
        # A node that would have to wait for longer than it has ends its phase, and says why.
        with pytest.raises(JoinError, match="answered 429"):
            limited.ask("vmss-h100-a00001k", seconds=5)


def test_a_cluster_that_says_no_is_asked_again(world: World, broker: Broker) -> None:
    binding = "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/rolebindings"
    before = world.cluster.admin.request("GET", f"{binding}/image-builder-broker")
    world.cluster.admin.request("DELETE", f"{binding}/image-builder-broker")
    drain(broker)
    node = "vmss-h100-a00001m"
    try:
        assert wait_until(lambda: broker.post(node)[0] == 503)
        assert broker.post(node)[1:] == ("5", "cluster")
        assert any("403" in broker.next().get("cause", "") for _ in range(broker.lines.qsize()))
    finally:
        again = {name: before[name] for name in ("apiVersion", "kind", "roleRef", "subjects")}
        again["metadata"] = {"name": "image-builder-broker"}
        world.cluster.admin.request("POST", binding, again)
    assert broker.ask(node, seconds=60).text


def test_the_broker_may_do_nothing_else(world: World) -> None:
    client = world.cluster.client(SERVICE_ACCOUNT, "system:serviceaccounts")
    for method, path in (
        ("GET", SECRETS),
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
    said = api.ask(f"https://127.0.0.1:{broker.port}/healthz", world.authority.certificate)
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
            # One after the other, as a mounted secret's files are not: for a moment the two don't fit.
            (world.directory / "tls.crt").write_text(pair.certificate)
            with pytest.raises(JoinError, match="not proven"):
                one.ask("vmss-h100-a00001p", ca=new.certificate)
            (world.directory / "tls.key").write_text(pair.key)
            assert one.ask("vmss-h100-a00001p", ca=new.certificate)
        finally:
            for name, text in before.items():
                (world.directory / name).write_text(text)
