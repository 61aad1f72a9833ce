"""The status of a host's join: `/run/node/provision.json`, as ``node-agent join --status`` prints it.

Once told to join, a host does so by itself (playbooks/bootstrap.yml starts it and lets go): a broken connection
doesn't cancel anything. A lock on the host, held until it gives up, shows whether something there is still trying.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from image_builder.pool.plan.model import OK, Joined, Outcome, ended, failed, writable

# Held on the host from when it is told to join until that has ended, including its join slot. The directory is made
# by the node agent's unit, or by playbooks/bootstrap.yml.
LOCK = "/run/node/.told-to-join"
# If one of these phases failed, the kubelet wasn't started: the host certainly isn't a member. After them it may be.
BEFORE_KUBELET = frozenset({"identity", "network", "disk", "runtime", "gpu", "credentials", "join"})
# The numbers of failures of `bootstrap`, which are all those that aren't in one of the host's own phases.
NO_AGENT, NO_CONFIG, NOT_STARTED, NOT_ENDED = 1, 2, 3, 4
_NOT_FOUND = 127
STILL_HELD = 75  # flock's exit status, as playbooks/bootstrap.yml requests it
BUSY = "busy"
_MOST_SECONDS = 1e9
# A node has nine. What it reports is written to the journal and to each report.
_MOST_PHASES = 64
# `exec 9<` would need the file to exist; a shell that can't open it prints an error and doesn't ask anything.
_ASK = (
    f"if [ -e {LOCK} ] && ! flock --nonblock --shared {LOCK} true; then echo {BUSY}; exit 0; fi; "
    "exec node-agent join --status"
)
ASK = ("sh", "-c", _ASK)


class JoinStatus(NamedTuple):
    """The state of joining on a host. ``busy``: something on it is still trying to join; nothing else is known then."""

    outcome: Outcome
    joined: Joined
    phases: tuple[tuple[str, float], ...] = ()
    busy: bool = False


def read(status: int, stdout: bytes | str, stderr: bytes | str = b"") -> JoinStatus:
    """Return the status in the response to ``ASK``. A host that was never told to join is `ok`, with `no`."""
    out, err = (_text(stream).strip() for stream in (stdout, stderr))
    if out == BUSY:
        return JoinStatus(OK, "unknown", busy=True)
    if status == _NOT_FOUND:
        return JoinStatus(failed("bootstrap", NO_AGENT, f"no node agent is on it: {err or out}"), "no")
    document = _document(out)
    if document is None:
        if status == 0 or out:
            return JoinStatus(failed("bootstrap", NOT_ENDED, f"not understood: {out or err}"), "unknown")
        return JoinStatus(OK, "no")
    return _judge(document, joined=status == 0)


def after_join(status: int, stdout: str, stderr: str = "") -> JoinStatus:
    """Return how a host that was told to join ended: as ``read`` does, but `ok` without joining is `unknown`."""
    answer = read(status, stdout, stderr)
    if answer.busy or status == STILL_HELD:
        return JoinStatus(ended("unknown", "still tries to join"), "unknown")
    if answer.outcome.ok and answer.joined != "yes":
        return JoinStatus(ended("unknown", "told to join, and reports nothing"), "unknown")
    return answer


def _text(stream: bytes | str) -> str:
    return stream.decode("utf-8", "replace") if isinstance(stream, bytes) else stream


def _document(text: str) -> Mapping[str, Any] | None:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _judge(document: Mapping[str, Any], *, joined: bool) -> JoinStatus:
    phases = tuple(_phases(document))
    match document.get("state"):
        case "ok" if joined:
            return JoinStatus(OK, "yes", phases)
        case "running":
            # The lock isn't held: the boot itself started this, or the process that wrote the status was killed.
            return JoinStatus(OK, "unknown", phases, busy=True)
        case "failed":
            phase, code = str(document.get("phase") or "bootstrap"), document.get("code")
            if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code < 1 << 31:
                code = NOT_ENDED
            outcome = failed(phase, code, str(document.get("reason") or ""))
            return JoinStatus(outcome, "no" if phase in BEFORE_KUBELET else "unknown", phases)
        case None if not joined:
            return JoinStatus(OK, "no", phases)
        case other:
            detail = f"state {other!r} with exit status {0 if joined else 1}: not understood"
            return JoinStatus(failed("bootstrap", NOT_ENDED, detail), "unknown", phases)


def _phases(document: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the phases that succeeded, with their seconds."""
    listed = document.get("phases")
    return [
        (writable(str(phase["name"])), float(phase["seconds"]))
        for phase in (listed[:_MOST_PHASES] if isinstance(listed, list) else [])
        if isinstance(phase, dict)
        and phase.get("state") == "ok"
        and "name" in phase
        and _is_duration(phase.get("seconds"))
    ]


def _is_duration(value: object) -> bool:
    """Return whether a value is a duration: JSON has numbers that no float can hold, and Python reads NaN there."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MOST_SECONDS
