"""The files of the gpu_preflight role: the kubelet waits and is never stopped, and failed units are restarted."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from image_builder.node import status
from image_builder.node.gpu import machine
from image_builder.node.gpu.settings import Settings as GpuSettings
from image_builder.node.gpu.smoke import command as gpu
from image_builder.node.preflight import model
from image_builder.node.preflight.settings import Settings, parse
from tests.support.roles import templates

ROLE, NODE_JOIN = "gpu_preflight", "node_join"
ADMITTED = f"test -e {status.DIRECTORY / model.ADMITTED}"


def unit(name: str, role: str = ROLE, **variables: Any) -> list[str]:
    """Return the statements of a unit file."""
    lines = templates.render(role, name, **variables).splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def value(lines: list[str], name: str) -> str:
    (found,) = [line.partition("=")[2] for line in lines if line.startswith(f"{name}=")]
    return found


def problems(**variables: Any) -> list[str]:
    found: list[str] = templates.value(ROLE, "__gpu_preflight_problems", **variables)
    return found


def test_agent_takes_what_the_role_writes() -> None:
    assert parse(json.loads(templates.render(ROLE, "preflight.json.j2"))) == Settings(engine="docker")


@pytest.mark.parametrize("hard", [False, True])
def test_kubelet_waits_for_a_file_and_requires_no_unit(hard: bool) -> None:
    """Restarting a required unit would stop the kubelet, and one failure of it would keep the kubelet down for good."""
    lines = unit("kubelet.conf.j2", gpu_preflight_hard=hard)
    assert {"Wants=preflight.service", "After=preflight.service"} <= set(lines)
    assert not [line for line in lines if line.startswith(("Requires", "Requisite", "BindsTo", "PartOf"))]
    waits = value(lines, "ExecStartPre")
    assert ADMITTED in waits
    # Any verdict will do, unless only a pass is accepted.
    assert (f"test -e {status.DIRECTORY / model.FILE}" in waits) is not hard
    words = waits.split()
    assert words[0] == "/usr/bin/timeout" and 0 < int(words[1]) < 90, "longer than systemd lets it start"


def test_kubelet_has_its_new_node_object_reported_to_without_waiting() -> None:
    """The report comes after the kubelet: waiting for it would keep the kubelet from ever having started."""
    (start,) = [line for line in unit("kubelet.conf.j2") if line.startswith("ExecStartPost=")]
    words = start.removeprefix("ExecStartPost=").split()
    assert words == ["-/usr/bin/systemctl", "--no-block", "start", "preflight-report.service"]
    service = unit("preflight-report.service.j2")
    assert "kubelet.service" in value(service, "After").split()
    assert not [line for line in service if line.startswith(("RemainAfterExit", "Wants=", "Requires="))]
    lines = unit("kubelet.conf.j2", gpu_preflight_kubeconfig="")
    assert not [line for line in lines if line.startswith("ExecStartPost=")], "there is no such unit"


def test_a_hung_test_does_not_hold_up_the_next() -> None:
    assert int(value(unit("preflight-again.service.j2"), "TimeoutStopSec")) <= 5


@pytest.mark.parametrize(
    ("name", "role"), [("preflight.service.j2", ROLE), ("node-join.service.j2", NODE_JOIN)]
)
def test_what_failed_is_started_again(name: str, role: str) -> None:
    lines = unit(name, role)
    assert value(lines, "Restart") == "on-failure" and 10 <= int(value(lines, "RestartSec")) <= 300
    section = lines.index("[Service]")
    assert "StartLimitIntervalSec=0" in lines[:section], "after five failures it would give up"


def test_unsettled_boot_is_tested_again_after_2_5_15_and_30_minutes() -> None:
    timer = unit("preflight-again.timer.j2")
    elapsed = [line.partition("=")[2] for line in timer if line.startswith("OnActiveSec=")]
    minutes = [0, *(int(text.removesuffix("min")) for text in elapsed)]
    assert [b - a for a, b in pairwise(minutes)] == [2, 5, 15, 30]
    assert value(timer, "OnUnitInactiveSec") == "30min"
    assert value(timer, "After") == "preflight.service", "it counts from the verdict"
    service = unit("preflight-again.service.j2")
    assert value(service, "ConditionPathExists") == str(status.DIRECTORY / model.UNSETTLED)
    assert value(service, "ExecStart").endswith("node-agent preflight --again")
    assert "preflight-again.timer" in templates.value(ROLE, "__gpu_preflight_units")


def test_longest_test_of_the_gpus_ends_by_itself() -> None:
    needed = gpu.longest_seconds(GpuSettings())
    assert needed == 330 + machine.PLATFORM_SECONDS + 90 + 180
    assert problems() == [] and Settings().gpu_seconds >= needed
    assert problems(gpu_preflight_gpu_seconds=needed - 1)
    assert problems(gpu_preflight_gpu={"fabric_wait_seconds": 600})
    assert problems(gpu_preflight_gpu={"infiniband_wait_seconds": 181})
    assert not problems(gpu_preflight_gpu={"fabric_wait_seconds": 600}, gpu_preflight_gpu_seconds=1080)
    without = {"fabric_wait_seconds": 0, "infiniband_wait_seconds": 0}  # GPUs themselves have a minute
    settings = GpuSettings(fabric_wait_seconds=0, infiniband_wait_seconds=0)
    assert gpu.longest_seconds(settings) == 330 + machine.PLATFORM_SECONDS + 90 + 60
    assert problems(gpu_preflight_gpu=without, gpu_preflight_gpu_seconds=539)
    assert not problems(gpu_preflight_gpu=without, gpu_preflight_gpu_seconds=540)


@pytest.mark.parametrize("name", ["preflight.service.j2", "preflight-again.service.j2"])
def test_tests_have_the_rights_that_they_need(name: str) -> None:
    lines = unit(name)
    assert {"ProtectSystem=full", "NoNewPrivileges=yes", "RestrictSUIDSGID=yes"} <= set(lines)
    assert not [line for line in lines if line.startswith(("PrivateDevices", "MemoryDenyWriteExecute"))]


def test_join_writes_its_own_files_and_sees_little_else() -> None:
    lines = unit("node-join.service.j2", NODE_JOIN, node_join_kubernetes="/etc/cluster")
    assert value(lines, "ProtectSystem") == "strict"
    assert value(lines, "ReadWritePaths") == "/etc/cluster /etc/node-agent"
    on = [
        "ProtectHome",
        "PrivateTmp",
        "PrivateDevices",
        "ProtectControlGroups",
        "ProtectHostname",
        "ProtectClock",
    ]
    on += ["ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables", "LockPersonality"]
    on += ["NoNewPrivileges", "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID"]
    assert {name: value(lines, name) for name in on} == dict.fromkeys(on, "yes")
    assert value(lines, "RestrictAddressFamilies") == "AF_UNIX AF_INET AF_INET6 AF_NETLINK"
    assert value(lines, "SystemCallArchitectures") == "native"
