"""What follows from all checks: one status, one exit code, one action. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from image_builder.node.gpu.evidence import NOT_RUN
from image_builder.node.gpu.model import Action, Check, Tier, Verdict
from image_builder.node.gpu.rules.checks import missing

PASS, HARDWARE, REBOOT, INCONCLUSIVE, CONFIGURATION, IMAGE, DEADLINE = 0, 1, 2, 3, 4, 5, 124
EXIT_CODES: Mapping[int, str] = {
    PASS: "every mandatory check was made, and none failed",
    HARDWARE: "the hardware is faulty: replace the machine",
    REBOOT: "the GPUs need a reset: reboot once, then replace",
    INCONCLUSIVE: "a mandatory check could not be made, or the test itself is in doubt: not a pass",
    CONFIGURATION: "the size or the configuration doesn't fit what is there",
    IMAGE: "driver or image are defective: a new machine of this image won't help",
    DEADLINE: "the test itself didn't end in time: not a pass",
}
_OF_ACTION: Mapping[Action, int] = {
    "reimage": IMAGE,
    "replace": HARDWARE,
    "reboot": REBOOT,
    "config": CONFIGURATION,
}
# The worst first.
_ORDER = (IMAGE, HARDWARE, REBOOT, CONFIGURATION)
_ACTIONS: Mapping[int, Action] = {code: action for action, code in _OF_ACTION.items()}
_SUMMARY = 200


def verdict(checks: Sequence[Check], tier: Tier) -> Verdict:
    """Return what follows: the worst failure, then what could not be made, then a pass."""
    failed = [check for check in checks if check.status == "fail"]
    by_code = {code: [check for check in failed if _OF_ACTION.get(check.action) == code] for code in _ORDER}
    for code in _ORDER:
        if by_code[code]:
            return _verdict("fail", code, _ACTIONS[code], by_code[code], len(failed))
    if failed:  # a failure without an action is still one
        return _verdict("fail", HARDWARE, "replace", failed, len(failed))
    # What a check needed first, then what was not run because of it.
    gaps = sorted(missing(checks, tier), key=lambda check: check.code == NOT_RUN)
    if gaps:
        # A test that is in doubt itself is the image's matter, and comes before what only could not be made.
        gaps.sort(key=lambda check: check.action != "reimage")
        return _verdict("inconclusive", INCONCLUSIVE, gaps[0].action, gaps, len(gaps))
    if not checks:
        return Verdict("inconclusive", INCONCLUSIVE, "none", False, "nothing was checked", "not-run")
    warned = sum(check.status == "warn" for check in checks)
    summary = f"{len(checks)} checks" + (f", {warned} of them warn" if warned else "")
    return Verdict("pass", PASS, "none", False, summary)


def _verdict(
    status: Literal["fail", "inconclusive"], code: int, action: Action, worst: Sequence[Check], count: int
) -> Verdict:
    first = worst[0]
    where = f" {first.gpu}" if first.gpu else ""
    others = f" (and {count - 1} more)" if count > 1 else ""
    text = f"{first.id}{where}: {first.detail or first.code}"
    room = _SUMMARY - len(others)
    # A wrong answer is never asked again: the next one may be right by chance.
    again = code == REBOOT
    return Verdict(status, code, action, again, text[:room] + others, first.code)
