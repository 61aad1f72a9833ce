"""The last results of `join`, which are in the docs; and its parts, without any machine.

The run itself boots a machine twice and takes a quarter of an hour: `.venv/bin/python -m tests.e2e.join`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from image_builder.node.join import config
from image_builder.node.preflight.model import CONDITION
from tests.e2e import join_facts, join_lab
from tests.e2e.join import RECORD
from tests.e2e.join_machine import Watched, deployment, running
from tests.support.control_plane import gates
from tests.support.nodes import joins

pytestmark = pytest.mark.root

Record = dict[str, Any]
NODE = "worker-join"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture(scope="module")
def record() -> Record:
    found: Record = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


# -- what was seen ---------------------------------------------------------------------------------------------


def test_every_fact_holds_in_the_record(record: Record) -> None:
    assert len(join_facts.facts(record)) >= 40
    assert join_facts.broken(record) == []


def _by_somebody_else(record: Record) -> None:
    record["first"]["requests"][0]["username"] = "kubernetes-admin"


def _not_approved(record: Record) -> None:
    record["first"]["requests"][0]["conditions"] = []


def _secrets_for_the_broker(record: Record) -> None:
    record["refusal"] = ""


def _asked_again(record: Record) -> None:
    record["again"]["requests"] = [*record["first"]["requests"], record["first"]["requests"][0]]


def _never_out(record: Record) -> None:
    record["first"]["registered_taints"] = ["node.example/team"]


def _still_out(record: Record) -> None:
    record["again"]["node"]["taints"].append(gates.TAINT)


def _pulled(record: Record) -> None:
    record["first"]["pod"]["pulling"] = 1


def _on_the_hosts_network(record: Record) -> None:
    record["again"]["pod"]["ip"] = join_lab.MACHINE


def _same_disk(record: Record) -> None:
    record["again"]["disk"] = "mount"


def _another_node(record: Record) -> None:
    record["again"]["node"]["uid"] = "another"


def _token_left(record: Record) -> None:
    record["first"]["token_is_in"] = ["/etc/kubernetes/bootstrap-kubelet.conf"]


def _writes_again(record: Record) -> None:
    record["again"]["second_run"]["changed"] = ["/run/node/kubelet.env"]


def _unit_failed(record: Record) -> None:
    record["first"]["failed_units"] = ["node-join.service"]


def _restarted(record: Record) -> None:
    record["away"]["restarts"] = 1


@pytest.mark.parametrize(
    "change",
    [
        _by_somebody_else,
        _not_approved,
        _secrets_for_the_broker,
        _asked_again,
        _never_out,
        _still_out,
        _pulled,
        _on_the_hosts_network,
        _same_disk,
        _another_node,
        _token_left,
        _writes_again,
        _unit_failed,
        _restarted,
    ],
)
def test_facts_see_what_is_wrong(record: Record, change: Callable[[Record], None]) -> None:
    other = copy.deepcopy(record)
    change(other)
    assert join_facts.broken(other) != []


# -- its parts -------------------------------------------------------------------------------------------------


def test_the_pool_is_told_what_a_node_takes() -> None:
    ca = joins.authority().certificate
    values = join_lab.variables(ca)
    told = {
        "format": 1,
        "generation": values["join_generation"],
        "cluster": {"server": values["join_server"], "ca": ca, "dns": values["join_dns"]},
        "credentials": values["join_credentials"],
        "node": {
            name.removeprefix("join_"): values[name]
            for name in ("join_max_pods", "join_labels", "join_platform_labels", "join_taints")
        },
        "join": {"budget_seconds": values["join_budget_seconds"], "deadlines": values["join_deadlines"]},
    }
    assert config.problems(told) == []


def test_the_documented_bindings_are_those_of_tls_bootstrap() -> None:
    found = {
        manifest["roleRef"]["name"].rpartition(":")[2]: [one["name"] for one in manifest["subjects"]]
        for manifest in gates.manifests(join_lab.BINDINGS)
    }
    assert found == {
        "node-bootstrapper": ["system:bootstrappers"],
        "selfnodeclient": ["system:nodes"],
    }


def _pod(**more: Any) -> dict[str, Any]:
    container = {"ready": True, "state": {"running": {"startedAt": "2026-01-02T03:04:06Z"}}}
    return {
        "metadata": {},
        "spec": {"nodeName": NODE},
        "status": {"containerStatuses": [container]},
        **more,
    }


@pytest.mark.parametrize(
    "other",
    [
        {"metadata": {"deletionTimestamp": "2026-01-02T03:04:07Z"}},
        {"spec": {}},
        {"spec": {"nodeName": "another"}},
        {"status": {}},
        {"status": {"containerStatuses": [{"ready": False, "state": {"waiting": {}}}]}},
        {
            "status": {
                "containerStatuses": [
                    {"ready": True, "state": {"running": {"startedAt": "2026-01-02T03:04:04Z"}}}
                ]
            }
        },
    ],
)
def test_only_a_container_of_this_boot_counts(other: dict[str, Any]) -> None:
    good = _pod()
    assert running([_pod(**other)], NODE, NOW) is None
    assert running([_pod(**other), good], NODE, NOW) is good


def test_a_node_is_in_when_its_taint_has_gone_and_this_boot_has_passed() -> None:
    def node(boot: str, taints: list[str], **conditions: str) -> dict[str, Any]:
        told = [{"type": name, "status": status} for name, status in conditions.items()]
        return {
            "spec": {"taints": [{"key": key} for key in taints]},
            "status": {"nodeInfo": {"bootID": boot}, "conditions": told},
        }

    watched, gate = Watched(), gates.TAINT["key"]
    watched.note(None, 1)
    watched.note(node("old", [], Ready="True", **{CONDITION: "True"}), 2, "old")
    assert watched.seconds == {}
    watched.note(node("new", ["team", gate], Ready="False"), 3, "old")
    watched.note(node("new", ["team", gate], Ready="True", **{CONDITION: "True"}), 4, "old")
    watched.note(node("new", ["team"], Ready="True", **{CONDITION: "True"}), 5, "old")
    assert watched.seconds == {"registered": 3, "ready": 4, "admitted": 5}
    assert watched.registered_taints == ["team", gate]


def test_the_work_waits_for_the_pool_and_is_not_let_in_before_the_gate() -> None:
    spec = deployment()["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {"node.example/pool": join_lab.POOL}
    assert [one["key"] for one in spec["tolerations"]] == ["node.example/team"]
    assert "hostNetwork" not in spec
