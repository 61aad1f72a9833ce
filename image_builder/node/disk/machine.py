"""How many local disks this size of machine has, where that is known before there is a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from image_builder.node import settings as settings_files
from image_builder.node.errors import NodeError
from image_builder.node.gpu import sizes

# What cloud-init's first stage was told by the metadata service in this boot; units start after it.
CLOUD = Path("/run/cloud-init/instance-data.json")


def local_disks(etc: Path = settings_files.DIRECTORY, cloud: Path = CLOUD) -> int:
    """Return the number of local NVMe disks; 0 where the size or its number of disks isn't known."""
    try:
        size = sizes.load().find(str(settings_files.load("gpu", etc).get("vm_size") or _size(cloud)))
    except NodeError:
        return 0
    return (size[0].local_nvme or 0) if size else 0


def _size(cloud: Path) -> str:
    try:
        value: Any = json.loads(cloud.read_bytes())
        for key in ("ds", "meta_data", "imds", "compute", "vmSize"):
            value = value[key]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return value if isinstance(value, str) else ""
