"""A registry that requires a token, queried with the result of a login: a password, or an identity token.

The server is a stand-in that answers as specified by distribution ("Token Authentication" and "Docker Registry v2
authentication using OAuth2"), over TLS.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import urllib3

from image_builder.bake.pull.credentials import VARIABLE
from image_builder.bake.pull.gateway import gateway
from image_builder.bake.pull.reference import parse
from image_builder.bake.pull.registry import RegistryClient, locate
from image_builder.bake.pull.retry import classify
from image_builder.errors import PullError
from tests.support.control_plane.pki import Authority

pytestmark = pytest.mark.root

IDENTITY, BEARER = "identity-canary", "a-token-to-pull-with"
ADDRESS = "127.0.0.1"
_LAYER = f"sha256:{'1' * 64}"
_CONFIG = json.dumps({"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": [_LAYER]}}).encode()
_DIGEST = f"sha256:{hashlib.sha256(_CONFIG).hexdigest()}"
_MANIFEST = json.dumps({"config": {"digest": _DIGEST}, "layers": [{"digest": _LAYER, "size": 1}]}).encode()


class _Handler(BaseHTTPRequestHandler):
    def _answer(self, status: int, body: bytes = b"{}", **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path.startswith("/v2/slow/"):
            self._drip()
        elif self.path.startswith("/busy?"):
            self._answer(503)
        elif self.path.startswith("/token?"):
            basic = base64.b64encode(b"robot:secret").decode()
            known = self.headers.get("Authorization") == f"Basic {basic}"
            self._answer(200 if known else 401, json.dumps({"token": BEARER}).encode())
        elif self.headers.get("Authorization") != f"Bearer {BEARER}":
            way = "busy" if self.path.startswith("/v2/busy/") else "token"
            realm = f"https://{self.headers['Host']}/{way}"
            self._answer(401, WWW_Authenticate=f'Bearer realm="{realm}",service="lab"')
        else:
            self._answer(200, _CONFIG if "/blobs/" in self.path else _MANIFEST)

    def _drip(self) -> None:
        """Send a byte now and then until the client disconnects: never silent, never done."""
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b" ")
                time.sleep(0.02)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        form = dict(urllib.parse.parse_qsl(self.rfile.read(int(self.headers["Content-Length"])).decode()))
        wanted = {
            "grant_type": "refresh_token",
            "refresh_token": IDENTITY,
            "service": "lab",
            "scope": "repository:made:pull",
        }
        known = self.path == "/token" and form.items() >= wanted.items() and form.get("client_id")
        self._answer(200 if known else 401, json.dumps({"access_token": BEARER}).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve, and yield the registry's name."""
    authority = Authority()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("registry", addresses=[ADDRESS]).write(tmp_path, "server"))
    (tmp_path / "ca.pem").write_bytes(authority.certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    with ThreadingHTTPServer((ADDRESS, 0), _Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"{ADDRESS}:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _log_in(folder: Path, registry: str, entry: dict[str, str]) -> None:
    (folder / "config.json").write_text(json.dumps({"auths": {registry: entry}}))


@pytest.mark.parametrize(
    "entry",
    [
        {"auth": base64.b64encode(b"robot:secret").decode()},
        # As `az acr login` writes it.
        {
            "auth": base64.b64encode(b"00000000-0000-0000-0000-000000000000:").decode(),
            "identitytoken": IDENTITY,
        },
    ],
    ids=["a password", "an identity token"],
)
def test_what_a_login_left_lets_us_in(tmp_path: Path, registry: str, entry: dict[str, str]) -> None:
    _log_in(tmp_path, registry, entry)
    assert locate(f"{registry}/made:1", "linux/amd64", {}).config == _DIGEST
    with (
        RegistryClient(parse(f"{registry}/made:1"), {}, retries=False) as client,
        gateway(client) as way,
        urllib3.PoolManager() as pool,
    ):
        for key, status in ((way.authorization, 200), (f"Bearer {BEARER}", 403), ("", 403)):
            answer = pool.request("GET", f"{way.url}/v2/made/manifests/1", headers={"Authorization": key})
            assert (answer.status, answer.data) == (status, _MANIFEST if status == 200 else b"")


@pytest.mark.parametrize(
    "entry",
    [{"auth": base64.b64encode(b"robot:no").decode()}, {"identitytoken": "expired-canary"}],
    ids=["a password", "an identity token"],
)
def test_what_is_not_taken_is_told_without_it(tmp_path: Path, registry: str, entry: dict[str, str]) -> None:
    _log_in(tmp_path, registry, entry)
    with pytest.raises(PullError, match="answered 401: login refused") as caught:
        locate(f"{registry}/made:1", "linux/amd64", {})
    assert "canary" not in str(caught.value) and "robot" not in str(caught.value)


def test_a_manifest_that_comes_drop_by_drop_is_given_up(
    registry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("image_builder.bake.pull.registry._DOCUMENT_SECONDS", 0.3)
    with pytest.raises(PullError, match=r"manifests/1 did not come within 0\.3 s"):
        locate(f"{registry}/slow:1", "linux/amd64", {})


def test_a_token_server_that_is_busy_has_refused_nobody(registry: str) -> None:
    with (
        RegistryClient(parse(f"{registry}/busy:1"), {}, retries=False) as client,
        pytest.raises(PullError) as caught,
    ):
        client.manifest("1")
    assert caught.value.message.endswith("/busy answered 503 Service Unavailable")
    assert classify(caught.value.message) == "transient"
