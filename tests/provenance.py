"""Which code a record of a run by hand is about, and whether the checkout still has that code.

A record has the digest of the files that decide its results under ``code``. Its page says so where they have changed
since: what the page shows was true then, and is unproven now.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from image_builder.settings import REPO_ROOT

_NODE = "image_builder/node"
JOIN = (
    *(
        f"{_NODE}/{name}"
        for name in ("join", "preflight", "kube.py", "kubeconfig.py", "serving.py", "asking.py")
    ),
    *("image_builder/broker", "image_builder/gate"),
    *("roles/gpu_preflight", "roles/kubelet", "roles/node_join"),
)
SLICES = ("image_builder/pool", "image_builder/pool_slice_command.py", "playbooks/bootstrap.yml")
LOCAL_DISK = (
    *(
        f"{_NODE}/{name}"
        for name in ("disk", "preload", "promote", "seed", "durable.py", "store.py", "trees.py")
    ),
    *("roles/image_preload", "roles/local_disk"),
)
PENDING_PODS = ("image_builder/pull", *LOCAL_DISK, "roles/container_runtime", "roles/kubelet")


def digest(places: Sequence[str], root: Path = REPO_ROOT) -> str:
    """Return the SHA-256 of the names and bytes of files, and of those below folders; raises FileNotFoundError."""
    found = hashlib.sha256()
    for place in places:
        path = root / place
        if not path.exists():
            raise FileNotFoundError(path)
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        for file in sorted(p for p in files if "__pycache__" not in p.parts):
            found.update(f"{file.relative_to(root)}\0{file.stat().st_size}\0".encode())
            found.update(file.read_bytes())
    return found.hexdigest()


def is_current(record: Mapping[str, Any], places: Sequence[str]) -> bool:
    """Tell whether a record is about the code that there is."""
    return record.get("code") == digest(places)


def note(record: Mapping[str, Any], places: Sequence[str]) -> list[str]:
    """Return what a page says of a record of other code, in Markdown: nothing where it is of this code."""
    if is_current(record, places):
        return []
    return ["**Of earlier code:** what decides these results has changed since, and was not run again.", ""]
