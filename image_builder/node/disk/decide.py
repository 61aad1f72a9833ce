"""What is to be done with the disks that were seen: a table, and no I/O.

Two things are proven before a byte is written: the disk is one that the selector means, and it is blank or ours.

* *Blank*: no signature by ``wipefs`` and ``blkid``, no partition table, no partitions, nothing made of it, not
  mounted, no swap, its first and last MiB zero. What lies in the middle of a disk without any of these is not
  looked for: nothing can name it.
* *Ours*: a filesystem with our label and an UUID of our namespace (``layout.new_uuid``) and, before it is used
  as it is, our marker with the same UUID. An array is ours by the UUID in the superblock of each member, and whole
  with all its roles. So is a disk without any signature whose last MiB says that we were making a filesystem.
* Anything else is foreign, and so is what can't be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from image_builder.node.disk import layout
from image_builder.node.disk.model import Action, Array, Decision, Disk, Marker, Observation, Seen, Volume
from image_builder.node.disk.settings import Settings


@dataclass(frozen=True)
class Row:
    """A line of the table. ``code`` is empty where all is as it should be."""

    when: str
    action: Action
    code: str = ""


# In the order in which they are looked at; the first that fits counts.
TABLE: Mapping[str, Row] = {
    "none": Row("no disk matches the selector", "none", "disk.none"),
    "system": Row("only disks match that the system runs from", "none", "disk.system"),
    "ambiguous": Row("more disks match than are expected", "none", "disk.ambiguous"),
    "missing": Row("fewer disks match than are expected", "none", "disk.missing"),
    "paths": Row("two names of one disk", "none", "disk.paths"),
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
    "incomplete": Row("ours, but members of the array are missing", "none", "disk.incomplete"),
    "several": Row("ours, but of several filesystems, at least one of them whole", "none", "disk.several"),
    "members": Row(
        "one of these two, and the settings say `rebuild`; or an earlier boot found no more members",
        "rebuild",
    ),
    "newer": Row("ours, but newer than this kernel can mount", "none", "disk.newer"),
    "damaged": Row("ours, but the filesystem can't be mounted", "rebuild"),
    "filesystem": Row("ours, but another kind of filesystem than the settings say", "rebuild"),
    "more": Row("ours and whole, beside blank disks", "reuse", "disk.more"),
    "current": Row("ours, made by this image", "mount"),
    "reuse": Row("ours, made by another image", "reuse"),
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
        return f"{said}, which can't be read"
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
    same = _same_disk([one.disk for one in usable])
    if same:
        return _made("paths", same)
    natures = [(one.disk, nature(settings, one, seen.arrays)) for one in usable]
    refused = _refused(natures) or _broken(seen.arrays)
    if refused:
        return refused
    row, reason, volume, members = _accepted(settings, build, usable, natures, seen.arrays)
    mounted = [one.disk for one in usable if one.mounts]
    if TABLE[row].action == "none":
        return _made(row, reason)
    if mounted and volume is None:
        return _made("busy", f"{_names(mounted)}: mounted, and would have to be made anew: {reason}")
    return _made(row, reason, tuple(one.disk for one in members), volume)


def _same_disk(disks: Sequence[Disk]) -> str:
    """Return what two disks have in common that no two disks have; empty where all are different."""
    for number, one in enumerate(disks):
        for other in disks[:number]:
            if one.wwid and other.wwid:
                if one.wwid == other.wwid:
                    return f"{_names((other, one))}: both have the WWID {one.wwid}"
            elif one.serial and (one.model, one.serial) == (other.model, other.serial):
                return f"{_names((other, one))}: the same model and serial"
    return ""


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


@dataclass(frozen=True)
class _Group:
    """Disks that belong together: one with a filesystem of ours, or those of an array. ``lacks``: what is not there."""

    members: tuple[Observation, ...]
    volume: Volume | None = None
    lacks: str = ""


Accepted = tuple[str, str, Volume | None, Sequence[Observation]]


def _accepted(
    settings: Settings,
    build: str,
    usable: Sequence[Observation],
    natures: Sequence[tuple[Disk, Nature]],
    arrays: Mapping[str, Array],
) -> Accepted:
    """Return row, reason, the volume that stays and its disks, of disks that are all blank or ours."""
    kinds = [found.kind for _, found in natures]
    if not set(kinds) & set(_OURS):
        row = "wipe" if "yielding" in kinds else "platform" if "platform" in kinds else "blank"
        return row, TABLE[row].when, None, usable
    groups = _groups(usable, kinds, arrays)
    lacking = [group.lacks for group in groups if group.lacks]
    # What we were at when the power went held nothing any more.
    begun = any(one.erasing or one.making for one in usable) and len(lacking) == len(groups)
    if begun or not groups:
        return "unfinished", TABLE["unfinished"].when, None, usable
    if lacking or len(groups) > 1:
        return _apart(settings, groups, usable)
    (group,) = groups
    if group.volume is None or group.volume.state == "empty":
        return "unfinished", TABLE["unfinished"].when, None, usable
    if group.volume.state == "newer":
        return "newer", f"{group.volume.path}: {group.volume.reason}", None, usable
    if group.volume.state == "damaged" or group.volume.marker is None:
        reason = group.volume.reason or TABLE["damaged"].when
        return "damaged", f"{group.volume.path}: {reason}", None, usable
    if group.volume.filesystem != settings.filesystem:
        reason = f"it has {group.volume.filesystem}, {settings.filesystem} is wanted"
        return "filesystem", reason, None, usable
    others = [one.disk for one in usable if one not in group.members]
    if others and settings.incomplete_array == "rebuild":
        return "members", f"{_names(others)}: not used before", None, usable
    if others:
        return "more", f"{_names(others)}: not used", group.volume, group.members
    row = "current" if group.volume.marker.image == build else "reuse"
    return row, _used_again(row, group.volume.marker, group.members), group.volume, group.members


def _apart(settings: Settings, groups: Sequence[_Group], usable: Sequence[Observation]) -> Accepted:
    """Return row and reason for disks that aren't one filesystem. Only the settings may give up one that is whole."""
    reasons = [
        group.lacks or f"a whole filesystem: {_names([one.disk for one in group.members])}"
        for group in groups
    ]
    row = "incomplete" if all(group.lacks for group in groups) else "several"
    if settings.incomplete_array == "rebuild":
        row = "members"
    return row, "; ".join(reasons), None, usable


def _used_again(row: str, marker: Marker, members: Sequence[Observation]) -> str:
    """Return the reason for a filesystem that is used as it is; disks that look otherwise than before are told of.

    The UUID in superblock and marker is the proof. What a disk is called, and by whom, changes with the host and the
    kernel.
    """
    reason = TABLE[row].when if row == "current" else f"made by image {marker.image or 'without an id'}"
    before, now = sorted(marker.members), sorted(one.disk.member for one in members)
    if before == now:
        return reason
    named = ", ".join(f"{one.model} {one.serial}, {one.bytes} bytes" for one in before)
    return f"{reason}; its disks were called otherwise when it was made: {named}"


def _groups(usable: Sequence[Observation], kinds: Sequence[str], arrays: Mapping[str, Array]) -> list[_Group]:
    """Return what belongs together of disks that are ours; those that are empty belong to nothing."""
    found = [_Group((one,), one.volume) for one, kind in zip(usable, kinds, strict=True) if kind == "ours"]
    members: dict[str, list[Observation]] = {}
    for one, kind in zip(usable, kinds, strict=True):
        if one.raid and kind == "member":
            members.setdefault(one.raid.uuid, []).append(one)
    for uuid, seen in members.items():
        array, raid = arrays.get(uuid), seen[0].raid
        if array and raid and len(seen) == raid.devices:
            found.append(_Group(tuple(seen), array.volume))
        elif raid:
            here = f"{len(seen)} of {raid.devices} members"
            found.append(
                _Group(tuple(seen), lacks=f"array {uuid}: {here}: {_names([one.disk for one in seen])}")
            )
    return found


def _names(disks: Sequence[Disk]) -> str:
    return ", ".join(str(disk) for disk in disks)


def _made(row: str, reason: str, disks: tuple[Disk, ...] = (), volume: Volume | None = None) -> Decision:
    found = TABLE[row]
    return Decision(row, found.action, found.code, reason, disks, volume)
