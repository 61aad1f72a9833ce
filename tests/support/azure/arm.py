"""A stand-in for Azure Resource Manager, which isn't available here: a real HTTPS server with the documented answers.

They follow the REST reference (Microsoft.Compute 2024-11-01 and later: `Virtual Machine Scale Sets - Get`,
`Virtual Machine Scale Set VMs - List`, `Virtual Machines - List`; Microsoft.Network: `Network Interfaces - List` and
`- List Virtual Machine Scale Set Network Interfaces`; `Throttling Resource Manager requests`), shortened, with made-up
ids. They aren't recordings. The client is Azure's real SDK, including its real credential classes.
"""

from __future__ import annotations

import json
import ssl
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from image_builder.lab import certificate
from tests.support.servers import running

SUBSCRIPTION = "8d10da13-8125-4ba9-a717-bf7490507b3d"
GROUP = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/Pools-West"
SETS = f"{GROUP}/providers/Microsoft.Compute/virtualMachineScaleSets"
GALLERY = f"{GROUP}/providers/Microsoft.Compute/galleries/nodes/images"
SECRET = "of-the-managed-identity"
TOKEN = "t0k3n.0f.4zur3"

Json = dict[str, Any]
Answer = tuple[int, dict[str, str], Json]
# Takes a path with its query; returns an answer to give instead of the true one, or None.
Fault = Callable[[str], Answer | None]


def scale_set(name: str, capacity: int | None, *, mode: str = "Uniform", image: str = "worker_h100") -> Json:
    """Return a scale set's model."""
    reference = {"id": f"{GALLERY}/{image}/versions/1.4.2"}
    return {
        "name": name,
        "id": f"{SETS}/{name}",
        "type": "Microsoft.Compute/virtualMachineScaleSets",
        "location": "westus3",
        "tags": {"image-builder-build": "3f9c2a71d0b4"},
        "zones": ["1", "2"],
        **({} if capacity is None else {"sku": {"name": "Standard_ND96isr_H100_v5", "capacity": capacity}}),
        "properties": {
            "orchestrationMode": mode,
            "singlePlacementGroup": True,
            "provisioningState": "Succeeded",
            "virtualMachineProfile": {"storageProfile": {"imageReference": reference}},
        },
    }


def instance(name: str, number: int, *, image: str = "worker_h100") -> Json:
    """Return an instance of a scale set in Uniform mode, with its instance view."""
    id_ = f"{SETS}/{name}/virtualMachines/{number}"
    return {
        "name": f"{name}_{number}",
        # The service doesn't keep the case of names in a resource's id.
        "id": id_.replace("Pools-West", "POOLS-WEST"),
        "type": "Microsoft.Compute/virtualMachineScaleSets/virtualMachines",
        "location": "westus3",
        "instanceId": str(number),
        "sku": {"name": "Standard_ND96isr_H100_v5", "tier": "Standard"},
        "zones": [str(number % 2 + 1)],
        "properties": {
            "latestModelApplied": number != 1,
            "vmId": f"02AAB8A4-74EF-476E-8182-{_number(name):04X}{number:08X}",
            "provisioningState": "Succeeded",
            "storageProfile": {
                "imageReference": {"id": f"{GALLERY}/{image}/versions/1.4.2", "exactVersion": "1.4.2"}
            },
            "osProfile": {"computerName": f"{name}{number:06d}".upper(), "adminUsername": "operator"},
            "instanceView": {
                "platformUpdateDomain": 0,
                "platformFaultDomain": number % 5,
                "statuses": [
                    {"code": "ProvisioningState/succeeded", "level": "Info"},
                    {"code": "PowerState/running", "level": "Info", "displayStatus": "VM running"},
                ],
            },
        },
    }


def machine(name: str, number: int) -> Json:
    """Return a machine of a scale set in Flexible mode."""
    made = instance(name, number)
    properties = made["properties"]
    properties["hardwareProfile"] = {"vmSize": made.pop("sku")["name"]}
    properties["virtualMachineScaleSet"] = {"id": f"{SETS}/{name}"}
    del properties["latestModelApplied"], made["instanceId"]
    id_ = f"{GROUP}/providers/Microsoft.Compute/virtualMachines/{made['name']}"
    return made | {"id": id_, "type": "Microsoft.Compute/virtualMachines"}


def interface(owner: Json, address: str, *, primary: bool = True) -> Json:
    """Return a network interface of an instance. Its first address is for pods."""
    return {
        "name": "eth0",
        "id": f"{owner['id']}/networkInterfaces/eth0",
        "properties": {
            "primary": primary,
            "virtualMachine": {"id": owner["id"].lower()},
            "ipConfigurations": [
                {"name": "pod", "properties": {"privateIPAddress": f"10.99{address[4:]}", "primary": False}},
                {"name": "node", "properties": {"privateIPAddress": address, "primary": True}},
            ],
        },
    }


def _number(name: str) -> int:
    return zlib.crc32(name.encode()) % 0x10000


@dataclass
class Cloud:
    """The server's contents, by path; lists are answered ``page`` items at a time. ``asked`` has all requests."""

    items: dict[str, Json | list[Json]] = field(default_factory=dict)
    page: int = 3
    faults: list[Fault] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    url: str = ""
    ca: Path = Path()

    def add(self, name: str, count: int, *, capacity: int | None = None, mode: str = "Uniform") -> str:
        """Add a scale set with ``count`` instances, each with a network interface; return its id."""
        number, path = len(self.items), f"{SETS}/{name}"
        self.items[path] = scale_set(name, count if capacity is None else capacity, mode=mode)
        made = [instance(name, n) if mode == "Uniform" else machine(name, n) for n in range(count)]
        nics = [interface(m, f"10.{number}.{n // 250}.{n % 250 + 4}") for n, m in enumerate(made)]
        if mode == "Uniform":
            self.items |= {f"{path}/virtualMachines": made, f"{path}/networkInterfaces": nics}
        else:
            for kind, items in (("Compute/virtualMachines", made), ("Network/networkInterfaces", nics)):
                of_group = f"{GROUP}/providers/Microsoft.{kind}"
                self.items[of_group] = (self.list(of_group) if of_group in self.items else []) + items
        return path

    def list(self, path: str) -> list[Json]:
        """Return a served list, so that a test can change it."""
        found = self.items[path]
        assert isinstance(found, list)
        return found

    def answer(self, target: str, headers: dict[str, str]) -> Answer:
        """Return the answer to a request: that of the first fault that has one, otherwise the true one."""
        self.asked.append(target)
        parts = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if parts.path == "/msi/token":
            known = headers.get("x-identity-header") == SECRET
            return (200, {}, _token(query["resource"])) if known else (401, {}, {})
        if headers.get("authorization") != f"Bearer {TOKEN}":
            return error(401, "AuthenticationFailed", "Authentication failed.")
        for fault in self.faults:
            if (told := fault(target)) is not None:
                return told
        return self._true(parts.path, query)

    def _true(self, path: str, query: dict[str, str]) -> Answer:
        found = self.items.get(path)
        left = {
            "x-ms-ratelimit-remaining-resource": f"Microsoft.Compute/GetVMScaleSet3Min;{900 - len(self.asked)}"
        }
        if found is None:
            return error(404, "ResourceNotFound", f"The Resource '{path}' was not found.")
        if isinstance(found, dict):
            return 200, left, found
        if path.lower().endswith("/virtualmachines") and query.get("$expand") != "instanceView":
            return error(400, "BadRequest", "the stand-in serves instance views alone")
        start = int(query.get("$skiptoken", "0"))
        told: Json = {"value": found[start : start + self.page]}
        if start + self.page < len(found):
            kept = "&".join(f"{key}={quote(value)}" for key, value in query.items() if key != "$skiptoken")
            told["nextLink"] = f"{self.url}{path}?{kept}&$skiptoken={start + self.page}"
        return 200, left, told


def error(status: int, code: str, message: str, **headers: str) -> Answer:
    """Return an error answer in Resource Manager's format."""
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, told, {"error": {"code": code, "message": message}}


def _token(resource: str) -> Json:
    # App Service's managed identities, 2019-08-01: the variant whose address is set in the environment.
    return {"access_token": TOKEN, "expires_on": "4102444800", "resource": resource, "token_type": "Bearer"}


@contextmanager
def cloud(folder: Path) -> Iterator[Cloud]:
    """Serve a cloud on loopback, over TLS, because credentials are sent over nothing else."""
    made, told = certificate.make("localhost", folder), Cloud()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, more, body = told.answer(self.path, headers)
            said = json.dumps(body).encode()
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(said)),
                **more,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            return

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.server, made.key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    told.url, told.ca = f"https://localhost:{server.server_port}", made.ca
    with running(server):
        yield told
