"""What is to be done with the disks that were seen: a table, and no I/O.

Two things are proven before a byte is written: the disk is one that the selector means, and it is blank or ours.

* *Blank*: no signature by ``wipefs`` and ``blkid``, no partition table, no partitions, nothing made of it, not
  mounted, no swap, its first and last MiB zero. What lies in the middle of a disk without any of these is not
  looked for: nothing can name it.
* *Ours*: a filesystem with our label and an UUID of our namespace (``layout.new_uuid``) and, before it is used
  as it is, our marker with the same UUID and the same members. An array is ours by the UUID in the superblock of
  each member. So is a disk without any signature whose last MiB says that we were making a filesystem.
* Anything else is foreign, and so is what can't be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from image_builder.node.disk import layout
from image_builder.node.disk.model import (
    Action,
    Array,
    Decision,
    Disk,
    Observation,
    Seen,
    Volume,
)
from image_builder.node.disk.settings import Settings


@dataclass(frozen=True)
class Row:
    """A line of the table. ``code`` is empty where the disk is used."""

    when: str
    action: Action
    code: str = ""


# In the order in which they are looked at; the first that fits counts.
TABLE: Mapping[str, Row] = {
    "none": Row("no disk matches the selector", "none", "disk.none"),
    "system": Row("only disks match that the system runs from", "none", "disk.system"),
    "ambiguous": Row("more disks match than are expected", "none", "disk.ambiguous"),
    "missing": Row("fewer disks match than are expected", "none", "disk.missing"),
    "error": Row("a disk can't be read", "none", "disk.error"),
    "busy": Row("a disk is in use: mounted elsewhere, swap, or something is made of it", "none", "disk.busy"),
    "foreign": Row("foreign data, and none of the disks is ours", "none", "disk.foreign"),
    "mixed": Row("foreign data on a disk beside ours", "none", "disk.mixed"),
    "blank": Row("all blank", "format"),
    "platform": Row("blank, or the platform's NTFS with nothing but its data-loss readme", "format"),
    "wipe": Row(
        "blank, or foreign data of a kind that may be wiped, on a local and ephemeral disk", "format"
    ),
    "unfinished": Row("ours, made or erased only in part: no marker, no files", "format"),
    "current": Row("ours, made by this image, with these members", "mount"),
    "reuse": Row("ours, made by another image, with these members", "reuse"),
    "members": Row("ours, but members are missing, added or resized", "rebuild"),
    "damaged": Row("ours, but the filesystem can't be mounted", "rebuild"),
    "filesystem": Row("ours, but another kind of filesystem than the settings say", "rebuild"),
}

# What a disk can be. ``member``: of an array of ours. ``yielding``: foreign, but may be wiped.
_OURS = ("ours", "member", "unfinished")


@dataclass(frozen=True)
class Nature:
    """What a disk is: ``kind``, and of a foreign one its content in the words of ``wipefs``."""

    kind: str
    content: str = ""


def nature(settings: Settings, seen: Observation, arrays: Mapping[str, Array]) -> Nature:
    """Return what one disk is."""
    if seen.error:
        return Nature("error", seen.error)
    use = _use(settings, seen, arrays)
    if use:
        return Nature("busy", use)
    if seen.erasing:
        return Nature("unfinished")
    if seen.volume:
        return _nature_of_volume(seen.volume)
    if is_member(settings, seen):
        return Nature("member")
    if seen.platform == "blank":
        return Nature("platform")
    if not seen.signatures and not seen.partitions and (seen.ends_zero or seen.making):
        return Nature("blank" if seen.ends_zero else "unfinished")
    content = _content(seen)
    kinds = {word.type for word in seen.signatures} or {content}
    # PMBR is half of a GPT; whoever lets that go means both.
    if seen.disk.local and kinds - {"PMBR"} <= set(settings.wipe) and seen.platform != "unreadable":
        return Nature("yielding", content)
    return Nature("foreign", content)


def _nature_of_volume(volume: Volume) -> Nature:
    if volume.state == "empty":
        return Nature("unfinished")
    if volume.state == "unmarked":
        return Nature("foreign", f"{volume.filesystem} with our label and files, but without our marker")
    return Nature("ours")


def is_member(settings: Settings, seen: Observation) -> bool:
    """Tell whether a disk belongs to an array of ours: nothing but its superblock is on it."""
    raid = seen.raid
    return (
        raid is not None
        and {word.type for word in seen.signatures} == {"linux_raid_member"}
        and not seen.partitions
        and raid.level == 0
        and raid.name == settings.label
        and layout.is_ours(raid.uuid)
    )


def _use(settings: Settings, seen: Observation, arrays: Mapping[str, Array]) -> str:
    """Return who uses a disk, nobody where that is us: our filesystem at its place, our array."""
    if seen.swap:
        return "it is swap"
    array = arrays.get(seen.raid.uuid) if seen.raid else None
    volume = seen.volume or (array.volume if array else None)
    if seen.mounts and not (volume and volume.mounted == settings.mount_point):
        return f"it is mounted at {', '.join(seen.mounts)}"
    others = [name for name in seen.holders if not (array and name == array.device)]
    return f"{', '.join(others)} is made of it" if others else ""


def _content(seen: Observation) -> str:
    types = sorted({word.type for word in seen.signatures})
    said = " and ".join(types) or ("data without any signature" if not seen.partitions else "partitions")
    if seen.partitions:
        said += f" with {len(seen.partitions)} partition{'s' * (len(seen.partitions) > 1)}"
    if seen.platform == "files":
        return f"{said}, with more or less than the platform's readme"
    if seen.platform == "unreadable":
        return f"{said}, which this kernel can't read"
    return said


def decide(settings: Settings, build: str, seen: Seen) -> Decision:
    """Return what is to be done. ``build`` is the id of the image that the node was booted from."""
    usable = [one for one in seen.observations if not one.disk.system]
    names = _names([one.disk for one in usable])
    if not seen.observations:
        return _made("none", f"no disk matches the selector ({settings.selector.kind})")
    if not usable:
        system = _names([one.disk for one in seen.observations])
        return _made("system", f"the system runs from what matches: {system}")
    if settings.expected_disks and len(usable) != settings.expected_disks:
        row = "ambiguous" if len(usable) > settings.expected_disks else "missing"
        return _made(row, f"{settings.expected_disks} expected, {len(usable)} found: {names}")
    natures = [(one.disk, nature(settings, one, seen.arrays)) for one in usable]
    refused = _refused(natures) or _broken(seen.arrays)
    if refused:
        return refused
    members = tuple(one.disk for one in usable)
    row, reason, volume = _accepted(
        settings, build, usable, [found.kind for _, found in natures], seen.arrays
    )
    mounted = [one.disk for one in usable if one.mounts]
    if mounted and volume is None:
        return _made("busy", f"{_names(mounted)}: mounted, and would have to be made anew: {reason}")
    return _made(row, reason, members, volume)


def _refused(natures: Sequence[tuple[Disk, Nature]]) -> Decision | None:
    """Return the decision that nothing is touched, with every disk that is the reason."""
    for kind in ("error", "busy", "foreign"):
        bad = [f"{disk}: {found.content}" for disk, found in natures if found.kind == kind]
        if bad:
            ours = any(found.kind in _OURS for _, found in natures)
            return _made("mixed" if kind == "foreign" and ours else kind, "; ".join(bad))
    return None


def _broken(arrays: Mapping[str, Array]) -> Decision | None:
    """Return the decision that nothing is touched because of what is on an array."""
    for array in arrays.values():
        if array.error:
            return _made("error", f"array {array.uuid}: {array.error}")
        volume = array.volume
        found = _nature_of_volume(volume).content if volume else array.foreign
        if found:
            return _made("foreign", f"array {array.uuid}: {found}")
    return None


def _accepted(
    settings: Settings,
    build: str,
    usable: Sequence[Observation],
    kinds: Sequence[str],
    arrays: Mapping[str, Array],
) -> tuple[str, str, Volume | None]:
    """Return row, reason and the volume that stays, of disks that are all blank or ours."""
    if not set(kinds) & set(_OURS):
        return _first_use(kinds)
    is_whole, volume = _whole_volume(usable, kinds, arrays)
    if volume is None:
        begun = set(kinds) <= {"unfinished", "blank", "platform", "yielding"}
        row = "unfinished" if begun or is_whole else "members"
        return row, TABLE[row].when, None
    if volume.state == "empty":
        return "unfinished", TABLE["unfinished"].when, None
    if volume.state == "damaged" or volume.marker is None:
        return "damaged", f"{volume.path}: {volume.reason or TABLE['damaged'].when}", None
    if volume.filesystem != settings.filesystem:
        return "filesystem", f"it has {volume.filesystem}, {settings.filesystem} is wanted", None
    if sorted(volume.marker.members) != sorted(one.disk.member for one in usable):
        return "members", TABLE["members"].when, None
    if volume.marker.image != build:
        return "reuse", f"made by image {volume.marker.image or 'without an id'}", volume
    return "current", TABLE["current"].when, volume


def _first_use(kinds: Sequence[str]) -> tuple[str, str, Volume | None]:
    row = "wipe" if "yielding" in kinds else "platform" if "platform" in kinds else "blank"
    return row, TABLE[row].when, None


def _whole_volume(
    usable: Sequence[Observation], kinds: Sequence[str], arrays: Mapping[str, Array]
) -> tuple[bool, Volume | None]:
    """Tell whether all the disks are for one filesystem, and return it where it was made already."""
    if len(usable) == 1 and kinds[0] != "member":
        return True, usable[0].volume
    uuids = {
        one.raid.uuid if one.raid and kind == "member" else ""
        for one, kind in zip(usable, kinds, strict=True)
    }
    array = arrays.get(uuids.pop()) if len(uuids) == 1 else None
    raid = usable[0].raid
    if not (array and raid and raid.devices == len(usable)):
        return False, None
    return True, array.volume


def _names(disks: Sequence[Disk]) -> str:
    return ", ".join(str(disk) for disk in disks)


def _made(row: str, reason: str, disks: tuple[Disk, ...] = (), volume: Volume | None = None) -> Decision:
    found = TABLE[row]
    return Decision(row, found.action, found.code, reason, disks, volume)
