"""Nodes that fail in service, for a test: simulated kubelets, what their agents report, and the gate's controller."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from image_builder.cluster.gate.breaker import Holder, Limits
from image_builder.cluster.gate.model import Node, Rules, node_from
from image_builder.cluster.gate.policy import Policy
from image_builder.cluster.gate.remedies import Remedies
from image_builder.drain import fence, quarantine
from image_builder.node.net.kube import MERGE_PATCH, Client, path_of_node, stamp
from image_builder.node.net.kubeconfig import load
from image_builder.node.preflight import model
from image_builder.node.preflight.model import PASSED, Verdict
from image_builder.node.status import PHYSICAL_HOST, PREFLIGHT_LABEL
from tests.support.control_plane.gates import GATE, Cluster, controlled, give_rights
from tests.support.control_plane.kubelets import AGENT, Kubelets
from tests.support.control_plane.servers import ADMINISTRATORS
from tests.support.images.builds import REPO

DRAIN_RIGHTS = REPO / "deploy/gate-drain.yml"
HEALTHY = "NodeHealthy"
QUICK: Mapping[str, Any] = {"lasting_seconds": 0.0, "share": 1.0}


def policy_of(settings: Mapping[str, Any]) -> Policy:
    """Return a policy as it would be read from its file."""
    return Policy.model_validate_json(json.dumps({**QUICK, **settings}))


def _stamp(at: float) -> str:
    return stamp(datetime.fromtimestamp(at, UTC))


class Ward:
    """Nodes and the reports about their health."""

    def __init__(self, cluster: Cluster, kubelets: Kubelets) -> None:
        self.cluster, self.kubelets, self.admin = cluster, kubelets, cluster.admin
        self._count = 0
        self._passed: dict[str, float] = {}
        self._access = load(cluster.kubeconfig(GATE, "system:serviceaccounts"))

    def nodes(self, count: int, **labels: str) -> list[str]:
        """Register nodes that passed their preflight and are healthy."""
        names = [f"gpu-{self._count + n}" for n in range(count)]
        self._count += count
        self.kubelets.register(names, **{PREFLIGHT_LABEL: "failed", **labels})
        for name in names:
            self.passes(name)
            self.report(name, "True", "NodeIsHealthy")
        return names

    def passes(self, name: str) -> None:
        """Report as the preflight of a node's current boot does, in a later second than its last report."""
        while time.time() // 1 == self._passed.get(name):  # by which the gate tells reports apart
            time.sleep(0.05)
        self._passed[name] = time.time() // 1
        document = model.document(
            Verdict(PASSED),
            [],
            boot_id=self.kubelets.nodes[name],
            image_build="b",
            started="now",
            seconds=time.monotonic(),
        )
        message = model.message(document)
        self.admin.patch_condition(name, model.CONDITION, "True", "Passed", message)

    def report(
        self, name: str, status: str, reason: str, condition: str = HEALTHY, *, ago: float = 0.0
    ) -> None:
        """Set a condition that began ``ago`` seconds ago, as the node's agent does or another program."""
        message = f"{reason} (boot {self.kubelets.nodes[name]})" if condition == HEALTHY else reason
        since = _stamp(time.time() - ago)
        self.admin.patch_condition(name, condition, status, reason, message, since=since)

    def put_on(self, name: str, host: str) -> None:
        """Set the name of a node's physical host as its agent does."""
        changes = {"metadata": {"annotations": {PHYSICAL_HOST: host or None}}}
        self.admin.request("PATCH", path_of_node(name), changes, MERGE_PATCH)

    def document(self, name: str) -> dict[str, Any]:
        return self.admin.node(name)

    def record(self, name: str) -> quarantine.Record | None:
        return quarantine.record_of(self.document(name))

    def is_out(self, name: str) -> bool:
        return quarantine.is_tainted(self.document(name))

    def is_clean(self, name: str) -> bool:
        """Return whether nothing of the gate's is left on a node."""
        document = self.document(name)
        return (
            not quarantine.give_back(document)
            and fence.record_of(document) is None
            and quarantine.MARK not in (document["metadata"].get("annotations") or {})
        )

    def events(self, name: str) -> list[str]:
        """Return the reasons of a node's Events, in the order of their creation."""
        items = self.admin.request("GET", "/api/v1/namespaces/default/events")["items"]
        about = [item for item in items if item["involvedObject"]["name"] == name]
        ours = [item for item in about if item["source"].get("component") == "image-builder"]
        ours.sort(key=lambda item: int(item["metadata"]["resourceVersion"]))
        return [item["reason"] for item in ours]

    def client(self) -> Client:
        return Client(self._access, agent="gate")

    @contextmanager
    def controlled(self, *, advises: bool = False, **policy: Any) -> Iterator[list[str]]:
        """Run the controller with its documented rights; yield its log lines."""
        rules = Rules(health=policy_of(policy))
        with controlled(self.cluster, rules=rules, turn=0.2, advises=advises) as lines:
            yield lines

    def turn(self, client: Client, names: Sequence[str], **policy: Any) -> list[str]:
        """Run one turn of a newly started controller on some nodes; return its log lines."""
        rules, lines = Rules(health=policy_of(policy)), list[str]()
        nodes = [self.node(name, rules) for name in names]
        holder = Holder(self.admin, Limits(), rules.pool, lines.append, advises=True)
        holder.turn(nodes, time.time())
        remedies = Remedies(client, rules, lines.append, time.monotonic)
        remedies.turn(nodes, holder.holds or {}, time.time(), lambda: True)
        return lines

    def node(self, name: str, rules: Rules) -> Node:
        return node_from(self.document(name), rules)

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            del self.kubelets.nodes[name]
            self.admin.request("DELETE", path_of_node(name))


@contextmanager
def ward(cluster: Cluster) -> Iterator[Ward]:
    """Give the gate its rights in a cluster, including those for draining, and run its kubelets."""
    give_rights(cluster.admin)
    give_rights(cluster.admin, DRAIN_RIGHTS)
    access = load(cluster.kubeconfig("kubelets", ADMINISTRATORS))
    with Kubelets(lambda: Client(access, agent=AGENT)) as kubelets:
        yield Ward(cluster, kubelets)
