"""The order in which layers are promoted. Pure: ``data_root`` finds the links.

The pause image comes first, since no pod starts without it; then the images that a node must have; then the layers
that were read when the bake's rehearsal started a container; then the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from image_builder.node.data_root import Link
from image_builder.node.store import Image

PAUSE, REQUIRED, READ, REST = range(4)


@dataclass(frozen=True)
class Item:
    """A link to be replaced with a copy that takes ``bytes`` on the disk."""

    link: Link
    bytes: int
    rank: int


def ranks(images: Sequence[Image], rehearsal: Mapping[str, Any], pause: str) -> dict[str, tuple[int, int]]:
    """Return each layer once: its rank, and its place within the rank.

    ``rehearsal`` is the contents of ``rehearsal.json``; malformed parts count as not recorded. ``pause`` is the pause
    image's reference.
    """
    order: dict[str, tuple[int, int]] = {}
    for rank, diff_id in _in_order(images, rehearsal, pause):
        order.setdefault(diff_id, (rank, len(order)))
    return order


def _in_order(images: Sequence[Image], rehearsal: Mapping[str, Any], pause: str) -> Iterator[tuple[int, str]]:
    for image in images:
        if image.ref == pause:
            yield from ((PAUSE, diff_id) for diff_id in image.diff_ids)
    for image in images:
        if image.is_essential:
            yield from ((REQUIRED, diff_id) for diff_id in image.diff_ids)
    for diff_id in _read_at_rehearsal(rehearsal):
        yield READ, diff_id
    for image in images:
        yield from ((REST, diff_id) for diff_id in image.diff_ids)


def _read_at_rehearsal(rehearsal: Mapping[str, Any]) -> Iterator[str]:
    images = rehearsal.get("images")
    for image in images if isinstance(images, list) else []:
        read = image.get("read") if isinstance(image, dict) else None
        yield from (d for d in (read if isinstance(read, list) else []) if isinstance(d, str))


def items(
    links: Iterable[Link], order: Mapping[str, tuple[int, int]], sizes: Mapping[str, int]
) -> list[Item]:
    """Return the items to promote, in order. ``sizes`` are the bytes of each layer's files by diff id.

    Two links may lead to one layer: the same files above different parents. Each link becomes a separate copy, just as
    a pull would unpack each separately. A layer's directory comes before the small files that describe it; files whose
    layer is unknown come last.
    """
    last = (REST, len(order))

    def place(link: Link) -> tuple[tuple[int, int], bool, str]:
        return order.get(link.diff_id, last), not link.directory, str(link.path)

    return [
        Item(
            link,
            sizes.get(link.diff_id, link.bytes) if link.directory else link.bytes,
            order.get(link.diff_id, last)[0],
        )
        for link in sorted(links, key=place)
    ]


def layers_left(links: Iterable[Link]) -> list[str]:
    """Return the layers that are still in the store, each once; a link without a known layer is listed by its name."""
    return sorted({link.diff_id or link.path.name for link in links})


@dataclass(frozen=True)
class Room:
    """A filesystem's size and its space for unprivileged users, in bytes and files; ``files`` is 0 if unlimited."""

    total: int
    free: int
    files: int
    free_files: int


# The kubelet evicts below 5 % free inodes.
_RESERVED_FILES_PERCENT = 5


def refusal(room: Room, needed: int, in_flight: int, reserve_percent: float) -> str:
    """Return why a copy of ``needed`` bytes must not begin; empty if it may.

    ``in_flight`` are the bytes that copies in flight may still take. The reserve keeps the kubelet from evicting pods
    and deleting images (15 % and 85 % by default).
    """
    reserve = room.total * reserve_percent / 100
    after = room.free - in_flight - needed
    if after < reserve:
        return (
            f"{_megabytes(needed)} more would leave {_megabytes(max(0, after))} of {_megabytes(room.total)} free, "
            f"less than the {reserve_percent:g} % kept for pods"
        )
    if room.files and room.free_files < room.files * _RESERVED_FILES_PERCENT / 100:
        return f"{room.free_files} of {room.files} inodes are free, less than {_RESERVED_FILES_PERCENT} %"
    return ""


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.0f} MB"
