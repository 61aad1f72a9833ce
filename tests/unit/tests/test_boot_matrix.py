"""The boot matrix as data: the rows agree with one another, and the page with the record."""

from __future__ import annotations

import json

import pytest

from tests.boot import foreign, page, steps
from tests.boot.engines import ENGINES
from tests.boot.matrix import RECORD
from tests.boot.node import Local
from tests.boot.rows import NIGHT, ROWS, chain


def test_names_are_unique_and_every_need_is_an_earlier_row() -> None:
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names))
    for number, row in enumerate(ROWS):
        assert set(row.needs) <= set(names[:number])


def test_a_row_brings_those_that_it_stands_on_and_no_more() -> None:
    assert [row.name for row in chain(["power cut while seeding"])] == [
        "power cut while formatting",
        "power cut while seeding",
    ]
    brought = [row.name for row in chain(["two boots of one image"])]
    assert brought[-2:] == ["no local disk, required", "two boots of one image"]
    assert "boot after the power cuts" in brought and "deallocation" not in brought
    assert not [name for name in brought if "suite" in name]
    with pytest.raises(KeyError, match="no such"):
        chain(["no such"])


def test_disk_of_a_row_that_reads_its_file_is_given() -> None:
    on_disk = {
        steps.cut_while_formatting,
        steps.cut_while_seeding,
        steps.cut_while_promoting,
        steps.copy_while_seeding,
        steps.break_disk,
        steps.grow,
    }
    assert [row.name for row in (*ROWS, *NIGHT) if set(row.steps) & on_disk and not row.disks] == []


def test_mismatch_names_the_fact_and_both_values() -> None:
    found = {"a": 1, "b": "x", "c": []}
    assert steps.mismatches({"a": 1, "b": ("x", "y"), "c": []}, found) == []
    assert steps.mismatches({"a": 2, "b": ("y",), "d": True}, found) == [
        "a: 1, not 2",
        "b: 'x', not ('y',)",
        "d: None, not True",
    ]


def test_what_an_engine_can_not_do_is_asked_of_the_other_one() -> None:
    """Facts of one engine replace those for both, and name only what some step finds."""
    for row in (*ROWS, *NIGHT):
        for engine, facts in row.of_engine.items():
            assert engine in ENGINES and row.wanted(engine) == {**row.expected, **facts} != row.expected
            assert set(facts) <= set(row.expected)
    row = next(row for row in ROWS if row.name == "boot after the disk pressure")
    assert (row.wanted("docker")["seed"], row.wanted("containerd")["seed"]) == ("repaired", "current")


def test_foreign_kinds_are_those_of_the_loops_and_two_more_need_a_kernel() -> None:
    assert len(foreign.KINDS) >= 13 and {"ext4", "xfs", "btrfs", "LUKS", "ZFS", "swap"} <= set(foreign.KINDS)
    assert Local("x").serial == "local0"


def test_page_says_what_the_record_says() -> None:
    assert page.PAGE.read_text() == page.text(json.loads(RECORD.read_bytes()))
