"""What a roll does to one host, on a simulated scale set and an API server that answers from a dictionary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from image_builder.drain import fence, taint
from image_builder.errors import PoolError
from image_builder.node.net.kube import path_of_node
from image_builder.pool.plan.model import Host, Outcome, Step, ended
from image_builder.pool.run.driver import Work
from image_builder.pool.scale_set.client import HOLD_TAG
from image_builder.pool.scale_set.verdict import Node
from image_builder.pool.steps import roll
from image_builder.pool.steps.fleet import Setup
from image_builder.pool.steps.roll import RollFleet
from tests.support.arm.fleet import BUILDS, NEW, OLD, Fleet, fleet
from tests.support.arm.model import Answer, Request
from tests.unit.drain.manifests import pod_object
from tests.unit.pool.cluster import Cluster
from tests.unit.pool.test_fleet import only, setup
from tests.unit.pool.test_roll_fleet import rolled

__all__ = ["setup"]

RUN = "roll-1"


class Place:
    """A scale set of two machines, whose nodes are empty and cordoned by the roll."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup, self.folder = setup, folder
        self.machines: Fleet = fleet(2)
        self.cluster = Cluster()
        for machine in self.machines.group.machines.values():
            self.cluster.add(f"gpu-{machine.id}", RUN)

    @contextmanager
    def rolled(self, **more: Any) -> Iterator[tuple[RollFleet, Host]]:
        """Yield the fleet of a roll that has begun, and the first of its hosts."""

        def read(host: Host) -> Node | Outcome:
            machine = self.machines.group.machines.get(host.instance)
            return Node(machine.boot_id, BUILDS[machine.disk]) if machine else ended("timeout")

        with rolled(self.setup, self.machines, self.folder, kube=lambda: self.cluster, **more) as (
            state,
            hosts,
        ):
            state.read = read  # type: ignore[method-assign]
            yield state, hosts[0]

    def node(self, name: str) -> dict[str, Any]:
        return self.cluster.objects[path_of_node(name)]

    def occupy(self, name: str) -> None:
        """Run a pod on a node that tolerates everything."""
        pod = pod_object(
            "late", owner="Job", spec={"nodeName": name, "tolerations": [{"operator": "Exists"}]}
        )
        self.cluster.objects["/api/v1/pods/late"] = pod

    @property
    def reimages(self) -> list[int]:
        return [machine.reimages for machine in self.machines.group.machines.values()]


@pytest.fixture
def place(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(roll, "backoff", lambda *_, **__: 0.0)
    return Place(setup, tmp_path)


def end(state: RollFleet, step: Step, host: Host) -> Outcome:
    """Return how a step ends."""
    state.begin(step, [Work(host, 1)])
    return only(state).outcome


def test_azure_that_is_away_is_waited_for(place: Place) -> None:
    """R20: neither a read nor the request that replaces the disk gets an answer for a while."""
    left = iter(range(12))
    with place.rolled() as (state, host):
        place.machines.arm.faults.append(lambda _: "drop" if next(left, None) is not None else None)
        assert end(state, "reimage", host).ok
    assert next(left, None) is None and place.reimages == [1, 0]


def test_an_api_server_that_is_away_is_waited_for(place: Place) -> None:
    """R18"""
    with place.rolled() as (state, host):
        place.cluster.away = 12
        assert end(state, "reimage", host).ok
    assert place.cluster.away == 0 and place.reimages == [1, 0]


def test_no_pod_can_start_between_the_last_look_and_the_request(place: Place) -> None:
    """R15: when the disk goes, the taint that kubelets heed is older than the last look at the pods."""
    seen: list[tuple[list[dict[str, str]], int]] = []

    def look(request: Request, _: Answer | None) -> None:
        if request.method == "POST" and request.path.endswith(("/manualupgrade", "/reimage")):
            log = place.cluster.log
            barred = log.index(("PATCH", path_of_node("gpu-0")))
            seen.append((place.node("gpu-0")["spec"]["taints"], log[barred:].count(("LIST", "/api/v1/pods"))))

    place.machines.arm.observers.append(look)
    with place.rolled() as (state, host):
        assert end(state, "reimage", host).ok
    bar = {"key": taint.TAINT, "value": RUN, "effect": "NoExecute"}
    assert [(taints, looks > 0) for taints, looks in seen] == [([bar], True)] * len(seen) and seen
    assert not taint.is_barred(place.node("gpu-0"), RUN) and fence.is_cordoned(place.node("gpu-0"))


@pytest.mark.parametrize("step", ["reimage", "restore"])
def test_a_host_with_a_pod_keeps_its_disk(place: Place, step: Step) -> None:
    """I2: also in the rollback of a host that failed, whatever the pod tolerates."""
    machine = place.machines.machine("0")
    machine.version = machine.disk = OLD if step == "reimage" else NEW
    place.occupy("gpu-0")
    with place.rolled() as (state, host):
        outcome = end(state, step, host)
    assert outcome.kind == "busy" and "work/late" in outcome.detail
    assert place.reimages == [0, 0] and fence.is_cordoned(place.node("gpu-0"))


@pytest.mark.parametrize("stays", [False, True])
def test_volumes_that_are_being_detached_are_waited_for(
    place: Place, monkeypatch: pytest.MonkeyPatch, *, stays: bool
) -> None:
    """Not for ever: those of pods that run on every node stay attached."""
    attached = [{"name": "kubernetes.io/csi/disk.csi.azure.com^data", "devicePath": ""}]
    find, looks, sent_after = place.cluster.find, list[str](), list[int]()
    place.node("gpu-0").setdefault("status", {})["volumesAttached"] = attached

    def seen(path: str) -> dict[str, Any] | None:
        if path == path_of_node("gpu-0") and not sent_after:
            looks.append(path)
            if len(looks) == 4 and not stays:
                place.node("gpu-0")["status"]["volumesAttached"] = []
        return find(path)

    def look(request: Request, _: Answer | None) -> None:
        if request.method == "POST" and request.path.endswith(("/manualupgrade", "/reimage")):
            sent_after.append(len(looks))

    monkeypatch.setattr(place.cluster, "find", seen)
    place.machines.arm.observers.append(look)
    with place.rolled() as (state, host):
        assert end(state, "reimage", host).ok
    assert place.reimages == [1, 0] and sent_after[0] >= (10 if stays else 4)


def test_a_host_that_says_it_is_at_work_keeps_its_disk(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the cluster says: it is asked itself before each request."""
    says = ["lease b"]
    with place.rolled() as (state, host):
        monkeypatch.setattr(state, "works", lambda _: says[0])
        outcome = end(state, "reimage", host)
        assert (outcome.kind, outcome.detail, place.reimages) == ("busy", "lease b", [0, 0])
        says[0] = ""
        assert end(state, "reimage", host).ok and place.reimages == [1, 0]


def test_a_host_that_a_lost_roll_left_with_the_new_image_takes_pods_again(place: Place) -> None:
    """R22: its plan is lost, too: it has a cordon and a taint with another roll's name."""
    place.cluster.add("gpu-0", "roll-lost")
    taint.bar(place.cluster, "gpu-0", "roll-lost")
    with place.rolled() as (state, host):
        assert end(state, "free", host).ok
    node = place.node("gpu-0")
    assert not fence.is_cordoned(node) and fence.record_of(node) is None and not node["spec"].get("taints")


def test_a_host_that_is_scaled_in_is_gone_and_nothing_of_it_is_left(place: Place) -> None:
    """R25"""
    with place.rolled() as (state, host):
        place.machines.scale_sets.remove(place.machines.path, host.instance)
        assert end(state, "reimage", host).is_failure
        del place.cluster.objects[path_of_node(host.name)]
        assert end(state, "free", host).ok
    assert place.machines.posts("/reimage") == []


def test_a_set_that_another_roll_drives_is_refused_before_anything_is_changed(place: Place) -> None:
    """R23: the mark on the set names its driver; it continues once the mark is gone."""
    tags = place.machines.group.content["tags"]
    tags[HOLD_TAG] = "roll-of-another until 2099-01-01T00:00:00+00:00"
    with pytest.raises(PoolError, match="is driven by roll-of-another"), place.rolled():
        pass
    assert not [method for method, path in place.cluster.log if method == "PATCH"]
    assert [entry.method for entry in place.machines.arm.log] == []
    del tags[HOLD_TAG]
    with place.rolled() as (state, host):
        assert end(state, "reimage", host).ok


def test_the_way_back_is_gone_when_it_is_needed(place: Place) -> None:
    """R29: the run says so, and ends; the model stays, and services are running again."""
    with place.rolled() as (state, host):
        assert end(state, "reimage", host).ok
        del place.machines.arm.resources[OLD.lower()]
        while (problem := state.turn()) is None:
            state.wait(state.now() + 60)
        assert "GalleryImageNotFound" in problem
    assert place.machines.group.image == NEW
    assert set(place.machines.group.services.values()) == {"Running"}


def test_a_rollback_takes_models_first(place: Place) -> None:
    """Before any host is touched. One that failed in the roll isn't drained: it is as it was left, or skipped."""
    with place.rolled(undoes="roll-0", broken=("gpu-0",)) as (state, host):
        assert place.machines.group.image == NEW and place.reimages == [0, 0]
        assert end(state, "drain", host).ok
        place.occupy(host.name)
        assert end(state, "drain", host).kind == "skipped"
