"""`node-agent join` with real files, sockets and TLS: each phase's failure with its number, and what is left behind.

tests/support/nodes/joining_machine.py describes what surrounds the machine, and which parts of that are simulated.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import status
from image_builder.node.join import command, kubelet
from image_builder.node.join.binding import slot
from image_builder.node.join.record import Record
from tests.support.control_plane.gates import in_background, wait_until
from tests.support.images.builds import REPO
from tests.support.nodes import joins
from tests.support.nodes.joining_machine import NODE, World, files, served

pytestmark = pytest.mark.root


@pytest.fixture
def days() -> tuple[float, float]:
    """Return the validity period of the API server's certificate, in days from now."""
    return (-1, 30)


@pytest.fixture
def world(tmp_path: Path, days: tuple[float, float]) -> Iterator[World]:
    with served(tmp_path, days) as made:
        yield made


def test_a_node_joins_with_a_token_by_custom_data(world: World) -> None:
    assert world.join() == 0
    record = world.record
    assert (record["state"], record["code"], record["boot_id"], record["generation"]) == (
        "ok",
        0,
        world.boot,
        7,
    )
    assert list(world.states) == [
        "identity",
        "network",
        "disk",
        "runtime",
        "gpu",
        "credentials",
        "join",
        "kubelet",
        "ready",
    ]
    assert set(world.states.values()) == {"ok", "skipped"}
    assert (record["source"], record["vm_id"]) == ("user data", joins.VM_ID)
    assert (world.kubernetes / "node.env").read_text().splitlines() == [
        "KUBELET_NODE_LABELS=node.example/pool=h100-a,topology.kubernetes.io/zone=westus3-1,"
        "node.example/fault-domain=2,node.example/build=20261101-1",
        "KUBELET_NODE_IP=127.0.0.1",
        "KUBELET_PROVIDER_ID=azure:///subscriptions/8d10da13-8125-4ba9-a717-bf7490507b3d/resourceGroups/pools-west/"
        "providers/Microsoft.Compute/virtualMachineScaleSets/vmss-h100-a/virtualMachines/17",
        "KUBELET_EXTRA_ARGS=--cluster-dns=10.0.0.10 --max-pods=30 "
        "--register-with-taints=node.example/team=research:NoSchedule",
    ]
    assert (world.kubernetes / "pki/ca.crt").read_text() == world.ca.certificate
    assert command.tell_status(world.places()) == 0


def test_the_token_is_in_one_file_of_roots_and_goes_with_the_certificate(world: World) -> None:
    world.approves = False
    world.tell(join={"deadlines": {"ready": 1}})
    assert world.join() == 1 and world.failure == ("ready", 91)
    bootstrap = world.kubernetes / "bootstrap-kubelet.conf"
    assert bootstrap.stat().st_mode & 0o777 == 0o600
    holders = [path for path, (data, *_) in world.tree().items() if joins.TOKEN.encode() in data]
    assert sorted(holders) == [os.fspath(world.directory / "custom-data"), os.fspath(bootstrap)]
    world.approves = True
    assert world.join() == 0
    assert not bootstrap.exists()


def test_a_second_run_changes_nothing_and_asks_for_no_token(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.by_broker(join={"hosts": 100, "rate": 50})
    assert world.join() == 0
    tokens = [path for path in world.asked_imds if "oauth2" in path]
    before, asked = world.tree(), len(world.asked_api)
    capsys.readouterr()
    assert world.join() == 0
    assert "join: join skipped: already a member" in capsys.readouterr().out  # it doesn't wait for a slot
    assert world.tree() == before
    assert [path for path in world.asked_imds if "oauth2" in path] == tokens
    assert world.asked_api[asked:] == ["/version", f"/api/v1/nodes/{NODE}"]


def test_a_broker_gives_the_token_to_the_managed_identity_and_refusals_are_waited_for(world: World) -> None:
    world.throttled = 2
    used = (409, {"Retry-After": "0"}, b'{"error": "document.used"}')
    answers = iter([(429, {"Retry-After": "0"}, b""), (503, {}, b""), used, world.broker()])
    world.broker = lambda: next(answers)
    world.by_broker()
    assert world.join() == 0
    who = {"vm_id": joins.VM_ID, "node": NODE, "boot_id": world.boot}
    # Each time with its own nonce and document.
    assert world.posted == [who, {**who, "document": joins.DOCUMENT}] * 4
    assert [path.partition("?")[0] for path in world.asked_imds] == [
        *["/metadata/instance"] * 3,
        "/metadata/identity/oauth2/token",
        *["/metadata/attested/document"] * 4,
    ]
    assert "resource=api%3A%2F%2Fnode-broker" in world.asked_imds[3]
    assert f"nonce={joins.NONCE}" in world.asked_imds[-1]


def test_a_new_generation_is_written_and_the_kubelet_started_again(world: World) -> None:
    assert world.join() == 0
    assert not (world.directory / "restarted").exists()  # it was started by its path unit
    posted = len(world.asked_api)
    world.tell(generation=8, node={"max_pods": 60})
    assert world.join() == 0
    assert world.record["generation"] == 8
    assert json.loads((world.directory / "etc/join-taints.json").read_bytes()) == {"taints": []}
    assert "--max-pods=60" in (world.kubernetes / "node.env").read_text()
    assert (world.directory / "restarted").exists() and len(world.asked_api) > posted
    assert not (world.kubernetes / "bootstrap-kubelet.conf").exists()


def test_a_restart_that_failed_is_made_up_for(world: World) -> None:
    assert world.join() == 0
    world.tell(generation=8, node={"max_pods": 60})
    places = world.places()
    assert command.run(replace(places, restart=("false",))) == 1 and world.failure == ("kubelet", 82)
    assert world.join() == 0 and (world.directory / "restarted").exists()
    (world.directory / "restarted").unlink()
    before = world.tree()
    assert world.join() == 0 and world.tree() == before


def test_killed_between_its_files_it_restarts_the_kubelet_the_next_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = {"state": "failed", "code": "disk.foreign", "reason": ""}
    status.update("disk", section, world.places())
    assert world.join() == 0
    assert "team" in (world.directory / "run/kubelet.env").read_text()
    world.tell(generation=8, node={"max_pods": 60})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(status, "update", killed)
        with pytest.raises(KeyboardInterrupt):
            world.join()
    assert "--max-pods=60" in (world.kubernetes / "node.env").read_text()
    assert world.join() == 0 and (world.directory / "restarted").exists()
    assert "team" not in (world.directory / "run/kubelet.env").read_text()


AZURE = {
    "tenant_id": "72f988bf-86f1-41af-91ab-2d7cd011db47",
    "client_id": "2b9a3f1e-3a5e-4b57-9d5a-0a7b4f6d8c11",
}


def test_credential_providers_find_what_they_read(world: World) -> None:
    assert world.join() == 0
    cloud_config = world.kubernetes / "azure.json"
    assert not cloud_config.exists()
    world.tell(generation=8, azure=AZURE)
    assert world.join() == 0
    assert json.loads(cloud_config.read_bytes()) == {
        "cloud": "AzurePublicCloud",
        "tenantId": AZURE["tenant_id"],
        "subscriptionId": "8d10da13-8125-4ba9-a717-bf7490507b3d",
        "resourceGroup": "Pools-West",
        "location": "westus3",
        "useManagedIdentityExtension": True,
        "userAssignedIdentityID": AZURE["client_id"],
    }
    before = world.tree()
    assert world.join() == 0 and world.tree() == before
    world.tell(generation=8, azure={"tenant_id": AZURE["tenant_id"]})
    assert world.join() == 0
    assert json.loads(cloud_config.read_bytes())["userAssignedIdentityID"] == ""


def test_what_credential_providers_read_goes_with_the_configuration(world: World) -> None:
    cloud_config = world.kubernetes / "azure.json"
    world.tell(azure=AZURE)
    assert world.join() == 0 and cloud_config.exists()
    world.tell(generation=8)
    assert world.join() == 0 and not cloud_config.exists()
    assert "azure.json" in _reason(world, "kubelet")
    before = world.tree()
    assert world.join() == 0 and world.tree() == before
    for theirs in ('{"tenantId": "t", "aadClientSecret": "s"}', "not JSON"):
        cloud_config.write_text(theirs)
        assert world.join() == 0 and cloud_config.read_text() == theirs


def _reason(world: World, name: str) -> str:
    return next(str(phase["reason"]) for phase in world.record["phases"] if phase["name"] == name)


def test_a_member_whose_certificate_is_over_keeps_the_token_until_it_has_another(world: World) -> None:
    assert world.join() == 0
    before = (world.directory / "client.pem").read_text()
    world.expired = True
    world.tell(join={"deadlines": {"ready": 5}})
    assert world.join() == 0, world.record
    assert (world.directory / "client.pem").read_text() != before and not world.expired
    assert (world.directory / "restarted").exists()
    assert not (world.kubernetes / "bootstrap-kubelet.conf").exists()


def test_one_api_server_that_rejects_a_member_is_not_believed(world: World) -> None:
    world.tell(join={"deadlines": {"ready": 5}})
    assert world.join() == 0
    before, world.rejections = world.tree(), 2
    assert world.join() == 0 and world.rejections == 0
    assert world.tree() == before  # no token, and no kubelet that is restarted


def test_a_certificate_that_is_rejected_before_its_end_needs_a_reimage(world: World) -> None:
    assert world.join() == 0
    world.rejections = 1000
    world.tell(join={"deadlines": {"ready": 1}})
    assert world.join() == 1 and world.failure == ("ready", 91)
    assert world.record["reason"] == "the API server rejects the kubelet's unexpired certificate: reimage"


SHORT = {"deadlines": {"identity": 1, "network": 1, "credentials": 1, "ready": 1}}


def test_a_member_never_gets_a_wrong_ca(world: World) -> None:
    assert world.join() == 0
    before = files(world.kubernetes)
    world.tell(ca=joins.authority().certificate, join=SHORT)
    assert world.join() == command.FINAL and world.failure == ("credentials", 65)
    assert files(world.kubernetes) == before and not (world.directory / "restarted").exists()
    world.tell()
    assert world.join() == 0 and files(world.kubernetes) == before


def test_a_member_with_another_name_is_refused(world: World) -> None:
    assert world.join() == 0
    before = files(world.kubernetes)
    world.tell(node={"name": "renamed"}, join=SHORT)
    assert world.join() == command.FINAL and world.failure == ("credentials", 65)
    assert f"is for {NODE}: another name needs a new disk" in world.record["reason"]
    assert files(world.kubernetes) == before and not (world.directory / "restarted").exists()


def test_a_member_gets_the_ca_that_came_while_it_was_off(world: World) -> None:
    assert world.join() == 0
    authority = world.kubernetes / "pki/ca.crt"
    authority.write_text(joins.authority().certificate)
    world.tell(join=SHORT)
    assert world.join() == 0, world.record
    assert authority.read_text() == world.ca.certificate and (world.directory / "restarted").exists()


def test_a_member_whose_clock_is_off_says_so(world: World) -> None:
    assert world.join() == 0
    tomorrow = joins.issued(world.ca, "kube-apiserver", (1, 30))
    (world.directory / "server.pem").write_text(tomorrow.certificate + tomorrow.key)
    world.tls.load_cert_chain(world.directory / "server.pem")
    world.api_server.date_off = 2 * 86400
    assert world.join() == 1 and world.failure == ("credentials", 66)


def _other_ca(world: World) -> None:
    world.tell(ca=joins.authority().certificate)


def _clock(world: World) -> None:
    world.api_server.date_off = 86400


def _refuse(world: World) -> None:
    world.custom(bootstrap_token="expired.0123456789abcdef"[1:])


def _identity(world: World) -> None:
    world.has_identity = False
    world.by_broker(join=SHORT)


def _nonce(value: object) -> Callable[[World], None]:
    def change(world: World) -> None:
        world.nonce = lambda: joins.answer(value)
        world.by_broker(join=SHORT)

    return change


def _broker(answer: joins.Answer) -> Callable[[World], None]:
    def change(world: World) -> None:
        world.broker = lambda: answer
        world.by_broker(join=SHORT)

    return change


def _settings(**settings: Any) -> Callable[[World], None]:
    return lambda world: world.settings(**settings)


def _told(**parts: Any) -> Callable[[World], None]:
    return lambda world: world.tell(**parts)


def _alone(world: World) -> None:
    world.settings(imds="")
    (world.directory / "node-config.json").write_bytes(world.user_data)


def _no_cloud(world: World) -> None:
    """There is no metadata service that could say which cloud it is."""
    world.tell(azure=AZURE, node={"ip": "127.0.0.1", "provider_id": "none"})
    _alone(world)


def _not_ready(world: World) -> None:
    world.ready = "False"
    world.tell(join=SHORT)


def _no_network(world: World) -> None:
    _not_ready(world)
    world.settings(pod_network=os.fspath(world.directory / "net.d"))


def _unready_network(world: World) -> None:
    """The add-on has arrived, so something else keeps the node from being Ready."""
    _no_network(world)
    (world.directory / "net.d").mkdir()
    (world.directory / "net.d/10-azure.conflist").write_text("{}")


FAILURES: dict[str, tuple[Callable[[World], object], str, int]] = {
    "settings that can't be used": (_settings(speed=3), "identity", 16),
    "a schema error": (_told(join={"rate": -1}), "identity", 13),
    "a secret in user data": (_told(generation=joins.TOKEN), "identity", 14),
    "an address that the platform does not know": (_alone, "identity", 15),
    "a cloud that the platform does not name": (_no_cloud, "identity", 15),
    "a tenant that is none": (_told(azure={"tenant_id": "example.com"}), "identity", 13),
    "an address of another machine": (_told(node={"ip": "192.0.2.1"}, join=SHORT), "network", 21),
    "a name that does not resolve": (
        lambda w: w.tell(
            cluster={"server": "https://nobody.invalid:6443", "ca": w.ca.certificate}, join=SHORT
        ),
        "network",
        22,
    ),
    "nobody listens": (
        lambda w: w.tell(cluster={"server": "https://127.0.0.1:9", "ca": w.ca.certificate}, join=SHORT),
        "network",
        23,
    ),
    "another CA": (_other_ca, "credentials", 65),
    "a clock that is off by a day": (_clock, "credentials", 66),
    "an expired token": (_refuse, "credentials", 64),
    "no token": (lambda w: w.custom(), "credentials", 68),
    "no managed identity": (_identity, "credentials", 61),
    "a broker that refuses": (_broker((403, {}, b"")), "credentials", 62),
    "a broker that is too busy": (_broker((429, {"Retry-After": "60"}, b"")), "credentials", 62),
    "a document that was used, for too long": (
        _broker((409, {"Retry-After": "60"}, b'{"error":"document.used"}')),
        "credentials",
        62,
    ),
    "a broker without a nonce": (_nonce({"nonce": "12"}), "credentials", 63),
    "a broker that talks nonsense": (_broker(joins.answer({"token": "x"})), "credentials", 63),
    "a token that expires at once": (
        _broker(joins.answer({"token": joins.TOKEN, "expires": "2020-01-01T00:00:00Z"})),
        "credentials",
        69,
    ),
    "a node that does not get Ready": (_not_ready, "ready", 93),
    "a network that never comes": (_no_network, "ready", 95),
    "a network that came to a node that is not Ready": (_unready_network, "ready", 93),
}


@pytest.mark.parametrize("name", FAILURES)
def test_each_failure_has_its_number_and_starts_no_kubelet(world: World, name: str) -> None:
    change, phase, number = FAILURES[name]
    change(world)
    status = world.join()
    assert world.failure == (phase, number), world.record
    # The unit is restarted, unless someone has to change something first.
    is_final = world.record["class"] in ("configuration", "image")
    assert status == (command.FINAL if is_final else command.AGAIN)
    assert world.record["phases"][-1]["name"] == phase and world.record["class"]
    assert joins.TOKEN not in json.dumps(world.record)
    if phase != "ready":
        assert list(world.kubernetes.iterdir()) == []
    assert command.tell_status(world.places()) == 1


def test_a_network_that_comes_while_joining_waits_lets_the_node_join(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubelet, "_ASK_SECONDS", 0.1)
    network, world.ready = world.directory / "net.d", "False"
    world.settings(pod_network=os.fspath(network))

    def come(_stop: threading.Event) -> None:
        # It asks a second time only if the first answer was that the node isn't Ready.
        if wait_until(lambda: world.asked_api.count(f"/api/v1/nodes/{NODE}") > 1):
            network.mkdir()
            (network / "10-azure.conflist").write_text("{}")
            world.ready = "True"

    with in_background(come):
        assert world.join() == 0, world.record
    assert world.states["ready"] == "ok"


@pytest.mark.parametrize("days", [(1.0, 30.0)])
def test_a_certificate_of_tomorrow_is_a_clock_that_is_behind(world: World) -> None:
    world.api_server.date_off = 2 * 86400
    assert world.join() == 1 and world.failure == ("credentials", 66)


@pytest.mark.parametrize("days", [(-30.0, -1.0)])
def test_a_certificate_of_yesterday_is_not_the_clocks_fault(world: World) -> None:
    """It may be renewed any moment, so the unit tries again."""
    assert world.join() == 1 and world.failure == ("credentials", 67)
    assert "expired" in world.record["reason"]


def test_nobody_has_told_it_to_join_and_that_fails_no_unit(world: World) -> None:
    world.user_data = b"#cloud-config\n"
    (world.directory / "custom-data").unlink()
    assert world.join() == 0 and world.failure == ("identity", 12)
    assert command.tell_status(world.places()) == 1


def test_user_data_come_before_custom_data_and_those_before_a_file(world: World) -> None:
    told = json.loads(world.user_data)
    (world.directory / "node-config.json").write_text(json.dumps({**told, "generation": 1}))
    world.custom(bootstrap_token=joins.TOKEN, config={**told, "generation": 2})
    assert world.join() == 0 and (world.record["source"], world.record["generation"]) == ("user data", 7)
    world.user_data = b""
    assert world.join() == 0 and (world.record["source"], world.record["generation"]) == ("custom data", 2)
    world.custom(bootstrap_token=joins.TOKEN)
    assert world.join() == 0 and world.record["generation"] == 1
    world.custom(bootstrap_token=joins.TOKEN, token="x")
    assert world.join() == 2 and world.failure == ("identity", 13)


def test_a_metadata_service_that_is_away_is_no_reason_where_a_file_says_it_all(world: World) -> None:
    told = json.loads(world.user_data)
    told["node"] = {"ip": "127.0.0.1", "provider_id": "none"}
    (world.directory / "node-config.json").write_text(json.dumps(told))
    world.settings(imds="")
    assert world.join() == 0
    assert world.record["vm_id"] == "11111111-2222-3333-4444-555555555555"
    assert "KUBELET_PROVIDER_ID" not in (world.kubernetes / "node.env").read_text()


def test_what_other_units_found_is_waited_for_and_believed(world: World) -> None:
    (world.directory / "etc/disk.json").write_text("{}")
    world.tell(join={"deadlines": {"disk": 1}})
    assert world.join() == 1 and world.failure == ("disk", 32)
    status = {
        "format": 1,
        "ready": False,
        "disk": {"state": "failed", "code": "disk.foreign", "reason": "ext4"},
    }
    (world.directory / "run/status.json").write_text(json.dumps(status))
    assert world.join() == 1 and world.failure == ("disk", 31) and "disk.foreign" in world.record["reason"]
    status["disk"] = {"state": "ok", "code": "", "reason": "one disk"}
    status["preload"] = {"state": "failed", "code": "preload.missing", "reason": "pause"}
    (world.directory / "run/status.json").write_text(json.dumps(status))
    (world.directory / "preloaded.json").write_text("{}")
    assert world.join() == 1 and world.failure == ("runtime", 41)


def test_a_node_that_keeps_no_pods_out_does_not_join(world: World) -> None:
    (world.directory / "etc/azure-pod-guard.service").write_text("[Unit]\n")
    world.tell(join={"deadlines": {"network": 1}})
    assert world.join() == 1 and world.failure == ("network", 24)
    assert list(world.kubernetes.iterdir()) == []
    (world.directory / "run/azure-pod-guard").touch()
    assert world.join() == 0


def _verdict(world: World, state: str) -> None:
    value = {
        "boot_id": world.boot,
        "state": state,
        "code": "gpu.hardware",
        "reason": "HBM",
        "action": "replace",
    }
    path = world.directory / "run/preflight.json"
    path.write_text(json.dumps({**value, "started": "2026-11-21T00:00:00+00:00", "seconds": 3.0}))


def test_a_preflight_that_did_not_pass_lets_the_node_in_and_fails_for_whoever_asks(world: World) -> None:
    (world.directory / "etc/preflight.json").write_text("{}")
    world.tell(join={"deadlines": {"gpu": 1}})
    assert world.join() == 1 and world.failure == ("gpu", 53)
    _verdict(world, "failed")
    assert world.join() == 1 and world.failure == ("ready", 94)
    told = (world.directory / "run/kubelet.env").read_text()
    assert "--register-with-taints=node.example/team=research:NoSchedule,image-builder/preflight=" in told
    assert world.states["gpu"] == "degraded" and (world.kubernetes / "kubelet.conf").exists()
    assert world.record["class"] == "hardware" and "gpu.hardware: HBM" in world.record["reason"]
    _verdict(world, "passed")
    assert world.join() == 0


def test_a_hard_preflight_keeps_the_kubelet_down(world: World) -> None:
    (world.directory / "etc/preflight.json").write_text('{"hard": true}')
    _verdict(world, "inconclusive")
    assert world.join() == 1 and world.failure == ("gpu", 52)
    assert list(world.kubernetes.iterdir()) == []


def test_the_budget_holds_for_all_phases_together(world: World) -> None:
    places = world.places()
    late = command.Joining(places, world.boot, time.monotonic() - 901)
    ended = command._phase("identity", late, Record(places.run, world.boot, lambda: 901.0))
    assert (ended.state, ended.code) == ("failed", 2) and world.asked_imds == []


PROGRAM = """
import sys
from pathlib import Path
from image_builder.node.join import command
from image_builder.node.join.record import Record
here = Path(sys.argv[1])
sys.exit(command.run(command.Places(
    run=here / "run", etc=here / "etc", release=here / "release", boot_id=here / "boot_id",
    listed=here / "preloaded.json", firmware=here / "product_uuid", restart=("true",),
)))
"""


def test_killed_in_its_slot_it_joins_the_next_time(world: World) -> None:
    world.tell(
        join={"hosts": 10, "rate": 10 * slot(joins.VM_ID, 1) / 1.5}
    )  # its slot is 1.5 s after the start
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, os.fspath(world.directory)], cwd=REPO, stdout=subprocess.DEVNULL
    )
    path = world.directory / "run/provision.json"
    while not path.exists() or world.record["phase"] != "join":
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert world.record["state"] == "running" and command.tell_status(world.places()) == 1
    assert not (world.kubernetes / "bootstrap-kubelet.conf").exists()
    assert world.join() == 0 and world.record["state"] == "ok"
