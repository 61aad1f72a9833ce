"""Several disks as one: RAID0 by mdadm, and missing members.

The kernel itself is asked for an array's name, so udev's links aren't needed. Whether an earlier boot missed the same
members is recorded in a note on the OS disk, since the missing disk can't hold it. The note decides nothing else: if it
is lost, the node keeps its taint for one more boot.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from image_builder.node import child, files, status
from image_builder.node.disk import layout
from image_builder.node.disk.model import Disk, Places, Survey
from image_builder.node.errors import NodeError

# Ignore mdadm.conf, which is for others: it keeps them from assembling anything.
_OPTIONS = ("--config=none", "--run")


def assemble(uuid: str, disks: Sequence[Disk], places: Places) -> str:
    """Assemble an array unless it already is; return its kernel name. Raises NodeError."""
    if not holder(disks, places):
        argv = ("mdadm", "--assemble", _name(places), f"--uuid={_uuid(uuid)}", *_OPTIONS, *_paths(disks))
        child.run(argv)
    return _device(disks, places)


def create(uuid: str, label: str, disks: Sequence[Disk], places: Places) -> Path:
    """Make a RAID0 of blank disks of any sizes, zero its ends, and return its device. Raises NodeError, OSError."""
    child.run(
        [
            *("mdadm", "--create", _name(places), *_OPTIONS, "--quiet"),
            *("--level=0", f"--raid-devices={len(disks)}", "--metadata=1.2", "--chunk=512K"),
            # If the sizes differ, kernels since 5.4 require one of two layouts to be chosen.
            "--layout=alternate",
            *("--homehost=any", f"--name={label}", f"--uuid={_uuid(uuid)}"),
            *_paths(disks),
        ]
    )
    path = places.dev / _device(disks, places)
    # An earlier array of ours may have begun at the same offset: mkfs would refuse to overwrite its filesystem.
    with files.descriptor(path, os.O_RDWR | os.O_EXCL) as fd:
        size = os.lseek(fd, 0, os.SEEK_END)
        os.pwrite(fd, bytes(min(layout.HEAD, size)), 0)
        os.pwrite(fd, bytes(layout.MIB), max(0, size - layout.MIB))
        os.fsync(fd)
    return path


def stop(device: str, places: Places) -> None:
    """Stop an array; its members stay as they are. Raises ProgramError."""
    child.run(["mdadm", "--stop", os.fspath(places.dev / device)])


def holder(disks: Sequence[Disk], places: Places) -> str:
    """Return the kernel name of a device built on all of these disks; empty if there is none."""
    holders = [
        {path.name for path in (places.sys / "block" / disk.name / "holders").glob("*")} for disk in disks
    ]
    common = set.intersection(*holders)
    return min(common) if common else ""


def _device(disks: Sequence[Disk], places: Places) -> str:
    name = holder(disks, places)
    if not name:
        raise NodeError("disk.array", f"mdadm made no array of {', '.join(disk.name for disk in disks)}")
    return name


def _name(places: Places) -> str:
    return os.fspath(places.dev / "md/node-local")


def _paths(disks: Sequence[Disk]) -> list[str]:
    return [os.fspath(disk.path) for disk in disks]


def _uuid(uuid: str) -> str:
    """Return a UUID in mdadm's notation."""
    digits = uuid.replace("-", "")
    return ":".join(digits[at : at + 8] for at in range(0, 32, 8))


# -- missing members -------------------------------------------------------------------------------------------


def identities(survey: Survey) -> list[list[str | int]]:
    """Return the identities of the disks that are present."""
    usable = [observation for observation in survey.observations if not observation.disk.system]
    return sorted(
        [
            observation.disk.serial or observation.disk.wwid,
            observation.raid.uuid if observation.raid else "",
            observation.raid.role if observation.raid else -1,
        ]
        for observation in usable
    )


def is_absence_old(survey: Survey, boot_id: str, note: Path, reboot: Path | None) -> bool:
    """Return whether an earlier boot saw the same disks and was not ended by the node itself; otherwise note them.

    ``reboot`` is the record of the boot that the node ended, None if that counts as well. Raises OSError.
    """
    now = identities(survey)
    try:
        before = json.loads(note.read_bytes())
        boot = before["boot_id"] if before["members"] == now else ""
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        boot = ""
    if boot not in ("", boot_id) and not (reboot and status.is_reboot_own(boot, reboot)):
        return True
    note.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    files.write_json(note, {"members": now, "boot_id": boot_id})
    return False
