"""`pool snapshot` with Azure's real SDK against a server with documented answers, up to `pool plan`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from image_builder import errors
from image_builder.cli.main import app
from image_builder.pool.plan import plan as plans
from image_builder.pool.plan.inventory import read_fleet
from image_builder.pool.plan.model import Host
from image_builder.pool.plan.policy import Policy
from tests.support.arm.machines import GALLERY, SETS, Machines, number_of
from tests.support.arm.model import Answer, Request, Resource, error
from tests.support.arm.serving import SECRET, TOKEN, found_by, served
from tests.support.images.builds import REPO

pytestmark = pytest.mark.root

GROUPS = REPO / "inventories/azure_vmss/10-groups.yml"


@pytest.fixture
def azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """Serve a subscription, in an environment in which the SDK finds it."""
    (tmp_path / "cloud").mkdir()
    (tmp_path / "inventory").mkdir()
    machines = Machines()
    with served(machines.arm, tmp_path / "cloud") as service:
        found_by(service.environment, monkeypatch)
        yield machines


def _snapshot(azure: Machines, out: Path, *words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(
        app, ["pool", "snapshot", *words, "--out", str(out), "--endpoint", azure.arm.url, "--json"]
    )
    return done.exit_code, done.stdout, done.stderr


def _refused(azure: Machines, out: Path, *words: str) -> str:
    """Run a snapshot that must be refused and leave the file unchanged; return all its output."""
    before = out.read_bytes() if out.exists() else None
    status, told, said = _snapshot(azure, out, *words)
    assert status in (errors.DefinitionError.exit_code, errors.FetchError.exit_code), said
    assert (out.read_bytes() if out.exists() else None) == before
    assert sorted(p.name for p in out.parent.iterdir()) == ([out.name] if before is not None else [])
    return told + said


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "inventory/00-nodes.yml"


def test_a_snapshot_is_what_a_plan_is_made_from(azure: Machines, out: Path) -> None:
    """Both orchestration modes, several pages, a 429 and a 503 on the way: every host, exactly as it is."""
    first, second = azure.add("gpu-a", 7), azure.add("gpu-b", 2, mode="Flexible")
    once = iter([error(429, "TooManyRequests", "wait", Retry_After="1"), error(503, "ServerBusy", "busy")])
    azure.arm.faults = [lambda request: next(once, None) if _is_second_page(request) else None]
    status, told, said = _snapshot(azure, out, f"h100={first}", f"h100={second}")
    assert status == 0, said
    answer = json.loads(told)
    assert answer["hosts"] == 9 and answer["throttled"] == 1 and "wait 1 seconds" in said
    assert {s["scale_set"]: (s["hosts"], s["expected"], s["running"]) for s in answer["scale_sets"]} == {
        "gpu-a": (7, 7, 7),
        "gpu-b": (2, 2, 2),
    }
    assert answer["requests"] == azure.arm.reads
    assert answer["left"]["subscription-reads"] == 250 - azure.arm.reads
    fleet = read_fleet([out.parent], ["h100"])
    hosts = {host.name: host for host in fleet.hosts}
    assert len(hosts) == 9
    assert hosts["gpu-a000003"] == Host(
        name="gpu-a000003",
        address="10.0.0.7",
        pool="h100",
        scale_set="gpu-a",
        vm_size="Standard_ND96isr_H100_v5",
        zone="2",
        image="worker_h100",
        vm_id=azure.machine(first, 3)["properties"]["vmId"].lower(),
        scale_set_id=first,
        instance="3",
    )
    assert [(s.name, s.capacity, s.hosts) for s in fleet.pools[0].scale_sets] == [
        ("gpu-a", 7, 7),
        ("gpu-b", 2, 2),
    ]
    plan = out.parent.parent / "plan.json"
    done = CliRunner().invoke(
        app, ["pool", "plan", "-i", str(out.parent), "h100", "--out", str(plan), "--json"]
    )
    assert done.exit_code == 0 and json.loads(done.stdout)["pools"] == {"h100": 9}
    assert {h.name for h in plans.load(plan).hosts} == hosts.keys()


def test_variables_tell_of_the_machine(azure: Machines, out: Path) -> None:
    path = azure.add("gpu-a", 2)
    view = azure.machine(path, 1)["properties"]["instanceView"]
    view["statuses"][1]["code"] = "PowerState/deallocated"
    assert _snapshot(azure, out, f"h100={path}")[0] == 0
    document = yaml.safe_load(out.read_text())
    pools = document["all"]["children"]["pools"]
    assert pools["vars"]["pool_snapshot_taken"].endswith("Z")
    group = pools["children"]["h100"]["children"]["h100_gpu_a"]
    assert group["vars"] == {
        "pool_capacity": 2,
        "pool_image": "worker_h100",
        "pool_scale_set": "gpu-a",
        "pool_scale_set_id": path,
    }
    assert group["hosts"]["gpu-a000001"] == {
        "ansible_host": "10.0.0.5",
        "pool_build_id": "3f9c2a71d0b4",
        "pool_fault_domain": "1",
        "pool_image_version": "1.4.2",
        "pool_instance_id": "1",
        "pool_latest_model": False,
        "pool_power_state": "deallocated",
        "pool_provisioning_state": "Succeeded",
        "pool_vm_id": f"02aab8a4-74ef-476e-8182-{number_of('gpu-a'):04x}00000001",
        "pool_vm_size": "Standard_ND96isr_H100_v5",
        "pool_zone": "2",
    }


def test_the_same_hosts_give_the_same_bytes_in_any_order(azure: Machines, out: Path) -> None:
    path = azure.add("gpu-a", 7)
    files = []
    for _ in range(2):
        assert _snapshot(azure, out, f"h100={path}")[0] == 0
        files.append([line for line in out.read_text().splitlines() if "pool_snapshot_taken" not in line])
        azure.arm.resources = dict(reversed(azure.arm.resources.items()))
    assert files[0] == files[1]


def test_a_plan_is_older_than_the_next_snapshot(azure: Machines, out: Path) -> None:
    path = azure.add("gpu-a", 3)
    assert _snapshot(azure, out, f"h100={path}")[0] == 0
    before = read_fleet([out.parent], ["h100"])
    plan = plans.make_plan(before.inventory, before.pools, before.hosts, Policy())
    # A machine that was reimaged into another one, with the same name and address.
    azure.machine(path, 0)["properties"]["vmId"] = "02aab8a4-74ef-476e-8182-ffffffffffff"
    assert _snapshot(azure, out, f"h100={path}")[0] == 0
    now = read_fleet([out.parent], ["h100"])
    (problem,) = plans.stale(plan, now.inventory, now.hosts)
    assert problem.reason == "is older than the inventory: 1 replaced"


def _is_second_page(request: Request) -> bool:
    return request.query.get("$skiptoken") == "3"


def _hide(request: Request) -> Answer | None:
    """Silently lose a page, as a list that changes while it is read does."""
    is_hidden = request.path.endswith("/virtualMachines") and _is_second_page(request)
    return Answer(200, {"value": []}) if is_hidden else None


def test_fewer_hosts_than_expected_are_refused_and_all_are_named(azure: Machines, out: Path) -> None:
    path, other = azure.add("gpu-a", 5), azure.add("gpu-b", 2, capacity=4)
    del azure.arm.resources[f"{path}/networkInterfaces/0".lower()]
    azure.arm.faults = [_hide]
    out.write_text("all: {}\n")
    said = _refused(azure, out, f"h100={path}", f"h100={other}")
    assert "0 has no network interface with a private address; it is Succeeded" in said
    assert "3 has a network interface and isn't among the instances" in said
    assert "2 of 5 hosts were listed: 3 are lost" in said and "2 of 4 hosts were listed: 2 are lost" in said
    status, told, _ = _snapshot(azure, out, f"h100={path}", f"h100={other}", "--allow-fewer")
    assert status == 0
    assert [len(s["missing"]) for s in json.loads(told)["scale_sets"]] == [4, 1]
    # The user accepted that explicitly: a plan can be made from what is there.
    assert [s.capacity for s in read_fleet([out], ["h100"]).pools[0].scale_sets] == [2, 2]


def test_a_scale_set_that_says_no_capacity_is_not_counted_in_silence(azure: Machines, out: Path) -> None:
    path = azure.add("gpu-b", 2, mode="Flexible")
    del azure.arm.resources[path.lower()].content["sku"]
    assert "the number of hosts can't be checked" in _refused(azure, out, f"h100={path}")
    assert _snapshot(azure, out, f"h100={path}", "--allow-fewer")[0] == 0


def test_what_is_told_twice_or_goes_away_is_one_host_or_none(azure: Machines, out: Path) -> None:
    path = azure.add("gpu-a", 4, capacity=3)
    azure.machine(path, 1)["properties"]["provisioningState"] = "Deleting"
    azure.arm.resources[f"{path}/virtualMachines/again".lower()] = Resource(azure.machine(path, 0))
    status, told, said = _snapshot(azure, out, f"h100={path}")
    assert status == 0, said
    assert json.loads(told)["hosts"] == 3
    assert "gpu-a000001" not in out.read_text()


def test_two_machines_can_t_be_one_host(azure: Machines, out: Path) -> None:
    path = azure.add("gpu-a", 4)
    machines = [azure.machine(path, number)["properties"] for number in range(4)]
    interfaces = [azure.interface(path, number)["properties"] for number in range(4)]
    machines[1]["vmId"] = machines[0]["vmId"]
    machines[2]["osProfile"] = machines[3]["osProfile"]
    interfaces[2]["ipConfigurations"] = interfaces[3]["ipConfigurations"]
    said = _refused(azure, out, f"h100={path}")
    assert (
        "pool_vm_id: 02aab8a4-" in said and "ansible_host: 10.0.0.7" in said and "name: gpu-a000003" in said
    )


@pytest.mark.parametrize("place", ["tag", "computer name", "image"])
def test_no_template_comes_from_the_cloud(azure: Machines, out: Path, place: str) -> None:
    """Ansible evaluates the contents of an inventory, and anyone who may write tags controls a tag's text."""
    path, evil = azure.add("gpu-a", 1), "{{ lookup('pipe', 'id') }}"
    model, told = azure.arm.resources[path.lower()].content, azure.machine(path, 0)
    if place == "tag":
        model["tags"]["image-builder-build"] = evil
    elif place == "computer name":
        told["properties"]["osProfile"]["computerName"] = evil
    else:
        reference = {"id": f"{GALLERY}/{evil}"}
        model["properties"]["virtualMachineProfile"]["storageProfile"]["imageReference"] = reference
    assert "can't be" in _refused(azure, out, f"h100={path}")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (error(404, "NotFound", "The page is gone."), "The page is gone."),
        (error(403, "AuthorizationFailed", "does not have authorization"), "Reader"),
        (Answer(200, {"value": "<html>"}), "is invalid"),
        (Answer(200), "is invalid"),
    ],
    ids=["a page is gone", "not allowed", "nonsense", "nothing"],
)
def test_a_page_that_can_t_be_had_leaves_the_file_alone(
    azure: Machines, out: Path, fault: Answer, said: str
) -> None:
    path = azure.add("gpu-a", 7)
    out.write_text("all: {}\n")

    def hit(request: Request) -> Answer | None:
        return fault if request.path.endswith("/networkInterfaces") and _is_second_page(request) else None

    azure.arm.faults = [hit]
    assert said in _refused(azure, out, f"h100={path}")


def test_pages_that_go_round_in_circles_end(azure: Machines, out: Path) -> None:
    path = azure.add("gpu-a", 4)
    link = f"{azure.arm.url}{path}/virtualMachines?$expand=instanceView&$skiptoken=1"
    circle = Answer(200, {"value": [], "nextLink": link})
    azure.arm.faults = [lambda request: circle if request.path.endswith("/virtualMachines") else None]
    assert "result pages loop" in _refused(azure, out, f"h100={path}")


def test_who_is_nobody_is_told_so_and_no_secret_is(azure: Machines, out: Path) -> None:
    path = azure.add("gpu-a", 1)
    azure.arm.faults = [lambda _: error(401, "InvalidAuthenticationToken", "The access token is invalid.")]
    said = _refused(azure, out, f"h100={path}")
    assert "The access token is invalid." in said and TOKEN not in said and SECRET not in said


def test_no_such_scale_set(azure: Machines, out: Path) -> None:
    assert "was not found" in _refused(azure, out, f"h100={SETS}/gone")
    status, _, said = _snapshot(azure, out, "h100=gpu-a")
    assert status == errors.UsageError.exit_code and "not a pool and a scale set: h100=gpu-a" in said


def test_groups_are_made_on_top(azure: Machines, out: Path) -> None:
    """The example's `10-groups.yml`, with the real ansible-inventory."""
    path = azure.add("gpu-a", 4)
    assert _snapshot(azure, out, f"h100={path}")[0] == 0
    (out.parent / GROUPS.name).write_bytes(GROUPS.read_bytes())
    words = [f"{Path(sys.executable).parent}/ansible-inventory", "-i", os.fspath(out.parent), "--list"]
    done = subprocess.run(words, cwd=out.parent, capture_output=True, text=True, check=True)
    told = {name: set(group.get("hosts", ())) for name, group in json.loads(done.stdout).items()}
    everyone = {f"gpu-a{n:06d}" for n in range(4)}
    assert told["zone_1"] == {"gpu-a000000", "gpu-a000002"} and told["zone_2"] == everyone - told["zone_1"]
    assert told["image_1_4_2"] == told["power_running"] == everyone
    assert told["stale_model"] == {"gpu-a000001"} and told["fault_domain_3"] == {"gpu-a000003"}
    # The pool is unchanged: the additional groups exist next to it.
    assert {s.name for s in read_fleet([out.parent], ["h100"]).pools[0].scale_sets} == {"gpu-a"}
