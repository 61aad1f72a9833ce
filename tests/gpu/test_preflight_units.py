"""The preflight's units under a real systemd, which runs in a mount and PID namespace of its own.

The units are the role's, with shorter intervals and without what needs a booted machine; the agent is the real one,
and the kubelet is a program that sleeps.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.images.builds import REPO
from tests.support.nodes import user_manager
from tests.support.roles.templates import render

pytestmark = pytest.mark.root

AGENT = """
import sys
from pathlib import Path
from image_builder.node.preflight.command import Places, again, run
here = Path(__file__).parent
places = Places(etc=here / "etc", release=here / "release", attempts=here / "attempts.json")
sys.exit(again(places) if "--again" in sys.argv else run(places))
"""
KUBELET = """
[Unit]
StartLimitIntervalSec=0
[Service]
ExecStart=/bin/sleep infinity
Restart=always
RestartSec=1
"""
# Runs in the namespaces: systemd, and the events in a node's life. Prints what it saw.
DRIVER = """
seen = {}

def kubelet():
    return dict(line.split("=") for line in ctl("show", "-p", "MainPID,SubState", "kubelet").splitlines())

def verdict():
    try:
        return json.loads(Path("/run/node/preflight.json").read_bytes())["state"]
    except OSError:
        return ""

def settings(**chosen):
    text = json.dumps({"wait_seconds": 1, "kubeconfig": "", **chosen})
    (here / "etc/preflight.json").write_text(text)

seen["instance"] = is_up
settings(dns=["nowhere.invalid"])
ctl("start", "kubelet", "preflight-again.timer")
seen["unsettled"] = [verdict(), kubelet()["SubState"]]
settings(dns=["localhost"])
seen["settled later"] = until(lambda: verdict() == "passed")
seen["units"] = ctl("show", "preflight-again.timer", "preflight-again.service", "preflight.service")
before = kubelet()
ctl("restart", "preflight")
seen["tested again"] = [verdict(), kubelet() == before]
drop_in = here / "config/systemd/user/kubelet.service.d/20-preflight.conf"
drop_in.write_text((here / "hard.conf").read_text())
ctl("daemon-reload")
settings(dns=["nowhere.invalid"], hard=True)
ctl("restart", "preflight")
seen["hard, tested again"] = [verdict(), kubelet() == before]
ctl("--no-block", "restart", "kubelet")
seen["hard, held"] = bool(until(lambda: kubelet()["SubState"] == "start-pre"))
settings(dns=["localhost"], hard=True)
seen["hard, let in later"] = bool(until(lambda: kubelet()["SubState"] == "running"))
Path("/run/node/preflight.json").unlink()
Path("/run/node/preflight.json").mkdir()
ctl("restart", "preflight")
seen["no verdict"] = ctl("is-active", "preflight")
Path("/run/node/preflight.json").rmdir()
seen["a verdict after all"] = bool(until(lambda: ctl("is-active", "preflight") == "active"))
manager.terminate()
manager.wait(60)
print(json.dumps(seen))
"""


def shortened(name: str, directory: Path) -> str:
    text = render("gpu_preflight", f"{name}.j2")
    for old, new in {"=2min": "=1", "=7min": "=2", "=22min": "=3", "=52min": "=4", "=30min": "=2"}.items():
        text = text.replace(old, new)
    text = text.replace("RandomizedDelaySec=30", "").replace("RestartSec=30", "RestartSec=1")
    text = re.sub(
        r"(?m)^(StandardOutput|Protect\w+|Restrict\w+|LockPersonality|SystemCall\w+)=.*\n", "", text
    )
    # With these intervals, a unit is started more often than systemd allows.
    text = text.replace("[Unit]\n", "[Unit]\nStartLimitIntervalSec=0\n")
    program = f"{sys.executable} {directory / 'agent.py'}"
    return text.replace(
        "ExecStart=/usr/local/sbin/node-agent",
        f"Environment=PYTHONPATH={REPO}\nStandardOutput=append:{directory}/agent.log\n"
        f"StandardError=inherit\nExecStart={program}",
    )


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("units")
    units = directory / "config/systemd/user"
    (units / "kubelet.service.d").mkdir(parents=True)
    (directory / "etc").mkdir()
    (directory / "agent.py").write_text(AGENT)
    (units / "kubelet.service").write_text(KUBELET)
    for name in ("preflight.service", "preflight-again.service", "preflight-again.timer"):
        (units / name).write_text(shortened(name, directory))
    for path, hard in (
        (units / "kubelet.service.d/20-preflight.conf", False),
        (directory / "hard.conf", True),
    ):
        # Without a cluster, as in the agent's settings here.
        path.write_text(
            render("gpu_preflight", "kubelet.conf.j2", gpu_preflight_hard=hard, gpu_preflight_kubeconfig="")
        )
    # As a container's of another test, which is just being created.
    stranger = Path("/sys/fs/cgroup/systemd", f"stranger-{directory.name}-{os.getpid()}")
    stranger.mkdir()
    found = user_manager.drive(directory, DRIVER, seconds=400)
    found["left alone"] = stranger.is_dir()
    if stranger.is_dir():
        stranger.rmdir()
    return found | {"agent": (directory / "agent.log").read_text()}


def test_the_manager_removes_no_control_group_of_others(seen: dict[str, Any]) -> None:
    assert seen["left alone"] is True


def test_kubelet_starts_after_any_verdict(seen: dict[str, Any]) -> None:
    assert seen["instance"] is True
    assert seen["unsettled"] == ["inconclusive", "running"]


def test_what_was_not_settled_is_settled_by_the_timer(seen: dict[str, Any]) -> None:
    assert seen["settled later"] is True, seen["units"] + seen["agent"]


def test_testing_again_does_not_stop_the_kubelet(seen: dict[str, Any]) -> None:
    assert seen["tested again"] == ["passed", True]
    assert seen["hard, tested again"] == ["inconclusive", True]


def test_hard_kubelet_is_held_until_a_later_test_passes(seen: dict[str, Any]) -> None:
    assert seen["hard, held"] and seen["hard, let in later"], seen["agent"]


def test_preflight_without_a_verdict_is_started_again(seen: dict[str, Any]) -> None:
    assert seen["no verdict"] in ("activating", "failed")
    assert seen["a verdict after all"]
