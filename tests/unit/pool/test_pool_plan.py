"""The plan document: the same for the same input, refused if it was changed or is too old."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from image_builder.errors import DefinitionError
from image_builder.pool.plan import plan as plans
from image_builder.pool.plan.plan import PlannedFrom, compare, stale
from image_builder.pool.plan.policy import Policy
from tests.support.pools.simulated.rollouts import make, make_hosts


def test_the_same_input_gives_the_same_bytes() -> None:
    first, again = (plans.render(make(120)) for _ in range(2))
    assert first == again
    assert plans.render(make(120, Policy(join_rate=4.0))) != first
    assert plans.parse(first, "p") == make(120)


def test_it_lies_on_the_disk_as_it_was_made(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    plans.save(make(50), path)
    assert plans.load(path) == make(50)
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"budget": "2%"', '"budget": "90%"', "was changed after it was made"),
        ('"address": "10.0.0.7"', '"address": "10.0.0.8"', "was changed after it was made"),
        ('"format": 1', '"format": 2', "format: Input should be 1"),
        ('"join_rate": 5.0', '"join_rate": "fast"', "policy.join_rate: Input should be a valid number"),
        ('"join_rate": 5.0', '"join_rate": 5.0, "speed": 1', "policy.speed: Extra inputs are not permitted"),
    ],
)
def test_a_plan_that_was_edited_is_refused(old: str, new: str, reason: str) -> None:
    text = plans.render(make(20)).decode()
    assert old in text
    with pytest.raises(DefinitionError, match=reason):
        plans.parse(text.replace(old, new, 1).encode(), "p.json")


def test_all_that_is_wrong_is_told_at_once() -> None:
    document = json.loads(plans.render(make(20)))
    document["waves"][1]["slices"][0][0] = document["waves"][0]["slices"][0][0]
    with pytest.raises(DefinitionError) as refused:
        plans.parse(json.dumps(document).encode(), "p.json")
    assert len(refused.value.problems) == 3
    for text in ("more than one wave", "or vice versa", "its digest"):
        assert text in str(refused.value)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'{"format": 1}'])
def test_what_is_no_plan_is_refused(data: bytes) -> None:
    with pytest.raises(DefinitionError):
        plans.parse(data, "p.json")


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError, match="none.json.*No such file"):
        plans.load(tmp_path / "none.json")


def test_an_inventory_that_moved_on_makes_a_plan_stale() -> None:
    plan, hosts = make(20), make_hosts(20)
    assert stale(plan, plan.inventory, hosts) == []
    (problem,) = stale(plan, PlannedFrom(paths=("hosts.yml",), digest="other"), hosts[1:])
    assert problem.reason == "is older than the inventory: 1 gone"
    (problem,) = stale(plan, PlannedFrom(paths=("hosts.yml",), digest="other"), hosts)
    assert problem.reason == "is older than the inventory: no host differs, a file does"


def test_another_machine_under_a_known_name_is_told_from_a_moved_one() -> None:
    first, two, three, four = make_hosts(4)
    named = two.model_copy(update={"vm_id": "b"})
    before = [first, named, three]
    now = [
        first.model_copy(update={"address": "10.9.9.9"}),
        named.model_copy(update={"address": "10.9.9.8"}),
        three.model_copy(update={"zone": "9"}),
        four,
    ]
    difference = compare(before, now)
    assert difference.replaced == (first.name,)
    assert difference.changed == (two.name, three.name)
    assert difference.new == (four.name,) and difference.gone == ()
    assert compare([named], [named.model_copy(update={"vm_id": "c"})]).replaced == (two.name,)
    assert not any(compare(before, before))
