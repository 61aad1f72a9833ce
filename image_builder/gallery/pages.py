"""A disk as pages: which ranges of a sparse file are sent, and what a service that has some of them still lacks.

A page has 512 bytes, a request at most 4 MiB (Put Page). Ranges are (start, end), in bytes. The last 512 bytes of a
fixed VHD are its footer, without which Azure makes no disk of an upload: it is no part of the ranges, but sent last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path

from image_builder.bake.formats.vhd import FOOTER_SIZE
from image_builder.system import sparse

Range = tuple[int, int]

PAGE = 512
LARGEST = 4 << 20
# A hole that is smaller is sent with its neighbours: a request more costs more than these zeros.
_SMALLEST_HOLE = 64 << 10


def data_ranges(disk: Path) -> tuple[Range, ...]:
    """Return the ranges of a VHD before its footer that hold data, each as large as one request may be."""
    with disk.open("rb") as file:
        end_of_data = disk.stat().st_size - FOOTER_SIZE
        extents = [
            (start, min(end, end_of_data)) for start, end in sparse.extents(file.fileno(), end_of_data)
        ]
    return tuple(_cut(merged(extents, _SMALLEST_HOLE)))


def merged(ranges: Iterable[Range], gap: int = 0) -> list[Range]:
    """Return the same pages as few ranges, in order: whole pages, and as one what is no further apart than ``gap``."""
    result: list[Range] = []
    whole = [(start // PAGE * PAGE, -(-end // PAGE) * PAGE) for start, end in ranges if start < end]
    for start, end in sorted(whole):
        if result and start <= result[-1][1] + gap:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def lacking(planned: Iterable[Range], present: Iterable[Range]) -> list[Range]:
    """Return those of the planned ranges that aren't wholly present."""
    whole = merged(present)
    starts = [start for start, _ in whole]

    def is_present(start: int, end: int) -> bool:
        number = bisect_right(starts, start) - 1
        return number >= 0 and end <= whole[number][1]

    return [(start, end) for start, end in planned if not is_present(start, end)]


def beyond(present: Iterable[Range], planned: Iterable[Range]) -> list[Range]:
    """Return the parts of what is present that aren't planned, each as large as one request may be."""
    plan, rest = merged(planned), []
    ends = [end for _, end in plan]
    for start, end in merged(present):
        number, at = bisect_right(ends, start), start
        while number < len(plan) and plan[number][0] < end:
            rest.append((at, plan[number][0]))
            at = plan[number][1]
            number += 1
        rest.append((at, end))
    return list(_cut((low, high) for low, high in rest if low < high))


def _cut(ranges: Iterable[Range]) -> Iterator[Range]:
    for start, end in ranges:
        at = start
        while at < end:
            following = min(end, (at // LARGEST + 1) * LARGEST)
            yield at, following
            at = following
