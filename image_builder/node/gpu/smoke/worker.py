"""``node-agent gpu-worker``: the active tests of one GPU, in a process of its own.

The GPU is chosen by CUDA_VISIBLE_DEVICES before this starts. Standard output has one JSON object a line: each
measurement as soon as it is made, and a summary (``model.Worker``) last. The exit status is 0 once everything was
tried, whatever the results: rules judge them.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from image_builder.node.errors import NodeError
from image_builder.node.gpu.model import DETAIL_CHARACTERS, Measurement, Tier, Worker
from image_builder.node.gpu.smoke import bandwidth, cuda, known_answer, memory, reference, tensor
from image_builder.node.gpu.smoke.cuda import U64, CudaError, Device, Driver
from image_builder.node.gpu.smoke.reference import Case

SEEDS = 3
DRILLS = ("result", "memory", "copy", "hang", "crash")
_PR_SET_PDEATHSIG = 1
# Errors that only a broken GPU or a broken program causes, and the kernels are known to be good.
FINDINGS = frozenset(
    [
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_CONTAINED",
    ]
)


@dataclass(frozen=True)
class Plan:
    """Durations and sizes. Seconds are per measurement, ``memory_fraction`` is of the free memory.

    ``cases`` are the known answers that every GPU gives, ``chunk`` and ``unit`` the sizes that memory is taken in.
    """

    known_answer_seconds: float
    tensor_seconds: float
    memory_fraction: float
    memory_seconds: float
    copies: int
    cases: tuple[Case, ...] = reference.CASES
    tensor_cases: Callable[[tuple[int, int]], tuple[Case, ...]] = tensor.cases
    warm_seconds: float = 1.0
    chunk: int = memory.CHUNK
    unit: int = memory.UNIT
    hbm_bytes: int = bandwidth.HBM_BYTES
    link_bytes: int = bandwidth.LINK_BYTES
    tile: int = bandwidth.TILE


_FULL = Plan(10, 20, 0.95, 60, 20)
PLANS: Mapping[Tier, Plan] = {
    "boot-quick": Plan(0.75, 1, 0.25, 0, 5),
    "boot-full": _FULL,
    "periodic": _FULL,
}


def run(
    uuid: str,
    tier: Tier,
    seed: int,
    *,
    peers: Sequence[str] = (),
    drill: str = "",
    driver: Driver | None = None,
) -> int:
    """Test a GPU, or with ``peers`` only its links to them; return 0. Raises NodeError if it can't be opened.

    ``drill`` fails on purpose, to prove that the failure is caught.
    """
    if tier not in PLANS or drill not in ("", *DRILLS):
        raise NodeError("gpu.usage", f"the tiers are {', '.join(PLANS)}; the drills {', '.join(DRILLS)}")
    end_with_the_parent()
    devices = cuda.devices(driver or Driver())
    device = _of(devices, uuid)
    plan = PLANS[tier]
    if peers:
        others = [_of(devices, peer) for peer in peers]
        _say(asdict(tried(device, "bw.p2p", "GB/s", seed, partial(_peer, device, others, plan, seed))))
        _say(asdict(Worker(uuid, "done", sms=device.sms)))
        return 0
    if drill in ("hang", "crash"):
        _misbehave(device, drill)
    summary = try_all(device, plan, seed, lambda measurement: _say(asdict(measurement)), drill=drill)
    _say(asdict(summary))
    return 0


@dataclass
class Coverage:
    """The coverage so far: the fewest SMs of any known answer, and bytes of memory."""

    sms: int
    free: int = 0
    tested: int = 0


Attempt = tuple[str, str, Callable[[], Measurement]]  # what is measured, its unit, how


def try_all(
    device: Device, plan: Plan, seed: int, report: Callable[[Measurement], None], *, drill: str = ""
) -> Worker:
    """Make all measurements of one GPU, report each, and return the summary."""
    coverage = Coverage(device.sms)
    for name, unit, work in _attempts(device, plan, seed, drill, coverage):
        report(tried(device, name, unit, seed, work))
    return Worker(device.uuid, "done", (), device.sms, coverage.sms, coverage.free, coverage.tested)


def _attempts(device: Device, plan: Plan, seed: int, drill: str, coverage: Coverage) -> list[Attempt]:
    tensors = plan.tensor_cases(device.capability)
    cases = (*plan.cases, *tensors)
    bad = drill == "copy"
    return [
        *(
            (name, "mismatches", partial(_known, device, plan, seed, drill, coverage, name, cases))
            for name in dict.fromkeys([*(case.id for case in cases), "kat.mma"])
        ),
        ("perf.mma", "TFLOP/s", partial(_rate, device, plan, seed, tensors)),
        (
            "bw.hbm",
            "GB/s",
            partial(bandwidth.hbm, device, seed, plan.copies, size=plan.hbm_bytes, corrupt=bad),
        ),
        ("bw.h2d", "GB/s", partial(_copied, bandwidth.to_device, device, plan, seed, corrupt=bad)),
        ("bw.d2h", "GB/s", partial(_copied, bandwidth.to_host, device, plan, seed, corrupt=bad)),
        ("mem.pattern", "mismatches", partial(_patterns, device, plan, seed, drill, coverage)),
    ]


def _known(
    device: Device, plan: Plan, seed: int, drill: str, coverage: Coverage, name: str, cases: Sequence[Case]
) -> Measurement:
    before, coverage.sms = coverage.sms, 0  # until something is measured
    spoil = flipped if drill == "result" else None
    own_cases = [case for case in cases if case.id == name]
    measured, sms = known_answer.measure(
        device, name, own_cases, _seeds(seed), plan.known_answer_seconds, spoil=spoil
    )
    coverage.sms = min(before, sms)
    return measured


def _rate(device: Device, plan: Plan, seed: int, tensors: Sequence[Case]) -> Measurement:
    if not tensors:
        raise NodeError("gpu.capability", f"no tensor kernel for compute capability {device.capability}")
    return known_answer.rate(device, tensors[0], seed, plan.tensor_seconds, warm=plan.warm_seconds)


def _patterns(device: Device, plan: Plan, seed: int, drill: str, coverage: Coverage) -> Measurement:
    tested = memory.measure(
        device,
        plan.memory_fraction,
        _seeds(seed),
        plan.memory_seconds,
        corrupt=drill == "memory",
        chunk=plan.chunk,
        unit=plan.unit,
    )
    coverage.free, coverage.tested = tested.free, tested.tested
    return tested.measurement


def _copied(
    copy: Callable[..., Measurement], device: Device, plan: Plan, seed: int, *, corrupt: bool
) -> Measurement:
    link: dict[str, Any] = {"size": plan.link_bytes, "tile": plan.tile, "turn": bandwidth.turn}
    return bandwidth.from_each_node(
        lambda: copy(device, seed, plan.copies, corrupt=corrupt, **link), bandwidth.numa_nodes()
    )


def _seeds(seed: int) -> list[int]:
    return [seed + number for number in range(SEEDS)]


def _peer(device: Device, peers: list[Device], plan: Plan, seed: int) -> Measurement:
    return bandwidth.peer(device, peers, seed, plan.copies, size=plan.link_bytes)


def tried(device: Device, name: str, unit: str, seed: int, work: Callable[[], Measurement]) -> Measurement:
    """Return a measurement, also where the driver ended it."""
    try:
        return work()
    except NodeError as error:
        is_finding = isinstance(error, CudaError) and error.name in FINDINGS
        detail = error.message[:DETAIL_CHARACTERS]
        return Measurement(name, device.uuid, "failed" if is_finding else "error", None, unit, detail, seed)


def _of(devices: Sequence[Device], uuid: str) -> Device:
    """Return the GPU of that UUID. Raises NodeError: another would be tested in its name."""
    for device in devices:
        if device.uuid.lower() == uuid.lower():
            return device
    uuids = ", ".join(device.uuid for device in devices) or "no GPU"
    raise NodeError("gpu.absent", f"CUDA shows {uuids}, not {uuid}")


def _say(value: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def end_with_the_parent() -> None:
    """Make the kernel kill this process when its parent dies: nothing else would.

    A parent that has died before this call is noticed by its end of a pipe, this process's input or output.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pipes = select.poll()
    for descriptor in (0, 1):
        pipes.register(descriptor, 0)
    if any(events & (select.POLLHUP | select.POLLERR) for _, events in pipes.poll(0)):
        os.kill(os.getpid(), signal.SIGKILL)


# -- drills ----------------------------------------------------------------------------------------------------


def flipped(case: Case, operands: bytes) -> bytes:
    """Return the operands with one bit flipped, with which the GPU computes something else."""
    changed = bytearray(operands)
    changed[case.operand_bytes * 77 + 1] ^= 2  # bit 9: of a state, or of an fp16 number's mantissa
    return bytes(changed)


def _misbehave(device: Device, drill: str) -> None:
    """Hang in a kernel that doesn't end, or die of a signal."""
    if drill == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    flag = device.allocate(4)
    device.upload(flag, bytes(4))
    device.launch(device.kernel("memory", "spin"), 1, [U64(flag)])
    device.synchronize()
