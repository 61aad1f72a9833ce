"""Shared by the tests of joining: certificates, a configuration, a server, and a metadata service's answers.

The answers have the shape that Azure documents (Instance Metadata Service, API version 2021-02-01; managed identities,
2018-02-01), shortened, with made-up ids. They aren't recordings, since there is no cloud here.
"""

from __future__ import annotations

import base64
import copy
import datetime
import ipaddress
import json
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.servers import running

VM_ID = "02aab8a4-74ef-476e-8182-f6d2ba4166a6"
# The broker's nonce, and the document that the metadata service makes from it; nothing here reads the document.
NONCE, DOCUMENT = "0123456789", "TUlJ"
TOKEN = "k3y1dx.s3cr3ts3cr3ts3cr"
BROKER = {
    "kind": "broker",
    "url": "https://127.0.0.1/token",
    "resource": "api://node-broker",
}

INSTANCE: dict[str, Any] = {
    "compute": {
        "azEnvironment": "AzurePublicCloud",
        "location": "westus3",
        "name": "vmss-h100-a_17",
        "osProfile": {"adminUsername": "operator", "computerName": "vmss-h100-a000017"},
        "osType": "Linux",
        "placementGroupId": "f67c14ab-e92c-408c-ae2d-da15866ec79a",
        "platformFaultDomain": "2",
        "platformUpdateDomain": "0",
        "resourceGroupName": "Pools-West",
        "resourceId": (
            "/subscriptions/8d10da13-8125-4ba9-a717-bf7490507b3d/resourceGroups/Pools-West/providers/"
            "Microsoft.Compute/virtualMachineScaleSets/vmss-h100-a/virtualMachines/17"
        ),
        "subscriptionId": "8d10da13-8125-4ba9-a717-bf7490507b3d",
        "tagsList": [],
        "userData": "",
        "vmId": VM_ID.upper(),
        "vmScaleSetName": "vmss-h100-a",
        "vmSize": "Standard_ND96isr_H100_v5",
        "zone": "1",
    },
    "network": {
        "interface": [
            {
                "ipv4": {
                    "ipAddress": [{"privateIpAddress": "127.0.0.1", "publicIpAddress": ""}],
                    "subnet": [{"address": "10.20.0.0", "prefix": "16"}],
                },
                "ipv6": {"ipAddress": []},
                "macAddress": "0011AAFFBB22",
            }
        ]
    },
}
IDENTITY: dict[str, Any] = {
    "access_token": "the-managed-identity",
    "client_id": "2b9a3f1e-3a5e-4b57-9d5a-0a7b4f6d8c11",
    "expires_in": "86399",
    "expires_on": "1506484173",
    "ext_expires_in": "86399",
    "not_before": "1506397473",
    "resource": "api://node-broker",
    "token_type": "Bearer",
}
TOO_MANY = (429, {"Retry-After": "0"}, b'{"error":"Too many requests"}')


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, both PEM."""

    certificate: str
    key: str


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _signed(
    common: str, days: tuple[float, float], issuer: tuple[x509.Name, ec.EllipticCurvePrivateKey] | None
) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    signer, signing_key = issuer or (_name(common), key)
    made = (
        x509.CertificateBuilder(signer, _name(common), key.public_key(), x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(days=days[0]))
        .not_valid_after(now + datetime.timedelta(days=days[1]))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False
        )
    )
    if issuer is None:
        usage = x509.KeyUsage(
            digital_signature=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        made = made.add_extension(usage, critical=True)
    else:
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return Pair(
        made.sign(signing_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode(),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode(),
    )


def authority() -> Pair:
    """Return a new CA."""
    return _signed("cluster", (-1, 30), None)


def issued(by: Pair, common: str, days: tuple[float, float] = (-1, 30)) -> Pair:
    """Return a certificate for 127.0.0.1; ``days`` are the limits of its validity, in days from now."""
    key = serialization.load_pem_private_key(by.key.encode(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return _signed(common, days, (_name("cluster"), key))


def document(ca: str, server: str = "https://127.0.0.1:6443", **parts: Any) -> dict[str, Any]:
    """Return a configuration; ``parts`` replace its top-level keys."""
    return {
        "format": 1,
        "generation": 7,
        "cluster": {"server": server, "ca": ca, "dns": ["10.0.0.10"]},
        "credentials": {"kind": "custom-data"},
        "node": {
            "max_pods": 30,
            "labels": {"node.example/pool": "h100-a"},
            "platform_labels": {
                "topology.kubernetes.io/zone": "zone",
                "node.example/fault-domain": "fault_domain",
                "node.example/build": "build",
            },
            "taints": [{"key": "node.example/team", "value": "research", "effect": "NoSchedule"}],
        },
        **parts,
    }


def instance(user_data: bytes = b"") -> dict[str, Any]:
    """Return the metadata service's answer about this machine."""
    made = copy.deepcopy(INSTANCE)
    made["compute"]["userData"] = base64.b64encode(user_data).decode()
    return made


Answer = tuple[int, dict[str, str], bytes]
# (path, headers, body, the client certificate's subject) of one request -> the answer.
Respond = Callable[[str, dict[str, str], bytes, str], Answer]


class Server(ThreadingHTTPServer):
    """A server that records the paths of its requests."""

    daemon_threads = True

    def __init__(self, respond: Respond, tls: ssl.SSLContext | None, address: tuple[str, int]) -> None:
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

        super().__init__(address, Handler)
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def handle_error(self, *_: object) -> None:
        """Ignore a client that hangs up because it doesn't trust the certificate, as it should."""

    @property
    def port(self) -> int:
        return int(self.server_address[1])


@contextmanager
def serving(
    respond: Respond, tls: ssl.SSLContext | None = None, address: tuple[str, int] = ("127.0.0.1", 0)
) -> Iterator[Server]:
    with running(Server(respond, tls, address)) as server:
        yield server


def answer(value: Any, code: int = 200) -> Answer:
    return code, {"Content-Type": "application/json"}, json.dumps(value).encode()


def as_imds(respond: Respond) -> Respond:
    """Refuse requests without the header that the metadata service requires, as the real one does."""

    def guarded(path: str, headers: dict[str, str], body: bytes, who: str) -> Answer:
        if headers.get("Metadata") != "true":
            return 400, {}, b'{"error":"Bad request. Required metadata header not specified"}'
        return respond(path, headers, body, who)

    return guarded
