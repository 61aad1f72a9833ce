"""`pool run --kubeconfig`: anything that would hold up its first wave forever is refused before a host is touched.

The API server is simulated: TLS and HTTP are real, the answers are as short as possible.
"""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from image_builder.errors import DefinitionError
from image_builder.pool import rollout
from image_builder.pool.steps import ansible
from image_builder.pool.steps.control_plane import NODES, REQUESTS, TABLE, Kubernetes
from tests.support.nodes import joins

pytestmark = pytest.mark.root

TOKEN = "an-operator"
NO_NODES = {
    "kind": "Table",
    "columnDefinitions": [{"name": "Name"}, {"name": "Status"}, {"name": "Age"}],
    "rows": [],
}
EMPTY: joins.Answer = (200, {}, b'{"metadata":{"resourceVersion":"1"},"items":[]}')


class World:
    """An API server, and its client's kubeconfig. The status is 200 for every path that isn't in ``status``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority = folder, joins.authority()
        self.status: dict[str, int] = {}

    def api(self, path: str, headers: dict[str, str], _body: bytes, _who: str) -> joins.Answer:
        known = headers.get("Authorization") == f"Bearer {TOKEN}"
        path = path.partition("?")[0]
        status = self.status.get(path, 200) if known or path == "/version" else 401
        if status != 200:
            return joins.answer({"message": f"{path} is not for you"}, status)
        if path == "/metrics":
            return 200, {}, b""
        return joins.answer(NO_NODES) if headers.get("Accept") == TABLE else EMPTY

    def tls(self) -> ssl.SSLContext:
        pair = joins.issued(self.authority, "api")
        (self.folder / "api").write_text(pair.certificate + pair.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "api")
        return context

    def kubeconfig(self, port: int, *, ca: str = "", token: str = TOKEN) -> Path:
        authority = base64.b64encode((ca or self.authority.certificate).encode()).decode()
        cluster = {"server": f"https://127.0.0.1:{port}", "certificate-authority-data": authority}
        config = {
            "current-context": "a",
            "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
            "clusters": [{"name": "a", "cluster": cluster}],
            "users": [{"name": "a", "user": {"token": token}}],
        }
        path = self.folder / "kubeconfig"
        path.write_text(json.dumps(config))
        return path


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def server(world: World) -> Iterator[joins.Server]:
    with joins.serving(world.api, world.tls()) as made:
        yield made


def refused(kubeconfig: Path) -> list[str]:
    """Return why `pool run` doesn't start with this control plane; nothing if it does."""
    try:
        plane = rollout._control_plane(kubeconfig)
    except DefinitionError as error:
        return [problem.reason for problem in error.problems if problem.path == "--kubeconfig"]
    plane.close()
    return []


def test_one_that_can_be_read_is_taken(world: World, server: joins.Server) -> None:
    assert refused(world.kubeconfig(server.port)) == []
    with closing(Kubernetes(world.kubeconfig(server.port))) as plane:
        assert plane.faults() == [] and plane.read().unread == ""


def test_another_ca(world: World, server: joins.Server) -> None:
    (said,) = refused(world.kubeconfig(server.port, ca=joins.authority().certificate))
    assert said.startswith(f"https://127.0.0.1:{server.port} is not proven by this CA: ")


def test_a_ca_that_is_none(world: World, server: joins.Server) -> None:
    (said,) = refused(world.kubeconfig(server.port, ca="-----BEGIN CERTIFICATE-----\nMA==\n"))
    assert "can't be used" in said


def test_a_token_that_has_expired(world: World, server: joins.Server) -> None:
    (said,) = refused(world.kubeconfig(server.port, token="of-yesterday"))
    assert "401" in said


def test_all_rights_that_are_missing_are_told_at_once(world: World, server: joins.Server) -> None:
    world.status = {"/metrics": 403, NODES: 403}
    nodes, metrics = sorted(refused(world.kubeconfig(server.port)))
    assert "/metrics: 403" in metrics and f"{NODES}?limit=1: 403" in nodes


@pytest.mark.parametrize("off", [-86400.0, 86400.0])
def test_a_clock_that_is_off_by_a_day(world: World, server: joins.Server, off: float) -> None:
    server.date_off = off
    (said,) = refused(world.kubeconfig(server.port))
    assert said.startswith("this machine's clock is 86") and ("ahead of" if off < 0 else "behind") in said


@pytest.mark.parametrize("status", [429, 503])
def test_what_may_pass_is_left_to_the_gate(world: World, server: joins.Server, status: int) -> None:
    world.status = {REQUESTS: status}
    assert refused(world.kubeconfig(server.port)) == []


def test_one_that_does_not_answer_is_left_to_the_gate(world: World, server: joins.Server) -> None:
    path = world.kubeconfig(server.port)
    server.server_close()
    assert refused(path) == []


def node_faults(folder: Path, port: int, ca: str) -> list[str]:
    """Return what `pool run --node-configs` reports about a configuration of two hosts."""
    names = ("a-0", "a-1")
    for name in names:
        document = joins.document(ca, f"https://127.0.0.1:{port}")
        (folder / f"{name}.json").write_text(json.dumps(document))
    try:
        ansible.read_configurations(folder, names)
    except DefinitionError as error:
        return [problem.reason for problem in error.problems]
    return []


def test_what_nodes_are_told_is_asked_for_too(world: World, server: joins.Server) -> None:
    """Otherwise, they would keep trying until their deadline, canary by canary."""
    ca = world.authority.certificate
    assert node_faults(world.folder, server.port, ca) == []
    (said,) = node_faults(world.folder, server.port, joins.authority().certificate)
    assert "a-0, a-1: cluster: " in said and "is not proven by this CA" in said
    server.server_close()
    assert node_faults(world.folder, server.port, ca) == [], "it need not answer from here"
