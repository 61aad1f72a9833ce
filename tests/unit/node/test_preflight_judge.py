"""From checks to a verdict, from an exit status to a check: tables."""

from __future__ import annotations

import json
from typing import Any

import pytest

from image_builder.node.preflight import checks, model, smoke
from image_builder.node.preflight.judge import Attempts, judge, parse_attempts, settle
from image_builder.node.preflight.model import FAILED, INCONCLUSIVE, PASSED, SKIPPED, Check, Verdict

BOOT = "11111111-2222-3333-4444-555555555555"
GOOD = Check("a", PASSED)


def failed(action: str, code: str = "x", *, final: bool = False) -> Check:
    return Check("b", FAILED, code, "why", action, final=final)


@pytest.mark.parametrize(
    ("found", "state", "code", "action"),
    [
        ([GOOD], PASSED, "", "none"),
        ([GOOD, Check("n", SKIPPED)], PASSED, "", "none"),
        ([], INCONCLUSIVE, "preflight.empty", "none"),
        ([Check("n", SKIPPED)], INCONCLUSIVE, "preflight.empty", "none"),
        ([GOOD, Check("i", INCONCLUSIVE, "i", "why")], INCONCLUSIVE, "i", "none"),
        ([Check("i", INCONCLUSIVE, "i", "why", "replace"), failed("reboot")], FAILED, "x", "reboot"),
        ([failed("reboot", "r"), failed("replace", "h"), failed("reimage", "m")], FAILED, "h", "replace"),
        ([GOOD, Check("?", "a word of tomorrow", "u")], INCONCLUSIVE, "u", "none"),
    ],
)
def test_judgement(found: list[Check], state: str, code: str, action: str) -> None:
    verdict = judge(found)
    assert (verdict.state, verdict.code, verdict.action, verdict.reboot) == (state, code, action, False)


@pytest.mark.parametrize(
    ("found", "attempts", "may", "action", "reboot"),
    [
        pytest.param([failed("reboot")], Attempts(), True, "reboot", True, id="the first time"),
        pytest.param([failed("reboot")], Attempts("old", 1, "b"), True, "reboot", True, id="another image"),
        pytest.param(
            [failed("reboot")], Attempts("now", 1, "b"), True, "replace", False, id="it did not help"
        ),
        pytest.param([failed("reboot")], Attempts(), False, "reboot", False, id="it may not"),
        pytest.param([failed("reboot")], None, True, "reboot", False, id="unknown how often"),
        pytest.param([failed("replace")], Attempts(), True, "replace", False, id="no use"),
        pytest.param(
            [failed("reboot"), failed("reboot", final=True)],
            Attempts(),
            True,
            "replace",
            False,
            id="wrong answer",
        ),
        pytest.param([GOOD], Attempts(), True, "none", False, id="passed"),
    ],
)
def test_a_reboot_is_tried_once(
    found: list[Check], attempts: Attempts | None, may: bool, action: str, reboot: bool
) -> None:
    verdict = settle(judge(found), found, attempts, build="now", may_reboot=may)
    assert (verdict.action, verdict.reboot) == (action, reboot)


@pytest.mark.parametrize("found", [{}, {"build": "a"}, {"build": "a", "reboots": "1", "boot_id": "b"}])
def test_a_count_that_is_none_is_refused(found: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no count"):
        parse_attempts(found)


def document(said: str = "pass", code: int = 0, boot: str = BOOT, because: str = "", **check: str) -> bytes:
    verdict = {"status": said, "exit_code": code, "summary": "said", "reason_code": because}
    return json.dumps({"boot_id": boot, "verdict": verdict, "checks": [check] if check else []}).encode()


@pytest.mark.parametrize(
    ("status", "said", "state", "code", "action"),
    [
        (0, document(), PASSED, "", "none"),
        (0, b"", INCONCLUSIVE, "gpu.output", "reimage"),
        (0, b"[]", INCONCLUSIVE, "gpu.output", "reimage"),
        (0, document(boot="of another boot"), INCONCLUSIVE, "gpu.output", "reimage"),
        (0, document("fail"), INCONCLUSIVE, "gpu.output", "reimage"),
        (0, document("pass", 1), INCONCLUSIVE, "gpu.output", "reimage"),
        (1, document("fail", 1), FAILED, "gpu.hardware", "replace"),
        (2, document("fail", 2), FAILED, "gpu.reboot", "reboot"),
        (3, document("inconclusive", 3), INCONCLUSIVE, "gpu.inconclusive", "none"),
        (4, b"", FAILED, "gpu.config", "config"),
        (5, b"", FAILED, "gpu.image", "reimage"),
        (124, b"", FAILED, "gpu.deadline", "reboot"),
        (None, b"", FAILED, "gpu.hung", "reboot"),
        (-11, b"", INCONCLUSIVE, "gpu.crashed", "reboot"),
        (70, b"", INCONCLUSIVE, "gpu.crashed", "reboot"),
        (
            2,
            document("fail", 2, because="remap.pending", id="gpu.temp", status="fail", reason_code="hot"),
            FAILED,
            "remap.pending",
            "reboot",
        ),
    ],
)
def test_smoke_test_passes_only_by_status_and_word(
    status: int | None, said: bytes, state: str, code: str, action: str
) -> None:
    found = smoke.judge(status, said, "tail", BOOT)
    assert (found.state, found.code, found.action, found.final) == (state, code, action, False)


@pytest.mark.parametrize("status", [1, 2, 3, 124])
def test_a_wrong_answer_is_final_whatever_the_status(status: int) -> None:
    said = document(
        "fail", status, id="kat.mma", gpu_uuid="GPU-7", status="fail", reason_code="kat", detail="SM 3"
    )
    found = smoke.judge(status, said, "", BOOT)
    assert (found.state, found.action, found.final) == (FAILED, "replace", True)
    assert found.reason == "kat.mma GPU-7 SM 3"


@pytest.mark.parametrize(
    ("section", "state", "action"),
    [
        (None, INCONCLUSIVE, "reboot"),
        ({"state": "ok"}, PASSED, "none"),
        ({"state": "degraded", "code": "disk.none", "reason": "r"}, PASSED, "none"),
        ({"state": "failed", "code": "disk.foreign", "reason": "r"}, FAILED, "replace"),
    ],
)
def test_what_the_boot_has_prepared(section: dict[str, Any] | None, state: str, action: str) -> None:
    [found] = checks.prepared({"disk": section} if section else {}, ["disk"])
    assert (found.state, found.action) == (state, action)


def test_the_message_begins_with_the_boot_that_it_speaks_of() -> None:
    verdict = Verdict(FAILED, "gpu.kat.int", "wrong", "replace")
    told = model.document(verdict, [GOOD], boot_id=BOOT, image_build="b1", started="now", seconds=41.23456)
    assert model.message(told) == f"boot={BOOT} image=b1 failed in 41 s: gpu.kat.int: wrong (action: replace)"
    assert model.boot_of(model.message(told)) == BOOT
    assert told["checks"][0]["id"] == "a" and told["seconds"] == 41.235


@pytest.mark.parametrize("said", ["", "boot=", f"x boot={BOOT}", f"boot={BOOT}0", "boot=" + "g" * 36])
def test_no_other_message_speaks_of_a_boot(said: str) -> None:
    assert model.boot_of(said) == ""
