"""From checks to the verdict: one exit code, one action, one summary. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from image_builder.node.finding import Action
from image_builder.node.gpu.evidence import NOT_RUN
from image_builder.node.gpu.model import (
    CONFIGURATION,
    ENDINGS,
    HARDWARE,
    IMAGE,
    INCONCLUSIVE,
    PASS,
    REBOOT,
    Check,
    Tier,
    Verdict,
)
from image_builder.node.gpu.rules.checks import missing

# The worst first: where driver or image are defective, what they say of the hardware is in doubt.
_ORDER = (IMAGE, HARDWARE, REBOOT, CONFIGURATION)
_SUMMARY = 200


def verdict(checks: Sequence[Check], tier: Tier) -> Verdict:
    """Return the verdict: the worst failure, then what could not be checked, then a pass."""
    failed = [check for check in checks if check.status == "fail"]
    for exit_code in _ORDER:
        action = ENDINGS[exit_code].action
        worst = [check for check in failed if check.action == action]
        if worst:
            return _about(worst, exit_code, action, len(failed))
    if failed:  # a failure without an action is still one
        return _about(failed, HARDWARE, "replace", len(failed))
    # What a check needed first, then what was not run because of it.
    gaps = sorted(missing(checks, tier), key=lambda check: check.code == NOT_RUN)
    if gaps:
        # A test that is in doubt itself is the image's matter, and comes before what only could not be made.
        gaps.sort(key=lambda check: check.action != "reimage")
        return _about(gaps, INCONCLUSIVE, gaps[0].action, len(gaps))
    if not checks:
        return Verdict(INCONCLUSIVE, "none", "nothing was checked", "not-run")
    warned = sum(check.status == "warn" for check in checks)
    summary = f"{len(checks)} checks" + (f", {warned} of them warn" if warned else "")
    return Verdict(PASS, "none", summary)


def _about(checks: Sequence[Check], exit_code: int, action: Action, count: int) -> Verdict:
    """Return the verdict whose summary is about the first of these checks; ``count`` is how many there are in all."""
    first = checks[0]
    where = f" {first.gpu}" if first.gpu else ""
    others = f" (and {count - 1} more)" if count > 1 else ""
    text = f"{first.id}{where}: {first.detail or first.code}"
    return Verdict(exit_code, action, text[: _SUMMARY - len(others)] + others, first.code)
