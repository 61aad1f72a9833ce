"""A drain's turns, with an API server that answers from a dictionary: what it does about nodes that change hands."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from image_builder.drain.ask import CHECKPOINT
from image_builder.drain.fence import CORDON, Record
from image_builder.drain.pods import Pod
from image_builder.drain.policy import Policy
from image_builder.drain.run import Drain
from image_builder.node.net.kube import JSON_PATCH, Client, KubeError
from image_builder.node.net.kubeconfig import Access, Pem
from tests.unit.drain.manifests import node_object, pod_object

Pods = dict[str, list[dict[str, Any]]]


class Server(Client):
    """Nodes and their pods. Only those patches of a Node are applied that a drain sends: cordons and annotations."""

    def __init__(self) -> None:
        super().__init__(Access("https://lab", Pem(text="")))
        self.nodes: dict[str, dict[str, Any]] = {}
        self.pods: Pods = {}
        self.evicted: list[str] = []
        self.events: list[str] = []
        # Nodes whose changes an admission policy denies.
        self.denied: set[str] = set()
        self.denial, self.words = 422, "a policy denied request"
        # Pods as the server remembers them, of this version, if it lags behind; the versions that were asked for.
        self.remembered: Pods | None = None
        self.version, self.lists = 100, list[str]()

    def request(self, method: str, path: str, body: Any = None, content_type: str = "") -> dict[str, Any]:
        if method == "POST":
            assert path == "/api/v1/namespaces/default/events"
            self.events.append(body["reason"])
            return {}
        assert method == "GET" or content_type == JSON_PATCH
        name = path.rpartition("/")[2]
        if name not in self.nodes:
            raise KubeError("not found", 404)
        if body and name in self.denied:
            raise KubeError(f'nodes "{name}" is forbidden: {self.words}', self.denial)
        node = self.nodes[name]
        for step in body or ():
            *_, place = step["path"].split("/")
            holder = (
                node["spec"] if step["path"] == "/spec/unschedulable" else node["metadata"]["annotations"]
            )
            key = place.replace("~1", "/")
            if step["op"] == "add":
                holder[key] = step["value"]
            elif step["op"] == "remove":
                del holder[key]
        return node

    def each_page(
        self,
        path: str,
        query: Mapping[str, str],
        take: Callable[[dict[str, Any]], None],
        limit: int = 500,
    ) -> None:
        assert limit == 500
        self._list(path, query, self.pods, take)

    def each(self, path: str, take: Callable[[dict[str, Any]], None]) -> str:
        """List pods as they are now, or, of version 0, as they are remembered, if that is something else."""
        path, _, query = path.partition("?")
        values = dict(urllib.parse.parse_qsl(query))
        self.lists.append(version := values.get("resourceVersion", ""))
        remembered = self.remembered if version == "0" else None
        self._list(path, values, self.pods if remembered is None else remembered, take)
        return str(self.version)

    @staticmethod
    def _list(
        path: str, query: Mapping[str, str], pods: Pods, take: Callable[[dict[str, Any]], None]
    ) -> None:
        selector = dict(urllib.parse.parse_qsl(query["fieldSelector"].replace(",", "&")))
        one = selector.get("spec.nodeName") if path == "/api/v1/pods" else None
        for host in [one] if one else list(pods):
            for pod in pods.get(host, []):
                take(pod)

    def evict(self, namespace: str, name: str, uid: str, *, dry_run: bool = False) -> None:
        assert (namespace, uid, dry_run) == ("work", f"uid-{name}", False)
        self.evicted.append(name)


@pytest.fixture
def server() -> Server:
    made = Server()
    made.nodes["gpu-1"] = node_object({"a": "b"})
    return made


class Clock:
    """Both clocks of a drain."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def drain(server: Server, clock: Clock, **policy: Any) -> Drain:
    made = Drain(server, "manual", Policy(**policy), lambda _: None, clock=clock, wall=clock)
    made.add(["gpu-1"])
    return made


def test_a_second_one_goes_on_with_the_first_ones_patience(server: Server) -> None:
    clock = Clock()
    server.pods["gpu-1"] = [pod_object()]
    drain(server, clock, max_wait_seconds=60.0).turn()
    clock.now += 59
    second = drain(server, clock, max_wait_seconds=60.0)
    second.turn()
    assert second.open_hosts == ["gpu-1"]
    clock.now += 1
    second.turn()
    assert second.outcomes["gpu-1"].state == "skipped"
    assert server.events == ["NodeCordoned", "DrainSkipped", "NodeFreed"]
    assert CORDON not in server.nodes["gpu-1"]["metadata"]["annotations"]


def test_a_node_that_is_away_is_not_empty(server: Server) -> None:
    clock = Clock()
    work = drain(server, clock, max_wait_seconds=600.0)
    work.turn()
    gone = server.nodes.pop("gpu-1")
    clock.now += 100
    work.turn()
    assert work.open_hosts == ["gpu-1"]
    server.nodes["gpu-1"] = {
        **node_object({"a": "b"}),
        "metadata": {**gone["metadata"], "uid": "uid-2", "annotations": {"a": "b"}},
    }
    work.turn()
    assert server.nodes["gpu-1"]["spec"]["unschedulable"]
    # Pods that were bound to it meanwhile have time to show up.
    assert work.open_hosts == ["gpu-1"]
    clock.now += 31
    work.turn()
    assert work.outcomes["gpu-1"].state == "empty"


def test_no_such_node(server: Server) -> None:
    work = Drain(server, "manual", Policy(), lambda _: None)
    work.add(["gpu-2"])
    work.turn()
    assert work.outcomes["gpu-2"].reason == "there is no such node"


def test_who_insists_takes_no_credit_for_a_cordon_that_a_person_took_away(server: Server) -> None:
    before = Record("manual", 900.0, was_unschedulable=True)
    server.nodes["gpu-1"] = node_object({CORDON: before.text()})
    drain(server, Clock(), insist=True).turn()
    assert server.nodes["gpu-1"]["spec"]["unschedulable"]
    assert '"was_unschedulable": false' in server.nodes["gpu-1"]["metadata"]["annotations"][CORDON]


@pytest.mark.parametrize("denial", [403, 422])
def test_a_node_whose_cordon_is_denied_is_skipped_and_others_are_not(server: Server, denial: int) -> None:
    clock = Clock()
    server.denial = denial
    other = node_object({"a": "b"})
    server.nodes["gpu-2"] = {**other, "metadata": {**other["metadata"], "name": "gpu-2"}}
    work = drain(server, clock)
    work.add(["gpu-2"])
    server.denied = {"gpu-1"}
    work.turn()
    clock.now += 31
    work.turn()
    assert (work.outcomes["gpu-1"].state, work.outcomes["gpu-2"].state) == ("skipped", "empty")
    assert "denied" in work.outcomes["gpu-1"].reason


@pytest.mark.parametrize(
    "words",
    [
        'User "roll" cannot patch resource "nodes" in API group ""',
        # Its admission plugins don't have all objects yet.
        "not yet ready to handle request",
    ],
)
def test_a_missing_right_or_a_server_that_has_just_started_is_not_a_denial_of_one_node(
    server: Server, words: str
) -> None:
    work = drain(server, Clock())
    server.denied, server.denial, server.words = {"gpu-1"}, 403, words
    with pytest.raises(KubeError, match=words):
        work.turn()
    assert work.open_hosts == ["gpu-1"]


def test_a_gang_of_which_one_host_is_denied_is_freed_as_a_whole(server: Server) -> None:
    server.nodes["gpu-2"] = node_object({"a": "b"})
    server.pods = {
        host: [pod_object(f"of-{host}", owner="Job", spec={"nodeName": host})] for host in ("gpu-1", "gpu-2")
    }
    server.denied = {"gpu-2"}
    work = drain(server, Clock())
    work.add(["gpu-2"])
    work.turn()
    work.turn()
    assert {outcome.state for outcome in work.outcomes.values()} == {"skipped"} and not work.open_hosts
    assert not server.nodes["gpu-1"]["spec"].get("unschedulable")


@pytest.mark.parametrize(("denied", "other"), [("gpu-1", "gpu-2"), ("gpu-2", "gpu-1")])
def test_nothing_of_a_gang_is_evicted_once_asking_one_of_its_pods_is_denied(
    server: Server, monkeypatch: pytest.MonkeyPatch, denied: str, other: str
) -> None:
    """Another drain has cordoned its hosts so long ago that pods are due to be asked and evicted at once."""
    names = ("gpu-1", "gpu-2")
    server.nodes = {
        name: node_object({CORDON: Record("manual", 900.0).text()}, cordoned=True) for name in names
    }
    server.pods = {name: [pod_object(f"of-{name}", owner="Job", spec={"nodeName": name})] for name in names}

    def ask(_client: Client, pod: Pod, *_: object) -> None:
        if pod.host == denied:
            raise KubeError("a policy denied request", 422)

    monkeypatch.setattr("image_builder.drain.run.ask", ask)
    work = drain(server, Clock(), mode="evict", checkpoint_seconds=60.0)
    work.add(names)
    work.turn()
    work.turn()
    assert {outcome.state for outcome in work.outcomes.values()} == {"skipped"} and server.evicted == []
    assert work.outcomes[other].reason == f"it shares a gang with {denied}: a policy denied request"


def test_a_cordon_that_is_denied_to_be_removed_stays_and_is_told(server: Server) -> None:
    clock = Clock()
    server.pods["gpu-1"] = [pod_object()]
    work = drain(server, clock, max_wait_seconds=60.0)
    work.turn()
    server.denied = {"gpu-1"}
    clock.now += 61
    work.turn()
    assert 'its cordon stays: nodes "gpu-1" is forbidden' in work.outcomes["gpu-1"].reason
    assert not work.outcomes["gpu-1"].is_final
    other = drain(server, clock, max_wait_seconds=600.0)
    other.turn()
    other.release()
    assert other.outcomes["gpu-1"].reason.startswith("the drain was interrupted; its cordon stays")


def test_a_denied_cordon_of_a_node_that_registers_again_ends_its_drain(server: Server) -> None:
    clock = Clock()
    server.pods["gpu-1"] = [pod_object()]
    work = drain(server, clock)
    work.turn()
    again = node_object({"a": "b"})
    server.nodes["gpu-1"] = {**again, "metadata": {**again["metadata"], "uid": "uid-9"}}
    server.denied = {"gpu-1"}
    work.turn()
    outcome = work.outcomes["gpu-1"]
    assert outcome.state == "skipped" and "denied" in outcome.reason and outcome.is_final


def test_an_eviction_is_asked_for_once_until_it_is_time_again(server: Server) -> None:
    clock = Clock()
    server.pods["gpu-1"] = [pod_object()]
    work = drain(server, clock, mode="evict")
    work.turn()
    assert server.evicted == []
    for _ in range(3):
        work.turn()
    assert server.evicted == ["a"]
    clock.now += 10
    work.turn()
    assert server.evicted == ["a", "a"]


def test_the_hosts_of_a_gang_are_added_before_anything_is_decided(server: Server) -> None:
    server.nodes["gpu-2"] = node_object({"a": "b"})
    server.pods = {
        host: [pod_object(f"of-{host}", owner="Job", spec={"nodeName": host})] for host in ("gpu-1", "gpu-2")
    }
    work = drain(server, Clock(), whole_gangs=True)
    work.turn()
    assert work.open_hosts == ["gpu-1", "gpu-2"]
    assert not any(node["spec"].get("unschedulable") for node in server.nodes.values())
    work.turn()
    assert all(node["spec"]["unschedulable"] for node in server.nodes.values())


def test_many_hosts_are_looked_at_less_often(server: Server) -> None:
    work = drain(server, Clock())
    assert work.pause == 5.0
    work.add([f"gpu-{number}" for number in range(2000)])
    assert work.pause == 20.0


def gpu_pod(name: str = "a", **parts: Any) -> dict[str, Any]:
    container = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "8"}}}
    return pod_object(name, spec={"nodeName": "gpu-1", "containers": [container]}, **parts)


def overdue(server: Server, clock: Clock, deadline: float, **policy: Any) -> Drain:
    work = Drain(server, "roll", Policy(**policy), lambda _: None, deadline=deadline, clock=clock, wall=clock)
    work.add(["gpu-1"])
    return work


def test_owners_are_overruled_after_a_deadline_and_not_before(server: Server) -> None:
    clock = Clock()
    server.pods["gpu-1"] = [gpu_pod()]
    work = overdue(server, clock, 1500.0, max_wait_seconds=3600.0)
    work.turn()
    clock.now = 1499.0
    work.turn()
    assert server.evicted == []
    clock.now = 1500.0
    work.turn()
    assert server.evicted == ["a"] and server.events[-1] == "PodEvicted"
    server.pods["gpu-1"] = []
    for _ in range(2):
        work.turn()
        clock.now += 30.0
    assert work.outcomes["gpu-1"].evicted == ("work/a",)


def test_patience_begins_at_the_deadline(server: Server) -> None:
    """A host cordoned long before, by a driver that is gone, isn't skipped before anything was evicted."""
    clock = Clock()
    server.pods["gpu-1"] = [gpu_pod()]
    overdue(server, clock, 1e9).turn()
    clock.now += 100_000.0
    work = overdue(server, clock, 2000.0, max_wait_seconds=60.0)
    work.turn()
    assert server.evicted == ["a"] and work.open_hosts == ["gpu-1"]
    clock.now += 60.0
    work.turn()
    assert work.outcomes["gpu-1"].state == "skipped" and work.outcomes["gpu-1"].evicted == ("work/a",)


def test_owners_are_asked_first_where_the_policy_says_so(server: Server) -> None:
    clock = Clock()
    server.pods["gpu-1"] = [gpu_pod(annotations={CHECKPOINT: "2026-01-01T00:00:00Z"})]
    work = overdue(server, clock, 1000.0, checkpoint_seconds=300.0)
    for evicted in ([], [], ["a"]):
        work.turn()
        assert server.evicted == evicted
        clock.now += 200.0


def test_a_part_of_a_gang_is_not_evicted_after_a_deadline_either(server: Server) -> None:
    server.nodes["gpu-2"] = node_object({"a": "b"})
    server.pods = {
        host: [pod_object(f"of-{host}", owner="Job", spec={"nodeName": host})] for host in ("gpu-1", "gpu-2")
    }
    work = overdue(server, Clock(), 0.0)
    work.turn()
    assert "gpu-2" in work.outcomes["gpu-1"].reason and server.evicted == []


@pytest.mark.parametrize(("is_last", "ends"), [(True, False), (False, True)])
def test_a_host_is_empty_only_if_its_pods_are_gone_now(server: Server, *, is_last: bool, ends: bool) -> None:
    """The API server's memory may be old. Whoever looks again anyway needs no such look."""
    clock = Clock()
    work = Drain(server, "manual", Policy(), lambda _: None, clock=clock, wall=clock, is_last=is_last)
    work.add(["gpu-1"])
    server.pods["gpu-1"], server.remembered = [pod_object()], {}
    for _ in range(3):
        work.turn()
        clock.now += 60
    assert bool(work.outcomes) is ends and server.lists.count("") == (1 if is_last else 0)
    server.pods = {}
    for _ in range(2):
        work.turn()
        clock.now += 60
    assert work.outcomes["gpu-1"].state == "empty"
