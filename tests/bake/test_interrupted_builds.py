"""A signal in any stage: on Ctrl-C or a CI's SIGTERM, a build ends at once and leaves nothing, not even in staging.

After SIGKILL of its outermost process nothing is left but staging, and the next build just works.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from image_builder.system import cgroups
from tests.support.images.builds import (
    REPO,
    Workplace,
    is_drained,
    left_behind,
    wait_for_line,
    wait_until_clean,
)
from tests.support.images.fixtures import WHOLE

pytestmark = pytest.mark.root

# The stages, each with a signal and the seconds after which it is well under way.
STAGES = {
    "tools": (signal.SIGTERM, 1.0),
    "base": (signal.SIGINT, 1.0),
    "system": (signal.SIGTERM, 2.0),
    "seal": (signal.SIGINT, 0.3),
    # It runs at the same time as the next one, in a thread.
    "verify": (signal.SIGTERM, 0.3),
    "convert": (signal.SIGINT, 0.1),
}
# The stages that only a worker has, and those that build on them.
WORKER_STAGES = (
    "lab_images",
    "container_runtime",
    "preload",
    "preload_store",
    "rehearsal",
    "node",
    "kubernetes",
)
# To repeat the moments of a failed run: the number that it printed.
SEED = int(os.environ.get("IMAGE_BUILDER_KILL_SEED") or random.randrange(1 << 32))
RANDOM_KILLS = int(os.environ.get("IMAGE_BUILDER_RANDOM_KILLS", "8"))


@pytest.fixture
def whole(request: pytest.FixtureRequest) -> Workplace:
    built: Workplace = request.getfixturevalue(WHOLE)
    return built


# -- SIGKILL ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Namespaces in which only a test's builds run, held by the process ``pid``: a network, and ``temporary``
    directories that are mounted at /tmp and /var/tmp (but not over this checkout or the store).
    """

    pid: int
    temporary: tuple[Path, ...]

    @property
    def enter(self) -> tuple[str, ...]:
        """Return the command that runs another one there."""
        namespaces = ("nsenter", f"--target={self.pid}", "--mount", "--net")
        return (*namespaces, "env", f"--chdir={os.getcwd()}", "TMPDIR=/tmp")

    def content(self) -> set[str]:
        """Return all temporary files, and the network's interfaces and rules."""
        found = {os.fspath(path) for folder in self.temporary for path in folder.rglob("*")}
        found |= {line.split()[0] for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()[2:]}
        if program := shutil.which("iptables-save", path="/usr/sbin:/sbin"):
            rules = subprocess.run([*self.enter, program], capture_output=True, text=True, check=False).stdout
            found |= {line for line in rules.splitlines() if not line.startswith((":", "#"))}
        return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    store = Path(os.environ.get("IMAGE_BUILDER_STORE", "/var/lib/image-builder"))
    mounted = [f for f in ("/tmp", "/var/tmp") if not any(p.is_relative_to(f) for p in (REPO, store))]
    folders = tuple(tmp_path / str(number) for number, _ in enumerate(mounted))
    # Bound before any of them is hidden by another.
    script = "ip link set lo up\n"
    for number, folder in enumerate(folders):
        folder.mkdir(mode=0o777)
        script += f"exec {number + 5}<'{folder}'\n"
    for number, target in enumerate(mounted):
        script += f"mount --no-canonicalize --bind /proc/self/fd/{number + 5} {target}\n"
    argv = [
        "unshare",
        "--mount",
        "--net",
        "--propagation",
        "private",
        "sh",
        "-euc",
        f"{script}echo ready; exec cat",
    ]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout and holder.stdin
        assert holder.stdout.readline() == "ready\n"
        yield Place(holder.pid, folders)
        holder.stdin.close()


def _outside(workplace: Workplace, place: Place) -> set[str]:
    """Return everything where a build must leave nothing: the store outside staging, and all of its own place."""
    tops = [top for top in workplace.store.iterdir() if top.name not in ("staging", "objects")]
    paths = [path for top in tops for path in (top, *top.rglob("*"))]
    found = {os.fspath(path.relative_to(workplace.store)) for path in paths}
    # The stages that a build needs are recorded before it is published, so that they aren't collected.
    found = {p for p in found if not re.fullmatch(r"locks/[^.][^/]*\.builds", p)}
    # Lock files are empty, and stay.
    found = {p for p in found if (workplace.store / p).is_dir() or (workplace.store / p).stat().st_size}
    return found | place.content()


def _kill(
    workplace: Workplace, place: Place, line: Callable[[str], bool], delay: float, *argv: str | Path
) -> bool:
    """Start a build, SIGKILL it ``delay`` seconds after the wanted line; return False if it ended before that."""
    outside = _outside(workplace, place)
    child = workplace.start(*argv, enter=place.enter)
    try:
        seen = wait_for_line(child, line)
        time.sleep(delay)
        alive = child.poll() is None
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert is_drained(child)
    assert wait_until_clean(workplace.store, place.pid) == []
    assert _outside(workplace, place) - outside == set()
    return seen and alive


def _killed_in(workplace: Workplace, place: Place, stage: str, delay: float, *argv: str) -> bool:
    """Kill a build with the lock of its stages: what the archive has published since doesn't matter."""
    return _kill(workplace, place, partial(_is_start, stage), delay, "--locked", workplace.lock, *argv)


def _is_start(stage: str, line: str) -> bool:
    return f" {stage} started" in " ".join(line.split())


# -- SIGINT and SIGTERM ----------------------------------------------------------------------------------------------


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


def _control_groups(pids: Iterable[int]) -> set[str]:
    """Return the names of the control groups that processes hold."""
    held: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            files = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
            held |= {Path(file).name for file in files if Path(file).parent == cgroups._LOCKS}
    return held


def _interrupt(
    workplace: Workplace,
    number: signal.Signals,
    line: str,
    wait: Callable[[], object],
    *argv: str | Path,
    locked: bool = True,
    to_all: bool = False,
) -> None:
    """Send a build a signal when ``wait`` returns, after a line of a stage; it must end with that status, and clean.

    Nothing else ends it: what its programs wait for takes longer, or never comes. ``to_all`` sends the signal to every
    process of the build at once, as a service manager does.
    """
    child = workplace.start(*(("--locked", workplace.lock) if locked else ()), *argv)
    assert wait_for_line(child, lambda told: line in " ".join(told.split()))
    wait()
    pids = _tree(child.pid)
    groups = _control_groups(pids)
    assert child.poll() is None
    for pid in pids if to_all else (child.pid,):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    assert child.wait() == 128 + number
    assert is_drained(child)
    assert list((workplace.store / "staging").iterdir()) == []
    assert left_behind(workplace.store) == []
    assert groups.isdisjoint(path.name for path in Path("/sys/fs/cgroup").glob("**/image-builder-*"))


# -- the tests -------------------------------------------------------------------------------------------------------


def test_in_every_stage(workplace: Workplace, tiny: Workplace, place: Place) -> None:
    workplace.forget(*STAGES)
    for stage, (number, delay) in STAGES.items():
        assert _killed_in(workplace, place, stage, delay), stage
        workplace.forget(stage, "convert")
        # The next build removes what the killed one left, and then all that it made itself.
        _interrupt(
            workplace, number, f" {stage} started", partial(time.sleep, delay), to_all=stage == "system"
        )
        workplace.restore(tiny, stage)
    workplace.forget("convert")
    assert _killed_in(workplace, place, "publish", 0.1)
    done = workplace.build()
    assert done.status == 0, done.stderr
    assert list((workplace.store / "staging").iterdir()) == []
    published = list((workplace.output / workplace.image).iterdir())
    assert sorted(p.name for p in published) == sorted([done.result["build_id"][:12], "latest"])


def test_while_a_disk_is_made(
    copies: Callable[[Workplace], Workplace], minimal: Workplace, place: Place
) -> None:
    workplace = copies(minimal)
    workplace.forget("verify", "disk", "convert")
    for stage, number, delay in (("disk", signal.SIGTERM, 0.5), ("convert", signal.SIGINT, 0.1)):
        assert _killed_in(workplace, place, stage, delay), stage
        # While the disk is made, the checks run in a thread; signals once failed to reach it.
        _interrupt(workplace, number, f" {stage} started", partial(time.sleep, delay))
        workplace.restore(minimal, stage)


@pytest.fixture
def silent_mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Serve a mirror that accepts connections and never answers; yield an event that is set once it is asked."""
    asked, connections = threading.Event(), list[socket.socket]()

    def accept() -> None:
        with suppress(OSError):
            while True:
                connections.append(server.accept()[0])
                asked.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("IMAGE_BUILDER_MIRROR", f"http://127.0.0.1:{server.getsockname()[1]}/debian")
        thread = threading.Thread(target=accept)
        thread.start()
        yield asked
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in connections:
        connection.close()


def test_while_the_mirror_is_silent(workplace: Workplace, silent_mirror: threading.Event) -> None:
    """Threads wait for a package that never arrives, and don't notice signals; neither does apt."""
    workplace.forget("base", "system", "seal", "verify", "convert")
    package = json.loads(workplace.lock.read_text())["groups"]["base"]["packages"][0]
    (workplace.store / "debs" / package["sha256"]).unlink()
    _interrupt(workplace, signal.SIGTERM, " fetch started", silent_mirror.wait)
    silent_mirror.clear()
    workplace.lock.unlink()
    _interrupt(workplace, signal.SIGINT, " lock started", silent_mirror.wait, locked=False)


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
    line, wait = "preload pulling 0 of 2 images", partial(time.sleep, 1.0)
    _interrupt(workplace, signal.SIGTERM, line, wait, *inventories, "--stop-after", "preload")


@pytest.mark.slow
def test_in_every_stage_of_a_worker(
    copies: Callable[[Workplace], Workplace], whole: Workplace, place: Place
) -> None:
    workplace = copies(whole)
    workplace.forget(*WORKER_STAGES, "seal")
    soft = {
        # Before that, it serves the lab's images to itself.
        "preload": (signal.SIGTERM, " preload pulling", 1.0),
        "preload_store": (signal.SIGINT, " preload_store started", 0.2),
        "rehearsal": (signal.SIGTERM, " rehearsal started", 0.5),
    }
    for stage in WORKER_STAGES:
        # No disk is made: a machine may not have room for another whole image.
        assert _killed_in(workplace, place, stage, 1.0, "--stop-after", "seal"), stage
        if stage in soft:
            number, line, delay = soft[stage]
            _interrupt(workplace, number, line, partial(time.sleep, delay), "--stop-after", "seal")
        workplace.restore(whole, stage)


@pytest.mark.slow
def test_killed_at_random(workplace: Workplace, place: Place) -> None:
    print(f"IMAGE_BUILDER_KILL_SEED={SEED}")
    chance = random.Random(SEED)
    killed = tries = 0
    while killed < RANDOM_KILLS:
        workplace.forget("seal", "verify", "convert")
        killed += _kill(
            workplace, place, lambda _line: True, chance.uniform(0.0, 8.0), "--locked", workplace.lock
        )
        tries += 1
        assert tries < 3 * RANDOM_KILLS, "builds end before they can be killed"
    done = workplace.build()
    assert done.status == 0, done.stderr
    assert list((workplace.store / "staging").iterdir()) == []
