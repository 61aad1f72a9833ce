"""Which failures condemn a node, and which only warn. Pure: checks in, checks out.

The same finding on several GPUs is rather one about the test than about each of them; what was never tried on healthy
machines of this size warns; and a pool can let single checks warn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from image_builder.node.gpu.evidence import NOT_APPLICABLE, NOT_RUN, Evidence
from image_builder.node.gpu.model import DETAIL_CHARACTERS, Check, Worker

# Findings below these thresholds are only as good as the numbers in the table, and whose override vouches for one.
_FLOORS: Mapping[str, str] = {
    "bw.hbm": "hbm_floor_gbps",
    "bw.h2d": "h2d_floor_gbps",
    "bw.d2h": "d2h_floor_gbps",
    "bw.p2p": "p2p_floor_gbps",
    "perf.mma": "mma_reference_tflops",
}
_UNCALIBRATED = ("bandwidth.low", "compute.slow", "below.median", "nvme.count")
_LATE = ("killed", "hung")
# The values in a wrong answer's detail, as known_answer, memory and bandwidth write them.
_VALUES = re.compile(r"(?:expected|checksum|found|bits|compared) (0x[0-9a-f]+|\d+ of \d+)")


def applied(evidence: Evidence, checks: Sequence[Check], is_active: Callable[[str], bool]) -> list[Check]:
    """Return the checks as they count for the verdict. ``is_active``: whether a check, by its id, is of the load."""
    results = _without_load(evidence, _shared_lateness(evidence, _shared_answers(evidence, checks)))
    return [_waived(_measured(evidence, check, is_active(check.id)), evidence) for check in results]


# -- one finding on several GPUs -------------------------------------------------------------------------------


def _shared_answers(evidence: Evidence, checks: Sequence[Check]) -> list[Check]:
    """Make inconclusive what fails alike on two GPUs or more, or in one check on all of several GPUs."""
    alike: dict[tuple[str, str], set[str]] = {}
    by_check: dict[str, set[str]] = {}
    for check in checks:
        if _is_about_answers(check):
            alike.setdefault((check.id, _record(check)), set()).add(check.gpu)
            by_check.setdefault(check.id, set()).add(check.gpu)

    def changed(check: Check) -> Check:
        if not _is_about_answers(check):
            return check
        same, everywhere = alike[check.id, _record(check)], by_check[check.id]
        if len(same) < 2 and not (len(everywhere) > 1 and len(everywhere) == len(evidence.gpus)):
            return check
        count = max(len(same), len(everywhere))
        code = "worker.common" if check.id == "worker" else "answer.common"
        return _doubted(check, code, "reimage", f"the same on {count} GPUs: the test itself is in doubt")

    return [changed(check) for check in checks]


def _is_about_answers(check: Check) -> bool:
    return check.status == "fail" and check.code in ("answer.wrong", "worker.crashed")


def _record(check: Check) -> str:
    """Return what a wrong answer has in common on all GPUs: expected and found values, not where they were."""
    return " ".join(_VALUES.findall(check.detail)) or check.detail


def _shared_lateness(evidence: Evidence, checks: Sequence[Check]) -> list[Check]:
    """Make inconclusive that all workers of a round were late: a busy host makes them so, or a slow compiler."""
    tried_links = [
        worker for worker in evidence.workers if any(m.id == "bw.p2p" for m in worker.measurements)
    ]
    late = [
        worker.gpu
        for round_ in (evidence.workers, tried_links)
        if all(map(_is_late, round_))
        for worker in round_
    ]
    return [
        _doubted(check, "worker.common", "none", "so was every other worker: the machine may be busy")
        if check.code == "worker.late" and check.gpu in late
        else check
        for check in checks
    ]


def _is_late(worker: Worker) -> bool:
    return worker.ended.startswith(_LATE)


def _doubted(check: Check, code: str, action: str, reason: str) -> Check:
    detail = f"{reason}: {check.detail}"[:DETAIL_CHARACTERS]
    return replace(check, status="error", code=code, action=action, detail=detail)  # type: ignore[arg-type]


# -- what was never tried, and what the pool lets pass ---------------------------------------------------------


def _without_load(evidence: Evidence, checks: Sequence[Check]) -> list[Check]:
    """Leave out what needs a load where the pool's policy forbids one."""
    if not evidence.idle_by_policy:
        return list(checks)
    return [replace(check, code=NOT_APPLICABLE) if check.code == NOT_RUN else check for check in checks]


def _measured(evidence: Evidence, check: Check, is_active: bool) -> Check:
    """Return a check that only warns where this test, or the number that it compares with, was never tried."""
    expected = evidence.expected
    is_open = check.status in ("fail", "error") or (
        check.status == "skip" and check.code not in (NOT_APPLICABLE, NOT_RUN)
    )
    # An Xid that our own program may have caused is a result of the load as well.
    # A process that the driver keeps is no measurement: the GPU can't be used before a reboot.
    of_the_load = (is_active and check.code != "worker.unkillable") or (
        check.id == "xid.boot" and check.status == "error" and check.measured
    )
    if expected.observes and of_the_load and is_open:
        return _warning(check, "observed")
    is_floor = check.status == "fail" and check.code in _UNCALIBRATED
    if is_floor and not expected.calibrated and _FLOORS.get(check.id) not in expected.overridden:
        return _warning(check, "not calibrated")
    return check


def _waived(check: Check, evidence: Evidence) -> Check:
    """Return a failure that the pool's settings let pass as a warning that says why."""
    waived = evidence.expected.settings.waived
    if check.status != "fail" or check.id not in waived:
        return check
    return _warning(check, f"waived ({waived[check.id]})")


def _warning(check: Check, why: str) -> Check:
    detail = f"{why}: {check.detail or check.code}"[:DETAIL_CHARACTERS]
    return replace(check, status="warn", action="none", detail=detail)
