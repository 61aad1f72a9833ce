"""Carries out what ``triage`` says: nodes that go bad in service are taken out, emptied, handed over, and returned.

Each step posts an Event, then sends one patch that tests the state it was decided from. If a controller is killed
between them, the next one reads the Node and does the rest; both give the Event the same name, so it exists once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from image_builder.cluster.gate import bad_hosts, triage
from image_builder.cluster.gate.model import Node, Rules, node_from
from image_builder.cluster.gate.policy import HOST_REASON
from image_builder.cluster.gate.triage import Step
from image_builder.drain import event, fence, quarantine
from image_builder.drain.lease import Holders, lease_of
from image_builder.drain.quarantine import RUN, Record
from image_builder.drain.run import Drain
from image_builder.node.errors import NodeError
from image_builder.node.net.kube import Client, path_of_node
from image_builder.node.preflight.hold import Hold

# The pause after a drain that skipped its host, such as one still busy at the timeout.
_REST_SECONDS = 600.0
_ASKED = {"reboot": "RebootWanted", "reimage": "ReimageWanted", "hand-over": "HandOverWanted"}


class Remedies:
    """What the gate does for nodes' health. Not thread-safe; ``clock`` is monotonic."""

    def __init__(
        self, client: Client, rules: Rules, tell: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._client, self._rules, self._tell, self._clock = client, rules, tell, clock
        self._memory = bad_hosts.Memory(client, rules.health, tell)
        self._holders = Holders(clock)
        self._drains: dict[str, Drain] = {}
        self._rests: dict[str, float] = {}
        self._advised: set[tuple[str, str]] = set()
        self._told: set[tuple[str, str]] = set()

    def turn(
        self, nodes: Sequence[Node], holds: Mapping[str, Hold], now: float, may_act: Callable[[], bool]
    ) -> None:
        """Take the steps that are due now, checking ``may_act`` before each node.

        Failures are reported, and retried at another turn if the step is still due then.
        """
        if not may_act():
            return
        self._memory.turn(nodes, now)
        self._tell_of_hosts(nodes, now)
        steps = self._plan([self._judged(node) for node in nodes], holds, now)
        draining = {node.name for node, step, _ in steps if step is Step.DRAIN}
        for name in self._drains.keys() - draining:
            # It is back, held by the breaker, or part of a rollout: what a cordon means is decided again.
            del self._drains[name]
        for node, step, _ in steps:
            if not may_act():
                return
            try:
                self._do(node, step, holds, now)
            except NodeError as error:
                self._tell(f"{node.name}: not {step.value}: {error.message}")

    def advise(self, nodes: Sequence[Node], holds: Mapping[str, Hold], now: float) -> None:
        """Report once what would be done."""
        self._memory.turn(nodes, now, advises=True)
        judged = [self._judged(node) for node in nodes]
        steps = triage.plan(judged, holds, (), self._rules.health, self._rules, now)
        advice = {(node.name, f"would be {step.value}{_of(record)}") for node, step, record in steps}
        for name, line in sorted(advice - self._advised):
            self._tell(f"{name}: {line}")
        self._advised = advice

    def _plan(
        self, nodes: Sequence[Node], holds: Mapping[str, Hold], now: float
    ) -> list[tuple[Node, Step, Record | None]]:
        policy, rules = self._rules.health, self._rules
        steps = triage.plan(nodes, holds, (), policy, rules, now)
        if all(step is Step.GIVE_BACK for _, step, _ in steps):
            return steps
        sets = {node.health.scale_set for node in nodes} - {""}
        try:
            self._holders.look(self._client)
        except NodeError as error:
            self._tell(f"the leases of scale sets: {error.message}: nothing is started")
            return [item for item in steps if item[1] is Step.GIVE_BACK]
        held = {path for path in sets if self._holders.holder(lease_of(path))}
        return triage.plan(nodes, holds, held, policy, rules, now)

    def _do(self, node: Node, step: Step, holds: Mapping[str, Hold], now: float) -> None:
        """Take a step if it is still what the node needs."""
        document = self._client.find(path_of_node(node.name))
        if document is None:
            return
        fresh = self._judged(node_from(document, self._rules))
        need = triage.step_of(fresh, holds, self._rules.health, self._rules, now)
        if need is None or need[0] is not step:
            return
        record = need[1]
        if step is Step.GIVE_BACK:
            self._give_back(document, record, now)
        elif step is Step.DRAIN and record:
            self._drain(document, record, now)
        elif record:
            self._mark(document, step, record, now)

    def _judged(self, node: Node) -> Node:
        return bad_hosts.judged(node, self._memory.known, self._rules.health)

    def _tell_of_hosts(self, nodes: Sequence[Node], now: float) -> None:
        """Post an Event, once, on each node that has come up on a host known to be bad."""
        known = self._memory.known or {}
        arrivals = [(node.name, entry) for node in nodes if (entry := bad_hosts.on_known(node, known))]
        for name, entry in arrivals:
            if (name, entry.words) in self._told:
                continue
            try:
                document = self._client.find(path_of_node(name))
                if document is not None:
                    uid = document["metadata"]["uid"]
                    event.post(
                        self._client, event.event(name, uid, HOST_REASON, entry.words, now, kind="Warning")
                    )
            except NodeError as error:
                self._tell(f"{name}: no Event {HOST_REASON}: {error.message}")
            self._tell(f"{name}: {entry.words}")
        self._told = {(name, entry.words) for name, entry in arrivals}

    def _mark(self, document: Mapping[str, Any], step: Step, record: Record, now: float) -> None:
        if step is Step.TAKE_OUT:
            self._post(document, "NodeQuarantined", _why(record), record, now, kind="Warning")
            patch = quarantine.take_out(document, record)
        else:
            wanted = f"{quarantine.WANTED[record.remedy]}: {_why(record)}"
            self._post(document, _ASKED[record.remedy], wanted, record, now, kind="Warning")
            patch = quarantine.reach(document, record, "asked")
        self._send(document, patch, f"{step.value}{_of(record)}")

    def _give_back(self, document: Mapping[str, Any], record: Record | None, now: float) -> None:
        if record:
            self._post(
                document, "NodeReturned", "it passed its preflight, or a person admitted it", record, now
            )
        self._send(document, quarantine.give_back(document), Step.GIVE_BACK.value)

    def _drain(self, document: Mapping[str, Any], record: Record, now: float) -> None:
        """Give a node's drain one turn, as far as the drain policy goes."""
        name = document["metadata"]["name"]
        if self._clock() < self._rests.get(name, 0.0):
            return
        if name not in self._drains:
            drain = Drain(self._client, RUN, self._rules.health.drain, self._tell, clock=self._clock)
            drain.add([name])
            self._drains[name] = drain
        self._drains[name].turn()
        outcome = self._drains[name].outcomes.get(name)
        if outcome is None:
            return
        del self._drains[name]
        if outcome.state == "skipped":
            self._rests[name] = self._clock() + _REST_SECONDS
            return
        self._rests.pop(name, None)
        emptied = self._client.find(path_of_node(name))
        if emptied is not None and quarantine.record_of(emptied) == record:
            self._post(emptied, "NodeEmptied", f"no job is left on it: {_why(record)}", record, now)
            self._send(emptied, quarantine.reach(emptied, record, "empty"), Step.DRAIN.value)

    def _post(
        self,
        document: Mapping[str, Any],
        reason: str,
        message: str,
        record: Record,
        now: float,
        *,
        kind: event.Kind = "Normal",
    ) -> None:
        """Post an Event. A failure is only reported: it must not keep a node in service."""
        meta = document["metadata"]
        step = f"{record.boot_id} {record.tested} {record.condition}"
        try:
            event.post(
                self._client,
                event.event(meta["name"], meta["uid"], reason, message, now, kind=kind, step=step),
            )
        except NodeError as error:
            self._tell(f"{meta['name']}: no Event {reason}: {error.message}")

    def _send(self, document: Mapping[str, Any], patch: list[dict[str, Any]], done: str) -> None:
        name = document["metadata"]["name"]
        if patch and fence.send(self._client, name, patch):
            self._tell(f"{name}: {done}")


def _of(record: Record | None) -> str:
    return f" for {record.reason} ({record.remedy})" if record else ""


def _why(record: Record) -> str:
    return f"{record.condition} {record.reason}: {record.detail}"
