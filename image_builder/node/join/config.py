"""The node configuration: which cluster to join, and how. Its schema is ``node-config.schema.json``.

It reaches the machine as user data, which every process can read, so it contains no secrets. All of its
problems are reported at once, each with its path.
"""

from __future__ import annotations

import hashlib
import pkgutil
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from image_builder.node.join import schema as schemas
from image_builder.node.join.codes import PHASES, JoinError
from image_builder.node.net import reach

# Azure's limit for user data, which is sent as base64 (three bytes as four characters).
MOST_BYTES = 65536 // 4 * 3
PLATFORM, NONE = "platform", "none"
# Seconds. Disk, images and preflight have their own units, which run before this one.
_DEADLINES: Mapping[str, float] = {
    "identity": 60,
    "network": 60,
    "disk": 30,
    "runtime": 60,
    "gpu": 30,
    "credentials": 120,
    "join": 10,
    "kubelet": 60,
    "ready": 300,
}
# Labels that a kubelet may set itself in Kubernetes' namespaces (kubelet's --node-labels; plugin NodeRestriction).
_OWN_SPACES = ("kubelet.kubernetes.io", "node.kubernetes.io")
_OWN_LABELS = frozenset(
    {
        "kubernetes.io/hostname",
        "kubernetes.io/arch",
        "kubernetes.io/os",
        "topology.kubernetes.io/zone",
        "topology.kubernetes.io/region",
        "failure-domain.beta.kubernetes.io/zone",
        "failure-domain.beta.kubernetes.io/region",
        "beta.kubernetes.io/arch",
        "beta.kubernetes.io/os",
        "beta.kubernetes.io/instance-type",
        "node.kubernetes.io/instance-type",
    }
)

# The form of each secret, and its name in messages, which never contain the secret itself.
_SECRETS: Mapping[str, re.Pattern[str]] = {
    "a bootstrap token": re.compile(r"(?<![a-z0-9.])[a-z0-9]{6}\.[a-z0-9]{16}(?![a-z0-9.])"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "a signed token": re.compile(r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),
    "credentials of HTTP": re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9+/_=.-]{8,}"),
    "a shared access signature": re.compile(r"[?&]sig=[A-Za-z0-9%+/=]{8,}"),
    "a password in an address": re.compile(r"[a-z]+://[^/@\s:]*:[^/@\s]+@"),
    "a vaulted value": re.compile(r"\$ANSIBLE_VAULT;"),
}


@dataclass(frozen=True)
class Credentials:
    """Where the bootstrap token comes from. All fields except ``kind`` are for the broker."""

    kind: str
    url: str = ""
    resource: str = ""
    client_id: str = ""
    ca: str = ""


@dataclass(frozen=True)
class Azure:
    """The tenant, and the managed identity that pulls images; without ``client_id`` the machine must have only one."""

    tenant_id: str
    client_id: str = ""


@dataclass(frozen=True)
class Taint:
    key: str
    effect: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.key}={self.value}:{self.effect}"


@dataclass(frozen=True)
class NodeConfig:
    """A configuration. ``ip`` and ``provider_id`` may be ``platform`` or ``none``; ``max_pods`` 0: as in the image.

    ``deadlines`` has all phases, in seconds. ``digest`` is the SHA-256 of the text.
    """

    generation: int
    server: str
    ca: str
    credentials: Credentials
    azure: Azure | None = None
    dns: tuple[str, ...] = ()
    name: str = ""
    provider_id: str = PLATFORM
    ip: str = PLATFORM
    max_pods: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    platform_labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    hosts: int = 1
    rate: float = 5.0
    budget_seconds: float = 900.0
    deadlines: Mapping[str, float] = field(default_factory=dict)
    digest: str = ""

    @property
    def window(self) -> float:
        """Return the length of the window over which the slots are spread, in seconds."""
        return self.hosts / self.rate

    @property
    def endpoint(self) -> tuple[str, int]:
        """Return the API server's host, without brackets, and its port."""
        parts = urlsplit(self.server)
        return parts.hostname or "", parts.port or 443


def json_schema() -> dict[str, Any]:
    """Return the schema."""
    data = pkgutil.get_data(__package__, "node-config.schema.json")
    assert data is not None
    schema: dict[str, Any] = schemas.load(data)
    return schema


def parse(text: bytes) -> NodeConfig:
    """Return the configuration. Raises JoinError (13 or 14) with all problems."""
    if len(text) > MOST_BYTES:
        raise JoinError(13, f"it has {len(text)} bytes, but user data may have at most {MOST_BYTES}")
    try:
        document = schemas.load(text)
    except ValueError as error:  # invalid JSON or UTF-8, or a repeated key
        reason = str(error) if isinstance(error, schemas.RepeatedKeyError) else type(error).__name__
        raise JoinError(13, f"not JSON: {reason}") from error
    if hidden := [f"{path}: must not contain {kind}" for path, kind in secrets(document)]:
        raise JoinError(14, "; ".join(hidden))
    if wrong := problems(document):
        raise JoinError(13, "; ".join(wrong))
    return _build(document, hashlib.sha256(text).hexdigest())


def secrets(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the kind of each secret in a JSON value, including its keys."""
    if isinstance(value, str):
        yield from ((path, name) for name, pattern in _SECRETS.items() if pattern.search(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            for _, name in secrets(str(key)):
                yield path or "(a key)", name
            yield from secrets(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from secrets(item, f"{path}[{number}]")


def problems(document: Any) -> list[str]:
    """Return all problems of a configuration, except for secrets."""
    if wrong := schemas.problems(document, json_schema()):
        return wrong
    return [f"{path}: {problem}" for path, problem in _rules(document)]


def _build(document: Mapping[str, Any], digest: str) -> NodeConfig:
    cluster, node, join = document["cluster"], document.get("node", {}), document.get("join", {})
    hosts, rate = int(join.get("hosts", 1)), float(join.get("rate", 5))
    return NodeConfig(
        generation=document["generation"],
        server=cluster["server"],
        ca=cluster["ca"],
        credentials=Credentials(**document["credentials"]),
        azure=Azure(**document["azure"]) if "azure" in document else None,
        dns=tuple(cluster.get("dns", ())),
        name=node.get("name", ""),
        provider_id=node.get("provider_id", PLATFORM),
        ip=node.get("ip", PLATFORM),
        max_pods=node.get("max_pods", 0),
        labels=dict(node.get("labels", {})),
        platform_labels=dict(node.get("platform_labels", {})),
        taints=tuple(Taint(**taint) for taint in node.get("taints", ())),
        hosts=hosts,
        rate=rate,
        budget_seconds=float(join.get("budget_seconds", 900)),
        deadlines=_deadlines(join),
        digest=digest,
    )


def _deadlines(join: Mapping[str, Any]) -> dict[str, float]:
    """Return all deadlines; the default for the phase ``join`` is the slots' window plus a margin."""
    window = join.get("hosts", 1) / join.get("rate", 5)
    own = {**_DEADLINES, "join": window + _DEADLINES["join"], **join.get("deadlines", {})}
    return {phase: float(own[phase]) for phase in PHASES}


def default_deadlines() -> dict[str, float]:
    """Return the deadlines that apply before there is a configuration."""
    return _deadlines({})


def _rules(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield problems that a schema can't express."""
    cluster, node, join = document["cluster"], document.get("node", {}), document.get("join", {})
    for path, owner in (("cluster", cluster), ("credentials", document["credentials"])):
        if "ca" in owner and not _is_authority(owner["ca"]):
            yield f"{path}.ca", "must be a certificate (PEM)"
        for key in ("server", "url"):
            if key in owner and not _has_port(owner[key]):
                yield f"{path}.{key}", "must have a valid port"
    if document["credentials"]["kind"] == "custom-data" and len(document["credentials"]) > 1:
        yield "credentials", "kind custom-data takes no other fields"
    for number, address in enumerate(cluster.get("dns", ())):
        if not reach.is_address(address):
            yield f"cluster.dns[{number}]", "must be an IP address"
    if (ip := node.get("ip", NONE)) not in (PLATFORM, NONE):
        addresses = ip.split(",")
        if not all(map(reach.is_address, addresses)):
            yield "node.ip", "must be an IP address"
        elif len({":" in address for address in addresses}) < len(addresses):
            yield "node.ip", "must have addresses of different families"
    yield from _label_rules(node)
    taints = [(taint["key"], taint["effect"]) for taint in node.get("taints", ())]
    for number, taint in enumerate(taints):
        if taint in taints[:number]:
            yield f"node.taints[{number}]", "repeats a key with the same effect"
    deadlines = _deadlines(join)
    if deadlines["join"] < join.get("hosts", 1) / join.get("rate", 5):
        yield "join.deadlines.join", "must be at least hosts / rate, or the last hosts could never join"
    if join.get("budget_seconds", 900) < deadlines["join"]:
        yield "join.budget_seconds", "must be at least the deadline of the phase join"


def _label_rules(node: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for where in ("labels", "platform_labels"):
        for key in node.get(where, {}):
            if not _may_set(key):
                yield (
                    f"node.{where}.{key}",
                    "a kubelet must not set this label: it is reserved",
                )
    for key in node.get("labels", {}).keys() & node.get("platform_labels", {}).keys():
        yield f"node.platform_labels.{key}", "is also in labels"


def _may_set(key: str) -> bool:
    space = key.rpartition("/")[0]
    is_reserved = re.search(r"(^|\.)(kubernetes|k8s)\.io$", space)
    is_open = any(space == own or space.endswith(f".{own}") for own in _OWN_SPACES)
    return not is_reserved or key in _OWN_LABELS or is_open


def _has_port(url: str) -> bool:
    try:
        return urlsplit(url).port != 0 and bool(urlsplit(url).hostname)
    except ValueError:
        return False


def _is_authority(pem: str) -> bool:
    """Return whether OpenSSL accepts the certificates."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem)
    except (ssl.SSLError, ValueError):
        return False
    return True
