"""The token broker's process, and what surrounds it: identity provider, metadata service, API server.

The identity provider and the metadata service belong to the cloud; here both are local servers, with keys and tokens
from tests/support/azure/identities.py.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from image_builder.node.join import config, credentials
from image_builder.node.join.credentials import Token
from image_builder.node.net.retry import Deadline
from tests.support.azure import attested, identities
from tests.support.control_plane.gates import Cluster, wait_until
from tests.support.images.builds import REPO
from tests.support.nodes import joins

RIGHTS = REPO / "deploy/token-broker.yml"
SERVICE_ACCOUNT = "system:serviceaccount:kube-system:image-builder-broker"
GROUP = "system:bootstrappers:h100"
SECRETS = "/api/v1/namespaces/kube-system/secrets"
OTHER_VM = "11111111-2222-4333-8444-555555555555"


class World:
    """Everything around a broker: the cluster, the cloud, the certificates. Tests change its attributes."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory
        self.authority = joins.authority()
        pair = joins.issued(self.authority, "broker")
        for name, text in {
            "ca.pem": self.authority.certificate,
            "tls.crt": pair.certificate,
            "tls.key": pair.key,
        }.items():
            (directory / name).write_text(text)
        (directory / "azure.pem").write_text(attested.signer().authority)
        self.keys_asked = 0
        self.provider_port = self.imds_port = 0
        self.identity = identities.token()

    def provider(self, *_: object) -> joins.Answer:
        self.keys_asked += 1
        return joins.answer(json.loads(identities.jwks("one", "two")))

    def imds(self, path: str, *_: object) -> joins.Answer:
        """Answer as the metadata service of the machine that the path starts with."""
        machine, *rest = urllib.parse.urlsplit(path).path.split("/")[1:]
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)
        if rest[:2] == ["metadata", "attested"]:
            signature = attested.document(attested.content(query["nonce"][0], machine))
            return joins.answer({"encoding": "pkcs7", "signature": signature})
        return joins.answer({**joins.IDENTITY, "access_token": self.identity})

    def imds_of(self, vm_id: str) -> str:
        """Return the address of a machine's metadata service."""
        return f"http://127.0.0.1:{self.imds_port}/{vm_id}"

    def context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.directory / "tls.crt", self.directory / "tls.key")
        return context

    def settings(self, **parts: Any) -> dict[str, Any]:
        """Return a broker's configuration; ``parts`` replace whole keys."""
        here = os.fspath(self.directory)
        tls = {"certificate": f"{here}/tls.crt", "key": f"{here}/tls.key"}
        return {
            "listen": {"address": "127.0.0.1", "port": 0, **tls},
            "identity": {
                "tenant": identities.TENANT,
                "audience": identities.AUDIENCE,
                "keys": f"https://127.0.0.1:{self.provider_port}/keys",
                "authority": f"{here}/ca.pem",
            },
            "attestation": {
                "authorities": f"{here}/azure.pem",
                "subscriptions": [attested.SUBSCRIPTION],
            },
            "pools": [
                {
                    "name": "h100",
                    "nodes": "vmss-h100-a[0-9a-z]{6}",
                    "resources": [identities.SCALE_SET],
                    "groups": [GROUP],
                }
            ],
            "limits": {"node": {"burst": 100, "per_second": 100.0}},
            **parts,
        }

    def secret(self, token: str) -> dict[str, Any]:
        """Return the Secret that the cluster keeps for a token."""
        return self.cluster.admin.request("GET", f"{SECRETS}/bootstrap-token-{token[:6]}")


class Broker:
    """A running broker. Its output is kept, and searched for secrets after it has ended."""

    def __init__(self, world: World, process: subprocess.Popen[str]) -> None:
        self.world, self.process = world, process
        self.lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self.text = ""
        # Requests for other paths, and the log lines about them.
        self.strays = self.stray_lines = 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        first = self.lines.get(timeout=300)
        self.port = int(first["said"].split()[1].rstrip(","))
        self.given: set[str] = set()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line
            self.lines.put(entry := json.loads(line))
            self.stray_lines += entry.get("code") == "path"

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait() == 0
        self._reader.join()
        for hidden in (self.world.identity, *self.given):
            assert hidden not in self.text, "a secret is in the audit log"

    def next(self) -> dict[str, Any]:
        """Return the log line of the next request."""
        return self.lines.get(timeout=300)

    def ask(self, node: str, vm_id: str = joins.VM_ID, *, ca: str = "", seconds: float = 300) -> Token:
        """Request a token as a node does, with the node's own code."""
        ca = ca or self.world.authority.certificate
        settings = joins.document(
            ca,
            credentials={**joins.BROKER, "url": f"https://127.0.0.1:{self.port}/token"},
            node={},
        )
        who = {"vm_id": vm_id, "node": node, "boot_id": joins.VM_ID}
        deadline = Deadline(time.monotonic() + seconds)
        imds = self.world.imds_of(vm_id)
        token = credentials.from_broker(config.parse(json.dumps(settings).encode()), imds, who, deadline)
        self.given.add(token.text.partition(".")[2])
        return token

    def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> tuple[int, str, str]:
        """Send a request as it is; return the status, Retry-After and the error code."""
        status, after, answer = self.exchange(method, path, headers, body)
        return status, after, answer.get("error", "")

    def exchange(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> tuple[int, str, dict[str, Any]]:
        """Send a request as it is; return the status, Retry-After and the body of the answer."""
        import http.client

        self.strays += path not in ("/token", "/healthz")
        context = ssl.create_default_context(cadata=self.world.authority.certificate)
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=30, context=context)
        try:
            connection.putrequest(method, path)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.headers.get("Retry-After", ""), json.loads(answer.read())
        finally:
            connection.close()

    def post(
        self, node: str, vm_id: str = joins.VM_ID, document: str | None = None
    ) -> tuple[int, str, dict[str, Any]]:
        """Request a nonce, or, with a document, a token."""
        proof = {"document": document} if document is not None else {}
        body = json.dumps({"vm_id": vm_id, "node": node, "boot_id": joins.VM_ID, **proof}).encode()
        headers = {"Authorization": f"Bearer {self.world.identity}", "Content-Length": str(len(body))}
        answer = self.exchange("POST", "/token", headers, body)
        self.given.update(filter(None, [answer[2].get("token", "").partition(".")[2]]))
        return answer

    def document(self, node: str, vm_id: str = joins.VM_ID) -> str:
        """Request a nonce; return the document that a machine's metadata service signs for it."""
        status, _, answer = self.post(node, vm_id)
        assert status == 200, answer
        return attested.document(attested.content(answer["nonce"], vm_id))


@contextmanager
def open_world(cluster: Cluster, directory: Path) -> Iterator[World]:
    """Serve the cloud around a broker of this cluster."""
    world = World(cluster, directory)
    with (
        joins.serving(world.provider, world.context()) as provider,
        joins.serving(joins.as_imds(world.imds)) as imds,
    ):
        world.provider_port, world.imds_port = provider.port, imds.port
        yield world


@contextmanager
def brokering(world: World, **parts: Any) -> Iterator[Broker]:
    path = world.directory / "broker.yml"
    path.write_text(yaml.safe_dump(world.settings(**parts)))
    account = world.cluster.kubeconfig(SERVICE_ACCOUNT, "system:serviceaccounts")
    argv = [sys.executable, "-P", "-m", "image_builder.cli", "pool", "broker"]
    with subprocess.Popen(
        [*argv, "--config", os.fspath(path), "--kubeconfig", os.fspath(account)],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": os.fspath(REPO)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        broker = Broker(world, process)
        try:
            yield broker
        finally:
            broker.close()


def whoami(world: World, token: str) -> dict[str, Any]:
    """Return the user that the API server sees in a token (name and groups), or nothing if it rejects the token."""
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
    answer = world.cluster.admin.request("POST", "/apis/authentication.k8s.io/v1/tokenreviews", review)
    user: dict[str, Any] = answer["status"]["user"] if answer["status"].get("authenticated") else {}
    return user


def drain(broker: Broker) -> None:
    """Discard the log lines of all requests so far. Makes one more request: once its line is there, all others are."""
    broker.exchange("GET", "/", {})
    assert wait_until(lambda: broker.stray_lines == broker.strays)
    while not broker.lines.empty():
        broker.lines.get()
