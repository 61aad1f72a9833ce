"""The role's defaults, seen in the sandbox it was applied to: Docker below systemd, nothing started."""

from __future__ import annotations

import json
import tomllib

from testinfra.host import Host


def test_docker_accepts_its_configuration(host: Host) -> None:
    config = json.loads(host.file("/etc/docker/daemon.json").content_string)
    assert config["storage-driver"] == "overlay2"
    assert config["data-root"] == "/mnt/local/docker"
    assert host.run("dockerd --validate").rc == 0


def test_containerd_runs_with_its_configuration(host: Host) -> None:
    dump = tomllib.loads(host.check_output("containerd config dump"))
    assert dump["root"] == "/mnt/local/containerd"
    assert "io.containerd.grpc.v1.cri" in dump["disabled_plugins"]


def test_units_are_enabled(host: Host) -> None:
    for unit in ("containerd.service", "docker.socket", "docker.service"):
        assert host.service(unit).is_enabled, unit


def test_nothing_was_started(host: Host) -> None:
    assert not host.file("/mnt/local/docker").exists
    # The sandbox has one of its own, which apt's module sets aside and puts back.
    assert host.file("/usr/sbin/policy-rc.d").content_string == "#!/bin/sh\nexit 101\n"
