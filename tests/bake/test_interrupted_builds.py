"""Ctrl-C, or a CI's SIGTERM, in any stage: the build ends at once and leaves nothing behind, not even in staging."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from image_builder.system import cgroups
from tests.support.control_plane.gates import wait_until
from tests.support.images.builds import Workplace, is_drained, left_behind, wait_for_line
from tests.support.images.fixtures import WHOLE

pytestmark = [pytest.mark.root, pytest.mark.image(WHOLE)]

# In seconds, for all programs of a build: two for cleanup (namespace._GRACE_SECONDS), then the kernel ends them; on a
# busy machine it needs longer. What they wait for here takes longer still. After that, the command removes what is
# left in the staging area, however long its files take.
AT_MOST = 30.0


@pytest.fixture
def whole(request: pytest.FixtureRequest) -> Workplace:
    built: Workplace = request.getfixturevalue(WHOLE)
    return built


@pytest.fixture
def workplace(copies: Callable[[Workplace], Workplace], whole: Workplace) -> Workplace:
    return copies(whole)


@pytest.fixture
def small(copies: Callable[[Workplace], Workplace], minimal: Workplace) -> Workplace:
    return copies(minimal)


@pytest.fixture
def silent_mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve a mirror that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("IMAGE_BUILDER_MIRROR", f"http://127.0.0.1:{server.getsockname()[1]}/debian")
        yield


def _control_groups() -> set[Path]:
    """Return the builds' control groups that no process holds, which leaves out those of concurrent bakes."""
    groups = {p for p in Path("/sys/fs/cgroup").glob("**/image-builder-*") if p.is_dir()}
    return {group for group in groups if not _is_held(cgroups._LOCKS / group.name)}


def _is_held(lock: Path) -> bool:
    with suppress(FileNotFoundError), lock.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _tree(root: int) -> list[int]:
    """Return a process and all its descendants."""
    pids = [root]
    for pid in pids:
        pids += _children(pid)
    return pids


def _children(pid: int) -> Iterator[int]:
    """Yield a process's children; none of those of threads that end meanwhile."""
    tasks: list[Path] = []
    with suppress(OSError):
        tasks += Path(f"/proc/{pid}/task").iterdir()
    for task in tasks:
        with suppress(OSError):
            yield from map(int, (task / "children").read_text().split())


def _interrupt(
    workplace: Workplace,
    number: signal.Signals,
    line: str,
    delay: float,
    *argv: str | Path,
    locked: bool = True,
    to_all: bool = False,
) -> None:
    """Send a build a signal ``delay`` seconds after a line of a stage; it must end with the right status, and clean.

    ``to_all`` sends it to every process of the build at once, as a service manager does.
    """
    groups = _control_groups()
    child = workplace.start(*(("--locked", workplace.lock) if locked else ()), *argv)
    assert wait_for_line(child, lambda told: line in " ".join(told.split()))
    time.sleep(delay)
    assert child.poll() is None
    started = time.monotonic()
    for pid in _tree(child.pid) if to_all else (child.pid,):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    while child.poll() is None and len(_tree(child.pid)) > 1:
        time.sleep(0.02)
    seconds = time.monotonic() - started
    status = child.wait(timeout=120)
    print(f"{line}: {seconds:.2f} s, all removed after {time.monotonic() - started:.2f} s")
    assert status == 128 + number
    assert seconds < AT_MOST
    assert is_drained(child)
    assert list((workplace.store / "staging").iterdir()) == []
    assert left_behind(workplace.store) == []
    # Those of a concurrent bake that is ending are unheld for a moment.
    assert wait_until(lambda: _control_groups() <= groups, 10)


def test_in_every_stage_of_a_small_image(small: Workplace, minimal: Workplace) -> None:
    stages = ("tools", "base", "system", "seal", "verify", "disk", "convert")
    small.forget(*stages)
    for number, stage, delay in (
        (signal.SIGTERM, "tools", 1.0),
        (signal.SIGINT, "base", 1.0),
        (signal.SIGTERM, "system", 2.0),
        (signal.SIGINT, "seal", 0.3),
        # The checks run at the same time, in a thread.
        (signal.SIGTERM, "disk", 0.5),
        (signal.SIGINT, "convert", 0.1),
    ):
        if stage == "convert":
            small.restore(minimal, "verify")
        _interrupt(small, number, f" {stage} started", delay)
        small.restore(minimal, stage)


def test_while_the_mirror_is_silent(small: Workplace, silent_mirror: None) -> None:
    """Threads wait for a package that never arrives, and don't notice signals; neither does apt."""
    small.forget("base", "system", "seal", "verify", "disk", "convert")
    package = json.loads(small.lock.read_text())["groups"]["base"]["packages"][0]
    (small.store / "debs" / package["sha256"]).unlink()
    # Existing packages are hashed first.
    _interrupt(small, signal.SIGTERM, " fetch started", 3.0)
    small.lock.unlink()
    _interrupt(small, signal.SIGINT, " lock started", 1.0, locked=False)


@pytest.mark.nightly
def test_in_the_stages_of_a_worker(workplace: Workplace, whole: Workplace) -> None:
    workplace.forget("preload", "preload_store", "rehearsal", "seal", "verify", "disk", "convert")
    for number, stage, line, delay in (
        # Before that, it serves the lab's images to itself.
        (signal.SIGTERM, "preload", " preload pulling", 1.0),
        (signal.SIGINT, "preload_store", " preload_store started", 0.2),
        (signal.SIGTERM, "rehearsal", " rehearsal started", 0.5),
    ):
        _interrupt(workplace, number, line, delay, "--stop-after", "rehearsal")
        workplace.restore(whole, stage)
    workplace.restore(whole, "seal")
    # Meanwhile, the main thread makes the disk; from there, signals once failed to reach the parallel work.
    _interrupt(workplace, signal.SIGINT, " verify started", 2.0)


@pytest.mark.nightly
def test_in_the_stages_that_compile(
    copies: Callable[[Workplace], Workplace], whole_worker: Workplace
) -> None:
    workplace = copies(whole_worker)
    stages = ("lab_images", "build_root", "kubelet_build")
    workplace.forget(*stages)
    for number, stage, delay, to_all in (
        (signal.SIGINT, "lab_images", 5.0, False),
        (signal.SIGTERM, "build_root", 2.0, False),
        # Unpacking takes a while, and then as many compilers run as there are processors.
        (signal.SIGINT, "kubelet_build", 60.0, False),
        (signal.SIGTERM, "kubelet_build", 60.0, True),
    ):
        workplace.forget(stage)
        _interrupt(workplace, number, f" {stage} started", delay, "--stop-after", stage, to_all=to_all)
        workplace.restore(whole_worker, stage)


def test_while_an_archive_is_packed(
    copies: Callable[[Workplace], Workplace], pulled_worker: Workplace, tmp_path: Path
) -> None:
    """Existing pulls are taken over, so that packing begins at once. Docker's takes a while."""
    workplace = copies(pulled_worker)
    inventory = tmp_path / "inventory.yml"
    refs = ("registry.lab.internal/software:1.0", "registry.lab.internal/pause:1.0")
    preload = "".join(f"        - {{ref: '{ref}', pin: false}}\n" for ref in refs)
    hosts = f"    {workplace.image}:\n      image_preload:\n{preload}"
    inventory.write_text(f"images:\n  hosts:\n{hosts}", encoding="utf-8")
    inventories = ("-i", os.fspath(Path("inventories/lab").absolute()), "-i", inventory)
    # Nothing is missing, so the archive is packed at once; a log shows only part of what a stage does.
    line, delay = "preload pulling 0 of 2 images", 1.0
    _interrupt(workplace, signal.SIGTERM, line, delay, *inventories, "--stop-after", "preload")
