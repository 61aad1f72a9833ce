"""The lab's control plane for a test: it runs in namespaces of its own, and the test talks to it as any client does."""

from __future__ import annotations

import base64
import http.server
import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from image_builder.cli import failure
from image_builder.cluster.gate.controller import Controller
from image_builder.cluster.gate.controller import Settings as ControllerSettings
from image_builder.cluster.gate.model import Node, Rules, node_from
from image_builder.drain.lease import Settings as LeaseSettings
from image_builder.events import Monitor
from image_builder.node.net.kube import CONFLICT, STRATEGIC_MERGE, Client, KubeError, path_of_node
from image_builder.node.preflight import model, report
from image_builder.pool.steps.control_plane import REQUESTS
from image_builder.settings import DEFAULT_STORE, Settings
from image_builder.system import namespace
from tests.support import servers
from tests.support.control_plane.kubelets import ready
from tests.support.control_plane.programs import obtain
from tests.support.control_plane.servers import ADMINISTRATORS, NODES, ControlPlane
from tests.support.images.builds import REPO

_CHILD = "import sys; from tests.support.control_plane import gates; sys.exit(gates.child(*sys.argv[1:]))"
_NOT_READY = "node.kubernetes.io/not-ready"
TAINT = {"key": "image-builder/preflight", "value": "pending", "effect": "NoSchedule"}

ADMISSION = REPO / "deploy/admission.yml"
GATE = "system:serviceaccount:kube-system:image-builder-gate"
HOW_TO = REPO / "docs" / "how-to" / "gate-a-pool.md"
# This page lists the rights that the user of `pool run --kubeconfig` needs.
POOL_RIGHTS = REPO / "docs" / "how-to" / "bring-a-pool-up.md"


class Cluster:
    """A running control plane. Commands are sent to its process line by line."""

    def __init__(self, process: subprocess.Popen[str], work: Path) -> None:
        self.process = process
        self.work = work
        self._clients: list[Client] = []
        self._events: list[dict[str, Any]] = []
        self._read = (work / "audit.log").stat().st_size
        self.admin = self.client("lab:admin", ADMINISTRATORS)

    def _ask(self, *arguments: str) -> Path:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the control plane ended"
        return Path(json.loads(answer))

    def client(self, name: str, *groups: str, agent: str = "test") -> Client:
        """Return a user's connection, which is closed when the cluster ends."""
        self._clients.append(Client.from_kubeconfig(self.kubeconfig(name, *groups), agent=agent))
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def kubeconfig(self, name: str, *groups: str) -> Path:
        """Return a new kubeconfig for a user."""
        return self._ask("kubeconfig", name, *groups)

    def kubelet(self, node: str) -> Path:
        """Return the kubeconfig of a node's kubelet."""
        return self.kubeconfig(f"system:node:{node}", NODES)

    def stop_api(self) -> None:
        self._ask("stop")

    def start_api(self) -> None:
        self._ask("start")
        self.admin.close()

    def node(self, name: str) -> Node:
        """Return a node as the gate sees it."""
        return node_from(self.admin.request("GET", f"/api/v1/nodes/{name}"), Rules())

    def is_out(self, name: str) -> bool:
        return TAINT["key"] in [taint["key"] for taint in self.node(name).taints]

    def requests(self, *, agent: str) -> Counter[tuple[str, str]]:
        """Return how often clients of that name requested each (verb, resource), from the server's own audit log.

        A watch counts once.
        """
        counts: Counter[tuple[str, str]] = Counter()
        for event in self.audit():
            # A watch's response is complete only when the watch ends.
            stage = "ResponseStarted" if event["verb"] == "watch" else "ResponseComplete"
            if event.get("userAgent") == agent and event["stage"] == stage:
                target = event.get("objectRef", {})
                resource = "/".join(target[k] for k in ("resource", "subresource") if target.get(k))
                counts[event["verb"], resource] += 1
        return counts

    def audit(self) -> list[dict[str, Any]]:
        """Return the requests since this object was made, from the server's own log. Only what is new is read."""
        with (self.work / "audit.log").open("rb") as log:
            log.seek(self._read)
            lines, end, _ = log.read().rpartition(b"\n")
        self._read += len(lines + end)
        self._events += map(json.loads, lines.splitlines())
        return self._events


@contextmanager
def running(*, controllers: bool = False) -> Iterator[Cluster]:
    """Run a control plane, built first if the store lacks it, and on request its controllers."""
    store = Path(os.environ.get("IMAGE_BUILDER_STORE", DEFAULT_STORE))
    work = store.parent / f"{store.name}-gate-{os.getpid()}-{secrets.token_hex(3)}"
    work.mkdir(mode=0o700)
    try:
        with (
            (work / "lab.log").open("w") as log,
            subprocess.Popen(
                [sys.executable, "-c", _CHILD, store, work, *(["controllers"] if controllers else [])],
                cwd=REPO,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            ) as child,
        ):
            assert child.stdout is not None
            ready = child.stdout.readline()
            assert ready, (work / "lab.log").read_text()[-4000:]
            cluster = Cluster(child, work)
            try:
                yield cluster
            finally:
                cluster.close()
    finally:
        subprocess.run(["rm", "-rf", "--one-file-system", work], check=True)


def child(store: str, work: str, *options: str) -> int:
    """Run the control plane in the child process, until standard input ends."""
    controllers = "controllers" in options

    def serve() -> int:
        parts = obtain(Settings(store=Path(store)), Monitor(), controllers=controllers)
        with ControlPlane(parts, Path(work), controllers=controllers, grace_seconds=3600) as plane:
            print(json.dumps(plane.server), flush=True)
            for line in sys.stdin:
                print(json.dumps(_do(plane, json.loads(line))), flush=True)
        return 0

    def guarded() -> int:
        return failure.guard(serve, json_wanted=False, command="control plane")

    return namespace.run_isolated(guarded)


def _do(plane: ControlPlane, arguments: list[str]) -> str:
    verb, *more = arguments
    if verb == "kubeconfig":
        return os.fspath(plane.kubeconfig(more[0], *more[1:]))
    if verb == "stop":
        plane.stop_api()
    elif verb == "start":
        plane.start_api()
    return ""


def register(client: Client, name: str, boot_id: str, **labels: str) -> None:
    """Create a Node object as a kubelet does when it is told to register with the taint and the label.

    Where there is a node controller, it has taken its own taint off at the end.
    """
    client.request("POST", "/api/v1/nodes", new_node(name, **labels))
    become_ready(client, name, boot_id)
    assert wait_until(
        lambda: _NOT_READY not in [taint["key"] for taint in client.node(name)["spec"]["taints"]]
    )


def new_node(name: str, **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"image-builder/preflight": "failed", **labels}},
        "spec": {"taints": [TAINT]},
    }


def become_ready(client: Client, name: str, boot_id: str) -> None:
    """Report a node's state as a kubelet does after each start: that it is ready, and which boot this is."""
    client.request("PATCH", f"{path_of_node(name)}/status", {"status": ready(boot_id)}, STRATEGIC_MERGE)


@contextmanager
def in_background(work: Callable[[threading.Event], object]) -> Iterator[threading.Event]:
    """Run ``work`` in a thread; when the block ends, set the event that it was given and wait for it."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,), daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join()


@contextmanager
def controlled(
    cluster: Cluster, user: str = GATE, *, identity: str = "gate", **settings: Any
) -> Iterator[list[str]]:
    """Run the gate's controller in this process, at short intervals and with a user's rights; yield what it says."""
    said: list[str] = []
    access = cluster.kubeconfig(user, "system:serviceaccounts")
    made = Controller(
        lambda: Client.from_kubeconfig(access, agent=identity),
        identity,
        ControllerSettings(**{"turn": 0.1, "idle": 0.1, "lease": LeaseSettings(pause=0.1), **settings}),
        said.append,
    )
    with in_background(made.run):
        yield said


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> bool:
    """Wait until ``condition`` holds; return whether it does."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return holds


def refusal(send: Callable[[], object]) -> Mapping[str, Any]:
    """Return how a request was refused."""
    try:
        send()
    except KubeError as error:
        return {"status": error.status, "message": error.message}
    raise AssertionError("it was not refused")


def manifests(page: Path = HOW_TO) -> list[dict[str, Any]]:
    """Return the manifests that the documentation says to apply."""
    text = page.read_text(encoding="utf-8")
    blocks = (
        [text]
        if page.suffix == ".yml"
        else re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    )
    return [m for block in blocks for m in yaml.safe_load_all(block) if m and "kind" in m]


def collection(manifest: dict[str, Any]) -> str:
    namespace = manifest["metadata"].get("namespace")
    middle = f"namespaces/{namespace}/" if namespace else ""
    plural = re.sub("y$", "ie", manifest["kind"].lower()) + "s"
    return f"/apis/{manifest['apiVersion']}/{middle}{plural}"


def give_rights(admin: Client, page: Path = HOW_TO) -> None:
    """Grant exactly the rights that a page or a file describes.

    What the accounts may change with them is limited as documented, unless the API server is too old for that.
    """
    for manifest in manifests(page):
        if manifest["kind"] == "Namespace":
            with suppress(KubeError):  # another page may have created it
                admin.request("POST", "/api/v1/namespaces", manifest)
        if manifest["kind"] in ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"):
            admin.request("POST", collection(manifest), manifest)
    if admin.find("/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"):
        add_policies(admin, ADMISSION)


def bind(admin: Client, role: str, user: str) -> None:
    """Bind a ClusterRole that no manifest binds to an account."""
    manifest = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": role},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }
    admin.request("POST", collection(manifest), manifest)


def add_policies(admin: Client, page: Path, **variables: str) -> None:
    """Add a file's admission policies, for which Debian's API server is too old; ``variables`` replace its own."""
    for manifest in manifests(page):
        if manifest["kind"].startswith("ValidatingAdmissionPolicy"):
            for variable in manifest["spec"].get("variables", ()):
                variable["expression"] = variables.get(variable["name"], variable["expression"])
            try:
                admin.request("POST", collection(manifest), manifest)
            except KubeError as error:
                if error.status != CONFLICT:  # another page's rights came with them
                    raise


def request_certificate(cluster: Cluster, name: str, signer: str) -> str:
    """Request a certificate that is never issued, since no node has this name. Return the request's path."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, SHA256())
    manifest = {
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"name": name},
        "spec": {
            "request": base64.b64encode(request.public_bytes(Encoding.PEM)).decode(),
            "signerName": signer,
            "usages": ["client auth"],
        },
    }
    cluster.admin.request("POST", REQUESTS, manifest)
    return f"{REQUESTS}/{name}"


def deny_certificate(cluster: Cluster, path: str) -> None:
    """Deny the request of ``request_certificate``, so that it is no longer pending."""
    denied = {"type": "Denied", "status": "True", "reason": "test", "message": "denied"}
    cluster.admin.request(
        "PATCH", f"{path}/approval", {"status": {"conditions": [denied]}}, "application/merge-patch+json"
    )


class Machine:
    """A test's node: its kubelet's identity, and the files that its preflight leaves."""

    def __init__(self, cluster: Cluster, directory: Path, name: str, healthz: str) -> None:
        self.cluster, self.name, self.healthz = cluster, name, healthz
        self.kubeconfig = cluster.kubelet(name)
        self.kubelet = cluster.client(f"system:node:{name}", NODES, agent="kubelet")
        self.directory = directory / name
        self.directory.mkdir()
        self.boot = ""

    def start(self, *, is_known: bool) -> None:
        """Start the machine with a new boot id, which its kubelet reports."""
        self.boot = str(uuid.uuid4())
        (self.directory / "boot_id").write_text(f"{self.boot}\n")
        (self.directory / model.REPORTED).unlink(missing_ok=True)
        if is_known:
            become_ready(self.kubelet, self.name, self.boot)
        else:
            register(self.kubelet, self.name, self.boot, machine=self.name)

    def verdict(self, state: str, code: str = "", action: str = "none") -> dict[str, Any]:
        """Return what a preflight of this boot would have written."""
        return {
            "format": 1,
            "boot_id": self.boot,
            "image_build": "b" * 64,
            "state": state,
            "code": code,
            "reason": "mismatch in SM 7" if code else "",
            "action": action,
            "checks": [],
            "started": "2026-01-01T00:00:00+00:00",
            "seconds": 41.0,
        }

    def report(
        self,
        state: str,
        code: str = "",
        action: str = "none",
        sleep: Callable[[float], None] = time.sleep,
    ) -> int:
        """Report as the unit does, with the agent's own code."""
        run, etc = self.directory / "run", self.directory / "etc"
        for folder in (run, etc):
            folder.mkdir(exist_ok=True)
        (run / model.FILE).write_text(json.dumps(self.verdict(state, code, action)))
        settings = {"kubeconfig": os.fspath(self.kubeconfig), "healthz": self.healthz, "jitter_seconds": 0}
        (etc / "preflight.json").write_text(json.dumps(settings))
        return report.run(report.Places(run, etc, boot_id=self.directory / "boot_id", sleep=sleep))

    def is_out(self) -> bool:
        return self.cluster.is_out(self.name)

    def condition(self) -> dict[str, Any]:
        conditions = self.cluster.admin.request("GET", f"/api/v1/nodes/{self.name}")["status"]["conditions"]
        return next((c for c in conditions if c["type"] == model.CONDITION), {})


class _Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def healthy() -> Iterator[str]:
    """Yield the URL of a health endpoint that answers like that of a working kubelet."""
    with servers.running(http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Healthy)) as server:
        yield f"http://127.0.0.1:{server.server_port}/healthz"
