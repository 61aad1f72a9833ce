"""The role's defaults, seen in the sandbox they were applied to."""

from __future__ import annotations

import json

import pytest
from testinfra.host import Host

UNIT = "/etc/systemd/system/local-disk.service"


def test_settings_are_what_the_agent_reads(host: Host) -> None:
    found = json.loads(host.file("/etc/node-agent/disk.json").content_string)
    assert found["policy"] == "require" and found["mount_point"] == "/mnt/local"
    assert found["selector"] == {"kind": "azure"}
    assert found["expected_disks"] == 0 and found["cache"] == {"path": "cache", "quota_bytes": None}


def test_programs_are_there(host: Host) -> None:
    for program in ("mkfs.xfs", "xfs_quota", "mdadm", "wipefs", "blkid"):
        assert host.exists(program), program


def test_nobody_else_assembles_or_watches_arrays(host: Host) -> None:
    assert "AUTO -all" in host.file("/etc/mdadm/mdadm.conf").content_string.splitlines()
    for unit in (
        "mdmonitor.service",
        "mdcheck_start.timer",
        "mdcheck_continue.timer",
        "mdmonitor-oneshot.timer",
    ):
        assert host.file(f"/etc/systemd/system/{unit}").linked_to == "/dev/null", unit


def test_unit_comes_first(host: Host) -> None:
    assert host.service("local-disk.service").is_enabled
    lines = host.file(UNIT).content_string.splitlines()
    before = next(line for line in lines if line.startswith("Before="))
    assert set(before.removeprefix("Before=").split()) == {
        "preload-seed.service",
        "docker.service",
        "containerd.service",
        "kubelet.service",
    }
    assert "ExecStart=/usr/local/sbin/node-agent disk" in lines


@pytest.mark.parametrize(
    "unit", ["docker", "containerd", "kubelet", "preload-seed", "image-preload", "preload-promote"]
)
def test_others_wait_for_it(host: Host, unit: str) -> None:
    lines = host.file(f"/etc/systemd/system/{unit}.service.d/05-local-disk.conf").content_string.splitlines()
    assert {"Requires=local-disk.service", "After=local-disk.service"} <= set(lines)
