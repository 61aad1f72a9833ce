"""A killed bake's leftovers in the control groups: removed when the next one starts, but nothing of a running one."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.system import cgroups


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    """Return a mount of cgroup version 2."""
    path = tmp_path / "cgroup"
    path.mkdir()
    (path / "cgroup.controllers").touch()
    return path


@pytest.fixture
def locks(tmp_path: Path) -> Path:
    return tmp_path / "locks"


def test_empty_groups_of_every_hierarchy_go(tmp_path: Path, locks: Path) -> None:
    mount = tmp_path / "cgroup"
    for name in ("cpu", "memory"):
        (mount / name / "image-builder-0123/abc/def").mkdir(parents=True)
        (mount / name / "docker/other").mkdir(parents=True)
    (mount / "cpuacct").symlink_to("cpu")
    cgroups.reap(mount, locks)
    assert sorted(str(p.relative_to(mount)) for p in mount.rglob("*") if not p.is_symlink()) == [
        "cpu",
        "cpu/docker",
        "cpu/docker/other",
        "memory",
        "memory/docker",
        "memory/docker/other",
    ]


def test_a_group_in_use_stays(mount: Path, locks: Path) -> None:
    (mount / "image-builder-0123/running").mkdir(parents=True)
    (
        mount / "image-builder-0123/running/busy"
    ).touch()  # the kernel refuses with EBUSY, a file with ENOTEMPTY
    (mount / "image-builder-0123/ended").mkdir()
    cgroups.reap(mount, locks)
    assert [p.name for p in (mount / "image-builder-0123").iterdir()] == ["running"]


def test_a_group_that_a_running_bakes_container_is_not_yet_in_stays(mount: Path, locks: Path) -> None:
    """A runtime creates it, and fills it a moment later: another bake may start in between."""
    group = mount / cgroups.PARENT.lstrip("/") / "container"
    dead = mount / "image-builder-0123"
    with cgroups.held(mount, locks):
        for path in (group, dead):
            path.mkdir(parents=True)
        with cgroups.held(mount, locks):  # and another thread of this bake may end
            pass
        assert group.is_dir() and not dead.exists()
    assert not group.parent.exists()
    assert list(locks.iterdir()) == []


def test_what_a_killed_bake_held_goes(mount: Path, locks: Path) -> None:
    group = mount / "image-builder-0123/container"
    group.mkdir(parents=True)
    locks.mkdir()
    (locks / "image-builder-0123").touch()  # the kernel has released it
    (locks / "image-builder-4567").touch()
    cgroups.reap(mount, locks)
    assert not group.parent.exists()
    assert list(locks.iterdir()) == []


def test_a_host_without_any_is_fine(tmp_path: Path, locks: Path) -> None:
    (tmp_path / "systemd/user.slice").mkdir(parents=True)
    cgroups.reap(tmp_path / "none", locks)
    cgroups.reap(tmp_path, locks)
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert names == {"systemd", "systemd/user.slice"}
