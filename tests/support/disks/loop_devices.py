"""Real disks for the agent: loop devices in a namespace of their own, real programs, real filesystems.

A loop device has neither model nor serial, so the agent is given the candidate disks; everything else is as on a node.
A scenario gets a ``Desk`` and asserts nothing, as in ``tests/support/registries/pulls.py``.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from image_builder.node import mounts
from image_builder.node.disk import command, find
from image_builder.node.disk.model import Disk, Places
from image_builder.system import namespace
from tests.support.images.builds import REPO, Workplace

MIB = 1 << 20
SMALL, LARGE = 64 * MIB, 320 * MIB  # mkfs.xfs refuses sizes below 300 MiB
_CHILD = (
    "import sys; from tests.support.disks import loop_devices; sys.exit(loop_devices.child(*sys.argv[1:]))"
)
_CTL_GET_FREE, _CONFIGURE = 0x4C82, 0x4C0A
_AUTOCLEAR = 4


def run_scenario(scenario: Callable[..., object], worker: Workplace, folder: Path, *words: str) -> Any:
    """Run ``scenario(desk, *words)`` in namespaces of its own; return its JSON result.

    The programs that make filesystems are those of a baked node.
    """
    trees = [os.fspath(tree) for tree in worker.trees("node")]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, scenario.__module__, scenario.__name__, folder, *words],
        cwd=REPO,
        env={**os.environ, "TREES": ":".join(trees)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return json.loads((folder / "result.json").read_text())


def child(module: str, name: str, folder: str, *words: str) -> int:
    """Run a scenario, as the child process that ``run_scenario`` starts."""
    scenario = getattr(importlib.import_module(module), name)

    def work() -> int:
        base = Path(folder)
        namespace.mount("tmpfs", "tmpfs", "/mnt")
        _offer_programs([Path(tree) for tree in os.environ["TREES"].split(":")])
        find.MEMBER_SECONDS = 0.3
        os.mknod("/dev/loop-control", 0o020600, os.makedev(10, 237))
        with ExitStack() as stack:
            result = scenario(Desk(base, stack), *words)
        (base / "result.json").write_text(json.dumps(result))
        return 0

    return namespace.run_isolated(work)


def _offer_programs(trees: Sequence[Path]) -> None:
    """Put an image's programs on the agent's path; each runs with the loader and the libraries of its own image."""
    namespace.mount("tmpfs", "tmpfs", "/usr/local/sbin")
    libraries = ":".join(os.fspath(tree / "usr/lib/x86_64-linux-gnu") for tree in trees)
    loader = next(path for tree in trees if (path := tree / "usr/lib64/ld-linux-x86-64.so.2").exists())
    for name in ("mkfs.xfs", "xfs_quota", "mkfs.ext4", "wipefs", "blkid", "mdadm"):
        program = next(path for tree in trees if (path := tree / "usr/sbin" / name).exists())
        wrapper = Path("/usr/local/sbin", name)
        wrapper.write_text(f'#!/bin/sh\nexec {loader} --library-path {libraries} {program} "$@"\n')
        wrapper.chmod(0o755)


class Desk:
    """Disks that are loop devices over sparse files, and an agent that is given them."""

    def __init__(self, base: Path, stack: ExitStack) -> None:
        self.base, self.stack = base, stack
        self.etc, self.release = base / "etc", base / "image-release"
        self.etc.mkdir()
        state = base / "state"
        # The state of the host's own udev and its buses is irrelevant to these disks.
        self.places = Places(
            run=base / "run",
            etc=self.etc,
            release=self.release,
            boot_id=base / "boot_id",
            udev_queue=base / "queue",
            absence=state / "absence.json",
            reboot=state / "reboot.json",
            cloud=base / "cloud",
        )
        self.boot("boot-1")
        self.be_image("image-1")

    def be_image(self, build: str) -> None:
        self.release.write_text(f"IMAGE_BUILD={build}\n")

    def boot(self, boot_id: str) -> None:
        """Switch to the boot with this id."""
        self.places.boot_id.write_text(f"{boot_id}\n")

    def settings(self, **values: Any) -> None:
        (self.etc / "disk.json").write_text(json.dumps({"policy": "prefer", "wait_seconds": 0, **values}))

    def disk(self, size: int, name: str = "disk", **values: Any) -> Disk:
        """Make a blank disk."""
        file = self.base / name
        with file.open("xb") as stream:
            stream.truncate(size)
        path = self.stack.enter_context(loop(file))
        return Disk(path.name, path, size, "Loop", f"serial-{name}", found_by="test", **values)

    def run(self, *disks: Disk) -> dict[str, Any]:
        """Run the agent once; return its section of the status file with the exit status added."""
        code = command.run(places=self.places, disks=lambda: list(disks))
        found = json.loads((self.places.run / "status.json").read_text())["disk"]
        return {**found, "exit": code}

    def digest(self, disk: Disk) -> str:
        """Return the SHA-256 of a whole disk, as stored in its backing file."""
        fd = os.open(disk.path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        with (self.base / disk.serial.removeprefix("serial-")).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def loop(file: Path) -> Iterator[Path]:
    """Make a loop device from a file; it disappears once it is no longer in use."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    with file.open("r+b") as backing:
        while True:
            number = fcntl.ioctl(control, _CTL_GET_FREE)
            path = Path(f"/dev/loop{number}")
            if not path.exists():
                os.mknod(path, 0o060600, os.makedev(7, number))
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            info = struct.pack("=5Q4I64s64s32s2Q", 0, 0, 0, 0, 0, 0, 0, 0, _AUTOCLEAR, b"", b"", b"", 0, 0)
            try:
                fcntl.ioctl(fd, _CONFIGURE, struct.pack("=2I", backing.fileno(), 512) + info + bytes(64))
                break
            except OSError as error:
                os.close(fd)
                if error.errno != errno.EBUSY:
                    raise
    os.close(control)
    try:
        yield path
    finally:
        os.close(fd)


def run(*argv: object) -> None:
    subprocess.run([str(word) for word in argv], check=True, stdout=subprocess.DEVNULL)


def write(disk: Disk, offset: int, data: bytes) -> None:
    with disk.path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def mounted(disk: Disk, kind: str, folder: Path) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    mounts.mount(disk.path, folder, kind, 0)
    try:
        yield folder
    finally:
        mounts.unmount(folder)


def is_zero(path: Path) -> bool:
    """Return whether a file holds nothing but zeros."""
    with path.open("rb") as stream:
        return all(block == bytes(len(block)) for block in iter(lambda: stream.read(MIB), b""))
