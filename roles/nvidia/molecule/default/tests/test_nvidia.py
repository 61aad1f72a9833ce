"""The role's results in the sandbox that it was applied to: Debian's driver, the container toolkit, and no GPU."""

from __future__ import annotations

import json
import tomllib

import pytest
from testinfra.host import Host

UNITS = ("nvidia-persistenced.service", "nvidia-cdi-refresh.service")


def test_record_names_the_driver_and_every_module(host: Host) -> None:
    found = json.loads(host.file("/etc/node-agent/gpu-driver.json").content_string)
    assert (found["driver"], found["flavour"]) == ("535.261.03", "open")
    assert set(found["modules"]) == {"nvidia", "nvidia_uvm", "nvidia_modeset"}
    for module in found["modules"].values():
        assert module["vermagic"].split()[0] == found["kernel"]


def test_modules_are_indexed(host: Host) -> None:
    kernel = json.loads(host.file("/etc/node-agent/gpu-driver.json").content_string)["kernel"]
    shown = host.check_output("modprobe -S %s --show-depends nvidia-uvm", kernel)
    assert f"/lib/modules/{kernel}/updates/dkms/nvidia-uvm.ko" in shown


def test_nouveau_is_denied(host: Host) -> None:
    assert "install nouveau /bin/false" in host.check_output("modprobe --showconfig").splitlines()


@pytest.mark.parametrize("unit", UNITS)
def test_only_a_gpu_starts_a_unit(host: Host, unit: str) -> None:
    assert not host.file(f"/etc/systemd/system/multi-user.target.wants/{unit}").exists
    assert unit in host.file("/etc/udev/rules.d/71-nvidia.rules").content_string


def test_nothing_else_starts_the_description(host: Host) -> None:
    assert host.file("/etc/systemd/system/nvidia-cdi-refresh.path").linked_to == "/dev/null"


def test_containerd_has_the_runtime(host: Host) -> None:
    plugin = tomllib.loads(host.check_output("containerd config dump"))["plugins"][
        "io.containerd.grpc.v1.cri"
    ]
    assert set(plugin["containerd"]["runtimes"]) == {"nvidia", "runc"}
