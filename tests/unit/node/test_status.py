"""What is told of a node: to programs, and to the kubelet."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import status

BAD: dict[str, Any] = {"state": "failed", "code": "disk.foreign", "reason": "there is data on it"}


def test_sections_are_kept_beside_each_other(tmp_path: Path) -> None:
    assert status.read(tmp_path) == {"format": 1, "ready": False}
    status.update("disk", {"state": "ok"}, directory=tmp_path, wanted=["disk"])
    status.update(
        "seed", {"state": "degraded", "code": "x", "reason": "y"}, directory=tmp_path, wanted=["disk"]
    )
    found = status.read(tmp_path)
    assert found["disk"] == {"state": "ok"} and found["seed"]["code"] == "x" and found["ready"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "kubelet.env", "status.json"]


def test_a_section_that_failed_or_is_wanted_and_missing_is_not_ready(tmp_path: Path) -> None:
    status.update("disk", {"state": "ok"}, directory=tmp_path, wanted=["disk", "preload"])
    assert not status.read(tmp_path)["ready"]
    status.update("preload", {"state": "degraded"}, directory=tmp_path, wanted=["disk", "preload"])
    assert status.read(tmp_path)["ready"]
    status.update("disk", BAD, directory=tmp_path, wanted=["disk", "preload"])
    assert not status.read(tmp_path)["ready"]


def test_the_kubelet_gets_labels_and_a_taint_for_what_failed(tmp_path: Path) -> None:
    (tmp_path / "kubelet.json").write_text(json.dumps({"taints": ["dedicated=gpu:NoSchedule"]}))
    status.update("seed", {"state": "ok"}, directory=tmp_path, settings=tmp_path)
    status.update("disk", BAD, directory=tmp_path, settings=tmp_path)
    assert (tmp_path / "kubelet.env").read_text() == (
        "NODE_AGENT_KUBELET_ARGS=--node-labels=image-builder/local-disk=failed,image-builder/seed=ok "
        "--register-with-taints=dedicated=gpu:NoSchedule,image-builder/local-disk=disk.foreign:NoSchedule\n"
    )


@pytest.mark.parametrize("state", ["ok", "degraded"])
def test_without_a_failure_the_kubelets_own_taints_stay(state: str) -> None:
    told = status.kubelet_environment({"disk": {"state": state}}, ["a=b:NoSchedule"])
    assert told == f"NODE_AGENT_KUBELET_ARGS=--node-labels=image-builder/local-disk={state}\n"
    assert status.kubelet_environment({}) == "NODE_AGENT_KUBELET_ARGS=\n"


def test_nothing_is_lost_between_agents(tmp_path: Path) -> None:
    def tell(section: str) -> None:
        for number in range(50):
            status.update(section, {"state": "ok", "number": number}, directory=tmp_path, wanted=[])

    threads = [threading.Thread(target=tell, args=(name,)) for name in status.SECTIONS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = json.loads((tmp_path / "status.json").read_text())
    assert [found[name]["number"] for name in status.SECTIONS] == [49] * len(status.SECTIONS)
