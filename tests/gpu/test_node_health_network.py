"""Health checks of a real network: silent name servers, closed ports, a busy metadata service."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from image_builder.node.errors import NodeError
from image_builder.node.health import maintenance, network
from image_builder.node.health.model import Outcome
from image_builder.node.health.settings import Settings
from image_builder.node.net import reach
from tests.support.control_plane.gates import in_background, wait_until
from tests.support.nodes.health_looks import found, look
from tests.support.servers import PatientServer, running

pytestmark = pytest.mark.root

# As in Microsoft's documentation: one for a machine that is to be evicted, and one with nothing scheduled.
PREEMPT = (
    b'{"DocumentIncarnation":1,"Events":[{"EventId":"A123BC45-1234-5678-AB90-ABCDEF123456","EventStatus":"Scheduled",'
    b'"EventType":"Preempt","ResourceType":"VirtualMachine","Resources":["myspotvm"],'
    b'"NotBefore":"Tue, 16 Mar 2021 00:58:46 GMT","Description":"","EventSource":"Platform"}]}'
)
NOTHING = b'{"DocumentIncarnation":1,"Events":[]}'


NAME_SERVER = "127.0.0.77"  # only for this test: all of 127.0.0.0/8 is this machine


@contextmanager
def name_server(answer: Callable[[bytes], bytes | None]) -> Iterator[list[bytes]]:
    """Serve on a real socket at port 53; an ``answer`` of None means silence. Yields the queries received."""
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
    """Answer the IPv4 query with an address; all others with none, or with an error code."""

    def answer(data: bytes) -> bytes:
        is_a = address and data[-4:] == b"\0\x01\0\x01"
        record = struct.pack(">HHHIH", 0xC00C, 1, 1, 60, 4) + socket.inet_aton(address) if is_a else b""
        return data[:2] + struct.pack(">HHHHH", 0x8180 | code, 1, bool(record), 0, 0) + data[12:] + record

    return answer


LOOK = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from image_builder.node.health import network
from image_builder.node.health.model import Look, Places
from image_builder.node.health.settings import Settings
settings = Settings(kubeconfig="/nonexistent", **{"connect_seconds": 60, **json.loads(sys.argv[2])})
outcome = network.check_network(Look(settings, Places(), time.monotonic()))
print(json.dumps([[one.code, one.detail] for one in outcome.findings]))
"""
# The C library reads these files at fixed paths, so the check runs with its own mounted over them.
ISOLATED = """
for name in resolv.conf hosts nsswitch.conf; do
    if [ -e "/etc/$name" ]; then mount --bind "$1/$name" "/etc/$name"; fi
done
shift
exec "$@"
"""


@dataclass
class World:
    """This machine, with the test's own name servers and hosts."""

    etc: Path

    def servers(self, *addresses: str, options: str = "") -> None:
        lines = ["# the test's", "search test", *(f"nameserver {address}" for address in addresses), options]
        (self.etc / "resolv.conf").write_text("".join(f"{line}\n" for line in lines))

    def look(self, **settings: Any) -> list[tuple[str, str]]:
        """Check the network; return the code and the detail of each finding."""
        repo = Path(__file__).resolve().parents[2]
        program = [sys.executable, "-c", LOOK, str(repo), json.dumps(settings)]
        argv = ["unshare", "--mount", "sh", "-euc", ISOLATED, "sh", str(self.etc), *program]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        return [(code, detail) for code, detail in json.loads(done.stdout)]


@pytest.fixture
def world(tmp_path: Path) -> World:
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "hosts").write_text("127.0.0.1 here.test other.test\n")
    (etc / "nsswitch.conf").write_text("hosts: files dns\n")
    world = World(etc)
    world.servers(NAME_SERVER)
    return world


LABELS = ("one", "two", "six", "ten")


def test_name_server_that_is_silent_is_reported(world: World) -> None:
    with name_server(lambda _data: None):
        findings = world.look(names=[f"{label}.test" for label in LABELS], connect_seconds=0.6)
    assert findings == [("network.dns", f"{label}.test: no answer within 0.6 s") for label in LABELS]


def test_all_names_are_looked_up_at_once(world: World) -> None:
    """The name server answers none before it was asked for all; whoever isn't answered asks again after a second."""
    asked: set[str] = set()

    def answer(data: bytes) -> bytes | None:
        asked.add(data[13:16].decode())
        return says("192.0.2.1")(data) if asked == set(LABELS) else None

    world.servers(NAME_SERVER, options="options timeout:1 attempts:5")
    with name_server(answer):
        assert world.look(names=[f"{label}.test" for label in LABELS]) == []


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (3, "Name or service not known"),
        (2, "Temporary failure in name resolution"),
        (0, "No address associated with hostname"),
    ],
    ids=["NXDOMAIN", "SERVFAIL", "no address"],
)
def test_name_server_that_knows_no_address(world: World, code: int, reason: str) -> None:
    with name_server(says(code=code)):
        assert world.look(names=("one.test",)) == [("network.dns", f"one.test: {reason}")]


def test_name_server_that_isn_t_there(world: World) -> None:
    ((code, _),) = world.look(names=("one.test",))
    assert code == "network.dns"


def test_dead_name_server_beside_one_that_answers_is_no_trouble(world: World) -> None:
    """The kernel refuses on its behalf, so the C library asks the next one at once."""
    world.servers("127.0.0.78", NAME_SERVER)
    with name_server(says("192.0.2.1")):
        assert world.look(names=("one.test",)) == []


def test_silent_name_server_before_one_that_answers_is_trouble(world: World) -> None:
    """Every lookup on this machine takes seconds: the first name server has to answer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.78", 53))
        world.servers("127.0.0.78", NAME_SERVER)
        with name_server(says("192.0.2.1")):
            findings = world.look(names=("one.test",), connect_seconds=0.6)
    assert findings == [("network.dns", "one.test: no answer within 0.6 s")]


def test_registry_that_takes_connections_and_one_that_does_not(world: World) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with name_server(says("127.0.0.1")):
            assert world.look(registries=(f"registry.test:{port}",)) == []
        assert world.look(registries=(f"here.test:{port}",)) == []
    place = f"127.0.0.1:{port}"
    assert world.look(registries=(place,)) == [("network.registry", f"{place}: Connection refused")]


def test_registry_without_an_address_is_one_finding(world: World) -> None:
    with name_server(says(code=3)):
        findings = world.look(registries=("registry.test:443",))
    assert [code for code, _ in findings] == ["network.dns"]


def being_opened(port: int) -> int:
    """Return how many of this machine's connections to a port wait for the other side."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(fields[2].endswith(f":{port:04X}") and fields[3] == "02" for fields in lines)


def test_connections_that_hang_end_together() -> None:
    with socket.socket() as server, socket.socket() as one, socket.socket() as two:
        server.bind(("127.0.0.1", 0))
        server.listen(0)  # one connection waits to be accepted; the kernel drops all others
        for waiting in (one, two):
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        port = server.getsockname()[1]
        assert wait_until(lambda: being_opened(port) == 1)
        seen: list[int] = []

        def watch(stop: threading.Event) -> None:
            while not stop.wait(0.01):
                seen.append(being_opened(port))

        with in_background(watch):
            said = reach.connect({name: [server.getsockname()] for name in "wxyz"}, 2.0)
    assert max(seen) == 5, "all at once"
    assert {one.error for one in said.values()} == {"no answer within 2 s"}


def test_api_server_is_the_kubeconfigs(tmp_path: Path) -> None:
    path = tmp_path / "kubelet.conf"
    path.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: x\n"
        "contexts:\n- name: x\n  context:\n    cluster: c\n    user: u\n"
        "clusters:\n- name: c\n  cluster:\n    server: https://127.0.0.1:1\nusers:\n- name: u\n  user:\n    token: t\n"
    )
    (one,) = network.check_network(look(Settings(kubeconfig=str(path)))).findings
    assert (one.code, one.subject) == ("network.api", "127.0.0.1:1")
    path.write_text("damaged")
    assert found(network.check_network(look(Settings(kubeconfig=str(path))))) == {}


def test_this_machines_route_is_seen() -> None:
    """The kernel itself shows whether it has one: a datagram socket can be connected or not."""
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
def metadata(answers: dict[str, Answer], may_answer: threading.Event | None = None) -> Iterator[str]:
    """Serve recorded answers by path prefix, not before an event if there is one; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["Metadata"] == "true"
            if may_answer:
                may_answer.wait()
            status, body, headers = next(said for path, said in answers.items() if self.path.startswith(path))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: ARG002
            return

    with running(PatientServer(("127.0.0.1", 0), Handler)) as server:
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
    may_answer = threading.Event()
    with metadata(events(200, NOTHING), may_answer) as address:
        with pytest.raises(TimeoutError):
            maintenance.check(look(Settings(imds=address)))
        may_answer.set()
    assert maintenance.check(look(Settings(imds=""))) == Outcome()
