"""Disks, observations and decisions as values. Nothing here does anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from image_builder.node import status

Action = Literal["format", "mount", "reuse", "rebuild", "none"]


@dataclass(frozen=True)
class Places(status.Places):
    """And where the kernel and the system keep things; tests have trees of their own.

    ``absence`` and ``reboot`` are the agent's notes on the OS disk. ``cloud`` is what cloud-init's first stage was
    told by the metadata service in this boot; units start after it.
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
    """A whole disk. ``name`` is the kernel's and good for messages alone: it changes from boot to boot.

    ``found_by`` says what made it a candidate, ``order`` sorts candidates. ``local``: the platform says that its
    content doesn't outlive the machine's allocation. ``system``: the running system is on it. ``wwid`` is the device's
    own name, the same by every path to it. ``sequence`` is the kernel's number of this appearance of the disk: the
    next disk of the same name has another one.
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
    """A disk as the marker names it: what stays the same when names change."""

    serial: str
    model: str
    bytes: int


@dataclass(frozen=True)
class Marker:
    """``.node/disk.json`` on the disk: written last, so where it is the filesystem was made to its end."""

    uuid: str
    image: str
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Signature:
    """Something that ``wipefs`` or ``blkid`` knows: ``type`` is its word, such as ``xfs`` or ``crypto_LUKS``."""

    type: str
    uuid: str = ""
    label: str = ""


@dataclass(frozen=True)
class Volume:
    """A filesystem with our label and an UUID of ours, on a disk or an array.

    ``state``: ``marked``; ``empty``: no marker and no files, so it was made and nothing more; ``unmarked``: files,
    but no marker; ``damaged``: the kernel can't mount it; ``newer``: nor can it, but its superblock is whole.
    ``mounted`` says where it is mounted already.
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
    """What was seen of one disk.

    ``mounts`` are the places where it, a part of it or what is made of it is mounted. ``platform``: what the
    NTFS volume of a platform's disk holds. ``erasing``: an erasure of ours was begun, ``making``: a filesystem of
    ours. ``error``: it can't be read.
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
    """An array of ours of which every member is here; ``device`` is its kernel name where it is assembled.

    ``foreign`` names what is on it that isn't ours. ``error``: it can't be assembled or read.
    """

    uuid: str
    device: str = ""
    volume: Volume | None = None
    foreign: str = ""
    error: str = ""


@dataclass(frozen=True)
class Survey:
    """All candidates, and by UUID the arrays of ours that are complete."""

    observations: tuple[Observation, ...] = ()
    arrays: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """``row`` is the line of the table, ``code`` is empty where the disk will be used. ``disks`` are its members."""

    row: str
    action: Action
    code: str
    reason: str
    disks: tuple[Disk, ...] = ()
    volume: Volume | None = None
