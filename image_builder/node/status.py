"""The status of this boot, in one file: ``/run/node/status.json``.

    {"format": 1, "ready": false,
     "disk": {"state": "degraded", "code": "disk.foreign", "reason": "...", ...},
     "seed": {...}, "preload": {...}, "promotion": {...}}

Each section has ``state``: ``ok``, ``degraded`` (the node works, slower or with less room) or ``failed``. A state
other than ``ok`` has a ``code`` and a ``reason``. The kubelet reads ``kubelet.env`` next to it: a label for
each section, and a taint for each that failed. A node with a preflight (``preflight.json`` in its settings) always
registers with the preflight's taint, whatever the verdict: the gate removes it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.node import files, layout
from image_builder.node import settings as settings_files
from image_builder.node.errors import NodeError

DIRECTORY = Path("/run/node")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
FORMAT = 1
SECTIONS = ("disk", "seed", "preload", "promotion")
# Sections that only some nodes have.
OPTIONAL = ("preflight",)
OK, DEGRADED, FAILED = "ok", "degraded", "failed"
# The prefix of the kubelet's labels and taints: our own, which NodeRestriction allows a kubelet to set.
PREFIX = "image-builder"
_LABELLED: Mapping[str, str] = {"disk": "local-disk", "seed": "seed", "preload": "preload"}
PREFLIGHT_LABEL = f"{PREFIX}/preflight"
PENDING = "pending"
# The Node's annotation with the name of the physical machine that this virtual machine runs on.
PHYSICAL_HOST = f"{PREFIX}/physical-host"
# Records the last boot that the node itself ended. A reboot ordered by anyone else is a decision about the node.
REBOOT = Path("/var/lib/node-agent/reboot.json")


@dataclass(frozen=True)
class Places:
    """Paths that every command uses: this boot's files (``run``), settings (``etc``), the image's and the boot's id.

    A command that needs more has a subclass of its own.
    """

    run: Path = DIRECTORY
    etc: Path = settings_files.DIRECTORY
    release: Path = settings_files.RELEASE
    boot_id: Path = BOOT_ID


def boot_id(path: Path = BOOT_ID) -> str:
    """Return this boot's id, which the kubelet reports as ``status.nodeInfo.bootID``. Raises OSError."""
    return path.read_text(encoding="ascii").strip()


def record_reboot(boot_id: str, path: Path = REBOOT) -> None:
    """Record that the node itself is ending this boot. Raises OSError."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    files.write_json(path, {"boot_id": boot_id})


def is_reboot_own(boot_id: str, path: Path = REBOOT) -> bool:
    """Return whether the node itself ended a boot; True if the record can't be read."""
    try:
        return bool(json.loads(path.read_bytes())["boot_id"] == boot_id)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):
        return True


def tell(text: str) -> None:
    """Write a line for people: to the journal, and to the console where the unit's StandardOutput says so."""
    sys.stdout.write(f"node-agent: {text}\n")
    sys.stdout.flush()


def read(directory: Path = DIRECTORY) -> dict[str, Any]:
    """Return the status. A missing or damaged file counts as an empty status; the next update replaces it."""
    return files.read_json(directory / "status.json") or {"format": FORMAT, "ready": False}


def update(
    section: str,
    value: Mapping[str, Any],
    places: Places = Places(),
    *,
    required: Sequence[str] | None = None,
) -> None:
    """Set a section, and update the kubelet's environment.

    ``required`` are the sections without which the node isn't ready, by default those that its settings call for.
    ``attempts`` in a failed section is how often in a row it has failed. Several processes may call this at the same
    time.
    """
    run, etc = places.run, places.etc
    with files.lock(run / ".lock", 60):
        before = read(run)
        document = {**before, section: dict(value)}
        if section in SECTIONS and value["state"] == FAILED:
            document[section]["attempts"] = before.get(section, {}).get("attempts", 0) + 1
        is_settled = section == "seed" and before.get("seed", {}).get("retried") and not value.get("retried")
        if is_settled and "attempts" in before.get("preload", {}):
            # Without an archive the engine waited for the seed, and the images for the engine: they count from now on.
            document["preload"] = {**before["preload"], "attempts": 1}
        document["ready"] = is_ready(document, wanted_sections(etc) if required is None else required)
        files.write_json(run / "status.json", document, durable=False)
        environment = kubelet_environment(document, _taints(etc), _gate(etc))
        files.write_changed(run / "kubelet.env", environment.encode(), durable=False)


def _taints(directory: Path) -> list[str]:
    """Return the taints that the kubelet is configured with: our flag overrides them, so it must repeat them.

    Settings that can't be read fail the section ``disk``; here they count as having no taints.
    """
    try:
        return settings_files.kubelet_taints(directory)
    except NodeError:
        return []


def _gate(directory: Path) -> str:
    """Return the taint that this node registers with because of its preflight; empty if it has no preflight.

    Settings that can't be read are no reason to register without a taint: the default taint is used.
    """
    if not (directory / "preflight.json").exists():
        return ""
    try:
        key = settings_files.load("preflight", directory).get("taint")
    except NodeError:
        key = None
    return f"{key or PREFLIGHT_LABEL}={PENDING}:NoSchedule"


def wanted_sections(settings: Path, listed: Path = layout.LIST) -> list[str]:
    """Return the sections that a boot of this node fills before the kubelet starts."""
    needs = {"disk": (settings / "disk.json").exists(), "preload": listed.exists()}
    return [name for name, needed in needs.items() if needed]


def is_ready(document: Mapping[str, Any], required: Sequence[str]) -> bool:
    """Return whether all required sections are there and no section has failed."""
    states = {name: document[name]["state"] for name in (*SECTIONS, *OPTIONAL) if name in document}
    return all(name in states for name in required) and FAILED not in states.values()


def label_of(state: str) -> str:
    """Return the label's value for a preflight's state: ``ok`` or ``failed``."""
    return OK if state == "passed" else FAILED


def kubelet_environment(document: Mapping[str, Any], taints: Sequence[str] = (), gate: str = "") -> str:
    """Return an environment file with additional kubelet arguments.

    ``taints`` are those of the kubelet's configuration; ``gate`` is the preflight's taint, empty for none.
    """
    states = {
        label: (str(document[section]["state"]), str(document[section].get("code", "")))
        for section, label in _LABELLED.items()
        if section in document
    }
    labels = {f"{PREFIX}/{label}": state for label, (state, _) in states.items()}
    own = [
        f"{PREFIX}/{label}={code or FAILED}:NoSchedule"
        for label, (state, code) in states.items()
        if state == FAILED
    ]
    if gate:
        labels[PREFLIGHT_LABEL] = str(document["preflight"]["state"]) if "preflight" in document else PENDING
        own.append(gate)
    arguments = [f"--node-labels={','.join(f'{k}={v}' for k, v in labels.items())}"] if labels else []
    if own:
        arguments.append(f"--register-with-taints={','.join([*taints, *own])}")
    return f"NODE_AGENT_KUBELET_ARGS={' '.join(arguments)}\n"
