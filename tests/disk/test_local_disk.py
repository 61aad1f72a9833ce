"""The agent on real disks: a disk's life from its first boot on, and what can happen in between.

The kernel of a test machine may support neither partitions nor RAID: these are covered by rows of the boot matrix,
which is run by hand. No test sets a cache quota; a unit test checks that quota settings are refused where they can't
be enforced.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import mounts, status
from image_builder.node.disk import layout
from image_builder.node.disk.model import Disk
from image_builder.node.disk.settings import parse
from tests.support.disks.foreign import raid_superblock
from tests.support.disks.loop_devices import LARGE, MIB, SMALL, Desk, is_zero, mounted, run_scenario, write
from tests.support.images.builds import Workplace

pytestmark = pytest.mark.root

_SET_CAPACITY = 0x4C07
FILESYSTEMS = ("xfs", "ext4")


def life(desk: Desk, filesystem: str) -> Any:
    """Take a disk through its life from the first boot on: each step is what one boot sees."""
    root = desk.base / "local"
    target = desk.base / "pods"
    desk.settings(
        filesystem=filesystem,
        mount_point=os.fspath(root),
        directories=[{"path": "docker", "mode": "0710"}],
        cache={"path": "cache"},
        binds=[{"source": "kubelet/pods", "target": os.fspath(target)}],
    )
    disk = desk.disk(LARGE)
    seen: dict[str, Any] = {"blank": desk.run(disk)}
    (target / "pod").write_text("x")
    seen["mode"] = oct((root / "docker").stat().st_mode & 0o7777)
    seen["pod"] = (root / "kubelet/pods/pod").exists()
    seen["marker"] = json.loads((root / ".node/disk.json").read_text())
    seen["cache"] = (root / "cache").is_dir()
    (root / "kept").write_text("x")
    seen["same boot"] = desk.run(disk)
    seen["mounts"] = [one.target for one in mounts.listed() if one.target in (str(root), str(target))]

    def boot(change: Callable[[], None] = lambda: None) -> dict[str, Any]:
        for place in (target, root):
            if os.path.ismount(place):
                mounts.unmount(place)
        change()
        return {**desk.run(disk), "kept": (root / "kept").exists(), "mounted": os.path.ismount(root)}

    seen["reboot"] = boot()
    seen["other image"] = boot(lambda: desk.be_image("image-2"))
    seen["image"] = json.loads((root / ".node/disk.json").read_text())["image"]
    (root / ".node/disk.json").unlink()
    seen["marker gone"] = boot()
    with mounted(disk, filesystem, desk.base / "mnt") as inside:
        subprocess.run(["find", inside, "-mindepth", "1", "-delete"], check=True)
    seen["only mkfs was done"] = boot()
    (root / "kept").write_text("x")
    seen["damaged"] = boot(lambda: _damage(disk, filesystem))
    (root / "kept").write_text("x")
    with (desk.base / "disk").open("r+b") as stream:
        stream.truncate(LARGE + 64 * MIB)
    with disk.path.open("rb") as device:
        fcntl.ioctl(device, _SET_CAPACITY)
    disk = Disk(disk.name, disk.path, LARGE + 64 * MIB, disk.model, disk.serial, found_by="test")
    seen["resized"] = boot()
    feature = _newer(disk, filesystem)
    seen["newer"] = {**boot(feature), "same": desk.digest(disk)}
    feature()
    seen["after all"] = boot()
    boot_end = [place for place in (target, root) if os.path.ismount(place)]
    for place in boot_end:
        mounts.unmount(place)
    return seen


def _newer(disk: Disk, filesystem: str) -> Callable[[], None]:
    """Return a function that toggles a superblock feature that no kernel knows, and updates the checksum."""
    at, order, feature, sum_at, size = {"xfs": (0, ">", 216, 224, 512), "ext4": (1024, "<", 96, 1020, 1020)}[
        filesystem
    ]

    def change() -> None:
        with disk.path.open("rb") as stream:
            block = bytearray(stream.read(4096)[at : at + max(size, 1024)])
        (found,) = struct.unpack_from(f"{order}I", block, feature)
        struct.pack_into(f"{order}I", block, feature, found ^ 1 << 30)
        if filesystem == "xfs":
            block[sum_at : sum_at + 4] = bytes(4)
        value = layout.crc32c(bytes(block[:size])) ^ (0xFFFFFFFF if filesystem == "xfs" else 0)
        struct.pack_into("<I", block, sum_at, value)
        write(disk, at, bytes(block))

    return change


def _damage(disk: Disk, filesystem: str) -> None:
    """Damage what comes after the superblock, which still identifies the owner."""
    offset, size = {"xfs": (512, 2048), "ext4": (4096, 4096)}[filesystem]
    write(disk, offset, b"\xa5" * size)


@pytest.mark.parametrize("filesystem", FILESYSTEMS)
def test_life_of_a_disk(worker: Workplace, tmp_path: Path, filesystem: str) -> None:
    seen = run_scenario(life, worker, tmp_path, filesystem)
    first = seen["blank"]
    assert (first["exit"], first["state"], first["action"], first["code"]) == (0, "ok", "format", "")
    assert first["filesystem"] == filesystem
    assert first["members"] == [{"serial": "serial-disk", "model": "Loop", "bytes": LARGE}]
    assert seen["mode"] == "0o710" and seen["pod"]
    assert layout.is_ours(seen["marker"]["uuid"]) and seen["marker"]["image"] == "image-1"
    assert seen["cache"]
    assert seen["same boot"]["action"] == "mount" and len(seen["mounts"]) == 2
    expected = {
        "reboot": ("mount", True, True),
        "other image": ("reuse", True, True),
        "marker gone": ("none", False, False),
        "only mkfs was done": ("format", False, True),
        "damaged": ("rebuild", False, True),
        "resized": ("mount", True, True),
        "newer": ("none", False, False),
        "after all": ("mount", True, True),
    }
    found = {name: tuple(seen[name][key] for key in ("action", "kept", "mounted")) for name in expected}
    assert found == expected
    assert seen["image"] == "image-2" and seen["marker gone"]["code"] == "disk.foreign"
    assert seen["newer"]["code"] == "disk.newer"
    assert f"serial-disk, {LARGE} bytes" in seen["resized"]["reason"]


def race(desk: Desk) -> Any:
    """Run four agents at once on one blank disk."""
    root = desk.base / "local"
    desk.settings(mount_point=os.fspath(root))
    disk = desk.disk(LARGE)
    children = []
    for number in range(4):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = desk.run(disk)["exit"]
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append((number, pid))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for _, pid in children]
    places = [one.target for one in mounts.listed() if one.target == str(root)]
    uuid = json.loads((root / ".node/disk.json").read_text())["uuid"]
    fresh = desk.run(disk)["action"]
    mounts.unmount(root)
    return {"codes": codes, "mounts": len(places), "uuid": uuid, "then": fresh}


def test_agents_at_once_format_once(worker: Workplace, tmp_path: Path) -> None:
    found = run_scenario(race, worker, tmp_path)
    assert (found["codes"], found["mounts"], found["then"]) == ([0] * 4, 1, "mount")


def members(desk: Desk) -> Any:
    """Boot repeatedly with one member of an array of ours, as mdadm would write it, and without the other."""
    root = desk.base / "local"
    desk.settings(mount_point=os.fspath(root), policy="require")
    uuid = bytes.fromhex(layout.new_uuid().replace("-", ""))
    disk = desk.disk(LARGE)
    write(disk, 4096, raid_superblock(uuid, b"any:local", 2, 1))
    before = desk.digest(disk)
    found: dict[str, Any] = {"first": desk.run(disk), "again": desk.run(disk)}
    status.record_reboot("boot-1", desk.places.reboot)
    desk.boot("boot-2")
    found["after our reboot"] = desk.run(disk)
    found["same"] = desk.digest(disk) == before
    desk.boot("boot-3")
    found["after another"] = desk.run(disk)
    mounts.unmount(root)
    write(disk, 0, bytes(MIB))
    write(disk, 4096, raid_superblock(uuid, b"any:local", 2, 1))
    desk.settings(mount_point=os.fspath(root), incomplete_array="rebuild")
    found["by the settings"] = desk.run(disk)
    mounts.unmount(root)
    return found


def test_a_member_of_an_array_is_kept_until_the_other_is_known_to_be_gone(
    worker: Workplace, tmp_path: Path
) -> None:
    found = run_scenario(members, worker, tmp_path)
    for name in ("first", "again", "after our reboot"):
        told = found[name]
        assert (told["exit"], told["action"], told["state"]) == (0, "none", "failed"), name
        assert told["code"] == "disk.incomplete" and "1 of 2 members" in told["reason"]
    assert found["same"]
    assert (found["after another"]["action"], found["after another"]["state"]) == ("rebuild", "ok")
    assert (found["by the settings"]["action"], found["by the settings"]["state"]) == ("rebuild", "ok")


def several(desk: Desk) -> Any:
    """Boot repeatedly with two disks that each have a filesystem of ours; then with one of them and a stray member."""
    root = desk.base / "local"
    desk.settings(mount_point=os.fspath(root), policy="require")
    first, second = desk.disk(LARGE, "first"), desk.disk(LARGE, "second")
    for disk in (first, second):
        desk.run(disk)
        (root / "kept").write_text(disk.serial)
        mounts.unmount(root)
    stray = desk.disk(LARGE, "stray")
    uuid = bytes.fromhex(layout.new_uuid().replace("-", ""))
    write(stray, 4096, raid_superblock(uuid, b"any:local", 2, 1))
    before = desk.digest(stray)
    boots = []
    for number in range(3):
        desk.boot(f"boot-{number}")
        boots.append(desk.run(first, second))
    for number in range(3, 6):
        desk.boot(f"boot-{number}")
        boots.append(desk.run(first, stray))
    kept = []
    for disk in (first, second):
        with mounted(disk, "xfs", desk.base / "mnt") as inside:
            kept.append((inside / "kept").read_text())
    return {"boots": boots, "kept": kept, "same": desk.digest(stray) == before}


def test_no_boot_formats_a_whole_filesystem_beside_another(worker: Workplace, tmp_path: Path) -> None:
    found = run_scenario(several, worker, tmp_path)
    assert [(told["action"], told["state"], told["code"]) for told in found["boots"]] == [
        ("none", "failed", "disk.several")
    ] * 6
    assert "serial-first" in found["boots"][0]["reason"] and "1 of 2 members" in found["boots"][3]["reason"]
    assert found["kept"] == ["serial-first", "serial-second"] and found["same"]


def late(desk: Desk) -> Any:
    """Add a blank disk to one of ours, change its sequence number, give it the first one's serial; hide a file."""
    root = desk.base / "local"
    desk.settings(mount_point=os.fspath(root))
    first, second = desk.disk(LARGE, "first"), desk.disk(LARGE, "second")
    found: dict[str, Any] = {"first": desk.run(first)}
    (root / "kept").write_text("x")
    mounts.unmount(root)
    found["both"] = {
        **desk.run(first, second),
        "kept": (root / "kept").exists(),
        "zero": is_zero(desk.base / "second"),
    }
    mounts.unmount(root)
    other = replace(second, sequence="1")
    found["another disk"] = {**desk.run(other), "zero": is_zero(desk.base / "second")}
    same = replace(second, serial=first.serial)
    found["two names"] = desk.run(first, same)
    (root / "hidden").write_bytes(b"x" * 4096)
    found["hidden"] = desk.run(first)
    mounts.unmount(root)
    return found


def test_disks_that_come_later_or_are_others(worker: Workplace, tmp_path: Path) -> None:
    found = run_scenario(late, worker, tmp_path)
    both = found["both"]
    assert (both["code"], both["state"], both["kept"], both["zero"]) == ("disk.more", "degraded", True, True)
    assert [one["serial"] for one in both["members"]] == ["serial-first"]
    assert (found["another disk"]["exit"], found["another disk"]["code"]) == (1, "disk.changed")
    assert found["another disk"]["zero"]
    assert found["two names"]["code"] == "disk.paths"
    assert found["hidden"]["hidden_bytes"] >= 4096 and "it hides" in found["hidden"]["reason"]
    assert found["first"]["hidden_bytes"] == 0


def failing(desk: Desk) -> Any:
    """Fail to make a filesystem, because the disk is too small for one."""
    desk.settings(mount_point=os.fspath(desk.base / "local"))
    disk = desk.disk(SMALL)
    found = {"told": desk.run(disk), "zero": is_zero(desk.base / "disk")}
    found["mounted"] = os.path.ismount(desk.base / "local")
    parse(json.loads((desk.etc / "disk.json").read_text()))
    return found


def test_program_that_fails_is_told(worker: Workplace, tmp_path: Path) -> None:
    found = run_scenario(failing, worker, tmp_path)
    told = found["told"]
    assert (told["exit"], told["state"], told["code"]) == (1, "failed", "program")
    assert "mkfs.xfs" in told["reason"] and not found["mounted"]


def test_no_loop_is_left_behind(worker: Workplace, tmp_path: Path) -> None:
    run_scenario(race, worker, tmp_path)
    backing = [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    assert not [path for path in backing if os.fspath(tmp_path) in path]
