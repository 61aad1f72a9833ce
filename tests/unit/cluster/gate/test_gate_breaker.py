"""The breaker, which opens and closes in simulated time; the API server's part is in tests/gpu."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from image_builder.cluster.gate import breaker
from image_builder.cluster.gate.admit import _line as status_line
from image_builder.cluster.gate.breaker import Limits, code_of
from image_builder.cluster.gate.model import Node, Rules, node_from
from image_builder.errors import UsageError
from image_builder.node.net.kube import NOT_FOUND, Client, KubeError
from image_builder.node.net.kubeconfig import Access, Pem
from image_builder.node.preflight import hold, model, report
from image_builder.node.preflight.hold import Hold
from image_builder.node.preflight.model import FAILED, INCONCLUSIVE, PASSED, Verdict
from image_builder.node.preflight.settings import Settings

BOOT, OTHER = "11111111-2222-3333-4444-555555555555", "11111111-2222-3333-4444-666666666666"
NOW = 1_700_000_000.0
LIMITS = Limits(share=0.05, window=3600, least=3)
LABEL = "agentpool"
REPLACE = Verdict(FAILED, "gpu.kat.int", "mismatch in SM 7", "replace")


def message(verdict: Verdict, boot: str = BOOT) -> str:
    report = model.document(verdict, [], boot_id=boot, image_build="b", started="now", seconds=41)
    return model.message(report)


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


def step(nodes: list[Node], current: dict[str, Hold], now: float, limits: Limits) -> dict[str, Hold]:
    return breaker.step(nodes, current, now, limits, LABEL)


def held(failed: int, of: int, pool: str = "a", code: str = "gpu.kat.int") -> dict[str, Hold]:
    return {f"{code}..{pool}": Hold(code, LABEL, pool, failed, of, int(NOW))}


def pool(failed: int, of: int, name: str = "a", *, age: float = 60) -> list[Node]:
    good = Verdict(PASSED)
    return [node(n, REPLACE if n < failed else good, age=age, pool=name) for n in range(of)]


@pytest.mark.parametrize(
    ("failed", "of", "is_open"),
    [(2, 2, False), (3, 3, True), (3, 60, False), (3, 59, True), (50, 1000, False), (51, 1000, True)],
)
def test_it_opens_above_a_share_of_the_pool_and_not_for_a_few(failed: int, of: int, is_open: bool) -> None:
    holds = step(pool(failed, of), {}, NOW, LIMITS)
    assert holds == (held(failed, of) if is_open else {})


def test_each_pool_counts_by_itself() -> None:
    assert step([*pool(2, 30), *pool(2, 30, "b")], {}, NOW, LIMITS) == {}
    holds = step([*pool(2, 1000), *pool(3, 30, "b")], {}, NOW, LIMITS)
    assert holds == held(3, 30, "b")
    both = step([*pool(3, 30), *pool(3, 30, "b")], holds, NOW, LIMITS)
    assert both == held(3, 30) | held(3, 30, "b")
    # One node of the first pool keeps failing: that says nothing about the second.
    assert step([*pool(1, 30), *pool(0, 30, "b")], both, NOW, LIMITS) == held(3, 30)


def test_each_code_counts_by_itself() -> None:
    other = replace(REPLACE, code="gpu.lost")
    nodes = [*pool(2, 10), node(20, other), node(21, other)]
    assert step(nodes, {}, NOW, LIMITS) == {}
    assert list(step([*nodes, node(22, other)], {}, NOW, LIMITS)) == ["gpu.lost..a"]


def test_only_the_last_hour_opens_it() -> None:
    assert step(pool(30, 100, age=3601), {}, NOW, LIMITS) == {}
    assert step(pool(30, 100, age=3600), {}, NOW, LIMITS)
    assert step(pool(30, 100, age=-5), {}, NOW, LIMITS), "a node's clock is ahead of ours"


def test_it_stays_open_while_a_node_fails_and_closes_then() -> None:
    holds = step(pool(30, 100), {}, NOW, LIMITS)
    assert step(pool(1, 100, age=9999), holds, NOW + 9999, LIMITS) == holds
    assert step(pool(0, 100), holds, NOW + 9999, LIMITS) == {}


def test_a_node_that_starts_itself_again_counts_while_its_report_is_new() -> None:
    """The kubelet never ran in the boot that the node ended, so the Node object has the previous boot id."""
    rebooting = [replace(node(n, replace(REPLACE, action="reboot")), boot_id=OTHER) for n in range(3)]
    holds = step([*rebooting, *pool(0, 7)], {}, NOW, LIMITS)
    assert holds == held(3, 10)
    assert step(rebooting, holds, NOW + 3000, LIMITS) == holds
    assert step(rebooting, holds, NOW + 3601, LIMITS) == {}
    assert step([replace(node, admitted_boot=BOOT) for node in rebooting], {}, NOW, LIMITS) == {}


def test_what_a_person_released_is_not_held_again_while_the_nodes_fail() -> None:
    released = {
        key: replace(opened, state=hold.RELEASED, by="me", reason="a rack")
        for key, opened in held(30, 100).items()
    }
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
        *(
            replace(FAILS, message=FAILS.message.replace("gpu.kat.int", code))
            for code in ("gpu/kat", "gpu..kat", "gpu.", "g" * 189)
        ),
        node(1, Verdict(PASSED)),
        node(1, replace(REPLACE, state=INCONCLUSIVE)),
    ],
    ids=[
        *("another-boot", "no-boot", "unknown", "admitted", "retest"),
        *("no-key", "two-dots", "a-dot-at-the-end", "too-long", "passed", "inconclusive"),
    ],
)
def test_what_is_no_failure_of_this_boot(changed: Node) -> None:
    assert code_of(FAILS) == "gpu.kat.int"
    assert code_of(changed) == ""


def test_a_pool_is_named_by_a_label() -> None:
    document = {"metadata": {"name": "n", "labels": {"agentpool": "h100"}}}
    assert node_from(document, Rules(pool="agentpool")).pool == "h100"
    assert node_from(document, Rules()).pool == ""


# -- the node's side -------------------------------------------------------------------------------------------

HOLDS = held(12, 40, "h100")
[HELD] = HOLDS.values()
OWN = {LABEL: "h100", "kubernetes.io/arch": "amd64"}


@pytest.mark.parametrize("action", ["reboot", "replace"])
def test_a_held_code_neither_reboots_nor_condemns(action: str) -> None:
    applied = hold.applied(replace(REPLACE, action=action, reboot=action == "reboot"), OWN, HOLDS)
    assert (applied.state, applied.action, applied.reboot) == (FAILED, "none", False)
    assert applied.reason == f"mismatch in SM 7; {action} is held: 12 of 40 nodes of pool h100 failed alike"
    # It still counts, or the breaker would close because of its own effect.
    assert code_of(replace(FAILS, message=message(applied))) == "gpu.kat.int"


@pytest.mark.parametrize(
    ("verdict", "holds"),
    [
        (replace(REPLACE, code="gpu.lost"), HOLDS),
        (replace(REPLACE, action="reimage"), HOLDS),
        (Verdict(PASSED), HOLDS),
        (REPLACE, {}),
        (REPLACE, {HELD.key: replace(HELD, state=hold.RELEASED)}),
    ],
    ids=["another code", "another action", "passed", "nothing held", "released"],
)
def test_other_verdicts_stay(verdict: Verdict, holds: dict[str, Hold]) -> None:
    assert hold.applied(verdict, OWN, holds) == verdict


@pytest.mark.parametrize("labels", [{LABEL: "a100"}, {"pool": "h100"}, {}], ids=["other", "key", "none"])
def test_other_pools_are_not_held(labels: dict[str, str]) -> None:
    assert hold.applied(REPLACE, labels, HOLDS) == REPLACE
    nameless = held(12, 40, "")
    assert (hold.applied(REPLACE, labels, nameless) == REPLACE) is (LABEL in labels)


def test_status_says_held_for_nodes_of_the_pool_that_is() -> None:
    def why(labels: dict[str, str]) -> str:
        condition = {"type": model.CONDITION, "status": "False", "message": message(REPLACE)}
        document = {
            "metadata": {"name": "n", "labels": labels},
            "status": {"nodeInfo": {"bootID": BOOT}, "conditions": [condition]},
        }
        return status_line(document, Rules(), HOLDS, {})["why"]

    assert why(OWN).startswith("HELD, 12 of 40 nodes of pool h100 failed alike: don't replace it: boot=")
    assert why({LABEL: "a100"}).startswith("boot=")


def test_a_person_releases_one_pool() -> None:
    holds = [*held(3, 9).values(), *held(4, 9, "b").values(), *held(5, 9, "", "gpu.lost").values()]
    assert breaker.chosen(holds, "gpu.kat.int", "b").failed == 4
    assert breaker.chosen(holds, "gpu.lost", None).failed == 5
    with pytest.raises(UsageError, match="held for several pools: 'a', 'b'"):
        breaker.chosen(holds, "gpu.kat.int", None)
    with pytest.raises(UsageError, match="not held for pool c; held are: .*gpu.kat.int of pool b, gpu.lost"):
        breaker.chosen(holds, "gpu.kat.int", "c")


def test_a_hold_is_read_as_it_was_written_and_a_broken_one_is_none() -> None:
    data = {"a": HELD.text(), "b": "{", "c": "[]", "d": '{"pool": "x"}', "e": "[" * 100_000}
    data["f"] = json.dumps({**json.loads(HELD.text()), "label": ["zone"]})
    assert hold.parse({"data": data}) == {"a": HELD}
    assert hold.parse({}) == {} == hold.parse({"data": None})


@pytest.mark.parametrize(("status", "is_said"), [(NOT_FOUND, False), (403, True), (0, True)])
def test_a_cluster_where_nothing_was_ever_held_is_no_trouble(
    status: int,
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The gate creates its ConfigMap with the first hold."""

    class Refusing(Client):
        def request(self, method: str, path: str, *_: Any) -> dict[str, Any]:
            raise KubeError(f"{method} {path}", status)

    client = Refusing(Access("https://127.0.0.1:1", Pem()))
    monkeypatch.setattr(report, "connect", lambda *_: (client, "node"))
    kubeconfig = tmp_path / "kubelet.conf"
    kubeconfig.touch()
    assert hold.asked(REPLACE, Settings(kubeconfig=str(kubeconfig))) == REPLACE
    assert ("can't be read" in capsys.readouterr().out) is is_said
