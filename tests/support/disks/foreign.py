"""Disks with foreign content.

Where the program that makes a format isn't available everywhere, the bytes by which libblkid recognizes it are written.
"""

from __future__ import annotations

import lzma
import os
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import UUID

from image_builder.node.disk import layout
from image_builder.node.disk.model import Disk
from tests.support.disks.loop_devices import LARGE, MIB, SMALL, mounted, run, write

# 8 MiB volumes made by mkntfs 2022.10.3, with the readme of Azure's disks (ntfscp); one has another file as well.
NTFS = Path(__file__).parents[2] / "data/ntfs"


def _mkfs(kind: str) -> Callable[[Disk, Path], None]:
    def make(disk: Disk, folder: Path) -> None:
        run(f"mkfs.{kind}", "-q", "-L", "data", disk.path)
        with mounted(disk, kind, folder) as root:
            (root / "precious").write_bytes(b"x" * 100_000)

    return make


def _dirty(kind: str) -> Callable[[Disk, Path], None]:
    """Return a function that makes a filesystem whose machine lost power: the last sync is only in the journal."""

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


def luks(disk: Disk, _folder: Path) -> None:
    head = struct.pack(">6sH32s32s32sII20s32sI40s", b"LUKS\xba\xbe", 1, b"aes", b"xts-plain64", b"sha256",
                       4096, 32, b"", b"", 1000, b"01234567-89ab-cdef-0123-456789abcdef")  # fmt: skip
    write(disk, 0, head)


def lvm(disk: Disk, _folder: Path) -> None:
    rest = (struct.pack("<I8s", 32, b"LVM2 001") + b"0123456789abcdef0123456789abcdef").ljust(492, b"\0")
    checksum = zlib.crc32(rest, 0xF597A6CF ^ 0xFFFFFFFF) ^ 0xFFFFFFFF
    write(disk, 512, struct.pack("<8sQI", b"LABELONE", 1, checksum) + rest)


def raid_superblock(uuid: bytes, name: bytes, devices: int, number: int) -> bytes:
    """Return a version 1.2 superblock with a correct checksum (linux/raid/md_p.h)."""
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


def luks2(disk: Disk, _folder: Path) -> None:
    """Write both headers of a volume whose headers have the maximum size (libcryptsetup, luks2.h)."""
    for offset, magic in ((0, b"LUKS\xba\xbe"), (4 * MIB, b"SKUL\xba\xbe")):
        head = struct.pack(">6sHQQ48s32s64s40s48sQ", magic, 2, 4 * MIB, 3, b"", b"sha256", b"",
                           b"01234567-89ab-cdef-0123-456789abcdef", b"", offset)  # fmt: skip
        write(disk, offset, head)


def _ntfs(disk: Disk, _folder: Path) -> None:
    """Write an MBR with one partition of type 7, like Azure's, and the start of an NTFS volume in it."""
    write(disk, 446, _mbr_entry(7, 128, disk.bytes // 512 - 128))
    write(disk, 65536, b"\xeb\x52\x90NTFS    " + struct.pack("<HB", 512, 8))


def _mbr_entry(kind: int, first: int, sectors: int) -> bytes:
    entry = struct.pack("<B3sB3sII", 0, b"\0\0\0", kind, b"\0\0\0", first, sectors)
    return entry.ljust(64, b"\0") + b"\x55\xaa"


def azure(kind: str, *, is_large: bool = False) -> Callable[[Disk, Path], None]:
    """Return a function that makes a disk like Azure's: the NTFS volume ``kind``, on a large disk after a reserved
    partition.
    """

    def make(disk: Disk, _folder: Path) -> None:
        volume = lzma.decompress((NTFS / f"{kind}.img.xz").read_bytes())
        first = 4096 if is_large else 128
        if is_large:
            reserved = ("e3c9e316-0b5c-4db8-817d-f92df00215ae", 34, 2048)
            data = ("ebd0a0a2-b9e5-4433-87c0-68b6b72699c7", first, len(volume) // 512)
            _write_gpt(disk, [(UUID(name).bytes_le, at, count) for name, at, count in (reserved, data)])
        else:
            write(disk, 446, _mbr_entry(7, first, len(volume) // 512))
        write(disk, first * 512, volume)

    return make


def gpt(count: int) -> Callable[[Disk, Path], None]:
    def make(disk: Disk, _folder: Path) -> None:
        kind = bytes.fromhex("af3dc60f838472478e793d69d8477de4")  # Linux data
        _write_gpt(disk, [(kind, 2048 * n, 2048) for n in range(1, count + 1)])

    return make


def _write_gpt(disk: Disk, partitions: Sequence[tuple[bytes, int, int]]) -> None:
    """Write both partition tables; each partition is its type, its first sector and its number of sectors."""
    last = disk.bytes // 512 - 1
    entries = b"".join(
        struct.pack("<16s16sQQQ72s", kind, bytes([n] * 16), first, first + sectors - 1, 0, b"")
        for n, (kind, first, sectors) in enumerate(partitions, 1)
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


def _raw(offset: int) -> Callable[[Disk, Path], None]:
    def make(disk: Disk, _folder: Path) -> None:
        write(disk, offset % disk.bytes, random.Random(1).randbytes(4096))

    return make


def _ours_with_files(disk: Disk, folder: Path) -> None:
    """Make a filesystem with our label and UUID, but with files and no marker: only half of the proof."""
    run("mkfs.ext4", "-q", "-L", "local", "-U", layout.new_uuid(), disk.path)
    with mounted(disk, "ext4", folder) as root:
        (root / "precious").write_bytes(b"x" * 100_000)


# How the disk is made, its size, and what the reason must name.
FOREIGN: dict[str, tuple[Callable[[Disk, Path], None], int, str]] = {
    "ext4": (_mkfs("ext4"), SMALL, ": ext4"),
    "ext4 with our label and a journal to replay": (_dirty("ext4"), SMALL, ": ext4"),
    "xfs": (_mkfs("xfs"), LARGE, ": xfs"),
    "xfs with our label and a log to replay": (_dirty("xfs"), LARGE, ": xfs"),
    "btrfs": (_btrfs, SMALL, ": btrfs"),
    "LUKS": (luks, SMALL, ": crypto_LUKS"),
    "LVM": (lvm, SMALL, ": LVM2_member"),
    "RAID member": (_raid, SMALL, ": linux_raid_member"),
    # libblkid 2.41 needs more than uberblocks to recognize a pool: the disk is still foreign, but unnamed.
    "ZFS": (_zfs, SMALL, ": data without any signature"),
    "swap": (_swap, SMALL, ": swap"),
    "NTFS": (_ntfs, SMALL, ": dos"),
    "GPT with one partition": (gpt(1), SMALL, ": PMBR and gpt"),
    "GPT with three partitions": (gpt(3), SMALL, ": PMBR and gpt"),
    "data at the begin": (_raw(0), SMALL, ": data without any signature"),
    "data in the first MiB": (_raw(MIB - 4096), SMALL, ": data without any signature"),
    "data at the end": (_raw(-4096), SMALL, ": data without any signature"),
    "ours without a marker": (
        _ours_with_files,
        SMALL,
        ": ext4 with our label and files, but without our marker",
    ),
}
