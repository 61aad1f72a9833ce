"""The agent on real disks: a disk's life from its first boot on, and what may come between.

The kernel of a test machine may know neither partitions, RAID nor quotas: these are the boot tests'.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import mounts
from image_builder.node.disk import layout
from image_builder.node.disk.model import Disk
from image_builder.node.disk.settings import parse
from tests.builds import Workplace
from tests.disks import LARGE, MIB, SMALL, Desk, is_zero, mounted, run_scenario, write
from tests.foreign_disks import raid_superblock

_SET_CAPACITY = 0x4C07
FILESYSTEMS = ("xfs", "ext4")


def life(desk: Desk, filesystem: str) -> Any:
    """A disk from its first boot on: each step is what one boot sees."""
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
    seen["marker gone, nothing mounted"] = os.path.ismount(root)
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
    seen["after all"] = boot()
    boot_end = [place for place in (target, root) if os.path.ismount(place)]
    for place in boot_end:
        mounts.unmount(place)
    return seen


def _damage(disk: Disk, filesystem: str) -> None:
    """Break what comes after the superblock, which still says whose it is."""
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
        "resized": ("rebuild", False, True),
        "after all": ("mount", False, True),
    }
    found = {name: tuple(seen[name][key] for key in ("action", "kept", "mounted")) for name in expected}
    assert found == expected
    assert seen["image"] == "image-2" and seen["marker gone"]["code"] == "disk.foreign"


def race(desk: Desk) -> Any:
    """Four agents at once on one blank disk."""
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
    """Superblocks of an array of ours, as mdadm would write them; no array is assembled of one that lacks members."""
    desk.settings(mount_point=os.fspath(desk.base / "local"))
    uuid = bytes.fromhex(layout.new_uuid().replace("-", ""))
    disk = desk.disk(LARGE)
    write(disk, 4096, raid_superblock(uuid, b"any:local", 2, 1))
    known = layout.raid(disk.path.read_bytes()[: 3 * 4096])
    told = desk.run(disk)
    mounts.unmount(desk.base / "local")
    return {"devices": known and known.devices, "role": known and known.role, "told": told}


def test_what_is_left_of_an_array_of_ours_is_made_anew(worker: Workplace, tmp_path: Path) -> None:
    found = run_scenario(members, worker, tmp_path)
    assert (found["devices"], found["role"]) == (2, 1)
    assert (found["told"]["exit"], found["told"]["action"], found["told"]["state"]) == (0, "rebuild", "ok")


def failing(desk: Desk) -> Any:
    """A filesystem can't be made: the disk is too small for one."""
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
