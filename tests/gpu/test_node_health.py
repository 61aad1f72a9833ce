"""Health checks on a real machine: full filesystems, the kernel's log and clock, drives, a hung driver."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import files, mounts
from image_builder.node.errors import NodeError
from image_builder.node.gpu import nvml
from image_builder.node.health import apart, clock, gpu, kernel_log, storage
from image_builder.node.health.model import Outcome, Places
from image_builder.node.health.settings import Settings
from image_builder.system.namespace import run_isolated
from tests.support.control_plane.gates import wait_until
from tests.support.nodes.health_looks import found, look

pytestmark = pytest.mark.root

MS_REMOUNT = 32


def isolated(scenario: Callable[[Path], None], folder: Path) -> None:
    """Run a scenario in a mount namespace of its own; a failed assertion ends it with a traceback."""

    def work() -> int:
        scenario(folder)
        return 0

    assert run_isolated(work) == 0


def watched(*paths: Path) -> Outcome:
    return storage.check_filesystems(look(Settings(paths=tuple(map(os.fspath, paths)))))


def full(folder: Path) -> None:
    mounts.mount("tmpfs", folder, "tmpfs", options="size=1m")
    assert found(watched(folder)) == {}
    with open(folder / "file", "wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(65536))
    assert found(watched(folder)) == {"filesystem.full": "warn"}
    (folder / "file").unlink()
    assert found(watched(folder)) == {}


def without_inodes(folder: Path) -> None:
    mounts.mount("tmpfs", folder, "tmpfs", options="size=1m,nr_inodes=50")
    for number in range(45):
        (folder / str(number)).touch()
    assert found(watched(folder)) == {"filesystem.inodes": "warn"}
    with suppress(OSError):
        for number in range(45, 60):
            (folder / str(number)).touch()
    assert found(watched(folder)) == {"filesystem.inodes": "warn"}


def read_only(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    mounts.mount("tmpfs", folder / "a", "tmpfs")
    mounts.bind(folder / "a", folder / "b")
    # A read-only view of it, which is how a sandboxed service sees everything.
    mounts.mount("", folder / "b", "", mounts.BIND | MS_REMOUNT | mounts.RDONLY)
    assert found(watched(folder / "b")) == {}
    mounts.mount("", folder / "a", "", MS_REMOUNT | mounts.RDONLY)
    assert found(watched(folder / "a")) == {"filesystem.read-only": "fail"}
    # One filesystem, one finding.
    assert len(watched(folder / "a", folder / "b").findings) == 1


@pytest.mark.parametrize("scenario", [full, without_inodes, read_only], ids=lambda one: one.__name__)
def test_filesystem(scenario: Callable[[Path], None], tmp_path: Path) -> None:
    isolated(scenario, tmp_path)


def test_paths_that_are_not_there_are_left_out(tmp_path: Path) -> None:
    assert watched(tmp_path / "none").samples == ()


def test_kernel_log_is_read_to_its_end_and_on_from_there() -> None:
    judge = kernel_log.catalogue()
    first = kernel_log.check(look(), judge)
    number = first.memory["number"]
    assert number > 100
    # Any program can write there, and isn't believed.
    Path("/dev/kmsg").write_text("<3>I/O error, dev sdzz, sector 1 op 0x0:(READ)\n")
    second = kernel_log.check(look(**first.memory), judge)
    assert second.memory["number"] > number and second.memory["lost"] == 0
    assert "sdzz" not in {one.subject for one in second.findings}


def test_own_devices_are_those_below_the_root() -> None:
    own = kernel_log.own_devices(look(Settings(paths=("/",))))
    name = subprocess.run(
        ["lsblk", "--noheadings", "--output", "KNAME"], capture_output=True, text=True
    ).stdout.split()
    assert own <= {one.strip() for one in name}
    root = storage.containing("/", mounts.listed())
    # 0 is the major number of filesystems without a device, such as a container's root.
    assert root and bool(own) is not root.device.startswith("0:")


def test_kernels_clock_is_read() -> None:
    libc = ctypes.CDLL(None)
    state = libc.adjtimex(ctypes.create_string_buffer(208))
    seen = clock.read(Path("/proc"))
    assert seen.synchronized is (state != 5)
    assert 0 <= seen.error <= seen.worst <= 17 and seen.uptime > 0


def test_drive_that_is_none_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "nvme0").write_bytes(b"")
    assert storage.read_page(tmp_path / "nvme0") is None and storage.read_page(tmp_path / "nvme1") is None
    assert storage.read_page(Path("/dev/null")) is None


@pytest.fixture
def bus(tmp_path: Path) -> Places:
    """Return this machine, with one H200 on its bus as /sys would show it."""
    device = tmp_path / "sys/bus/pci/devices/0001:00:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    return Places(sys=tmp_path / "sys")


def without_driver() -> dict[str, Any]:
    try:
        with nvml.opened("libnvidia-ml.so.none"):
            raise AssertionError("there is such a library")
    except OSError as error:
        return asdict(nvml.refused(error))


def test_gpu_without_a_driver(bus: Places) -> None:
    """The library is really loaded, under a name that no machine has: what a node without its driver would see."""
    outcome = gpu.check(look(places=bus), without_driver)
    assert found(outcome) == {"gpu.driver": "fail"}
    assert gpu.check(look(), gpu.read_nvml) == Outcome()


def test_driver_that_hangs_is_left_and_not_asked_again(bus: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_SECONDS", 0.3)

    def hang() -> dict[str, Any]:
        signal.pause()
        return {}

    outcome = gpu.check(look(places=bus), hang)
    pid, born = outcome.memory["hung"]
    assert found(outcome) == {"gpu.hung": "fail"} and born and apart.started(pid) == ""
    # A process that can't be killed is still there at the next check: then the driver isn't queried.
    with subprocess.Popen(["sleep", "60"]) as stuck:
        memory: dict[str, Any] = {"hung": [stuck.pid, apart.started(stuck.pid)], "links": {}}

        def never() -> dict[str, Any]:
            raise AssertionError("asked beside one that hangs")

        again = gpu.check(look(places=bus, **memory), never)
        assert found(again) == {"gpu.hung": "fail"} and again.memory["hung"] == memory["hung"]
        stuck.kill()
    monkeypatch.setattr(gpu, "_SECONDS", 600)
    outcome = gpu.check(look(places=bus, **memory), without_driver)
    assert found(outcome) == {"gpu.driver": "fail"} and "hung" not in outcome.memory


def test_work_apart_gives_its_answer_or_says_why_not() -> None:
    assert apart.run(lambda: {"a": [1] * 100_000}, "it", 600)["a"][-1] == 1
    with pytest.raises(NodeError, match="it: ValueError: invalid literal"):
        apart.run(lambda: int("no"), "it", 600)
    with pytest.raises(NodeError, match="without an answer"):
        apart.run(lambda: os.kill(os.getpid(), signal.SIGKILL), "it", 600)


def test_work_apart_does_not_share_its_parents_lock(tmp_path: Path) -> None:
    """Or work that hangs would keep it when its parent is killed, and no other look could start."""

    def open_files() -> list[str]:
        return [os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()]

    path = tmp_path / "lock"
    with files.lock(path):
        assert os.fspath(path) in open_files()
        assert os.fspath(path) not in apart.run(open_files, "it", 600)


def test_work_that_hangs_ends_without_its_parent() -> None:
    """A look that takes too long is killed alone: systemd doesn't wait for what it leaves behind."""
    hangs = "lambda: (os.write(1, str(os.getpid()).encode()), signal.pause())"
    program = f"import os, signal; from image_builder.node.health import apart; apart.run({hangs}, 'it', 0.5)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        pid = int(os.read(parent.stdout.fileno(), 20))
        parent.kill()
        assert wait_until(lambda: apart.started(pid) == "")


def test_work_that_hangs_after_its_answer_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Like a process whose last reference to a driver blocks in the kernel.
    monkeypatch.setattr(os, "_exit", lambda _status: signal.pause())
    with pytest.raises(apart.HungError, match="it hangs in process") as caught:
        apart.run(lambda: 1, "it", 600)
    assert apart.started(caught.value.process[0]) == ""
