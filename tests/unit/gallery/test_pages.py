"""Ranges of a sparse disk: none is lost, none is larger than a request, and none contains the footer."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from image_builder.gallery.pages import PAGE, Range, beyond, data_ranges, lacking, merged

# The maximum that Put Page accepts.
REQUEST = 4 << 20
RANGES = st.lists(
    st.tuples(st.integers(0, 64), st.integers(1, 24)).map(lambda r: (r[0] * PAGE, (r[0] + r[1]) * PAGE)),
    max_size=8,
)


def _pages(ranges: list[Range]) -> set[int]:
    return {page for start, end in ranges for page in range(start // PAGE, end // PAGE)}


def test_the_data_of_a_sparse_file_is_cut_where_requests_end_and_its_footer_is_left_out(
    tmp_path: Path,
) -> None:
    disk = tmp_path / "disk"
    size = 64 << 20
    with disk.open("wb") as file:
        for offset, length in ((0, 4096), (10 << 20, 9 << 20), (size - 4096, 4096)):
            file.seek(offset)
            file.write(b"x" * length)
        file.write(b"f" * 512)
    ranges = data_ranges(disk)
    assert ranges[0] == (0, 4096) and ranges[-1] == (size - 4096, size)
    assert all(
        0 < end - start <= REQUEST and start // REQUEST == (end - 1) // REQUEST for start, end in ranges
    )
    assert merged(ranges) == [(0, 4096), (10 << 20, 19 << 20), (size - 4096, size)]


def test_small_holes_are_sent_and_large_ones_are_not(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with disk.open("wb") as file:
        for offset in (0, 32 << 10, 256 << 10):
            file.seek(offset)
            file.write(b"x" * 4096)
        file.seek(1 << 20)
        file.write(b"f" * 512)
    assert data_ranges(disk) == ((0, 36 << 10), (256 << 10, 260 << 10))


def test_a_disk_of_many_extents_is_compared_at_once() -> None:
    ranges = [(n * 8192, n * 8192 + 4096) for n in range(100_000)]
    assert lacking(ranges, ranges) == [] and beyond(ranges, ranges) == []


def test_a_disk_without_data_has_no_ranges(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with disk.open("wb") as file:
        file.seek(20 << 20)
        file.write(b"f" * 512)
    assert data_ranges(disk) == ()


def test_merged_ranges_are_whole_pages() -> None:
    assert merged([(1000, 1100), (512, 1024), (4096, 4097), (5000, 5000)]) == [(512, 1536), (4096, 4608)]


@settings(max_examples=40)
@given(RANGES, RANGES)
def test_what_is_beyond_is_what_no_plan_has(present: list[Range], planned: list[Range]) -> None:
    assert _pages(beyond(present, planned)) == _pages(present) - _pages(planned)


@settings(max_examples=40)
@given(RANGES, RANGES)
def test_a_range_is_lacking_unless_all_its_pages_are_there(
    planned: list[Range], present: list[Range]
) -> None:
    there = _pages(present)
    assert lacking(planned, present) == [r for r in planned if not _pages([r]) <= there]
