"""Count the requests that a pool of thousands of nodes sends to the API server, from the server's own audit log.

    .venv/bin/python tests/bench/gate.py [--nodes 7500] [--smallest] [--json]

Every node is simulated with an identity of its own, and reports through the agent's own client; the API server, etcd
and the controller are real. Two transitions of each node are counted: it registers and is admitted; it is rebooted (its
kubelet reports another boot id), is gated, reports, and is admitted again. Requests that a kubelet sends anyway
(registering, reporting its boot id) aren't counted. Goal: at most 2 requests per node and transition. Without jitter
and rate limit, the seconds show how fast an API server on this machine handles the load; they say nothing about a real
one.

At the end the control plane is read as the waves of a pool do (image_builder/pool/steps/control_plane.py): the seconds
of one reading, and the size of its part about the nodes, compared with that of the complete nodes. Real nodes also have
annotations and lists of images, which would only add to the latter figure.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from image_builder.cluster.gate.controller import Controller, Settings  # the path comes first
from image_builder.node.net.kube import Client
from image_builder.node.preflight import model
from image_builder.pool.steps.control_plane import NODES, SHOWN_NODES, TABLE, Kubernetes
from tests.bench import report
from tests.support.control_plane.gates import Cluster, become_ready, register, running, wait_until

GOALS = dict.fromkeys(
    ("requests_a_node_registered_and_let_in", "requests_a_node_a_transition_after_a_reboot", "largest"),
    ("<=", 2.0),
)
THREADS = 4
CONTROLLER, AGENT = "gate-bench", "node-agent"


def report_passed(cluster: Cluster, name: str, kubeconfig: Path, boot: str) -> None:
    """Report what a node's agent reports after a boot that passed."""
    found = {"boot_id": boot, "image_build": "b" * 64, "state": model.PASSED, "seconds": 41.0, "code": ""}
    with Client.from_kubeconfig(kubeconfig) as client:
        client.patch_condition(
            name,
            model.CONDITION,
            model.condition_status(model.PASSED),
            model.condition_reason(""),
            model.message(found),
            labels={"image-builder/preflight": "ok"},
        )


class Pool:
    """The simulated nodes: their names, kubeconfigs and boots."""

    def __init__(self, cluster: Cluster, count: int) -> None:
        self.cluster = cluster
        self.names = [f"node-{number:05}" for number in range(count)]
        self.kubeconfigs = {name: cluster.kubelet(name) for name in self.names}
        self.admin = cluster.kubeconfig("lab:admin", "system:masters")
        self.boots: dict[str, str] = {}

    def each(self, work: Callable[[Sequence[str]], None]) -> None:
        """Process all nodes, in a few threads."""
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(work, [self.names[start::THREADS] for start in range(THREADS)]))

    def start(self, *, known: bool) -> None:
        """Let all kubelets report that their nodes have booted."""
        self.boots = {name: str(uuid.uuid4()) for name in self.names}

        def work(names: Sequence[str]) -> None:
            # One administrator's connection replaces those of thousands of kubelets: these requests aren't counted.
            with Client.from_kubeconfig(self.admin, agent="kubelet") as client:
                for name in names:
                    (become_ready if known else register)(client, name, self.boots[name])

        self.each(work)

    def report(self) -> None:
        def work(names: Sequence[str]) -> None:
            for name in names:
                report_passed(self.cluster, name, self.kubeconfigs[name], self.boots[name])

        self.each(work)

    def settle(self, controller: Controller, *, out: int) -> None:
        """Wait until the controller sees the given number of nodes with the taint."""

        def there() -> bool:
            nodes = list(controller.informer.objects.values())
            return len(nodes) == len(self.names) and sum(bool(node.taints) for node in nodes) == out

        if not wait_until(there, 900):
            raise SystemExit("the controller does not settle the pool")


def measure(count: int) -> dict[str, float]:
    """Return the figures of one run."""
    with running() as cluster:
        kubeconfig = cluster.kubeconfig("lab:admin", "system:masters")
        settings = Settings(rate=1000, burst=1000)
        stop = threading.Event()
        controller = Controller(
            lambda: Client.from_kubeconfig(kubeconfig, agent=CONTROLLER), "bench", settings, lambda _: None
        )
        thread = threading.Thread(target=controller.run, args=(stop,))
        thread.start()
        try:
            pool = Pool(cluster, count)
            pool.start(known=False)
            pool.settle(controller, out=count)
            began = time.monotonic()
            pool.report()
            pool.settle(controller, out=0)
            first = time.monotonic() - began
            after_first = _counted(cluster)
            pool.start(known=True)
            pool.settle(controller, out=count)
            pool.report()
            pool.settle(controller, out=0)
            after_second = _counted(cluster)
            read = _read(kubeconfig)
        finally:
            stop.set()
            thread.join(30)
    return {
        "nodes": count,
        "requests_a_node_registered_and_let_in": after_first[0] / count,
        # Two transitions: gated again, and admitted again.
        "requests_a_node_a_transition_after_a_reboot": (after_second[0] - after_first[0]) / count / 2,
        "largest": max(after_first[0] / count, (after_second[0] - after_first[0]) / count / 2),
        "lists_and_watches": after_second[1],
        "requests_of_the_controller_itself": after_second[2],
        "seconds_to_let_all_in": round(first, 1),
        **read,
    }


def _read(kubeconfig: Path) -> dict[str, float]:
    """Time a reading of the control plane as the waves of a pool do it."""
    with closing(Kubernetes(kubeconfig)) as plane:
        plane.read()
        began = time.monotonic()
        reading = plane.read()
        seconds = time.monotonic() - began
    assert not reading.unread, reading.unread
    with Client.from_kubeconfig(kubeconfig) as client:
        table, whole = (len(client.text(*asked)) for asked in ((SHOWN_NODES, TABLE), (NODES,)))
    return {"reading_seconds": seconds, "reading_nodes_mib": table / 2**20, "whole_nodes_mib": whole / 2**20}


def _counted(cluster: Cluster) -> tuple[int, int, int]:
    """Return the number of requests for single nodes, for all nodes, and of the controller itself, for any number.

    The last are those for the lease and for the breaker's ConfigMap, one every 30 seconds.
    """
    agents = cluster.requests(agent=AGENT)
    gate = cluster.requests(agent=CONTROLLER)
    own = gate.total() - sum(number for (_, resource), number in gate.items() if resource == "nodes")
    lists = gate["list", "nodes"] + gate["watch", "nodes"]
    return agents.total() + gate.total() - own - lists, lists, own


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--nodes", type=int, default=7500)
    options = report.parse(parser, nodes=20)
    return report.conclude(options, measure(options.nodes), GOALS)


if __name__ == "__main__":
    sys.exit(main())
