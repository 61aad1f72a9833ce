"""Re-tests of nodes in service: which nodes may be tested again, when that must stop, and granting it.

A re-test takes a node away from its users, so few are tested at a time; and if many fail at once, the test, the driver
or the data is likelier to be wrong than the nodes, so no more nodes are taken away. A node that failed one stays out
and keeps its place among the few: whatever goes wrong, re-tests never take more of the fleet away than that.

An idle node that asks for one is first taken out of service, then looked at again, then told. All state is in the Node
objects: which nodes ask, which are out, how the last re-tests ended. A controller that takes over the lease continues
where the previous one stopped, including its breaker.
"""

from __future__ import annotations

import enum
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from image_builder.cluster.gate.decide import answered, may_work
from image_builder.cluster.gate.model import Node, Rules
from image_builder.drain.pods import uses_devices
from image_builder.node.errors import NodeError
from image_builder.node.net.kube import JSON_PATCH, Client, path_of_node
from image_builder.node.preflight.model import GRANTED, HELD, REFUSED, WITHDRAWN

# In seconds: how long a grant may go unanswered before it is withdrawn, and how much longer a node must still wait
# for an answer if its wish is to be granted.
ANSWER_SECONDS, LEAST_SECONDS = 3600.0, 900.0
# The most nodes handled in one turn: a boot's verdict waits no longer than their requests take.
AT_ONCE = 20


@dataclass(frozen=True)
class Limits:
    """``share`` of the fleet may be out at once because of re-tests, at least one node; 0: no re-tests. No node is
    tested more often than every ``period`` seconds; nodes ask every seven days.

    The breaker opens if, of at least ``least`` tests in the last ``window`` seconds, a share over ``failing`` failed.
    """

    share: float = 0.02
    period: float = 6 * 86400.0
    window: float = 6 * 3600.0
    least: int = 5
    failing: float = 0.2


@dataclass(frozen=True)
class Outcome:
    """A re-test that ended."""

    ended: float
    passed: bool


def is_open(outcomes: Iterable[Outcome], now: float, limits: Limits) -> bool:
    """Return whether the breaker is open, so that no re-test is granted."""
    recent = [outcome for outcome in outcomes if 0 <= now - outcome.ended <= limits.window]
    failed = sum(not outcome.passed for outcome in recent)
    return len(recent) >= limits.least and failed > limits.failing * len(recent)


def cap(fleet: int, share: float) -> int:
    """Return how many of ``fleet`` nodes may be out at once: at least one, unless the share is 0."""
    return min(fleet, max(1, int(fleet * share))) if share else 0


class Step(enum.Enum):
    HOLD = HELD  # take it out of service, if no pod there has devices
    GRANT = GRANTED  # tell the node, if that is still true
    REFUSE = REFUSED
    WITHDRAW = WITHDRAWN


def asks(node: Node, now: float) -> bool:
    """Return whether a node in service asks for a re-test of this boot and hasn't been answered yet."""
    wish = node.wish
    if wish is None or wish.boot_id != node.boot_id or wish.nonce == node.retested:
        return False
    is_answered = node.answer is not None and node.answer.nonce == wish.nonce
    by_hand = node.admitted_boot == node.boot_id
    return not is_answered and may_work(node) and not by_hand and wish.until - now >= LEAST_SECONDS


def is_away(node: Node) -> bool:
    """Return whether a node is out because of a re-test that is still running or that it didn't pass."""
    failed = bool(node.retested) and node.tested_boot == node.boot_id and node.status != "True"
    return node.is_under_test or failed


def outcomes(nodes: Iterable[Node]) -> list[Outcome]:
    """Return the outcomes of the re-tests that the nodes still mention; a withdrawn one counts as failed."""
    results = []
    for node in nodes:
        if node.retested:
            results.append(Outcome(node.reported, node.status == "True"))
        if node.answer and node.answer.state == WITHDRAWN:
            results.append(Outcome(node.answer.at, False))
    return results


def plan(nodes: Sequence[Node], now: float, limits: Limits) -> list[tuple[Node, Step]]:
    """Return what to do now, in this order. Nodes under test come first, then those that ask.

    Of those that are due, as many are held as may still be out, the longest untested first.
    """
    steps = []
    for node in nodes:
        if node.is_under_test and node.answer:
            if now - node.answer.at > ANSWER_SECONDS:
                steps.append((node, Step.WITHDRAW))
            elif node.answer.state == HELD:
                steps.append((node, Step.GRANT))
    asking = [(node, node.wish.tested) for node in nodes if node.wish and asks(node, now)]
    if not limits.share or is_open(outcomes(nodes), now, limits):
        return [*steps, *((node, Step.REFUSE) for node, _ in asking)]
    steps += [(node, Step.REFUSE) for node, tested in asking if now - tested < limits.period]
    due = sorted((tested, node.name, node) for node, tested in asking if now - tested >= limits.period)
    free = cap(len(nodes), limits.share) - sum(map(is_away, nodes))
    return [*steps, *((node, Step.HOLD) for _, _, node in due[: max(0, free)])]


class Retester:
    """Carries out ``plan``. Not thread-safe."""

    def __init__(self, client: Client, rules: Rules, limits: Limits, tell: Callable[[str], None]) -> None:
        self._client, self._rules, self._limits, self._tell = client, rules, limits, tell

    def turn(self, nodes: Sequence[Node], now: float, may_act: Callable[[], bool]) -> None:
        """Take the steps that are due now, with at most two requests for each node concerned.

        ``may_act`` is checked before each node: with a slow API server, a lease can be lost between two of them.
        Failures are reported, and retried at another turn if the step is still due then.
        """
        for node, step in plan(nodes, now, self._limits)[:AT_ONCE]:
            if not may_act():
                return
            try:
                self._do(node, step, now)
            except NodeError as error:
                self._tell(f"{node.name}: re-test not {step.value}: {error.message}")

    def _do(self, node: Node, step: Step, now: float) -> None:
        # Only the look after the hold is the last one; the first may be a moment old, and costs etcd nothing.
        if step is Step.HOLD and self._is_busy(node.name, {"resourceVersion": "0"}):
            step = Step.REFUSE
        if step is Step.GRANT and self._is_busy(node.name, {}):
            step = Step.REFUSE
        subject = node.answer if node.is_under_test else node.wish
        assert subject is not None  # plan() has no step for another node
        patch = answered(node, subject.nonce, step.value, now, self._rules)
        self._client.request("PATCH", path_of_node(node.name), patch, JSON_PATCH)
        self._tell(f"{node.name}: re-test {step.value} (boot {node.boot_id})")

    def _is_busy(self, name: str, version: Mapping[str, str]) -> bool:
        """Return whether a pod on the node uses devices; pods that have ended have released theirs."""
        fields = f"spec.nodeName={name},status.phase!=Succeeded,status.phase!=Failed"
        uses: list[bool] = []
        self._client.each(
            f"/api/v1/pods?{urllib.parse.urlencode({'fieldSelector': fields, **version})}",
            lambda pod: uses.append(uses_devices(pod["spec"])),
        )
        return any(uses)
