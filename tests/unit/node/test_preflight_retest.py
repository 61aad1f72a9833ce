"""A node's re-test: when it requests one, and what it reports afterwards."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from image_builder.node.preflight import model
from image_builder.node.preflight.model import FAILED, INCONCLUSIVE, PASSED, Check, section
from image_builder.node.preflight.retest import after, answer_to, make_wish, reason_not_to_ask
from image_builder.node.preflight.settings import Settings

BOOT, NONCE = "11111111-2222-3333-4444-555555555555", "0123456789abcdef"
STARTED = "2026-01-01T00:00:00+00:00"
TESTED = datetime.fromisoformat(STARTED).timestamp()
SETTINGS = Settings(retest_days=1)


def verdict(**changes: Any) -> dict[str, Any]:
    made = model.document(
        model.Verdict(PASSED), [], boot_id=BOOT, image_build="b", started=STARTED, seconds=41
    )
    return {**made, **changes}


@pytest.mark.parametrize(
    ("found", "settings", "age", "has_gpus", "words"),
    [
        (verdict(), SETTINGS, 86400, True, ""),
        (verdict(), SETTINGS, 86399, True, "24 h ago"),
        (verdict(), SETTINGS, -86400, True, ""),
        (verdict(), SETTINGS, 86400, False, "no GPUs"),
        (verdict(state=FAILED), SETTINGS, 86400, True, "the last test: failed"),
        (verdict(), Settings(retest_days=0), 86400, True, "are disabled"),
        (verdict(), Settings(retest_days=1, kubeconfig=""), 86400, True, "are disabled"),
    ],
)
def test_who_asks(found: dict[str, Any], settings: Settings, age: float, has_gpus: bool, words: str) -> None:
    said = reason_not_to_ask(found, settings, TESTED + age, has_gpus)
    assert words in said and bool(said) == bool(words)


def test_wish_tells_how_long_it_is_looked_for() -> None:
    found = make_wish(verdict(), TESTED + 90000, NONCE)
    assert found == {"boot_id": BOOT, "nonce": NONCE, "tested": TESTED, "until": TESTED + 90000 + 3600}


@pytest.mark.parametrize(
    ("annotations", "state"),
    [
        ({model.ANSWER: json.dumps({"nonce": NONCE, "state": "granted"})}, "granted"),
        ({model.ANSWER: json.dumps({"nonce": "another", "state": "granted"})}, ""),
        ({model.ANSWER: "granted"}, ""),
        ({}, ""),
        (None, ""),
    ],
)
def test_answers_to_another_wish_are_none(annotations: Any, state: str) -> None:
    assert answer_to({"metadata": {"annotations": annotations}}, NONCE) == state


LATER = datetime.fromtimestamp(TESTED + 90000, UTC).isoformat()


def test_a_wrong_answer_is_the_new_verdict() -> None:
    check = Check("gpu", FAILED, "kat.mismatch", "SM 7", "replace", 300, final=True)
    told = after(verdict(), check, NONCE, LATER)
    assert (told["state"], told["code"], told["action"]) == (FAILED, "kat.mismatch", "replace")
    assert model.boot_of(model.message(told)) == BOOT and model.retest_of(model.message(told)) == NONCE
    assert section(told)["state"] == "failed" and told["started"] == LATER


def test_what_can_not_be_settled_does_not_pass() -> None:
    told = after(verdict(), Check("gpu", INCONCLUSIVE, "gpu.crashed", "signal 11", "reboot"), NONCE, LATER)
    assert (told["state"], model.condition_status(told["state"])) == (INCONCLUSIVE, "Unknown")


def test_gpus_in_use_leave_the_verdict_as_it_was() -> None:
    told = after(verdict(), Check("gpu", INCONCLUSIVE, "procs.foreign", "python (7)"), NONCE, LATER)
    assert told == verdict(retest=NONCE, started=LATER)
    assert section(told)["state"] == "ok"


def test_a_boots_message_speaks_of_no_retest() -> None:
    assert model.retest_of(model.message(verdict())) == ""
    assert model.retest_of(f"boot={BOOT} image=x failed in 1 s: c: retest={NONCE} (action: none)") == ""
