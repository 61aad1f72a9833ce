"""The effect of a finding on a node: the same one on many GPUs condemns none of them; untried numbers only warn."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from image_builder.node.errors import NodeError
from image_builder.node.gpu import settings as gpu_settings
from image_builder.node.gpu.document import verdict
from image_builder.node.gpu.evidence import Evidence
from image_builder.node.gpu.model import Verdict
from image_builder.node.gpu.rules import policy
from image_builder.node.gpu.rules.checks import RULES, judge
from image_builder.node.gpu.settings import Calibration, Settings
from image_builder.node.gpu.sizes import Floor
from image_builder.node.gpu.smoke import bandwidth, known_answer, memory, program, reference
from image_builder.node.gpu.smoke.command import expectation, idle_reason
from image_builder.node.gpu.smoke.known_answer import Wrong
from image_builder.node.gpu.smoke.memory import Chunk, Memory, Tally
from tests.support.gpu_stand_in import libcuda
from tests.support.gpu_stand_in.recordings import (
    Change,
    gpu,
    library,
    machine,
    measured,
    node,
    together,
    worker,
    xid,
)
from tests.unit.node.gpu.broken import CASES, XID_79, XID_95_MIG, XID_GARBLED

ALL = range(8)
UUID = "GPU-12345678-9abc-def0-1234-56789abcdef0"


def outcome(evidence: Evidence) -> Verdict:
    return verdict(judge(evidence), evidence.tier)


# -- what the program says about a wrong answer ----------------------------------------------------------------

Complaint = Callable[[int, int], str]
"""The detail of a GPU's wrong answer, in which these bits are wrong. Where it is differs from GPU to GPU."""


def value(gpu: int, bits: int) -> str:
    return _threads(Wrong(8 * gpu, gpu, 3 + gpu, 0xAA, 0xAA ^ bits, 7 * gpu), gpu)


def checksum(gpu: int, bits: int) -> str:
    return _threads(Wrong(8 * gpu, gpu, 3 + gpu, 0xAA, 0xAA ^ bits, None), gpu)


def _threads(wrong: Wrong, sm: int) -> str:
    comparison = known_answer.Compared(frozenset([sm]), 1, frozenset([sm]), (wrong,))
    return known_answer.detail(reference.CASES[0], comparison)


def words(count: int) -> Complaint:
    def said(gpu: int, bits: int) -> str:
        return _memory(gpu, Tally(TESTED_WORDS, count, 33, bits))

    return said


def uncompared(gpu: int, bits: int) -> str:
    return _memory(gpu, Tally(TESTED_WORDS - bits, 0, reference.ALL, 0))


def _memory(gpu: int, tally: Tally) -> str:
    device, _ = libcuda.device(libcuda.Gpu(UUID, sms=1))
    chunk = Chunk(0x7F00_0000_0000 + (gpu << 30), TESTED_WORDS * memory.WORD, 0)
    return memory.complaint(Memory(device, 5), chunk, tally)


def unnoticed(gpu: int, bits: int) -> str:
    """Return the complaint when bits flipped on purpose are counted wrongly."""

    def miscount(_gpu: libcuda.Gpu, kernel: str, arguments: Sequence[int]) -> None:
        if kernel == "mem_verify":
            block, at = fake.memory.place(arguments[6], 32)
            block[at : at + 32] = struct.pack("<4Q", 128, bits, 0, 0)

    device, fake = libcuda.device(libcuda.Gpu(UUID, sms=1, after_launch=miscount))
    device.allocate(1024 * (gpu + 1))
    return memory.notices(Memory(device, 5), Chunk(device.allocate(1024), 1024, 0))


def tile(gpu: int, bits: int) -> str:
    golden = reference.pattern_bytes(128, 3)
    data = bytearray(golden * 8)
    data[len(golden) * gpu + 8] ^= bits
    return bandwidth.differs(memoryview(data), golden)


def to_peer(complaint: Complaint) -> Complaint:
    return lambda gpu, bits: f"to GPU-{gpu}: {complaint(gpu, bits)}"


TESTED_WORDS = 1 << 20
ANSWERS: dict[str, tuple[str, Complaint]] = {
    "value": ("kat.int", value),
    "checksum": ("kat.mma", checksum),
    "rate": ("perf.mma", value),
    "one word": ("mem.pattern", words(1)),
    "words": ("bw.hbm", words(5)),
    "not compared": ("bw.h2d", uncompared),
    "not noticed": ("mem.pattern", unnoticed),
    "host memory": ("bw.d2h", tile),
    "peer": ("bw.p2p", to_peer(words(1))),
    "peer, not compared": ("bw.p2p", to_peer(uncompared)),
}


def alike(gpu: int) -> int:
    return 2


def own(gpu: int) -> int:
    return 1 << gpu


def wrong(numbers: Sequence[int], answer: str = "checksum", bits: Callable[[int], int] = alike) -> Change:
    """Make the answer of these GPUs wrong, each in a different place."""
    check, complaint = ANSWERS[answer]
    return together(
        *(measured(check, n, status="failed", measured=1.0, detail=complaint(n, bits(n))) for n in numbers)
    )


# -- one finding on several GPUs -------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("numbers", [[2, 5], range(7), ALL], ids=["two", "seven", "all"])
def test_the_same_wrong_answer_on_several_gpus_is_the_tests(answer: str, numbers: Sequence[int]) -> None:
    result = outcome(wrong(numbers, answer)(node("H100")))
    assert (result.status, result.exit_code, result.action) == ("inconclusive", 3, "reimage")
    assert result.code == "answer.common"


def test_one_gpu_that_is_wrong_is_replaced() -> None:
    result = outcome(wrong([4])(node("H100")))
    assert (result.exit_code, result.action, result.code) == (1, "replace", "answer.wrong")


@pytest.mark.parametrize("answer", ANSWERS)
def test_two_gpus_that_are_wrong_in_their_own_ways_are_replaced(answer: str) -> None:
    result = outcome(wrong([2, 5], answer, own)(node("H100")))
    assert (result.exit_code, result.action) == (1, "replace")


def test_all_gpus_that_are_wrong_in_one_check_condemn_none_of_them() -> None:
    result = outcome(wrong(ALL, bits=own)(node("H100")))
    assert (result.exit_code, result.action) == (3, "reimage")


def test_what_only_one_gpu_has_beside_it_still_counts() -> None:
    result = outcome(together(wrong([2, 5]), wrong([5], "value"))(node("H100")))
    assert (result.exit_code, result.action) == (1, "replace")


def ended(numbers: Sequence[int], ending: str) -> Change:
    return together(*(worker(n, ended=ending) for n in numbers))


def test_a_signal_that_ends_several_workers_is_our_own() -> None:
    result = outcome(ended([1, 6], "crashed: signal 11")(node("H100")))
    assert (result.exit_code, result.action, result.code) == (3, "reimage", "worker.common")
    assert outcome(ended([1], "crashed: signal 11")(node("H100"))).action == "replace"


def test_all_workers_late_are_a_busy_machine() -> None:
    late = ended(ALL, "killed: deadline")(node("H100"))
    silent = together(*(worker(n, measurements=()) for n in ALL))(late)
    result = outcome(silent)
    assert (result.exit_code, result.action) == (3, "none")
    assert {row.code for row in judge(silent) if row.id == "worker"} == {"worker.common"}


def test_a_lone_worker_that_is_late_gets_a_reboot() -> None:
    """Its GPU may hang, or the machine may have been busy: there is no other worker to tell them apart."""
    result = outcome(worker(0, ended="killed: deadline", measurements=())(node("T4")))
    assert (result.exit_code, result.action, result.code) == (2, "reboot", "worker.late")


def test_some_workers_late_are_their_gpus() -> None:
    late = together(*(worker(n, ended="killed: deadline", measurements=()) for n in range(7)))
    result = outcome(late(node("H100")))
    assert (result.exit_code, result.action, result.code) == (1, "replace", "worker.late")


def test_all_that_tried_their_links_late_are_a_busy_machine() -> None:
    """The eighth GPU never got that far, so it doesn't count: every worker that did was late."""
    first = worker(0, ended="error: no CUDA", measurements=())
    late = together(first, *(measured("bw.p2p", n, status="error", measured=None) for n in range(1, 8)))(
        node("H100")
    )
    late = ended(range(1, 8), "killed: deadline")(late)
    assert outcome(late).exit_code == 3
    assert outcome(worker(3, ended="done")(late)).action == "replace"


# -- what was never tried --------------------------------------------------------------------------------------

# What holds a node back in any mode: missing GPUs, the fabric, memory that can't be repaired, fatal Xids.
ALWAYS: dict[str, tuple[Change, str]] = {
    "lost": (library(lost={"7": "the GPU is lost (15)"}), "reboot"),
    "seven": (library(count=7), "reboot"),
    "fabric": (gpu(2, fabric_state="in-progress"), "reboot"),
    "fabric manager": (machine(fabric_manager="failed"), "reboot"),
    "remapping": (gpu(4, remap_failure=True), "replace"),
    "Xid 79": (xid(XID_79), "replace"),
    "ECC": (gpu(4, ecc_volatile_uncorrected=1), "reboot"),
    "driver": (machine(driver_loaded=""), "reimage"),
    "Xid of an instance": (xid(XID_95_MIG), "reboot"),
    "unkillable": (worker(3, ended="hung: unkillable"), "reboot"),
}


@pytest.mark.parametrize("name", ALWAYS)
def test_what_holds_a_node_in_any_mode(name: str) -> None:
    change, action = ALWAYS[name]
    for mode in ("observe", "enforce"):
        result = outcome(change(node("H100", settings=Settings(mode=mode), calibrated=False)))
        assert (result.status, result.action) == ("fail", action)


def test_an_xid_that_cant_be_read_passes_in_no_mode() -> None:
    for mode in ("observe", "enforce"):
        result = outcome(xid(XID_GARBLED)(node("H100", settings=Settings(mode=mode), calibrated=False)))
        assert (result.exit_code, result.code) == (3, "xid.unreadable")


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if RULES[case[2]].active and name != "hung"]
)
def test_what_is_computed_and_measured_is_only_observed(name: str) -> None:
    """But for a GPU that didn't answer like the node's others: it condemns no machine, and doesn't pass."""
    model, change, check, _, code, _ = CASES[name]
    evidence = change(node(model, settings=Settings(), calibrated=False))
    checks = [row for row in judge(evidence) if row.id == check and row.code == code]
    is_odd = code in policy.UNANSWERED and len(evidence.gpus) > 1
    assert {(row.status, row.action) for row in checks} == {
        ("error", "inspect") if is_odd else ("warn", "none")
    }
    result = outcome(evidence)
    assert (result.exit_code, result.action) == ((3, "inspect") if is_odd else (0, "none"))


ODD: dict[str, Change] = {
    "one": wrong([4]),
    "one, by two checks": together(wrong([4]), wrong([4], "value")),
    "two in their own ways": wrong([2, 5], bits=own),
    "two in one way": wrong([2, 5]),
    "half": wrong(range(4), bits=own),
    "crashed": ended([1], "crashed: signal 11"),
    "late": together(worker(1, ended="killed: deadline", measurements=())),
    "peers of one": together(wrong([4]), wrong(ALL, "peer", own)),
}


@pytest.mark.parametrize("name", ODD)
def test_a_gpu_unlike_the_others_is_taken_out_before_any_calibration(name: str) -> None:
    result = outcome(ODD[name](node("H100", settings=Settings(), calibrated=False)))
    assert (result.exit_code, result.action) == (3, "inspect")


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ("H100", wrong(range(5), bits=own)),
        ("H100", wrong(ALL)),
        ("H100", ended(ALL, "crashed: signal 11")),
        ("T4", wrong([0])),
    ],
)
def test_an_answer_that_nothing_confirms_warns_and_says_so(model: str, change: Change) -> None:
    result = outcome(change(node(model, settings=Settings(), calibrated=False)))
    assert result.exit_code == 0
    assert "kat.mma GPU-" in result.summary or "worker GPU-" in result.summary


@pytest.mark.parametrize(
    ("records", "codes"),
    [
        ((), set()),
        (("580.159.04",), set()),
        (("570.1",), {"calibration.stale"}),
        (("570.1", "580.159.04"), set()),
    ],
)
def test_a_calibration_of_another_driver_is_reported(records: Sequence[str], codes: set[str]) -> None:
    size, agent = "Standard_ND96isr_H100_v5", program.digest()
    found = Settings(calibrations=tuple(Calibration(size, driver, agent, "16 nodes") for driver in records))
    evidence = node("H100")
    expected = expectation(found, size, "580.159.04")
    checks = [check for check in judge(replace(evidence, expected=expected)) if check.id == "sku.known"]
    assert {check.code for check in checks if check.status == "warn"} == codes


FLOORS = ["slow HBM", "HBM below the median", "slow h2d", "slow d2h", "slow p2p", "slow tensors", "NVMe"]


@pytest.mark.parametrize("name", FLOORS)
def test_a_number_that_nobody_measured_warns(name: str) -> None:
    model, change, check, _, code, _ = CASES[name]
    evidence = change(node(model, calibrated=False))
    assert outcome(evidence).exit_code == 0
    assert {(row.status, row.code) for row in judge(evidence) if row.id == check} >= {("warn", code)}
    assert outcome(change(node(model))).action == "replace"


def test_a_floor_of_the_pools_own_counts() -> None:
    own = Settings(mode="enforce", overrides={"h2d_floor_gbps": Floor(50, "64 nodes")})
    evidence = measured("bw.h2d", 3, measured=49.9)(node("H100", settings=own, calibrated=False))
    assert outcome(evidence).action == "replace"
    assert outcome(measured("bw.d2h", 3, measured=47.9)(evidence)).code == "bandwidth.low"
    alone = measured("bw.d2h", 3, measured=47.9)(node("H100", settings=own, calibrated=False))
    assert outcome(alone).exit_code == 0


def test_a_pool_with_mig_passes_without_a_load() -> None:
    whole = node("A100", settings=Settings(mode="enforce", mig="enabled"))
    # A CDI spec names the parts only ("0:0"), and none before they are made.
    mig = together(machine(cdi_gpus=0), *(gpu(n, mig_current=True, mig_pending=True) for n in ALL))(whole)
    idle = replace(mig, after=None, samples=(), workers=(), began_us=None, idle_by_policy=True)
    idle = replace(idle, idle_why=idle_reason(idle))
    assert idle.idle_why
    assert outcome(idle).exit_code == 0
    # In MIG mode, an A100's links are off.
    assert outcome(together(*(gpu(n, nvlinks=(False,) * 12) for n in ALL))(idle)).exit_code == 0
    # Checks that need no load are still made.
    assert outcome(gpu(4, remap_failure=True)(idle)).action == "replace"
    assert outcome(gpu(4, mig_current=False)(idle)).action == "config"
    assert outcome(replace(idle, idle_by_policy=False)).exit_code == 3


# -- records ---------------------------------------------------------------------------------------------------

RECORD = {
    "size": "Standard_ND96isr_H100_v5",
    "driver": "580.159.04",
    "agent": "0123456789ab",
    "from": "16 nodes",
}


def test_a_record_is_read() -> None:
    [record] = gpu_settings.parse({"calibrations": [RECORD]}).calibrations
    assert (record.size, record.agent, record.source) == (RECORD["size"], RECORD["agent"], "16 nodes")


@pytest.mark.parametrize(
    "value",
    [
        {"mode": "dry-run"},
        {"mode": True},
        {"calibrations": [RECORD | {"driver": ""}]},
        {"calibrations": [{"size": "x"}]},
        {"calibrations": ["x"]},
        {"calibrations": [RECORD | {"driver": 580}]},
    ],
)
def test_a_record_or_mode_that_is_none_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(NodeError, match=r"gpu\.json: .*(mode|calibrations)"):
        gpu_settings.parse(value)


def test_the_program_of_a_record_is_all_that_a_gpu_runs() -> None:
    """If the digest left out a kernel or module of the worker's, a change to it would keep an old calibration."""
    from pathlib import Path

    package = Path(program.__file__).parent
    kernels = {f"kernels/{path.name}" for path in (package / "kernels").glob("*.ptx")}
    assert kernels <= set(program.SOURCES)
    imported = {
        f"{word}.py"
        for line in (package / "worker.py").read_text().splitlines()
        if line.startswith("from image_builder.node.gpu.smoke import")
        for word in line.partition(" import ")[2].split(", ")
    }
    assert imported and imported <= set(program.SOURCES)
    assert len(program.digest()) == 12
