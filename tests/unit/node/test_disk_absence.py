"""Members that are missing: which boots count."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.node import reboots
from image_builder.node.disk import absence
from image_builder.node.disk.model import Disk, Observation, Raid, Seen

UUID = "6e6f6465-2d64-8000-8123-456789abcdef"


class Node:
    def __init__(self, base: Path) -> None:
        self.note, self.ordered = base / "state/absence.json", base / "state/reboot.json"

    def boot(self, boot_id: str, *roles: int) -> bool:
        """Return whether the same members were missing before."""
        seen = [
            Observation(
                Disk(f"n{n}", Path(f"/dev/n{n}"), 1, serial=f"S{n}"), raid=Raid(UUID, "local", 0, 8, n)
            )
            for n in roles
        ]
        return absence.lasts(Seen(tuple(seen)), boot_id, self.note, self.ordered)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_second_boot_with_the_same_members_counts(node: Node) -> None:
    assert [node.boot("a", 0, 1), node.boot("a", 0, 1), node.boot("b", 1, 0)] == [False, False, True]


def test_a_boot_with_other_members_begins_anew(node: Node) -> None:
    assert [node.boot("a", 0, 1), node.boot("b", 0, 2), node.boot("c", 0, 2)] == [False, False, True]


def test_a_reboot_that_the_node_ordered_does_not_count(node: Node) -> None:
    assert not node.boot("a", 0)
    reboots.record("a", node.ordered)
    assert not node.boot("b", 0)
    reboots.record("b", node.ordered)
    assert not node.boot("c", 0)
    assert node.boot("d", 0), "the one after it was somebody else's"


def test_a_note_of_orders_that_cannot_be_read_counts_for_nothing(node: Node) -> None:
    assert not node.boot("a", 0)
    node.ordered.write_text("{")
    assert not node.boot("b", 0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"members": []}', "5"])
def test_a_damaged_note_is_no_earlier_boot(node: Node, text: str) -> None:
    node.note.parent.mkdir()
    node.note.write_text(text)
    assert [node.boot("a", 0), node.boot("b", 0)] == [False, True]


def test_what_is_whole_again_is_forgotten(node: Node) -> None:
    assert not node.boot("a", 0)
    absence.forget(node.note)
    absence.forget(node.note)
    assert not node.boot("b", 0)
