"""The real fleet of a roll, as far as no host is needed: which scale sets it holds, and what it finds in them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from image_builder.drain import fence
from image_builder.drain.policy import Policy
from image_builder.drain.taint import TAINT
from image_builder.errors import DefinitionError, FetchError
from image_builder.pool.plan.model import OK, Host, Joined, Outcome, Pool
from image_builder.pool.plan.plan import PlannedFrom, make_plan
from image_builder.pool.plan.policy import Policy as RollPolicy
from image_builder.pool.plan.policy import Roll
from image_builder.pool.reach.reach import Answer
from image_builder.pool.rollout import Options, _inventory
from image_builder.pool.run.driver import Work
from image_builder.pool.scale_set.client import Client
from image_builder.pool.scale_set.records import Model, Replacement
from image_builder.pool.scale_set.roll import Patience
from image_builder.pool.scale_set.target import read_target
from image_builder.pool.scale_set.verdict import Node
from image_builder.pool.steps.drains import Key
from image_builder.pool.steps.fleet import Change, Setup
from image_builder.pool.steps.nodes import ask_work
from image_builder.pool.steps.roll import RollFleet
from tests.support.arm.direct import Direct
from tests.support.arm.fleet import BUILDS, NEW, OLD, Fleet, fleet
from tests.unit.drain.manifests import node_object, pod_object
from tests.unit.drain.test_drain_quarantine import applied
from tests.unit.drain.test_drain_run import Server
from tests.unit.pool.test_fleet import only, setup
from tests.unit.pool.test_scale_set_target import hosts

__all__ = ["setup"]


class Empty:
    """A cluster without any Lease."""

    served_at = None

    def find(self, _path: str) -> None:
        return None

    def request(self, _method: str, _path: str, _body: object = None) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


@contextmanager
def rolled(
    setup: Setup,
    machines: Fleet,
    folder: Path,
    *,
    force_ephemeral: bool = False,
    model: str = "",
    undoes: str = "",
    broken: tuple[str, ...] = (),
    kube: Callable[[], Any] = Empty,
    on_note: Callable[[str], None] = lambda _: None,
    **more: Any,
) -> Iterator[tuple[RollFleet, list[Host]]]:
    """Yield the fleet of a roll that has begun, with none of its hosts in work, and the hosts.

    ``model`` is the version that the scale set's model names since the plan, if it has changed; ``more`` are other
    parts of the change.
    """
    client, planned = Client(Direct(machines.arm), wait=lambda _: None), hosts(machines)
    target = read_target(client, planned, NEW, force_ephemeral=force_ephemeral)
    if model:
        machines.group.profile["storageProfile"]["imageReference"]["id"] = model
    change = Change(
        target=target.model_copy(update={"undoes": undoes, "broken": broken}),
        run="roll-1",
        holder="roll-1",
        kube=kube,
        azure=client,
        journal=folder / "requests.jsonl",
        force_ephemeral=force_ephemeral,
        patience=Patience(look=0.01, settle=0.05, minute=0.01),
        settle_seconds=0.0,
        **{"policy": Policy(), "asks_nodes": False, **more},
    )
    with RollFleet(setup, change, folder / "work", on_note=on_note) as state:
        yield state, planned


@pytest.mark.parametrize(("is_ephemeral", "force"), [(False, False), (False, True), (True, True)])
def test_only_ephemeral_disks_are_forced(
    setup: Setup, tmp_path: Path, *, is_ephemeral: bool, force: bool
) -> None:
    machines = fleet(1)
    if is_ephemeral:
        machines.group.profile["storageProfile"]["osDisk"]["diffDiskSettings"] = {"option": "Local"}
    with rolled(setup, machines, tmp_path, force_ephemeral=force) as (state, _):
        assert state._drive(machines.path).force_ephemeral is is_ephemeral


def test_a_roll_whose_version_another_tool_spells_in_another_case_resumes_and_turns_back(
    setup: Setup, tmp_path: Path
) -> None:
    machines = fleet(1)
    with rolled(setup, machines, tmp_path, model=NEW.upper()) as (state, _):
        state._journal.append(Model(at=1, scale_set=machines.path, before=OLD, after=NEW.upper()))
        while state.turn() is None:
            state.wait(state.now() + 60)
    assert machines.group.image == OLD


def test_a_rollback_leaves_a_model_that_names_its_version_in_another_case(
    setup: Setup, tmp_path: Path
) -> None:
    with rolled(setup, fleet(1), tmp_path, model=NEW.upper(), undoes="roll-0") as (state, _):
        assert not any(isinstance(record, Model) for record in state._journal.records)


def test_instances_beside_the_plan_are_found_with_their_versions(setup: Setup, tmp_path: Path) -> None:
    """R24, R11: scaled out after the plan, before and after the model changed; and a machine that replaced another."""
    machines = fleet(2)
    with rolled(setup, machines, tmp_path) as (state, planned):
        assert state.unplanned(planned) == {}
        machines.scale_sets._scale(machines.group, 3)
        machines.group.profile["storageProfile"]["imageReference"]["id"] = NEW
        machines.scale_sets._scale(machines.group, 4)
        assert machines.scale_sets.repair(machines.path, "1")
        members = f"{machines.path}/virtualMachines"
        assert state.unplanned(planned) == {f"{members}/1": NEW, f"{members}/2": OLD, f"{members}/3": NEW}
        machines.arm.actions.remove("Microsoft.Compute/virtualMachineScaleSets/virtualMachines/read")
        assert state.unplanned(planned) == {machines.path: ""}


def test_a_restore_that_was_given_up_sends_nothing(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host is reported as still cordoned: nothing may happen to it afterwards."""
    machines = fleet(1)
    with rolled(setup, machines, tmp_path) as (state, (host,)):
        machine = machines.group.machines[host.instance]
        machine.version = machine.disk = NEW
        monkeypatch.setattr(state, "read", lambda _: Node(machine.boot_id, BUILDS[NEW]))
        key: Key = (host.name, "restore", 1)
        state.give_up(*key)
        outcome, _ = state._restore(host, key)
    assert (outcome.kind, machine.reimages, machine.version) == ("busy", 0, NEW)


@pytest.mark.parametrize("sent", [False, True])
def test_a_host_that_was_given_up_before_anything_was_sent_is_untouched_and_stays_so(
    setup: Setup, tmp_path: Path, *, sent: bool
) -> None:
    machines = fleet(1)
    with rolled(setup, machines, tmp_path) as (state, (host,)):
        request = Replacement(
            at=1,
            verb="upgrade",
            scale_set=host.scale_set_id,
            instance=host.instance,
            vm_id=host.vm_id,
            boot_id="b",
            version=NEW,
            build=BUILDS[NEW],
        )
        if sent:
            state._journal.append(request)
        state._begin(Work(host, 1), "reimage")
        assert state.give_up(host.name, "reimage", 1) == ("unknown" if sent else "no")
        # Its thread may have passed its last look just then.
        with nullcontext() if sent else pytest.raises(FetchError):
            state._journal.append(request)
        state._journal.open(host)
        state._journal.append(request)


def test_reads_of_everything_are_counted_and_shown(setup: Setup, tmp_path: Path) -> None:
    shown: list[str] = []
    with rolled(setup, fleet(1), tmp_path, on_note=shown.append) as (state, (host,)):
        cluster = Server()
        node = applied(node_object(), fence.cordon(node_object(), "roll-1", 1.0)[1])
        node["spec"]["taints"] = [{"key": TAINT, "value": "roll-1", "effect": "NoExecute"}]
        cluster.nodes[host.name] = node
        for barred in ("100", "101", "101", "99"):
            assert state._occupied(cluster, host, barred) == ""
        state.wait(0.0)
        state.conclude()  # the driver's last call
    assert [line.rpartition(" ")[2] for line in shown] == ["1", "2"]


def test_a_host_is_freed_while_others_hold_all_threads(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def silent(*_: object) -> tuple[Outcome, Joined]:
        over.wait(5)
        return OK, "no"

    with rolled(replace(setup, at_once=1), fleet(2), tmp_path) as (state, (first, second)):
        monkeypatch.setattr(state, "_look", silent)
        monkeypatch.setattr(state, "_free", lambda *_: (OK, "unknown"))
        state.begin("probe", [Work(first, 1)])
        state.begin("free", [Work(second, 1)])
        try:
            assert only(state).host == second.name
        finally:
            over.set()


@pytest.mark.parametrize("value", ["roll-1", "roll-2", None])
def test_a_host_whose_taint_somebody_removed_gets_no_request(
    setup: Setup, tmp_path: Path, value: str | None
) -> None:
    with rolled(setup, fleet(1), tmp_path) as (state, (host,)):
        cluster, node = Server(), node_object()
        node = applied(node, fence.cordon(node, "roll-1", 1.0)[1])
        node["spec"]["taints"] = [{"key": TAINT, "value": value, "effect": "NoExecute"}] if value else []
        cluster.nodes[host.name] = node
        assert bool(state._occupied(cluster, host, "7")) is (value != "roll-1")
        assert state._occupied(cluster, host) == ""


@pytest.mark.parametrize(("asks_nodes", "asked"), [(True, 1), (False, 0)])
def test_a_host_is_asked_what_it_works_on_if_the_plan_says_so(
    setup: Setup, tmp_path: Path, *, asks_nodes: bool, asked: int
) -> None:
    sent: list[tuple[str, ...]] = []

    def submit(_host: Host, command: tuple[str, ...], **_: Any) -> Future[Answer]:
        sent.append(command)
        answer: Future[Answer] = Future()
        answer.set_result(Answer(OK, 0, b"lease b\n", b"", 0.0))
        return answer

    with rolled(setup, fleet(1), tmp_path, asks_nodes=asks_nodes) as (state, (host,)):
        state._reach.submit = submit  # type: ignore[assignment]
        assert ("lease b" in state.works(host)) is asks_nodes
    assert sent == [ask_work()] * asked


class Leased(Server):
    """An API server without any Lease. ``decided``: a pod was evicted, or left alone in several looks."""

    def __init__(self) -> None:
        super().__init__()
        self.looks, self.decided = 0, threading.Event()

    def find(self, path: str) -> dict[str, Any] | None:
        return None if "/leases/" in path else super().find(path)

    def request(self, method: str, path: str, body: Any = None, content_type: str = "") -> dict[str, Any]:
        return {} if "/leases" in path else super().request(method, path, body, content_type)

    def each(self, path: str, take: Callable[[dict[str, Any]], None]) -> str:
        version = super().each(path, take)
        self.looks += path.startswith("/api/v1/pods?")
        if self.looks > 6:
            self.decided.set()
        return version

    def evict(self, namespace: str, name: str, uid: str, *, dry_run: bool = False) -> None:
        super().evict(namespace, name, uid, dry_run=dry_run)
        self.pods.clear()
        self.decided.set()


@pytest.mark.parametrize(("deadline", "evicted"), [(0.0, ["a"]), (inf, [])])
def test_a_roll_evicts_a_job_only_after_its_deadline(
    setup: Setup, tmp_path: Path, deadline: float, evicted: list[str]
) -> None:
    cluster = Leased()
    more: Any = {"policy": Policy(settle_seconds=0.0, poll_seconds=0.01), "deadline": deadline}
    with rolled(setup, fleet(1), tmp_path, kube=lambda: cluster, **more) as (state, (host,)):
        gpus = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "8"}}}
        pod = pod_object(owner="Job", spec={"nodeName": host.name, "containers": [gpus]})
        node = node_object({"a": "b"})
        node["metadata"]["name"] = host.name
        cluster.nodes[host.name], cluster.pods[host.name] = node, [pod]
        state.begin("drain", [Work(host, 1)])
        assert cluster.decided.wait(60) and cluster.evicted == evicted


def _inventory_file(folder: Path, machines: Fleet, scale_sets: Mapping[str, str]) -> Path:
    """Write an inventory of these machines; ``scale_sets`` are the ids of their scale sets, by host."""
    ids = {f"gpu-{machine.id}": machine.vm_id for machine in machines.group.machines.values()}
    variables = [
        f"        {name}: {{pool_image: worker, pool_vm_size: size, pool_vm_id: {ids.get(name, name)},"
        f" pool_scale_set_id: {path}, pool_instance_id: '{name[-1]}'}}\n"
        for name, path in scale_sets.items()
    ]
    file = folder / "hosts.yml"
    file.write_text("all:\n  children:\n    gpu:\n      hosts:\n" + "".join(variables))
    return file


def test_a_resumed_roll_refuses_hosts_of_scale_sets_that_its_plan_lacks(setup: Setup, tmp_path: Path) -> None:
    """They would be drained before anything else shows it. Resource Manager ignores the case of ids."""
    machines = fleet(2)
    names = {"gpu-0": machines.path.upper(), "gpu-1": machines.path}
    file, planned = _inventory_file(tmp_path, machines, names), hosts(machines)
    target = read_target(Client(Direct(machines.arm)), planned, NEW)
    source, pools = PlannedFrom(paths=(str(file),), digest="d"), [Pool(name="gpu", scale_sets=())]
    plan = make_plan(source, pools, planned, RollPolicy(mode="roll", roll=Roll()), target=target)
    options = Options(tmp_path / "plan.json", setup.access, tmp_path, is_resumed=True)
    for is_resumed in (True, False):
        present = _inventory(options._replace(is_resumed=is_resumed), plan).hosts
        assert {host.scale_set_id for host in present} == {machines.path}
    _inventory_file(
        tmp_path, machines, names | {"gpu-2": f"{machines.path}-b", "gpu-3": f"{machines.path}-c"}
    )
    with pytest.raises(DefinitionError, match=r"aren't in the plan: gpu-2, gpu-3"):
        _inventory(options, plan)
    # A first run finds that its plan is older.
    assert len(_inventory(options._replace(is_resumed=False), plan).hosts) == 4
    undone = plan.model_copy(update={"target": target.model_copy(update={"undoes": "roll-1"})})
    assert len(_inventory(options, undone).hosts) == 2
