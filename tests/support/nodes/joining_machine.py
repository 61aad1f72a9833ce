"""A machine that is to join a cluster, and its surroundings: metadata service, broker, API server, and kubelet.

There is no metadata service here, so a local server gives answers of the documented shape
(tests/support/nodes/joins.py). A single TLS server, which knows one token, acts as API server and broker. The kubelet
is a thread that handles the machine's files as the real one does.
"""

from __future__ import annotations

import json
import os
import ssl
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from image_builder.node.join import command
from image_builder.node.join.surroundings import PodGuard
from image_builder.node.net import kubeconfig
from tests.support.nodes import joins

NODE = os.uname().nodename.lower()
# A file's bytes, mode, inode, mtime and ctime (nanoseconds).
Seen = tuple[bytes, int, int, int, int]


class World:
    """A machine's files and its surroundings. Everything that tests change is an attribute."""

    imds_port: int
    api_port: int
    healthz_port: int
    asked_imds: list[str]
    asked_api: list[str]
    api_server: joins.Server
    tls: ssl.SSLContext

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
        # The broker's answers to a request for a nonce, and to one with a document.
        self.nonce: Callable[[], joins.Answer] = lambda: joins.answer({"nonce": joins.NONCE})
        self.broker: Callable[[], joins.Answer] = lambda: joins.answer(
            {"token": self.token, "expires": "2100-01-01T00:00:00Z"}
        )
        self.ready, self.approves = "True", True
        # Whether the kubelet's certificate has expired; it requests another as soon as it is restarted.
        self.expired = False
        # How many requests with the kubelet's certificate are still rejected, though it hasn't expired.
        self.rejections = 0
        self.posted: list[dict[str, Any]] = []
        self.stop = threading.Event()

    # -- around the machine

    def imds(self, path: str, _headers: dict[str, str], _body: bytes, _who: str) -> joins.Answer:
        if self.throttled:
            self.throttled -= 1
            return joins.TOO_MANY
        if "oauth2" in path and not self.has_identity:
            return 400, {}, b'{"error":"invalid_request","error_description":"Identity not found"}'
        if path.startswith("/metadata/attested"):
            return joins.answer({"encoding": "pkcs7", "signature": joins.DOCUMENT})
        return joins.answer(
            joins.instance(self.user_data) if path.startswith("/metadata/instance") else joins.IDENTITY
        )

    def api(self, path: str, headers: dict[str, str], body: bytes, who: str) -> joins.Answer:
        if path == "/token":
            if headers.get("Authorization") != f"Bearer {joins.IDENTITY['access_token']}":
                return 403, {}, b""
            self.posted.append(json.loads(body))
            return self.broker() if "document" in self.posted[-1] else self.nonce()
        is_known = bool(who) and not self.expired and not self.rejections
        if who and self.rejections:
            self.rejections -= 1
        if not is_known and headers.get("Authorization") != f"Bearer {joins.TOKEN}":
            return joins.answer({"kind": "Status", "message": "Unauthorized", "code": 401}, 401)
        if path == "/version":
            return joins.answer({"major": "1", "minor": "34"})
        assert path == f"/api/v1/nodes/{NODE}" and who == f"system:node:{NODE}"
        return joins.answer(
            {"status": {"conditions": [{"type": "Ready", "status": self.ready, "reason": "Test"}]}}
        )

    def healthz(self, *_: object) -> joins.Answer:
        running = (self.kubernetes / "kubelet.conf").exists()
        return (200 if running else 503), {}, b"ok"

    def kubelet(self) -> None:
        """Act as the path unit and the kubelet: wait for the file, get a certificate, write a kubeconfig.

        A kubelet whose certificate has expired looks for the file only when it starts, which is every few seconds.
        """
        bootstrap = self.kubernetes / "bootstrap-kubelet.conf"
        while not self.stop.wait(0.5 if self.expired else 0.02):
            is_member = (self.kubernetes / "kubelet.conf").exists() and not self.expired
            if self.approves and bootstrap.exists() and not is_member:
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
                self.expired = False

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
            guard=PodGuard(here / "etc/azure-pod-guard.service", here / "run/azure-pod-guard"),
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

    def tree(self) -> dict[str, Seen]:
        """Return all files as they are now."""
        return files(self.directory)


def files(directory: Path) -> dict[str, Seen]:
    """Return all files below a directory; a file rewritten with the same bytes compares as different."""
    return {
        os.fspath(path): (path.read_bytes(), of.st_mode, of.st_ino, of.st_mtime_ns, of.st_ctime_ns)
        for path in directory.rglob("*")
        if path.is_file() and not path.is_symlink() and (of := path.stat())
    }


@contextmanager
def served(
    directory: Path,
    days: tuple[float, float] = (-1, 30),
    *,
    imds: tuple[str, int] = ("127.0.0.1", 0),
    healthz: tuple[str, int] = ("127.0.0.1", 0),
) -> Iterator[World]:
    """Serve the surroundings of a machine that gets its token from custom data; its files go to an empty ``directory``.

    ``days`` are the limits of the API server certificate's validity, in days from now. ``imds`` and ``healthz`` are the
    addresses on which the metadata service and the kubelet listen.
    """
    made = World(directory)
    made.tls = tls(joins.issued(made.ca, "kube-apiserver", days), made.ca, directory)
    with (
        joins.serving(joins.as_imds(made.imds), address=imds) as platform,
        joins.serving(made.api, made.tls) as api,
        joins.serving(made.healthz, address=healthz) as health,
    ):
        made.imds_port, made.api_port, made.healthz_port = platform.port, api.port, health.port
        made.asked_imds, made.asked_api, made.api_server = platform.asked, api.asked, api
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


def tls(pair: joins.Pair, ca: joins.Pair, directory: Path) -> ssl.SSLContext:
    """Return a server's TLS context, which accepts clients with or without a certificate from ``ca``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    path = directory / "server.pem"
    path.write_text(pair.certificate + pair.key)
    context.load_cert_chain(path)
    context.load_verify_locations(cadata=ca.certificate)
    context.verify_mode = ssl.CERT_OPTIONAL
    return context
