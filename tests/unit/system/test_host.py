"""A host's missing requirements, which are reported before anything on it is changed."""

from __future__ import annotations

import platform
import re
import shutil
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

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


def test_the_least_space_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage, proc = SimpleNamespace(free=host.LEAST_FREE), _proc(tmp_path, "22 1 254:0 / / rw - ext4 x rw\n")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    host.check_store(tmp_path, proc)
    usage.free -= 1
    with pytest.raises(SpaceError):
        host.check_store(tmp_path, proc)


def test_python_packages_of_azure(repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["azure"]
    assert [re.split("[>=]", requirement)[0] for requirement in extra] == list(host.AZURE)
    host.check_azure(["pytest"])
    with pytest.raises(HostError, match="missing: no-such-package$") as refused:
        host.check_azure(["pytest", "no-such-package"])
    assert refused.value.hint == f"{sys.executable} -m pip install 'image-builder[azure]'"


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


TABLE = """\
# a comment
system debian 12
package sh-like /bin/sh build
package gone /nonexistent/gone build boot
package away /nonexistent/away boot
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "host.txt"
    path.write_text(TABLE)
    return path


def test_missing_packages_are_named_with_the_command_that_installs_them(table: Path) -> None:
    host.check_packages("plan", table)
    with pytest.raises(HostError, match="are missing: gone$"):
        host.check_packages("build", table)
    with pytest.raises(HostError, match="are missing: gone away$") as refused:
        host.check_packages("boot", table)
    assert refused.value.hint == "apt-get install --no-install-recommends gone away"


def test_systems_are_those_of_the_table(table: Path) -> None:
    host.check_system({"ID": "debian", "VERSION_ID": "12"}, table)
    with pytest.raises(HostError, match="Debian sid is not supported") as refused:
        host.check_system({"ID": "debian", "PRETTY_NAME": "Debian sid"}, table)
    assert refused.value.hint == "use one of: debian 12"


@pytest.mark.parametrize(
    ("held", "lacking"),
    [
        ("000001ffffffffff", ""),
        ("00000000a80425fb", "CAP_SYS_ADMIN"),  # as Docker starts a container
        ("00000000800405fb", "CAP_SYS_ADMIN, CAP_MKNOD"),  # as Podman does
    ],
)
def test_capabilities_that_a_container_lacks_are_named(tmp_path: Path, held: str, lacking: str) -> None:
    status = tmp_path / "status"
    status.write_text(f"Name:\tx\nCapPrm:\t000001ffffffffff\nCapEff:\t{held}\nCapBnd:\t{held}\n")
    if not lacking:
        host.check_capabilities(status)
        return
    with pytest.raises(HostError, match=f"lacks {lacking}$") as refused:
        host.check_capabilities(status)
    assert refused.value.hint == host.RIGHTS


def test_root_of_a_user_namespace_is_not_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    uid_map = tmp_path / "uid_map"
    uid_map.write_text("         0          0 4294967295\n")
    host.check_root(uid_map)
    uid_map.write_text("         0       1001          1\n         1     100000      65536\n")
    with pytest.raises(HostError, match="user namespace"):
        host.check_root(uid_map)
    monkeypatch.setattr("os.geteuid", lambda: 1001)
    with pytest.raises(HostError, match="needs root"):
        host.check_root(uid_map)


def test_a_store_that_this_user_can_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host.check_writable(tmp_path / "deep" / "store")
    monkeypatch.setattr("os.access", lambda path, _mode: path != tmp_path)
    with pytest.raises(HostError, match="not writable") as refused:
        host.check_writable(tmp_path / "deep" / "store")
    assert refused.value.hint is not None and "--store DIR" in refused.value.hint
