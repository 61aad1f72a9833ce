"""The order of promotion, and when it stops for lack of space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from image_builder.node.data_root import Link
from image_builder.node.promote.plan import (
    PAUSE,
    READ,
    REQUIRED,
    REST,
    Room,
    items,
    layers_left,
    ranks,
    refusal,
)
from image_builder.node.store import Image


def image(ref: str, *diff_ids: str, pin: bool = False, required: bool = False) -> Image:
    return Image(ref, "", "", "", pin, diff_ids, required=required, mode="reference")


IMAGES = [
    image("lab/big:1", "base", "big-1", "big-2"),
    image("lab/agent:1", "base", "agent", required=True),
    image("lab/pause:3", "pause", pin=True),
    image("lab/other:1", "base", "other"),
]
REHEARSAL = {"images": [{"ref": "lab/big:1", "seconds": 0.4, "read": ["base", "big-2"]}]}


def link(name: str, diff_id: str, *, directory: bool = True, size: int = 0) -> Link:
    return Link(Path("/data", name), Path("/store/layers", diff_id or name), diff_id, directory, size)


def order(links: list[Link], rehearsal: dict[str, Any] = REHEARSAL, pause: str = "lab/pause:3") -> list[str]:
    return [item.link.path.name for item in items(links, ranks(IMAGES, rehearsal, pause), {})]


def test_pause_then_required_then_read_then_rest() -> None:
    found = ranks(IMAGES, REHEARSAL, "lab/pause:3")
    assert sorted(found, key=lambda d: found[d]) == ["pause", "base", "agent", "big-2", "big-1", "other"]
    assert {d: rank for d, (rank, _) in found.items()} == {
        "pause": PAUSE,
        "base": REQUIRED,
        "agent": REQUIRED,
        "big-2": READ,
        "big-1": REST,
        "other": REST,
    }


def test_each_link_is_done_once_whatever_names_its_layer() -> None:
    links = [
        link("o", "other"),
        link("b1", "base"),
        link("p", "pause"),
        link("b2", "base"),
        link("g", "big-2"),
    ]
    assert order(links) == ["p", "b1", "b2", "g", "o"]


def test_a_layer_comes_before_what_describes_it_and_the_unknown_comes_last() -> None:
    links = [
        link("blob", "", directory=False),
        link("strange", "not-in-the-manifest"),
        link("a-tar-split", "base", directory=False),
        link("z-diff", "base"),
        link("o", "other"),
    ]
    assert order(links) == ["z-diff", "a-tar-split", "o", "strange", "blob"]


@pytest.mark.parametrize(
    "rehearsal",
    [{}, {"images": None}, {"images": ["x"]}, {"images": [{"read": 3}]}, {"images": [{"read": [3, None]}]}],
)
def test_a_rehearsal_that_recorded_nothing_leaves_the_other_ranks(rehearsal: dict[str, Any]) -> None:
    assert order([link("g", "big-2"), link("h", "big-1"), link("a", "agent")], rehearsal) == ["a", "h", "g"]


def test_without_a_pause_image_the_required_come_first() -> None:
    assert order([link("p", "pause"), link("a", "agent")], pause="lab/none:1") == ["a", "p"]


def test_a_layer_takes_what_the_manifest_says_and_a_file_what_it_has() -> None:
    links = [link("d", "base"), link("f", "base", directory=False, size=7), link("s", "strange", size=11)]
    found = items(links, ranks(IMAGES, {}, ""), {"base": 5000})
    assert [(item.link.path.name, item.bytes) for item in found] == [("d", 5000), ("f", 7), ("s", 11)]


def test_what_is_left_names_each_layer_once() -> None:
    links = [link("b2", "base"), link("b1", "base"), link("t", "base", directory=False), link("blob", "")]
    assert layers_left(links) == ["base", "blob"]


GB = 10**9


@pytest.mark.parametrize(
    ("free", "needed", "in_flight", "allowed"),
    [
        (50 * GB, 35 * GB, 0, True),  # exactly the reserve is left
        (50 * GB, 35 * GB + 1, 0, False),
        (50 * GB, 20 * GB, 15 * GB, True),
        (50 * GB, 20 * GB, 15 * GB + 1, False),
        (15 * GB, 0, 0, True),
        (15 * GB - 1, 0, 0, False),
        (0, 0, 0, False),
    ],
)
def test_a_copy_begins_only_when_the_reserve_stays_free(
    free: int, needed: int, in_flight: int, allowed: bool
) -> None:
    room = Room(total=100 * GB, free=free, files=1000, free_files=1000)
    assert (refusal(room, needed, in_flight, 15) == "") is allowed


def test_the_refusal_says_what_would_be_left() -> None:
    assert refusal(Room(100 * GB, 20 * GB, 0, 0), 8 * GB, 0, 15) == (
        "8000 MB more would leave 12000 MB of 100000 MB free, less than the 15 % kept for pods"
    )


def test_a_filesystem_without_inodes_is_full_too() -> None:
    assert "49 of 1000 inodes" in refusal(Room(100 * GB, 90 * GB, 1000, 49), 1, 0, 15)
    assert refusal(Room(100 * GB, 90 * GB, 1000, 50), 1, 0, 15) == ""
    assert refusal(Room(100 * GB, 90 * GB, 0, 0), 1, 0, 15) == ""  # btrfs and others don't count inodes
