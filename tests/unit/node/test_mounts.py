"""Mounts as the kernel lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.node import mounts

MOUNTINFO = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 22 0:28 / /var/lib/preload ro,nodev - erofs /opt/preload/store.erofs ro
31 22 0:29 /sub /mnt/with\\040space\\043 rw shared:2 master:1 - tmpfs some\\134thing rw
32 22 0:30 / /var/lib/preload ro - erofs /dev/mapper/preload ro
33 22 0:31 / /var/lib/preloaded rw - tmpfs tmpfs rw
"""
LOWER = mounts.Mount("0:28", "/", "/var/lib/preload", "erofs", "/opt/preload/store.erofs", read_only=True)
UPPER = mounts.Mount("0:30", "/", "/var/lib/preload", "erofs", "/dev/mapper/preload", read_only=True)


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[mounts.Mount]:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text(MOUNTINFO)
    found = mounts.listed(tmp_path)
    monkeypatch.setattr(mounts, "listed", lambda: found)
    return found


def test_mounts_are_read_with_their_escapes(listed: list[mounts.Mount]) -> None:
    assert listed == [
        mounts.Mount("254:0", "/", "/", "ext4", "/dev/vda1"),
        LOWER,
        mounts.Mount("0:29", "/sub", "/mnt/with space#", "tmpfs", "some\\thing"),
        UPPER,
        mounts.Mount("0:31", "/", "/var/lib/preloaded", "tmpfs", "tmpfs"),
    ]


@pytest.mark.usefixtures("listed")
def test_the_uppermost_mount_counts() -> None:
    assert mounts.at(Path("/var/lib/preload")) == UPPER
    assert mounts.at(Path("/var/lib")) is None


@pytest.mark.usefixtures("listed")
def test_a_neighbour_with_a_longer_name_is_not_below() -> None:
    assert mounts.below("/var/lib/preload") == ["/var/lib/preload"] * 2
    assert mounts.below("/var/lib") == ["/var/lib/preload", "/var/lib/preload", "/var/lib/preloaded"]
