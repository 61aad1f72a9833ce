"""A preflight's checks and its verdict, and how they are written."""

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
BEFORE = "preflight.before"
# Files that units look for: this boot must be tested again; the kubelet may start.
UNSETTLED, ADMITTED = "preflight.unsettled", "kubelet.admitted"

PASSED, FAILED, INCONCLUSIVE, SKIPPED = "passed", "failed", "inconclusive", "skipped"
CONDITION = "NodePreflightPassed"
_STATUS = {PASSED: "True", FAILED: "False"}
# A node's request to be tested again while it is in service, and the gate's answer to it: annotations with JSON.
WISH, ANSWER = "image-builder/retest-wanted", "image-builder/retest"
HELD, GRANTED, REFUSED, WITHDRAWN = "held", "granted", "refused", "withdrawn"
_BOOT = re.compile(r"^boot=([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?:\s|$)")
_FAILURE = re.compile(r"^boot=\S+ (?:retest=\S+ )?image=\S+ failed in \d+ s: (\S+): ")
_RETEST = re.compile(r"^boot=\S+ retest=([0-9a-f]{16})(?:\s|$)")


@dataclass(frozen=True)
class Check:
    """One test. ``code`` says why it didn't pass, ``action`` what would help.

    ``final``: the test must not be repeated by a reboot. A processor that once gave a wrong answer isn't tested again
    until it happens to give the right one.
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
    """The result of all checks. ``reboot``: the node must be rebooted now, and tested again."""

    state: str
    code: str = ""
    reason: str = ""
    action: str = "none"
    reboot: bool = False


def document(
    verdict: Verdict, checks: Sequence[Check], *, boot_id: str, image_build: str, started: str, seconds: float
) -> dict[str, Any]:
    """Return the contents of ``/run/node/preflight.json``. ``started`` is a time with its zone (RFC 3339)."""
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
    """Return the section of ``/run/node/status.json`` for a document."""
    details = {name: document[name] for name in ("code", "reason", "action", "seconds")}
    return {"state": status.label_of(document["state"]), **details}


def condition_status(state: str) -> str:
    """Return the condition's status: ``True``, ``False``, or ``Unknown`` for anything inconclusive."""
    return _STATUS.get(state, "Unknown")


def condition_reason(code: str) -> str:
    """Return a code as a Kubernetes reason: ``gpu.kat-int`` becomes ``GpuKatInt``, and no code ``Passed``."""
    return kubernetes_reason(code) or "Passed"


def message(document: Mapping[str, Any]) -> str:
    """Return the condition's message for a document; it begins with the boot, re-test and image that it is about."""
    image = document["image_build"] or "unknown"
    again = f" retest={document['retest']}" if document.get("retest") else ""
    text = (
        f"boot={document['boot_id']}{again} image={image} {document['state']} in {document['seconds']:.0f} s"
    )
    if document["state"] != PASSED:
        text += f": {document['code']}: {document['reason']} (action: {document['action']})"
    for check in document["checks"]:
        if check["state"] == PASSED and check["code"]:
            text += f"; {check['code']}: {check['reason']}"
    return text


def boot_of(message: str) -> str:
    """Return the boot id in a condition's message; empty if there is none."""
    match = _BOOT.match(message)
    return match[1] if match else ""


def failure_of(message: str) -> str:
    """Return the code of the failure that a condition's message reports; empty if the test didn't fail."""
    match = _FAILURE.match(message)
    return match[1] if match else ""


def retest_of(message: str) -> str:
    """Return the number of the re-test that a condition's message is about; empty if it is about a boot's test."""
    match = _RETEST.match(message)
    return match[1] if match else ""


# -- the files with this boot's verdict, for units, the kubelet, ``node-agent join`` and people --------------------


def write_verdict(document: Mapping[str, Any], places: status.Places) -> None:
    """Write a verdict, and update the kubelet's labels and taints. Raises OSError."""
    files.write_json(places.run / FILE, document)
    status.update("preflight", section(document), places)


def read_verdict(places: status.Places) -> dict[str, Any]:
    """Return this boot's verdict. Raises NodeError (``preflight.none``) if there is none, or only another boot's."""
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


def is_unsettled(document: Mapping[str, Any]) -> bool:
    """Return whether this boot must be tested again: its verdict is inconclusive, or nothing of the machine failed.

    What other units prepare (disk, images, engine) may be ready later, and asking for it again costs nothing.
    """
    failed = {check["id"] for check in document["checks"] if check["state"] == FAILED}
    return document["state"] == INCONCLUSIVE or (bool(failed) and failed <= {*status.SECTIONS, "engine"})


def admit(document: Mapping[str, Any], run: Path, *, hard: bool) -> None:
    """Allow the kubelet to start, or not, and mark an unsettled verdict for another test. Raises OSError.

    A running kubelet isn't stopped.
    """
    _mark(run / UNSETTLED, is_unsettled(document))
    _mark(run / ADMITTED, document["state"] == PASSED or not hard)


def _mark(path: Path, is_wanted: bool) -> None:
    if is_wanted:
        path.touch()
    else:
        path.unlink(missing_ok=True)
