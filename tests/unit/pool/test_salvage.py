"""Cleaning up after a roll whose driver and journal are lost, without a control plane."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from image_builder.drain import fence, taint
from image_builder.drain.lease import Leases
from image_builder.errors import PoolError
from image_builder.node.net.kube import KubeError, path_of_node
from image_builder.pool.salvage import Salvage, _is_older, salvage
from image_builder.pool.scale_set.client import Client
from image_builder.pool.steps.control_plane import NODES
from tests.support.arm.direct import Direct
from tests.support.arm.fleet import DEFINITION, NEW, OLD, Fleet, add_version, fleet
from tests.unit.drain.manifests import node_object
from tests.unit.drain.test_drain_run import Server
from tests.unit.pool.cluster import Cluster as Nodes
from tests.unit.pool.test_scale_set_target import hosts

RUN = "roll-000000000000"
THIRD = f"{DEFINITION}/versions/1.9.0"


class Cluster(Server):
    """The nodes of a fleet, all with the run's cordon. ``status`` is that of a denial."""

    def __init__(self, machines: Fleet, status: int = 422) -> None:
        super().__init__()
        self.status = status
        for host in hosts(machines):
            node = node_object({"a": "b"})
            self.nodes[host.name] = {**node, "metadata": {**node["metadata"], "name": host.name}}
            assert fence.send(self, host.name, fence.cordon(self.nodes[host.name], RUN, time.time())[1])

    def request(self, method: str, path: str, body: Any = None, content_type: str = "") -> dict[str, Any]:
        try:
            return super().request(method, path, body, content_type)
        except KubeError as error:
            if error.status == 422:
                raise KubeError(error.message, self.status) from error
            raise

    def each_page(
        self, path: str, query: Mapping[str, str], take: Callable[[dict[str, Any]], None], limit: int = 500
    ) -> None:
        assert (path, query, limit) == (NODES, {}, 500)
        for node in self.nodes.values():
            take(node)

    def cordoned(self) -> list[str]:
        return [name for name, node in self.nodes.items() if fence.is_cordoned(node)]


def _salvage(machines: Fleet, cluster: Cluster, version: str = NEW) -> Salvage:
    """Clean up after a driver that is dead and had suspended a service."""
    azure = Client(Direct(machines.arm))
    azure.hold(machines.path, RUN, time.time() + 600)
    azure.set_services(machines.path, ["AutomaticRepairs"], "Suspend")
    return salvage(cluster, azure, hosts(machines), RUN, version, settle=0.0)


@pytest.mark.parametrize("status", [422, 403])
def test_a_host_whose_uncordoning_is_denied_keeps_nothing_else_from_being_freed(status: int) -> None:
    machines = fleet(3)
    cluster = Cluster(machines, status)
    cluster.denied = {"gpu-0"}
    done = _salvage(machines, cluster)
    assert done.freed == ("gpu-1", "gpu-2") and cluster.cordoned() == ["gpu-0"]
    assert done.remaining.keys() == {"gpu-0"} and "denied request" in done.remaining["gpu-0"]
    assert done.released == (machines.path,)
    assert set(machines.group.services.values()) == {"Running"} and not machines.group.content["tags"]


@pytest.mark.parametrize(
    "version",
    ["1.8.0", f"{NEW}/", DEFINITION, f"{DEFINITION}/versions/latest", f"{DEFINITION}/versions/1.80.0"],
)
def test_a_version_that_is_misspelled_is_refused_before_anything_is_changed(version: str) -> None:
    machines = fleet(1)
    machines.machine("0").version = NEW
    cluster = Cluster(machines)
    with pytest.raises(PoolError, match="version"):
        _salvage(machines, cluster, version)
    assert cluster.cordoned() == ["gpu-0"]
    assert machines.group.services["AutomaticRepairs"] == "Suspended"


@pytest.mark.parametrize("names", [NEW, OLD])
def test_a_version_that_was_deleted_is_known_by_who_names_it(names: str) -> None:
    machines = fleet(2)
    machines.machine("0").version = NEW
    machines.group.profile["storageProfile"]["imageReference"]["id"] = names
    del machines.arm.resources[NEW.lower()]
    cluster = Cluster(machines)
    assert _salvage(machines, cluster, NEW.replace("galleries", "Galleries")).freed == ("gpu-1",)
    assert cluster.cordoned() == ["gpu-0"]


def test_a_host_whose_version_azure_does_not_tell_stays_cordoned() -> None:
    machines = fleet(2)
    machines.machine("0").version = f"{DEFINITION}/versions/"
    done = _salvage(machines, Cluster(machines))
    assert done.remaining == {"gpu-0": "its version is unknown"} and done.freed == ("gpu-1",)


def test_an_api_server_that_is_away_ends_it_before_anything_is_released() -> None:
    machines = fleet(1)
    cluster = Cluster(machines, 503)
    cluster.denied = {"gpu-0"}
    with pytest.raises(KubeError):
        _salvage(machines, cluster)
    assert machines.group.services["AutomaticRepairs"] == "Suspended"


@pytest.mark.parametrize("holder", [RUN, f"{RUN}-back-111111111111"])
def test_a_driver_that_may_be_alive_is_respected(holder: str) -> None:
    """It renews its Lease. Nobody has to wait until a claim expires whose Lease has."""
    machines = fleet(1)
    cluster, azure, leases = Cluster(machines), Client(Direct(machines.arm)), Held()
    azure.hold(machines.path, f"{holder}@boot.1.1", time.time() + 600)
    with pytest.raises(PoolError, match="is held by"):
        salvage(cluster, azure, hosts(machines), RUN, NEW, leases=cast("Leases", leases), settle=0.0)
    assert cluster.cordoned() == ["gpu-0"] and machines.group.content["tags"]
    leases.is_alive = False
    done = salvage(cluster, azure, hosts(machines), RUN, NEW, leases=cast("Leases", leases), settle=0.0)
    assert done.released == (machines.path,) and not machines.group.content["tags"]


class Held:
    """Leases of which each is renewed by another."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_alive = True

    def take(self, *scale_sets: str) -> None:
        self.asked += scale_sets
        if not self.is_alive:
            return
        raise PoolError(f"the scale set {scale_sets[0]} is held by {RUN}")


def test_a_driver_that_holds_only_its_lease_is_respected() -> None:
    """Before its first request it has claimed nothing."""
    machines = fleet(1)
    cluster, azure, leases = Cluster(machines), Client(Direct(machines.arm)), Held()
    machines.group.services["AutomaticRepairs"] = "Suspended"
    with pytest.raises(PoolError, match=f"is held by {RUN}"):
        salvage(cluster, azure, hosts(machines), RUN, NEW, leases=cast("Leases", leases), settle=0.0)
    assert leases.asked == [machines.path] and cluster.cordoned() == ["gpu-0"]
    assert machines.group.services["AutomaticRepairs"] == "Suspended"


def test_a_tainted_host_is_freed_unless_its_last_request_shows_in_the_wait() -> None:
    machines = fleet(3)
    cluster, waits = Nodes(), list[float]()
    for host in hosts(machines):
        cluster.add(host.name, RUN)

    def wait(seconds: float) -> None:
        waits.append(seconds)
        machines.machine("1").version = NEW

    azure = Client(Direct(machines.arm), wait=wait)
    for name in ("gpu-0", "gpu-1"):
        taint.bar(cluster, name, RUN)
    done = salvage(cluster, azure, hosts(machines), RUN, NEW, settle=60.0)
    assert waits == [60.0]
    assert (done.freed, list(done.remaining)) == (("gpu-0", "gpu-2"), ["gpu-1"])
    nodes = [cluster.objects[path_of_node(host.name)] for host in hosts(machines)]
    assert [fence.is_cordoned(node) for node in nodes] == [False, True, False]
    assert [taint.is_barred(node, RUN) for node in nodes] == [False, True, False]


def test_a_service_that_was_suspended_is_left_to_a_person_to_judge() -> None:
    machines = fleet(1)
    done = _salvage(machines, Cluster(machines))
    (unsure,) = done.unsure
    assert machines.path in unsure and "AutomaticRepairs" in unsure
    assert done.models == {machines.path: OLD}


def test_only_who_has_the_image_from_before_is_freed() -> None:
    """One has the roll's version, one another run's cordon, one the inventory doesn't have; no model is changed."""
    machines = fleet(4)
    cluster, azure = Cluster(machines), Client(Direct(machines.arm))
    machines.machine("1").version = NEW
    assert fence.free(cluster, "gpu-2", RUN)
    assert fence.send(cluster, "gpu-2", fence.cordon(cluster.nodes["gpu-2"], "roll-other", time.time())[1])
    known = [host for host in hosts(machines) if host.name != "gpu-3"]
    done = salvage(cluster, azure, known, RUN, NEW, settle=0.0)
    assert done.freed == ("gpu-0",) and cluster.cordoned() == ["gpu-1", "gpu-2", "gpu-3"]
    assert done.remaining == {
        "gpu-1": "it has the roll's version",
        "gpu-3": "the inventory doesn't have it: its image is unknown",
    }
    assert done.versions == {machines.path: {OLD: 3, NEW: 1}} and machines.group.image == OLD


@pytest.mark.parametrize("state", ["Updating", "Creating", "Deleting", "Failed"])
def test_a_host_whose_instance_is_being_replaced_keeps_its_marks(state: str) -> None:
    machines = fleet(2)
    machines.machine("0").state = state
    cluster = Cluster(machines)
    done = _salvage(machines, cluster)
    assert (done.freed, list(done.remaining), cluster.cordoned()) == (("gpu-1",), ["gpu-0"], ["gpu-0"])


@pytest.mark.parametrize("model", [OLD, NEW])
def test_a_wrong_version_frees_no_host_with_the_new_image(model: str) -> None:
    """The version from before the roll exists, too."""
    machines = fleet(3)
    machines.machine("0").version = NEW
    machines.group.profile["storageProfile"]["imageReference"]["id"] = model
    cluster = Cluster(machines)
    done = _salvage(machines, cluster, OLD)
    assert done.freed == () and cluster.cordoned() == ["gpu-0", "gpu-1", "gpu-2"]
    assert "1.8.0" in done.remaining["gpu-0"] and "--from" in done.remaining["gpu-0"]


def test_a_wrong_newer_version_frees_no_host_either() -> None:
    """It exists, but nobody has it: the roll was to another one."""
    machines = fleet(3)
    machines.machine("0").version = NEW
    add_version(machines.arm, THIRD)
    cluster, azure = Cluster(machines), Client(Direct(machines.arm))
    done = salvage(cluster, azure, hosts(machines), RUN, THIRD, settle=0.0)
    assert done.freed == () and cluster.cordoned() == ["gpu-0", "gpu-1", "gpu-2"]
    assert all("--from" in reason for reason in done.remaining.values())
    done = salvage(cluster, azure, hosts(machines), RUN, THIRD, before=OLD, settle=0.0)
    assert done.freed == ("gpu-1", "gpu-2") and cluster.cordoned() == ["gpu-0"]


def test_after_a_roll_to_an_older_version_the_one_from_before_is_named() -> None:
    machines = fleet(3)
    machines.machine("0").version = NEW
    add_version(machines.arm, THIRD)
    machines.machine("2").version = THIRD
    cluster, azure = Cluster(machines), Client(Direct(machines.arm))
    with pytest.raises(PoolError, match="the same"):
        salvage(cluster, azure, hosts(machines), RUN, OLD, before=OLD.replace("galleries", "Galleries"))
    with pytest.raises(PoolError, match="there is no version"):
        salvage(cluster, azure, hosts(machines), RUN, OLD, before=f"{DEFINITION}/versions/9.0.0")
    done = salvage(cluster, azure, hosts(machines), RUN, OLD, before=NEW, settle=0.0)
    assert done.freed == ("gpu-0",) and cluster.cordoned() == ["gpu-1", "gpu-2"]
    assert "neither" in done.remaining["gpu-2"]


@pytest.mark.parametrize(
    ("one", "other", "older"),
    [
        (OLD, NEW, True),
        (NEW, OLD, False),
        (OLD, OLD.upper(), False),
        (f"{DEFINITION}/versions/1.9.0", f"{DEFINITION}/versions/1.10.0", True),
        (f"{DEFINITION}-b/versions/1.0.0", NEW, False),
    ],
)
def test_versions_of_one_image_have_an_order(one: str, other: str, *, older: bool) -> None:
    assert _is_older(one, other) is older
