"""The simulator on loopback, over TLS, because Azure's credentials are sent over nothing else."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from image_builder.lab import certificate
from tests.support.arm.model import Answer, Request
from tests.support.arm.service import Arm
from tests.support.servers import PatientServer, running

SECRET = "of-the-managed-identity"
TOKEN = "t0k3n.0f.4zur3"


@dataclass(frozen=True)
class Served:
    """A served service; ``environment`` lets the SDK find a managed identity there and trust the server."""

    arm: Arm
    url: str
    environment: Mapping[str, str]


@contextmanager
def served(arm: Arm, folder: Path) -> Iterator[Served]:
    """Serve Resource Manager and a managed identity until the block ends."""
    files, lock = certificate.make("localhost", folder), Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Headers and body in one packet: a second packet would wait 40 ms for the first one's acknowledgment.
        wbufsize = -1

        def _handle(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            headers = {name.lower(): value for name, value in self.headers.items()}
            data = self.rfile.read(int(headers.get("content-length", 0)))
            if parts.path == "/msi/token":
                self._answer(_token(query, headers))
                return
            if headers.get("authorization") != f"Bearer {TOKEN}":
                self._answer(Answer(401, {"error": {"code": "AuthenticationFailed", "message": "no token"}}))
                return
            body = json.loads(data) if data else None
            with lock:
                answer = arm.answer(Request(self.command, unquote(parts.path), query, body, headers))
            if answer is None:
                self.close_connection = True
                self.connection.close()
            else:
                self._answer(answer)

        do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = _handle  # noqa: N815  # names of http.server

        def _answer(self, answer: Answer) -> None:
            data = b"" if answer.body is None else json.dumps(answer.body).encode()
            self.send_response_only(answer.status)
            headers = {"Date": formatdate(usegmt=True), "Content-Type": "application/json"} | answer.headers
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.server, files.key)
    server = PatientServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    arm.url = f"https://localhost:{server.server_port}"
    environment = {
        "IDENTITY_ENDPOINT": f"{arm.url}/msi/token",
        "IDENTITY_HEADER": SECRET,
        "REQUESTS_CA_BUNDLE": str(files.ca),
        "NO_PROXY": "localhost,127.0.0.1",
    }
    with running(server):
        yield Served(arm, arm.url, environment)


def found_by(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Azure's SDK in this process find a service, but none of the host's own identities."""
    for name in [n for n in os.environ if n.startswith(("AZURE_", "IDENTITY_", "MSI_"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def _token(query: Mapping[str, str], headers: Mapping[str, str]) -> Answer:
    # App Service's managed identities, 2019-08-01: the variant whose address is set in the environment.
    if headers.get("x-identity-header") != SECRET:
        return Answer(401, {})
    return Answer(
        200,
        {
            "access_token": TOKEN,
            "expires_on": "4102444800",
            "resource": query["resource"],
            "token_type": "Bearer",
        },
    )
