"""The worker: everything is measured, each error becomes a measurement, and every drill is caught."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from image_builder.node.errors import NodeError
from image_builder.node.gpu.model import Measurement, Worker
from image_builder.node.gpu.smoke import bandwidth, cuda, fleet, memory, reference, tensor, worker
from image_builder.node.gpu.smoke.reference import Case
from tests.support.gpu_stand_in import libcuda
from tests.support.gpu_stand_in.libcuda import ECC, KIB, Gpu

UUID = "GPU-12345678-9abc-def0-1234-56789abcdef0"
PEER = "GPU-12345678-9abc-def0-1234-56789abcdef1"
IDS = [
    "kat.int",
    "kat.ffma",
    "kat.dfma",
    "det.fp32",
    "kat.mma",
    "perf.mma",
    "bw.hbm",
    "bw.h2d",
    "bw.d2h",
    "mem.pattern",
]
KIND = dict.fromkeys(IDS, "mismatches") | dict.fromkeys(["bw.hbm", "bw.h2d", "bw.d2h"], "GB/s")
KIND["perf.mma"] = "TFLOP/s"


def _tensors(capability: tuple[int, int]) -> tuple[Case, ...]:
    return tuple(replace(case, steps=1, rounds=1) for case in tensor.cases(capability))


SHIPPED = dict(worker.PLANS)
PLAN = worker.Plan(
    known_answer_seconds=0,
    tensor_seconds=0,
    memory_fraction=0.25,
    memory_seconds=0,
    copies=1,
    cases=tuple(replace(case, steps=2, rounds=1) for case in reference.CASES),
    tensor_cases=_tensors,
    warm_seconds=0,
    chunk=8 * KIB,
    unit=KIB,
    hbm_bytes=4 * KIB,
    link_bytes=4 * KIB,
    tile=128,
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give the tier a plan small enough for the interpreter, and don't tie this process to its parent."""
    monkeypatch.setitem(worker.PLANS, "boot-quick", PLAN)
    monkeypatch.setattr(worker, "end_with_the_parent", lambda: None)
    monkeypatch.setattr(worker, "SEEDS", 1)
    monkeypatch.setattr(bandwidth, "LOCK", tmp_path / "run/copies.lock")
    for module in (memory, bandwidth):
        monkeypatch.setattr(module, "_BLOCKS_PER_SM", 1)


def _run(
    capsys: pytest.CaptureFixture[str], *gpus: Gpu, peers: tuple[str, ...] = (), drill: str = ""
) -> Worker:
    driver = libcuda.Driver(*gpus)
    assert worker.run(UUID, "boot-quick", 4, peers=peers, drill=drill, driver=driver) == 0
    output = capsys.readouterr().out
    return fleet.judge(UUID, output.encode(), b"", fleet.Ended(0))


def _by_id(outcome: Worker) -> dict[str, Measurement]:
    return {result.id: result for result in outcome.measurements}


def test_a_gpu_that_is_well_passes_everything(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = _run(capsys, Gpu(UUID, bytes=160 * KIB))
    assert [result.id for result in outcome.measurements] == IDS
    assert {result.status for result in outcome.measurements} == {"done"}
    assert {result.id: result.unit for result in outcome.measurements} == KIND
    assert {result.measured for result in outcome.measurements if result.unit == "mismatches"} == {0.0}
    assert (outcome.ended, outcome.sms, outcome.sms_seen) == ("done", 2, 2)
    assert outcome.memory_bytes == 160 * KIB and outcome.memory_tested_bytes >= 40 * KIB


@pytest.mark.parametrize(
    ("drill", "failing"),
    [
        ("result", {"kat.int", "kat.ffma", "kat.dfma", "det.fp32", "kat.mma"}),
        ("memory", {"mem.pattern"}),
        ("copy", {"bw.hbm", "bw.h2d", "bw.d2h"}),
    ],
)
def test_every_drill_is_caught(capsys: pytest.CaptureFixture[str], drill: str, failing: set[str]) -> None:
    outcome = _run(capsys, Gpu(UUID, sms=1, bytes=80 * KIB), drill=drill)
    assert {result.id for result in outcome.measurements if result.status == "failed"} == failing
    assert {result.id for result in outcome.measurements if result.status == "done"} == set(IDS) - failing


def test_copies_wait_for_their_turn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "TURN_SECONDS", 0.02)
    with bandwidth.turn():  # another worker's turn, which doesn't end
        results = _by_id(_run(capsys, Gpu(UUID, sms=1, bytes=80 * KIB)))
    assert {name for name, result in results.items() if result.status == "error"} == {"bw.h2d", "bw.d2h"}
    assert "another GPU's copies" in results["bw.h2d"].detail


def test_a_driver_that_ends_with_an_error_of_the_gpu_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = Gpu(UUID, sms=1, bytes=80 * KIB, refuses={"cuLaunchKernel": ECC})
    outcome = _run(capsys, gpu)
    assert {result.status for result in outcome.measurements} == {"failed"}
    assert _by_id(outcome)["kat.int"].detail == "cuLaunchKernel: CUDA_ERROR_ECC_UNCORRECTABLE (214)"
    assert _by_id(outcome)["kat.int"].measured is None
    assert (outcome.sms_seen, outcome.memory_tested_bytes) == (0, 0)


def test_a_call_that_is_refused_is_an_error_and_the_rest_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    results = _by_id(_run(capsys, Gpu(UUID, sms=1, bytes=80 * KIB, refuses={"cuMemHostAlloc": 999})))
    assert {name for name, result in results.items() if result.status == "error"} == {"bw.h2d", "bw.d2h"}
    assert results["bw.h2d"].detail == "cuMemHostAlloc: error (999)" and results["bw.h2d"].unit == "GB/s"


def test_a_gpu_before_volta_passes_nothing_of_tensor_cores(capsys: pytest.CaptureFixture[str]) -> None:
    results = _by_id(_run(capsys, Gpu(UUID, sms=1, bytes=80 * KIB, capability=(6, 0))))
    assert list(results) == IDS
    assert {name for name, result in results.items() if result.status == "error"} == {"kat.mma", "perf.mma"}


def test_links_to_peers_are_all_that_is_tried_with_peers(capsys: pytest.CaptureFixture[str]) -> None:
    gpus = Gpu(UUID, sms=1), Gpu(PEER, sms=1)
    outcome = _run(capsys, *gpus, peers=(PEER,))
    assert [(result.id, result.status) for result in outcome.measurements] == [("bw.p2p", "done")]
    assert outcome.ended == "done"


def test_another_gpu_than_the_one_asked_for_is_refused() -> None:
    with pytest.raises(NodeError, match=f"CUDA shows {PEER}, not {UUID}"):
        worker.run(UUID, "boot-quick", 1, driver=libcuda.Driver(Gpu(PEER)))
    with pytest.raises(NodeError, match="CUDA shows no GPU, not"):
        worker.run(UUID, "boot-quick", 1, driver=libcuda.Driver())


def test_an_unknown_tier_or_drill_is_refused() -> None:
    for tier, drill in (("boot-slow", ""), ("boot-quick", "fire")):
        with pytest.raises(NodeError) as caught:
            worker.run(UUID, tier, 1, drill=drill)  # type: ignore[arg-type]
        assert caught.value.code == "gpu.usage"


def test_a_node_without_the_driver_says_so() -> None:
    with pytest.raises(NodeError) as caught:
        cuda.Driver("libcuda-that-is-not-there.so.1")
    assert caught.value.code == "gpu.library" and "can't load lib" in caught.value.message


def test_what_the_compiler_says_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "text_of", lambda _: b".visible .entry broken {}\0")
    device, _ = libcuda.device(Gpu(UUID))
    with pytest.raises(cuda.CudaError) as caught:
        device.kernel("base", "kat_int")
    assert caught.value.name == "CUDA_ERROR_INVALID_PTX"
    assert (
        caught.value.message
        == "cuModuleLoadDataEx: CUDA_ERROR_INVALID_PTX (218); base.ptx: an entry could not be read"
    )


def test_a_known_error_comes_with_a_hint() -> None:
    error = cuda.CudaError("cuInit", 802, "CUDA_ERROR_SYSTEM_NOT_READY")
    assert error.message.startswith(
        "cuInit: CUDA_ERROR_SYSTEM_NOT_READY (802); is the fabric manager running"
    )


@pytest.mark.parametrize(("plan", "most"), [(SHIPPED["boot-quick"], 40), (SHIPPED["boot-full"], 165)])
def test_the_plans_fit_into_their_tiers(plan: worker.Plan, most: float) -> None:
    """Timed parts take at most half of the workers' 80 or 330 s; the rest is for parts without a set time."""
    spent = 5 * plan.known_answer_seconds + plan.warm_seconds + plan.tensor_seconds + plan.memory_seconds
    assert spent <= most
    assert plan.memory_fraction == (0.25 if most == 40 else 0.95)
