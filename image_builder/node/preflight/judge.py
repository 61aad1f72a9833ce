"""From checks to a verdict, and whether a reboot is worth it. Nothing here does anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from image_builder.node.preflight.model import ACTIONS, FAILED, INCONCLUSIVE, PASSED, SKIPPED, Check, Verdict

REASON_CHARACTERS = 400


@dataclass(frozen=True)
class Attempts:
    """How often this image has already been started again because of a failed preflight, and in which boot last."""

    build: str = ""
    reboots: int = 0
    boot_id: str = ""


def parse_attempts(found: Mapping[str, Any]) -> Attempts:
    """Return what the counter file says; raises ValueError for one that isn't ours."""
    made = Attempts(found["build"], found["reboots"], found["boot_id"]) if found.keys() >= _FIELDS else None
    if made is None or not isinstance(made.reboots, int) or not isinstance(made.build, str):
        raise ValueError("it holds no count of reboots")
    return made


_FIELDS = {"build", "reboots", "boot_id"}


def judge(checks: Sequence[Check]) -> Verdict:
    """Return what the checks come to, before any thought of a reboot.

    One that failed outweighs one that was not settled; nothing tested is nothing passed. Of several failures the one
    with the gravest action speaks.
    """
    failed = [check for check in checks if check.state == FAILED]
    unsettled = [check for check in checks if check.state not in (PASSED, FAILED, SKIPPED)]
    if not failed and not unsettled:
        if any(check.state == PASSED for check in checks):
            return Verdict(PASSED)
        return Verdict(INCONCLUSIVE, "preflight.empty", "no check was made")
    worst = max(failed or unsettled, key=lambda check: ACTIONS.index(check.action))
    others = len(failed) + len(unsettled) - 1
    more = f" (and {others} more)" if others else ""
    reason = f"{worst.reason[:REASON_CHARACTERS]}{more}"
    return Verdict(FAILED if failed else INCONCLUSIVE, worst.code, reason, worst.action)


def settle(
    verdict: Verdict, checks: Sequence[Check], attempts: Attempts | None, *, build: str, may_reboot: bool
) -> Verdict:
    """Decide about a reboot: once for an image, and only where nothing speaks against it.

    ``attempts`` is None where the count can't be read: then a reboot might be one without end, and there is none.
    After the one reboot the same fault is not the boot's: replace the node.
    """
    if verdict.state == PASSED or verdict.action != "reboot":
        return verdict
    if any(check.final for check in checks):
        return replace(verdict, action="replace")
    if attempts is None:
        return replace(verdict, reason=f"{verdict.reason}; no reboot: how many there were can't be read")
    if attempts.build == build and attempts.reboots >= 1:
        return replace(verdict, action="replace", reason=f"{verdict.reason}; a reboot did not help")
    return replace(verdict, reboot=may_reboot)
