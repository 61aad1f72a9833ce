"""Looks at a real network: name servers that are silent, ports that are closed, a metadata service that is busy."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from image_builder.node.errors import NodeError
from image_builder.node.health import connect, dns, maintenance, network
from image_builder.node.health.model import Outcome, Places
from image_builder.node.health.settings import Settings
from tests.health_looks import found, look
from tests.servers import running

# As Microsoft's documentation shows them: of a machine that is to be taken away, and of one with nothing to expect.
PREEMPT = (
    b'{"DocumentIncarnation":1,"Events":[{"EventId":"A123BC45-1234-5678-AB90-ABCDEF123456","EventStatus":"Scheduled",'
    b'"EventType":"Preempt","ResourceType":"VirtualMachine","Resources":["myspotvm"],'
    b'"NotBefore":"Tue, 16 Mar 2021 00:58:46 GMT","Description":"","EventSource":"Platform"}]}'
)
NOTHING = b'{"DocumentIncarnation":1,"Events":[]}'


NAME_SERVER = "127.0.0.77"  # of this test alone: all of 127.0.0.0/8 is this machine


@contextmanager
def name_server(answer: Callable[[bytes], bytes | None]) -> Iterator[list[bytes]]:
    """Serve on a real socket at port 53; ``answer`` None is silence. Yields what was asked."""
    asked: list[bytes] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((NAME_SERVER, 53))
        server.settimeout(0.05)
        done = threading.Event()

        def serve() -> None:
            while not done.is_set():
                try:
                    data, peer = server.recvfrom(512)
                except TimeoutError:
                    continue
                asked.append(data)
                if said := answer(data):
                    server.sendto(said, peer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield asked
        finally:
            done.set()
            thread.join()


def says(address: str = "", code: int = 0) -> Callable[[bytes], bytes]:
    """Answer the question for IPv4 with an address; all others with none, or with a code."""

    def answer(data: bytes) -> bytes:
        is_a = address and data[-4:] == b"\0\x01\0\x01"
        record = struct.pack(">HHHIH", 0xC00C, 1, 1, 60, 4) + socket.inet_aton(address) if is_a else b""
        return data[:2] + struct.pack(">HHHHH", 0x8180 | code, 1, bool(record), 0, 0) + data[12:] + record

    return answer


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """This machine, with a name server of the test's."""
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "resolv.conf").write_text(f"# the test's\nnameserver {NAME_SERVER}\noptions edns0\n")
    return Places(etc=etc, run=tmp_path / "run")


def reach(places: Places, **settings: Any) -> Outcome:
    return network.check(look(Settings(kubeconfig="/nonexistent", connect_seconds=0.6, **settings), places))


def test_name_server_that_is_silent_is_told_in_time(places: Places) -> None:
    with name_server(lambda _data: None) as asked:
        began = time.monotonic()
        outcome = reach(places, names=("one.test", "two.test"))
        seconds = time.monotonic() - began
    assert found(outcome) == {"network.dns": "warn"} and len(outcome.findings) == 2
    assert all("no answer" in one.detail for one in outcome.findings)
    # Both names at once, asked twice for two families: what takes one deadline, not one for each.
    assert len(asked) == 8 and 0.8 < seconds / 0.6 < 1.9


@pytest.mark.parametrize(("code", "words"), [(3, "NXDOMAIN"), (2, "SERVFAIL"), (0, "no addresses")])
def test_name_server_that_knows_no_address(places: Places, code: int, words: str) -> None:
    with name_server(says(code=code)):
        (one,) = reach(places, names=("one.test",)).findings
    assert one.code == "network.dns" and words in one.detail


def test_name_server_that_isn_t_there(places: Places) -> None:
    (one,) = reach(places, names=("one.test",)).findings
    assert one.code == "network.dns"
    (places.etc / "resolv.conf").write_text("")
    (one,) = reach(places, names=("one.test",)).findings
    assert "no name server is configured" in one.detail


def test_dead_name_server_beside_one_that_answers_is_no_trouble(places: Places) -> None:
    (places.etc / "resolv.conf").write_text(f"nameserver 127.0.0.78\nnameserver {NAME_SERVER}\n")
    with name_server(says("192.0.2.1")):
        assert found(reach(places, names=("one.test",))) == {}


def test_registry_that_takes_connections_and_one_that_does_not(places: Places) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with name_server(says("127.0.0.1")):
            good = reach(places, registries=(f"registry.test:{port}",))
        (places.etc / "hosts").write_text("127.0.0.1 here.test other.test\n")
        by_file = reach(places, registries=(f"here.test:{port}",))
    assert found(good) == {} and found(by_file) == {}
    (one,) = reach(places, registries=(f"127.0.0.1:{port}",)).findings
    assert one.code == "network.registry" and "Connection refused" in one.detail


def test_registry_without_an_address_is_one_finding(places: Places) -> None:
    with name_server(says(code=3)):
        outcome = reach(places, registries=("registry.test:443",))
    assert found(outcome) == {"network.dns": "warn"}


def test_connection_that_hangs_ends_in_time() -> None:
    with socket.socket() as server, socket.socket() as one, socket.socket() as two:
        server.bind(("127.0.0.1", 0))
        server.listen(0)  # one connection waits to be accepted; the kernel drops all others
        for waiting in (one, two):
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        time.sleep(0.1)
        began = time.monotonic()
        said = connect.all_of({"x": [server.getsockname()], "y": [server.getsockname()]}, 0.5)
        # Both together take one deadline.
        assert 0.8 < (time.monotonic() - began) / 0.5 < 1.9
    assert {one.error for one in said.values()} == {"no answer within 0.5 s"}


def test_api_server_is_the_kubeconfigs(places: Places, tmp_path: Path) -> None:
    path = tmp_path / "kubelet.conf"
    path.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: x\n"
        "contexts:\n- name: x\n  context:\n    cluster: c\n    user: u\n"
        "clusters:\n- name: c\n  cluster:\n    server: https://127.0.0.1:1\nusers:\n- name: u\n  user:\n    token: t\n"
    )
    (one,) = network.check(look(Settings(kubeconfig=str(path)), places)).findings
    assert (one.code, one.subject) == ("network.api", "127.0.0.1:1")
    path.write_text("damaged")
    assert found(network.check(look(Settings(kubeconfig=str(path)), places))) == {}


def test_this_machines_route_is_seen() -> None:
    """The kernel says for itself whether it has one: a datagram's socket can be connected or not."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        is_there = one.connect_ex(("192.0.2.1", 9)) == 0
    assert bool(network.default_routes(Path("/proc"))) is is_there


def test_no_route_is_seen_where_there_is_none(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; "
        "from image_builder.node.health import network; print(network.default_routes(Path('/proc')))"
    )
    repo = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", code, repo], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


Answer = tuple[int, bytes, dict[str, str]]


@contextmanager
def metadata(answers: dict[str, Answer], seconds: float = 0.0) -> Iterator[str]:
    """Serve recorded answers by the path's beginning; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["Metadata"] == "true"
            time.sleep(seconds)
            status, body, headers = next(said for path, said in answers.items() if self.path.startswith(path))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: ARG002
            return

    with running(HTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def events(status: int, body: bytes, name: str = "myspotvm", **headers: str) -> dict[str, Answer]:
    return {
        "/metadata/instance/compute/name": (200, name.encode(), {}),
        "/metadata/scheduledevents": (status, body, headers),
    }


def test_maintenance_of_this_machine_alone() -> None:
    with metadata(events(200, PREEMPT)) as address:
        assert found(maintenance.check(look(Settings(imds=address)))) == {"maintenance.scheduled": "fail"}
    with metadata(events(200, PREEMPT, name="another_3")) as address:
        assert found(maintenance.check(look(Settings(imds=address)))) == {}
    with metadata(events(200, NOTHING)) as address:
        assert found(maintenance.check(look(Settings(imds=address)))) == {}


def test_metadata_service_that_is_asked_too_often_is_left_alone() -> None:
    with metadata(events(200, PREEMPT)) as address:
        first = maintenance.check(look(Settings(imds=address)))
    said = {"Retry-After": "120"}
    with metadata(events(429, b'{ "error": "Too many requests" }', **said)) as address:
        second = maintenance.check(look(Settings(imds=address), **first.memory))
    assert second.rest_seconds == 120 and found(second) == {"maintenance.scheduled": "fail"}
    with metadata(events(429, b"")) as address:
        assert maintenance.check(look(Settings(imds=address))).rest_seconds == 60


@pytest.mark.parametrize(("status", "body"), [(500, b"x"), (404, b""), (200, b"<html>"), (200, b"[]")])
def test_metadata_service_that_fails(status: int, body: bytes) -> None:
    with metadata(events(status, body)) as address, pytest.raises(NodeError, match="metadata service"):
        maintenance.check(look(Settings(imds=address)))


def test_metadata_service_that_is_not_there_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="refused"):
        maintenance.check(look(Settings(imds="http://127.0.0.1:1")))
    monkeypatch.setattr(maintenance, "_TIMEOUT", 0.2)
    with metadata(events(200, NOTHING), seconds=0.5) as address, pytest.raises(TimeoutError):
        maintenance.check(look(Settings(imds=address)))
    assert maintenance.check(look(Settings(imds=""))) == Outcome()


def test_name_servers_of_this_machine_are_read() -> None:
    assert dns.servers(Path("/nonexistent")) == [] and dns.hosts(Path("/nonexistent")) == {}
