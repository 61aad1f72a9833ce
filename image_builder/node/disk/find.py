"""The local disks: recognized by what the platform says, never by the kernel's name.

Azure (azure-vm-utils, and the rules of the role azure_guest): a local NVMe disk has the model ``Microsoft NVMe
Direct Disk`` (with `` v2`` from the sixth generation on) and links below ``/dev/disk/azure/local``, ``by-index``
from the sixth generation on, ``by-serial`` always. A remote disk has the model ``MSFT NVMe Accelerator`` and is
never used, whatever links to it. The SCSI resource disk has the link ``/dev/disk/azure/resource`` and a known
``device_id``; it is used if there is no local NVMe disk.
"""

from __future__ import annotations

import fnmatch
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from image_builder.node import files, mounts, sysfs
from image_builder.node import settings as settings_files
from image_builder.node.disk import layout
from image_builder.node.disk.model import Disk, Places
from image_builder.node.disk.settings import Selector, Settings
from image_builder.node.errors import NodeError
from image_builder.node.gpu import sizes

LOCAL_MODELS = ("Microsoft NVMe Direct Disk", "Microsoft NVMe Direct Disk v*")
REMOTE_MODELS = ("MSFT NVMe Accelerator*",)
# Where Hyper-V's resource disk is: on a generation 1 VM's second IDE channel, or on a generation 2 VM's controller.
_RESOURCE_IDE = "00000000-0001-"
_RESOURCE_SCSI, _RESOURCE_LUN = "f8b3781a-1e82-4818-a1c3-63d806ec15bb", "1"
_SYSTEM_PLACES = ("/", "/usr", "/boot", "/boot/efi", "/efi")
_NVME_CLASS = "0x0108"
# Device classes on Hyper-V's bus, from the kernel's hyperv.h: disks (SCSI, IDE), and passed-through devices (PCI).
_VMBUS_DISKS = ("ba6163d9-04a1-4d29-b605-72e2ffb1dc7f", "32412632-86cb-44a2-9b5c-50d1417354f5")
_VMBUS_PCI = "44c4f61d-4444-4400-9d52-802e27ede19f"
# How long to wait for disks that must be there.
MEMBER_SECONDS = 60.0
_MOST_MEMBERS = 64
_POLL_SECONDS, _SLOW_POLL_SECONDS = 0.05, 0.5


@dataclass(frozen=True)
class _Links:
    """Links to disks, by the disks' kernel names."""

    index: Mapping[str, str] = field(default_factory=dict)
    serial: Mapping[str, str] = field(default_factory=dict)
    resource: Mapping[str, str] = field(default_factory=dict)
    path: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def wait(
    settings: Settings,
    places: Places,
    look: Callable[[], Sequence[Disk]],
    of_size: int = 0,
    sleep: Callable[[float], None] = time.sleep,
) -> Sequence[Disk]:
    """Return the candidates that ``look`` returns, after the kernel and udev have found all disks.

    Without any candidate, or with devices still settling, wait at most ``wait_seconds``. If the number of disks is
    known, from the settings, an array's superblock or ``of_size``, wait at most the longer of that and
    ``MEMBER_SECONDS``.
    """
    began = time.monotonic()
    while True:
        matches = look()
        usable = [disk for disk in matches if not disk.system]
        waited = time.monotonic() - began
        expected = settings.expected_disks or max(
            [of_size, *(devices_of(disk, settings.label) for disk in usable)]
        )
        if len(usable) < expected:
            limit = max(settings.wait_seconds, MEMBER_SECONDS)
        elif usable and is_settled(places):
            return matches
        else:
            limit = settings.wait_seconds
        if waited >= limit:
            return matches
        sleep(_POLL_SECONDS if waited < settings.wait_seconds else _SLOW_POLL_SECONDS)


def disks_of_size(etc: Path, cloud: Path) -> int:
    """Return how many local NVMe disks this VM size has; 0 if the size or its number of disks isn't known.

    ``cloud`` is the metadata service's answer as saved by cloud-init: there is no network yet.
    """
    try:
        size = sizes.load().find(str(settings_files.load("gpu", etc).get("vm_size") or _size(cloud)))
    except NodeError:
        return 0
    return (size[0].local_nvme or 0) if size else 0


def _size(cloud: Path) -> str:
    try:
        value: Any = json.loads(cloud.read_bytes())
        for key in ("ds", "meta_data", "imds", "compute", "vmSize"):
            value = value[key]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return value if isinstance(value, str) else ""


def devices_of(disk: Disk, label: str) -> int:
    """Return the number of members of our array that this disk's superblock says it belongs to; 0 for none."""
    try:
        with files.descriptor(disk.path) as fd:
            raid = layout.raid(os.pread(fd, 2 * layout.PAGE, 0))
    except OSError:
        return 0
    is_ours = raid is not None and raid.name == label and raid.level == 0 and layout.is_ours(raid.uuid)
    # Ignore a number of disks that no machine has.
    return raid.devices if raid and is_ours and raid.devices <= _MOST_MEMBERS else 0


def is_settled(places: Places) -> bool:
    """Return whether all controllers have presented their disks and udev has nothing left to do.

    An NVMe disk that Hyper-V passes through first appears on Hyper-V's bus; hv_pci then creates its PCI device.
    """
    if places.udev_queue.exists():
        return False
    for device in (places.sys / "bus/vmbus/devices").glob("*"):
        kind = sysfs.text(device / "class_id").strip("{}")
        if kind in _VMBUS_DISKS and not (device / "driver").exists():
            return False
        if kind == _VMBUS_PCI and not list(device.glob("pci*/*:*/class")):
            return False
    for device in (places.sys / "bus/pci/devices").glob("*"):
        if sysfs.text(device / "class").startswith(_NVME_CLASS) and not list(
            device.glob("nvme/nvme*/nvme*n*")
        ):
            return False
    return True


def candidates(selector: Selector, places: Places) -> list[Disk]:
    """Return the disks that match the selector, in a stable order, including the system's disks."""
    links = _links(places)
    system = system_disks(places)
    matches = []
    for disk in disks(places):
        chosen = _by_platform(disk, links, places) if selector.kind == "azure" else disk
        if selector.kind == "configured":
            chosen = _by_configuration(disk, selector, links, places)
        if chosen and not _is_remote(disk) and disk.bytes >= selector.minimum_bytes:
            matches.append(replace(chosen, system=disk.name in system))
    # On a machine that also has local NVMe disks, the resource disk is small and slow: leave it alone.
    if any(disk.transport == "nvme" and not disk.system for disk in matches) and selector.kind == "azure":
        matches = [disk for disk in matches if disk.transport == "nvme"]
    return sorted(matches, key=lambda disk: (disk.order, disk.serial, disk.name))


def disks(places: Places) -> list[Disk]:
    """Return all whole hardware disks: loop devices, RAM disks, mappings and arrays have no ``device`` link."""
    hardware = []
    for entry in sorted((places.sys / "block").iterdir()):
        device = entry / "device"
        size = int(sysfs.text(entry / "size") or 0)
        if device.exists() and size and sysfs.text(entry / "hidden") != "1":
            hardware.append(_disk(entry, device, size * 512, places))
    return hardware


def _disk(entry: Path, device: Path, size: int, places: Places) -> Disk:
    subsystem = _target(device / "subsystem")
    serial = sysfs.text(entry / "serial") or sysfs.text(device / "serial") or _page_80(device / "vpd_pg80")
    namespace = sysfs.text(entry / "nsid")
    if serial and namespace not in ("", "1"):
        serial = f"{serial}_{namespace}"  # the serial is the controller's
    return Disk(
        name=entry.name,
        path=places.dev / entry.name,
        bytes=size,
        model=" ".join([*_vendor(device), sysfs.text(device / "model")]).strip(),
        serial=serial,
        transport=subsystem.removesuffix("-subsystem"),
        rotational=sysfs.text(entry / "queue/rotational") == "1",
        wwid=sysfs.text(entry / "wwid") or sysfs.text(device / "wwid"),
        sequence=sysfs.text(entry / "diskseq"),
    )


def _vendor(device: Path) -> Iterable[str]:
    """Yield a SCSI disk's vendor; virtio and NVMe devices have a number in this file."""
    vendor = sysfs.text(device / "vendor")
    if vendor and not vendor.startswith("0x"):
        yield vendor


def _is_remote(disk: Disk) -> bool:
    return _matches(disk.model, REMOTE_MODELS)


def _by_platform(disk: Disk, links: _Links, places: Places) -> Disk | None:
    if disk.name in links.index:
        return replace(
            disk, local=True, found_by="azure/local/by-index", order=links.index[disk.name].zfill(4)
        )
    if disk.name in links.serial:
        return replace(disk, local=True, found_by="azure/local/by-serial", order=f"serial {disk.serial}")
    if _matches(disk.model, LOCAL_MODELS):
        return replace(disk, local=True, found_by="model", order=f"serial {disk.serial}")
    if disk.name in links.resource:
        return replace(disk, local=True, found_by="azure/resource")
    if _is_resource(places.sys / "block" / disk.name / "device"):
        return replace(disk, local=True, found_by="device_id")
    return None


def _by_configuration(disk: Disk, selector: Selector, links: _Links, places: Places) -> Disk | None:
    paths = links.path.get(disk.name, ())
    conditions = (
        not selector.model or fnmatch.fnmatchcase(disk.model, selector.model),
        not selector.serials or _matches(disk.serial, selector.serials),
        not selector.by_path or any(_matches(path, selector.by_path) for path in paths),
    )
    if not all(conditions):
        return None
    # Whether it is ephemeral is for the platform to say, not for the configuration that selected it.
    local = _by_platform(disk, links, places) is not None
    return replace(disk, local=local, found_by="configuration", order=f"serial {disk.serial}")


def _matches(word: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(word, pattern) for pattern in patterns)


def _is_resource(device: Path) -> bool:
    """Return whether a SCSI disk is Hyper-V's resource disk, by the ``device_id`` of the bus above it."""
    if not _target(device / "subsystem").startswith("scsi"):
        return False
    where = device.resolve()
    for above in where.parents:
        device_id = sysfs.text(above / "device_id").strip("{}")
        if device_id:
            lun = where.name.rpartition(":")[2]
            return device_id.startswith(_RESOURCE_IDE) or (
                device_id == _RESOURCE_SCSI and lun == _RESOURCE_LUN
            )
    return False


def _links(places: Places) -> _Links:
    azure = places.dev / "disk/azure"
    paths: dict[str, tuple[str, ...]] = {}
    for link in sorted((places.dev / "disk/by-path").glob("*")):
        paths[_target(link)] = (*paths.get(_target(link), ()), link.name)
    return _Links(
        index={_target(link): link.name for link in (azure / "local/by-index").glob("*")},
        serial={_target(link): link.name for link in (azure / "local/by-serial").glob("*")},
        resource={_target(link): link.name for link in azure.glob("resource")},
        path=paths,
    )


def system_disks(places: Places) -> frozenset[str]:
    """Return the names of the disks that the running system is on, through partitions, mappings and arrays."""
    names: set[str] = set()
    for mounted in mounts.listed(places.proc):
        if mounted.target in _SYSTEM_PLACES:
            entry = places.sys / "dev/block" / mounted.device
            if not entry.exists() and mounted.source.startswith("/dev/"):
                entry = places.sys / "class/block" / Path(mounted.source).resolve().name
            if entry.exists():
                names |= whole_disks(entry)
    return frozenset(names)


def whole_disks(entry: Path) -> set[str]:
    """Return the names of the disks below a block device in sysfs, its own if it is a disk."""
    where = entry.resolve()
    below = list((where / "slaves").glob("*"))
    if below:
        return set().union(*(whole_disks(slave) for slave in below))
    return {where.parent.name if (where / "partition").exists() else where.name}


def _target(link: Path) -> str:
    return os.path.basename(os.path.realpath(link)) if link.is_symlink() else ""


def _page_80(path: Path) -> str:
    """Return a SCSI disk's serial, from its vital product data page 0x80 (SPC: after a four-byte header)."""
    try:
        return path.read_bytes()[4:].decode("ascii", errors="replace").strip(" \0")
    except OSError:
        return ""
