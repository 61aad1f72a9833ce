"""Findings about filesystems, arrays and drives: each rule applied to facts."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from image_builder.node import mounts
from image_builder.node.health import storage
from image_builder.node.health.storage import Usage
from tests.unit.node.health_findings import SETTINGS, codes


def mounted(target: str, device: str, kind: str, *, read_only: bool) -> mounts.Mount:
    return mounts.Mount(device, "/", target, kind, "", read_only)


def usage(free: int, inodes: int = 50, *, kind: str = "ext4", read_only: bool = False) -> Usage:
    return Usage("/data", mounted("/data", "8:1", kind, read_only=read_only), 100, free, 100, inodes)


def of_root(seen: Usage) -> Usage:
    return replace(seen, path="/", mounted=replace(seen.mounted, target="/"))


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (usage(11), []),
        (usage(10), [("filesystem.full", "/data", "warn")]),
        # A job that fills its scratch space isn't a reason to return a machine.
        (usage(0, 0), [("filesystem.full", "/data", "warn"), ("filesystem.inodes", "/data", "warn")]),
        (of_root(usage(4)), [("filesystem.full", "/", "warn")]),
        (of_root(usage(3)), [("filesystem.full", "/", "fail")]),
        (of_root(usage(50, 2)), [("filesystem.inodes", "/", "fail")]),
        (usage(50, read_only=True), [("filesystem.read-only", "/data", "fail")]),
        (usage(50, kind="erofs", read_only=True), []),
        # btrfs and vfat have no inode limit.
        (replace(usage(50), total_inodes=0, free_inodes=0), []),
    ],
)
def test_filesystems(seen: Usage, wanted: list[tuple[str, str, str]]) -> None:
    assert codes(storage.filesystem_rule([seen], SETTINGS)) == wanted


def test_path_lies_on_the_mount_with_the_longest_target_and_of_these_the_last() -> None:
    root, data, again = (
        mounted("/", "8:1", "ext4", read_only=False),
        mounted("/mnt/local", "8:2", "xfs", read_only=False),
        mounted("/mnt/local", "8:3", "xfs", read_only=True),
    )
    every = [root, data, again]
    assert storage.containing("/mnt/local/docker", every) == again
    assert storage.containing("/mnt/localother", every) == root
    assert storage.containing("/mnt/local", [root, data]) == data


def test_mountinfo_tells_the_filesystem_s_own_state(tmp_path: Path) -> None:
    """A service with ProtectSystem sees every mount as read-only (first column); the filesystem itself isn't."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text(
        "36 35 98:0 / / ro,noatime shared:2 - ext4 /dev/root rw,errors=remount-ro\n"
        "37 36 98:1 / /a\\040b rw - xfs /dev/x ro,attr2\n"
    )
    assert mounts.listed(tmp_path) == [
        mounts.Mount("98:0", "/", "/", "ext4", "/dev/root", read_only=False),
        mounts.Mount("98:1", "/", "/a b", "xfs", "/dev/x", read_only=True),
    ]


def test_disks_below_a_filesystem_are_all_that_it_is_made_of(tmp_path: Path) -> None:
    """An array of a partition and a disk, as in /sys: links to the devices."""
    devices = tmp_path / "devices"
    for name in ("md127", "sda/sda1", "nvme0n1"):
        (devices / name).mkdir(parents=True)
    (devices / "sda/sda1/partition").write_text("1\n")
    (devices / "md127/slaves").mkdir()
    (devices / "md127/slaves/sda1").symlink_to(devices / "sda/sda1")
    (devices / "md127/slaves/nvme0n1").symlink_to(devices / "nvme0n1")
    (tmp_path / "dev/block").mkdir(parents=True)
    (tmp_path / "dev/block/9:127").symlink_to(devices / "md127")
    found = storage.disks_below(["9:127", "0:25"], tmp_path)
    assert found == {"md127", "sda1", "sda", "nvme0n1"}


def test_arrays(tmp_path: Path) -> None:
    for name, files in {
        "md0": {"array_state": "active\n", "degraded": "1\n"},
        "md1": {"array_state": "clean\n", "degraded": "0\n"},
        "md127": {"array_state": "broken\n"},
        "md2": {"array_state": "clear\n"},
    }.items():
        (tmp_path / "block" / name / "md").mkdir(parents=True)
        for file, text in files.items():
            (tmp_path / "block" / name / "md" / file).write_text(text)
    found = storage.read_arrays(tmp_path)
    assert codes(storage.array_rule(found)) == [
        ("array.degraded", "md0", "fail"),
        ("array.degraded", "md127", "fail"),
    ]


def page(warning: int = 0, *, kelvin: int = 310, media: int = 0) -> bytes:
    """Return a health page laid out by the specification; it isn't from a real drive."""
    head = struct.pack("<BHBBB", warning, kelvin, 100, 10, 3)
    return head + bytes(160 - len(head)) + media.to_bytes(16, "little") + bytes(336)


def test_nvme_page() -> None:
    found = storage.parse_page(page(0b101, media=7))
    assert found == storage.Page(0b101, 37, 100, 3, 7)


@pytest.mark.parametrize(
    ("state", "warning", "wanted"),
    [
        ("live", 0, []),
        ("live", 0b1, [("drive.nvme", "nvme0", "fail")]),
        ("live", 0b1000, [("drive.nvme", "nvme0", "fail")]),
        ("live", 0b10, [("drive.nvme", "nvme0", "warn")]),
        ("live", 0b11, [("drive.nvme", "nvme0", "fail")]),
        ("dead", 0, [("drive.state", "nvme0", "fail")]),
    ],
)
def test_nvme(state: str, warning: int, wanted: list[tuple[str, str, str]]) -> None:
    drive = storage.Drive("nvme0", state, storage.parse_page(page(warning)))
    assert codes(storage.drive_rule([drive])) == wanted
    assert codes(storage.drive_rule([replace(drive, page=None)])) == [
        one for one in wanted if one[0] == "drive.state"
    ]
