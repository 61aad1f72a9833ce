"""The GPU smoke test, run in a child process that may hang, crash or report nonsense."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from image_builder.node import child, files
from image_builder.node.child import Child
from image_builder.node.gpu.model import DEADLINE, ENDINGS
from image_builder.node.preflight.model import FAILED, INCONCLUSIVE, PASSED, Check

ID = "gpu"
# Checks whose failure means that the hardware computed a wrong answer.
_KNOWN_ANSWERS = ("kat.", "det.")
# Codes of answers that are wrong or missing.
_ANSWERS = ("answer.", "worker.")
_LIMIT = 8 << 20

_STATES = {"fail": FAILED, "inconclusive": INCONCLUSIVE}


def command(tier: str) -> list[str]:
    """Return the command that starts the smoke test: this program again, whether it is a single file or a package."""
    program = (
        [sys.argv[0]] if Path(sys.argv[0]).suffix != ".py" else [sys.executable, "-m", "image_builder.node"]
    )
    return [*program, "gpu-smoke", "--tier", tier, "--json"]


def run(argv: Sequence[str], seconds: float, boot_id: str) -> Check:
    """Run the smoke test for at most ``seconds`` and return its result. Never raises."""
    began = time.monotonic()
    try:
        status, output, tail = _run(argv, seconds)
        check = judge(status, output, tail, boot_id)
    except OSError as error:
        check = Check(ID, INCONCLUSIVE, "gpu.program", f"`{' '.join(argv)}`: {error.strerror}", "reimage")
    return Check(**{**check.__dict__, "seconds": round(time.monotonic() - began, 3)})


def judge(status: int | None, output: bytes, tail: str, boot_id: str) -> Check:
    """Return the check that an exit status and an output result in. ``status`` is None if it could not be killed.

    A status counts only with a document of this boot that contains the same status. Without one the program is broken,
    not the hardware, whatever the status; only a missed deadline, which this process observes, needs no document.
    """
    if status is None:
        return Check(
            ID, FAILED, "gpu.hung", "the smoke test hangs in the kernel and can't be killed", "reboot"
        )
    document = files.json_object(output)
    verdict = document.get("verdict")
    if (
        not isinstance(verdict, Mapping)
        or document.get("boot_id") != boot_id
        or verdict.get("exit_code") != status
    ):
        return _without_document(status, tail)
    summary = str(verdict.get("summary", ""))
    if status == 0 and verdict.get("status") == "pass":
        # A test that only observes lets wrong answers pass that no other GPU speaks against; people must see them.
        codes = (str(c.get("reason_code")) for c in _checks(document) if c.get("status") == "warn")
        return Check(ID, PASSED, next((c for c in codes if c.startswith(_ANSWERS)), ""), summary)
    # Python itself exits with 1 on a broken import and argparse with 2, so a status alone condemns no hardware.
    ending = ENDINGS.get(status)
    if ending is None or ending.status not in _STATES:
        return _without_document(status, tail)
    state, code, action = _STATES[ending.status], ending.code, ending.action
    if state == INCONCLUSIVE and verdict.get("action") in ("inspect", "reimage"):
        action = verdict["action"]
    failed = [check for check in _checks(document) if check.get("status") == "fail"]
    wrong = [check for check in failed if str(check.get("id", "")).startswith(_KNOWN_ANSWERS)]
    speaking: Mapping[str, Any] = verdict
    reason = summary
    if wrong:
        state, action, speaking = FAILED, "replace", wrong[0]
        reason = " ".join(str(speaking[key]) for key in ("id", "gpu_uuid", "detail") if speaking.get(key))
    code = str(speaking.get("reason_code") or code)
    return Check(ID, state, code, reason or tail or f"status {status}", action, final=bool(wrong))


def _without_document(status: int, tail: str) -> Check:
    """Return the check for an exit status that no document of this boot explains."""
    if status == DEADLINE:
        reason = f"the smoke test was killed and left no document: {tail}"
        return Check(ID, INCONCLUSIVE, "gpu.deadline", reason, "reboot")
    if status == 0:
        reason = "the smoke test exited with status 0, but its document does not say that this boot passed"
        return Check(ID, INCONCLUSIVE, "gpu.output", reason, "reimage")
    how = f"signal {-status}" if status < 0 else f"status {status}"
    reason = f"the smoke test ended with {how} and left no document of this boot: {tail}"
    return Check(ID, INCONCLUSIVE, "gpu.crashed", reason, "reimage")


def _checks(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    checks = document.get("checks")
    return [check for check in checks if isinstance(check, Mapping)] if isinstance(checks, list) else []


def _run(argv: Sequence[str], seconds: float) -> tuple[int | None, bytes, str]:
    """Return the status (None: it can't be killed), the output, and the end of the standard error."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with Child(argv, stdout=out, stderr=err, own_group=True) as program:
            status = program.wait(seconds)
            if status is None and program.end():
                status = DEADLINE
        out.seek(0)
        err.seek(max(0, err.seek(0, os.SEEK_END) - 4096))
        tail = child.tail(err.read().decode(errors="replace"))
        return status, out.read(_LIMIT), tail
