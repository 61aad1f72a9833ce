"""Disks, observations and decisions as values, without any behavior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from image_builder.node import status

Action = Literal["format", "mount", "reuse", "rebuild", "none"]


@dataclass(frozen=True)
class Places(status.Places):
    """Also paths of the kernel and the system; tests use their own trees.

    ``absence`` and ``reboot`` are the agent's notes on the OS disk. ``cloud`` is the metadata service's answer to
    cloud-init's first stage in this boot; units start after it.
    """

    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    proc: Path = Path("/proc")
    udev_queue: Path = Path("/run/udev/queue")
    absence: Path = Path("/var/lib/node-agent/disk-incomplete.json")
    reboot: Path = status.REBOOT
    cloud: Path = Path("/run/cloud-init/instance-data.json")


@dataclass(frozen=True)
class Disk:
    """A whole disk. ``name`` is the kernel's and fit only for messages: it changes from boot to boot.

    ``found_by`` says what made it a candidate; ``order`` sorts candidates. ``local``: the platform says that its
    content doesn't outlive the machine's allocation. ``system``: the running system is on it. ``wwid`` is the device's
    own name, the same through every path. ``sequence`` is the kernel's number for this appearance of the disk: the
    next disk with the same name has a different number.
    """

    name: str
    path: Path
    bytes: int
    model: str = ""
    serial: str = ""
    transport: str = ""
    rotational: bool = False
    found_by: str = ""
    order: str = ""
    local: bool = False
    system: bool = False
    wwid: str = ""
    sequence: str = ""

    @property
    def member(self) -> Member:
        return Member(self.serial, self.model, self.bytes)

    def __str__(self) -> str:
        description = " ".join(word for word in (self.model, self.serial) if word)
        return f"{self.name} ({description or 'no model'}, {self.bytes} bytes)"


@dataclass(frozen=True, order=True)
class Member:
    """A disk as the marker identifies it: the properties that stay the same when names change."""

    serial: str
    model: str
    bytes: int


@dataclass(frozen=True)
class Marker:
    """``.node/disk.json`` on the disk: written last, so if it exists, the filesystem is complete."""

    uuid: str
    image: str
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Signature:
    """A signature that ``wipefs`` or ``blkid`` found: ``type`` is its name, such as ``xfs`` or ``crypto_LUKS``."""

    type: str
    uuid: str = ""
    label: str = ""


@dataclass(frozen=True)
class Volume:
    """A filesystem with our label and one of our UUIDs, on a disk or an array.

    ``state``: ``marked``; ``empty``: no marker and no files, so it was made but never used; ``unmarked``: files, but no
    marker; ``damaged``: the kernel can't mount it; ``newer``: the kernel can't mount it, but its superblock is intact.
    ``mounted`` says where it is already mounted.
    """

    path: Path
    filesystem: str
    uuid: str
    state: Literal["marked", "empty", "unmarked", "damaged", "newer"]
    marker: Marker | None = None
    mounted: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Raid:
    """A member's superblock. ``role`` counts from 0, ``devices`` is how many the array has."""

    uuid: str
    name: str
    level: int
    devices: int
    role: int


@dataclass(frozen=True)
class Observation:
    """What was observed of one disk.

    ``mounts`` are the mount points of the disk, its partitions and the devices built on them. ``platform``: the content
    of the NTFS volume on a disk that the platform prepared. ``erasing``: we began to erase it; ``making``: we began to
    make a filesystem on it. ``error``: why it can't be read.
    """

    disk: Disk
    signatures: tuple[Signature, ...] = ()
    partitions: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    swap: bool = False
    ends_zero: bool = False
    erasing: bool = False
    making: bool = False
    platform: Literal["", "blank", "files", "unreadable"] = ""
    volume: Volume | None = None
    raid: Raid | None = None
    error: str = ""


@dataclass(frozen=True)
class Array:
    """An array of ours with all of its members present; ``device`` is its kernel name if it is assembled.

    ``foreign`` names foreign content on it. ``error``: why it can't be assembled or read.
    """

    uuid: str
    device: str = ""
    volume: Volume | None = None
    foreign: str = ""
    error: str = ""


@dataclass(frozen=True)
class Survey:
    """All candidates, and our complete arrays by UUID."""

    observations: tuple[Observation, ...] = ()
    arrays: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """``row`` is the key of the table's row; ``code`` is empty if all is as it should be. ``disks`` are the members."""

    row: str
    action: Action
    code: str
    reason: str
    disks: tuple[Disk, ...] = ()
    volume: Volume | None = None
