"""From checks to a verdict, from an exit status to a check: tables."""

from __future__ import annotations

import json
from typing import Any

import pytest

from image_builder.node.disk import decide
from image_builder.node.preflight import checks, model, smoke
from image_builder.node.preflight.judge import Attempts, Reboot, judge, parse_attempts, settle
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


NOW, DAY = 1_800_000_000.0, 86400.0


def rebooted(*days: float, code: str = "x", build: str = "now", helped: bool = True) -> Attempts:
    """Return the record of a machine that was rebooted these numbers of days ago."""
    return Attempts(
        tuple(Reboot(code, build, f"boot-{n}", NOW - d * DAY, helped) for n, d in enumerate(days))
    )


def settled(found: list[Check], attempts: Attempts | None, *, may: bool = True, boot: str = BOOT) -> Verdict:
    return settle(judge(found), found, attempts, build="now", boot_id=boot, may_reboot=may, now=NOW)


UNSETTLED = Check("d", INCONCLUSIVE, "x", "why", "reboot")


@pytest.mark.parametrize(
    ("found", "attempts", "may", "action", "reboot"),
    [
        pytest.param([failed("reboot")], Attempts(), True, "reboot", True, id="the first time"),
        pytest.param(
            [failed("reboot")],
            rebooted(1, build="old", helped=False),
            True,
            "reboot",
            True,
            id="another image",
        ),
        pytest.param(
            [failed("reboot")], rebooted(1, code="y", helped=False), True, "reboot", True, id="another fault"
        ),
        pytest.param([failed("reboot")], rebooted(0, helped=False), True, "replace", False, id="no help"),
        pytest.param(
            [failed("reboot", "runtime.engine")],
            rebooted(0, code="runtime.engine", helped=False),
            True,
            "reimage",
            False,
            id="no help for a program",
        ),
        pytest.param([UNSETTLED], rebooted(0, helped=False), True, "none", False, id="still unsettled"),
        pytest.param(
            [failed("reboot")], rebooted(90, helped=False), True, "replace", False, id="no help yet"
        ),
        pytest.param([failed("reboot")], rebooted(29, 2), True, "reboot", True, id="the third in 30 days"),
        pytest.param([failed("reboot")], rebooted(29, 9, 1), True, "replace", False, id="too often"),
        pytest.param([failed("reboot")], rebooted(30, 9, 1), True, "reboot", True, id="one is old"),
        pytest.param([failed("reboot")], rebooted(-5, 9, 1), True, "replace", False, id="the clock was set"),
        pytest.param([failed("reboot")], rebooted(3, 2, 1, code="y"), True, "reboot", True, id="all others'"),
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
        *(
            pytest.param(
                [failed("reboot", code)],
                account,
                True,
                "reboot" if reboot else "inspect",
                reboot,
                id=f"{code}, {name}",
            )
            for code in ("remap.pending", "ecc.uncorrected")
            for name, account, reboot in (
                ("again", rebooted(0, code=code, helped=False), True),
                ("the third", rebooted(2, 1, code=code, helped=False), True),
                ("too often", rebooted(3, 2, 1, code=code), False),
                ("too often and no help", rebooted(3, 2, 1, code=code, helped=False), False),
            )
        ),
    ],
)
def test_a_reboot_is_tried_once_until_a_boot_passes(
    found: list[Check], attempts: Attempts | None, may: bool, action: str, reboot: bool
) -> None:
    verdict = settled(found, attempts, may=may)
    assert (verdict.action, verdict.reboot) == (action, reboot)


def test_a_reboot_that_did_not_come_is_ordered_again_and_counts_once() -> None:
    attempts = Attempts().ordered("x", "now", BOOT, NOW)
    assert settled([failed("reboot")], attempts).reboot
    assert attempts.ordered("x", "now", BOOT, NOW + 60).recent("x", "another boot", NOW + 60) == 1
    assert not settled([failed("reboot")], attempts, boot="the next").reboot


def test_a_pass_clears_the_account_and_keeps_a_month_of_it() -> None:
    found = rebooted(31, 29, helped=False).passed(NOW)
    assert [(one.at, one.helped) for one in found.reboots] == [(NOW - 29 * DAY, True)]
    assert parse_attempts(json.loads(json.dumps(found.as_json()))) == found


def test_a_reboot_of_a_wrong_clock_grows_old_once_a_test_has_passed() -> None:
    found = rebooted(*[-70 * 365] * 3, helped=False)
    assert found.recent("x", "another boot", NOW) == 3
    assert found.passed(NOW).recent("x", "another boot", NOW + 29 * DAY) == 3
    assert found.passed(NOW).recent("x", "another boot", NOW + 31 * DAY) == 0


@pytest.mark.parametrize(
    "found",
    [
        {},
        [],
        {"build": "a", "reboots": 1, "boot_id": "b"},
        {"reboots": [{"code": "x"}]},
        {"reboots": [{"code": "x", "build": "", "boot_id": "", "at": "now", "helped": False}]},
        {"reboots": [{"code": "x", "build": "", "boot_id": "", "at": 1, "helped": "no"}]},
    ],
)
def test_an_account_that_is_none_is_refused(found: Any) -> None:
    with pytest.raises(ValueError, match="no reboots"):
        parse_attempts(found)


def document(
    said: str = "pass", code: int = 0, boot: str = BOOT, because: str = "", action: str = "none", **check: str
) -> bytes:
    verdict = {
        "status": said,
        "exit_code": code,
        "summary": "said",
        "reason_code": because,
        "action": action,
    }
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
        (3, document("inconclusive", 3, action="reimage"), INCONCLUSIVE, "gpu.inconclusive", "reimage"),
        (3, document("inconclusive", 3, action="inspect"), INCONCLUSIVE, "gpu.inconclusive", "inspect"),
        (3, document("inconclusive", 3, action="replace"), INCONCLUSIVE, "gpu.inconclusive", "none"),
        (4, document("fail", 4), FAILED, "gpu.config", "config"),
        (5, document("fail", 5), FAILED, "gpu.image", "reimage"),
        (124, document("inconclusive", 124), INCONCLUSIVE, "gpu.deadline", "reboot"),
        (124, b"", INCONCLUSIVE, "gpu.deadline", "reboot"),
        (None, b"", FAILED, "gpu.hung", "reboot"),
        # No document of this boot explains the status: the program is broken, and no GPU is condemned.
        *(
            (status, said, INCONCLUSIVE, "gpu.crashed", "reimage")
            for status in (1, 2, 3, 4, 5, 70, -11)
            for said in (b"", b"{", b"{}", b"[]", document("fail", status, boot="another"), document())
        ),
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
        *(
            ({"state": "failed", "code": code, "reason": "r", "action": "none"}, FAILED, action)
            for code, action in {
                **dict.fromkeys(("settings", "disk.ambiguous", "disk.system", "disk.paths"), "config"),
                **dict.fromkeys(("disk.busy", "disk.foreign", "disk.mixed", "disk.several"), "config"),
                **dict.fromkeys(("program.absent", "disk.newer", "disk.quota"), "reimage"),
                **dict.fromkeys(("disk.none", "disk.missing", "disk.error", "disk.incomplete"), "reboot"),
                **dict.fromkeys(("disk.failed", "disk.changed", "disk.array", "program", ""), "reboot"),
            }.items()
        ),
    ],
)
def test_what_the_boot_has_prepared(section: dict[str, Any] | None, state: str, action: str) -> None:
    [found] = checks.prepared({"disk": section} if section else {}, ["disk"])
    assert (found.state, found.action) == (state, action)


@pytest.mark.parametrize(
    ("code", "shown"), [("answer.wrong", True), ("worker.crashed", True), ("temp.hidden", False)]
)
def test_a_passed_test_with_a_wrong_answer_says_so_in_the_condition(code: str, shown: bool) -> None:
    said = document(id="kat.mma", status="warn", reason_code=code)
    found = smoke.judge(0, said, "", BOOT)
    assert (found.state, found.code) == (PASSED, code if shown else "")
    told = model.document(Verdict(PASSED), [found], boot_id=BOOT, image_build="b", started="", seconds=1.0)
    assert (f"; {code}: " in model.message(told)) is shown
    assert model.failure_of(model.message(told)) == ""


def test_no_code_of_a_disk_condemns_a_machine_at_its_first_boot() -> None:
    rows = {row.code for row in decide.TABLE.values() if row.action == "none"}
    for code in rows:
        [found] = checks.prepared(
            {"disk": {"state": "failed", "code": code, "reason": "r", "action": "none"}}, ["disk"]
        )
        assert found.action in ("config", "reimage", "reboot"), code


@pytest.mark.parametrize(("code", "action"), [("disk.missing", "replace"), ("disk.foreign", "config")])
def test_only_a_reboot_that_did_not_help_condemns_a_machine_without_a_disk(code: str, action: str) -> None:
    found = checks.prepared(
        {"disk": {"state": "failed", "code": code, "reason": "r", "action": "none"}}, ["disk"]
    )
    attempts = Attempts((Reboot(code, "image", "before", 0.0),))
    settled = settle(judge(found), found, attempts, build="image", boot_id="now", may_reboot=True, now=1.0)
    assert (settled.action, settled.reboot) == (action, False)


@pytest.mark.parametrize("name", ["disk", "preload"])
@pytest.mark.parametrize("attempts", [{}, {"attempts": 1}, {"attempts": 2}])
def test_no_unit_that_is_retried_is_judged(name: str, attempts: dict[str, int]) -> None:
    section = {"state": "failed", "code": f"{name}.failed", "reason": "r", **attempts}
    [found] = checks.prepared({name: section}, [name])
    assert (found.state, found.code, found.action) == (INCONCLUSIVE, f"{name}.failed", "none")
    assert judge([found, GOOD]).state == INCONCLUSIVE
    [found] = checks.prepared({name: section | {"attempts": 3}}, [name])
    assert found.state == FAILED and found.action != "none"


@pytest.mark.parametrize(
    ("disk", "uptime", "action"),
    [
        ({"state": "ok"}, 60.0, "none"),
        ({"state": "ok"}, 1200.0, "reboot"),
        ({"state": "failed", "attempts": 2}, 1200.0, "none"),
        ({"state": "failed", "attempts": 3}, 1200.0, "reboot"),
    ],
)
def test_a_report_that_is_missing_may_still_come(disk: dict[str, Any], uptime: float, action: str) -> None:
    found = checks.prepared({"disk": disk}, ["disk", "preload"], uptime)[1]
    assert (found.state, found.code, found.action) == (INCONCLUSIVE, "preload.missing", action)


@pytest.mark.parametrize(
    ("retried", "uptime", "state"),
    [(True, 300.0, INCONCLUSIVE), (True, 1200.0, FAILED), (False, 300.0, FAILED)],
)
def test_images_are_not_judged_while_their_seed_is_retried(retried: bool, uptime: float, state: str) -> None:
    """Without an archive the engine waits for ten attempts of the seed; the images' unit fails more often meanwhile."""
    sections = {
        "seed": {"state": "degraded", "code": "store.io", "reason": "r", "retried": retried},
        "preload": {"state": "failed", "code": "preload.engine", "reason": "r", "attempts": 5},
    }
    [found] = checks.prepared(sections, ["preload"], uptime)
    assert (found.state, found.action) == (state, "none" if state == INCONCLUSIVE else "reimage")


@pytest.mark.parametrize(
    ("failed", "is_unsettled"),
    [
        (["disk"], True),
        (["disk", "preload", "engine"], True),
        (["engine"], True),
        (["disk", "gpu"], False),
        (["gpu"], False),
        ([], False),
    ],
)
def test_only_what_other_units_prepare_is_asked_for_again_after_a_failure(
    failed: list[str], is_unsettled: bool
) -> None:
    results = [GOOD, *(Check(name, FAILED, "x", "r", "replace") for name in failed)]
    document = model.document(
        judge(results), results, boot_id=BOOT, image_build="b1", started="now", seconds=1
    )
    assert model.is_unsettled(document) is is_unsettled


def test_the_message_begins_with_the_boot_that_it_speaks_of() -> None:
    verdict = Verdict(FAILED, "gpu.kat.int", "wrong", "replace")
    told = model.document(verdict, [GOOD], boot_id=BOOT, image_build="b1", started="now", seconds=41.23456)
    assert model.message(told) == f"boot={BOOT} image=b1 failed in 41 s: gpu.kat.int: wrong (action: replace)"
    assert model.boot_of(model.message(told)) == BOOT
    assert told["checks"][0]["id"] == "a" and told["seconds"] == 41.235


@pytest.mark.parametrize("said", ["", "boot=", f"x boot={BOOT}", f"boot={BOOT}0", "boot=" + "g" * 36])
def test_no_other_message_speaks_of_a_boot(said: str) -> None:
    assert model.boot_of(said) == ""
