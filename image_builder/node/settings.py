"""What the roles tell the node agent: JSON files below ``/etc/node-agent``, one for each role.

``disk.json`` (role local_disk), ``preload.json`` (role image_preload) and ``kubelet.json`` (role kubelet). One is the
agent's own: ``join-taints.json``, what the node joined with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from image_builder.node.errors import NodeError

DIRECTORY = Path("/etc/node-agent")
RELEASE = Path("/etc/image-release")


def load(name: str, directory: Path = DIRECTORY) -> dict[str, Any]:
    """Return a role's settings, empty where the role wrote none. Raises NodeError (``settings``)."""
    path = directory / f"{name}.json"
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise NodeError("settings", f"{path} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise NodeError("settings", f"{path} holds no object")
    return found


def build_id(path: Path = RELEASE) -> str:
    """Return the id of the image that this node was booted from; empty where no bake made it."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    named = dict(line.partition("=")[::2] for line in lines)
    return named.get("IMAGE_BUILD", "").strip('"')


def kubelet_taints(directory: Path = DIRECTORY) -> list[str]:
    """Return the taints that the kubelet registers with: those of the image, and those that the node joined with."""
    found = [load(name, directory).get("taints", []) for name in ("kubelet", "join-taints")]
    return list(dict.fromkeys(str(taint) for taints in found for taint in taints))
