"""The node's report about its GPUs, from trees like those of the kernel and the packages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import sysfs
from image_builder.node.gpu import machine
from image_builder.node.gpu.machine import Places
from image_builder.node.gpu.model import PciGpu
from tests.support.gpu_stand_in.recordings import places as below

# As published.
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  "
    "(dvs-builder@U22-I3-B17-02-5)  Tue Sep 23 09:55:41 UTC 2025\n"
    "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n"
)
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  560.35.03  Fri Aug 16 21:39:15 UTC 2024\nGCC version:  x\n"


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        (OPEN, ("580.95.05", "open")),
        (CLOSED, ("560.35.03", "proprietary")),
        ("", ("", "")),
        ("x\n", ("", "")),
    ],
)
def test_driver(text: str, driver: tuple[str, str]) -> None:
    assert machine.driver_version(text) == driver


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Make a node with two GPUs, one without a driver, and an audio device and another vendor's display adapter."""
    places = below(tmp_path)
    for path in (places.root, places.proc, places.sys, places.dev, places.run):
        path.mkdir()
    devices = {
        "0001:00:00.0": ("0x10de", "0x030200", "0x2335"),
        "0002:00:00.0": ("0x10de", "0x030000", "0x1eb8"),
        "0002:00:00.1": ("0x10de", "0x040300", "0x10fa"),
        "0003:00:00.0": ("0x1414", "0x030000", "0x5353"),
    }
    for address, (vendor, kind, device) in devices.items():
        for name, text in (("vendor", vendor), ("class", kind), ("device", device)):
            put(places.sys / "bus/pci/devices" / address / name, text + "\n")
    (places.sys / "bus/pci/drivers/nvidia").mkdir(parents=True)
    (places.sys / "bus/pci/devices/0001:00:00.0/driver").symlink_to("../../drivers/nvidia")
    put(places.proc / "driver/nvidia/version", OPEN)
    put(places.proc / "sys/kernel/random/boot_id", "0b2ce45c-8c3c-4d2f-8f6f-5a0d6a3f4f11\n")
    put(places.proc / "meminfo", "MemTotal:       115343360 kB\nMemFree: 1 kB\n")
    put(places.sys / "module/nvidia/version", "580.95.05\n")
    (places.sys / "module/nouveau").mkdir()
    put(places.root / "etc/image-release", 'IMAGE_BUILD="abc"\n')
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "null"):
        put(places.dev / name, "")
    return places


def never() -> Mapping[str, Any]:
    raise AssertionError("the platform was asked")


def test_look(places: Places) -> None:
    node = machine.look(places, "Standard_NC6s_v3", never)
    assert (node.vm_size, node.vm_size_from) == ("Standard_NC6s_v3", "configuration")
    assert (node.driver_loaded, node.flavour, node.image) == ("580.95.05", "open", "abc")
    assert node.modules == {"nvidia": "580.95.05", "nouveau": ""}
    assert node.pci == (PciGpu("0001:00:00.0", "2335", "nvidia"), PciGpu("0002:00:00.0", "1eb8", ""))
    assert node.nodes == ("nvidia-uvm", "nvidia0", "nvidiactl")
    assert node.memory_bytes == 110 << 30
    assert (node.cdi_gpus, node.fabric_manager, node.libraries, node.local_nvme) == (None, "", {}, 0)


def test_a_node_without_anything(tmp_path: Path) -> None:
    empty = below(tmp_path)
    node = machine.look(empty, "x", never)
    assert (node.driver_loaded, node.pci, node.nodes, node.memory_bytes) == ("", (), (), 0)


def test_the_version_of_a_library_as_debian_has_it(places: Places) -> None:
    real = places.root / "usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.247.01"
    put(real, "")
    link = places.root / "usr/lib/x86_64-linux-gnu/libcuda.so.1"
    link.symlink_to("nvidia/current/libcuda.so.535.247.01")
    assert machine.library_version(places.root, "libcuda.so.1") == "535.247.01"
    assert machine.library_version(places.root, "libnvidia-ml.so.1") == ""
    link.unlink()
    link.symlink_to("libcuda.so.580")
    assert machine.library_version(places.root, "libcuda.so.1") == ""


YAML = """\
cdiVersion: 0.5.0
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
  name: "0"
- name: GPU-566e6f65-c38e-b12f-4824-6944218668b9
- name: "1"
- name: all
kind: nvidia.com/gpu
"""


def test_cdi(places: Places) -> None:
    put(places.cdi[0] / "nvidia.yaml", YAML)
    assert machine.cdi_gpus(places.cdi) == 2
    named = {"devices": [{"name": "0"}, {"name": "1"}, {"name": "2"}, {"name": "3:0"}, {"name": "all"}]}
    put(places.cdi[0] / "nvidia.json", json.dumps(named, indent=1))
    assert machine.cdi_gpus(places.cdi) == 3


def test_ports(places: Places) -> None:
    port = places.sys / "class/infiniband/mlx5_0/ports/1"
    for name, text in {
        "state": "4: ACTIVE",
        "phys_state": "5: LinkUp",
        "rate": "400 Gb/sec (4X NDR)",
        "link_layer": "InfiniBand",
    }.items():
        put(port / name, text + "\n")
    assert sysfs.ports(places.sys) == (sysfs.Port("mlx5_0", 1, "ACTIVE", "LinkUp", 400, "InfiniBand"),)


def test_local_disks_by_their_model(places: Places) -> None:
    models = ("Microsoft NVMe Direct Disk", "Microsoft NVMe Direct Disk v2", "MSFT NVMe Accelerator v1.0")
    for number, model in enumerate(models):
        put(places.sys / f"class/nvme/nvme{number}/model", f"{model}   \n")
    assert machine.local_nvme(places.sys) == 2


def test_a_process_has_its_whole_name(places: Places) -> None:
    put(places.proc / "7/cmdline", "/usr/bin/nvidia-persistenced\0--user\0x\0")
    put(places.proc / "7/comm", "nvidia-persiste\n")
    put(places.proc / "8/comm", "kthread\n")
    names = [machine.process_name(places.proc, pid) for pid in (7, 8, 9)]
    assert names == ["nvidia-persistenced", "kthread", ""]


def test_the_platform_is_asked_once_a_boot(places: Places) -> None:
    requests: list[int] = []

    def ask() -> Mapping[str, Any]:
        requests.append(1)
        return {"vmSize": "Standard_NC6s_v3", "vmId": "id", "zone": "2", "customData": "secret"}

    for _ in range(2):
        node = machine.look(places, "", ask)
        assert (node.vm_size, node.vm_size_from, node.vm_id) == ("Standard_NC6s_v3", "platform", "id")
    assert len(requests) == 1
    assert "secret" not in (places.run / "imds.json").read_text(encoding="utf-8")
    put(places.proc / "sys/kernel/random/boot_id", "another\n")
    machine.look(places, "", ask)
    assert len(requests) == 2


def test_a_second_look_by_the_size_of_the_first_loses_nothing(places: Places) -> None:
    first = machine.look(places, "", lambda: {"vmSize": "Standard_NC6s_v3", "vmId": "id", "zone": "2"})
    assert machine.look(places, first.vm_size, never) == first
    other = machine.look(places, "Standard_NC12s_v3", never)
    assert (other.vm_size, other.vm_size_from) == ("Standard_NC12s_v3", "configuration")


@pytest.mark.parametrize("error", [OSError("unreachable"), ValueError("no JSON")])
def test_the_platform_does_not_answer(places: Places, error: Exception) -> None:
    def ask() -> Mapping[str, Any]:
        raise error

    assert machine.look(places, "", ask).vm_size == ""
    assert not (places.run / "imds.json").exists()
