"""The answers to Azure's extension: from a node's documents, from one query to the next, and while jobs run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from image_builder.node.health.application import (
    Documents,
    Memory,
    State,
    Upgrade,
    Verdict,
    answer,
    judge,
    phase,
    step,
)

BOOT, NOW = "b0", 1_000_000.0
PASSED = {"boot_id": BOOT, "state": "passed", "code": ""}
JOINED = {"boot_id": BOOT, "state": "ok", "vm_id": "02aab8a4-74ef-476e-8182-f6d2ba4166a6"}
LOOKED = {"boot_id": BOOT, "state": "ok", "time": NOW - 60, "findings": []}
DONE = {"disk": {"state": "ok"}, "preload": {"state": "degraded", "code": "preload.fallback"}}


def known(**parts: Any) -> Documents:
    """Return a node that is up; ``parts`` override its values."""
    whole: dict[str, Any] = {
        "boot_id": BOOT,
        "now": NOW,
        "expected": frozenset({"preflight", "provision", "health"}),
        "sections": ("disk", "preload"),
        "status": DONE,
        "preflight": PASSED,
        "provision": JOINED,
        "health": LOOKED,
    }
    return Documents(**{**whole, **parts})


FAILED_LOOK = {
    **LOOKED,
    "state": "failed",
    "findings": [{"code": "gpu.ecc", "severity": "fail"}, {"code": "clock.off", "severity": "warn"}],
}
NODES: dict[str, tuple[dict[str, Any], State, str]] = {
    "it is up": ({}, "Healthy", ""),
    "a section is not there yet": ({"status": {"disk": {"state": "ok"}}}, "Initializing", "preload"),
    "nothing is there yet": (
        {"status": {}, "preflight": None, "provision": None, "health": None},
        "Initializing",
        "disk is not finished",
    ),
    "a section failed": (
        {"status": {**DONE, "seed": {"state": "failed", "code": "seed.disk"}}},
        "Unhealthy",
        "seed.disk",
    ),
    "it is being tested": ({"preflight": None}, "Initializing", "preflight"),
    "the verdict is of another boot": (
        {"preflight": {**PASSED, "boot_id": "b1"}},
        "Initializing",
        "preflight",
    ),
    "the preflight failed": (
        {"preflight": {**PASSED, "state": "failed", "code": "gpu.kat-int"}},
        "Unhealthy",
        "gpu.kat-int",
    ),
    "the preflight's failure is held by the gate": (
        {"preflight": {**PASSED, "state": "failed", "code": "gpu.kat-int", "action": "none"}},
        "Unknown",
        "gpu.kat-int",
    ),
    "the preflight could not be settled": (
        {"preflight": {**PASSED, "state": "inconclusive", "code": "dns.name"}},
        "Unknown",
        "dns.name",
    ),
    "it joins": ({"provision": {**JOINED, "state": "running"}}, "Initializing", "not joined"),
    "it could not join": (
        {"provision": {**JOINED, "state": "failed", "code": 62, "phase": "credentials"}},
        "Unhealthy",
        "62 in phase credentials",
    ),
    "it could not join for what the gate holds": (
        {
            "preflight": {**PASSED, "state": "failed", "code": "gpu.kat-int", "action": "none"},
            "provision": {**JOINED, "state": "failed", "code": 94, "phase": "ready"},
        },
        "Unknown",
        "gpu.kat-int",
    ),
    "it has not joined again since it passed": (
        {"provision": {**JOINED, "state": "failed", "code": 52, "phase": "gpu"}},
        "Initializing",
        "not joined",
    ),
    "the join knows of a preflight that this image does not make": (
        {
            "expected": frozenset({"provision", "health"}),
            "provision": {**JOINED, "state": "failed", "code": 51, "phase": "gpu"},
        },
        "Unhealthy",
        "51 in phase gpu",
    ),
    "nobody looked": ({"health": None}, "Initializing", "no health check"),
    "the last look is old": ({"health": {**LOOKED, "time": NOW - 301}}, "Unknown", "301 s ago"),
    "the clock was set back": ({"health": {**LOOKED, "time": NOW + 86400}}, "Unknown", "86400 s ago"),
    "a look failed it": ({"health": FAILED_LOOK}, "Unhealthy", "health: gpu.ecc"),
    "a file is damaged": (
        {"health": None, "damaged": ("health.json",)},
        "Unknown",
        "health.json can't be read",
    ),
    "the worst counts": (
        {"health": FAILED_LOOK, "preflight": None, "damaged": ("status.json",)},
        "Unhealthy",
        "gpu.ecc",
    ),
    "an image without these roles": (
        {
            "expected": frozenset(),
            "sections": (),
            "status": {},
            "preflight": None,
            "provision": None,
            "health": None,
        },
        "Healthy",
        "",
    ),
    "what this image does not make is not asked for": (
        {"expected": frozenset({"health"}), "preflight": {**PASSED, "state": "failed"}, "provision": None},
        "Healthy",
        "",
    ),
}


@pytest.mark.parametrize(("parts", "state", "words"), NODES.values(), ids=NODES)
def test_what_a_nodes_documents_come_to(parts: dict[str, Any], state: State, words: str) -> None:
    found = judge(known(**parts), 300)
    assert found.state == state
    assert bool(found.reasons) == (state != "Healthy") and words in "; ".join(found.reasons)


WAITS = Verdict("Initializing", ("preload is not finished",))
FINE, BAD, DARK = Verdict("Healthy"), Verdict("Unhealthy", ("x",)), Verdict("Unknown", ("y",))
# (before, found, seconds) -> (state, after)
STEPS: dict[str, tuple[Memory, Verdict, float, State, Memory]] = {
    "the first question": (Memory(), WAITS, 5, "Initializing", Memory(False, 5)),
    "it still starts": (Memory(False, 5), WAITS, 100, "Initializing", Memory(False, 5)),
    "it never comes up": (Memory(False, 5), WAITS, 106, "Unhealthy", Memory(False, 5)),
    "it comes up": (Memory(False, 5), FINE, 50, "Healthy", Memory(True)),
    "it comes up late": (Memory(False, 5), FINE, 500, "Healthy", Memory(True)),
    "it stays up": (Memory(True), FINE, 500, "Healthy", Memory(True)),
    "it breaks": (Memory(True), BAD, 500, "Unhealthy", Memory(True)),
    "it breaks before it was up": (Memory(False, 5), BAD, 50, "Unhealthy", Memory(False)),
    "nobody knows": (Memory(True), DARK, 500, "Unknown", Memory(True)),
    "it is tested again": (Memory(True), WAITS, 500, "Healthy", Memory(True, 500)),
    "it is tested for too long": (Memory(True, 500), WAITS, 601, "Unhealthy", Memory(True, 500)),
    "it was tested again": (Memory(True, 500), FINE, 550, "Healthy", Memory(True)),
}


@pytest.mark.parametrize(("before", "found", "now", "state", "after"), STEPS.values(), ids=STEPS)
def test_from_one_question_to_the_next(
    before: Memory, found: Verdict, now: float, state: State, after: Memory
) -> None:
    memory, told = step(before, found, now, 100)
    assert (told.state, memory) == (state, after)


# (verdict, busy) -> (status, SkipUpgrade)
ANSWERS: dict[str, tuple[Verdict, tuple[str, ...], int, bool]] = {
    "idle": (FINE, (), 200, False),
    "a job runs": (FINE, ("lease train-17",), 200, True),
    "it is tested again": (Verdict("Healthy", WAITS.reasons), (), 200, True),
    "broken, and a job runs": (BAD, ("2 users of /dev/nvidia-uvm",), 200, True),
    "broken": (BAD, (), 200, False),
    "it starts": (WAITS, (), 503, False),
    "nobody knows": (DARK, (), 503, False),
}


@pytest.mark.parametrize(("found", "busy", "status", "skip"), ANSWERS.values(), ids=ANSWERS)
def test_what_goes_over_the_wire(found: Verdict, busy: tuple[str, ...], status: int, skip: bool) -> None:
    code, body = answer(found, Upgrade(3, busy))
    assert code == status and body["ApplicationHealthState"] == found.state
    # The platform expects JSON in a string, with these names.
    assert isinstance(body["customMetrics"], str)
    assert json.loads(body["customMetrics"]) == {
        "rollingUpgrade": {"PhaseOrderingNumber": 3, "SkipUpgrade": skip}
    }


def test_machines_fall_into_all_phases_and_stay_there() -> None:
    ids = [f"{number:08x}-0000-4000-8000-000000000000" for number in range(2000)]
    counts = [0] * 4
    for one in ids:
        counts[phase(one, 4)] += 1
        assert phase(one, 4) == phase(one.upper(), 4)
    assert all(400 < count < 600 for count in counts)
    assert {phase(one, 1) for one in ids} == {0}


def test_a_machine_that_does_not_know_its_id_is_in_the_last_phase() -> None:
    assert phase("", 4) == 3 and known(provision=None).vm_id == "" and known().vm_id == JOINED["vm_id"]
