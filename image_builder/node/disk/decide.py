"""The decision about the disks that were observed: a table, and no I/O.

Two things are proven before a byte is written: the disk matches the selector, and it is blank or ours.

* *Blank*: no signature found by ``wipefs`` or ``blkid``, no partition table, no partitions, no holders, not mounted,
  not swap, and its first and last MiB are zero. Data in the middle of such a disk isn't searched for: nothing could
  identify it.
* *Ours*: a filesystem with our label and a UUID from our namespace (``layout.new_uuid``) and, before it is used
  as it is, our marker with the same UUID. An array is ours by the UUID in the superblock of each member, and complete
  if all of its roles are present. Also ours: a disk without any signature whose last MiB says that we were making a
  filesystem.
* Anything else is foreign, including a disk that can't be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from image_builder.node.disk import layout
from image_builder.node.disk.model import Action, Array, Decision, Disk, Marker, Observation, Survey, Volume
from image_builder.node.disk.settings import Settings


@dataclass(frozen=True)
class Row:
    """A row of the table. ``code`` is empty if all is as it should be."""

    when: str
    action: Action
    code: str = ""


# In the order in which they are checked; the first match counts.
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

# Kinds of disks that are ours; ``member``: of an array of ours. (``yielding`` is foreign, but may be wiped.)
_OURS = ("ours", "member", "unfinished")


@dataclass(frozen=True)
class Nature:
    """What a disk is: its ``kind`` and, for a foreign disk, its content as ``wipefs`` names it."""

    kind: str
    content: str = ""


def nature(settings: Settings, observation: Observation, arrays: Mapping[str, Array]) -> Nature:
    """Return the nature of one disk."""
    if observation.error:
        return Nature("error", observation.error)
    use = _use(settings, observation, arrays)
    if use:
        return Nature("busy", use)
    if observation.erasing:
        return Nature("unfinished")
    if observation.volume:
        return _nature_of_volume(observation.volume)
    if is_member(settings, observation):
        return Nature("member")
    if observation.platform == "blank":
        return Nature("platform")
    if (
        not observation.signatures
        and not observation.partitions
        and (observation.ends_zero or observation.making)
    ):
        return Nature("blank" if observation.ends_zero else "unfinished")
    content = _content(observation)
    kinds = {word.type for word in observation.signatures} or {content}
    # PMBR is half of a GPT: settings that allow wiping the GPT mean both.
    if (
        observation.disk.local
        and kinds - {"PMBR"} <= set(settings.wipe)
        and observation.platform != "unreadable"
    ):
        return Nature("yielding", content)
    return Nature("foreign", content)


def _nature_of_volume(volume: Volume) -> Nature:
    if volume.state == "empty":
        return Nature("unfinished")
    if volume.state == "unmarked":
        return Nature("foreign", f"{volume.filesystem} with our label and files, but without our marker")
    return Nature("ours")


def is_member(settings: Settings, observation: Observation) -> bool:
    """Return whether a disk belongs to an array of ours: its only content is the array's superblock."""
    raid = observation.raid
    return (
        raid is not None
        and {word.type for word in observation.signatures} == {"linux_raid_member"}
        and not observation.partitions
        and raid.level == 0
        and raid.name == settings.label
        and layout.is_ours(raid.uuid)
    )


def _use(settings: Settings, observation: Observation, arrays: Mapping[str, Array]) -> str:
    """Return what is using a disk; empty for our own uses: our filesystem at its mount point, our array."""
    if observation.swap:
        return "it is swap"
    array = arrays.get(observation.raid.uuid) if observation.raid else None
    volume = observation.volume or (array.volume if array else None)
    if observation.mounts and not (volume and volume.mounted == settings.mount_point):
        return f"it is mounted at {', '.join(observation.mounts)}"
    others = [name for name in observation.holders if not (array and name == array.device)]
    return f"{', '.join(others)} is made of it" if others else ""


def _content(observation: Observation) -> str:
    types = sorted({word.type for word in observation.signatures})
    text = " and ".join(types) or (
        "data without any signature" if not observation.partitions else "partitions"
    )
    if observation.partitions:
        text += f" with {len(observation.partitions)} partition{'s' * (len(observation.partitions) > 1)}"
    if observation.platform == "files":
        return f"{text}, with more or less than the platform's readme"
    if observation.platform == "unreadable":
        return f"{text}, which can't be read"
    return text


def decide(settings: Settings, build: str, survey: Survey, of_size: int = 0) -> Decision:
    """Return what to do. ``build`` is the id of the image that the node was booted from.

    ``of_size`` is how many disks this VM size has, 0 if unknown: no filesystem is made of fewer, since the others may
    only be late.
    """
    usable = [observation for observation in survey.observations if not observation.disk.system]
    names = _names([observation.disk for observation in usable])
    if not survey.observations:
        return _made("none", f"no disk matches the selector ({settings.selector.kind})")
    if not usable:
        system = _names([observation.disk for observation in survey.observations])
        return _made("system", f"the system runs from what matches: {system}")
    if settings.expected_disks and len(usable) != settings.expected_disks:
        row = "ambiguous" if len(usable) > settings.expected_disks else "missing"
        return _made(row, f"{settings.expected_disks} expected, {len(usable)} found: {names}")
    same = _same_disk([observation.disk for observation in usable])
    if same:
        return _made("paths", same)
    natures = [(observation.disk, nature(settings, observation, survey.arrays)) for observation in usable]
    refused = _refused(natures) or _broken(survey.arrays)
    if refused:
        return refused
    row, reason, volume, members = _accepted(settings, build, usable, natures, survey.arrays)
    mounted = [observation.disk for observation in usable if observation.mounts]
    if TABLE[row].action == "none":
        return _made(row, reason)
    is_made = TABLE[row].action in ("format", "rebuild")
    if (
        is_made
        and not settings.expected_disks
        and settings.incomplete_array == "keep"
        and len(usable) < of_size
    ):
        return _made("missing", f"this VM size has {of_size}, {len(usable)} found: {names}")
    if mounted and volume is None:
        return _made("busy", f"{_names(mounted)}: mounted, and would have to be reformatted: {reason}")
    return _made(row, reason, tuple(observation.disk for observation in members), volume)


def _same_disk(disks: Sequence[Disk]) -> str:
    """Return which two disks share an identity that must be unique; empty if all are different."""
    for number, disk in enumerate(disks):
        for other in disks[:number]:
            if disk.wwid and other.wwid:
                if disk.wwid == other.wwid:
                    return f"{_names((other, disk))}: both have the WWID {disk.wwid}"
            elif disk.serial and (disk.model, disk.serial) == (other.model, other.serial):
                return f"{_names((other, disk))}: the same model and serial"
    return ""


def _refused(natures: Sequence[tuple[Disk, Nature]]) -> Decision | None:
    """Return the decision to touch nothing, with every disk that is a reason for it; None if there is none."""
    for kind in ("error", "busy", "foreign"):
        bad = [f"{disk}: {nature.content}" for disk, nature in natures if nature.kind == kind]
        if bad:
            ours = any(nature.kind in _OURS for _, nature in natures)
            return _made("mixed" if kind == "foreign" and ours else kind, "; ".join(bad))
    return None


def _broken(arrays: Mapping[str, Array]) -> Decision | None:
    """Return the decision to touch nothing because of an array's error or content; None if there is no reason."""
    for array in arrays.values():
        if array.error:
            return _made("error", f"array {array.uuid}: {array.error}")
        volume = array.volume
        content = _nature_of_volume(volume).content if volume else array.foreign
        if content:
            return _made("foreign", f"array {array.uuid}: {content}")
    return None


@dataclass(frozen=True)
class _Group:
    """Disks that belong together: one with a filesystem of ours, or those of an array. ``lacks``: what is missing."""

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
    """Return the row, the reason, the volume to keep and its disks, for disks that are all blank or ours."""
    kinds = [nature.kind for _, nature in natures]
    if not set(kinds) & set(_OURS):
        row = "wipe" if "yielding" in kinds else "platform" if "platform" in kinds else "blank"
        return row, TABLE[row].when, None, usable
    groups = _groups(usable, kinds, arrays)
    lacking = [group.lacks for group in groups if group.lacks]
    # Disks that we were erasing or formatting when the power failed no longer held any data. The last MiB of a disk
    # with a signature belongs to its content: a file may have our words in it.
    is_begun = any(
        observation.erasing or (observation.making and not observation.signatures) for observation in usable
    )
    begun = is_begun and len(lacking) == len(groups)
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
    others = [observation.disk for observation in usable if observation not in group.members]
    if others and settings.incomplete_array == "rebuild":
        return "members", f"{_names(others)}: not used before", None, usable
    if others:
        return "more", f"{_names(others)}: not used", group.volume, group.members
    row = "current" if group.volume.marker.image == build else "reuse"
    return row, _used_again(row, group.volume.marker, group.members), group.volume, group.members


def _apart(settings: Settings, groups: Sequence[_Group], usable: Sequence[Observation]) -> Accepted:
    """Return the row and reason for disks that aren't one filesystem. Only the settings may sacrifice a whole one."""
    reasons = [
        group.lacks or f"a whole filesystem: {_names([observation.disk for observation in group.members])}"
        for group in groups
    ]
    row = "incomplete" if all(group.lacks for group in groups) else "several"
    if settings.incomplete_array == "rebuild":
        row = "members"
    return row, "; ".join(reasons), None, usable


def _used_again(row: str, marker: Marker, members: Sequence[Observation]) -> str:
    """Return the reason for a filesystem that is used as it is; it mentions disks that look different than before.

    The UUID in the superblock and the marker is the proof. A disk's model and serial may change with the host and the
    kernel.
    """
    reason = TABLE[row].when if row == "current" else f"made by image {marker.image or 'without an id'}"
    before, now = sorted(marker.members), sorted(member.disk.member for member in members)
    if before == now:
        return reason
    named = ", ".join(f"{member.model} {member.serial}, {member.bytes} bytes" for member in before)
    return f"{reason}; its disks were called otherwise when it was made: {named}"


def _groups(usable: Sequence[Observation], kinds: Sequence[str], arrays: Mapping[str, Array]) -> list[_Group]:
    """Return the groups that our disks form; disks without content belong to no group."""
    groups = [
        _Group((observation,), observation.volume)
        for observation, kind in zip(usable, kinds, strict=True)
        if kind == "ours"
    ]
    members: dict[str, list[Observation]] = {}
    for observation, kind in zip(usable, kinds, strict=True):
        if observation.raid and kind == "member":
            members.setdefault(observation.raid.uuid, []).append(observation)
    for uuid, present in members.items():
        array, raid = arrays.get(uuid), present[0].raid
        if array and raid and len(present) == raid.devices:
            groups.append(_Group(tuple(present), array.volume))
        elif raid:
            here = f"{len(present)} of {raid.devices} members"
            groups.append(
                _Group(
                    tuple(present),
                    lacks=f"array {uuid}: {here}: {_names([observation.disk for observation in present])}",
                )
            )
    return groups


def _names(disks: Sequence[Disk]) -> str:
    return ", ".join(str(disk) for disk in disks)


def _made(row: str, reason: str, disks: tuple[Disk, ...] = (), volume: Volume | None = None) -> Decision:
    line = TABLE[row]
    return Decision(row, line.action, line.code, reason, disks, volume)
