"""Checks of a preflight and their verdict, and how each is written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from image_builder.node import files, status
from image_builder.node.errors import NodeError
from image_builder.node.finding import kubernetes_reason

FORMAT = 1
FILE = "preflight.json"
REPORTED = "preflight.reported"
# Files that units look for: this boot is to be tested again, and the kubelet may start.
UNSETTLED, ADMITTED = "preflight.unsettled", "kubelet.admitted"

PASSED, FAILED, INCONCLUSIVE, SKIPPED = "passed", "failed", "inconclusive", "skipped"
CONDITION = "NodePreflightPassed"
_STATUS = {PASSED: "True", FAILED: "False"}
# A node's wish to be tested again while it works, and the gate's answer to it: annotations with JSON.
WISH, ANSWER = "image-builder/retest-wanted", "image-builder/retest"
HELD, GRANTED, REFUSED, WITHDRAWN = "held", "granted", "refused", "withdrawn"
_BOOT = re.compile(r"^boot=([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?:\s|$)")
_FAILURE = re.compile(r"^boot=\S+ (?:retest=\S+ )?image=\S+ failed in \d+ s: (\S+): ")
_RETEST = re.compile(r"^boot=\S+ retest=([0-9a-f]{16})(?:\s|$)")


@dataclass(frozen=True)
class Check:
    """One test. ``code`` tells why it isn't passed, ``action`` what would help.

    ``final``: no reboot may repeat it. A processor that once gave a wrong answer is not asked again until it gives
    the right one.
    """

    id: str
    state: str
    code: str = ""
    reason: str = ""
    action: str = "none"
    seconds: float = 0.0
    final: bool = False


@dataclass(frozen=True)
class Verdict:
    """What all checks come to. ``reboot``: the node is to be started again now, and tested again."""

    state: str
    code: str = ""
    reason: str = ""
    action: str = "none"
    reboot: bool = False


def document(
    verdict: Verdict, checks: Sequence[Check], *, boot_id: str, image_build: str, started: str, seconds: float
) -> dict[str, Any]:
    """Return what ``/run/node/preflight.json`` holds. ``started`` is a time with its zone (RFC 3339)."""
    return {
        "format": FORMAT,
        "boot_id": boot_id,
        "image_build": image_build,
        "state": verdict.state,
        "code": verdict.code,
        "reason": verdict.reason,
        "action": verdict.action,
        "checks": [asdict(check) for check in checks],
        "started": started,
        "seconds": round(seconds, 3),
    }


def section(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``/run/node/status.json`` says of a document."""
    details = {name: document[name] for name in ("code", "reason", "action", "seconds")}
    return {"state": status.label_of(document["state"]), **details}


def condition_status(state: str) -> str:
    """Return the condition's status: ``True``, ``False``, or ``Unknown`` for anything that wasn't settled."""
    return _STATUS.get(state, "Unknown")


def condition_reason(code: str) -> str:
    """Return a code as Kubernetes writes reasons: ``gpu.kat-int`` is ``GpuKatInt``, and no code is ``Passed``."""
    return kubernetes_reason(code) or "Passed"


def message(document: Mapping[str, Any]) -> str:
    """Return the condition's message for a document: what it speaks of comes first, boot, re-test and image."""
    image = document["image_build"] or "unknown"
    again = f" retest={document['retest']}" if document.get("retest") else ""
    text = (
        f"boot={document['boot_id']}{again} image={image} {document['state']} in {document['seconds']:.0f} s"
    )
    if document["state"] != PASSED:
        text += f": {document['code']}: {document['reason']} (action: {document['action']})"
    return text


def boot_of(message: str) -> str:
    """Return the boot id that a condition's message speaks of; empty where there is none."""
    match = _BOOT.match(message)
    return match[1] if match else ""


def failure_of(message: str) -> str:
    """Return the code by which the test that a condition's message speaks of failed; empty where it didn't."""
    match = _FAILURE.match(message)
    return match[1] if match else ""


def retest_of(message: str) -> str:
    """Return the number of the re-test that a condition's message speaks of; empty where it speaks of a boot's test."""
    match = _RETEST.match(message)
    return match[1] if match else ""


# -- the verdict of this boot in its files, where units, the kubelet, the joining and people find it ---------------


def write_verdict(document: Mapping[str, Any], places: status.Places) -> None:
    """Write a verdict, and the kubelet's labels and taints with it. Raises OSError."""
    files.write_json(places.run / FILE, document)
    status.update("preflight", section(document), places)


def read_verdict(places: status.Places) -> dict[str, Any]:
    """Return the verdict; raises NodeError (``preflight.none``) where there is none, or another boot's."""
    try:
        document: dict[str, Any] = json.loads((places.run / FILE).read_bytes())
        now = status.boot_id(places.boot_id)
    except (OSError, ValueError) as error:
        raise NodeError("preflight.none", f"no verdict of this boot: {error}") from error
    if document["boot_id"] != now:
        raise NodeError(
            "preflight.none", f"the verdict is of boot {document['boot_id']}, but this boot is {now}"
        )
    return document


def admit(document: Mapping[str, Any], run: Path, *, hard: bool) -> None:
    """Let the kubelet start, or not, and have what was not settled tested again. Raises OSError.

    A kubelet that runs is not stopped.
    """
    _mark(run / UNSETTLED, document["state"] == INCONCLUSIVE)
    _mark(run / ADMITTED, document["state"] == PASSED or not hard)


def _mark(path: Path, is_wanted: bool) -> None:
    if is_wanted:
        path.touch()
    else:
        path.unlink(missing_ok=True)
