"""The verdict on a preflight's checks, and whether a reboot is worthwhile. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from image_builder.node.finding import ACTIONS
from image_builder.node.preflight.model import FAILED, INCONCLUSIVE, PASSED, SKIPPED, Check, Verdict

REASON_CHARACTERS = 400


# A node that has rebooted this often for one code within the window (seconds) is handed over.
MOST_REBOOTS, REBOOT_WINDOW = 3, 30 * 86400.0
# Codes of software faults, which another machine wouldn't fix: if a reboot did not help, the node needs another image.
_OF_PROGRAMS = ("runtime.",)
# Routine events in the life of a GPU's memory: a reset remaps the row, which isn't a reason to give the machine back.
# One that keeps recurring is for a person to judge.
_ROUTINE = ("remap.pending", "ecc.uncorrected")


@dataclass(frozen=True)
class Reboot:
    """A reboot that was ordered: for which code, by which image, in which boot, and when (Unix time).

    ``helped``: a later test passed.
    """

    code: str
    build: str
    boot_id: str
    at: float
    helped: bool = False


@dataclass(frozen=True)
class Attempts:
    """The reboots that failed preflights have ordered, as recorded on this machine's disk."""

    reboots: tuple[Reboot, ...] = ()

    def has(self, code: str, boot_id: str) -> bool:
        """Return whether a boot has called for a reboot for this code."""
        return any((reboot.code, reboot.boot_id) == (code, boot_id) for reboot in self.reboots)

    def unhelpful(self, code: str, build: str, boot_id: str) -> bool:
        """Return whether an earlier boot of this image rebooted for this code, and no test has passed since."""
        return any(
            (reboot.code, reboot.build, reboot.helped) == (code, build, False) and reboot.boot_id != boot_id
            for reboot in self.reboots
        )

    def recent(self, code: str, boot_id: str, now: float) -> int:
        """Return how many earlier boots were rebooted for this code within the window.

        A reboot in the future counts: the clock has been set since.
        """
        return sum(
            reboot.code == code and reboot.boot_id != boot_id and now - reboot.at < REBOOT_WINDOW
            for reboot in self.reboots
        )

    def passed(self, now: float) -> Attempts:
        """Return the reboots to keep when a test passes: recent ones, all marked as having helped.

        One in the future, recorded by a clock that was wrong, becomes one of now: it would never grow old.
        """
        recent = [reboot for reboot in self.reboots if now - reboot.at < REBOOT_WINDOW]
        return Attempts(tuple(replace(reboot, helped=True, at=min(reboot.at, now)) for reboot in recent))

    def ordered(self, code: str, build: str, boot_id: str, now: float) -> Attempts:
        """Return the reboots plus a new one; a boot that orders a reboot again for the same code counts once."""
        others = [reboot for reboot in self.reboots if (reboot.code, reboot.boot_id) != (code, boot_id)]
        return Attempts((*others, Reboot(code, build, boot_id, now)))

    def as_json(self) -> dict[str, Any]:
        return {"reboots": [asdict(reboot) for reboot in self.reboots]}


def parse_attempts(value: Any) -> Attempts:
    """Return the reboots in the file's contents. Raises ValueError if they have another format."""
    try:
        reboots = tuple(Reboot(**item) for item in value["reboots"])
    except (KeyError, TypeError) as error:
        raise ValueError("it holds no reboots") from error
    if any(type(item.at) not in (int, float) or type(item.helped) is not bool for item in reboots):
        raise ValueError("it holds no reboots")
    return Attempts(reboots)


def judge(checks: Sequence[Check]) -> Verdict:
    """Return the verdict on the checks, before a reboot is considered.

    A failed check outweighs an inconclusive one; if nothing was tested, nothing has passed. Of several failures, the
    one with the most severe action determines the verdict.
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
    verdict: Verdict,
    checks: Sequence[Check],
    attempts: Attempts | None,
    *,
    build: str,
    boot_id: str,
    may_reboot: bool,
    now: float,
) -> Verdict:
    """Decide about a reboot: one for each code until a test passes, unless something speaks against it.

    ``attempts`` is None if the file can't be read: the node might then reboot forever, so it doesn't reboot. A
    fault that a reboot did not cure, or that recurs too often, calls for another machine or image; an inconclusive
    test calls for neither, and is repeated. A routine fault may use up all its reboots, and then calls for a person.
    """
    if verdict.state == PASSED or verdict.action != "reboot":
        return verdict
    if any(check.final for check in checks):
        return replace(verdict, action="replace")
    if attempts is None:
        return replace(
            verdict, reason=f"{verdict.reason}; no reboot: the record of earlier reboots can't be read"
        )
    if verdict.code not in _ROUTINE and attempts.unhelpful(verdict.code, build, boot_id):
        return _handed_over(verdict, "a reboot did not help")
    if attempts.recent(verdict.code, boot_id, now) >= MOST_REBOOTS:
        return _handed_over(verdict, f"{MOST_REBOOTS} reboots in 30 days were for the same")
    return replace(verdict, reboot=may_reboot)


def _handed_over(verdict: Verdict, why: str) -> Verdict:
    action = "none"
    if verdict.state == FAILED:
        action = "reimage" if verdict.code.startswith(_OF_PROGRAMS) else "replace"
    if verdict.code in _ROUTINE:
        action = "inspect"
    return replace(verdict, action=action, reason=f"{verdict.reason}; {why}")
