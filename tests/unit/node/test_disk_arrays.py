"""Missing array members: which boots count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from image_builder.node import status
from image_builder.node.disk import apply, arrays, probe
from image_builder.node.disk.command import _settle
from image_builder.node.disk.model import Disk, Observation, Places, Raid, Survey
from tests.unit.node.test_disk_decide import OTHER, SETTINGS, array, blank, disk, member, ours

UUID = "6e6f6465-2d64-8000-8123-456789abcdef"


class Node:
    def __init__(self, base: Path) -> None:
        self.note, self.ordered = base / "state/absence.json", base / "state/reboot.json"

    def boot(self, boot_id: str, *roles: int) -> bool:
        """Return whether the same members were missing at an earlier boot."""
        seen = [
            Observation(
                Disk(f"n{n}", Path(f"/dev/n{n}"), 1, serial=f"S{n}"), raid=Raid(UUID, "local", 0, 8, n)
            )
            for n in roles
        ]
        return arrays.is_absence_old(Survey(tuple(seen)), boot_id, self.note, self.ordered)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_second_boot_with_the_same_members_counts(node: Node) -> None:
    assert [node.boot("a", 0, 1), node.boot("a", 0, 1), node.boot("b", 1, 0)] == [False, False, True]


def test_a_boot_with_other_members_begins_anew(node: Node) -> None:
    assert [node.boot("a", 0, 1), node.boot("b", 0, 2), node.boot("c", 0, 2)] == [False, False, True]


def test_a_reboot_that_the_node_ordered_does_not_count(node: Node) -> None:
    assert not node.boot("a", 0)
    status.record_reboot("a", node.ordered)
    assert not node.boot("b", 0)
    status.record_reboot("b", node.ordered)
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


def _boots(seen: Survey, base: Path, monkeypatch: pytest.MonkeyPatch, of_size: int = 0) -> list[str]:
    """Return the actions of three consecutive boots with the same disks; nothing is ever formatted."""
    places = Places(
        etc=base,
        release=base / "release",
        boot_id=base / "boot",
        absence=base / "absence.json",
        reboot=base / "reboot.json",
        cloud=base,
    )
    settings = replace(SETTINGS, mount_point=str(base / "local"))
    monkeypatch.setattr(probe, "observe_all", lambda *_: seen)
    monkeypatch.setattr(apply, "carry_out", lambda *_: None)
    actions = []
    for boot in "abc":
        places.boot_id.write_text(boot)
        actions.append(_settle(settings, [], list, places, of_size)["action"])
    return actions


def test_members_that_stay_away_are_given_up_at_the_second_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seen in (Survey((member(0),)), Survey((member(0), member(1, uuid=OTHER)))):
        assert _boots(seen, tmp_path, monkeypatch)[:2] == ["none", "rebuild"]
        (tmp_path / "absence.json").unlink()


def test_disks_that_a_size_should_have_are_waited_for_until_the_second_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three, eight = (Survey(tuple(map(blank, range(number)))) for number in (3, 8))
    assert _boots(three, tmp_path, monkeypatch, 8) == ["none", "format", "format"]
    (tmp_path / "absence.json").unlink()
    status.record_reboot("a", tmp_path / "reboot.json")
    assert _boots(three, tmp_path, monkeypatch, 8)[1] == "format", (
        "also if the node ended the first one itself"
    )
    assert _boots(eight, tmp_path, monkeypatch, 8) == ["format"] * 3


def test_no_boot_gives_up_a_whole_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (member(0), member(1))
    for seen in (
        Survey((ours(), ours(number=1))),
        Survey((ours(), member(1, uuid=OTHER))),
        Survey((*whole, member(2, uuid=OTHER)), array(disk(0), disk(1))),
    ):
        assert _boots(seen, tmp_path, monkeypatch) == ["none"] * 3


def test_what_is_whole_again_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _boots(Survey((member(0),)), tmp_path, monkeypatch)[0] == "none"
    assert (tmp_path / "absence.json").exists()
    assert _boots(Survey((blank(),)), tmp_path, monkeypatch) == ["format"] * 3
    assert not (tmp_path / "absence.json").exists()
