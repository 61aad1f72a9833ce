"""`plan --explain` names what changed, and where."""

from __future__ import annotations

import json

import pytest

from image_builder.bake.plan.explain import explain
from image_builder.bake.plan.model import Plan, StagePlan, value_digests
from image_builder.canonical import JSON


def _plan(option: JSON, code: str) -> Plan:
    options = {"variables": value_digests({"system_swap": option})}
    system = StagePlan("system", "layer", options, {"roles/system/a.j2": code})
    seal = StagePlan("seal", "seal", {}, {"x": "1"}, (system.id,))
    return Plan("worker", (system, seal))


def _parts(plan: Plan) -> dict[str, dict[str, object]]:
    return {s.name: dict(s.parts) for s in plan.stages}


def test_nothing_changed() -> None:
    assert explain(_plan("off", "1"), _parts(_plan("off", "1"))) == []


def test_a_changed_file_is_named_where_it_counts() -> None:
    first, second = explain(_plan("off", "2"), _parts(_plan("off", "1")))
    assert (first.stage, first.changes) == ("system", ("file roles/system/a.j2 changed",))
    assert (second.stage, second.changes) == ("seal", ("below: a stage that it stands on changed",))


@pytest.mark.parametrize("part", ["variables", "values"])
@pytest.mark.parametrize("former", [False, True], ids=["today", "values as earlier versions recorded them"])
@pytest.mark.parametrize("secret", ["off", 1234, {"token": "S3cret"}], ids=str)
def test_a_changed_variable_is_named_without_its_values(part: str, former: bool, secret: JSON) -> None:
    def system(value: JSON, name: str = "system_swap") -> StagePlan:
        return StagePlan("system", "layer", {part: value_digests({name: value})})

    def changes(now: StagePlan) -> list[str]:
        options = {part: {"system_swap": secret}} if former else system(secret).options
        before = {"system": {**now.parts, "options": options}}
        return [c for r in explain(Plan("worker", (now,)), before) for c in r.changes]

    assert changes(system(secret)) == []
    assert changes(system("on")) == ["variable system_swap changed"]
    assert changes(system(secret, "system_zram")) == [
        "variable system_swap is gone",
        "variable system_zram is new",
    ]
    assert not any(word in json.dumps(system(secret).parts) for word in ("off", "1234", "S3cret", "token"))


def test_a_first_build() -> None:
    assert [r.changes for r in explain(_plan("off", "1"), {})] == [("it was never built before",)] * 2


def test_a_stage_that_another_build_made_is_not_called_new() -> None:
    plan = _plan("off", "1")
    assert [r.stage for r in explain(plan, {}, {plan.stage("system").id})] == ["seal"]
