"""The role's defaults, seen in the sandbox they were applied to: settings, and units that wait for each other."""

from __future__ import annotations

import json

from testinfra.host import Host

PROGRAM = "/usr/local/sbin/node-agent"
UNITS = {
    "preload-seed.service": "seed",
    "image-preload.service": "preload",
    "preload-promote.service": "promote",
}


def lines(host: Host, unit: str) -> list[str]:
    return str(host.check_output(f"systemd-analyze cat-config systemd/system/{unit}")).splitlines()


def test_units_are_enabled_and_start_the_program(host: Host) -> None:
    for unit, command in UNITS.items():
        assert host.service(unit).is_enabled
        start = [line for line in lines(host, unit) if line.startswith("ExecStart=")]
        assert start == [f"ExecStart={PROGRAM} {command}"]
    assert "After=docker.service preload-seed.service" in lines(host, "image-preload.service")


def test_settings_are_the_defaults(host: Host) -> None:
    assert json.loads(host.file("/etc/node-agent/preload.json").content_string) == {
        "engine": "docker",
        "namespace": "k8s.io",
        "pause": "registry.k8s.io/pause:3.10",
        "data_root": "/mnt/local/docker",
        "mount_point": "/mnt/local",
        "verity": "require",
        "promote": {
            "enabled": True,
            "bytes_per_second": 33554432,
            "workers": 2,
            "reserve_percent": 15,
            "settle_seconds": 30,
        },
        "kubelet_healthz": "http://127.0.0.1:10248/healthz",
    }


def test_engines_wait_for_the_seed(host: Host) -> None:
    for engine in ("docker", "containerd"):
        drop_in = host.file(f"/etc/systemd/system/{engine}.service.d/10-preload-seed.conf").content_string
        assert "After=preload-seed.service" in drop_in.splitlines()


def test_units_start_again_after_a_failure(host: Host) -> None:
    for unit in UNITS:
        assert {"Restart=on-failure", "StartLimitIntervalSec=0"} <= set(lines(host, unit)), unit


def test_kubelet_starts_when_the_unit_has_succeeded(host: Host) -> None:
    drop_in = host.file("/etc/systemd/system/kubelet.service.d/10-image-preload.conf").content_string
    assert "Wants=image-preload.service" in drop_in.splitlines()
    assert "systemctl --quiet is-active image-preload.service" in drop_in
    assert "After=image-preload.service" in drop_in.splitlines()


def test_store_can_be_mounted(host: Host) -> None:
    modules = host.file("/etc/modules-load.d/50-image-preload.conf").content_string.splitlines()
    assert {"erofs", "loop", "dm_verity"} <= set(modules)
    assert host.exists("dmsetup")
