"""The role's defaults, seen in the sandbox they were applied to."""

from __future__ import annotations

import json

from testinfra.host import Host

SERVICE = "/etc/systemd/system/node-health.service"
TIMER = "/etc/systemd/system/node-health.timer"
ENDPOINT = "/etc/systemd/system/node-health-endpoint.service"


def test_settings_are_what_the_agent_reads(host: Host) -> None:
    found = json.loads(host.file("/etc/node-agent/health.json").content_string)
    assert found["condition"] == "NodeHealthy" and found["raise_looks"] == 3
    assert found["paths"] == ["/", "/mnt/local", "/var/lib/kubelet"]
    assert found["intervals"] == {"nvme": 600, "gpu": 300}


def test_metrics_have_a_place(host: Host) -> None:
    found = host.file("/var/lib/prometheus/node-exporter")
    assert found.is_directory and found.mode == 0o755


def test_timer_is_enabled_and_the_service_is_not(host: Host) -> None:
    assert host.service("node-health.timer").is_enabled
    assert not host.file("/etc/systemd/system/multi-user.target.wants/node-health.service").exists
    assert "OnCalendar=*:0/1" in host.file(TIMER).content_string.splitlines()


def test_the_endpoint_starts_with_the_machine(host: Host) -> None:
    assert host.service("node-health-endpoint.service").is_enabled
    found = json.loads(host.file("/etc/node-agent/health-endpoint.json").content_string)
    assert found["port"] == 10299 and found["stale_seconds"] == 300
    assert "RuntimeDirectory=node node/busy" in host.file(SERVICE).content_string.splitlines()


def test_units_are_understood(host: Host) -> None:
    done = host.run("systemd-analyze verify --man=no %s %s %s", SERVICE, TIMER, ENDPOINT)
    # The program comes with another role; all else has to be right.
    lines = [line for line in (done.stderr + done.stdout).splitlines() if "node-agent" not in line]
    assert [line for line in lines if "node-health" in line] == []
