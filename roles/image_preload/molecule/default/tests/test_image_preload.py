"""The role's defaults, seen in the sandbox they were applied to: a program that runs, a unit that waits."""

from __future__ import annotations

import json

from testinfra.host import Host

PROGRAM = "/usr/local/libexec/image-preload"
UNIT = "systemd-analyze cat-config systemd/system/image-preload.service"


def test_unit_is_enabled_and_starts_the_program(host: Host) -> None:
    assert host.service("image-preload.service").is_enabled
    lines = host.check_output(UNIT).replace("\\\n", "").splitlines()
    start = [line for line in lines if line.startswith("ExecStart=")]
    assert len(start) == 1
    assert start[0].split()[0] == f"ExecStart={PROGRAM}"
    assert "--engine=docker" in start[0].split()
    assert "After=docker.service" in lines


def test_kubelet_requires_the_unit(host: Host) -> None:
    drop_in = host.file("/etc/systemd/system/kubelet.service.d/10-image-preload.conf").content_string
    assert "Requires=image-preload.service" in drop_in.splitlines()
    assert "After=image-preload.service" in drop_in.splitlines()


def test_program_says_what_is_missing(host: Host) -> None:
    done = host.run(f"{PROGRAM} --engine=docker --list=/nowhere.json --status=/tmp/status.json")
    assert done.rc == 1
    assert "/nowhere.json: No such file or directory" in done.stdout
    status = json.loads(host.file("/tmp/status.json").content_string)
    assert status["problems"] == ["/nowhere.json: No such file or directory"]
    assert status["loaded"] == []
