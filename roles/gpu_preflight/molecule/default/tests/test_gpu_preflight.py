"""The role's defaults, seen in the sandbox they were applied to."""

from __future__ import annotations

import json

import pytest
from testinfra.host import Host

UNITS = "/etc/systemd/system"


def test_settings_are_what_the_agent_reads(host: Host) -> None:
    found = json.loads(host.file("/etc/node-agent/preflight.json").content_string)
    assert found["hard"] is False and found["reboot"] is True
    assert found["taint"] == "image-builder/preflight" and found["engine"] == "docker"
    assert found["dns"] == [] and found["tcp"] == [] and found["jitter_seconds"] == 30


@pytest.mark.parametrize("unit", ["preflight.service", "preflight-report.service", "preflight-again.timer"])
def test_units_are_enabled(host: Host, unit: str) -> None:
    assert host.service(unit).is_enabled


def test_every_boot_is_tested_before_the_kubelet_starts(host: Host) -> None:
    lines = host.file(f"{UNITS}/preflight.service").content_string.splitlines()
    assert "ExecStart=/usr/local/sbin/node-agent preflight" in lines
    assert {"Type=oneshot", "RemainAfterExit=yes", "Before=kubelet.service"} <= set(lines)
    assert not [line for line in lines if line.startswith("Condition")]
    waits = host.file(f"{UNITS}/kubelet.service.d/20-preflight.conf").content_string.splitlines()
    assert {"Wants=preflight.service", "After=preflight.service"} <= set(waits)
    assert [line for line in waits if line.startswith("ExecStartPre=/usr/bin/timeout ")]


def test_systemd_takes_the_units(host: Host) -> None:
    names = ["preflight.service", "preflight-again.service", "preflight-again.timer"]
    done = host.run("systemd-analyze verify --man=no " + " ".join(f"{UNITS}/{name}" for name in names))
    # The program comes with another role; all else has to be right.
    assert [line for line in done.stderr.splitlines() if "/node-agent is not executable" not in line] == []


def test_nothing_waits_for_the_report(host: Host) -> None:
    lines = host.file(f"{UNITS}/preflight-report.service").content_string.splitlines()
    assert "Type=exec" in lines and "After=preflight.service kubelet.service" in lines
