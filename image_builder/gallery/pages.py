"""A disk as pages: which ranges of a sparse file are sent, and what a service that has some of them still lacks.

A page has 512 bytes, a request at most 4 MiB (Put Page). Ranges are (start, end), in bytes. The last 512 bytes of a
fixed VHD are its footer, without which Azure makes no disk of an upload: it is no part of the ranges, but sent last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from image_builder.bake.formats.vhd import FOOTER_SIZE
from image_builder.system import sparse

Range = tuple[int, int]

PAGE = 512
LARGEST = 4 << 20


def data_ranges(disk: Path) -> tuple[Range, ...]:
    """Return the ranges of a VHD before its footer that hold data, each as large as one request may be."""
    with disk.open("rb") as file:
        end_of_data = disk.stat().st_size - FOOTER_SIZE
        extents = [
            (start, min(end, end_of_data)) for start, end in sparse.extents(file.fileno(), end_of_data)
        ]
    return tuple(_cut(merged(extents)))


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the same pages as few ranges, in order: whole pages, and neighbours as one."""
    result: list[Range] = []
    whole = [(start // PAGE * PAGE, -(-end // PAGE) * PAGE) for start, end in ranges if start < end]
    for start, end in sorted(whole):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def lacking(planned: Iterable[Range], present: Iterable[Range]) -> list[Range]:
    """Return those of the planned ranges that aren't wholly present."""
    whole = merged(present)
    return [
        (start, end) for start, end in planned if not any(low <= start and end <= high for low, high in whole)
    ]


def beyond(present: Iterable[Range], planned: Iterable[Range]) -> list[Range]:
    """Return the parts of what is present that aren't planned, each as large as one request may be."""
    rest = merged(present)
    for low, high in merged(planned):
        rest = [
            part
            for start, end in rest
            for part in ((start, min(end, low)), (max(start, high), end))
            if part[0] < part[1]
        ]
    return list(_cut(rest))


def _cut(ranges: Iterable[Range]) -> Iterator[Range]:
    for start, end in ranges:
        at = start
        while at < end:
            following = min(end, (at // LARGEST + 1) * LARGEST)
            yield at, following
            at = following
