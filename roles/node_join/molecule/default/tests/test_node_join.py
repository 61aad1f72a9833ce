"""The role's defaults, seen in the sandbox they were applied to."""

from __future__ import annotations

import json

from testinfra.host import Host

UNIT = "/etc/systemd/system/node-join.service"


def test_settings_are_what_the_agent_reads(host: Host) -> None:
    assert json.loads(host.file("/etc/node-agent/join.json").content_string) == {
        "imds": "http://169.254.169.254",
        "custom_data": "/var/lib/cloud/instance/user-data.txt",
        "file": "/etc/node-agent/node-config.json",
        "kubernetes": "/etc/kubernetes",
        "engine": "docker",
        "healthz": "http://127.0.0.1:10248/healthz",
        "pod_network": "",
        "clock_seconds": 60,
    }


def test_every_boot_joins_behind_what_prepares_it(host: Host) -> None:
    assert host.service("node-join.service").is_enabled
    lines = host.file(UNIT).content_string.splitlines()
    assert {"ExecStart=/usr/local/sbin/node-agent join", "Type=oneshot", "RemainAfterExit=yes"} <= set(lines)
    after = {
        word for line in lines if line.startswith("After=") for word in line.removeprefix("After=").split()
    }
    assert {
        "network-online.target",
        "local-disk.service",
        "image-preload.service",
        "preflight.service",
    } <= after


def test_the_kubelet_does_not_wait_for_what_waits_for_it(host: Host) -> None:
    lines = host.file(UNIT).content_string.splitlines()
    assert not [line for line in lines if line.startswith("Before=")]
    assert "kubelet.path" in " ".join(line for line in lines if line.startswith("After="))
