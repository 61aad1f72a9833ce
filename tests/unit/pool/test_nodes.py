"""A node's answers about itself over SSH: its image, and whether it is at work."""

from __future__ import annotations

import pytest

from image_builder.pool.plan.model import OK, ended
from image_builder.pool.reach.reach import Answer
from image_builder.pool.scale_set.verdict import Node
from image_builder.pool.steps.nodes import image_in, work_in


def answer(stdout: str, status: int | None = 0) -> Answer:
    outcome = ended("timeout", "no way there") if status is None else OK
    return Answer(outcome, status, stdout.encode(), b"", 0.1)


def test_a_node_tells_its_boot_and_its_build() -> None:
    assert image_in(answer("b-1\n0123456789ab\n")) == Node("b-1", "0123456789ab")
    assert image_in(answer("", None)) == ended("timeout", "no way there")
    for other in (answer("b-1\n"), answer("b-1\n0123456789ab\n", 1), answer("")):
        nameless = image_in(other)
        assert not isinstance(nameless, Node) and "which image" in nameless.detail


@pytest.mark.parametrize("silent", [answer(""), answer("lease train", 1), answer("", None)])
def test_a_node_that_says_nothing_is_judged_by_its_pods(silent: Answer) -> None:
    assert work_in(silent) == ""


def test_a_node_names_what_it_works_on() -> None:
    assert work_in(answer("lease train 17\n2 users of /dev/nvidia-uvm\n")) == (
        "its node says: lease train 17, 2 users of /dev/nvidia-uvm"
    )
