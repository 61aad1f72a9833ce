"""What happened to the node since it was booted, in one file: ``/run/node/status.json``.

    {"format": 1, "ready": false,
     "disk": {"state": "degraded", "code": "disk.foreign", "reason": "...", ...},
     "seed": {...}, "preload": {...}, "promotion": {...}}

Each section has ``state``: ``ok``, ``degraded`` (the node works, slower or with less room) or ``failed``. A state
other than ``ok`` has a ``code`` and a ``reason``. The kubelet is told by ``kubelet.env`` beside it: a label for
each section, and a taint for each that failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from image_builder.node import layout, lock
from image_builder.node import settings as settings_files
from image_builder.node.errors import NodeError

DIRECTORY = Path("/run/node")
FORMAT = 1
SECTIONS = ("disk", "seed", "preload", "promotion")
OK, DEGRADED, FAILED = "ok", "degraded", "failed"
# Labels and taints of the kubelet: a prefix of our own, which NodeRestriction lets a kubelet set.
PREFIX = "image-builder"
_LABELLED: Mapping[str, str] = {"disk": "local-disk", "seed": "seed", "preload": "preload"}


def tell(text: str) -> None:
    """Say something to people: the journal, and the console by the unit's StandardOutput."""
    sys.stdout.write(f"node-agent: {text}\n")
    sys.stdout.flush()


def read(directory: Path = DIRECTORY) -> dict[str, Any]:
    """Return all that is known, also before anything was."""
    try:
        found: dict[str, Any] = json.loads((directory / "status.json").read_bytes())
    except FileNotFoundError:
        return {"format": FORMAT, "ready": False}
    return found


def update(
    section: str,
    value: Mapping[str, Any],
    *,
    directory: Path = DIRECTORY,
    settings: Path = settings_files.DIRECTORY,
    wanted: Sequence[str] | None = None,
) -> None:
    """Set a section, and what the kubelet is told.

    ``wanted`` are the sections without which the node is not ready, by default those that its ``settings`` call for.
    Safe for several processes at once.
    """
    with lock.held(directory / ".lock"):
        found = {**read(directory), section: dict(value)}
        found["ready"] = is_ready(found, wanted_sections(settings) if wanted is None else wanted)
        _write(directory / "status.json", json.dumps(found, indent=1) + "\n")
        _write(directory / "kubelet.env", kubelet_environment(found, _taints(settings)))


def _taints(directory: Path) -> list[str]:
    """Return the taints that the kubelet is configured with: our flag replaces them, so it must repeat them.

    Settings that can't be read fail the section ``disk``, and are none here.
    """
    try:
        return settings_files.kubelet_taints(directory)
    except NodeError:
        return []


def wanted_sections(settings: Path, listed: Path = layout.LIST) -> list[str]:
    """Return the sections that a boot of this node fills before the kubelet starts."""
    needs = {"disk": (settings / "disk.json").exists(), "preload": listed.exists()}
    return [name for name, needed in needs.items() if needed]


def is_ready(found: Mapping[str, Any], wanted: Sequence[str]) -> bool:
    """Tell whether all that is wanted was done, and nothing failed."""
    states = {name: found[name]["state"] for name in SECTIONS if name in found}
    return all(name in states for name in wanted) and FAILED not in states.values()


def kubelet_environment(found: Mapping[str, Any], taints: Sequence[str] = ()) -> str:
    """Return an environment file with the kubelet's further arguments."""
    states = {
        label: (str(found[section]["state"]), str(found[section].get("code", "")))
        for section, label in _LABELLED.items()
        if section in found
    }
    labels = ",".join(f"{PREFIX}/{label}={state}" for label, (state, _) in states.items())
    failed = [
        f"{PREFIX}/{label}={code or FAILED}:NoSchedule"
        for label, (state, code) in states.items()
        if state == FAILED
    ]
    arguments = [f"--node-labels={labels}"] if labels else []
    if failed:
        arguments.append(f"--register-with-taints={','.join([*taints, *failed])}")
    return f"NODE_AGENT_KUBELET_ARGS={' '.join(arguments)}\n"


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
