"""A disk as pages: which ranges of a sparse file are sent, and which of them a service still lacks.

A page has 512 bytes, a request at most 4 MiB (Put Page). Ranges are (start, end), in bytes. The last 512 bytes of a
fixed VHD are its footer, without which Azure makes no disk from an upload: it isn't in the ranges, but is sent last.
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
# A smaller hole is sent along with its neighbors: another request costs more than these zeros.
_SMALLEST_HOLE = 64 << 10


def data_ranges(disk: Path) -> tuple[Range, ...]:
    """Return the ranges of a VHD before its footer that hold data, each no larger than one request allows."""
    with disk.open("rb") as file:
        end_of_data = disk.stat().st_size - FOOTER_SIZE
        extents = [
            (start, min(end, end_of_data)) for start, end in sparse.extents(file.fileno(), end_of_data)
        ]
    return tuple(_cut(merged(extents, _SMALLEST_HOLE)))


def merged(ranges: Iterable[Range], gap: int = 0) -> list[Range]:
    """Return the same pages as few ranges of whole pages, in order; those at most ``gap`` bytes apart are merged."""
    result: list[Range] = []
    whole = [(start // PAGE * PAGE, -(-end // PAGE) * PAGE) for start, end in ranges if start < end]
    for start, end in sorted(whole):
        if result and start <= result[-1][1] + gap:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def lacking(planned: Iterable[Range], present: Iterable[Range]) -> list[Range]:
    """Return the planned ranges that aren't entirely present."""
    whole = merged(present)
    starts = [start for start, _ in whole]

    def is_present(start: int, end: int) -> bool:
        number = bisect_right(starts, start) - 1
        return number >= 0 and end <= whole[number][1]

    return [(start, end) for start, end in planned if not is_present(start, end)]


def beyond(present: Iterable[Range], planned: Iterable[Range]) -> list[Range]:
    """Return the parts of the present ranges that aren't planned, each no larger than one request allows."""
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
