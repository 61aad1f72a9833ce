"""When the breaker opens and closes, in simulated time; the API server's part is in tests/integration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from image_builder.gate.breaker import Limits, code_of, step
from image_builder.gate.model import Node, Rules, node_from
from image_builder.node.preflight import hold, model
from image_builder.node.preflight.hold import Hold
from image_builder.node.preflight.model import FAILED, INCONCLUSIVE, PASSED, Verdict

BOOT, OTHER = "11111111-2222-3333-4444-555555555555", "11111111-2222-3333-4444-666666666666"
NOW = 1_700_000_000.0
LIMITS = Limits(share=0.05, window=3600, least=3)
REPLACE = Verdict(FAILED, "gpu.kat.int", "mismatch in SM 7", "replace")


def message(verdict: Verdict, boot: str = BOOT) -> str:
    told = model.document(verdict, [], boot_id=boot, image_build="b", started="now", seconds=41)
    return model.message(told)


def node(number: int, verdict: Verdict = REPLACE, *, age: float = 60, pool: str = "a") -> Node:
    return Node(
        f"node-{number}",
        boot_id=BOOT,
        status=model.condition_status(verdict.state),
        tested_boot=BOOT,
        message=message(verdict),
        reported=NOW - age,
        pool=pool,
    )


def pool(failed: int, of: int, name: str = "a", *, age: float = 60) -> list[Node]:
    good = Verdict(PASSED)
    return [node(n, REPLACE if n < failed else good, age=age, pool=name) for n in range(of)]


@pytest.mark.parametrize(
    ("failed", "of", "is_open"),
    [(2, 2, False), (3, 3, True), (3, 60, False), (3, 59, True), (50, 1000, False), (51, 1000, True)],
)
def test_it_opens_above_a_share_of_the_pool_and_not_for_a_few(failed: int, of: int, is_open: bool) -> None:
    found = step(pool(failed, of), {}, NOW, LIMITS)
    wanted = {"gpu.kat.int": Hold("a", failed, of, int(NOW))} if is_open else {}
    assert found == wanted


def test_each_pool_counts_by_itself() -> None:
    assert step([*pool(2, 30), *pool(2, 30, "b")], {}, NOW, LIMITS) == {}
    found = step([*pool(2, 1000), *pool(3, 30, "b")], {}, NOW, LIMITS)
    assert found == {"gpu.kat.int": Hold("b", 3, 30, int(NOW))}


def test_each_code_counts_by_itself() -> None:
    other = replace(REPLACE, code="gpu.lost")
    nodes = [*pool(2, 10), node(20, other), node(21, other)]
    assert step(nodes, {}, NOW, LIMITS) == {}
    assert list(step([*nodes, node(22, other)], {}, NOW, LIMITS)) == ["gpu.lost"]


def test_only_the_last_hour_opens_it() -> None:
    assert step(pool(30, 100, age=3601), {}, NOW, LIMITS) == {}
    assert step(pool(30, 100, age=3600), {}, NOW, LIMITS)
    assert step(pool(30, 100, age=-5), {}, NOW, LIMITS), "a node's clock is ahead of ours"


def test_it_stays_open_while_a_node_fails_and_closes_then() -> None:
    held = step(pool(30, 100), {}, NOW, LIMITS)
    assert step(pool(1, 100, age=9999), held, NOW + 9999, LIMITS) == held
    assert step(pool(0, 100), held, NOW + 9999, LIMITS) == {}


def test_a_node_that_starts_itself_again_counts_while_its_report_is_new() -> None:
    """The kubelet of the boot that it ended never ran, so the Node object has the boot id before."""
    rebooting = [replace(node(n, replace(REPLACE, action="reboot")), boot_id=OTHER) for n in range(3)]
    held = step([*rebooting, *pool(0, 7)], {}, NOW, LIMITS)
    assert held == {"gpu.kat.int": Hold("a", 3, 10, int(NOW))}
    assert step(rebooting, held, NOW + 3000, LIMITS) == held
    assert step(rebooting, held, NOW + 3601, LIMITS) == {}
    assert step([replace(one, admitted_boot=BOOT) for one in rebooting], {}, NOW, LIMITS) == {}


def test_what_a_person_released_is_not_held_again_while_the_nodes_fail() -> None:
    released = {"gpu.kat.int": Hold("a", 30, 100, int(NOW), hold.RELEASED, "me", "a rack")}
    assert step(pool(30, 100), released, NOW, LIMITS) == released
    assert step(pool(0, 100), released, NOW, LIMITS) == {}


def test_a_share_of_one_never_opens_it() -> None:
    assert step(pool(100, 100), {}, NOW, replace(LIMITS, share=1.0)) == {}


FAILS = node(1)


@pytest.mark.parametrize(
    "changed",
    [
        replace(FAILS, boot_id=OTHER),
        replace(FAILS, boot_id=""),
        replace(FAILS, status="Unknown"),
        replace(FAILS, admitted_boot=BOOT),
        replace(FAILS, retested="0123456789abcdef"),
        replace(FAILS, message=FAILS.message.replace("gpu.kat.int", "gpu/kat")),
        node(1, Verdict(PASSED)),
        node(1, replace(REPLACE, state=INCONCLUSIVE)),
    ],
    ids=["another-boot", "no-boot", "unknown", "admitted", "retest", "no-key", "passed", "inconclusive"],
)
def test_what_is_no_failure_of_this_boot(changed: Node) -> None:
    assert code_of(FAILS) == "gpu.kat.int"
    assert code_of(changed) == ""


def test_a_pool_is_named_by_a_label() -> None:
    found = {"metadata": {"name": "n", "labels": {"agentpool": "h100"}}}
    assert node_from(found, Rules(pool="agentpool")).pool == "h100"
    assert node_from(found, Rules()).pool == ""


# -- the node's side -------------------------------------------------------------------------------------------

HOLDS = {"gpu.kat.int": Hold("h100", 12, 40, 1)}


@pytest.mark.parametrize("action", ["reboot", "replace"])
def test_a_held_code_neither_reboots_nor_condemns(action: str) -> None:
    found = hold.applied(replace(REPLACE, action=action, reboot=action == "reboot"), HOLDS)
    assert (found.state, found.action, found.reboot) == (FAILED, "none", False)
    assert found.reason == f"mismatch in SM 7; {action} is held: 12 of 40 nodes of pool h100 failed alike"
    # It counts on, or the breaker would close on its own effect.
    assert code_of(replace(FAILS, message=message(found))) == "gpu.kat.int"


@pytest.mark.parametrize(
    ("verdict", "holds"),
    [
        (replace(REPLACE, code="gpu.lost"), HOLDS),
        (replace(REPLACE, action="reimage"), HOLDS),
        (Verdict(PASSED), HOLDS),
        (REPLACE, {}),
        (REPLACE, {"gpu.kat.int": replace(HOLDS["gpu.kat.int"], state=hold.RELEASED)}),
    ],
    ids=["another code", "another action", "passed", "nothing held", "released"],
)
def test_other_verdicts_stay(verdict: Verdict, holds: dict[str, Hold]) -> None:
    assert hold.applied(verdict, holds) == verdict


def test_a_hold_is_read_as_it_was_written_and_a_broken_one_is_none() -> None:
    data = {"a": HOLDS["gpu.kat.int"].text(), "b": "{", "c": "[]", "d": '{"pool": "x"}', "e": "[" * 100_000}
    assert hold.parse({"data": data}) == {"a": HOLDS["gpu.kat.int"]}
    assert hold.parse({}) == {} == hold.parse({"data": None})
