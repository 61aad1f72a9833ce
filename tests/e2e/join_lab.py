"""The environment of the machine of ``join``: a control plane, the gate's controller, a metadata service, a broker.

The metadata service and the broker are local servers. The answers of the former have Azure's documented format
(tests/support/nodes/joins.py) and aren't recordings, since no cloud is available here. They listen where a machine in
Azure finds them: QEMU's user network routes the machine's connections into this network, which has those addresses on
its loopback interface.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import yaml

from image_builder.cluster.broker import tokens
from image_builder.events import Monitor
from image_builder.node.net.kube import Client, KubeError
from image_builder.node.net.kubeconfig import load
from image_builder.settings import REPO_ROOT, Settings
from image_builder.system import process
from tests.support.control_plane import brokers, gates
from tests.support.control_plane.programs import obtain
from tests.support.control_plane.servers import ADMINISTRATORS, ControlPlane
from tests.support.nodes import joins
from tests.support.registries.pulls import NETWORK, have_addresses, leave_the_network

# The address of Azure's metadata service, and the one that QEMU gives its machine.
IMDS, MACHINE = "169.254.169.254", "10.0.2.15"
# Addresses of this network that a machine can reach.
SERVER, BROKER = f"{NETWORK}.0.10", f"{NETWORK}.0.11"
BROKER_PORT = 8443
BINDINGS = REPO_ROOT / "docs/how-to/join-nodes.md"
# An API server has admission policies from this minor version on.
_POLICIES_SINCE = 30
POOL = "lab-join"
# An emulated machine is ten times slower than the default deadlines allow for.
_SLOWER = {"identity": 300, "network": 300, "disk": 300, "runtime": 600, "gpu": 300, "credentials": 600}
_COMMAND = (sys.executable, "-P", "-m", "image_builder.cli")
_ENVIRONMENT = {"PYTHONPATH": os.fspath(REPO_ROOT)}
_TOKEN_SECONDS = 1800


def variables(ca: str) -> dict[str, Any]:
    """Return the inventory variables of the pool, whose API server is authenticated by ``ca`` (PEM)."""
    return {
        "join_generation": 1,
        "join_server": f"https://{SERVER}:6443",
        "join_ca": ca,
        "join_dns": ["10.96.0.10"],
        "join_credentials": {
            "kind": "broker",
            "url": f"https://{BROKER}:{BROKER_PORT}/token",
            "resource": joins.BROKER["resource"],
        },
        "join_max_pods": 30,
        "join_labels": {"node.example/pool": POOL},
        "join_platform_labels": {
            "topology.kubernetes.io/zone": "zone",
            "node.example/build": "build",
        },
        "join_taints": [{"key": "node.example/team", "value": "research", "effect": "NoSchedule"}],
        "join_budget_seconds": 3600,
        "join_deadlines": {**_SLOWER, "kubelet": 300, "ready": 1200},
    }


def render(ca: str, work: Path, more: Mapping[str, Any]) -> bytes:
    """Return the machine's user data, made by the real ``pool render``; ``more`` are additional variables."""
    inventory = work / "pool.yml"
    values = variables(ca) | dict(more)
    told = {"all": {"children": {"pool": {"hosts": {"worker-join": None}, "vars": values}}}}
    inventory.write_text(yaml.safe_dump(told), encoding="utf-8")
    out = work / "rendered"
    process.run([*_COMMAND, "pool", "render", "-i", inventory, "pool", "--out", out], env=_ENVIRONMENT)
    return (out / "worker-join.json").read_bytes()


class JoinLab:
    """A context manager: all servers run inside the block.

    Callers must be in namespaces of their own (``namespace.run_isolated``); ``__enter__`` leaves the network once the
    control plane is in the store, unless it is already an isolated one (``is_apart``). ``work`` is an empty directory;
    ``more`` are pool variables that extend or override ``variables``.
    """

    def __init__(
        self,
        settings: Settings,
        work: Path,
        *,
        more: Mapping[str, Any] = MappingProxyType({}),
        is_apart: bool = False,
    ) -> None:
        self.settings, self.work, self.more, self.is_apart = settings, work, more, is_apart
        self.asked: list[str] = []
        self.tokens: list[str] = []
        self.wanted: list[dict[str, str]] = []
        self.user_data = b""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        parts = obtain(self.settings, Monitor(), controllers=True)
        # The machine's own address too, for a relay to it: the API server connects to nodes at the address they report.
        (have_addresses if self.is_apart else leave_the_network)(IMDS, MACHINE)
        with ExitStack() as stack:
            self.plane = stack.enter_context(ControlPlane(parts, self.work, controllers=True, address=SERVER))
            self.admin = stack.enter_context(self.client("lab:admin", ADMINISTRATORS))
            gates.give_rights(self.admin)
            gates.give_rights(self.admin, BINDINGS)
            gates.give_rights(self.admin, brokers.RIGHTS)
            if self.has_policies:
                gates.add_policies(self.admin, brokers.RIGHTS)
            stack.enter_context(
                process.background(self._gate(), log=self.work / "gate.log", env=_ENVIRONMENT)
            )
            self.user_data = render(self.plane.authority.certificate.decode(), self.work, self.more)
            server = stack.enter_context(joins.serving(joins.as_imds(self._imds), address=(IMDS, 80)))
            self.asked = server.asked
            stack.enter_context(joins.serving(self._broker, self._tls(), (BROKER, BROKER_PORT)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def has_policies(self) -> bool:
        return self.plane.minor >= _POLICIES_SINCE

    def refusal(self) -> str:
        """Have the broker's account request what it doesn't need; return the refusal, empty if it is granted."""
        wanted = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/service-account-token",
            "metadata": {
                "name": "stolen",
                "annotations": {"kubernetes.io/service-account.name": "image-builder-broker"},
            },
        }
        with self.client(brokers.SERVICE_ACCOUNT) as client:
            try:
                client.request("POST", "/api/v1/namespaces/kube-system/secrets", wanted)
            except KubeError as error:
                return error.message
        return ""

    def client(self, name: str, *groups: str) -> Client:
        """Return a new connection for a user."""
        return Client(load(self.plane.kubeconfig(name, *groups)), agent="join-lab")

    def _gate(self) -> list[str | Path]:
        rights = self.plane.kubeconfig(gates.GATE, "system:serviceaccounts")
        return [*_COMMAND, "gate", "run", "--approve", "--kubeconfig", rights]

    def _tls(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made = self.plane.authority.issue("broker", addresses=[BROKER]).write(self.work, "broker")
        context.load_cert_chain(*made)
        return context

    def _imds(self, path: str, _headers: dict[str, str], _body: bytes, _who: str) -> joins.Answer:
        if path.startswith("/metadata/instance/compute/name"):
            return 200, {"Content-Type": "text/plain"}, joins.INSTANCE["compute"]["name"].encode()
        if path.startswith("/metadata/scheduledevents"):
            return joins.answer({"DocumentIncarnation": 1, "Events": []})
        if path.startswith("/metadata/identity/oauth2/token"):
            return joins.answer(joins.IDENTITY)
        if path.startswith("/metadata/attested/document"):
            return joins.answer({"encoding": "pkcs7", "signature": joins.DOCUMENT})
        found = joins.instance(self.user_data)
        found["network"]["interface"][0]["ipv4"]["ipAddress"][0]["privateIpAddress"] = MACHINE
        return joins.answer(found)

    def _broker(self, _path: str, headers: dict[str, str], body: bytes, _who: str) -> joins.Answer:
        """Give the machine with this identity a token of its own."""
        who = json.loads(body)
        is_known = headers.get("Authorization") == f"Bearer {joins.IDENTITY['access_token']}"
        if not is_known or who["vm_id"] != joins.VM_ID:
            return 403, {}, b""
        if "document" not in who:
            return joins.answer({"nonce": joins.NONCE})
        wanted = tokens.Grant(
            who["node"], who["vm_id"], str(time.time_ns()), POOL, groups=(), seconds=_TOKEN_SECONDS
        )
        with self.client(brokers.SERVICE_ACCOUNT) as client:
            issued = tokens.issue(client, wanted, time.time())
        self.tokens.append(issued.text)
        self.wanted.append(who)
        expires = datetime.fromtimestamp(issued.expires, UTC)
        return joins.answer({"token": issued.text, "expires": expires.isoformat()})
