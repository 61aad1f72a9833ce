"""The kernel's real control groups: what a running bake has just made stays, no matter who starts another one."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from image_builder.system import cgroups

pytestmark = pytest.mark.root


def test_another_builds_start_takes_no_empty_group_away() -> None:
    groups: list[Path] = []
    with cgroups.held():
        for top in cgroups._hierarchies(Path("/sys/fs/cgroup")):
            group = top / cgroups.PARENT.lstrip("/") / "container"
            with suppress(OSError):  # cpuset's, if it doesn't have any processors yet, or a read-only one
                group.mkdir(parents=True)
                groups.append(group)
        assert groups
        subprocess.run(
            [sys.executable, "-c", "from image_builder.system import cgroups; cgroups.reap()"], check=True
        )
        assert [group for group in groups if not group.is_dir()] == []
    assert [group for group in groups if group.parent.exists()] == []
