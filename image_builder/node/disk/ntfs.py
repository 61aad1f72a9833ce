"""The names in the root directory of an NTFS volume, from its bytes: no driver, no mount, no writes.

It supports only what a freshly formatted, hardly used volume contains: an index in the root's own record, or in blocks
that this record points to. Every number comes from the disk and is checked against a limit before it is used; anything
unusual is an UnreadableError. Names and layout: libfsntfs, "New Technologies File System (NTFS)"; ntfs.h.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Read = Callable[[int, int], bytes]
"""Return ``count`` bytes from ``offset`` of the volume; raises OSError where there are fewer."""

_ROOT, _FIRST_OF_USERS = 5, 16
_ATTRIBUTE_LIST, _DATA, _INDEX_ROOT, _INDEX_ALLOCATION, _BITMAP = 0x20, 0x80, 0x90, 0xA0, 0xB0
_END, _FILE_NAME = 0xFFFFFFFF, 0x30
_I30 = "$I30"
_IN_USE, _IS_DIRECTORY = 1, 2
_SUBNODE, _LAST = 1, 2
_DOS_NAME = 2
# Flags of a FILE_NAME: a directory has an index; a link or a mount point has a reparse point.
_HAS_INDEX, _HAS_REPARSE = 0x1000_0000, 0x400
_RECORD_BYTES = (1024, 4096)
# A directory whose index exceeds these limits contains more than a platform's readme.
_INDEX_LIMIT, _RUN_LIMIT = 1 << 20, 64


class UnreadableError(ValueError):
    """The volume isn't NTFS, is damaged, or contains something that this reader doesn't support."""


@dataclass(frozen=True)
class Entry:
    """A file in the root directory, by one of its names."""

    name: str
    record: int
    is_dos_name: bool
    is_directory: bool
    is_link: bool

    @property
    def is_metafile(self) -> bool:
        """Return whether it is NTFS's own, such as ``$MFT``, or the root: the first records are reserved for these."""
        return self.record < _FIRST_OF_USERS and (self.name.startswith("$") or self.name == ".")


@dataclass(frozen=True)
class _Volume:
    read: Read
    cluster: int
    clusters: int
    record: int
    mft: int

    def data(self, runs: list[tuple[int, int]], offset: int, count: int) -> bytes:
        """Return ``count`` bytes from ``offset`` of the data in runs of clusters."""
        data = b""
        for first, length in runs:
            size = length * self.cluster
            if offset < size and len(data) < count:
                part = min(size - offset, count - len(data))
                data += self.read(first * self.cluster + offset, part)
                offset += part
            offset = max(0, offset - size)
        _need(len(data) == count, "what should be there lies beyond its clusters")
        return data


@dataclass(frozen=True)
class _Attribute:
    """An attribute: the ``value`` of a resident one; otherwise ``runs`` of clusters and the ``size`` of their data."""

    type: int
    name: str
    value: bytes | None
    runs: list[tuple[int, int]]
    size: int


def root(read: Read, size: int) -> list[Entry]:
    """Return the names in the root directory of a volume of ``size`` bytes. Raises UnreadableError, OSError."""
    try:
        volume = _volume(read, size)
        first = _attributes(volume, _record(read(volume.mft * volume.cluster, volume.record)))
        mft = _only(first, _DATA, "")
        _need(mft.value is None, "the MFT is resident")
        raw = volume.data(mft.runs, _ROOT * volume.record, volume.record)
        return list(_directory(volume, _attributes(volume, _record(raw, flags=_IS_DIRECTORY))))
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise UnreadableError(f"a structure is cut short: {error}") from error


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise UnreadableError(otherwise)


def _volume(read: Read, size: int) -> _Volume:
    boot = read(0, 512)
    _need(boot[3:11] == b"NTFS    " and boot[510:] == b"\x55\xaa", "there is no boot sector of NTFS")
    (sector,) = struct.unpack_from("<H", boot, 11)
    _need(sector in (512, 1024, 2048, 4096), f"sectors of {sector} bytes")
    cluster = sector * (boot[13] if boot[13] <= 0x80 else _power(boot[13], 0))
    _need(0 < cluster <= 2 << 20, f"clusters of {cluster} bytes")
    sectors, mft = struct.unpack_from("<QQ", boot, 40)
    _need(0 < sectors * sector <= size, "it is larger than its partition")
    record = _power(boot[64], boot[64] * cluster)
    _need(record in _RECORD_BYTES, f"records of {record} bytes")
    clusters = sectors * sector // cluster
    _need(mft * cluster + record <= clusters * cluster, "the MFT is beyond the volume")
    return _Volume(read, cluster, clusters, record, mft)


def _power(byte: int, plain: int) -> int:
    """Return ``plain``, or, if the signed byte is negative, two to the power of its absolute value, at most 2^31."""
    return plain if byte < 0x80 else 1 << min(31, 256 - byte)


def _repaired(raw: bytes, magic: bytes) -> bytes:
    """Return a record with the last two bytes of each 512 restored; their stand-ins reveal an incomplete write."""
    _need(raw[:4] == magic, f"no {magic.decode()} where one should be")
    data = bytearray(raw)
    offset, count = struct.unpack_from("<HH", raw, 4)
    strides = len(raw) // 512
    _need(count == strides + 1 and offset + 2 * count <= 510, "its update sequence has another length")
    number, *saved = (raw[offset + 2 * n : offset + 2 * n + 2] for n in range(count))
    for n, good in enumerate(saved, 1):
        _need(raw[512 * n - 2 : 512 * n] == number, "a record was written in part")
        data[512 * n - 2 : 512 * n] = good
    return bytes(data)


def _record(raw: bytes, flags: int = 0) -> bytes:
    data = _repaired(raw, b"FILE")
    (use,) = struct.unpack_from("<H", data, 22)
    (base,) = struct.unpack_from("<Q", data, 32)
    _need(use & (_IN_USE | _IS_DIRECTORY) == _IN_USE | flags, "a record has another use than it should")
    _need(base == 0, "a record belongs to another one")
    return data


def _attributes(volume: _Volume, record: bytes) -> list[_Attribute]:
    (offset,) = struct.unpack_from("<H", record, 20)
    (used,) = struct.unpack_from("<I", record, 24)
    _need(offset >= 48 and used <= len(record), "a record is longer than it is")
    attributes = list[_Attribute]()
    while True:
        (kind,) = struct.unpack_from("<I", record, offset)
        if kind == _END:
            return attributes
        (length,) = struct.unpack_from("<I", record, offset + 4)
        _need(length >= 24 and length % 8 == 0 and offset + length <= used, "an attribute is out of bounds")
        _need(kind != _ATTRIBUTE_LIST, "attributes are in other records, too")
        attributes.append(_attribute(volume, kind, record[offset : offset + length]))
        offset += length


def _attribute(volume: _Volume, kind: int, raw: bytes) -> _Attribute:
    is_apart, name_length, name_offset, flags = struct.unpack_from("<BBHH", raw, 8)
    name = raw[name_offset : name_offset + 2 * name_length].decode("utf-16-le")
    _need(len(name.encode("utf-16-le")) == 2 * name_length, "a name is out of bounds")
    if not is_apart:
        length, at = struct.unpack_from("<IH", raw, 16)
        _need(at + length <= len(raw), "a value is out of bounds")
        return _Attribute(kind, name, raw[at : at + length], [], length)
    first, _last, at = struct.unpack_from("<QQH", raw, 16)
    (size,) = struct.unpack_from("<Q", raw, 48)
    if kind not in (_DATA, _INDEX_ALLOCATION, _BITMAP):
        return _Attribute(kind, name, None, [], size)  # not used here
    _need(first == 0 and not flags, "an attribute is compressed, encrypted or only a part")
    return _Attribute(kind, name, None, list(_runs(volume, raw[at:])), size)


def _runs(volume: _Volume, raw: bytes) -> Iterator[tuple[int, int]]:
    """Yield runs of clusters: each begins with the widths of its length and of its distance from the previous run."""
    at = where = 0
    for _ in range(_RUN_LIMIT):
        if not raw[at]:
            return
        width, distance = raw[at] & 15, raw[at] >> 4
        _need(0 < width <= 8 and 0 < distance <= 8, "a run of clusters is sparse or too long")
        _need(at + 1 + width + distance < len(raw), "a run of clusters is out of bounds")
        length = int.from_bytes(raw[at + 1 : at + 1 + width], "little")
        at += 1 + width
        where += int.from_bytes(raw[at : at + distance], "little", signed=True)
        at += distance
        _need(length > 0 and where >= 0 and where + length <= volume.clusters, "clusters beyond the volume")
        yield where, length
    raise UnreadableError("it is in too many pieces")


def _only(attributes: list[_Attribute], kind: int, name: str) -> _Attribute:
    fitting = [attribute for attribute in attributes if (attribute.type, attribute.name) == (kind, name)]
    _need(len(fitting) == 1, f"{len(fitting)} attributes of type {kind:#x} where one is needed")
    return fitting[0]


def _directory(volume: _Volume, attributes: list[_Attribute]) -> Iterator[Entry]:
    """Yield the entries of a directory: those in its record, and those in blocks in use."""
    head = _only(attributes, _INDEX_ROOT, _I30).value
    _need(head is not None, "the root of the index is not resident")
    assert head is not None
    kind, _collation, block = struct.unpack_from("<III", head, 0)
    _need(kind == _FILE_NAME, "the root directory is sorted by something else than names")
    _need(block in (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536), f"index blocks of {block} bytes")
    referred = set[int]()
    yield from _entries(head[16:], referred)
    used = dict[int, bytes]()
    if any(attribute.type == _INDEX_ALLOCATION and attribute.name == _I30 for attribute in attributes):
        used = _blocks(
            volume, _only(attributes, _INDEX_ALLOCATION, _I30), _only(attributes, _BITMAP, _I30), block
        )
    for data in used.values():
        yield from _entries(data[24:], referred)
    _need(referred <= set(used), "a part of the index is missing")


def _blocks(volume: _Volume, index: _Attribute, bitmap: _Attribute, size: int) -> dict[int, bytes]:
    """Return the blocks of an index that are in use, by the number with which entries refer to them."""
    _need(index.value is None and index.size <= _INDEX_LIMIT, "the root directory is too large")
    count = index.size // size
    bits = bitmap.value
    if bits is None:
        _need(bitmap.size <= _INDEX_LIMIT, "the root directory is too large")
        bits = volume.data(bitmap.runs, 0, bitmap.size)
    _need(8 * len(bits) >= count, "a part of the index is missing")
    unit = volume.cluster if volume.cluster <= size else 512
    blocks = {}
    for n in range(count):
        if bits[n // 8] >> n % 8 & 1:
            data = _repaired(volume.data(index.runs, n * size, size), b"INDX")
            (number,) = struct.unpack_from("<Q", data, 16)
            _need(number == n * size // unit, "a block of the index is at another's place")
            blocks[number] = data
    return blocks


def _entries(node: bytes, referred: set[int]) -> Iterator[Entry]:
    """Yield the entries of a node, and add the numbers of the blocks below it to ``referred``."""
    at, end = struct.unpack_from("<II", node, 0)
    _need(16 <= at <= end <= len(node), "a node of the index is out of bounds")
    while True:
        record, length, key, flags = struct.unpack_from("<QHHH", node, at)
        # Require exactly the length of the contents: a longer entry would hide the next one.
        least = 16 + (0 if flags & _LAST else key) + 7 & ~7
        _need(length == least + 8 * (flags & _SUBNODE) and at + length <= end, "an entry has another length")
        if flags & _SUBNODE:
            referred.add(*struct.unpack_from("<Q", node, at + length - 8))
        if flags & _LAST:
            _need(at + length == end, "something follows the last entry")
            return
        yield _entry(record & (1 << 48) - 1, node[at + 16 : at + 16 + key])
        at += length


def _entry(record: int, key: bytes) -> Entry:
    (parent,) = struct.unpack_from("<Q", key, 0)
    flags, _reparse, length, space = struct.unpack_from("<IIBB", key, 56)
    _need(parent & (1 << 48) - 1 == _ROOT, "a name belongs to another directory")
    _need(length > 0 and 66 + 2 * length == len(key) and space <= 3, "a name is out of bounds")
    name = key[66 : 66 + 2 * length].decode("utf-16-le")
    return Entry(name, record, space == _DOS_NAME, bool(flags & _HAS_INDEX), bool(flags & _HAS_REPARSE))
