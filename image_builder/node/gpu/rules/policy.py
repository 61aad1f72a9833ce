"""The policy on failures: which condemn a node, and which only warn. Pure: checks in, checks out.

The same finding on several GPUs says more about the test than about the GPUs; anything that was never tried on healthy
machines of this size only warns, unless most of the node's own GPUs show what a healthy one answers; and a pool can
downgrade individual checks to warnings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from image_builder.node.gpu.evidence import NOT_APPLICABLE, NOT_RUN, Evidence
from image_builder.node.gpu.model import DETAIL_CHARACTERS, Check, Worker

# Failures to reach these floors are only as good as the numbers in the table, unless the pool overrides the floor.
_FLOORS: Mapping[str, str] = {
    "bw.hbm": "hbm_floor_gbps",
    "bw.h2d": "h2d_floor_gbps",
    "bw.d2h": "d2h_floor_gbps",
    "bw.p2p": "p2p_floor_gbps",
    "perf.mma": "mma_reference_tflops",
}
_UNCALIBRATED = ("bandwidth.low", "compute.slow", "below.median", "nvme.count")
# A GPU that answered wrongly, or not at all.
UNANSWERED = (
    *("answer.wrong", "answer.common", "worker.absent", "worker.common", "worker.crashed"),
    *("worker.error", "worker.late", "worker.silent"),
)
_LATE = ("killed", "hung")
# The values in a wrong answer's detail, as known_answer, memory and bandwidth write them.
_VALUES = re.compile(r"(?:expected|checksum|found|bits|compared) (0x[0-9a-f]+|\d+ of \d+)")


def applied(evidence: Evidence, checks: Sequence[Check], is_active: Callable[[str], bool]) -> list[Check]:
    """Return the checks as they count for the verdict. ``is_active`` says whether a check id is about the load."""
    results = _without_load(evidence, _shared_lateness(evidence, _shared_answers(evidence, checks)))
    odd = _odd(results)
    return [
        _waived(_measured(evidence, check, is_active(check.id), (check.id, check.gpu) in odd), evidence)
        for check in results
    ]


# -- one finding on several GPUs -------------------------------------------------------------------------------


def _shared_answers(evidence: Evidence, checks: Sequence[Check]) -> list[Check]:
    """Make a wrong answer or a crash inconclusive if GPUs share it, or if the check fails on all of several GPUs."""
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
    """Return what the same wrong answer has in common on all GPUs: expected and found values, not their location."""
    return " ".join(_VALUES.findall(check.detail)) or check.detail


def _shared_lateness(evidence: Evidence, checks: Sequence[Check]) -> list[Check]:
    """Make lateness inconclusive if all of several workers in a round were late: a busy host or a slow compiler can
    cause that. A lone worker has none to compare with, and the node must not stay inconclusive: a reboot decides.
    """
    tried_links = [
        worker for worker in evidence.workers if any(m.id == "bw.p2p" for m in worker.measurements)
    ]
    late = [
        worker.gpu
        for round_ in (evidence.workers, tried_links)
        if all(map(_is_late, round_)) and len(round_) > 1
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
    """Mark checks that need a load as not applicable if the pool's policy rules one out."""
    if not evidence.idle_by_policy:
        return list(checks)
    return [replace(check, code=NOT_APPLICABLE) if check.code == NOT_RUN else check for check in checks]


def _odd(checks: Sequence[Check]) -> set[tuple[str, str]]:
    """Return the checks, by id and GPU, in which a GPU did not answer rightly while at least as many others did."""
    wrong: dict[str, set[str]] = {}
    right: dict[str, set[str]] = {}
    for check in checks:
        if check.code in UNANSWERED:
            wrong.setdefault(check.id, set()).add(check.gpu)
        elif check.gpu and check.status != "skip":
            right.setdefault(check.id, set()).add(check.gpu)
    return {
        (name, gpu)
        for name, gpus in wrong.items()
        for gpu in gpus
        if len(right.get(name, set()) - gpus) >= len(gpus)
    }


def _measured(evidence: Evidence, check: Check, is_active: bool, is_odd: bool) -> Check:
    """Return a check, downgraded to a warning if this test, or the number it compares with, was never tried.

    A GPU that is ``is_odd`` isn't given away either, but a person has to look at it: the others of this node gave the
    right answer to the same program.
    """
    expected = evidence.expected
    is_open = check.status in ("fail", "error") or (
        check.status == "skip" and check.code not in (NOT_APPLICABLE, NOT_RUN)
    )
    # An Xid that our own program may have caused is a result of the load as well.
    # A process stuck in the driver isn't a measurement: the GPU can't be used until a reboot.
    of_the_load = (is_active and check.code != "worker.unkillable") or (
        check.id == "xid.boot" and check.status == "error" and check.measured
    )
    if expected.observes and of_the_load and is_open and is_odd and check.code in UNANSWERED:
        return _doubted(check, check.code, "inspect", "other GPUs of this node answered rightly")
    if expected.observes and of_the_load and is_open:
        return _warning(check, "observed")
    is_floor = check.status == "fail" and check.code in _UNCALIBRATED
    if is_floor and not expected.calibrated and _FLOORS.get(check.id) not in expected.overridden:
        return _warning(check, "not calibrated")
    return check


def _waived(check: Check, evidence: Evidence) -> Check:
    """Return a check, downgraded to a warning with the reason if the pool's settings waive its failure."""
    waived = evidence.expected.settings.waived
    if check.status != "fail" or check.id not in waived:
        return check
    return _warning(check, f"waived ({waived[check.id]})")


def _warning(check: Check, why: str) -> Check:
    detail = f"{why}: {check.detail or check.code}"[:DETAIL_CHARACTERS]
    return replace(check, status="warn", action="none", detail=detail)
