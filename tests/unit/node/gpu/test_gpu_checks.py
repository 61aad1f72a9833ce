"""Every check passes on recorded healthy GPUs, and fails on one change: a recorded fault, or one field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from image_builder.node.gpu.document import verdict
from image_builder.node.gpu.evidence import NOT_APPLICABLE, Evidence
from image_builder.node.gpu.model import ENDINGS, TIERS, Check, Process, Sample, Tier
from image_builder.node.gpu.rules.active import THROTTLES, sustained
from image_builder.node.gpu.rules.checks import RULES, judge, missing
from image_builder.node.gpu.settings import Settings
from tests.support.gpu_stand_in.recordings import (
    BEGAN_US,
    CATALOGUE,
    MODELS,
    NODES,
    Change,
    gpu,
    later,
    library,
    machine,
    measured,
    node,
    samples,
    settings,
    together,
    worker,
    xid,
)
from tests.unit.node.gpu.broken import CASES, XID_63, libraries, unsized


@cache
def healthy(model: str, tier: Tier = "boot-full") -> Evidence:
    return node(model, tier)


def outcome(evidence: Evidence) -> tuple[tuple[Check, ...], int]:
    checks = judge(evidence)
    return checks, verdict(checks, evidence.tier).exit_code


@pytest.mark.parametrize(("model", "tier"), list(product(NODES, TIERS)))
def test_a_healthy_node_passes(model: str, tier: Tier) -> None:
    checks, code = outcome(healthy(model, tier))
    odd = {(check.id, check.status, check.code) for check in checks if check.status != "pass"}
    allowed = {
        ("sku.known", "warn", "sku.retired"),
        ("gpu.recovery_action", "skip", "not-supported"),
        ("ecc.sram.aggregate", "skip", "not-supported"),
    }
    assert {row for row in odd if row[2] != NOT_APPLICABLE} <= allowed
    assert code == 0
    assert {check.id for check in checks} == set(RULES)


def test_there_are_recordings_of_five_models() -> None:
    names = {healthy(model).gpus[0].name for model in MODELS}
    assert names == {
        "Tesla V100-PCIE-16GB",
        "Tesla T4",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H200",
    }


@pytest.mark.parametrize("name", CASES)
def test_one_change_is_noticed(name: str) -> None:
    model, change, check, status, code, exit_code = CASES[name]
    checks, exited = outcome(change(healthy(model)))
    assert (check, status, code) in {(row.id, row.status, row.code) for row in checks}
    assert exited == exit_code, [row for row in checks if row.status not in ("pass", "skip")]


def test_every_check_goes_red() -> None:
    red = {check for _, _, check, _, _, code in CASES.values() if code}
    assert red == set(RULES)


def test_every_exit_code_but_the_deadline_is_reached() -> None:
    assert {code for *_, code in CASES.values()} == set(ENDINGS) - {124}


def statuses(evidence: Evidence, id: str) -> set[str]:
    return {check.status for check in judge(evidence) if check.id == id}


@pytest.mark.parametrize("bit", [1 << n for n in range(16)])
def test_each_bit_of_throttling(bit: int) -> None:
    results = statuses(samples(0.0, 0.5, 1.0, 1.5, throttle=bit)(healthy("H100")), "throttle")
    assert ("fail" in results) == (bit in THROTTLES)


@pytest.mark.parametrize(("model", "link"), [*product(["A100"], range(12)), *product(["H200"], range(18))])
def test_each_link(model: str, link: int) -> None:
    links = healthy(model).gpus[0].nvlinks or ()
    down = tuple(state and n != link for n, state in enumerate(links))
    down_checks = [
        check for check in judge(gpu(0, nvlinks=down)(healthy(model))) if check.code == "nvlink.down"
    ]
    assert [check.measured for check in down_checks] == [len(links) - 1]
    assert f"inactive: {link}" in down_checks[0].detail


@pytest.mark.parametrize("number", range(8))
def test_the_gpu_is_named(number: int) -> None:
    evidence = gpu(number, remap_failure=True)(healthy("H100"))
    bad = [check for check in judge(evidence) if check.status == "fail"]
    assert [check.gpu for check in bad] == [evidence.gpus[number].uuid]


def test_throttling_must_last() -> None:
    for_a_second = together(samples(0.0, 0.5, 1.0, throttle=0x8), samples(1.5, throttle=0))
    assert statuses(for_a_second(healthy("H100")), "throttle") == {"pass", "warn"}
    with_a_gap = together(samples(0.0, 0.5, 1.5, throttle=0x8), samples(1.0, throttle=0))
    assert statuses(with_a_gap(healthy("H100")), "throttle") == {"pass", "warn"}


def test_two_short_slowdowns_around_a_slow_call_are_no_long_one() -> None:
    far = [Sample("GPU", at, throttle=0x8) for at in (0.0, 0.5, 9.0, 9.5)]
    assert sustained(far, 0x8) == 0.5
    near = [Sample("GPU", at, throttle=0x8) for at in (0.0, 1.4, 2.8)]
    assert sustained(near, 0x8) == 2.8


def test_device_nodes_are_counted_and_not_numbered_by_us() -> None:
    nodes = (*(f"nvidia{n}" for n in range(1, 9)), "nvidiactl", "nvidia-uvm")
    assert statuses(machine(nodes=nodes)(healthy("H100")), "dev.nodes") == {"pass"}
    assert statuses(machine(nodes=nodes[1:])(healthy("H100")), "dev.nodes") == {"fail"}
    caps = (*nodes[1:], "nvidia-caps", "nvidia-modeset")
    assert statuses(machine(nodes=caps)(healthy("H100")), "dev.nodes") == {"fail"}


def test_an_idle_link_is_no_fault() -> None:
    assert statuses(samples(0.0, 1.5, pcie_generation=1)(healthy("H100")), "pcie.link") == {"pass"}


def test_few_gpus_have_no_median() -> None:
    evidence = measured("perf.mma", 0, measured=1.0)(healthy("T4"))
    assert outcome(evidence)[1] == 0


# -- not made is not passed --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("id", "tier"), list(product(RULES, TIERS)))
@pytest.mark.parametrize(("status", "code"), [("skip", "not-supported"), ("error", "nvml.error")])
def test_a_mandatory_check_that_was_not_made(id: str, tier: Tier, status: Any, code: str) -> None:
    checks = judge(healthy("A100", tier))
    gone = [replace(check, status=status, code=code) if check.id == id else check for check in checks]
    exit_code = 3 if tier in RULES[id].mandatory else 0
    assert verdict(gone, tier).exit_code == exit_code


OPTIONAL = {"gpu.inforom", "gpu.recovery_action", "ecc.sram.aggregate", "nvme.local", "mem.host"}
FULL_ONLY = {"bw.p2p", "perf.mma"}


def test_what_is_mandatory() -> None:
    assert {name for name, rule in RULES.items() if not rule.mandatory} == OPTIONAL
    assert {name for name, rule in RULES.items() if rule.mandatory == ("boot-full", "periodic")} == FULL_ONLY


# Fields without which a mandatory check can't be made on the model.
NEEDED = (
    "ecc_current ecc_volatile_uncorrected ecc_volatile_corrected remap_pending remap_failure pcie_replays nvlinks "
    "fabric_state persistence processes memory_used_bytes memory_total_bytes"
)


@pytest.mark.parametrize("field", NEEDED.split())
@pytest.mark.parametrize("reason", ["not-supported", "no-function", "error: unknown error (999)"])
def test_an_answer_that_is_missing_is_no_pass(field: str, reason: str) -> None:
    checks, code = outcome(gpu(1, **{field: None, "missing": {field: reason}})(healthy("H100")))
    assert code == 3
    unmade = {check.status for check in missing(checks, "boot-full")}
    assert unmade == ({"error"} if reason.startswith("error") else {"skip"})


@pytest.mark.parametrize(
    ("reason", "exit_code"), [("not-supported", 0), ("no-function", 3), ("error: unknown error (999)", 3)]
)
def test_a_gpu_without_mig_has_none(reason: str, exit_code: int) -> None:
    """Not supported is as good as disabled, where that is the policy; an error is not."""
    unknown = gpu(1, mig_current=None, missing={"mig_current": reason})
    assert outcome(unknown(healthy("H100")))[1] == exit_code


def without_load(evidence: Evidence) -> Evidence:
    return replace(
        evidence, after=None, samples=(), workers=(), began_us=None, idle_why="not put under load: x"
    )


def test_without_a_load_nothing_passes() -> None:
    checks, code = outcome(without_load(healthy("H100")))
    assert code == 3
    assert "fail" not in {check.status for check in checks}
    active = {check.id for check in checks if check.status == "pass" and RULES[check.id].active}
    assert active == set()


def test_a_worker_that_says_nothing() -> None:
    checks, code = outcome(worker(2, measurements=())(healthy("H100")))
    assert code == 3
    ids = {check.id for check in missing(checks, "boot-full")}
    assert ids == {name for name in RULES if name.startswith(("kat.", "det.", "bw.", "perf.", "mem.pattern"))}


def test_no_worker_at_all() -> None:
    evidence = replace(healthy("H100"), workers=())
    assert outcome(evidence)[1] == 3


@pytest.mark.parametrize(
    "status", ["skipped", "error"], ids=["the worker skipped it", "the worker couldn't run it"]
)
def test_a_measurement_that_was_not_made(status: str) -> None:
    evidence = measured("kat.mma", 0, status=status, measured=None, detail="no kernel")(healthy("T4"))
    assert outcome(evidence)[1] == 3


def test_a_done_measurement_without_a_number() -> None:
    for name in ("kat.int", "bw.hbm", "bw.h2d", "perf.mma"):
        assert outcome(measured(name, 0, measured=None)(healthy("T4")))[1] == 3


def test_a_gpu_that_is_gone_after_the_load() -> None:
    evidence = healthy("H100")
    assert evidence.after
    gone = replace(evidence.after, nvml=replace(evidence.after.nvml, gpus=evidence.gpus[:7]))
    checks, code = outcome(replace(evidence, after=gone))
    assert code == 2
    assert "gpu.lost" in {check.code for check in checks if check.status == "fail"}


def test_a_counter_that_went_back() -> None:
    assert outcome(later(0, pcie_replays=5)(gpu(0, pcie_replays=9)(healthy("H100"))))[1] == 3


# -- no library, no GPU ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "exit_code"),
    [
        ("library: libnvidia-ml.so.1: cannot open shared object file: No such file", "driver.library", 5),
        ("mismatch: nvmlInit_v2: driver and library differ in version (18)", "driver.mismatch", 5),
        ("init: nvmlInit_v2: unknown error (999)", "nvml.unavailable", 2),
    ],
)
def test_nvml_does_not_answer(error: str, code: str, exit_code: int) -> None:
    evidence = without_load(library(error=error, count=0, gpus=(), driver="")(healthy("A100")))
    checks, exited = outcome(evidence)
    assert code in {check.code for check in checks if check.id == "driver.match"}
    assert exited == exit_code


def test_no_gpu_where_some_are_expected() -> None:
    gone = together(
        machine(pci=(), nodes=(), driver_loaded="", modules={}), library(count=0, gpus=(), driver="")
    )
    checks, code = outcome(without_load(gone(healthy("H100"))))
    failed = [check for check in checks if check.status == "fail"]
    assert code == 2
    assert ("gpu.count", "gpu.count") in {(check.id, check.code) for check in failed}


@pytest.mark.parametrize("count", range(8))
def test_each_number_of_gpus_but_the_right_one(count: int) -> None:
    evidence = healthy("H100")
    few = together(
        machine(pci=evidence.before.machine.pci[:count]), library(count=count, gpus=evidence.gpus[:count])
    )
    checks, code = outcome(few(evidence))
    assert code == 2 and "fail" in {check.status for check in checks if check.id == "gpu.count"}


def test_more_gpus_than_the_size_has() -> None:
    more = machine(pci=healthy("H100").before.machine.pci * 2)
    assert "gpu.count" in {check.code for check in judge(more(healthy("H100"))) if check.action == "config"}


def test_an_unknown_size_that_is_let_pass() -> None:
    evidence = unsized()(healthy("H100"))
    allowed = Settings(allow_unknown_size=True, count=8)
    expected = replace(evidence.expected, settings=allowed, count=8)
    checks, code = outcome(replace(evidence, expected=expected))
    warned = {check.code for check in checks if check.status == "warn"}
    assert code == 0
    assert warned == {"sku.unknown", "floor.unknown"}
    assert outcome(replace(evidence, expected=replace(expected, count=7)))[1] != 0


# -- Xids, processes, waivers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "status"), [(BEGAN_US - 1, "warn"), (BEGAN_US, "error")])
def test_an_applications_xid_during_the_test_may_be_our_own(at: int, status: str) -> None:
    message = "NVRM: Xid (PCI:0000:01:00): 31, pid='1234', name='python3', 'Illegal memory access'"
    assert statuses(xid(message, at)(healthy("T4")), "xid.boot") == {status}


def test_an_xid_of_our_own_with_a_wrong_answer_is_the_gpus() -> None:
    during = xid("NVRM: Xid (PCI:0000:01:00): 13, Graphics SM Warp Exception", BEGAN_US)
    dead, wrong = worker(3, ended="crashed: signal 6"), measured("kat.mma", 3, status="failed", measured=1.0)
    for change in (dead, wrong):
        result = verdict(judge(together(during, change)(healthy("H100"))), "boot-full")
        assert (result.exit_code, result.action) == (1, "replace")
    assert outcome(during(healthy("H100")))[1] == 3


COUNTERS = ("nvlink_replays", "nvlink_recoveries", "nvlink_crc_errors")


@pytest.mark.parametrize("field", COUNTERS)
@pytest.mark.parametrize(("reason", "exit_code"), [("not-supported", 0), ("no-function", 0), ("error: x", 3)])
def test_links_whose_errors_are_not_counted(field: str, reason: str, exit_code: int) -> None:
    checks, code = outcome(gpu(1, **{field: None, "missing": {field: reason}})(healthy("H100")))
    assert code == exit_code
    assert exit_code or "nvlink.uncounted" in {check.code for check in checks if check.status == "warn"}


def test_a_gpu_that_tells_no_margin_warns() -> None:
    silent = together(samples(0.0, 0.5, 1.0, 1.5, temperature_margin_c=None, temperature_c=None))
    checks, code = outcome(silent(healthy("H100")))
    assert code == 0 and "temp.hidden" in {check.code for check in checks if check.status == "warn"}


def test_a_recorded_xid_63_is_for_the_record() -> None:
    assert statuses(xid(XID_63)(healthy("A100")), "xid.boot") == {"pass"}


@pytest.mark.parametrize("number", [*range(1, 173)])
def test_each_xid_by_its_class(number: int) -> None:
    xid_class = CATALOGUE.classify(number)
    evidence = xid(f"NVRM: Xid (PCI:0001:00:00): {number}, pid=1", 1)(healthy("V100"))
    checks = [check for check in judge(evidence) if check.id == "xid.boot"]
    status = {"info": "pass", "warn": "warn", "fail": "fail"}[xid_class.before]
    assert [check.status for check in checks] == [status]
    if status == "fail":
        assert checks[0].action == xid_class.action and checks[0].gpu == evidence.gpus[0].uuid


def test_processes_of_our_own() -> None:
    daemon = gpu(0, processes=(Process(1, None, "nvidia-persistenced"),))
    assert outcome(daemon(healthy("T4")))[1] == 0


def test_a_waived_check_warns_and_says_why() -> None:
    narrow = samples(0.0, 0.5, 1.0, 1.5, pcie_width=8)(healthy("H100"))
    waived = settings(waived={"pcie.link": "ticket 123"})(narrow)
    checks, code = outcome(waived)
    assert code == 0
    assert [check.detail for check in checks if check.code == "pcie.width"] == [
        "waived (ticket 123): 8 lanes, 16 expected"
    ]


# -- the verdict's order -----------------------------------------------------------------------------------------

ORDER: Sequence[tuple[Change, int]] = (
    (libraries(libcuda="1.0"), 5),
    (gpu(0, remap_failure=True), 1),
    (gpu(1, remap_pending=True), 2),
    (gpu(2, mig_pending=True), 4),
    (gpu(3, processes=(Process(9, None, "x"),)), 3),
)


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_the_worst_wins(first: int) -> None:
    changes = [change for change, _ in ORDER[first:]]
    checks, code = outcome(together(*changes)(healthy("H100")))
    assert code == ORDER[first][1]
    result = verdict(checks, "boot-full")
    assert result.retry_after_reboot == (code == 2)
    assert len(result.summary) <= 200 and result.code


def test_nothing_is_no_pass() -> None:
    assert verdict((), "boot-quick").exit_code == 3


def test_wrong_answers_are_not_tried_again() -> None:
    evidence = measured("kat.int", 0, status="failed", measured=3.0)(healthy("T4"))
    result = verdict(judge(evidence), "boot-full")
    assert (result.exit_code, result.action, result.retry_after_reboot) == (1, "replace", False)
