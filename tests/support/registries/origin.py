"""The server of known bytes that tests put behind the faulty proxy, and a certificate."""

from __future__ import annotations

import contextlib
import datetime
import http.server
import ipaddress
import random
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.servers import running

BLOB = random.Random(1).randbytes(3_000_000)
BLOB_PATH = "/v2/app/blobs/sha256:00"
MANIFEST = b'{"schemaVersion":2}'
MANIFEST_PATH = "/v2/app/manifests/1"


class _Answers(http.server.BaseHTTPRequestHandler):
    """Serves known bytes under two names, whole or in part, and sends uploads back."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v2/chunked":
            self._answer(200, [("Transfer-Encoding", "chunked")], b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n")
            return
        data = MANIFEST if self.path == MANIFEST_PATH else BLOB
        if wanted := self.headers.get("Range"):
            first = int(wanted.removeprefix("bytes=").removesuffix("-"))
            part = ("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
            self._answer(206, [part, ("Content-Length", str(len(data) - first))], data[first:])
        else:
            self._answer(200, [("Content-Length", str(len(data)))], data)

    do_HEAD = do_GET  # noqa: N815

    def do_PUT(self) -> None:
        body = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline() or b"0", 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        location = f"http://{self.headers['Host']}/next?x=1"
        said = f"{self.command} {self.path} ".encode() + body
        self._answer(201, [("Location", location), ("Content-Length", str(len(said)))], said)

    do_POST = do_PATCH = do_PUT  # noqa: N815

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = False

    def handle_error(self, *_: object) -> None:
        assert isinstance(sys.exception(), OSError)  # the proxy hangs up when its client does


@contextlib.contextmanager
def origin(tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Serve until the block ends; yields the port on 127.0.0.1."""
    server = _Server(("127.0.0.1", 0), _Answers)
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    with running(server):
        yield server.server_port


def write_certificate(path: Path) -> None:
    """Write a key and its self-signed CA certificate for registry.test and 127.0.0.1, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "registry.test")])
    names = x509.SubjectAlternativeName(
        [x509.DNSName("registry.test"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + made.public_bytes(serialization.Encoding.PEM)
    )
