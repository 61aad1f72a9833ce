"""`node-agent join` with real files, sockets and TLS: each phase's failure with its number, and what is left behind.

The metadata service is a local server with answers of the documented shape (tests/joins.py); there is none here.
The API server and the broker are TLS servers that know one token. The kubelet is a thread that does with these files
what the real one does.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import kubeconfig
from image_builder.node.join import command
from image_builder.node.join.record import Record
from image_builder.node.join.slot import slot
from tests import joins
from tests.builds import REPO

pytestmark = pytest.mark.root

NODE = os.uname().nodename.lower()
Answer = tuple[int, dict[str, str], bytes]
# Of one request: (path, headers, body, whose certificate) -> the answer.
Respond = Callable[[str, dict[str, str], bytes, str], Answer]


class Server(ThreadingHTTPServer):
    """A server on loopback that notes what it was asked."""

    daemon_threads = True

    def __init__(self, respond: Respond, tls: ssl.SSLContext | None = None) -> None:
        asked: list[str] = []
        self.asked, self.date_off = asked, 0.0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                subject: Any = (
                    self.connection.getpeercert() if isinstance(self.connection, ssl.SSLSocket) else {}
                )
                names = [value for part in (subject or {}).get("subject", ()) for _, value in part]
                code, headers, said = respond(self.path, dict(self.headers), body, "".join(names))
                self.send_response_only(code)
                self.send_header("Date", formatdate(time.time() + server.date_off, usegmt=True))
                for name, value in {**headers, "Content-Length": str(len(said))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(said)

            do_POST = do_GET  # noqa: N815 (the name that the base class looks for)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def handle_error(self, *_: object) -> None:
        """A client that does not believe the certificate hangs up: that is what it should do."""

    def __enter__(self) -> Server:
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    @property
    def port(self) -> int:
        return int(self.server_address[1])


def _json(value: Any, code: int = 200) -> Answer:
    return code, {"Content-Type": "application/json"}, json.dumps(value).encode()


class World:
    """A machine's files, and everything around it. What a test changes stands as an attribute."""

    imds_port: int
    api_port: int
    healthz_port: int
    asked_imds: list[str]
    asked_api: list[str]
    api_server: Server

    def __init__(self, directory: Path) -> None:
        self.directory, self.ca = directory, joins.authority()
        for name in ("run", "etc", "kubernetes"):
            (directory / name).mkdir()
        self.boot = str(uuid.uuid4())
        (directory / "boot_id").write_text(self.boot)
        (directory / "release").write_text('IMAGE_BUILD="20261101-1"\n')
        (directory / "product_uuid").write_text("11111111-2222-3333-4444-555555555555\n")
        (directory / "kubelet-role.json").write_text("{}")
        self.user_data = b""
        self.throttled = 0
        self.has_identity = True
        self.token = joins.TOKEN
        self.broker: Callable[[], Answer] = lambda: _json(
            {"token": self.token, "expires": "2100-01-01T00:00:00Z"}
        )
        self.ready, self.approves = "True", True
        self.posted: list[dict[str, Any]] = []
        self.stop = threading.Event()

    # -- around the machine

    def imds(self, path: str, headers: dict[str, str], _body: bytes, _who: str) -> Answer:
        if headers.get("Metadata") != "true":
            return 400, {}, b'{"error":"Bad request. Required metadata header not specified"}'
        if self.throttled:
            self.throttled -= 1
            return joins.TOO_MANY
        if "oauth2" in path and not self.has_identity:
            return 400, {}, b'{"error":"invalid_request","error_description":"Identity not found"}'
        return _json(
            joins.instance(self.user_data) if path.startswith("/metadata/instance") else joins.IDENTITY
        )

    def api(self, path: str, headers: dict[str, str], body: bytes, who: str) -> Answer:
        if path == "/token":
            if headers.get("Authorization") != f"Bearer {joins.IDENTITY['access_token']}":
                return 403, {}, b""
            self.posted.append(json.loads(body))
            return self.broker()
        if not who and headers.get("Authorization") != f"Bearer {joins.TOKEN}":
            return _json({"kind": "Status", "message": "Unauthorized", "code": 401}, 401)
        if path == "/version":
            return _json({"major": "1", "minor": "34"})
        assert path == f"/api/v1/nodes/{NODE}" and who == f"system:node:{NODE}"
        return _json({"status": {"conditions": [{"type": "Ready", "status": self.ready, "reason": "Test"}]}})

    def healthz(self, *_: object) -> Answer:
        running = (self.kubernetes / "kubelet.conf").exists()
        return (200 if running else 503), {}, b"ok"

    def kubelet(self) -> None:
        """Do what the path unit and the kubelet do: wait for the file, get a certificate, write a kubeconfig."""
        bootstrap = self.kubernetes / "bootstrap-kubelet.conf"
        while not self.stop.wait(0.02):
            if self.approves and bootstrap.exists() and not (self.kubernetes / "kubelet.conf").exists():
                access = kubeconfig.load(bootstrap)
                assert access.token and access.token.read() == joins.TOKEN
                pair = joins.issued(self.ca, f"system:node:{NODE}")
                (self.directory / "client.pem").write_text(pair.certificate + pair.key)
                client = os.fspath(self.directory / "client.pem")
                value = {
                    "current-context": "c",
                    "clusters": [
                        {
                            "name": "c",
                            "cluster": {
                                "server": access.server,
                                "certificate-authority": os.fspath(self.kubernetes / "pki/ca.crt"),
                            },
                        }
                    ],
                    "users": [{"name": "c", "user": {"client-certificate": client, "client-key": client}}],
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
                }
                (self.kubernetes / "kubelet.conf").write_text(json.dumps(value))

    # -- the machine

    @property
    def kubernetes(self) -> Path:
        return self.directory / "kubernetes"

    def settings(self, **more: Any) -> None:
        value = {
            "imds": f"http://127.0.0.1:{self.imds_port}",
            "custom_data": os.fspath(self.directory / "custom-data"),
            "file": os.fspath(self.directory / "node-config.json"),
            "kubernetes": os.fspath(self.kubernetes),
            "healthz": f"http://127.0.0.1:{self.healthz_port}/healthz",
            **more,
        }
        (self.directory / "etc/join.json").write_text(json.dumps(value))

    def tell(self, ca: str = "", **parts: Any) -> None:
        """Give the machine its user data."""
        told = joins.document(ca or self.ca.certificate, f"https://127.0.0.1:{self.api_port}", **parts)
        self.user_data = json.dumps(told).encode()

    def by_broker(self, **parts: Any) -> None:
        self.tell(credentials={**joins.BROKER, "url": f"https://127.0.0.1:{self.api_port}/token"}, **parts)

    def custom(self, **parts: Any) -> None:
        (self.directory / "custom-data").write_text(json.dumps(parts))

    def places(self) -> command.Places:
        here = self.directory
        return command.Places(
            run=here / "run",
            etc=here / "etc",
            release=here / "release",
            boot_id=here / "boot_id",
            listed=here / "preloaded.json",
            firmware=here / "product_uuid",
            restart=("touch", os.fspath(here / "restarted")),
        )

    def join(self) -> int:
        return command.run(self.places())

    @property
    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "run/provision.json").read_bytes())
        return found

    @property
    def states(self) -> dict[str, str]:
        return {phase["name"]: phase["state"] for phase in self.record["phases"]}

    @property
    def failure(self) -> tuple[str, int]:
        assert self.record["state"] == "failed"
        return self.record["phase"], self.record["code"]

    def tree(self) -> dict[str, tuple[bytes, int, int]]:
        """All files: bytes, mode, when they were last written."""
        files = [path for path in self.directory.rglob("*") if path.is_file()]
        return {
            os.fspath(path): (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns)
            for path in files
        }


def _tls(pair: joins.Pair, ca: joins.Pair, directory: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    path = directory / "server.pem"
    path.write_text(pair.certificate + pair.key)
    context.load_cert_chain(path)
    context.load_verify_locations(cadata=ca.certificate)
    context.verify_mode = ssl.CERT_OPTIONAL
    return context


@pytest.fixture
def days() -> tuple[float, float]:
    """When the API server's certificate is valid, in days from now."""
    return (-1, 30)


@pytest.fixture
def world(tmp_path: Path, days: tuple[float, float]) -> Iterator[World]:
    made = World(tmp_path)
    tls = _tls(joins.issued(made.ca, "kube-apiserver", days), made.ca, tmp_path)
    with (
        Server(made.imds) as imds,
        Server(made.api, tls) as api,
        Server(made.healthz) as healthz,
    ):
        made.imds_port, made.api_port, made.healthz_port = imds.port, api.port, healthz.port
        made.asked_imds, made.asked_api, made.api_server = imds.asked, api.asked, api
        made.settings()
        made.tell()
        made.custom(bootstrap_token=joins.TOKEN)
        kubelet = threading.Thread(target=made.kubelet)
        kubelet.start()
        try:
            yield made
        finally:
            made.stop.set()
            kubelet.join()


def test_a_node_joins_with_a_token_by_custom_data(world: World) -> None:
    assert world.join() == 0
    record = world.record
    assert (record["state"], record["code"], record["boot_id"], record["generation"]) == (
        "ok",
        0,
        world.boot,
        7,
    )
    assert list(world.states) == [
        "identity",
        "network",
        "disk",
        "runtime",
        "gpu",
        "credentials",
        "join",
        "kubelet",
        "ready",
    ]
    assert set(world.states.values()) == {"ok", "skipped"}
    assert (record["source"], record["vm_id"]) == ("user data", joins.VM_ID)
    assert (world.kubernetes / "node.env").read_text().splitlines() == [
        "KUBELET_NODE_LABELS=node.example/pool=h100-a,topology.kubernetes.io/zone=westus3-1,"
        "node.example/fault-domain=2,node.example/build=20261101-1",
        "KUBELET_NODE_IP=127.0.0.1",
        "KUBELET_PROVIDER_ID=azure:///subscriptions/8d10da13-8125-4ba9-a717-bf7490507b3d/resourceGroups/pools-west/"
        "providers/Microsoft.Compute/virtualMachineScaleSets/vmss-h100-a/virtualMachines/17",
        "KUBELET_EXTRA_ARGS=--cluster-dns=10.0.0.10 --max-pods=30 "
        "--register-with-taints=node.example/team=research:NoSchedule",
    ]
    assert (world.kubernetes / "pki/ca.crt").read_text() == world.ca.certificate
    assert command.tell_status(world.places()) == 0


def test_the_token_is_in_one_file_of_roots_and_goes_with_the_certificate(world: World) -> None:
    world.approves = False
    world.tell(join={"deadlines": {"ready": 1}})
    assert world.join() == 1 and world.failure == ("ready", 91)
    bootstrap = world.kubernetes / "bootstrap-kubelet.conf"
    assert bootstrap.stat().st_mode & 0o777 == 0o600
    holders = [path for path, (data, *_) in world.tree().items() if joins.TOKEN.encode() in data]
    assert sorted(holders) == [os.fspath(world.directory / "custom-data"), os.fspath(bootstrap)]
    world.approves = True
    assert world.join() == 0
    assert not bootstrap.exists()


def test_a_second_run_changes_nothing_and_asks_for_no_token(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.by_broker(join={"hosts": 100, "rate": 50})
    assert world.join() == 0
    tokens = [path for path in world.asked_imds if "oauth2" in path]
    before, asked = world.tree(), len(world.asked_api)
    capsys.readouterr()
    assert world.join() == 0
    assert "join: join skipped: a member already" in capsys.readouterr().out  # no slot is waited for
    assert world.tree() == before
    assert [path for path in world.asked_imds if "oauth2" in path] == tokens
    assert world.asked_api[asked:] == ["/version", f"/api/v1/nodes/{NODE}"]


def test_a_broker_gives_the_token_to_the_managed_identity_and_refusals_are_waited_for(world: World) -> None:
    world.throttled = 2
    answers = iter([(429, {"Retry-After": "0"}, b""), (503, {}, b""), world.broker()])
    world.broker = lambda: next(answers)
    world.by_broker()
    assert world.join() == 0
    assert world.posted[-1] == {"vm_id": joins.VM_ID, "node": NODE, "boot_id": world.boot}
    assert [path.partition("?")[0] for path in world.asked_imds] == ["/metadata/instance"] * 3 + [
        "/metadata/identity/oauth2/token"
    ]
    assert "resource=api%3A%2F%2Fnode-broker" in world.asked_imds[-1]
    assert len(world.posted) == 3


def test_a_new_generation_is_written_and_the_kubelet_started_again(world: World) -> None:
    assert world.join() == 0
    assert not (world.directory / "restarted").exists()  # it was started, by its path unit
    posted = len(world.asked_api)
    world.tell(generation=8, node={"max_pods": 60})
    assert world.join() == 0
    assert world.record["generation"] == 8
    assert json.loads((world.directory / "etc/join-taints.json").read_bytes()) == {"taints": []}
    assert "--max-pods=60" in (world.kubernetes / "node.env").read_text()
    assert (world.directory / "restarted").exists() and len(world.asked_api) > posted
    assert not (world.kubernetes / "bootstrap-kubelet.conf").exists()


SHORT = {"deadlines": {"identity": 1, "network": 1, "credentials": 1, "ready": 1}}


def _other_ca(world: World) -> None:
    world.tell(ca=joins.authority().certificate)


def _clock(world: World) -> None:
    world.api_server.date_off = 86400


def _refuse(world: World) -> None:
    world.custom(bootstrap_token="expired.0123456789abcdef"[1:])


def _identity(world: World) -> None:
    world.has_identity = False
    world.by_broker(join=SHORT)


def _broker(answer: Answer) -> Callable[[World], None]:
    def change(world: World) -> None:
        world.broker = lambda: answer
        world.by_broker(join=SHORT)

    return change


def _settings(**settings: Any) -> Callable[[World], None]:
    return lambda world: world.settings(**settings)


def _told(**parts: Any) -> Callable[[World], None]:
    return lambda world: world.tell(**parts)


def _alone(world: World) -> None:
    world.settings(imds="")
    (world.directory / "node-config.json").write_bytes(world.user_data)


def _not_ready(world: World) -> None:
    world.ready = "False"
    world.tell(join=SHORT)


FAILURES: dict[str, tuple[Callable[[World], object], str, int]] = {
    "settings that can't be used": (_settings(speed=3), "identity", 16),
    "a schema error": (_told(join={"rate": -1}), "identity", 13),
    "a secret in user data": (_told(generation=joins.TOKEN), "identity", 14),
    "an address that the platform does not know": (_alone, "identity", 15),
    "an address of another machine": (_told(node={"ip": "192.0.2.1"}, join=SHORT), "network", 21),
    "a name that does not resolve": (
        lambda w: w.tell(
            cluster={"server": "https://nobody.invalid:6443", "ca": w.ca.certificate}, join=SHORT
        ),
        "network",
        22,
    ),
    "nobody listens": (
        lambda w: w.tell(cluster={"server": "https://127.0.0.1:9", "ca": w.ca.certificate}, join=SHORT),
        "network",
        23,
    ),
    "another CA": (_other_ca, "credentials", 65),
    "a clock that is off by a day": (_clock, "credentials", 66),
    "an expired token": (_refuse, "credentials", 64),
    "no token": (lambda w: w.custom(), "credentials", 68),
    "no managed identity": (_identity, "credentials", 61),
    "a broker that refuses": (_broker((403, {}, b"")), "credentials", 62),
    "a broker that is too busy": (_broker((429, {"Retry-After": "60"}, b"")), "credentials", 62),
    "a broker that talks nonsense": (_broker(_json({"token": "x"})), "credentials", 63),
    "a token that expires at once": (
        _broker(_json({"token": joins.TOKEN, "expires": "2020-01-01T00:00:00Z"})),
        "credentials",
        69,
    ),
    "a node that does not get Ready": (_not_ready, "ready", 93),
}


@pytest.mark.parametrize("name", FAILURES)
def test_each_failure_has_its_number_and_starts_no_kubelet(world: World, name: str) -> None:
    change, phase, number = FAILURES[name]
    change(world)
    assert world.join() == 1
    assert world.failure == (phase, number), world.record
    assert world.record["phases"][-1]["name"] == phase and world.record["class"]
    assert joins.TOKEN not in json.dumps(world.record)
    if phase != "ready":
        assert list(world.kubernetes.iterdir()) == []
    assert command.tell_status(world.places()) == 1


@pytest.mark.parametrize("days", [(1.0, 30.0)])
def test_a_certificate_of_tomorrow_is_a_clock_that_is_behind(world: World) -> None:
    world.api_server.date_off = 2 * 86400
    assert world.join() == 1 and world.failure == ("credentials", 66)


@pytest.mark.parametrize("days", [(-30.0, -1.0)])
def test_a_certificate_of_yesterday_is_not_the_clocks_fault(world: World) -> None:
    assert world.join() == 1 and world.failure == ("credentials", 65)
    assert "expired" in world.record["reason"]


def test_nobody_has_told_it_to_join_and_that_fails_no_unit(world: World) -> None:
    world.user_data = b"#cloud-config\n"
    (world.directory / "custom-data").unlink()
    assert world.join() == 0 and world.failure == ("identity", 12)
    assert command.tell_status(world.places()) == 1


def test_user_data_come_before_custom_data_and_those_before_a_file(world: World) -> None:
    told = json.loads(world.user_data)
    (world.directory / "node-config.json").write_text(json.dumps({**told, "generation": 1}))
    world.custom(bootstrap_token=joins.TOKEN, config={**told, "generation": 2})
    assert world.join() == 0 and (world.record["source"], world.record["generation"]) == ("user data", 7)
    world.user_data = b""
    assert world.join() == 0 and (world.record["source"], world.record["generation"]) == ("custom data", 2)
    world.custom(bootstrap_token=joins.TOKEN)
    assert world.join() == 0 and world.record["generation"] == 1
    world.custom(bootstrap_token=joins.TOKEN, token="x")
    assert world.join() == 1 and world.failure == ("identity", 13)


def test_a_metadata_service_that_is_away_is_no_reason_where_a_file_says_it_all(world: World) -> None:
    told = json.loads(world.user_data)
    told["node"] = {"ip": "127.0.0.1", "provider_id": "none"}
    (world.directory / "node-config.json").write_text(json.dumps(told))
    world.settings(imds="")
    assert world.join() == 0
    assert world.record["vm_id"] == "11111111-2222-3333-4444-555555555555"
    assert "KUBELET_PROVIDER_ID" not in (world.kubernetes / "node.env").read_text()


def test_what_other_units_found_is_waited_for_and_believed(world: World) -> None:
    (world.directory / "etc/disk.json").write_text("{}")
    world.tell(join={"deadlines": {"disk": 1}})
    assert world.join() == 1 and world.failure == ("disk", 32)
    status = {
        "format": 1,
        "ready": False,
        "disk": {"state": "failed", "code": "disk.foreign", "reason": "ext4"},
    }
    (world.directory / "run/status.json").write_text(json.dumps(status))
    assert world.join() == 1 and world.failure == ("disk", 31) and "disk.foreign" in world.record["reason"]
    status["disk"] = {"state": "ok", "code": "", "reason": "one disk"}
    status["preload"] = {"state": "failed", "code": "preload.missing", "reason": "pause"}
    (world.directory / "run/status.json").write_text(json.dumps(status))
    (world.directory / "preloaded.json").write_text("{}")
    assert world.join() == 1 and world.failure == ("runtime", 41)


def _verdict(world: World, state: str) -> None:
    value = {
        "boot_id": world.boot,
        "state": state,
        "code": "gpu.hardware",
        "reason": "HBM",
        "action": "replace",
    }
    path = world.directory / "run/preflight.json"
    path.write_text(json.dumps({**value, "started": "2026-11-21T00:00:00+00:00", "seconds": 3.0}))


def test_a_preflight_that_did_not_pass_lets_the_node_in_and_fails_for_whoever_asks(world: World) -> None:
    (world.directory / "etc/preflight.json").write_text("{}")
    world.tell(join={"deadlines": {"gpu": 1}})
    assert world.join() == 1 and world.failure == ("gpu", 53)
    _verdict(world, "failed")
    assert world.join() == 1 and world.failure == ("ready", 94)
    told = (world.directory / "run/kubelet.env").read_text()
    assert "--register-with-taints=node.example/team=research:NoSchedule,image-builder/preflight=" in told
    assert world.states["gpu"] == "degraded" and (world.kubernetes / "kubelet.conf").exists()
    assert world.record["class"] == "hardware" and "gpu.hardware: HBM" in world.record["reason"]
    _verdict(world, "passed")
    assert world.join() == 0


def test_a_hard_preflight_keeps_the_kubelet_down(world: World) -> None:
    (world.directory / "etc/preflight.json").write_text('{"hard": true}')
    _verdict(world, "inconclusive")
    assert world.join() == 1 and world.failure == ("gpu", 52)
    assert list(world.kubernetes.iterdir()) == []


def test_the_budget_holds_for_all_phases_together(world: World) -> None:
    places = world.places()
    late = command.Joining(places, world.boot, time.monotonic() - 901)
    ended = command._phase("identity", late, Record(places.run, world.boot, lambda: 901.0))
    assert (ended.state, ended.code) == ("failed", 2) and world.asked_imds == []


PROGRAM = """
import sys
from pathlib import Path
from image_builder.node.join import command
from image_builder.node.join.record import Record
here = Path(sys.argv[1])
sys.exit(command.run(command.Places(
    run=here / "run", etc=here / "etc", release=here / "release", boot_id=here / "boot_id",
    listed=here / "preloaded.json", firmware=here / "product_uuid", restart=("true",),
)))
"""


def test_killed_in_its_slot_it_joins_the_next_time(world: World) -> None:
    world.tell(
        join={"hosts": 10, "rate": 10 * slot(joins.VM_ID, 1) / 1.5}
    )  # its slot is 1.5 s from the start
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, os.fspath(world.directory)], cwd=REPO, stdout=subprocess.DEVNULL
    )
    path = world.directory / "run/provision.json"
    while not path.exists() or world.record["phase"] != "join":
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert world.record["state"] == "running" and command.tell_status(world.places()) == 1
    assert not (world.kubernetes / "bootstrap-kubelet.conf").exists()
    assert world.join() == 0 and world.record["state"] == "ok"
