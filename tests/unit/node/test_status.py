"""The reports about a node: to programs, and to the kubelet."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import status
from image_builder.node.status import Places

BAD: dict[str, Any] = {"state": "failed", "code": "disk.foreign", "reason": "there is data on it"}


def test_sections_are_kept_beside_each_other(tmp_path: Path) -> None:
    assert status.read(tmp_path) == {"format": 1, "ready": False}
    status.update("disk", {"state": "ok"}, Places(tmp_path), required=["disk"])
    status.update(
        "seed", {"state": "degraded", "code": "x", "reason": "y"}, Places(tmp_path), required=["disk"]
    )
    found = status.read(tmp_path)
    assert found["disk"] == {"state": "ok"} and found["seed"]["code"] == "x" and found["ready"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "kubelet.env", "status.json"]


def test_a_section_that_failed_or_is_wanted_and_missing_is_not_ready(tmp_path: Path) -> None:
    status.update("disk", {"state": "ok"}, Places(tmp_path), required=["disk", "preload"])
    assert not status.read(tmp_path)["ready"]
    status.update("preload", {"state": "degraded"}, Places(tmp_path), required=["disk", "preload"])
    assert status.read(tmp_path)["ready"]
    status.update("disk", BAD, Places(tmp_path), required=["disk", "preload"])
    assert not status.read(tmp_path)["ready"]


def test_the_kubelet_gets_labels_and_a_taint_for_what_failed(tmp_path: Path) -> None:
    (tmp_path / "kubelet.json").write_text(json.dumps({"taints": ["dedicated=gpu:NoSchedule"]}))
    status.update("seed", {"state": "ok"}, Places(tmp_path, tmp_path))
    status.update("disk", BAD, Places(tmp_path, tmp_path))
    assert (tmp_path / "kubelet.env").read_text() == (
        "NODE_AGENT_KUBELET_ARGS=--node-labels=image-builder/local-disk=failed,image-builder/seed=ok "
        "--register-with-taints=dedicated=gpu:NoSchedule,image-builder/local-disk=disk.foreign:NoSchedule\n"
    )


def test_what_the_kubelet_is_told_is_written_when_it_changes_alone(tmp_path: Path) -> None:
    def told(**sections: dict[str, Any]) -> int:
        for name, value in sections.items():
            status.update(name, value, Places(tmp_path), required=[])
        return (tmp_path / "kubelet.env").stat().st_ino

    first = told(disk={"state": "ok"})
    assert told(disk={"state": "ok", "seconds": 1}, promotion={"state": "ok"}) == first
    assert told(disk=BAD) != first
    (tmp_path / "kubelet.env").write_bytes(b"\xff")
    told(disk=BAD)
    assert "disk.foreign" in (tmp_path / "kubelet.env").read_text()


@pytest.mark.parametrize("state", ["ok", "degraded"])
def test_without_a_failure_the_kubelets_own_taints_stay(state: str) -> None:
    told = status.kubelet_environment({"disk": {"state": state}}, ["a=b:NoSchedule"])
    assert told == f"NODE_AGENT_KUBELET_ARGS=--node-labels=image-builder/local-disk={state}\n"
    assert status.kubelet_environment({}) == "NODE_AGENT_KUBELET_ARGS=\n"


def test_nothing_is_lost_between_agents(tmp_path: Path) -> None:
    def tell(section: str) -> None:
        for number in range(50):
            status.update(section, {"state": "ok", "number": number}, Places(tmp_path), required=[])

    threads = [threading.Thread(target=tell, args=(name,)) for name in status.SECTIONS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = json.loads((tmp_path / "status.json").read_text())
    assert [found[name]["number"] for name in status.SECTIONS] == [49] * len(status.SECTIONS)


def test_a_node_with_a_preflight_registers_with_its_taint_whatever_it_found(tmp_path: Path) -> None:
    (tmp_path / "preflight.json").write_text("{}")
    (tmp_path / "kubelet.json").write_text(json.dumps({"taints": ["a=b:NoSchedule"]}))
    told = (
        "NODE_AGENT_KUBELET_ARGS=--node-labels=image-builder/preflight={} "
        "--register-with-taints=a=b:NoSchedule,image-builder/preflight=pending:NoSchedule\n"
    )
    status.update("promotion", {"state": "ok"}, Places(tmp_path, tmp_path), required=[])
    assert (tmp_path / "kubelet.env").read_text() == told.format("pending")
    for state in ("ok", "failed"):
        status.update("preflight", {"state": state}, Places(tmp_path, tmp_path), required=[])
        assert (tmp_path / "kubelet.env").read_text() == told.format(state)
        assert status.read(tmp_path)["ready"] is (state == "ok")


@pytest.mark.parametrize(
    ("settings", "taint"),
    [
        ('{"taint": "readiness.k8s.io/preflight"}', "readiness.k8s.io/preflight"),
        ("damaged", "image-builder/preflight"),
    ],
)
def test_the_preflights_taint_is_a_setting_and_never_none(tmp_path: Path, settings: str, taint: str) -> None:
    (tmp_path / "preflight.json").write_text(settings)
    status.update("preflight", {"state": "ok"}, Places(tmp_path, tmp_path), required=[])
    assert f"--register-with-taints={taint}=pending:NoSchedule\n" in (tmp_path / "kubelet.env").read_text()


@pytest.mark.parametrize("text", ["", '{"format": 1, "rea', "[]", "\x00"])
def test_a_damaged_status_says_nothing_and_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert status.read(tmp_path) == {"format": 1, "ready": False}
    status.update("seed", {"state": "ok"}, Places(tmp_path), required=["seed"])
    assert status.read(tmp_path)["ready"]


@pytest.mark.parametrize(
    ("retried", "attempts"), [((True, True), 4), ((True, False), 1), ((False, False), 4)]
)
def test_images_count_their_attempts_from_the_end_of_the_seeds_retries(
    tmp_path: Path, retried: tuple[bool, bool], attempts: int
) -> None:
    places = status.Places(run=tmp_path, etc=tmp_path)
    status.update("seed", {"state": "degraded", "retried": retried[0]}, places)
    for _ in range(4):
        status.update("preload", {"state": "failed", "code": "preload.engine"}, places)
    status.update("seed", {"state": "degraded", "retried": retried[1]}, places)
    assert status.read(tmp_path)["preload"]["attempts"] == attempts
    status.update("preload", {"state": "ok"}, places)
    status.update("seed", {"state": "ok"}, places)
    assert "attempts" not in status.read(tmp_path)["preload"]


def test_attempts_that_failed_in_a_row_are_counted(tmp_path: Path) -> None:
    places, counts = status.Places(run=tmp_path, etc=tmp_path), []
    for state in ("failed", "failed", "ok", "failed", "degraded"):
        status.update("disk", {"state": state}, places)
        counts.append(status.read(tmp_path)["disk"].get("attempts"))
    assert counts == [1, 2, None, 1, None]
