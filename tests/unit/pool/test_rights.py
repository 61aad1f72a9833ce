"""The rights of a roll: those printed, documented and granted are the same; all missing ones are reported at once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from typer.testing import CliRunner

from image_builder import errors
from image_builder.cli.main import app
from image_builder.node.net.kube import KubeError
from image_builder.pool import rights
from image_builder.pool.plan.policy import Roll, WaveDrain
from image_builder.pool.rights import ALWAYS, ASKING, DEFINITION, EVICTING, SCALE_SET, ClusterRight
from image_builder.pool.scale_set.client import Client
from tests.support.arm.direct import Direct
from tests.support.arm.fleet import DEFINITION as GALLERY_IMAGE
from tests.support.arm.fleet import NEW, OLD, Fleet, fleet

MANUAL = "virtualMachineScaleSets/manualUpgrade/action"


def granted(file: Path, kinds: tuple[str, ...], name: str) -> set[ClusterRight]:
    """Return the rights that the roles called ``name`` grant in a file's manifests."""
    listed = set()
    for manifest in yaml.safe_load_all(file.read_text(encoding="utf-8")):
        if manifest["kind"] not in kinds or manifest["metadata"]["name"] != name:
            continue
        namespace = manifest["metadata"].get("namespace", "")
        for rule in manifest["rules"]:
            for verb in rule["verbs"]:
                listed |= {ClusterRight(verb, path) for path in rule.get("nonResourceURLs", ())}
                listed |= {
                    ClusterRight(verb, resource, group, namespace)
                    for group in rule.get("apiGroups", ())
                    for resource in rule.get("resources", ())
                }
    return listed


def test_the_manifests_grant_exactly_these(repo_root: Path) -> None:
    roles = ("ClusterRole", "Role")
    assert granted(repo_root / "deploy/roll.yml", roles, "image-builder-roll") == {*ALWAYS}
    for command in ("roll", "drain"):
        evict = f"image-builder-{command}-evict"
        assert granted(repo_root / f"deploy/{command}.yml", roles, evict) == {*EVICTING}
    assert granted(repo_root / "deploy/drain.yml", roles, "image-builder-drain-ask") == {*ASKING}


@pytest.mark.parametrize("command", ["roll", "drain"])
def test_what_the_default_policy_never_does_is_bound_to_no_account(repo_root: Path, command: str) -> None:
    manifests = list(yaml.safe_load_all((repo_root / f"deploy/{command}.yml").read_text(encoding="utf-8")))
    bound = {m["roleRef"]["name"] for m in manifests if m["kind"].endswith("Binding")}
    assert bound == {f"image-builder-{command}"}


def test_the_page_lists_exactly_these(repo_root: Path) -> None:
    page = (repo_root / "docs/how-to/roll.md").read_text(encoding="utf-8")
    listed = re.findall(r"^Microsoft\.Compute/(\S+)$", page, re.MULTILINE)
    assert listed == [*SCALE_SET, *DEFINITION]


@pytest.mark.parametrize(
    ("drain", "deadline", "more"),
    [
        ({}, "", ()),
        ({"mode": "idle-only"}, "", ()),
        ({"mode": "evict"}, "", EVICTING),
        ({"mode": "ask"}, "", ASKING),
        ({"mode": "evict", "checkpoint_seconds": 60.0}, "", (*EVICTING, *ASKING)),
        ({}, "2026-11-27T08:00:00Z", EVICTING),
        ({"checkpoint_seconds": 60.0}, "2026-11-27T08:00:00Z", (*EVICTING, *ASKING)),
    ],
)
def test_who_evicts_nothing_needs_no_right_to(
    drain: dict[str, Any], deadline: str, more: tuple[ClusterRight, ...]
) -> None:
    roll = Roll(drain=WaveDrain.model_validate(drain), deadline=deadline)
    assert rights.in_cluster(roll) == (*ALWAYS, *more)


def test_rights_in_azure_are_missing_where_they_are() -> None:
    machines = fleet(1, name="gpu-0")
    second = machines.scale_sets.add("gpu-1", OLD, 1)
    sets = [machines.path, second]
    client = Client(Direct(machines.arm))
    needed = rights.in_azure(sets, [OLD, NEW])
    assert {scope for right in needed for scope in right.scopes} == {*sets, GALLERY_IMAGE}
    assert rights.missing_in_azure(client, needed) == []
    machines.arm.actions.remove(f"Microsoft.Compute/{MANUAL}")
    machines.arm.actions.remove("Microsoft.Compute/galleries/images/read")
    assert {problem.reason for problem in rights.missing_in_azure(client, needed)} == {
        f"the right Microsoft.Compute/{MANUAL} is missing on {sets[0]}, {sets[1]}",
        f"the right Microsoft.Compute/galleries/images/read is missing on {GALLERY_IMAGE}",
    }


class Reviewer:
    """An API server that only answers access reviews."""

    def __init__(self, allowed: tuple[ClusterRight, ...], status: int = 0) -> None:
        self.specs, self.status = [right.review for right in allowed], status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def request(self, method: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.status:
            raise KubeError(f"{method} {path}: {self.status}", self.status)
        assert (method, path.rpartition("/")[2]) == ("POST", "selfsubjectaccessreviews")
        return {"status": {"allowed": body["spec"] in self.specs}}


@pytest.fixture
def reviewed_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Reviewer], None]:
    def set_up(reviewer: Reviewer) -> None:
        monkeypatch.setattr(rights, "Kube", lambda *_, **__: reviewer)
        monkeypatch.setattr("image_builder.node.net.kubeconfig.load", lambda _: None)

    return set_up


def test_rights_in_the_cluster_that_are_missing_are_all_named(
    reviewed_by: Callable[[Reviewer], None], tmp_path: Path
) -> None:
    reviewed_by(Reviewer((*ALWAYS, *EVICTING)))
    evicting = Roll(drain=WaveDrain(mode="evict"))
    assert rights.missing_in_cluster(tmp_path, evicting) == []
    lacking = {ALWAYS[2], ALWAYS[6], ALWAYS[8], *EVICTING}
    reviewed_by(Reviewer(tuple(right for right in (*ALWAYS, *EVICTING) if right not in lacking)))
    assert [problem.reason for problem in rights.missing_in_cluster(tmp_path, evicting)] == [
        "the right to patch nodes is missing",
        "the right to get /metrics is missing",
        "the right to create leases.coordination.k8s.io is missing in namespace image-builder",
        "the right to create pods/eviction is missing",
    ]
    reviewed_by(Reviewer((), status=401))
    with pytest.raises(errors.PoolError, match="401"):
        rights.missing_in_cluster(tmp_path, evicting)


def test_a_review_asks_for_what_is_done() -> None:
    assert ClusterRight("get", "/metrics").review == {
        "nonResourceAttributes": {"verb": "get", "path": "/metrics"}
    }
    assert EVICTING[0].review["resourceAttributes"] == {
        "verb": "create",
        "namespace": "",
        "group": "",
        "resource": "pods",
        "subresource": "eviction",
    }


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Return a fleet with an inventory, both within reach of the command line."""
    state = fleet(2)
    hosts = "".join(
        f"        gpu-{m.id}: {{ansible_host: 192.0.2.{m.id}, pool_vm_id: {m.vm_id}, pool_instance_id: '{m.id}'}}\n"
        for m in state.group.machines.values()
    )
    variables = f"{{pool_image: worker, pool_vm_size: ND96, pool_scale_set_id: {state.path}}}"
    (tmp_path / "hosts.yml").write_text(
        f"all:\n  children:\n    gpu:\n      vars: {variables}\n      hosts:\n{hosts}"
    )

    @contextmanager
    def opened(*_: object, **__: object) -> Iterator[Client]:
        yield Client(Direct(state.arm))

    monkeypatch.setattr("image_builder.pool.scale_set.client.open_client", opened)
    monkeypatch.chdir(tmp_path)
    return state


def plan(*argv: str) -> tuple[int, str]:
    words = [
        "pool",
        "plan",
        "gpu",
        "-i",
        "hosts.yml",
        "--to",
        NEW,
        "--unproven",
        "a test",
        "--out",
        "roll.json",
    ]
    done = CliRunner().invoke(app, [*words, *argv])
    return done.exit_code, done.stdout


def test_a_plan_prints_the_rights_that_its_run_needs(machines: Fleet) -> None:
    status, out = plan("--json")
    assert status == 0, out
    listed = json.loads(out)["rights"]
    assert [(right["action"], right["scopes"]) for right in listed["azure"]] == [
        *((f"Microsoft.Compute/{action}", [machines.path]) for action in SCALE_SET),
        *((f"Microsoft.Compute/{action}", [GALLERY_IMAGE]) for action in DEFINITION),
    ]
    assert [ClusterRight(**right) for right in listed["cluster"]] == [*ALWAYS]
    status, out = plan()
    assert status == 0
    rows = [re.split(r"  +", line) for line in out.splitlines()]
    assert [f"Microsoft.Compute/{MANUAL}", "gpu in resource group images"] in rows
    assert ["update leases", "coordination.k8s.io", "image-builder"] in rows


def test_a_plan_warns_of_a_way_back_that_can_be_deleted(machines: Fleet) -> None:
    """I15."""
    status, out = plan("--json")
    assert status == 0 and [warning.partition(" has no ")[0] for warning in json.loads(out)["warnings"]] == [
        OLD
    ]
    properties = machines.arm.resources[OLD.lower()].content["properties"]
    properties["safetyProfile"] = {"blockDeletionBeforeEndOfLife": True}
    status, out = plan("--json")
    assert status == 0 and json.loads(out)["warnings"] == []


def test_a_plan_tells_all_that_is_missing_and_all_else(
    machines: Fleet, reviewed_by: Callable[[Reviewer], None], tmp_path: Path
) -> None:
    machines.arm.actions.remove(f"Microsoft.Compute/{MANUAL}")
    machines.group.content["properties"]["upgradePolicy"]["mode"] = "Automatic"
    reviewed_by(Reviewer(ALWAYS[1:]))
    status, out = plan("--kubeconfig", "roll.conf", "--json")
    assert status == errors.DefinitionError.exit_code
    told = {problem["what"] for problem in json.loads(out)["error"]["problems"]}
    assert f"the right Microsoft.Compute/{MANUAL} is missing on {machines.path}" in told
    assert "the right to get nodes is missing" in told
    assert any("Automatic, not Manual" in reason for reason in told) and len(told) == 3
    assert not (tmp_path / "roll.json").exists()
