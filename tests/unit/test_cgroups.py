"""What a killed bake leaves in the control groups goes at the next one's start."""

from __future__ import annotations

from pathlib import Path

from image_builder import cgroups


def test_empty_groups_of_every_hierarchy_go(tmp_path: Path) -> None:
    for name in ("cpu", "memory"):
        (tmp_path / name / "image-builder/abc/def").mkdir(parents=True)
        (tmp_path / name / "docker/other").mkdir(parents=True)
    (tmp_path / "cpuacct").symlink_to("cpu")
    cgroups.reap(tmp_path)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if not p.is_symlink()) == [
        "cpu",
        "cpu/docker",
        "cpu/docker/other",
        "memory",
        "memory/docker",
        "memory/docker/other",
    ]


def test_a_group_in_use_stays(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").touch()
    (tmp_path / "image-builder/running").mkdir(parents=True)
    (tmp_path / "image-builder/running/busy").touch()  # the kernel refuses with EBUSY, a file with ENOTEMPTY
    (tmp_path / "image-builder/ended").mkdir()
    cgroups.reap(tmp_path)
    assert [p.name for p in (tmp_path / "image-builder").iterdir()] == ["running"]


def test_a_host_without_any_is_fine(tmp_path: Path) -> None:
    cgroups.reap(tmp_path / "none")
    cgroups.reap(tmp_path)
