"""The nodes to retest, from Node objects only: taken out one after another, checked again, then told to run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from image_builder.cluster.gate.decide import Action, answered, decide, may_work
from image_builder.cluster.gate.model import ADMITTED, Node, Rules, node_from
from image_builder.cluster.gate.retest import (
    ANSWER_SECONDS,
    LEAST_SECONDS,
    Limits,
    Outcome,
    Retester,
    Step,
    cap,
    is_away,
    is_open,
    outcomes,
    plan,
)
from image_builder.node.net.kube import Client
from image_builder.node.preflight.model import ANSWER, CONDITION, GRANTED, HELD, REFUSED, WISH, WITHDRAWN

BOOT, NONCE = "11111111-2222-3333-4444-555555555555", "0123456789abcdef"
RULES = Rules()
LIMITS = Limits(share=0.02, period=100, window=50, least=5, failing=0.2)
NOW = 1_700_000_000.0


def node(
    name: str = "a",
    *,
    status: str = "True",
    retest: str = "",
    wish: dict[str, Any] | None = None,
    answer: dict[str, Any] | None = None,
    reported: str = "2023-11-14T22:13:19Z",  # a second before NOW
    taints: tuple[str, ...] = (),
) -> Node:
    annotations = {}
    if wish is not None:
        annotations[WISH] = json.dumps(
            {"boot_id": BOOT, "nonce": NONCE, "tested": 0, "until": NOW + 3600, **wish}
        )
    if answer is not None:
        annotations[ANSWER] = json.dumps({"boot_id": BOOT, "nonce": NONCE, "at": NOW - 10, **answer})
    message = f"boot={BOOT}{f' retest={retest}' if retest else ''} image=b passed in 41 s"
    condition = {"type": CONDITION, "status": status, "message": message, "lastHeartbeatTime": reported}
    return node_from(
        {
            "metadata": {"name": name, "annotations": annotations},
            "spec": {"taints": [{"key": RULES.taint, "value": v, "effect": "NoSchedule"} for v in taints]},
            "status": {"nodeInfo": {"bootID": BOOT}, "conditions": [condition]},
        },
        RULES,
    )


def annotated(annotations: dict[str, str]) -> Node:
    return node_from({"metadata": {"name": "a", "annotations": annotations}}, RULES)


FLEET = [node(f"other-{n}") for n in range(99)]


def steps(*nodes: Node, limits: Limits = LIMITS) -> list[tuple[str, Step]]:
    return [(item.name, step) for item, step in plan([*nodes, *FLEET], NOW, limits)]


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "1", "NaN", "9" * 400, '"x"', "null"])
def test_an_annotation_that_is_no_sense_is_that_nodes_own_business(text: str) -> None:
    wish = '{"boot_id": "b", "nonce": "n", "tested": %s, "until": 0}'
    answer = '{"boot_id": "b", "nonce": "n", "state": "held", "at": %s}'
    subject = annotated({WISH: text, ANSWER: text, ADMITTED: text})
    assert (subject.wish, subject.answer, subject.admitted_boot) == (None, None, "")
    # As the time inside one of them, the number 1 makes sense.
    subject, is_sense = annotated({WISH: wish % text, ANSWER: answer % text}), text == "1"
    assert (subject.wish is not None, subject.answer is not None) == (is_sense, is_sense)


def test_a_node_is_held_then_told() -> None:
    assert steps(node(wish={})) == [("a", Step.HOLD)]
    held = node(wish={}, answer={"state": HELD}, taints=("retest",))
    assert steps(held) == [("a", Step.GRANT)]
    assert held.is_under_test and decide(held, RULES) is Action.NONE
    granted = node(wish={}, answer={"state": GRANTED}, taints=("retest",))
    assert steps(granted) == [] and decide(granted, RULES) is Action.NONE


@pytest.mark.parametrize(
    ("status", "action"), [("True", Action.ADMIT), ("False", Action.NONE), ("Unknown", Action.NONE)]
)
def test_its_report_lets_it_in_or_keeps_it_out(status: str, action: Action) -> None:
    subject = node(wish={}, answer={"state": GRANTED}, retest=NONCE, status=status, taints=("retest",))
    assert not subject.is_under_test
    assert decide(subject, RULES) is action
    assert is_away(subject) is (status != "True")
    assert steps(subject) == []


@pytest.mark.parametrize("state", [REFUSED, WITHDRAWN])
def test_no_answer_but_a_yes_keeps_a_node_out(state: str) -> None:
    subject = node(wish={}, answer={"state": state}, taints=("retest",))
    assert decide(subject, RULES) is Action.ADMIT
    assert steps(subject) == []


def test_what_is_of_another_boot_counts_for_nothing() -> None:
    started_again = node(wish={"boot_id": "other"}, answer={"boot_id": "other", "state": GRANTED})
    assert not started_again.is_under_test and may_work(started_again)
    assert steps(started_again) == []


@pytest.mark.parametrize(
    "subject",
    [
        node(wish={}, status="False"),
        node(wish={}, retest=NONCE),
        node(wish={"until": NOW + LEAST_SECONDS - 1}),
        replace(node(wish={}), admitted_boot=BOOT),
        node(wish={"tested": "never"}),
        node(),
    ],
    ids=[
        "did not pass",
        "was answered by its report",
        "looks no more",
        "let in by hand",
        "unreadable",
        "asks nothing",
    ],
)
def test_who_is_not_tested(subject: Node) -> None:
    assert steps(subject) == []


def test_a_node_that_asks_too_soon_is_told_no() -> None:
    assert steps(node(wish={"tested": NOW - 99})) == [("a", Step.REFUSE)]


def test_an_answer_that_is_never_given_ends() -> None:
    for state, before in ((HELD, [("a", Step.GRANT)]), (GRANTED, [])):
        for late, step in ((0, before), (1, [("a", Step.WITHDRAW)])):
            answer = {"state": state, "at": NOW - ANSWER_SECONDS - late}
            assert steps(node(wish={}, answer=answer, taints=("retest",))) == step


def test_who_failed_keeps_its_place_among_the_few() -> None:
    asking = [node(f"asks-{n}", wish={}) for n in range(4)]
    assert steps(*asking) == [("asks-0", Step.HOLD), ("asks-1", Step.HOLD)]
    failed = [node(f"bad-{n}", retest=NONCE, status="False") for n in range(2)]
    assert steps(*failed, *asking) == []
    assert steps(failed[0], *asking) == [("asks-0", Step.HOLD)]


def test_the_longest_untested_come_first() -> None:
    tested = {"new": NOW - 99, "old": 10, "older": 5, "just now": NOW}
    asking = [node(name, wish={"tested": when}) for name, when in tested.items()]
    assert [name for name, step in steps(*asking) if step is Step.HOLD] == ["older", "old"]


UNDER_TEST, ASKS, SILENT = node(wish={}, answer={"state": GRANTED}), node(wish={}), node()


@given(st.lists(st.sampled_from([UNDER_TEST, ASKS, SILENT]), max_size=60), st.floats(0.001, 1))
def test_never_more_than_the_cap_are_under_test(kinds: list[Node], share: float) -> None:
    fleet = [replace(kind, name=f"n{number}") for number, kind in enumerate(kinds)]
    limits = Limits(share=share, period=100)
    held = [item.name for item, step in plan(fleet, NOW, limits) if step is Step.HOLD]
    under = sum(item.is_under_test for item in fleet)
    assert under + len(held) <= max(under, cap(len(fleet), limits.share))
    assert len(set(held)) == len(held)


@pytest.mark.parametrize(("fleet", "most"), [(0, 0), (1, 1), (49, 1), (100, 2), (7500, 150)])
def test_cap(fleet: int, most: int) -> None:
    assert cap(fleet, LIMITS.share) == most


@pytest.mark.parametrize(
    ("outcomes", "opened"),
    [
        ([], False),
        ([(NOW, False)] * 4, False),
        ([(NOW, False)] * 5, True),
        ([(NOW, False)] * 2 + [(NOW, True)] * 8, False),
        ([(NOW, False)] * 3 + [(NOW, True)] * 8, True),
        ([(NOW - 51, False)] * 20, False),
    ],
)
def test_the_breaker_opens_above_a_share_of_several(outcomes: list[tuple[float, bool]], opened: bool) -> None:
    assert is_open([Outcome(*outcome) for outcome in outcomes], NOW, LIMITS) is opened


def test_the_breaker_is_read_from_the_nodes() -> None:
    tested = [node(f"t-{n}", retest=NONCE) for n in range(4)]
    silent = [replace(node(f"s-{n}", wish={}, answer={"state": WITHDRAWN}), wish=None) for n in range(2)]
    old = node("old", retest=NONCE, status="False", reported="2023-11-14T22:00:00Z")
    asking = node("asks", wish={})
    assert sorted(outcome.passed for outcome in outcomes([*tested, *silent, old])) == [False] * 3 + [True] * 4
    assert steps(*tested, asking) == [("asks", Step.HOLD)]
    # Two of six in the window, so no more are taken out; a held one goes on, or it would stay out for long.
    held = node("held", wish={}, answer={"state": HELD})
    assert steps(*tested, *silent, asking, held) == [("held", Step.GRANT), ("asks", Step.REFUSE)]


def test_without_a_share_everybody_is_told_no() -> None:
    assert steps(node(wish={}), limits=replace(LIMITS, share=0)) == [("a", Step.REFUSE)]


def test_the_patch_tests_what_it_was_decided_from() -> None:
    asking = node(wish={})
    assert asking.wish
    boot, wish, answer, taints, taint = answered(asking, NONCE, HELD, NOW, RULES)
    assert boot == {"op": "test", "path": "/status/nodeInfo/bootID", "value": BOOT}
    assert wish == {
        "op": "test",
        "path": "/metadata/annotations/image-builder~1retest-wanted",
        "value": asking.wish.text,
    }
    assert answer["path"] == "/metadata/annotations/image-builder~1retest"
    assert json.loads(answer["value"]) == {"boot_id": BOOT, "nonce": NONCE, "state": HELD, "at": NOW}
    assert (taints["op"], taints["value"]) == ("test", None)
    assert taint["value"] == [{"key": RULES.taint, "value": "retest", "effect": "NoSchedule"}]
    assert len(answered(asking, NONCE, GRANTED, NOW, RULES)) == 3


@pytest.mark.parametrize(("state", "step"), [(None, HELD), (HELD, GRANTED)])
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_node_that_works_is_neither_held_nor_tested(state: str | None, step: str, is_busy: bool) -> None:
    answers: list[str] = []

    class Api:
        """An API server with one pod on the node."""

        def each(self, _path: str, take: Callable[[dict[str, Any]], None]) -> None:
            limits = {"nvidia.com/gpu": "8"} if is_busy else {}
            take({"spec": {"containers": [{"resources": {"limits": limits}}]}})

        def request(self, _method: str, _path: str, patch: Any, _kind: str) -> None:
            (answer,) = (
                part["value"] for part in patch if part["path"].endswith("~1retest") and "value" in part
            )
            answers.append(json.loads(answer)["state"])

    subject = node(wish={}) if state is None else node(wish={}, answer={"state": state}, taints=("retest",))
    retester = Retester(cast("Client", Api()), RULES, LIMITS, print)
    retester.turn([subject, *FLEET], NOW, lambda: True)
    assert answers == [REFUSED if is_busy else step]
