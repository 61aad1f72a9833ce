"""`plan --explain` names what changed, and where."""

from __future__ import annotations

from image_builder.bake.plan.explain import explain
from image_builder.bake.plan.model import Plan, StagePlan


def _plan(option: str, code: str) -> Plan:
    system = StagePlan("system", "layer", {"variables": {"system_swap": option}}, {"roles/system/a.j2": code})
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


def test_a_changed_variable_is_shown_with_both_values() -> None:
    first, *_ = explain(_plan("on", "1"), _parts(_plan("off", "1")))
    assert first.changes == ("option variables.system_swap changed: off -> on",)


def test_a_first_build() -> None:
    assert [r.changes for r in explain(_plan("off", "1"), {})] == [("it was never built before",)] * 2


def test_a_stage_that_another_build_made_is_not_called_new() -> None:
    plan = _plan("off", "1")
    assert [r.stage for r in explain(plan, {}, {plan.stage("system").id})] == ["seal"]
