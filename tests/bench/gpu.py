"""The GPU smoke test, measured: how close it gets to what a GPU can do, and whether it catches faults.

    .venv/bin/python tests/bench/gpu.py [--rounds N] [--json]
    python3 tests/bench/gpu.py --first-contact OUT | --propose OUT | --pack FILE

``--first-contact`` learns in nine minutes all that a machine with GPUs can teach; it needs Python 3.11 and the driver
(``first_contact``; more options: ``--first-contact --help``). The rest of this text is about the first command line.

Needs a GPU and its driver; without them it says so, measures nothing and exits with 4. Everything is measured
on the first GPU that CUDA lists, in one run, and compared with the GPU's own ceiling.

    hbm_ratio          bw.hbm / a device-to-device copy by the driver of the same size; goal >= 0.85
    h2d_ratio          bw.h2d / a pinned copy of 1 GiB; goal >= 0.9
    d2h_ratio          likewise, to the host; goal >= 0.9
    mma_ratio          perf.mma / cuBLAS's product of fp16 matrices, 8192 by 8192; goal >= 0.5. Left out, with a note,
                       if libcublas isn't found
    boot_quick_seconds the workers of `boot-quick`, all GPUs; goal <= 30
    caught_KIND        how many of `--rounds` runs each were caught: a corrupted result, memory and copy, a crashed and
                       a killed worker, a hung kernel; goal: all
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import datetime
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from image_builder.node.errors import NodeError  # noqa: E402
from image_builder.node.gpu.model import Tier, Worker  # noqa: E402
from image_builder.node.gpu.smoke import bandwidth, cuda, fleet, known_answer, program, tensor  # noqa: E402

NO_GPU = 4  # the smoke test's own status for a machine that can't run it
COPIES = 20
LARGE = 1 << 30
SIDE = 8192
SECONDS = 5.0  # of the tensor test
DEADLINE, HUNG_DEADLINE = 90.0, 20.0
KILL_AFTER_SECONDS = 4.0
_CUDA_R_16F, _CUBLAS_COMPUTE_32F, _CUBLAS_GEMM_DEFAULT, _CUBLAS_OP_N = 2, 68, -1, 0
_CUBLAS = ("libcublas.so.13", "libcublas.so.12", "libcublas.so.11")
GOALS = {
    "hbm_ratio": (">=", 0.85),
    "h2d_ratio": (">=", 0.9),
    "d2h_ratio": (">=", 0.9),
    "mma_ratio": (">=", 0.5),
    "boot_quick_seconds": ("<=", 30.0),
}
# What must be detected for each kind of drill.
CAUGHT: dict[str, Callable[[Worker], bool]] = {
    "result": lambda worker: _failed(worker) >= {"kat.int", "kat.ffma", "kat.dfma", "det.fp32", "kat.mma"},
    "memory": lambda worker: "mem.pattern" in _failed(worker),
    "copy": lambda worker: _failed(worker) >= {"bw.hbm", "bw.h2d", "bw.d2h"},
    "crash": lambda worker: worker.ended == "crashed: signal 11",
    "killed": lambda worker: worker.ended == "crashed: signal 9",
    "hang": lambda worker: worker.ended in ("killed: deadline", "hung: unkillable"),
}
Report = dict[str, Any]


def _failed(worker: Worker) -> set[str]:
    return {measurement.id for measurement in worker.measurements if measurement.status == "failed"}


# -- ceilings --------------------------------------------------------------------------------------------------


def speeds(device: cuda.Device, large: int = LARGE) -> Report:
    """Measure our rate and the ceiling of each copy, in GB/s; the pinned copies are of ``large`` bytes."""
    ours = {
        "hbm": bandwidth.hbm(device, 1, COPIES),
        "h2d": bandwidth.to_device(device, 1, COPIES, size=min(bandwidth.LINK_BYTES, large)),
        "d2h": bandwidth.to_host(device, 1, COPIES, size=min(bandwidth.LINK_BYTES, large)),
    }
    references = {"hbm": _device_copy(device), **_pinned_copies(device, large)}
    report: Report = {}
    for name, result in ours.items():
        if result.measured is None:
            raise RuntimeError(f"{result.id}: {result.status}: {result.detail}")
        report |= {
            f"{name}_ours": result.measured,
            f"{name}_reference": round(references[name], 1),
            f"{name}_ratio": round(result.measured / references[name], 3),
        }
    return report


def _best(device: cuda.Device, work: Callable[[], None]) -> float:
    work()
    return min(device.timed(work) for _ in range(COPIES))


def _device_copy(device: cuda.Device) -> float:
    size = min(bandwidth.HBM_BYTES, int(device.memory()[0] * 0.4)) // 4096 * 4096
    with _memory(device, size, size) as (source, target):
        return 2 * size / _best(device, lambda: device.copy(target, source, size)) / 1e9


def _pinned_copies(device: cuda.Device, large: int) -> dict[str, float]:
    with _memory(device, large) as (address,), device.pinned(large) as view:
        return {
            "h2d": large / _best(device, lambda: device.from_pinned(address, view)) / 1e9,
            "d2h": large / _best(device, lambda: device.to_pinned(view, address)) / 1e9,
        }


@contextmanager
def _memory(device: cuda.Device, *sizes: int) -> Iterator[tuple[int, ...]]:
    addresses = tuple(device.allocate(size) for size in sizes)
    try:
        yield addresses
    finally:
        for address in addresses:
            device.free(address)


def tensors(device: cuda.Device, seconds: float = SECONDS) -> Report:
    """Measure our tensor kernel and cuBLAS, in TFLOP/s."""
    case = tensor.cases(device.capability)[0]
    ours = known_answer.rate(device, case, 1, seconds)
    if ours.measured is None:
        raise RuntimeError(f"perf.mma: {ours.status}: {ours.detail}")
    report: Report = {"mma_ours": ours.measured}
    library = _cublas()
    if library is None:
        return {**report, "mma_missing": "libcublas is not on this machine: no ratio"}
    reference = _product(device, library)
    return {
        **report,
        "mma_reference": round(reference, 1),
        "mma_ratio": round(ours.measured / reference, 3),
    }


def _cublas() -> ctypes.CDLL | None:
    for name in (*_CUBLAS, ctypes.util.find_library("cublas")):
        try:
            if name:
                return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _product(device: cuda.Device, library: ctypes.CDLL) -> float:
    """Return the TFLOP/s of cublasGemmEx on fp16 matrices, with sums in fp32."""
    handle = ctypes.c_void_p()
    _done("cublasCreate_v2", library.cublasCreate_v2(ctypes.byref(handle)))
    size = 2 * SIDE * SIDE
    unit, nothing = ctypes.c_float(1), ctypes.c_float(0)
    side = ctypes.c_int(SIDE)
    with _memory(device, size, size, size) as (a, b, c):
        # fp16 numbers between 1 and 2: as many bits toggle as with any others.
        row = b"".join((0x3C00 | n * 37 % 1024).to_bytes(2, "little") for n in range(SIDE))
        for address in (a, b):
            device.upload(address, row * SIDE)

        def work() -> None:
            arguments = (
                *(handle, _CUBLAS_OP_N, _CUBLAS_OP_N, side, side, side, ctypes.byref(unit)),
                *(ctypes.c_void_p(a), _CUDA_R_16F, side, ctypes.c_void_p(b), _CUDA_R_16F, side),
                *(ctypes.byref(nothing), ctypes.c_void_p(c), _CUDA_R_16F, side),
                *(_CUBLAS_COMPUTE_32F, _CUBLAS_GEMM_DEFAULT),
            )
            _done("cublasGemmEx", library.cublasGemmEx(*arguments))

        end = time.monotonic() + 1
        while time.monotonic() < end:
            device.timed(work)
        return 2 * SIDE**3 / _best(device, work) / 1e12


def _done(function: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{function}: status {status}")


# -- the complete run, and drills ------------------------------------------------------------------------------


def boot_quick(uuids: Sequence[str]) -> Report:
    """Run all workers as at boot; raise RuntimeError unless each succeeds."""
    began = time.monotonic()
    workers = fleet.run(uuids, "boot-quick", 1, DEADLINE)
    seconds = time.monotonic() - began
    bad = [
        f"{worker.gpu}: {worker.ended} {sorted(_failed(worker))}"
        for worker in workers
        if worker.ended != "done" or _failed(worker)
    ]
    if bad:
        raise RuntimeError("; ".join(bad))
    return {"boot_quick_seconds": round(seconds, 1), "gpus": len(uuids)}


def drills(uuid: str, rounds: int) -> Report:
    """Cause each kind of fault ``rounds`` times; count how often it was caught."""
    report: Report = {}
    for kind, is_caught in CAUGHT.items():
        deadline = HUNG_DEADLINE if kind == "hang" else DEADLINE
        caught = sum(is_caught(drill(uuid, kind, number, deadline)) for number in range(rounds))
        report[f"caught_{kind}"] = caught
    return {**report, "rounds": rounds}


def drill(
    uuid: str,
    kind: str,
    seed: int,
    deadline: float,
    *,
    command: fleet.Argv = program.worker_argv,
    kill_after: float = KILL_AFTER_SECONDS,
) -> Worker:
    """Cause one kind of fault in a GPU's worker; return the worker's result."""

    def argv(gpu: str, tier: Tier, seed: int, peers: Sequence[str]) -> list[str]:
        more = [] if kind == "killed" else ["--drill", kind]
        return [*command(gpu, tier, seed, peers), *more]

    if kind == "killed":
        threading.Timer(kill_after, _kill_workers, [uuid]).start()
    return fleet.run([uuid], "boot-quick", seed, deadline, argv=argv)[0]


def _kill_workers(uuid: str) -> None:
    """Kill this process's worker for a GPU from outside, as the kernel does when memory runs out."""
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            if uuid in Path("/proc", pid, "cmdline").read_text():
                os.kill(int(pid), signal.SIGKILL)


# -- output ----------------------------------------------------------------------------------------------------


def find() -> tuple[cuda.Driver, list[cuda.Device]]:
    """Return the driver and its GPUs. Raises NodeError if there is none."""
    driver = cuda.Driver()
    devices = cuda.devices(driver)
    if not devices:
        raise NodeError("gpu.absent", "CUDA shows no GPU")
    return driver, devices


def measure(driver: cuda.Driver, devices: Sequence[cuda.Device], rounds: int) -> Report:
    device = devices[0]
    version = driver.number("cuDriverGetVersion")
    report: Report = {
        "gpu": device.name,
        "sms": device.sms,
        "capability": ".".join(map(str, device.capability)),
        "cuda": f"{version // 1000}.{version % 1000 // 10}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    report |= speeds(device) | tensors(device)
    report |= boot_quick([item.uuid for item in devices])
    return report | drills(device.uuid, rounds)


def is_met(report: Report) -> bool:
    met = [
        report[key] >= goal if sign == ">=" else report[key] <= goal
        for key, (sign, goal) in GOALS.items()
        if key in report
    ]
    return all(met) and all(report[f"caught_{kind}"] == report["rounds"] for kind in CAUGHT)


def show(report: Report) -> None:
    print(f"{report['gpu']}, {report['sms']} SMs, CUDA {report['cuda']}, {report['date']}")
    print(f"{'name':22}{'ours':>12}{'reference':>12}{'ratio':>8}{'goal':>10}")
    units = {"hbm": "GB/s", "h2d": "GB/s", "d2h": "GB/s", "mma": "TFLOP/s"}
    for name, unit in units.items():
        goal = " ".join(map(str, GOALS[f"{name}_ratio"]))
        reference, ratio = report.get(f"{name}_reference", "-"), report.get(f"{name}_ratio", "-")
        print(f"{f'{name}, {unit}':22}{report[f'{name}_ours']:>12}{reference:>12}{ratio:>8}{goal:>10}")
    print(f"{'boot-quick, s':22}{report['boot_quick_seconds']:>12}{'-':>12}{'-':>8}{'<= 30':>10}")
    for kind in CAUGHT:
        print(
            f"{f'caught: {kind}':22}{report[f'caught_{kind}']:>12}{report['rounds']:>12}{'-':>8}{'all':>10}"
        )
    if "mma_missing" in report:
        print(report["mma_missing"])


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in ("--first-contact", "--propose", "--pack"):
        from tests.bench.first_contact.__main__ import main as first_contact

        return first_contact([sys.argv[1].removeprefix("--"), *sys.argv[2:]])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        driver, devices = find()
    except NodeError as error:
        print(f"no GPU on this machine, nothing was measured: {error.message}", file=sys.stderr)
        if options.json:
            print(json.dumps({"gpu": None, "reason": error.message}))
        return NO_GPU
    report = measure(driver, devices, options.rounds)
    if options.json:
        print(json.dumps(report))
    else:
        show(report)
    return 0 if is_met(report) else 1


if __name__ == "__main__":
    sys.exit(main())
