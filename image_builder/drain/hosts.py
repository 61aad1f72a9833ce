"""Physical hosts that are known to be bad: machines on them were taken out because of a hardware finding.

The gate keeps them in one ConfigMap. A machine that comes up on one of them is a different one to Kubernetes, by name
and history, but has the same fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from image_builder.drain.fence import MALFORMED, unix_time
from image_builder.errors import UsageError
from image_builder.node.net.kube import MERGE_PATCH, Client
from image_builder.node.status import PHYSICAL_HOST
from image_builder.text import stamp

NAMESPACE, NAME = "kube-system", "image-builder-bad-hosts"
COLLECTION = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
PATH = f"{COLLECTION}/{NAME}"
# Valid as the key of a ConfigMap, and accepted by Azure as a name.
_HOST = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]{0,62}")


@dataclass(frozen=True)
class BadHost:
    """A host's name, and the finding for which a node on it was taken out at ``since`` (Unix time)."""

    name: str
    node: str
    reason: str
    detail: str
    since: float

    def text(self) -> str:
        return json.dumps(
            {key: value for key, value in asdict(self).items() if key != "name"}, sort_keys=True
        )

    @property
    def words(self) -> str:
        return (
            f"{self.name} is known as bad: {self.node}, {self.reason} at {stamp(self.since)}: {self.detail}"
        )


def host_of(document: Mapping[str, Any]) -> str:
    """Return the physical host that a Node's annotation names, empty if none."""
    name = str(((document.get("metadata") or {}).get("annotations") or {}).get(PHYSICAL_HOST, ""))
    return name if _HOST.fullmatch(name) else ""


def parse(config_map: Mapping[str, Any]) -> dict[str, BadHost]:
    """Return the hosts in a ConfigMap by name; malformed entries are ignored."""
    hosts = {}
    for name, text in (config_map.get("data") or {}).items():
        try:
            values = json.loads(text)
            texts = {key: str(values[key]) for key in ("node", "reason", "detail")}
            hosts[name] = BadHost(name=name, since=unix_time(values["since"]), **texts)
        except MALFORMED:
            continue
    return hosts


def read(client: Client) -> dict[str, BadHost] | None:
    """Return the hosts by name, None if there is no ConfigMap yet. Raises KubeError."""
    config_map = client.find(PATH)
    return None if config_map is None else parse(config_map)


def write(client: Client, before: Mapping[str, BadHost] | None, after: Mapping[str, BadHost]) -> None:
    """Write what has changed. Raises KubeError."""
    current = before or {}
    changes: dict[str, str | None] = dict.fromkeys(current.keys() - after.keys())
    changes |= {name: entry.text() for name, entry in after.items() if current.get(name) != entry}
    if not changes:
        return
    if before is None:
        meta = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}}
        client.request("POST", COLLECTION, {**meta, "data": changes})
    else:
        client.request("PATCH", PATH, {"data": changes}, MERGE_PATCH)


def forget(client: Client, name: str) -> BadHost:
    """Remove a repaired host from the ConfigMap, and return its entry. Raises UsageError, KubeError."""
    current = read(client) or {}
    if name not in current:
        raise UsageError(f"{name} is not known as bad; known are: {', '.join(sorted(current)) or 'none'}")
    write(client, current, {other: entry for other, entry in current.items() if other != name})
    return current[name]
