"""The contents of Azure's resource disk, on volumes made by mkntfs and ntfs-3g 2022.10.3, and on damaged ones.

``tests/data/ntfs.tar.xz`` holds volumes with a readme, with a file or two next to it, and with other cluster sizes.
"""

from __future__ import annotations

import lzma
import struct
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from uuid import UUID

import pytest

from image_builder.node.disk import azure, ntfs
from image_builder.node.disk.azure import Partition
from image_builder.node.disk.model import Disk, Observation, Signature

TESTS = Path(__file__).resolve().parents[2]
MIB = 1 << 20
README = "DATALOSS_WARNING_README.txt"
RESERVED, DATA = UUID("e3c9e316-0b5c-4db8-817d-f92df00215ae"), UUID("ebd0a0a2-b9e5-4433-87c0-68b6b72699c7")
LINUX = UUID("0fc63daf-8483-4772-8e79-3d69d8477de4")

# What a volume holds besides NTFS's own files, and whether it is blank.
VOLUMES: Mapping[str, tuple[set[str], bool]] = {
    "readme": ({README}, True),
    "files": ({README, "precious.txt"}, False),
    "system": ({README, "System Volume Information"}, True),
    "system_file": ({README, "System Volume Information"}, False),
    "emptied": ({README}, True),
    "many": ({README, *(f"file-with-a-rather-long-name-{n}" for n in range(1, 301))}, False),
    "clusters_512": ({README}, True),
    "clusters_64k": ({README}, True),
    "sectors_4k": ({README}, True),
    "directory": ({README, "data"}, False),
    "dollar": ({README, "$precious"}, False),
    "link": ({README, "other.txt"}, False),
    "symlink": ({README, "other"}, False),
    "dos_name": ({README, "DATALO~1.TXT"}, True),
    "empty": (set(), False),
    "readme_directory": ({README}, False),
}


@pytest.fixture(scope="module")
def volumes() -> Mapping[str, bytes]:
    old = {
        name: lzma.decompress((TESTS / f"data/ntfs/{name}.img.xz").read_bytes())
        for name in ("readme", "files")
    }
    with tarfile.open(TESTS / "data/ntfs.tar.xz") as archive:
        members = {item.name.removesuffix(".img"): archive.extractfile(item) for item in archive}
        return {**old, **{name: file.read() for name, file in members.items() if file}}


def reader(data: bytes | bytearray) -> ntfs.Read:
    """Return a function that reads as from a disk: reading beyond its end is an error."""

    def read(offset: int, count: int) -> bytes:
        assert offset >= 0 and 0 <= count <= 2 * MIB, "no read is larger than it must be"
        if offset + count > len(data):
            raise OSError(5, "Input/output error")
        return bytes(data[offset : offset + count])

    return read


def test_there_is_a_test_for_each_volume(volumes: Mapping[str, bytes]) -> None:
    assert set(volumes) == set(VOLUMES)


@pytest.mark.parametrize("name", VOLUMES)
def test_names_in_the_root_directory(volumes: Mapping[str, bytes], name: str) -> None:
    data = volumes[name]
    entries = ntfs.root(reader(data), len(data))
    names, is_blank = VOLUMES[name]
    assert {one.name for one in entries if not one.is_metafile} == names
    assert {"$MFT", "$Bitmap", "."} <= {one.name for one in entries if one.is_metafile}
    assert azure.is_blank(entries) == is_blank


def entry(name: str, record: int = 64, **values: bool) -> ntfs.Entry:
    plain = ntfs.Entry(name, record, is_dos_name=False, is_directory=False, is_link=False)
    return replace(plain, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("entries", "is_blank"),
    [
        ([entry(README)], True),
        ([entry(README.lower())], True),
        ([entry(README), entry("$MFT", 0), entry(".", 5, is_directory=True)], True),
        ([entry(README), entry("$RECYCLE.BIN", 70, is_directory=True)], False),
        ([entry(README), entry("MFT", 0)], False),
        ([entry(README), entry("precious", 65)], False),
        ([entry(README), entry("PRECIO~1", 65, is_dos_name=True)], False),
        ([entry(README), entry("DATALO~1.TXT", is_dos_name=True)], True),
        ([entry(README), entry("system volume information", 65, is_directory=True)], True),
        ([entry(README), entry("system volume information", 65, is_directory=True, is_link=True)], False),
        ([entry(README, is_link=True)], False),
        ([entry(README, is_directory=True)], False),
        ([entry("other.txt")], False),
        ([], False),
    ],
)
def test_the_readme_alone_is_blank(entries: list[ntfs.Entry], is_blank: bool) -> None:
    assert azure.is_blank(entries) == is_blank


@pytest.mark.parametrize("name", ["files", "many", "directory", "system_file"])
def test_damage_never_makes_a_volume_blank(volumes: Mapping[str, bytes], name: str) -> None:
    """Whichever bytes are wrong, reading ends: either a person's file is seen, or the volume is unreadable."""
    data = volumes[name]
    random = Random(name)
    places = [0, *_found(data, b"FILE", 6), *_found(data, b"INDX", 20)]
    outcomes = set()
    for _ in range(600):
        wrong = {
            random.choice(places) + random.randrange(1024): random.choice(
                (0, 1, 0x7F, 0x80, 0xFF, random.getrandbits(8))
            )
            for _ in range(random.choice((1, 1, 2, 8)))
        }
        try:
            assert not azure.is_blank(ntfs.root(damaged(data, wrong), len(data))), wrong
            outcomes.add("names")
        except (ntfs.UnreadableError, OSError) as error:
            outcomes.add(type(error).__name__)
    assert {"names", "UnreadableError"} <= outcomes


def damaged(data: bytes, wrong: Mapping[int, int]) -> ntfs.Read:
    plain = reader(data)

    def read(offset: int, count: int) -> bytes:
        part = bytearray(plain(offset, count))
        for at, value in wrong.items():
            if offset <= at < offset + count:
                part[at - offset] = value
        return bytes(part)

    return read


def _found(data: bytes, magic: bytes, most: int) -> list[int]:
    return [at for at in range(0, len(data) - 4096, 512) if data[at : at + 4] == magic][:most]


@pytest.mark.parametrize("size", [0, 511, 512, 4096, 65536, MIB])
def test_a_volume_that_is_cut_short_is_not_read(volumes: Mapping[str, bytes], size: int) -> None:
    with pytest.raises((ntfs.UnreadableError, OSError)):
        ntfs.root(reader(volumes["readme"][:size]), size)


@pytest.mark.parametrize("fill", [b"\0", b"\xff", b"FILE", b"INDX\x28\x00\x09\x00"])
def test_a_boot_sector_before_anything_else_is_not_read(volumes: Mapping[str, bytes], fill: bytes) -> None:
    data = volumes["readme"][:512].ljust(len(volumes["readme"]), fill[:1] or b"\0")
    body = (fill * (len(data) // len(fill)))[512 : len(data)]
    with pytest.raises(ntfs.UnreadableError):
        ntfs.root(reader(data[:512] + body), len(data))


def mbr(*entries: tuple[int, int, int]) -> bytes:
    packed = b"".join(struct.pack("<4xB3xII", *one) for one in entries)
    return (bytes(446) + packed.ljust(64, b"\0") + b"\x55\xaa").ljust(65536, b"\0")


def gpt(*entries: tuple[UUID, int, int], **wrong: int) -> bytes:
    table = b"".join(
        struct.pack("<16s16sQQ80x", kind.bytes_le, bytes([n + 1] * 16), start, start + count - 1)
        for n, (kind, start, count) in enumerate(entries)
    ).ljust(128 * 128, b"\0")
    sum_of_entries = zlib.crc32(table) ^ wrong.get("entries", 0)
    words = (wrong.get("here", 1), 9999, 34, 9000, bytes(16), 2, 128, wrong.get("width", 128), sum_of_entries)
    plain = struct.pack("<8sIIII QQQQ 16s QIII", b"EFI PART", 0x10000, 92, 0, 0, *words)
    header = plain[:16] + struct.pack("<I", zlib.crc32(plain) ^ wrong.get("header", 0)) + plain[20:]
    return (mbr((0xEE, 1, 0xFFFFFFFF))[:512] + header.ljust(512, b"\0") + table).ljust(65536, b"\0")


SIZE = 16384 * 512
ONE, TWO = Partition(2048 * 512, 4096 * 512), Partition(4096 * 512, 8192 * 512)
MSR = Partition(34 * 512, 1024 * 512, is_reserved=True)
TABLES: Mapping[str, tuple[bytes, list[Partition]]] = {
    "one NTFS": (mbr((7, 2048, 4096)), [ONE]),
    "the second entry": (mbr((0, 0, 0), (7, 2048, 4096)), [ONE]),
    "Linux": (mbr((0x83, 2048, 4096)), []),
    "two": (mbr((7, 2048, 1024), (7, 4096, 8192)), []),
    "beyond the disk": (mbr((7, 2048, 16384)), []),
    "over the table": (mbr((7, 0, 4096)), []),
    "empty": (mbr((7, 2048, 0)), []),
    "no table": (bytes(65536), []),
    "GPT, one": (gpt((DATA, 2048, 4096)), [ONE]),
    "GPT, reserved and one": (gpt((RESERVED, 34, 1024), (DATA, 4096, 8192)), [MSR, TWO]),
    "GPT, in another order": (gpt((DATA, 4096, 8192), (RESERVED, 34, 1024)), [MSR, TWO]),
    "GPT, reserved alone": (gpt((RESERVED, 34, 1024)), []),
    "GPT, reserved last": (gpt((DATA, 2048, 4096), (RESERVED, 8192, 1024)), []),
    "GPT, two volumes": (gpt((DATA, 34, 1024), (DATA, 4096, 8192)), []),
    "GPT, three": (gpt((RESERVED, 34, 1024), (DATA, 2048, 1024), (DATA, 4096, 8192)), []),
    "GPT, Linux": (gpt((RESERVED, 34, 1024), (LINUX, 4096, 8192)), []),
    "GPT, overlap": (gpt((RESERVED, 34, 8192), (DATA, 4096, 8192)), []),
    "GPT, header's sum": (gpt((DATA, 2048, 4096), header=1), []),
    "GPT, entries' sum": (gpt((DATA, 2048, 4096), entries=1), []),
    "GPT, entries of another length": (gpt((DATA, 2048, 4096), width=256), []),
    "GPT, a copy": (gpt((DATA, 2048, 4096), here=2), []),
    "GPT and another": (mbr((0xEE, 1, 100), (7, 2048, 4096)), []),
    "protective without a GPT": (mbr((0xEE, 1, 0xFFFFFFFF)), []),
}


@pytest.mark.parametrize(("head", "found"), TABLES.values(), ids=TABLES)
def test_tables_of_partitions(head: bytes, found: list[Partition]) -> None:
    assert azure.partitions(reader(head.ljust(SIZE, b"\0")), SIZE) == found


def seen(
    *kinds: str, local: bool = True, size: int = SIZE, partitions: int = 1, **values: object
) -> Observation:
    disk = Disk("sdb", Path("/dev/sdb"), size, local=local)
    names = tuple(f"sdb{n + 1}" for n in range(partitions))
    made = Observation(disk, tuple(Signature(kind) for kind in kinds), names)
    return replace(made, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "may_be"),
    [
        (seen("dos"), True),
        (seen("gpt", "PMBR"), True),
        (seen("gpt", "PMBR", partitions=2), True),
        (seen("gpt"), True),
        (seen("dos", partitions=0), True),
        (seen("dos", local=False), False),
        (seen(), False),
        (seen("PMBR"), False),
        (seen("dos", "gpt"), False),
        (seen("dos", "ext4"), False),
        (seen("ext4"), False),
        (seen("atari"), False),
        (seen("gpt", "PMBR", partitions=3), False),
        (seen("dos", mounts=("/mnt",)), False),
        (seen("dos", holders=("dm-0",)), False),
        (seen("dos", swap=True), False),
    ],
)
def test_which_disks_are_looked_into(one: Observation, may_be: bool) -> None:
    assert azure.may_be(one) == may_be


@pytest.mark.parametrize(
    ("volume", "shown", "content"),
    [("readme", 1, "blank"), ("files", 1, "files"), ("readme", 0, "blank"), ("readme", 2, ""), ("", 1, "")],
)
def test_one_partition(volumes: Mapping[str, bytes], volume: str, shown: int, content: str) -> None:
    inside = volumes[volume] if volume else bytes(8 * MIB)
    data = mbr((7, 128, len(inside) // 512))[: 128 * 512] + inside
    assert azure.content(reader(data), seen("dos", size=len(data), partitions=shown)) == content


@pytest.mark.parametrize(
    ("volume", "shown", "content"),
    [("readme", 2, "blank"), ("files", 2, "files"), ("readme", 0, "blank"), ("readme", 1, ""), ("", 2, "")],
)
def test_a_reserved_partition_and_one(
    volumes: Mapping[str, bytes], volume: str, shown: int, content: str
) -> None:
    inside = volumes[volume] if volume else bytes(8 * MIB)
    table = gpt((RESERVED, 34, 94), (DATA, 128, len(inside) // 512))
    data = table[: 128 * 512] + inside + bytes(MIB)
    assert azure.content(reader(data), seen("gpt", "PMBR", size=len(data), partitions=shown)) == content


def test_a_volume_that_cannot_be_read_is_not_blank(volumes: Mapping[str, bytes]) -> None:
    inside = volumes["readme"][:512].ljust(8 * MIB, b"\0")
    data = mbr((7, 128, len(inside) // 512))[: 128 * 512] + inside
    assert azure.content(reader(data), seen("dos", size=len(data))) == "unreadable"


@pytest.mark.parametrize("name", ["files", "many"])
def test_an_index_that_lacks_a_part_is_not_read(volumes: Mapping[str, bytes], name: str) -> None:
    """The bitmap says that no block is in use, but the root's record points to some."""
    data = volumes[name]
    cluster = struct.unpack_from("<H", data, 11)[0] * data[13]
    record = struct.unpack_from("<Q", data, 48)[0] * cluster + 5 * 1024
    at = record + struct.unpack_from("<H", data, record + 20)[0]
    while struct.unpack_from("<I", data, at)[0] != 0xB0:
        at += struct.unpack_from("<I", data, at + 4)[0]
    bits = at + struct.unpack_from("<H", data, at + 20)[0]
    wrong = {bits + n: 0 for n in range(8)}
    with pytest.raises(ntfs.UnreadableError, match="a part of the index is missing"):
        ntfs.root(damaged(data, wrong), len(data))


def _volume(data: bytes, cluster: int) -> ntfs._Volume:
    return ntfs._Volume(reader(data), cluster, len(data) // cluster, 1024, 4)


@pytest.mark.parametrize(("offset", "is_read"), [(47, False), (48, True), (56, True)])
def test_attributes_begin_after_the_records_head(offset: int, is_read: bool) -> None:
    record = bytearray(1024)
    struct.pack_into("<H", record, 20, offset)
    struct.pack_into("<I", record, 24, 1024)
    struct.pack_into("<I", record, offset, 0xFFFFFFFF)
    if is_read:
        assert ntfs._attributes(_volume(b"", 512), bytes(record)) == []
        return
    with pytest.raises(ntfs.UnreadableError):
        ntfs._attributes(_volume(b"", 512), bytes(record))


def _block(number: int, size: int = 4096) -> bytes:
    """Return a block of an index with its update sequence: the last two bytes of each 512 are a one."""
    raw = bytearray(size)
    struct.pack_into("<4sHH", raw, 0, b"INDX", 40, size // 512 + 1)
    struct.pack_into("<Q", raw, 16, number)
    for end in (42, *range(512, size + 1, 512)):
        raw[end - 2 : end] = b"\x01\x00"
    return bytes(raw)


@pytest.mark.parametrize(("cluster", "unit"), [(4096, 4096), (512, 512), (65536, 512)])
def test_blocks_of_an_index_are_counted_in_clusters_or_sectors(cluster: int, unit: int) -> None:
    """As many bits as blocks are enough; a block that isn't in use isn't read."""
    data = (b"x" * 4096 + b"".join(_block(n * 4096 // unit) for n in range(1, 8))).ljust(65536, b"\0")
    volume = _volume(data, cluster)
    index = ntfs._Attribute(0xA0, "$I30", None, [(0, volume.clusters)], 8 * 4096)
    blocks = ntfs._blocks(volume, index, ntfs._Attribute(0xB0, "$I30", b"\xfe", [], 1), 4096)
    assert list(blocks) == [n * 4096 // unit for n in range(1, 8)]
    for wrong in (replace(index, size=9 * 4096), replace(index, value=b"")):
        with pytest.raises(ntfs.UnreadableError):
            ntfs._blocks(volume, wrong, ntfs._Attribute(0xB0, "$I30", b"\xfe", [], 1), 4096)


@pytest.mark.parametrize(
    ("runs", "found"),
    [
        (b"\x11\x04\x0c\x00", [(12, 4)]),
        (b"\x11\x02\x0c\x11\x03\xf4\x00", [(12, 2), (0, 3)]),  # a distance may be negative
        (b"\x11\x05\x0c\x00", None),
        (b"\x11\x00\x0c\x00", None),
        (b"\x11\x01\x0c\x11\x01\xf3\x00", None),
        (b"\x01\x04\x00\x00", None),
        (b"\x11\x04", None),
    ],
)
def test_runs_of_clusters_are_within_the_volume(runs: bytes, found: list[tuple[int, int]] | None) -> None:
    volume = ntfs._Volume(reader(b""), 512, 16, 1024, 4)
    if found is not None:
        assert list(ntfs._runs(volume, runs)) == found
        return
    with pytest.raises(ntfs.UnreadableError):
        list(ntfs._runs(volume, runs))


def test_a_volume_may_fill_its_partition(volumes: Mapping[str, bytes]) -> None:
    data = volumes["readme"]
    size = struct.unpack_from("<H", data, 11)[0] * struct.unpack_from("<Q", data, 40)[0]
    assert azure.is_blank(ntfs.root(reader(data), size))
    with pytest.raises(ntfs.UnreadableError):
        ntfs.root(reader(data), size - 1)
