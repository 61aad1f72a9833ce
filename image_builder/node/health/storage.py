"""Storage: filesystems, md arrays, and NVMe drives as they report themselves.

An NVMe drive's report is its health page (log page 02h), as `nvme smart-log` prints it, read with the same ioctl
(linux/nvme_ioctl.h; NVM Express Base Specification 2.0, figure 207).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from image_builder.node import files, mounts
from image_builder.node.health import apart
from image_builder.node.health.model import Finding, Look, Outcome, Sample, Severity
from image_builder.node.health.settings import Settings
from image_builder.node.mounts import Mount
from image_builder.node.sysfs import number, text

# statvfs(2) on one of these can block forever, and none of them is the node's own.
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "lustre", "afs")
# Read-only by design: that they can't be written to isn't a fault.
_READ_ONLY = ("squashfs", "erofs", "iso9660", "cramfs", "romfs")
# Values of /sys/block/mdN/md/array_state for an unusable array. RAID0 has no `degraded`, it says `broken`.
_LOST = ("broken", "inactive")
_NVME_IOCTL_ADMIN_CMD = 0xC0484E41
_GET_LOG_PAGE, _HEALTH, _LENGTH = 0x02, 0x02, 512
_EVERY_NAMESPACE = 0xFFFFFFFF
_TIMEOUT_MS = 5000
# For all drives together; a controller that is being reset doesn't answer.
_SECONDS = 15.0
# Bits of the critical warning. Heat may pass; any other bit means that the drive must be replaced.
WARNINGS = {
    0: "spare blocks below the threshold",
    1: "temperature out of range",
    2: "reliability degraded by media errors",
    3: "read-only",
    4: "volatile memory backup failed",
    5: "persistent memory region unreliable",
}
_HEAT = 1 << 1


@dataclass(frozen=True)
class Usage:
    """How full a path's filesystem is, not counting what is reserved for root. 0 inodes: their number isn't limited."""

    path: str
    mounted: Mount
    total_bytes: int
    free_bytes: int
    total_inodes: int
    free_inodes: int

    @property
    def used(self) -> float:
        """Return the used part, 0 to 1, of what can be used at all, as in df(1)."""
        return 1 - self.free_bytes / self.total_bytes if self.total_bytes else 0.0

    @property
    def inodes_used(self) -> float:
        return 1 - self.free_inodes / self.total_inodes if self.total_inodes else 0.0


def check_filesystems(look: Look) -> Outcome:
    """Look at the filesystem of each configured path that exists. Raises OSError."""
    usages = measure(look.settings.paths, mounts.listed(look.places.proc))
    return Outcome(tuple(filesystem_rule(usages, look.settings)), tuple(filesystem_samples(usages)))


def containing(path: str, among: Sequence[Mount]) -> Mount | None:
    """Return the mount that contains a path: the one with the longest target above it, the last if several match."""
    deepest: Mount | None = None
    for mount in among:
        below = path == mount.target or path.startswith(mount.target.rstrip("/") + "/")
        if below and (deepest is None or len(mount.target) >= len(deepest.target)):
            deepest = mount
    return deepest


def measure(paths: Iterable[str], among: Sequence[Mount]) -> list[Usage]:
    """Measure each filesystem once, under the first path on it; skip remote ones and missing paths."""
    usages: dict[str, Usage] = {}
    for path in paths:
        mount = containing(os.path.realpath(path), among)
        if mount is None or mount.filesystem in _REMOTE or mount.device in usages or not os.path.exists(path):
            continue
        state = os.statvfs(path)
        # Blocks that are reserved for root count as neither used nor free, as in df(1).
        total = (state.f_blocks - state.f_bfree + state.f_bavail) * state.f_frsize
        usages[mount.device] = Usage(
            path, mount, total, state.f_bavail * state.f_frsize, state.f_files, state.f_favail
        )
    return list(usages.values())


def filesystem_rule(usages: Iterable[Usage], settings: Settings) -> list[Finding]:
    """Return what is wrong with filesystems."""
    findings = []
    for usage in usages:
        path, mount = usage.path, usage.mounted
        if mount.read_only and mount.filesystem not in _READ_ONLY:
            detail = f"{path}: {mount.filesystem} on {mount.target} is read-only"
            findings.append(Finding("filesystem.read-only", path, "fail", detail, action="replace"))
        parts = {
            "filesystem.full": (usage.used, "full"),
            "filesystem.inodes": (usage.inodes_used, "out of inodes"),
        }
        for code, (used, state) in parts.items():
            if severity := _severity(used, settings, mount.target):
                findings.append(Finding(code, path, severity, f"{path} is {used:.0%} {state}", patient=True))
    return findings


def _severity(used: float, settings: Settings, target: str) -> Severity | None:
    # Without room in / nothing works. Any other filesystem is there for jobs to fill, and the kubelet makes room.
    if used * 100 >= settings.full_fail_percent and target == "/":
        return "fail"
    return "warn" if used * 100 >= settings.full_warn_percent else None


def filesystem_samples(usages: Iterable[Usage]) -> list[Sample]:
    """Return the metrics of filesystems."""
    samples = []
    for usage in usages:
        labels: Mapping[str, str] = {"path": usage.path, "fstype": usage.mounted.filesystem}
        samples += [
            Sample("filesystem_used_ratio", round(usage.used, 4), labels),
            Sample("filesystem_inodes_used_ratio", round(usage.inodes_used, 4), labels),
            Sample("filesystem_readonly", float(usage.mounted.read_only), labels),
        ]
    return samples


def disks_below(devices: Iterable[str], sys: Path) -> frozenset[str]:
    """Return the names of devices (major:minor), of those they are built on, and of the disks they are part of."""
    names: set[str] = set()
    todo = [sys / "dev/block" / device for device in devices]
    while todo:
        entry = todo.pop().resolve()
        if not entry.is_dir() or entry.name in names:
            continue
        names.add(entry.name)
        todo += (entry / "slaves").glob("*")
        if (entry / "partition").exists():
            todo.append(entry.parent)
    return frozenset(names)


@dataclass(frozen=True)
class Array:
    """An md array: ``degraded`` is how many members it lacks, ``state`` is as the kernel names it."""

    name: str
    state: str
    degraded: int


def check_arrays(look: Look) -> Outcome:
    """Look at every array."""
    arrays = read_arrays(look.places.sys)
    samples = [Sample("md_degraded_devices", array.degraded, {"device": array.name}) for array in arrays]
    return Outcome(tuple(array_rule(arrays)), tuple(samples))


def read_arrays(sys: Path) -> list[Array]:
    """Return the kernel's arrays; one that is being stopped may vanish in between."""
    arrays = []
    for entry in sorted((sys / "block").glob("md*/md")):
        state = text(entry / "array_state")
        # An array that was stopped leaves its name behind for a moment.
        if state and state != "clear":
            arrays.append(Array(entry.parent.name, state, number(entry / "degraded")))
    return arrays


def array_rule(arrays: Iterable[Array]) -> list[Finding]:
    """Return what is wrong with arrays."""
    findings = []
    for array in arrays:
        if array.degraded or array.state in _LOST:
            lacks = f" and lacks {array.degraded} members" if array.degraded else ""
            detail = f"{array.name} is {array.state}{lacks}"
            findings.append(Finding("array.degraded", array.name, "fail", detail, action="replace"))
    return findings


@dataclass(frozen=True)
class Page:
    """The part of a health page that matters here. ``spare`` and ``used`` are percentages; ``used`` can exceed 100."""

    warning: int
    temperature_c: int
    spare: int
    used: int
    media_errors: int


@dataclass(frozen=True)
class Drive:
    """A controller: ``state`` is as the kernel names it, ``page`` is None if the drive has none, as in some VMs."""

    name: str
    state: str
    page: Page | None


def check_drives(look: Look) -> Outcome:
    """Look at every NVMe controller; their pages are read in a process that may hang. Raises NodeError."""
    states = {
        entry.name: text(entry / "state") for entry in sorted((look.places.sys / "class/nvme").glob("nvme*"))
    }
    if not states:
        return Outcome()
    findings: list[Finding] = []
    pages: dict[str, list[int] | None] = {}
    memory = {}
    try:
        pages = apart.run(
            lambda: _read_pages(look.places.dev, states),
            "an NVMe drive",
            _SECONDS,
            hung=look.memory.get("hung"),
            proc=look.places.proc,
        )
    except apart.HungError as error:
        detail = f"a drive does not answer: process {error.process[0]} waits for it"
        findings.append(Finding("drive.hung", "nvme", "fail", detail, action="reboot"))
        memory = {"hung": list(error.process)}
    drives = [
        Drive(name, state, Page(*values) if (values := pages.get(name)) else None)
        for name, state in states.items()
    ]
    return Outcome((*findings, *drive_rule(drives)), tuple(drive_samples(drives)), memory)


def _read_pages(devices: Path, names: Iterable[str]) -> dict[str, list[int] | None]:
    pages = {name: read_page(devices / name) for name in names}
    return {name: list(astuple(page)) if page else None for name, page in pages.items()}


def read_page(device: Path) -> Page | None:
    """Return a drive's health page; None if there is no such device or it can't be queried."""
    data = ctypes.create_string_buffer(_LENGTH)
    # The number of dwords, counted from 0, is next to the page's number.
    dwords = (_LENGTH // 4 - 1) << 16 | _HEALTH
    command = struct.pack(
        "=BBHIIIQQIIIIIIIIII", _GET_LOG_PAGE, 0, 0, _EVERY_NAMESPACE, 0, 0, 0, ctypes.addressof(data), 0, _LENGTH,
        dwords, 0, 0, 0, 0, 0, _TIMEOUT_MS, 0,
    )  # fmt: skip
    try:
        with files.descriptor(device) as fd:
            status = fcntl.ioctl(fd, _NVME_IOCTL_ADMIN_CMD, bytearray(command))
    except OSError:
        return None
    return parse_page(data.raw) if status == 0 else None


def parse_page(data: bytes) -> Page:
    """Return the values of a page; ``data`` are its 512 bytes."""
    warning, kelvin, spare, _threshold, used = struct.unpack_from("<BHBBB", data)
    media_errors = int.from_bytes(data[160:176], "little")
    return Page(warning, kelvin - 273 if kelvin else 0, spare, used, media_errors)


def drive_rule(drives: Iterable[Drive]) -> list[Finding]:
    """Return what is wrong with drives."""
    findings = []
    for drive in drives:
        name, warning = drive.name, drive.page.warning if drive.page else 0
        if drive.state not in ("live", ""):
            detail = f"{name} is {drive.state}"
            findings.append(Finding("drive.state", name, "fail", detail, action="replace", patient=True))
        if warning:
            meanings = [meaning for bit, meaning in WARNINGS.items() if warning >> bit & 1]
            detail = f"{name}: {', '.join(meanings) or f'critical warning {warning:#04x}'}"
            findings.append(
                Finding("drive.nvme", name, "warn", detail, patient=True)
                if warning == _HEAT
                else Finding("drive.nvme", name, "fail", detail, action="replace")
            )
    return findings


def drive_samples(drives: Iterable[Drive]) -> list[Sample]:
    """Return the metrics of drives."""
    samples = []
    for drive in drives:
        labels = {"device": drive.name}
        samples.append(Sample("nvme_live", float(drive.state == "live"), labels))
        if drive.page:
            samples += [
                Sample("nvme_critical_warning", drive.page.warning, labels),
                Sample("nvme_available_spare_ratio", drive.page.spare / 100, labels),
                Sample("nvme_used_ratio", drive.page.used / 100, labels),
                Sample("nvme_temperature_celsius", drive.page.temperature_c, labels),
                Sample("nvme_media_errors_total", drive.page.media_errors, labels),
            ]
    return samples
