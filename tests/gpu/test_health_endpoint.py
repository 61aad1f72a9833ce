"""`node-agent health-endpoint` as a process of the agent's own file, queried over HTTP as Azure's extension does."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from image_builder.node import zipapp
from image_builder.node.net import serving
from tests.support.control_plane.gates import wait_until
from tests.support.nodes import joins
from tests.support.servers import running

pytestmark = pytest.mark.root

BOOT = "0d7d4f4e-6d3a-4a4e-9c75-0b7f3c2e1d11"
# The agent's file, run as on the node except for the paths.
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from image_builder.node.errors import NodeError
from image_builder.node.health import application
here = Path(sys.argv[2])
try:
    application.run(application.Places(
        run=here / "run", etc=here / "etc", sys=here / "sys", boot_id=here / "boot_id", listed=here / "none",
    ))
except NodeError as error:
    sys.exit(f"{error.code}: {error.message}")
"""


class Node:
    """A machine's files, and the endpoint that reads them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Bound for as long as the node is there, so that the kernel gives the port to nobody else. Only who sets
        # SO_REUSEADDR, too, as the endpoint does, can listen at it.
        self.claim = socket.socket()
        self.claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.claim.bind(("127.0.0.1", 0))
        self.port: int = self.claim.getsockname()[1]
        for name in ("run/busy", "etc", "sys/module/nvidia_uvm"):
            (directory / name).mkdir(parents=True)
        (directory / "boot_id").write_text(f"{BOOT}\n")
        (directory / "node-agent").write_bytes(zipapp.archive())
        for role in ("disk", "preflight", "join", "health"):
            self.write(f"etc/{role}", {})
        self.write("etc/health-endpoint", {"port": self.port, "phases": 4})

    def write(self, name: str, value: Any) -> None:
        (self.directory / f"{name}.json").write_text(json.dumps(value))

    def come_up(self) -> None:
        """Leave behind what the agent's other commands write on a node that is up."""
        self.write("run/status", {"format": 1, "ready": True, "disk": {"state": "ok"}})
        self.write("run/preflight", {"boot_id": BOOT, "state": "passed", "code": ""})
        self.write("run/provision", {"boot_id": BOOT, "state": "ok", "vm_id": joins.VM_ID})
        self.look("ok")

    def look(self, state: str, *codes: str) -> None:
        findings = [{"code": code, "severity": "fail"} for code in codes]
        self.write("run/health", {"boot_id": BOOT, "state": state, "time": time.time(), "findings": findings})

    @property
    def argv(self) -> list[str]:
        return [
            sys.executable,
            "-I",
            "-c",
            PROGRAM,
            os.fspath(self.directory / "node-agent"),
            os.fspath(self.directory),
        ]

    def ask(
        self, method: str = "GET", path: str = "/health", address: str = "127.0.0.1"
    ) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(address, self.port, timeout=60)
        try:
            connection.request(method, path, headers={"User-Agent": "ApplicationHealthExtension/1.0"})
            answer = connection.getresponse()
            assert answer.headers["Content-Type"] == "application/json"
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def state(self) -> tuple[int, str, bool]:
        """Return the HTTP status, the state and whether an upgrade skips this machine."""
        status, body = self.ask()
        upgrade = json.loads(body["customMetrics"])["rollingUpgrade"]
        assert upgrade["PhaseOrderingNumber"] in range(4)
        return status, body["ApplicationHealthState"], upgrade["SkipUpgrade"]

    def answers(self) -> bool:
        try:
            return bool(self.ask())
        except OSError:
            return False


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    with made.claim:
        yield made


@contextmanager
def served(node: Node) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(node.argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert wait_until(lambda: node.answers() or process.poll() is not None)
            yield process
        finally:
            process.terminate()
            process.communicate()


def test_a_nodes_life_as_the_extension_sees_it(node: Node, tmp_path: Path) -> None:
    with served(node) as process:
        assert node.state() == (503, "Initializing", False)
        node.come_up()
        assert node.state() == (200, "Healthy", False)
        # One job announces itself; then another one announces nothing but uses the GPUs.
        lease = tmp_path / "run/busy/train-17"
        lease.touch()
        assert node.state() == (200, "Healthy", True) and node.ask()[1]["busy"] == ["lease train-17"]
        os.utime(lease, (time.time() - 3700,) * 2)
        assert node.state() == (200, "Healthy", False), "a lease that was left behind keeps the node for ever"
        users = tmp_path / "sys/module/nvidia_uvm/refcnt"
        users.write_text("3\n")
        assert node.state() == (200, "Healthy", True)
        users.write_text("0\n")
        node.look("failed", "gpu.ecc")
        assert node.state() == (200, "Unhealthy", False) and node.ask()[1]["reasons"] == ["health: gpu.ecc"]
        node.look("ok")
        # The node is being tested again: its state is kept, and no upgrade takes it in the meantime.
        (tmp_path / "run/preflight.json").unlink()
        assert node.state() == (200, "Healthy", True)
        (tmp_path / "run/preflight.json").write_text("{")
        assert node.state() == (503, "Unknown", False)
        peak = Path(f"/proc/{process.pid}/status").read_text().partition("VmHWM:")[2].split()[0]
        assert int(peak) <= 40_000, f"{peak} KiB"


def test_what_is_asked_otherwise_or_from_elsewhere(node: Node) -> None:
    with served(node):
        assert node.ask("POST")[0] == 405 and node.ask("DELETE")[0] == 501
        assert node.ask(path="/")[0] == 404 and node.ask(path="/health?x=1")[0] == 503
        # Every address in 127/8 is this machine; only one is served.
        with pytest.raises(ConnectionRefusedError):
            node.ask(address="127.0.0.2")


def test_a_port_that_is_taken_and_settings_that_are_wrong(node: Node) -> None:
    node.claim.listen()
    done = subprocess.run(node.argv, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(
        f"endpoint.port: 127.0.0.1:{node.port} can't be served"
    )
    node.write("etc/health-endpoint", {"prot": 1})
    done = subprocess.run(node.argv, capture_output=True, text=True)
    assert done.returncode == 1 and "prot is not a known key" in done.stderr


# -- the server that the endpoint shares with the token broker


class Echo(serving.Handler):
    may_answer: ClassVar = threading.Event()  # what is slow

    def respond(self) -> None:
        if self.path.startswith("/bug"):
            raise RuntimeError(self.path)
        if self.path.startswith("/slow"):
            self.may_answer.wait()
        if self.command == "POST":
            self.body(int(self.headers["Content-Length"]))
        self.answer(200, {"path": self.path})


@contextmanager
def echoing(**more: Any) -> Iterator[serving.Server]:
    with running(serving.Server(("127.0.0.1", 0), Echo, **{"most": 2, "seconds": 5, **more})) as server:
        yield server


def echo(server: serving.Server, path: str = "/x") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def drip(one: socket.socket) -> None:
    """Send one byte at a time, for a minute."""
    for _ in range(3000):
        one.sendall(b"a")
        time.sleep(0.02)


def test_silent_and_slow_clients_are_hung_up_on() -> None:
    with echoing() as server, ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(5)]
        for one in slow[2:]:
            one.sendall(b"GET /x HTTP/1.1\r\nX: ")
        assert echo(server) == 200
        for one in slow[3:]:
            # Trickling bytes doesn't extend the deadline.
            with pytest.raises(OSError, match="pipe|reset"):
                drip(one)
        assert echo(server) == 200


def connected(server: serving.Server, stack: ExitStack, source: str = "127.0.0.1") -> socket.socket:
    one = socket.create_connection(("127.0.0.1", server.port), timeout=120, source_address=(source, 0))
    return stack.enter_context(one)


def test_hundreds_of_silent_connections_keep_nobody_waiting() -> None:
    """With the broker's limits: every client is answered, even one from the same address; silence ends nothing here."""
    with echoing(most=64, per_address=16, seconds=3600, patience=3600) as server, ExitStack() as stack:
        sources = [f"127.0.1.{number}" for number in range(1, 7)]
        silent = [connected(server, stack, sources[number % 6]) for number in range(300)]
        for one in silent[::3]:
            one.sendall(b"POST /x HTTP/1.1\r\nContent-Length: 100\r\n\r\n")
        for source in ("127.0.0.1", *sources):
            one = connected(server, stack, source)
            one.sendall(b"GET /x HTTP/1.0\r\n\r\n")
            assert b" 200 " in one.recv(4096)


def test_an_address_has_its_share_and_takes_no_more() -> None:
    """A new connection displaces a silent one from the same address, and no other."""
    with echoing(most=8, per_address=2, seconds=3600, patience=3600) as server, ExitStack() as stack:
        other = connected(server, stack, "127.0.1.9")
        mine = [connected(server, stack) for _ in range(3)]
        assert mine[0].recv(1) == b"", "the oldest is closed"
        for one in (*mine[1:], other):
            one.sendall(b"GET /x HTTP/1.0\r\n\r\n")
            assert b" 200 " in one.recv(4096)


def test_a_request_has_less_time_to_come_than_its_answer() -> None:
    Echo.may_answer.clear()
    with echoing(most=2, seconds=3600, patience=2) as server, ExitStack() as stack:
        one = connected(server, stack)
        one.sendall(b"GET /slow HTTP/1.0\r\n\r\n")
        late = connected(server, stack)
        late.sendall(b"POST /x HTTP/1.0\r\nContent-Length: 5\r\n\r\n")
        assert late.recv(1) == b""
        Echo.may_answer.set()
        assert b" 200 " in one.recv(4096)


def test_headers_that_are_too_long_are_refused() -> None:
    """One client alone could otherwise fill the broker's memory: nothing has proven yet who it is."""
    with echoing(seconds=30) as server, ExitStack() as stack:
        one = connected(server, stack)
        with suppress(OSError):  # it is hung up on while it sends
            one.sendall(b"GET /x HTTP/1.1\r\n" + (b"a: " + b"x" * 65_000 + b"\r\n") * 99)
            assert one.recv(4096).split()[1:2] in ([], [b"431"])
        assert echo(server) == 200


def test_the_end_waits_for_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with echoing(seconds=600) as server, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port))).sendall(b"GET")
        assert wait_until(lambda: threading.active_count() == before + 3)
    # Each has been told to stop; how soon it does is up to the scheduler.
    assert wait_until(lambda: threading.active_count() == before)
    with pytest.raises(ConnectionRefusedError):
        echo(server)


def test_a_bug_is_one_requests_and_says_nothing_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    with echoing() as server:
        with pytest.raises(http.client.RemoteDisconnected):
            echo(server, "/bug?a-secret")
        assert echo(server) == 200
    said = capsys.readouterr().err
    assert "RuntimeError" in said and "respond" in said and "a-secret" not in said


def test_over_tls_it_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ca = joins.authority()
    pair = joins.issued(ca, "server")
    (tmp_path / "pair.pem").write_text(pair.certificate + pair.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pair.pem")
    mine = ssl.create_default_context(cadata=ca.certificate)
    with echoing(tls=lambda: context) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw:
            # A client that doesn't speak TLS gets at most an alert.
            raw.sendall(b"GET /x HTTP/1.0\r\n\r\n")
            assert b"path" not in raw.recv(4096)
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw,
            mine.wrap_socket(raw, server_hostname="127.0.0.1") as wrapped,
        ):
            wrapped.sendall(b"GET /x HTTP/1.0\r\nX: ")
            with pytest.raises(OSError, match="pipe|reset|EOF|closed"):
                drip(wrapped)
    assert capsys.readouterr().err == ""
