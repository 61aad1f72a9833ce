"""A fleet that is rolled for real, except for its machines: a control plane, simulated kubelets, and Azure's simulator.

A reimage of an instance makes its node go away and come back with another boot. What a node reports over SSH, and the
suite, come from the simulator too, since there is no machine.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

from image_builder.drain import fence, taint
from image_builder.node.net.kube import Client as Kube
from image_builder.node.net.kube import KubeError, path_of_node
from image_builder.node.net.kubeconfig import load
from image_builder.pool.plan.model import OK, Host, Outcome, Pool, ScaleSet, ended, failed
from image_builder.pool.plan.plan import Plan, PlannedFrom, make_plan
from image_builder.pool.plan.plan import load as load_plan
from image_builder.pool.plan.policy import Deadlines, Policy, Roll, WaveDrain
from image_builder.pool.reach.hostkeys import CertificateAuthority
from image_builder.pool.reach.reach import Access
from image_builder.pool.run import driver
from image_builder.pool.run.driver import Work
from image_builder.pool.run.journal import open_journal
from image_builder.pool.run.journal import read_journal as read_run
from image_builder.pool.run.resume import take_up
from image_builder.pool.run.state import Progress
from image_builder.pool.scale_set.client import HOLD_TAG, Client
from image_builder.pool.scale_set.records import read_journal as read_requests
from image_builder.pool.scale_set.roll import RARELY, Patience
from image_builder.pool.scale_set.target import read_target
from image_builder.pool.scale_set.verdict import Node
from image_builder.pool.steps.control_plane import ControlPlane, Unwatched
from image_builder.pool.steps.drains import Key
from image_builder.pool.steps.fleet import Change, Setup
from image_builder.pool.steps.roll import RollFleet
from image_builder.system.identity import identity
from image_builder.system.journal import Journal
from image_builder.system.resource_manager import ResourceManager
from tests.support.arm.fleet import BUILDS, NEW, OLD, NoDisks, actions, add_version
from tests.support.arm.limits import Limits
from tests.support.arm.model import SUBSCRIPTION, Answer, Logged, Request
from tests.support.arm.scale_sets import SERVICES, Machine, ScaleSets, SetState
from tests.support.arm.service import Arm
from tests.support.arm.serving import TOKEN, Served
from tests.support.control_plane.gates import Cluster, bind, give_rights
from tests.support.control_plane.kubelets import AGENT, Kubelets
from tests.support.control_plane.servers import ADMINISTRATORS
from tests.support.images.builds import REPO
from tests.support.pools import invariants
from tests.support.pools.recorder import Log, Recorder, audited

ACCOUNT = "system:serviceaccount:kube-system:image-builder-roll"
RIGHTS = REPO / "deploy/roll.yml"
RUN_AGENT = "image-builder-roll"
QUICK = WaveDrain(settle_seconds=1.0, poll_seconds=0.3, max_wait_seconds=15.0)
_NODES = "/nodes/"
PATIENCE = Patience(look=0.2, settle=2.0, request=60.0, boot=20.0, minute=0.5)
SECONDS = {"upgrade": 0.5, "reimage": 1.0, "service": 0.1}
GENEROUS: dict[str, Any] = {"wave_budget": "50%", "budget": "50%", "same_least": 100}


@dataclass
class World:
    """The cluster, Azure, and the answers for the nodes.

    ``broken`` are hosts whose checks fail with the new image. ``up_at`` is when the last boot of each ends, ``began``
    when the log begins.
    """

    cluster: Cluster
    kubelets: Kubelets
    served: Served
    scale_sets: ScaleSets
    recorder: Recorder
    folder: Path
    hosts: tuple[Host, ...] = ()
    broken: set[str] = field(default_factory=set)
    up_at: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.time)

    def add(self, sets: int, each: int) -> tuple[Host, ...]:
        """Add scale sets of ``each`` nodes that run the old image; return their hosts."""
        first, hosts = len(self.scale_sets.sets), list[Host]()
        self.kubelets.register(f"gpu-{first + s}-{n}" for s in range(sets) for n in range(each))
        for number in range(first, first + sets):
            path = self.scale_sets.add(f"gpu-{number}", OLD, each)
            hosts += [
                Host(
                    name=f"gpu-{number}-{machine.id}",
                    address="192.0.2.1",
                    pool="gpu",
                    scale_set=f"gpu-{number}",
                    vm_size="Standard_ND96isr_H100_v5",
                    zone=str(1 + number % 2),
                    image="worker",
                    vm_id=machine.vm_id,
                    scale_set_id=path,
                    instance=machine.id,
                )
                for machine in self.scale_sets.sets[path.lower()].machines.values()
            ]
        return tuple(hosts)

    @contextmanager
    def part(self, sets: int, each: int, folder: Path) -> Iterator[World]:
        """Yield new scale sets as a world of their own, whose nodes are gone afterwards."""
        part = replace(self, hosts=self.add(sets, each), folder=folder, began=time.time())
        faults = self.served.arm.faults
        before = list(faults)
        faults.append(part.answer)
        try:
            yield part
        finally:
            faults[:] = before
            for host in part.hosts:
                self.kubelets.nodes.pop(host.name, None)
                with suppress(KubeError):
                    self.admin.request("DELETE", path_of_node(host.name))

    @property
    def groups(self) -> list[SetState]:
        """The scale sets of its hosts."""
        return [self.scale_sets.sets[path.lower()] for path in {host.scale_set_id for host in self.hosts}]

    def account(self) -> Path:
        return self.cluster.kubeconfig(ACCOUNT, "system:serviceaccounts")

    def log(self, rolled: Plan) -> Log:
        """Return the log of what has happened so far to the hosts of a plan."""
        self.recorder.catch_up(self.admin)
        sets = {host.scale_set_id.lower() for host in rolled.hosts}
        names = {host.name for host in rolled.hosts}
        journal, sent = self.folder / "run.jsonl", self.folder / "requests.jsonl"
        recorder, since = self.recorder, self.began
        return Log(
            plan=rolled,
            run_id=rolled.run,
            sent=[each for each in recorder.sent if each.scale_set in sets and each.at >= since],
            disks=[each for each in recorder.disks if each.scale_set in sets and each.at >= since],
            nodes=[state for state in recorder.nodes if state.name in names],
            pods=list(recorder.pods),
            audit=list(audited(self.cluster.audit(), RUN_AGENT, since)),
            run=read_run(journal) if journal.exists() else [],
            requests=read_requests(sent) if sent.exists() else [],
            machines={
                (path, number): machine
                for path in sets
                for number, machine in self.scale_sets.sets[path].machines.items()
            },
            services={path: self.scale_sets.sets[path].services for path in sets},
            versions={path: resource.content for path, resource in self.served.arm.resources.items()},
            files=[path for path in self.folder.glob("*") if path.suffix in (".json", ".jsonl", ".log")],
        )

    def require_invariants(self, rolled: Plan) -> None:
        invariants.require(self.log(rolled))

    def drive(self, rolled: Plan) -> Progress:
        """Drive a roll to its end, in this process."""
        return drive(self.folder, self.served.url, rolled, self.account())

    @property
    def admin(self) -> Kube:
        return self.cluster.admin

    def machine(self, host: Host) -> Machine:
        return self.scale_sets.sets[host.scale_set_id.lower()].machines[host.instance]

    def build(self, name: str) -> str:
        return BUILDS[self.machine(self.host(name)).disk]

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def answer(self, request: Request) -> Answer | None:
        """Answer a request for what a node would report about itself."""
        if not request.path.startswith(_NODES):
            return None
        name = request.path.removeprefix(_NODES)
        if not any(host.name == name for host in self.hosts):
            return None
        machine = self.scale_sets.sets[self.host(name).scale_set_id.lower()].machines.get(
            self.host(name).instance
        )
        if machine is None:
            return Answer(404, {})
        if machine.state == "Updating" or time.time() < self.up_at.get(name, 0.0):
            return Answer(404, {})
        build = BUILDS[machine.disk]
        is_broken = name in self.broken and build == BUILDS[NEW]
        return Answer(200, {"boot_id": machine.boot_id, "build": build, "is_broken": is_broken})

    def models(self) -> set[str]:
        return {group.image for group in self.groups}

    def reimages_of(self, rolled: Plan) -> int:
        """Return how many disks of a plan's hosts were replaced."""
        return sum(self.machine(host).reimages for host in rolled.hosts)

    def node(self, name: str) -> dict[str, object]:
        return self.admin.request("GET", path_of_node(name))

    def is_ours(self, name: str) -> bool:
        """Return whether a node has a cordon or taint of ours."""
        node = self.admin.request("GET", path_of_node(name))
        taints = node["spec"].get("taints") or ()
        return fence.record_of(node) is not None or any(entry["key"] == taint.TAINT for entry in taints)

    def require_clean_sets(self) -> None:
        """Require what must hold after every ending: services are running, and no run holds a set."""
        for group in self.groups:
            assert group.services == dict.fromkeys(SERVICES, "Running")
            assert HOLD_TAG not in (group.content.get("tags") or {})

    def changes(self) -> list[Mapping[str, Any]]:
        """Return the roll's requests that changed something in the cluster, from the API server's log."""
        events = audited(self.cluster.audit(), RUN_AGENT, self.began)
        return [event for event in events if event["verb"] not in ("get", "list", "watch")]

    def requests(self) -> list[Logged]:
        """Return the requests that changed its scale sets, or tried to, in the order of arrival."""
        paths = tuple(f"{group.content['id'].lower()}/" for group in self.groups)
        return [entry for entry in self.served.arm.log if f"{entry.path.lower()}/".startswith(paths)]

    def reimages(self) -> list[str]:
        """Return the paths of requests that replace disks."""
        ends = ("/manualupgrade", "/reimage")
        return [e.path for e in self.requests() if e.method == "POST" and e.path.endswith(ends)]


class SimulatedFleet(RollFleet):
    """The real fleet, except that a machine's answers come from Azure's simulator, at ``url``."""

    url: str

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._asking, self._opened = threading.local(), list[http.client.HTTPSConnection]()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for connection in self._opened:
            connection.close()

    def _ask_simulator(self, host: Host) -> Mapping[str, Any]:
        # Not through Azure's SDK, which costs ten times as much.
        if not hasattr(self._asking, "connection"):
            context = ssl.create_default_context(cafile=os.environ["REQUESTS_CA_BUNDLE"])
            address = urlsplit(self.url).netloc
            self._asking.connection = http.client.HTTPSConnection(address, context=context, timeout=30)
            self._opened.append(self._asking.connection)
        connection: http.client.HTTPSConnection = self._asking.connection
        connection.request("GET", f"{_NODES}{host.name}", headers={"Authorization": f"Bearer {TOKEN}"})
        answer = connection.getresponse()
        content: Mapping[str, Any] = json.loads(answer.read())
        return content if answer.status == 200 else {}

    def read(self, host: Host) -> Node | Outcome:
        answer = self._ask_simulator(host)
        return Node(answer["boot_id"], answer["build"]) if answer else ended("timeout")

    def works(self, _host: Host) -> str:
        return ""

    def verify(self, work: Sequence[Work]) -> None:
        for w in work:
            key = self._begin(w, "verify")
            self._threads.submit(self._check, w.host, key)

    def _check(self, host: Host, key: Key) -> None:
        is_broken = self._ask_simulator(host).get("is_broken")
        self._report(key, failed("verify", 101, "test_gpu") if is_broken else OK)


@contextmanager
def surroundings(
    cluster: Cluster, arm: Arm, names: Iterable[str], folder: Path, seconds: Mapping[str, float] = SECONDS
) -> Iterator[tuple[Cluster, Kubelets, Served, ScaleSets, Recorder]]:
    """Run simulated kubelets of these names, and serve Azure's simulator.

    The caller adds scale sets, and enters the recorder.
    """
    from tests.support.arm.serving import served

    give_rights(cluster.admin, RIGHTS)
    bind(cluster.admin, "image-builder-roll-evict", ACCOUNT)
    access = load(cluster.kubeconfig("kubelets", ADMINISTRATORS))
    (folder / "cloud").mkdir()
    with (
        Kubelets(lambda: Kube(access, agent=AGENT)) as kubelets,
        served(arm, folder / "cloud") as service,
    ):
        kubelets.register(names)
        scale_sets = ScaleSets(arm, seconds=dict(seconds))
        recorder = Recorder(lambda: Kube(access, agent="recorder"), scale_sets)
        yield cluster, kubelets, service, scale_sets, recorder


@contextmanager
def world(
    cluster: Cluster, sets: int, each: int, folder: Path, seconds: Mapping[str, float] = SECONDS
) -> Iterator[World]:
    """Run Azure's simulator beside a cluster with ``sets`` scale sets of ``each`` nodes; all run the old image.

    ``seconds`` are the durations of Azure's operations, and of a node's ``boot`` from its new disk.
    """
    arm = Arm(NoDisks(), url="https://arm", limits=Limits.boundless(), actions=actions())
    for path in (OLD, NEW):
        add_version(arm, path)
    with surroundings(cluster, arm, (), folder, seconds) as place:
        _, kubelets, _, scale_sets, recorder = place
        state = World(*place, folder)

        def reimaged(group: SetState, machine: Machine) -> None:
            recorder.reimaged(group, machine)
            name = f"{group.content['name']}-{machine.id}"
            boot = seconds.get("boot", 0.0)
            state.up_at[name] = time.time() + boot
            threading.Timer(boot, kubelets.boot, (name,)).start()

        scale_sets.reimaged = reimaged
        arm.faults.append(state.answer)
        state.hosts = state.add(sets, each)
        with recorder:
            yield state


def plan(world: World, **policy: Any) -> Plan:
    """Return the plan of a roll to the new version, which is read from Azure with its own SDK."""
    rolled = Policy.model_validate(
        {
            "mode": "roll",
            "waves": ("50%",),
            "soak_seconds": (0.0,),
            "cadence_seconds": 0.0,
            "retry_seconds": 0.5,
            "deadlines": Deadlines(probe=20.0),
            "roll": Roll(max_unavailable="50%", drain=QUICK, max_wait_seconds=30.0),
            **policy,
        }
    )
    names = sorted({host.scale_set for host in world.hosts})
    each = len(world.hosts) // len(names)
    pools = [Pool(name="gpu", scale_sets=tuple(ScaleSet(name=n, capacity=each, hosts=each) for n in names))]
    with ResourceManager(SUBSCRIPTION, endpoint=world.served.url) as manager:
        target = read_target(Client(manager), world.hosts, NEW)
    inventory = PlannedFrom(paths=("hosts.yml",), digest="d")
    return make_plan(inventory, pools, world.hosts, rolled, target=target)


def drive(
    folder: Path,
    url: str,
    rolled: Plan,
    account: Path,
    on_record: Callable[[], None] = lambda: None,
    *,
    patience: Patience = PATIENCE,
    settle_seconds: float = 1.0,
    control_plane: ControlPlane | None = None,
) -> Progress:
    """Drive a roll, from its journal if it has one; ``on_record`` is called after each record of either journal."""
    key, authorities = folder / "key", folder / "authorities"
    if not key.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        authorities.write_text(f"@cert-authority * {key.with_suffix('.pub').read_text()}")
    setup = Setup(
        access=Access(CertificateAuthority(authorities), "root", key),
        deadlines=rolled.policy.deadlines,
        python=Path("/usr/bin/python3"),
        control_plane=control_plane or Unwatched(),
    )
    access = load(account)
    assert rolled.target and rolled.policy.rolls
    longest = patience.look * RARELY
    with ResourceManager(SUBSCRIPTION, endpoint=url) as manager:
        change = Change(
            target=rolled.target,
            run=rolled.run,
            holder=identity(rolled.holder),
            kube=lambda: Kube(access, agent=RUN_AGENT),
            # The waits that Azure asks for aren't shorter in tests, so they are capped.
            azure=Client(manager, lambda seconds: time.sleep(min(seconds, longest)), pause=patience.look),
            journal=folder / "requests.jsonl",
            policy=rolled.policy.rolls.drain,
            max_fenced=rolled.max_fenced,
            deadline=rolled.policy.rolls.deadline_at,
            patience=patience,
            settle_seconds=settle_seconds,
        )
        fleet = SimulatedFleet(setup, change, folder / "work")
        fleet.url = url
        append = Journal.append

        def appended(journal: Any, record: Any) -> None:
            append(journal, record)
            on_record()

        with (
            mock.patch.object(Journal, "append", appended),
            fleet,
            open_journal(folder / "run.jsonl") as journal,
        ):
            progress = take_up(rolled, journal, rolled.hosts, at=time.time())
            driver.run(progress, fleet, journal.append)
    return progress


def drive_and_die(folder: Path, url: str, account: Path, last: int) -> None:
    """Drive the roll of a directory's plan in this process, and SIGKILL it after ``last`` records; 0: never."""
    records = itertools.count(1)

    def count() -> None:
        if next(records) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    drive(folder, url, load_plan(folder / "plan.json"), account, count)


if __name__ == "__main__":
    drive_and_die(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
