"""Whole runs of the compiled archive: what they leave behind, whatever happens to them, and what Kubernetes is told."""

from __future__ import annotations

import json
import os
import random
import signal
import ssl
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from image_builder.lab import certificate
from image_builder.node import mounts, status, zipapp
from image_builder.node.health import report
from image_builder.system.namespace import run_isolated
from tests.support.nodes.health_looks import kvp_record
from tests.support.servers import running

pytestmark = pytest.mark.root

CAP_SYS_TIME = 25
REPO = Path(__file__).resolve().parents[2]
# The archive's command, with the test's own paths.
START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; run = Path(sys.argv[2]); "
    "from image_builder.node.health import command; from image_builder.node.health.model import Places; "
    "places = Places(run=run, kvp=run / 'kvp', kubelet=run / 'kubelet'); "
    "sys.exit(command.run(places=places, directory=Path(sys.argv[3])))"
)


@dataclass
class Node:
    """A node's directories, and the agent as the node compiles it."""

    base: Path
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("etc", "run", "metrics", "disk"):
            (self.base / name).mkdir()
        (self.base / "agent").write_bytes(zipapp.compiled(zipapp.archive()))
        self.configure()

    def configure(self, **settings: Any) -> None:
        self.settings |= settings
        known = {
            "imds": "",
            "kubeconfig": "/nonexistent",
            "paths": [str(self.base / "disk")],
            "textfile_directory": str(self.base / "metrics"),
            "severities": {"network.route": "ignore", "clock.unsynchronized": "ignore"},
            # How full the test machine's disk is doesn't matter here.
            "full_warn_percent": 100,
            "full_fail_percent": 100,
            **self.settings,
        }
        (self.base / "etc/health.json").write_text(json.dumps(known))

    @property
    def argv(self) -> list[str]:
        places = [str(self.base / name) for name in ("agent", "run", "etc")]
        return [sys.executable, "-I", "-W", "always::ResourceWarning", "-c", START, *places]

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self.argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def look(self, status: int = 0) -> str:
        done = subprocess.run(self.argv, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
        assert "ResourceWarning" not in done.stdout + done.stderr, done.stderr  # nothing is left open
        return done.stdout

    def known(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads((self.base / "run/health.json").read_bytes())
        return read

    def metrics(self) -> dict[str, float]:
        text = (self.base / "metrics/node_health.prom").read_text()
        assert text.endswith("\n")
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        assert len(lines) == len({name for name, _ in lines}), "a sample stands there twice"
        return {name: float(value) for name, value in lines}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_look_leaves_whole_files_and_nothing_else(node: Node) -> None:
    began = time.time()
    assert node.look() == "" and node.look() == ""
    assert sorted(path.name for path in (node.base / "run").iterdir()) == [
        "health-state.json", "health.json", "health.lock",
    ]  # fmt: skip
    assert [path.name for path in (node.base / "metrics").iterdir()] == ["node_health.prom"]
    assert (node.base / "metrics/node_health.prom").stat().st_mode & 0o777 == 0o644
    known, written = node.known(), node.metrics()
    assert known["state"] == "ok" and known["findings"] == []
    assert known["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert {name: one["error"] for name, one in known["checks"].items() if one["error"]} == {}
    assert written['node_health_state{state="ok"}'] == 1
    assert int(began) <= written["node_health_run_timestamp_seconds"] <= time.time()
    names = {name.partition("{")[0].removeprefix(report.PREFIX) for name in written}
    assert names <= set(report.HELP)


def test_capabilities_of_the_unit_are_enough(node: Node) -> None:
    """Every check can run with only those, even where dmesg is restricted; and they don't allow setting the clock."""
    unit = (REPO / "roles/node_health/templates/node-health.service.j2").read_text()
    names = unit.partition("\nCapabilityBoundingSet=")[2].splitlines()[0].split()
    kept = ",".join(f"+{name.removeprefix('CAP_').lower()}" for name in names)
    confined = ["setpriv", "--no-new-privs", f"--bounding-set=-all,{kept}"]
    done = subprocess.run([*confined, *node.argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {name: one["error"] for name, one in node.known()["checks"].items() if one["error"]} == {}
    status = subprocess.run([*confined, "cat", "/proc/self/status"], capture_output=True, text=True).stdout
    assert not int(status.partition("CapEff:")[2].split()[0], 16) >> CAP_SYS_TIME & 1


def test_slow_checks_are_not_made_each_time(node: Node) -> None:
    node.look()
    first = node.known()["checks"]
    node.look()
    second = node.known()["checks"]
    assert second["gpu"]["time"] == first["gpu"]["time"] and second["nvme"]["time"] == first["nvme"]["time"]
    assert second["clock"]["time"] > first["clock"]["time"]
    # The last results are still there.
    assert node.metrics()['node_health_check_success{check="gpu"}'] == 1


def test_metrics_that_can_t_be_written_are_told_and_all_else_is_done(node: Node) -> None:
    (node.base / "metrics").rmdir()
    assert "could not be written: No such file" in node.look(status=1)
    assert node.known()["state"] == "ok"


def test_full_disk_of_metrics_keeps_the_last_whole(node: Node) -> None:
    def scenario() -> int:
        folder = node.base / "metrics"
        mounts.mount("tmpfs", folder, "tmpfs", options="size=64k")
        node.look()
        before = (folder / "node_health.prom").read_bytes()
        (folder / "other").write_bytes(bytes(64 * 1024 - 4096 * (2 + len(before) // 4096)))
        (folder / "rest").touch()
        try:
            with open(folder / "rest", "wb", buffering=0) as stream:
                while True:
                    stream.write(bytes(4096))
        except OSError:
            pass
        assert "No space left" in node.look(status=1)
        assert (folder / "node_health.prom").read_bytes() == before
        assert sorted(path.name for path in folder.iterdir()) == ["node_health.prom", "other", "rest"]
        return 0

    # The namespace's /dev has no kernel log: that check couldn't run, and the others did.
    assert run_isolated(scenario) == 0


def test_damaged_state_is_told_and_made_anew(node: Node) -> None:
    node.look()
    state = node.base / "run/health-state.json"
    whole = state.read_bytes()
    for damaged in (b"", b"{", whole[: len(whole) // 2], b"\0" * 100, b'{"format": 1}'):
        state.write_bytes(damaged)
        assert "is damaged, starting over" in node.look()
        assert json.loads(state.read_bytes())["format"] == 2 and node.look() == ""


def test_wrong_settings_are_an_error(node: Node) -> None:
    node.configure(nonsense=1)
    assert "nonsense is not a known key" in subprocess.run(node.argv, capture_output=True, text=True).stderr


def test_many_at_once_take_turns(node: Node) -> None:
    """No run sees another's half-written state: the log's records are counted once, and every file is complete."""
    node.look()
    before = json.loads((node.base / "run/health-state.json").read_bytes())["checks"]["kernel_log"]["memory"]
    running = [node.start() for _ in range(4)]
    for process in running:
        said, _ = process.communicate()
        assert process.returncode == 0 and said == "", said
    after = json.loads((node.base / "run/health-state.json").read_bytes())["checks"]["kernel_log"]["memory"]
    assert after["number"] >= before["number"] and after["lost"] == 0
    assert node.metrics() and node.known()["state"] == "ok"


def test_killed_at_any_time_leaves_no_half_file(node: Node) -> None:
    node.look()
    began = time.monotonic()
    node.look()
    whole = time.monotonic() - began
    chance = random.Random(5)
    killed = 0
    for _ in range(25):
        began, process = time.monotonic(), node.start()
        try:
            process.wait(chance.uniform(0.1, 1.2) * whole)
            whole = min(whole, time.monotonic() - began)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        process.communicate()
        assert node.known()["format"] == 1
        assert json.loads((node.base / "run/health-state.json").read_bytes())["format"] == 2
        assert "node_health_run_timestamp_seconds" in node.metrics()
    assert killed >= 5
    # Drafts have names that no collector reads, and the next run removes them.
    left = {path.name for path in (node.base / "metrics").iterdir()}
    assert left <= {"node_health.prom", ".node_health.prom.new"}
    assert node.look() == ""
    assert [path.name for path in (node.base / "metrics").iterdir()] == ["node_health.prom"]
    assert not list((node.base / "run").glob(".*"))


@dataclass
class Api:
    """An API server that records the requests it gets; ``answers`` to PATCHes are given in order, then 200."""

    url: str = ""
    asked: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)


@contextmanager
def api_server(folder: Path) -> Iterator[tuple[Api, Path]]:
    """Serve TLS with a certificate from the lab's authority; yields the record and a kubeconfig."""
    api = Api()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # so that we keep the connection open, as a real one does

        def do_PATCH(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.headers["Authorization"] == "Bearer of-the-kubelet"
            api.asked.append((self.command, self.path, body))
            status, headers = api.answers.pop(0) if api.answers else (200, {})
            self.reply(status, headers, {"kind": "Status", "message": "not now"})

        def reply(self, status: int, headers: dict[str, str], value: dict[str, Any]) -> None:
            said = json.dumps(value).encode()
            self.send_response(status)
            for name, text in {**headers, "Content-Length": str(len(said))}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: ARG002
            return

    made = certificate.make("localhost", folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.server, made.key)
    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    api.url = f"https://localhost:{server.server_port}"
    path = folder / "kubelet.conf"
    authority = b64encode(made.ca.read_bytes()).decode()
    path.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: x\n"
        "contexts:\n- name: x\n  context:\n    cluster: c\n    user: u\n"
        f"clusters:\n- name: c\n  cluster:\n    server: {api.url}\n    certificate-authority-data: {authority}\n"
        "users:\n- name: u\n  user:\n    token: of-the-kubelet\n"
    )
    with running(server):
        yield api, path


def conditions(api: Api) -> list[tuple[str, str]]:
    return [
        (one["status"], one["reason"])
        for verb, _, body in api.asked
        if verb == "PATCH"
        for one in body["status"]["conditions"]
    ]


def test_kubernetes_is_told_of_changes_alone(node: Node, tmp_path: Path) -> None:
    with api_server(tmp_path) as (api, kubeconfig):
        # The network check also connects to the API server's port: plain TCP, which TLS would see as noise.
        node.configure(kubeconfig=str(kubeconfig), node_name="worker-1", disabled=["network"], raise_looks=2)
        for _ in range(4):
            node.look()
        assert conditions(api) == [("True", "NodeIsHealthy")]
        # Thresholds that this filesystem exceeds, which makes it count as full.
        node.configure(full_warn_percent=1, full_fail_percent=1, paths=["/"])
        for _ in range(4):
            node.look()
        assert conditions(api)[1:] == [("False", "FilesystemFull")]
        assert {(verb, path) for verb, path, _ in api.asked} == {("PATCH", "/api/v1/nodes/worker-1/status")}
        message = api.asked[1][2]["status"]["conditions"][0]["message"]
        assert node.known()["boot_id"] in message and "full" in message
        # Cleared for as long as required.
        node.configure(full_warn_percent=100, full_fail_percent=100, clear_seconds=1)
        time.sleep(1.1)
        for _ in range(3):
            node.look()
        assert conditions(api)[2:] == [("True", "NodeIsHealthy")]
        # The physical host's name becomes available a moment after the node.
        (node.base / "run/kvp").write_bytes(kvp_record("PhysicalHostName", "GGBB90904476"))
        for _ in range(2):
            node.look()
        names = [body["metadata"]["annotations"][status.PHYSICAL_HOST] for _, _, body in api.asked]
        assert names == [None, None, None, "GGBB90904476"]


def test_a_node_that_registered_again_gets_its_condition_back(node: Node, tmp_path: Path) -> None:
    link = node.base / "run/kubelet"
    with api_server(tmp_path) as (api, kubeconfig):
        node.configure(kubeconfig=str(kubeconfig), node_name="worker-1", disabled=["network"])
        (node.base / "run/kvp").write_bytes(kvp_record("PhysicalHostName", "GGBB90904476"))
        os.symlink("1" * 32, link)
        node.look()
        first = api.asked.pop()[2]
        (condition,) = first["status"]["conditions"]

        def remember(**values: float) -> None:
            path = node.base / "run/health-state.json"
            state = json.loads(path.read_bytes())
            path.write_text(json.dumps({**state, "reported": {**state["reported"], **values}}))

        def look(invocation: str) -> list[dict[str, Any]]:
            link.unlink(missing_ok=True)
            if invocation:
                os.symlink(invocation, link)
            before = len(api.asked)
            node.look()
            return [body for _, _, body in api.asked[before:]]

        time.sleep(1.1)  # until the next second
        # A kubelet that is restarted over and over.
        assert look("3" * 32) == [] and look("2" * 32) == []
        remember(sent=-600.0)  # as if ten minutes had passed
        (again,) = look("2" * 32)
        assert again["metadata"] == first["metadata"]
        # It may be the same Node, which a person has admitted since: a new time would take it out.
        changed = {"lastHeartbeatTime": again["status"]["conditions"][0]["lastHeartbeatTime"]}
        assert again["status"]["conditions"] == [condition | changed] != [condition]
        assert look("2" * 32) == [] and look("") == []
        # The kubelet has started, but not registered yet.
        remember(sent=-600.0)
        api.answers = [(404, {})]
        assert len(look("5" * 32)) == 1 and look("5" * 32) == []
        assert json.loads((node.base / "run/health-state.json").read_bytes())["reported"]["failures"] == 1
        remember(not_before=0.0)
        assert len(look("5" * 32)) == 1 and look("5" * 32) == []


def test_api_server_that_refuses_is_left_alone_as_long_as_it_asks(node: Node, tmp_path: Path) -> None:
    with api_server(tmp_path) as (api, kubeconfig):
        api.answers = [(429, {"Retry-After": "3600"})]
        node.configure(kubeconfig=str(kubeconfig), disabled=["network"])
        assert "could not be set" in node.look()
        state = json.loads((node.base / "run/health-state.json").read_bytes())
        assert (
            state["reported"]["failures"] == 1 and state["reported"]["not_before"] > time.monotonic() + 3000
        )
        assert node.metrics()["node_health_condition_failures"] == 1
        node.look()
        assert len(api.asked) == 1
        # As if that time had passed.
        state["reported"]["not_before"] = 0
        (node.base / "run/health-state.json").write_text(json.dumps(state))
        assert "NodeHealthy is True" in node.look()
        assert len(api.asked) == 2 and node.metrics()["node_health_condition_failures"] == 0
        node.look()
        assert len(api.asked) == 2


def test_api_server_that_is_away_keeps_nothing_from_being_done(node: Node, tmp_path: Path) -> None:
    with api_server(tmp_path) as (_api, kubeconfig):
        pass
    node.configure(kubeconfig=str(kubeconfig), disabled=["network"])
    assert "could not be set" in node.look()
    assert node.look() == "" and node.known()["state"] == "ok"
    assert os.path.exists(node.base / "metrics/node_health.prom")
