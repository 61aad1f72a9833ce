"""The agent on real disks: loop devices in a namespace of their own, real programs, real filesystems.

A loop has neither model nor serial, so the candidates are handed to the agent; all else is as on a node. The
kernel of a test machine may know neither partitions, RAID nor quotas: these are the boot tests'.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import struct
import subprocess
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from image_builder import namespace
from image_builder.node.disk import command, layout, mounts
from image_builder.node.disk.model import Disk, Places
from image_builder.node.disk.settings import parse
from tests.builds import Workplace

REPO = Path(__file__).resolve().parents[2]
MIB = 1 << 20
SMALL, LARGE = 64 * MIB, 320 * MIB  # mkfs.xfs makes nothing below 300 MiB
_CHILD = "import sys; from tests.integration import test_local_disk as t; sys.exit(t.child(*sys.argv[1:]))"
_CTL_GET_FREE, _CONFIGURE, _SET_CAPACITY = 0x4C82, 0x4C0A, 0x4C07
_AUTOCLEAR = 4
FILESYSTEMS = ("xfs", "ext4")


_LAYERS = ("node", "container_runtime", "system", "base")
_trees: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def image_programs(worker: Workplace) -> None:
    """The programs that make filesystems are those of a baked node."""
    _trees[:] = [worker.object(name) / "product" / "tree" for name in _LAYERS]


def run_scenario(name: str, folder: Path, *words: str) -> Any:
    """Run a function of this module in namespaces of its own; return its JSON."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, name, folder, *words],
        cwd=REPO,
        env={**os.environ, "TREES": ":".join(map(os.fspath, _trees))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return json.loads((folder / "result.json").read_text())


def child(name: str, folder: str, *words: str) -> int:
    """Be the process of a scenario."""

    def work() -> int:
        base = Path(folder)
        namespace.mount("tmpfs", "tmpfs", "/mnt")
        _offer_programs([Path(tree) for tree in os.environ["TREES"].split(":")])
        os.mknod("/dev/loop-control", 0o020600, os.makedev(10, 237))
        with ExitStack() as stack:
            result = globals()[name](Desk(base, stack), *words)
        (base / "result.json").write_text(json.dumps(result))
        return 0

    return namespace.run_isolated(work)


def _offer_programs(trees: Sequence[Path]) -> None:
    """Put an image's programs in the agent's way: each is run with the loader and the libraries of its own image."""
    namespace.mount("tmpfs", "tmpfs", "/usr/local/sbin")
    libraries = ":".join(os.fspath(tree / "usr/lib/x86_64-linux-gnu") for tree in trees)
    loader = next(path for tree in trees if (path := tree / "usr/lib64/ld-linux-x86-64.so.2").exists())
    for name in ("mkfs.xfs", "xfs_quota", "mkfs.ext4", "wipefs", "blkid", "mdadm"):
        program = next(path for tree in trees if (path := tree / "usr/sbin" / name).exists())
        wrapper = Path("/usr/local/sbin", name)
        wrapper.write_text(f'#!/bin/sh\nexec {loader} --library-path {libraries} {program} "$@"\n')
        wrapper.chmod(0o755)


class Desk:
    """Disks that are loops of sparse files, and an agent that is told of them."""

    def __init__(self, base: Path, stack: ExitStack) -> None:
        self.base, self.stack = base, stack
        self.places = Places(run=base / "run")
        self.etc, self.release = base / "etc", base / "image-release"
        self.etc.mkdir()
        self.be_image("image-1")

    def be_image(self, build: str) -> None:
        self.release.write_text(f"IMAGE_BUILD={build}\n")

    def settings(self, **values: Any) -> None:
        (self.etc / "disk.json").write_text(json.dumps({"policy": "prefer", **values}))

    def disk(self, size: int, name: str = "disk", **values: Any) -> Disk:
        """Make a blank disk."""
        file = self.base / name
        with file.open("xb") as stream:
            stream.truncate(size)
        path = self.stack.enter_context(loop(file))
        return Disk(path.name, path, size, "Loop", f"serial-{name}", found_by="test", **values)

    def run(self, *disks: Disk) -> dict[str, Any]:
        """Run the agent once; return its exit status with the section of the status file."""
        code = command.run(
            places=self.places, directory=self.etc, release=self.release, disks=lambda: list(disks)
        )
        found = json.loads((self.places.run / "status.json").read_text())["disk"]
        return {**found, "exit": code}

    def digest(self, disk: Disk) -> str:
        """Return the sha256 of a whole disk, as it is in its file."""
        fd = os.open(disk.path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        with (self.base / disk.serial.removeprefix("serial-")).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def loop(file: Path) -> Iterator[Path]:
    """Make a loop device of a file, which is gone when nobody uses it any more."""
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


# Foreign contents. Where a program isn't everywhere, the bytes that make libblkid know it are written.


def _mkfs(kind: str) -> Callable[[Disk, Path], None]:
    def make(disk: Disk, folder: Path) -> None:
        run(f"mkfs.{kind}", "-q", "-L", "data", disk.path)
        with mounted(disk, kind, folder) as root:
            (root / "precious").write_bytes(b"x" * 100_000)

    return make


def _dirty(kind: str) -> Callable[[Disk, Path], None]:
    """A filesystem whose machine lost power: what was synced last is in the journal alone."""

    def make(disk: Disk, folder: Path) -> None:
        run(f"mkfs.{kind}", "-q", "-L", "local", disk.path)
        with mounted(disk, kind, folder) as root:
            (root / "precious").write_bytes(b"x" * 100_000)
            fd = os.open(root / "precious", os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
            backing = folder.parent / disk.serial.removeprefix("serial-")
            caught = backing.read_bytes()
        write(disk, 0, caught)

    return make


def _luks(disk: Disk, _folder: Path) -> None:
    head = struct.pack(">6sH32s32s32sII20s32sI40s", b"LUKS\xba\xbe", 1, b"aes", b"xts-plain64", b"sha256",
                       4096, 32, b"", b"", 1000, b"01234567-89ab-cdef-0123-456789abcdef")  # fmt: skip
    write(disk, 0, head)


def _lvm(disk: Disk, _folder: Path) -> None:
    rest = (struct.pack("<I8s", 32, b"LVM2 001") + b"0123456789abcdef0123456789abcdef").ljust(492, b"\0")
    checksum = zlib.crc32(rest, 0xF597A6CF ^ 0xFFFFFFFF) ^ 0xFFFFFFFF
    write(disk, 512, struct.pack("<8sQI", b"LABELONE", 1, checksum) + rest)


def raid_superblock(uuid: bytes, name: bytes, devices: int, number: int) -> bytes:
    """Return a superblock of version 1.2 with a sum that is right (linux/raid/md_p.h)."""
    block = bytearray(4096)
    struct.pack_into("<IIII16s32s", block, 0, 0xA92B4EFC, 1, 0, 0, uuid, name)
    struct.pack_into("<QiIQII", block, 64, 0, 0, 2, 0, 1024, devices)
    struct.pack_into("<QQQQ", block, 128, 2048, (SMALL >> 9) - 2048, 8, 0)
    struct.pack_into("<I", block, 160, number)
    struct.pack_into("<II", block, 216, 0, 16)
    struct.pack_into("<16H", block, 256, *range(devices), *[0xFFFF] * (16 - devices))
    total = sum(struct.unpack_from("<72I", block))
    struct.pack_into("<I", block, 216, (total & 0xFFFFFFFF) + (total >> 32))
    return bytes(block)


def _raid(disk: Disk, _folder: Path) -> None:
    write(disk, 4096, raid_superblock(bytes(range(16)), b"any:local", 2, 0))


def _zfs(disk: Disk, _folder: Path) -> None:
    for label in (0, 256 << 10, disk.bytes - (512 << 10), disk.bytes - (256 << 10)):
        for number in range(16):
            write(
                disk, label + (128 << 10) + 1024 * number, struct.pack("<QQQ", 0x00BAB10C, 5000, number + 1)
            )


def _btrfs(disk: Disk, _folder: Path) -> None:
    block = bytearray(4096)
    struct.pack_into("<QQ8sQ", block, 48, 65536, 1, b"_BHRfS_M", 1)
    struct.pack_into("<QQQQII", block, 112, disk.bytes, 0, 6, 1, 4096, 16384)
    block[32:48] = block[267:283] = bytes(range(16))
    struct.pack_into("<I", block, 0, _crc32c(bytes(block[32:])))
    write(disk, 65536, bytes(block))


def _crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def _swap(disk: Disk, _folder: Path) -> None:
    run("mkswap", "-q", disk.path)


def _ntfs(disk: Disk, _folder: Path) -> None:
    """An MBR with one partition of type 7, as Azure's, and the begin of an NTFS in it."""
    sectors = disk.bytes // 512 - 128
    entry = struct.pack("<B3sB3sII", 0, b"\0\0\0", 7, b"\0\0\0", 128, sectors)
    write(disk, 446, entry.ljust(64, b"\0") + b"\x55\xaa")
    write(disk, 65536, b"\xeb\x52\x90NTFS    " + struct.pack("<HB", 512, 8))


def _gpt(count: int) -> Callable[[Disk, Path], None]:
    def make(disk: Disk, _folder: Path) -> None:
        last = disk.bytes // 512 - 1
        kind = bytes.fromhex("af3dc60f838472478e793d69d8477de4")  # Linux data
        entries = b"".join(
            struct.pack("<16s16sQQQ72s", kind, bytes([n] * 16), 2048 * n, 2048 * n + 2047, 0, b"")
            for n in range(1, count + 1)
        ).ljust(128 * 128, b"\0")

        def header(here: int, other: int, table: int) -> bytes:
            words = (here, other, 34, last - 33, bytes([9] * 16), table, 128, 128, zlib.crc32(entries))
            plain = struct.pack("<8sIIII QQQQ 16s QIII", b"EFI PART", 0x10000, 92, 0, 0, *words)
            return plain[:16] + struct.pack("<I", zlib.crc32(plain)) + plain[20:]

        protective = struct.pack("<B3sB3sII", 0, b"\0\2\0", 0xEE, b"\xff\xff\xff", 1, last)
        write(disk, 446, protective.ljust(64, b"\0") + b"\x55\xaa")
        write(disk, 512, header(1, last, 2))
        write(disk, 1024, entries)
        write(disk, 512 * (last - 32), entries)
        write(disk, 512 * last, header(last, 1, last - 32))

    return make


def _raw(offset: int) -> Callable[[Disk, Path], None]:
    def make(disk: Disk, _folder: Path) -> None:
        write(disk, offset % disk.bytes, random.Random(1).randbytes(4096))

    return make


def _ours_with_files(disk: Disk, folder: Path) -> None:
    """Our label and UUID, but files and no marker: only half of the proof."""
    run("mkfs.ext4", "-q", "-L", "local", "-U", layout.new_uuid(), disk.path)
    with mounted(disk, "ext4", folder) as root:
        (root / "precious").write_bytes(b"x" * 100_000)


# How it is made, its size, and what the reason must name.
FOREIGN: dict[str, tuple[Callable[[Disk, Path], None], int, str]] = {
    "ext4": (_mkfs("ext4"), SMALL, ": ext4"),
    "ext4 with our label and a journal to replay": (_dirty("ext4"), SMALL, ": ext4"),
    "xfs": (_mkfs("xfs"), LARGE, ": xfs"),
    "xfs with our label and a log to replay": (_dirty("xfs"), LARGE, ": xfs"),
    "btrfs": (_btrfs, SMALL, ": btrfs"),
    "LUKS": (_luks, SMALL, ": crypto_LUKS"),
    "LVM": (_lvm, SMALL, ": LVM2_member"),
    "RAID member": (_raid, SMALL, ": linux_raid_member"),
    "ZFS": (_zfs, SMALL, ": zfs_member"),
    "swap": (_swap, SMALL, ": swap"),
    "NTFS": (_ntfs, SMALL, ": dos"),
    "GPT with one partition": (_gpt(1), SMALL, ": PMBR and gpt"),
    "GPT with three partitions": (_gpt(3), SMALL, ": PMBR and gpt"),
    "data at the begin": (_raw(0), SMALL, ": data without any signature"),
    "data in the first MiB": (_raw(MIB - 4096), SMALL, ": data without any signature"),
    "data at the end": (_raw(-4096), SMALL, ": data without any signature"),
    "ours without a marker": (
        _ours_with_files,
        SMALL,
        ": ext4 with our label and files, but without our marker",
    ),
}


def foreign(desk: Desk) -> Any:
    desk.settings()
    found = {}
    for number, (name, (make, size, _)) in enumerate(FOREIGN.items()):
        disk = desk.disk(size, f"disk{number}")
        make(disk, desk.base / "mnt")
        before = desk.digest(disk)
        told = desk.run(disk)
        found[name] = {"told": told, "same": desk.digest(disk) == before}
        (desk.base / f"disk{number}").unlink()
    return found


@pytest.fixture(scope="module")
def foreigners(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_scenario("foreign", tmp_path_factory.mktemp("foreign"))


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_data_is_left_as_it_is_and_named(foreigners: Any, name: str) -> None:
    found = foreigners[name]
    told = found["told"]
    assert found["same"]
    assert (told["exit"], told["state"], told["code"]) == (0, "degraded", "disk.foreign")
    assert told["reason"].endswith(FOREIGN[name][2])
    assert told["members"] == [] and told["action"] == "none"


def life(desk: Desk, filesystem: str) -> Any:
    """A disk from its first boot on: each step is what one boot sees."""
    root = desk.base / "local"
    target = desk.base / "pods"
    desk.settings(
        filesystem=filesystem,
        mount_point=os.fspath(root),
        directories=[{"path": "docker", "mode": "0710"}],
        cache={"path": "cache"},
        binds=[{"source": "kubelet/pods", "target": os.fspath(target)}],
    )
    disk = desk.disk(LARGE)
    seen: dict[str, Any] = {"blank": desk.run(disk)}
    (target / "pod").write_text("x")
    seen["mode"] = oct((root / "docker").stat().st_mode & 0o7777)
    seen["pod"] = (root / "kubelet/pods/pod").exists()
    seen["marker"] = json.loads((root / ".node/disk.json").read_text())
    seen["cache"] = (root / "cache").is_dir()
    (root / "kept").write_text("x")
    seen["same boot"] = desk.run(disk)
    seen["mounts"] = [one.target for one in mounts.listed() if one.target in (str(root), str(target))]

    def boot(change: Callable[[], None] = lambda: None) -> dict[str, Any]:
        for place in (target, root):
            if os.path.ismount(place):
                mounts.unmount(place)
        change()
        return {**desk.run(disk), "kept": (root / "kept").exists(), "mounted": os.path.ismount(root)}

    seen["reboot"] = boot()
    seen["other image"] = boot(lambda: desk.be_image("image-2"))
    seen["image"] = json.loads((root / ".node/disk.json").read_text())["image"]
    (root / ".node/disk.json").unlink()
    seen["marker gone"] = boot()
    seen["marker gone, nothing mounted"] = os.path.ismount(root)
    with mounted(disk, filesystem, desk.base / "mnt") as inside:
        subprocess.run(["find", inside, "-mindepth", "1", "-delete"], check=True)
    seen["only mkfs was done"] = boot()
    (root / "kept").write_text("x")
    seen["damaged"] = boot(lambda: _damage(disk, filesystem))
    (root / "kept").write_text("x")
    with (desk.base / "disk").open("r+b") as stream:
        stream.truncate(LARGE + 64 * MIB)
    with disk.path.open("rb") as device:
        fcntl.ioctl(device, _SET_CAPACITY)
    disk = Disk(disk.name, disk.path, LARGE + 64 * MIB, disk.model, disk.serial, found_by="test")
    seen["resized"] = boot()
    seen["after all"] = boot()
    boot_end = [place for place in (target, root) if os.path.ismount(place)]
    for place in boot_end:
        mounts.unmount(place)
    return seen


def _damage(disk: Disk, filesystem: str) -> None:
    """Break what comes after the superblock, which still says whose it is."""
    offset, size = {"xfs": (512, 2048), "ext4": (4096, 4096)}[filesystem]
    write(disk, offset, b"\xa5" * size)


@pytest.mark.parametrize("filesystem", FILESYSTEMS)
def test_life_of_a_disk(tmp_path: Path, filesystem: str) -> None:
    seen = run_scenario("life", tmp_path, filesystem)
    first = seen["blank"]
    assert (first["exit"], first["state"], first["action"], first["code"]) == (0, "ok", "format", "")
    assert first["filesystem"] == filesystem
    assert first["members"] == [{"serial": "serial-disk", "model": "Loop", "bytes": LARGE}]
    assert seen["mode"] == "0o710" and seen["pod"]
    assert layout.is_ours(seen["marker"]["uuid"]) and seen["marker"]["image"] == "image-1"
    assert seen["cache"]
    assert seen["same boot"]["action"] == "mount" and len(seen["mounts"]) == 2
    expected = {
        "reboot": ("mount", True, True),
        "other image": ("reuse", True, True),
        "marker gone": ("none", False, False),
        "only mkfs was done": ("format", False, True),
        "damaged": ("rebuild", False, True),
        "resized": ("rebuild", False, True),
        "after all": ("mount", False, True),
    }
    found = {name: tuple(seen[name][key] for key in ("action", "kept", "mounted")) for name in expected}
    assert found == expected
    assert seen["image"] == "image-2" and seen["marker gone"]["code"] == "disk.foreign"


def erasure(desk: Desk) -> Any:
    """A crash after each write of an erasure of ours, and after none of them."""
    root = desk.base / "local"
    desk.settings(mount_point=os.fspath(root))
    disk = desk.disk(LARGE)
    found = []
    for count in range(1, len(layout.erasure(disk.bytes)) + 1):
        run("mkfs.ext4", "-q", "-F", "-L", "theirs", disk.path)
        _gpt(3)(disk, desk.base)
        for offset, data in layout.erasure(disk.bytes)[:count]:
            write(disk, offset, data)
        found.append(desk.run(disk))
        mounts.unmount(root)
    return found


def test_an_erasure_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    for told in run_scenario("erasure", tmp_path):
        assert (told["exit"], told["state"], told["action"]) == (0, "ok", "format")


def refusals(desk: Desk) -> Any:
    """Disks that must not be touched though they are blank, or beside others."""
    desk.settings(mount_point=os.fspath(desk.base / "local"), expected_disks=1)
    one, other = desk.disk(LARGE, "one"), desk.disk(LARGE, "other")
    system = desk.disk(LARGE, "system", system=True)
    found: dict[str, Any] = {"two": desk.run(one, other), "system": desk.run(system), "none": desk.run()}
    desk.settings(mount_point=os.fspath(desk.base / "local"))
    _luks(other, desk.base)
    found["blank and foreign"] = desk.run(one, other)
    found["untouched"] = [_is_zero(desk.base / name) for name in ("one", "system")]
    run("mkfs.ext4", "-q", "-L", "mine", one.path)
    before = desk.digest(one)
    with mounted(one, "ext4", desk.base / "mnt"):
        found["mounted"] = desk.run(one)
    found["mounted, same"] = desk.digest(one) != "" and before != ""
    short = desk.disk(LARGE, "short")
    os.truncate(desk.base / "short", LARGE - 4096)  # its end can't be read any more
    found["unreadable"] = desk.run(short)
    found["unreadable, same"] = _is_zero(desk.base / "short")
    desk.settings(mount_point=os.fspath(desk.base / "local"), policy="require")
    found["required"] = desk.run()
    found["environment"] = (desk.places.run / "kubelet.env").read_text()
    found["place"] = oct((desk.base / "local").stat().st_mode & 0o7777)
    found["state"] = (desk.base / "local/.node").is_dir()
    return found


def _is_zero(path: Path) -> bool:
    with path.open("rb") as stream:
        return all(block == bytes(len(block)) for block in iter(lambda: stream.read(MIB), b""))


def test_wrong_and_ambiguous_disks_are_left_alone(tmp_path: Path) -> None:
    found = run_scenario("refusals", tmp_path)
    codes = {
        "two": "disk.ambiguous",
        "system": "disk.system",
        "none": "disk.none",
        "blank and foreign": "disk.foreign",
        "mounted": "disk.busy",
        "unreadable": "disk.error",
        "required": "disk.none",
    }
    assert {name: found[name]["code"] for name in codes} == codes
    assert {found[name]["exit"] for name in codes} == {0}
    assert found["untouched"] == [True, True] and found["unreadable, same"]
    assert "serial-one" in found["two"]["reason"] and "serial-other" in found["two"]["reason"]
    assert "Input/output error" in found["unreadable"]["reason"]
    assert found["required"]["state"] == "failed" and found["two"]["state"] == "degraded"
    assert "image-builder/local-disk=disk.none:NoSchedule" in found["environment"]
    assert (found["place"], found["state"]) == ("0o755", True)


def race(desk: Desk) -> Any:
    """Four agents at once on one blank disk."""
    root = desk.base / "local"
    desk.settings(mount_point=os.fspath(root))
    disk = desk.disk(LARGE)
    children = []
    for number in range(4):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = desk.run(disk)["exit"]
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append((number, pid))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for _, pid in children]
    places = [one.target for one in mounts.listed() if one.target == str(root)]
    uuid = json.loads((root / ".node/disk.json").read_text())["uuid"]
    fresh = desk.run(disk)["action"]
    mounts.unmount(root)
    return {"codes": codes, "mounts": len(places), "uuid": uuid, "then": fresh}


def test_agents_at_once_format_once(tmp_path: Path) -> None:
    found = run_scenario("race", tmp_path)
    assert (found["codes"], found["mounts"], found["then"]) == ([0] * 4, 1, "mount")


def members(desk: Desk) -> Any:
    """Superblocks of an array of ours, as mdadm would write them; no array is assembled of one that lacks members."""
    desk.settings(mount_point=os.fspath(desk.base / "local"))
    uuid = bytes.fromhex(layout.new_uuid().replace("-", ""))
    disk = desk.disk(LARGE)
    write(disk, 4096, raid_superblock(uuid, b"any:local", 2, 1))
    known = layout.raid(disk.path.read_bytes()[: 3 * 4096])
    told = desk.run(disk)
    mounts.unmount(desk.base / "local")
    return {"devices": known and known.devices, "role": known and known.role, "told": told}


def test_what_is_left_of_an_array_of_ours_is_made_anew(tmp_path: Path) -> None:
    found = run_scenario("members", tmp_path)
    assert (found["devices"], found["role"]) == (2, 1)
    assert (found["told"]["exit"], found["told"]["action"], found["told"]["state"]) == (0, "rebuild", "ok")


def wiped(desk: Desk) -> Any:
    """The policy to wipe: only what it names, only on disks that the platform calls local."""
    desk.settings(mount_point=os.fspath(desk.base / "local"), wipe=["crypto_LUKS"])
    found = {}
    for name, make, local in (("named", _luks, True), ("other", _lvm, True), ("not local", _luks, False)):
        disk = desk.disk(LARGE, name, local=local)
        make(disk, desk.base)
        before = desk.digest(disk)
        found[name] = {**desk.run(disk), "same": desk.digest(disk) == before}
        if found[name]["action"] != "none":
            mounts.unmount(desk.base / "local")
    return found


def test_policy_to_wipe(tmp_path: Path) -> None:
    found = run_scenario("wiped", tmp_path)
    assert {name: (told["action"], told["same"]) for name, told in found.items()} == {
        "named": ("format", False),
        "other": ("none", True),
        "not local": ("none", True),
    }


def failing(desk: Desk) -> Any:
    """A filesystem can't be made: the disk is too small for one."""
    desk.settings(mount_point=os.fspath(desk.base / "local"))
    disk = desk.disk(SMALL)
    found = {"told": desk.run(disk), "zero": _is_zero(desk.base / "disk")}
    found["mounted"] = os.path.ismount(desk.base / "local")
    parse(json.loads((desk.etc / "disk.json").read_text()))
    return found


def test_program_that_fails_is_told(tmp_path: Path) -> None:
    found = run_scenario("failing", tmp_path)
    told = found["told"]
    assert (told["exit"], told["state"], told["code"]) == (1, "failed", "program")
    assert "mkfs.xfs" in told["reason"] and not found["mounted"]


def test_no_loop_is_left_behind(tmp_path: Path) -> None:
    run_scenario("race", tmp_path)
    backing = [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    assert not [path for path in backing if os.fspath(tmp_path) in path]
