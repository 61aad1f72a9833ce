"""The node agent's settings: JSON files below ``/etc/node-agent``, written by roles.

``disk.json`` (role local_disk), ``preload.json`` (image_preload), ``kubelet.json`` (kubelet), ``gpu-driver.json``
(nvidia), ``gpu.json`` and ``preflight.json`` (gpu_preflight), ``health.json`` and ``health-endpoint.json``
(node_health), ``join.json`` (node_join). The agent itself writes only ``join-taints.json``, the taints that the node
joined with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from image_builder.node.decode import DecodeError, decode
from image_builder.node.errors import NodeError

DIRECTORY = Path("/etc/node-agent")
RELEASE = Path("/etc/image-release")
# The kubelet's health endpoint, unless configured otherwise.
HEALTHZ = "http://127.0.0.1:10248/healthz"

T = TypeVar("T")


def load(name: str, directory: Path = DIRECTORY) -> dict[str, Any]:
    """Return a role's settings; empty if the role wrote none. Raises NodeError (``settings``)."""
    path = directory / f"{name}.json"
    return read(path) if path.exists() else {}


def read(path: Path) -> dict[str, Any]:
    """Return the settings in a file. Raises NodeError (``settings``)."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise NodeError("settings", f"{path} can't be read: {error}") from error
    if not isinstance(document, dict):
        raise NodeError("settings", f"{path} must hold an object")
    return document


def parse(kind: type[T], document: Mapping[str, Any], name: str, *, code: str = "settings") -> T:
    """Return a role's settings as a dataclass. Raises NodeError (``code``) naming the file and all its problems."""
    try:
        return decode(kind, document)
    except DecodeError as error:
        raise NodeError(code, f"{name}.json: {error}") from error


def build_id(path: Path = RELEASE) -> str:
    """Return the id of the image that this node was booted from; empty if no bake made it."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    values = dict(line.partition("=")[::2] for line in lines)
    return values.get("IMAGE_BUILD", "").strip('"')


def kubelet_taints(directory: Path = DIRECTORY) -> list[str]:
    """Return the taints that the kubelet registers with: those of the image, and those that the node joined with."""
    lists = [load(name, directory).get("taints", []) for name in ("kubelet", "join-taints")]
    return list(dict.fromkeys(str(taint) for taints in lists for taint in taints))
