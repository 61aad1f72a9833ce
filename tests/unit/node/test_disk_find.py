"""The local disks, on /sys and /dev trees like those of Azure's machines."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from image_builder.node.disk import find, layout
from image_builder.node.disk.model import Disk, Places
from image_builder.node.disk.settings import Selector, Settings

AZURE = Selector()
GIB = 1 << 30
LOCAL_V1, LOCAL_V2 = "Microsoft NVMe Direct Disk", "Microsoft NVMe Direct Disk v2"
REMOTE = "MSFT NVMe Accelerator v1.0"
# Ids on the Hyper-V bus, as the rules of azure-vm-utils know them.
IDE_OS, IDE_RESOURCE = "{00000000-0000-8899-0000-000000000000}", "{00000000-0001-8899-0000-000000000000}"
PASSED_THROUGH = "44c4f61d-4444-4400-9d52-802e27ede19f"
SCSI = "{f8b3781a-1e82-4818-a1c3-63d806ec15bb}"


class Machine:
    """A machine's trees, filled disk by disk."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.places = Places(
            run=base / "run",
            sys=base / "sys",
            dev=base / "dev",
            proc=base / "proc",
            udev_queue=base / "queue",
        )
        for path in ("sys/block", "sys/dev/block", "sys/bus/pci/devices", "dev/disk/azure", "proc/self"):
            (base / path).mkdir(parents=True)
        self.mounted: list[str] = []
        self.mount("0:1", "/proc", "proc")

    def file(self, path: str | Path, text: str) -> None:
        where = self.base / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(text + "\n")

    def link(self, path: str | Path, target: Path) -> None:
        where = self.base / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.symlink_to(os.path.relpath(target, where.parent))

    def _disk(self, name: str, device: Path, number: int, size: int) -> Path:
        entry = device / name if device.name.startswith("nvme") else device / "block" / name
        self.file(entry / "size", str(size // 512))
        self.file(entry / "dev", f"259:{number}")
        self.link(f"sys/block/{name}", entry)
        self.link(f"sys/dev/block/259:{number}", entry)
        self.link(entry / "device", device)
        (self.base / "dev" / name).write_bytes(b"")
        return entry

    def nvme(self, number: int, model: str, serial: str = "", *, size: int = 440 * GIB, nsid: int = 1) -> str:
        controller = self.base / f"sys/devices/pci/{number:04}:00/nvme/nvme{number}"
        if not controller.exists():
            self.file(controller / "model", model.ljust(40))
            self.file(controller / "serial", serial.ljust(20))
            self.link(controller / "subsystem", self.base / "sys/class/nvme")
            self.file(controller.parent.parent / "class", "0x010802")
            self.link(f"sys/bus/pci/devices/{number:04}:00", controller.parent.parent)
        name = f"nvme{number}n{nsid}"
        entry = self._disk(name, controller, 10 * number + nsid, size)
        self.file(entry / "nsid", str(nsid))
        return name

    def scsi(self, letter: str, device_id: str, lun: int = 0, *, size: int = 80 * GIB) -> str:
        bus = self.base / f"sys/devices/vmbus/{letter}"
        device = bus / f"host0/target0:0:0/0:0:0:{lun}"
        self.file(bus / "device_id", device_id)
        self.file(device / "vendor", "Msft    ")
        self.file(device / "model", "Virtual Disk    ")
        self.link(device / "subsystem", self.base / "sys/bus/scsi")
        self._disk(f"sd{letter}", device, 100 + ord(letter), size)
        return f"sd{letter}"

    def partition(self, disk: str, name: str, number: str) -> None:
        entry = (self.base / f"sys/block/{disk}").resolve() / name
        self.file(entry / "partition", "1")
        self.file(entry / "dev", number)
        self.link(f"sys/dev/block/{number}", entry)

    def azure(self, link: str, disk: str) -> None:
        self.link(f"dev/disk/azure/{link}", self.base / "dev" / disk)

    def mount(self, number: str, target: str, kind: str = "ext4", source: str = "/dev/root") -> None:
        self.mounted.append(f"30 1 {number} / {target} rw,relatime shared:1 - {kind} {source} rw")
        self.file("proc/self/mountinfo", "\n".join(self.mounted))

    def wait(self, settings: Settings, sleep: Callable[[float], None], of_size: int = 0) -> Sequence[Disk]:
        return find.wait(settings, self.places, lambda: find.candidates(AZURE, self.places), of_size, sleep)

    def found(self, selector: Selector = AZURE) -> list[tuple[str, str]]:
        return [(disk.name, disk.found_by) for disk in find.candidates(selector, self.places)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def with_scsi_system(machine: Machine) -> None:
    machine.scsi("a", IDE_OS)
    machine.partition("sda", "sda1", "8:1")
    machine.mount("8:1", "/")


@pytest.mark.parametrize("has_rules", [True, False])
@pytest.mark.parametrize(("device_id", "lun"), [(IDE_RESOURCE, 0), (SCSI, 1)])
def test_resource_disk(machine: Machine, has_rules: bool, device_id: str, lun: int) -> None:
    """The fifth generation: an OS disk, a data disk, and the resource disk under any name."""
    with_scsi_system(machine)
    machine.scsi("c", "{f8b3781b-1e82-4818-a1c3-63d806ec15bb}", 1)
    name = machine.scsi("b", device_id, lun)
    if has_rules:
        machine.azure("resource", name)
        machine.azure("os", "sda")
    (found,) = find.candidates(AZURE, machine.places)
    assert found.name == "sdb" and found.local and not found.system
    assert found.found_by == ("azure/resource" if has_rules else "device_id")
    assert (found.model, found.transport, found.bytes) == ("Msft Virtual Disk", "scsi", 80 * GIB)


@pytest.mark.parametrize("has_rules", [True, False])
def test_first_local_nvme_has_links_by_serial_alone(machine: Machine, has_rules: bool) -> None:
    """Lsv3: there is also a small resource disk, which isn't selected."""
    with_scsi_system(machine)
    machine.azure("resource", machine.scsi("b", IDE_RESOURCE))
    for number, serial in ((0, "b2"), (1, "a1")):
        name = machine.nvme(number, LOCAL_V1, serial)
        if has_rules:
            machine.azure(f"local/by-serial/{serial}", name)
    how = "azure/local/by-serial" if has_rules else "model"
    assert machine.found() == [("nvme1n1", how), ("nvme0n1", how)]


def test_order_is_the_index_not_the_kernels_name(machine: Machine) -> None:
    """The sixth generation: remote disks behind one controller, the system disk among them."""
    for nsid in (1, 2, 3):
        machine.nvme(0, REMOTE, "SN: 000001", nsid=nsid)
    machine.partition("nvme0n1", "nvme0n1p1", "259:900")
    machine.partition("nvme0n1", "nvme0n1p15", "259:915")
    machine.mount("259:900", "/")
    machine.mount("259:915", "/boot/efi", "vfat")
    for number, index in ((1, 2), (2, 10), (3, 1)):
        name = machine.nvme(number, LOCAL_V2, f"s{number}")
        machine.azure(f"local/by-index/{index}", name)
        machine.azure(f"local/by-serial/s{number}", name)
    assert [name for name, _ in machine.found()] == ["nvme3n1", "nvme1n1", "nvme2n1"]
    assert {how for _, how in machine.found()} == {"azure/local/by-index"}


def test_remote_disk_is_never_taken_whatever_links_to_it(machine: Machine) -> None:
    name = machine.nvme(0, REMOTE, "SN")
    machine.azure("local/by-index/1", name)
    machine.azure("resource", name)
    assert machine.found() == []
    assert machine.found(Selector("configured", model="*")) == []


def test_ephemeral_system_disk_is_marked_and_the_others_are_not(machine: Machine) -> None:
    for number in range(3):
        machine.nvme(number, LOCAL_V2, f"s{number}")
    machine.partition("nvme1n1", "nvme1n1p1", "259:900")
    machine.mount("259:900", "/")
    found = {disk.name: disk.system for disk in find.candidates(AZURE, machine.places)}
    assert found == {"nvme0n1": False, "nvme1n1": True, "nvme2n1": False}


def test_system_is_followed_through_mappings(machine: Machine) -> None:
    machine.nvme(0, LOCAL_V2, "s0")
    machine.nvme(1, LOCAL_V2, "s1")
    machine.partition("nvme1n1", "nvme1n1p1", "259:900")
    mapping = machine.base / "sys/devices/virtual/block/dm-0"
    machine.link(mapping / "slaves/nvme1n1p1", (machine.base / "sys/dev/block/259:900").resolve())
    machine.link("sys/dev/block/254:0", mapping)
    machine.mount("254:0", "/")
    assert find.system_disks(machine.places) == {"nvme1n1"}


def test_configured_selector_wants_all_that_it_names(machine: Machine) -> None:
    machine.nvme(0, "Fast Disk", "A1", size=100 * GIB)
    machine.nvme(1, "Fast Disk", "B1", size=900 * GIB)
    machine.nvme(2, "Slow Disk", "B2", size=900 * GIB)
    machine.link("dev/disk/by-path/pci-0001-nvme-1", machine.base / "dev/nvme1n1")

    def names(**values: object) -> list[str]:
        return [name for name, _ in machine.found(replace(Selector("configured"), **values))]  # type: ignore[arg-type]

    assert names(model="Fast*") == ["nvme0n1", "nvme1n1"]
    assert names(model="Fast*", minimum_bytes=200 * GIB) == ["nvme1n1"]
    assert names(serials=("A*", "B2")) == ["nvme0n1", "nvme2n1"]
    assert names(by_path=("pci-0001-*",)) == ["nvme1n1"]
    assert names(model="Slow*", by_path=("pci-*",)) == []
    assert not any(disk.local for disk in find.candidates(Selector("configured", model="*"), machine.places))
    assert machine.found() == []


def test_what_is_no_hardware_is_no_disk(machine: Machine) -> None:
    machine.nvme(0, LOCAL_V2, "s0")
    for name in ("loop0", "dm-0", "md127", "zram0"):
        machine.file(f"sys/block/{name}/size", "1000")
    machine.file((machine.base / "sys/block/nvme0n1").resolve() / "hidden", "1")
    assert find.disks(machine.places) == []


def test_second_namespace_has_a_serial_of_its_own(machine: Machine) -> None:
    machine.nvme(0, LOCAL_V2, "s0", nsid=1)
    machine.nvme(0, LOCAL_V2, "s0", nsid=2)
    assert [disk.serial for disk in find.disks(machine.places)] == ["s0", "s0_2"]


def test_wait_ends_when_every_controller_has_a_disk(machine: Machine) -> None:
    machine.nvme(0, LOCAL_V2, "s0")
    machine.file("sys/bus/pci/devices/0009:00/class", "0x010802")
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            machine.file("sys/bus/pci/devices/0009:00/nvme/nvme9/nvme9n1/size", "8")

    assert len(machine.wait(Settings(), sleep)) == 1
    assert len(slept) == 2


@pytest.mark.parametrize(
    ("kind", "driver", "function", "is_settled"),
    [
        (PASSED_THROUGH, False, False, False),
        (PASSED_THROUGH, True, False, False),
        (PASSED_THROUGH, True, True, True),
        ("ba6163d9-04a1-4d29-b605-72e2ffb1dc7f", False, False, False),
        ("ba6163d9-04a1-4d29-b605-72e2ffb1dc7f", True, False, True),
        ("32412632-86cb-44a2-9b5c-50d1417354f5", False, False, False),
        ("f8615163-df3e-46c5-913f-f2d2f965ed0e", False, False, True),  # a network card
    ],
)
def test_devices_of_the_bus_without_a_driver_are_waited_for(
    machine: Machine, kind: str, driver: bool, function: bool, is_settled: bool
) -> None:
    device = machine.base / "sys/bus/vmbus/devices/1-2-3"
    machine.file(device / "class_id", f"{{{kind}}}")
    if driver:
        machine.link(device / "driver", machine.base / "sys/bus/vmbus/drivers/some")
        machine.file("sys/bus/vmbus/drivers/some/module", "")
    if function:
        machine.file(device / "pciabcd:00/abcd:00:00.0/class", "0x010802")
    assert find.is_settled(machine.places) == is_settled


def superblock(devices: int, *, name: str = "any:local", level: int = 0, uuid: str = "") -> bytes:
    head = bytearray(8192)
    number = bytes.fromhex((uuid or layout.new_uuid()).replace("-", ""))
    struct.pack_into("<IIII16s32s", head, 4096, 0xA92B4EFC, 1, 0, 0, number, name.encode())
    struct.pack_into("<iI", head, 4096 + 72, level, 0)
    struct.pack_into("<I", head, 4096 + 92, devices)
    head[4096 + 64] = 1  # the field after the name: when it was made
    struct.pack_into("<I", head, 4096 + 220, 16)
    return bytes(head)


@pytest.mark.parametrize(
    ("head", "devices"),
    [
        (superblock(8), 8),
        (superblock(8, name="any:other"), 0),
        (superblock(8, level=1), 0),
        (superblock(8, uuid="0" * 32), 0),
        (superblock(1_000_000), 0),
        (b"", 0),
        (bytes(8192), 0),
    ],
)
def test_a_superblock_says_how_many_disks_there_are(tmp_path: Path, head: bytes, devices: int) -> None:
    (tmp_path / "disk").write_bytes(head)
    assert find.devices_of(Disk("disk", tmp_path / "disk", 1 << 30), "local") == devices


class Clock:
    """A clock that moves only during sleeps; ``events`` happen at their second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.events: dict[float, Callable[[], object]] = {}
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in [at for at in self.events if at <= self.now]:
            self.events.pop(at)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def members(machine: Machine, *numbers: int) -> None:
    for number in numbers:
        name = machine.nvme(number, LOCAL_V2, f"s{number}")
        (machine.base / "dev" / name).write_bytes(superblock(8))


def test_members_that_are_late_are_waited_for(machine: Machine, clock: Clock) -> None:
    members(machine, *range(7))
    clock.events[45] = lambda: members(machine, 7)
    assert len(machine.wait(Settings(), clock.sleep)) == 8
    assert 45 <= clock.now < 46


def test_members_that_never_come_have_a_minute(machine: Machine, clock: Clock) -> None:
    members(machine, *range(7))
    assert len(machine.wait(Settings(), clock.sleep)) == 7
    assert 60 <= clock.now < 61


def test_disks_of_the_size_are_waited_for(machine: Machine, clock: Clock) -> None:
    for number in range(3):
        machine.nvme(number, LOCAL_V2, f"s{number}")
    clock.events[20] = lambda: [machine.nvme(number, LOCAL_V2, f"s{number}") for number in range(3, 8)]
    assert len(machine.wait(Settings(), clock.sleep, of_size=8)) == 8
    assert 20 <= clock.now < 21


def test_whoever_says_how_many_there_are_is_believed(machine: Machine, clock: Clock) -> None:
    for number in range(3):
        machine.nvme(number, LOCAL_V2, f"s{number}")
    assert len(machine.wait(Settings(expected_disks=3), clock.sleep, of_size=8)) == 3
    assert clock.now == 0


def test_without_a_number_nothing_is_waited_for_once_all_is_settled(machine: Machine, clock: Clock) -> None:
    machine.nvme(0, LOCAL_V2, "s0")
    assert len(machine.wait(Settings(), clock.sleep)) == 1
    assert clock.now == 0


def test_no_disk_at_all_has_the_settings_time(machine: Machine, clock: Clock) -> None:
    assert machine.wait(Settings(), clock.sleep) == []
    assert 10 <= clock.now < 11


def size_of(tmp_path: Path, cloud: object, gpu: object = None) -> int:
    (tmp_path / "cloud").write_text(json.dumps(cloud))
    if gpu is not None:
        (tmp_path / "gpu.json").write_text(json.dumps(gpu))
    return find.disks_of_size(tmp_path, tmp_path / "cloud")


def test_the_size_is_known_without_a_network(tmp_path: Path) -> None:
    def said(size: object) -> object:
        return {"ds": {"meta_data": {"imds": {"compute": {"vmSize": size}}}}}

    assert size_of(tmp_path, said("standard_nd96isr_h100_v5")) == 8
    assert size_of(tmp_path, said("Standard_NC24s_v3")) == 0
    assert size_of(tmp_path, said("Standard_D2s_v5")) == 0
    assert size_of(tmp_path, said(7)) == 0
    assert size_of(tmp_path, []) == 0
    assert size_of(tmp_path, {"ds": 5}) == 0
    assert find.disks_of_size(tmp_path, tmp_path / "nothing") == 0
    assert size_of(tmp_path, {}, {"vm_size": "Standard_NC24ads_A100_v4"}) == 1


def test_wait_is_for_udev_and_for_as_many_as_are_expected(machine: Machine) -> None:
    machine.nvme(0, LOCAL_V2, "s0")
    machine.file("queue", "")
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            (machine.base / "queue").unlink()
        if len(slept) == 3:
            machine.nvme(1, LOCAL_V2, "s1")

    assert len(machine.wait(Settings(expected_disks=2), sleep)) == 2
    assert len(slept) == 3


def test_wait_is_bounded(machine: Machine, clock: Clock) -> None:
    assert machine.wait(Settings(wait_seconds=0), clock.sleep) == []
    assert clock.now == 0
