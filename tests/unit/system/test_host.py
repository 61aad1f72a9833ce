"""What a host must have is told before anything on it is changed."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from image_builder.errors import HostError, SpaceError, StoreError
from image_builder.node import mounts
from image_builder.system import host

MOUNTS = """\
22 1 254:0 / / rw - overlay overlay rw
23 22 254:1 / /data rw - ext4 /dev/b rw
24 22 254:2 / /data/with\\040space rw - xfs /dev/c rw
25 22 254:3 / /database rw - nfs4 server:/x rw
26 22 254:4 / /over rw - ext4 /dev/d rw
27 26 254:5 / /over rw - fuse.sshfs x rw
28 22 254:6 / /srv/büro rw - btrfs /dev/e rw
"""


def _proc(folder: Path, mountinfo: str) -> Path:
    (folder / "self").mkdir()
    (folder / "self/mountinfo").write_text(mountinfo, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/store", "overlay"),
        ("/data", "ext4"),
        ("/data/store", "ext4"),
        ("/data/with space/store", "xfs"),
        ("/database/store", "nfs4"),
        ("/over/store", "fuse.sshfs"),
        ("/srv/büro/store", "btrfs"),
    ],
)
def test_the_filesystem_of_a_path(tmp_path: Path, path: str, kind: str) -> None:
    assert host.filesystem_of(Path(path), mounts.listed(_proc(tmp_path, MOUNTS))) == kind


@pytest.mark.parametrize("kind", ["overlay", "nfs4", "vfat", "fuse.sshfs"])
def test_a_store_on_an_unsuitable_filesystem(tmp_path: Path, kind: str) -> None:
    proc = _proc(tmp_path, f"22 1 254:0 / / rw - {kind} x rw\n")
    with pytest.raises(StoreError, match=kind) as refused:
        host.check_store(tmp_path / "deep" / "store", proc)
    assert refused.value.hint is not None and "--store" in refused.value.hint
    assert not (tmp_path / "deep").exists()


def test_too_little_space_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = _proc(tmp_path, "22 1 254:0 / / rw - ext4 x rw\n")
    monkeypatch.setattr(host, "LEAST_FREE", 1 << 62)
    with pytest.raises(SpaceError, match="MiB are missing"):
        host.check_store(tmp_path / "store", proc)


def test_a_kernel_without_a_filesystem(tmp_path: Path) -> None:
    known = tmp_path / "filesystems"
    known.write_text("nodev\tproc\n\text4\n")
    with pytest.raises(HostError, match="no overlay filesystem"):
        host.check_kernel(("overlay",), known, tmp_path)
    known.write_text("nodev\tproc\nnodev\toverlay\n")
    host.check_kernel(("overlay",), known, tmp_path)


def test_a_filesystem_may_be_a_module(tmp_path: Path) -> None:
    known = tmp_path / "filesystems"
    known.write_text("nodev\tproc\n")
    module = tmp_path / platform.release() / "kernel/fs/overlayfs/overlay.ko.xz"
    module.parent.mkdir(parents=True)
    module.touch()
    host.check_kernel(("overlay",), known, tmp_path)
