"""The role's defaults, seen in the sandbox they were applied to: Debian's driver, and no GPU."""

from __future__ import annotations

import json

from testinfra.host import Host

UNIT = "nvidia-persistenced.service"


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


def test_only_a_gpu_starts_the_daemon(host: Host) -> None:
    assert not host.service(UNIT).is_enabled
    assert UNIT in host.file("/etc/udev/rules.d/71-nvidia.rules").content_string
