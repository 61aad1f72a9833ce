"""The contents of the candidates. Only reads, and mounts nothing foreign.

Mounting replays the journal, even read-only: so a filesystem is mounted for inspection only if its label and UUID say
that this program made it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from image_builder.node import child, files, mounts, sysfs
from image_builder.node.disk import arrays, azure, layout
from image_builder.node.disk.decide import is_member
from image_builder.node.disk.model import (
    Array,
    Disk,
    Marker,
    Member,
    Observation,
    Places,
    Signature,
    Survey,
    Volume,
)
from image_builder.node.disk.settings import LABEL_BYTES, Settings
from image_builder.node.errors import ABSENT, NodeError, ProgramError

MARKER = ".node/disk.json"
# Errors of mount(2) for a filesystem that exists but is broken; EIO and ENODATA (a medium error) are the disk's.
_BROKEN = frozenset({errno.EINVAL, errno.EUCLEAN, errno.EBADMSG, errno.EFBIG, errno.EFAULT})


def observe_all(disks: Sequence[Disk], settings: Settings, places: Places) -> Survey:
    """Return what is on every candidate, and our complete arrays; this assembles them."""
    observations = observe_disks(disks, settings, places)
    return Survey(tuple(observations), _arrays(observations, settings, places))


def observe_disks(disks: Sequence[Disk], settings: Settings, places: Places) -> list[Observation]:
    """Return what is on every candidate by itself."""
    mounted = mounts.listed(places.proc)
    return [
        _with_content(observation, settings, places, mounted)
        for observation in observe(disks, places, mounted)
    ]


def observe(disks: Sequence[Disk], places: Places, mounted: Sequence[mounts.Mount]) -> list[Observation]:
    """Return what can be observed of disks without mounting them."""
    observations = [_first_look(disk, places, mounted) for disk in disks]
    readable = [
        observation.disk.path
        for observation in observations
        if not observation.error and not observation.disk.system
    ]
    try:
        signed = signatures(readable)
    except ProgramError as error:
        if error.code == ABSENT:
            raise
        return [
            replace(observation, error=observation.error or error.message) for observation in observations
        ]
    return [
        replace(observation, signatures=signed.get(os.fspath(observation.disk.path), ()))
        for observation in observations
    ]


def _first_look(disk: Disk, places: Places, mounted: Sequence[mounts.Mount]) -> Observation:
    entry = places.sys / "block" / disk.name
    partitions = tuple(sorted(path.parent.name for path in entry.glob("*/partition")))
    above = _above(entry)
    numbers = {sysfs.text(path / "dev") for path in (entry, *above)}
    observation = Observation(
        disk,
        partitions=partitions,
        holders=tuple(sorted({path.name for path in above} - set(partitions))),
        mounts=tuple(sorted({mount.target for mount in mounted if mount.device in numbers})),
        swap=bool(_swaps(places) & {disk.name, *(path.name for path in above)}),
    )
    if disk.system:
        return observation
    try:
        head, tail = read_ends(disk)
    except OSError as error:
        return replace(observation, error=f"{error.strerror} while its first and last MiB were read")
    ends_zero = head == bytes(len(head)) and tail == bytes(len(tail))
    erasing, making = layout.is_erasing(head), layout.is_making(tail)
    return replace(observation, ends_zero=ends_zero, erasing=erasing, making=making, raid=layout.raid(head))


def _above(entry: Path) -> list[Path]:
    """Return the partitions of a disk, and all devices built on it and on them."""
    devices = [path.parent for path in entry.glob("*/partition")]
    holders = [path for where in (entry, *devices) for path in (where / "holders").glob("*")]
    for holder in holders:
        devices += [holder, *_above(holder.resolve())]
    return devices


def _swaps(places: Places) -> set[str]:
    lines = sysfs.text(places.proc / "swaps").splitlines()[1:]
    return {os.path.basename(os.path.realpath(line.split()[0])) for line in lines if line.split()}


def read_ends(disk: Disk) -> tuple[bytes, bytes]:
    """Return the first and the last MiB of a disk. Raises OSError, also if there is less to read."""
    with files.descriptor(disk.path) as fd:
        # The page cache may still hold another disk's data.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return _read(fd, 0, layout.MIB), _read(fd, max(0, disk.bytes - layout.MIB), layout.MIB)


def _read(fd: int, offset: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = os.pread(fd, size - len(data), offset + len(data))
        if not more:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        data += more
    return data


def signatures(paths: Sequence[Path]) -> dict[str, tuple[Signature, ...]]:
    """Return the signatures on devices by their paths. Raises ProgramError.

    wipefs lists them all; devices on which it finds nothing are also checked with blkid.
    """
    if not paths:
        return {}
    names = [os.fspath(path) for path in paths]
    output = child.run(["wipefs", "--no-act", "--json", *names]).stdout
    by_device: dict[str, list[Signature]] = {name: [] for name in names}
    # wipefs reports the device by its name in /dev, whatever path it was given.
    by_name = {os.path.basename(name): name for name in names}
    for item in json.loads(output)["signatures"] if output.strip() else []:
        signature = Signature(str(item["type"]), item.get("uuid") or "", item.get("label") or "")
        by_device[by_name[os.path.basename(item["device"])]].append(signature)
    empty = [name for name in names if not by_device[name]]
    if empty:
        done = child.run(["blkid", "--probe", "--output", "export", *empty], ok=(0, 2))
        for name, values in _blocks(done.stdout):
            kind = values.get("TYPE") or values.get("PTTYPE") or "unknown"
            by_device[name].append(Signature(kind, values.get("UUID", ""), values.get("LABEL", "")))
    return {name: tuple(items) for name, items in by_device.items()}


def _blocks(output: str) -> Iterator[tuple[str, dict[str, str]]]:
    for block in output.split("\n\n"):
        values = dict(line.partition("=")[::2] for line in block.strip().splitlines())
        if "DEVNAME" in values:
            yield values.pop("DEVNAME"), values


def _with_content(
    observation: Observation, settings: Settings, places: Places, mounted: Sequence[mounts.Mount]
) -> Observation:
    """Return an observation with the content of a disk that is ours, or may be blank as the platform delivers it."""
    if observation.error or observation.disk.system or observation.swap:
        return observation
    try:
        if (
            is_our_filesystem(observation.signatures, settings)
            and not observation.partitions
            and not observation.holders
        ):
            return replace(
                observation, volume=_volume(observation.disk.path, observation.signatures[0], places, mounted)
            )
        if azure.may_be(observation):
            return replace(observation, platform=_platform(observation))
    except OSError as error:
        return replace(observation, error=f"{error.strerror}")
    return observation


def is_our_filesystem(signatures: Sequence[Signature], settings: Settings) -> bool:
    """Return whether a device contains only a filesystem with our label and one of our UUIDs."""
    return (
        len(signatures) == 1
        and signatures[0].type in LABEL_BYTES
        and signatures[0].label == settings.label
        and layout.is_ours(signatures[0].uuid)
    )


def _volume(path: Path, signature: Signature, places: Places, mounted: Sequence[mounts.Mount]) -> Volume:
    """Return a filesystem of ours with its state and marker. Raises OSError if the disk fails."""
    number = _number(path)
    volume = Volume(path, signature.type, layout.normal(signature.uuid), "damaged")
    for mount in mounted:
        if mount.device == number and mount.root == "/":
            return replace(_marked(volume, Path(mount.target)), mounted=mount.target)
    try:
        with mounts.read_only(path, signature.type, places.run / "look") as root:
            return _marked(volume, root)
    except OSError as error:
        if error.errno not in _BROKEN:
            raise
        # The kernel returns EINVAL both for newer features and for a broken filesystem.
        is_newer = error.errno == errno.EINVAL and layout.is_superblock_whole(signature.type, _head(path))
        return replace(volume, state="newer" if is_newer else "damaged", reason=error.strerror or "")


def _marked(volume: Volume, root: Path) -> Volume:
    try:
        marker = read_marker((root / MARKER).read_bytes())
    except FileNotFoundError:
        marker = None
    if marker and marker.uuid == volume.uuid:
        return replace(volume, state="marked", marker=marker)
    # The agent's own directory without a marker is what a power cut left behind: only other files make it unmarked.
    names = set(os.listdir(root)) - {"lost+found", ".node"}
    return replace(volume, state="unmarked" if names or marker else "empty")


def read_marker(data: bytes) -> Marker | None:
    """Return the marker in a file's contents; None if it isn't a marker."""
    try:
        document: dict[str, Any] = json.loads(data)
        members = tuple(
            Member(str(item["serial"]), str(item["model"]), int(item["bytes"]))
            for item in document["members"]
        )
        return Marker(str(document["uuid"]), str(document["image"]), members)
    except (ValueError, KeyError, TypeError):
        return None


def _platform(observation: Observation) -> azure.Content:
    with files.descriptor(observation.disk.path) as fd:
        return azure.content(lambda offset, count: _read(fd, offset, count), observation)


def _head(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(layout.PAGE)


def _arrays(observations: Iterable[Observation], settings: Settings, places: Places) -> dict[str, Array]:
    """Assemble and return our complete arrays."""
    groups: dict[str, dict[int, Observation]] = {}
    sizes: dict[str, int] = {}
    for observation in observations:
        if (
            observation.raid
            and not observation.error
            and not observation.disk.system
            and is_member(settings, observation)
        ):
            groups.setdefault(observation.raid.uuid, {})[observation.raid.role] = observation
            sizes[observation.raid.uuid] = observation.raid.devices
    return {
        uuid: _array(uuid, list(members.values()), settings, places)
        for uuid, members in groups.items()
        if set(members) == set(range(sizes[uuid]))
    }


def _array(uuid: str, members: Sequence[Observation], settings: Settings, places: Places) -> Array:
    try:
        device = arrays.assemble(uuid, [member.disk for member in members], places)
        path = places.dev / device
        contents = signatures([path])[os.fspath(path)]
        if is_our_filesystem(contents, settings):
            return Array(uuid, device, _volume(path, contents[0], places, mounts.listed(places.proc)))
        return Array(uuid, device, foreign=" and ".join(sorted({word.type for word in contents})))
    except NodeError as error:
        if error.code == ABSENT:
            raise
        return Array(uuid, error=error.message)
    except OSError as error:
        return Array(uuid, error=str(error))


def _number(path: Path) -> str:
    number = os.stat(path).st_rdev
    return f"{os.major(number)}:{os.minor(number)}"
