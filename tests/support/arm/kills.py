"""Publishing in processes of its own, which are killed at given points until one runs to completion."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from image_builder.gallery import pages
from tests.support.arm.model import Request
from tests.support.arm.place import Place
from tests.support.images.builds import REPO

_LOOK_SECONDS = 0.002


@dataclass(frozen=True)
class Point:
    """When to kill a process: after so many of its bytes arrived, or after it requested so many changes."""

    received: int = sys.maxsize
    changes: int = sys.maxsize


@dataclass
class Outcome:
    """``killed`` counts the killed processes; ``faithful`` is whether the disk matched the file when it became a
    version.
    """

    killed: int = 0
    faithful: bool = False
    status: int = -1


def publish(cloud: Place, inventory: Path, output: Path, points: Iterable[Point]) -> Outcome:
    """Publish a build: kill the process at each point, then run it once more to completion."""
    outcome = Outcome()
    disk = next((output / "worker/latest").glob("*.vhd"))

    def compare(request: Request) -> None:
        if request.method == "PUT" and "/versions/" in request.path:
            outcome.faithful = is_copy(cloud, disk)

    cloud.arm.faults.append(compare)
    for point in [*points, Point()]:
        received, changes = cloud.host.received + point.received, len(cloud.arm.log) + point.changes
        with started(cloud, inventory, output) as child:
            while child.poll() is None:
                if cloud.host.received >= received or len(cloud.arm.log) >= changes:
                    child.kill()
                    outcome.killed += 1
                    break
                time.sleep(_LOOK_SECONDS)
            _, error = child.communicate()
        outcome.status = child.returncode
        if child.returncode not in (0, -9):
            raise RuntimeError(error)
    return outcome


def started(
    cloud: Place,
    inventory: Path,
    output: Path,
    command: str = "run",
    *arguments: str,
    user: int | None = None,
) -> subprocess.Popen[str]:
    """Start a `publish` command in a process of its own, as ``user``."""
    argv = [sys.executable, "-m", "image_builder.cli", "publish", command, "worker", *arguments]
    argv += ["-i", str(inventory)]
    argv += ["--output", str(output), "--endpoint", cloud.arm.url, "--json"]
    environment = {**os.environ, **cloud.environment, "PYTHONPATH": str(REPO)}
    return subprocess.Popen(
        argv,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
    )


def is_copy(cloud: Place, disk: Path) -> bool:
    """Return whether the uploaded disk has exactly the file's ranges, with the file's bytes."""
    (name,) = cloud.store.sizes
    size = disk.stat().st_size
    ranges = [*pages.data_ranges(disk), (size - 512, size)]
    if pages.merged(cloud.store.ranges(name)) != pages.merged(ranges):
        return False
    with disk.open("rb") as file:
        for start, end in ranges:
            file.seek(start)
            if cloud.store.read(name, start, end - start) != file.read(end - start):
                return False
    return True
