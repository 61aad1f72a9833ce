"""A GPU's worker: the agent's own, at the run's pace, and what only a first contact measures on a GPU.

Standard output has a worker's format: one measurement per line, and the summary, as ``fleet`` reads them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from image_builder.node.errors import NodeError
from image_builder.node.gpu.model import Measurement, Worker
from image_builder.node.gpu.smoke import bandwidth, cuda, known_answer, reference, tensor
from image_builder.node.gpu.smoke import worker as agent
from image_builder.node.gpu.smoke.cuda import U64, CudaError, Device

RUNS, _FEWEST_RUNS = 10, 3
MODULES = ("base", "memory", "tc_sm70", "tc_sm80")
PER_SM = (1, 2, 4, 8, 16)
# A store to an address, which is unmapped or misaligned.
FAULT = b"""
.version 6.5
.target sm_70
.address_size 64
.visible .entry store(.param .u64 address)
{
    .reg .u64 %address;
    .reg .u32 %one;
    ld.param.u64 %address, [address];
    cvta.to.global.u64 %address, %address;
    mov.u32 %one, 1;
    st.global.u32 [%address], %one;
    ret;
}
\0"""
_NO_MEMORY = 0x10
_BARRIER_SECONDS = 20.0
_OVERLAPPING = 60  # copies, enough for those of all GPUs to overlap
_SMALLEST_COPY = 8 << 20
_SMALLEST_UNIT = 1 << 20  # of tested memory: a stand-in has little of it


def parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the worker's own command."""
    options = commands.add_parser("worker")
    options.add_argument("--gpu", required=True)
    options.add_argument("--tier", required=True)
    options.add_argument("--seed", type=int, required=True)
    options.add_argument("--peer", action="append", default=[])
    options.add_argument("--drill", default="")
    options.add_argument("--pace", type=float, default=1.0)
    options.add_argument("--scratch", type=Path, required=True)
    options.add_argument("--mode", choices=["", *_MODES], default="")
    options.add_argument("--count", type=int, default=1, help="GPUs that copy at the same time")
    options.add_argument("--percent", type=float, default=90.0, help="of the free memory that is held")


def run(options: argparse.Namespace) -> int:
    """Run one GPU's worker in the requested mode; return 0. Raises NodeError."""
    options.scratch.mkdir(parents=True, exist_ok=True)
    bandwidth.LOCK = options.scratch / "copies.lock"  # the agent's own path needs root
    plan = paced(agent.PLANS[options.tier], options.pace)
    agent.PLANS = {**agent.PLANS, options.tier: plan}
    if options.pace < 1:
        agent.SEEDS = 1
    if not options.mode:
        return agent.run(options.gpu, options.tier, options.seed, peers=options.peer, drill=options.drill)
    agent.end_with_the_parent()
    began = time.monotonic()
    devices = cuda.devices(cuda.Driver())
    device = _of(devices, options.gpu)
    opened = Measurement("cuda.init", device.uuid, "done", round(time.monotonic() - began, 4), "s")
    _say(opened)
    for measurement in _MODES[options.mode](
        device, options, plan, [_of(devices, peer) for peer in options.peer]
    ):
        _say(measurement)
    print(json.dumps(asdict(Worker(device.uuid, "done", sms=device.sms))), flush=True)
    return 0


def paced(plan: agent.Plan, pace: float) -> agent.Plan:
    """Return a plan for a shorter run: less time and smaller copies. At pace 1 it is the agent's own."""
    if pace >= 1:
        return plan
    return replace(
        plan,
        known_answer_seconds=plan.known_answer_seconds * pace,
        tensor_seconds=plan.tensor_seconds * pace,
        memory_seconds=plan.memory_seconds * pace,
        warm_seconds=plan.warm_seconds * pace,
        link_bytes=max(_SMALLEST_COPY, int(plan.link_bytes * pace) >> 20 << 20),
        unit=_SMALLEST_UNIT,
    )


def runs(pace: float) -> int:
    """Return how many times everything is measured: fewer in a run of less than a fifth of the usual length."""
    return max(_FEWEST_RUNS, min(RUNS, round(5 * RUNS * pace)))


def _of(devices: Sequence[Device], uuid: str) -> Device:
    for device in devices:
        if device.uuid.lower() == uuid.lower():
            return device
    raise NodeError("gpu.absent", f"CUDA doesn't show {uuid}")


def _say(measurement: Measurement) -> None:
    print(json.dumps(asdict(measurement)), flush=True)


Mode = Callable[[Device, argparse.Namespace, agent.Plan, list[Device]], Iterator[Measurement]]


def _repeated(
    device: Device, options: argparse.Namespace, plan: agent.Plan, peers: list[Device]
) -> Iterator[Measurement]:
    """Measure everything repeatedly, each time with another seed; with peers only the link."""
    for number in range(runs(options.pace)):
        seed = options.seed + number
        if peers:
            link = partial(bandwidth.peer, device, peers, seed, plan.copies, size=plan.link_bytes)
            yield agent.tried(device, "bw.p2p", "GB/s", seed, link)
            continue
        agent.try_all(device, plan, seed, _say)


def _copied(
    device: Device, options: argparse.Namespace, plan: agent.Plan, _: list[Device]
) -> Iterator[Measurement]:
    """Copy both ways from each NUMA node, alone or at the same time as others."""
    nodes = bandwidth.numa_nodes() or {0: set()}
    ways: list[tuple[str, Callable[..., Measurement]]] = [
        ("h2d", bandwidth.to_device),
        ("d2h", bandwidth.to_host),
    ]
    together = options.count > 1
    for node, processors in nodes.items():
        for way, copy in ways:
            key = f"{way}-{node}"

            def measure(copy: Callable[..., Measurement] = copy, key: str = key) -> Measurement:
                count = _OVERLAPPING if together else 20
                turn = lambda: _barrier(options, device.uuid, key) if together else bandwidth.turn()  # noqa: E731
                return copy(device, options.seed, count, size=plan.link_bytes, tile=plan.tile, turn=turn)

            measurement = agent.tried(
                device, f"bw.{way}", "GB/s", options.seed, partial(_on, processors, measure)
            )
            yield replace(
                measurement, id=f"{measurement.id}.node{node}.{'together' if together else 'alone'}"
            )


def _on(processors: set[int], measure: Callable[[], Measurement]) -> Measurement:
    everywhere = os.sched_getaffinity(0)
    try:
        if processors:
            os.sched_setaffinity(0, processors)
        return measure()
    finally:
        os.sched_setaffinity(0, everywhere)


@contextmanager
def _barrier(options: argparse.Namespace, uuid: str, key: str) -> Iterator[None]:
    """Wait until all GPUs are about to copy, or until the timeout if one doesn't get there."""
    directory = options.scratch / f"barrier-{options.seed}-{key}"
    directory.mkdir(exist_ok=True)
    (directory / uuid).touch()
    end = time.monotonic() + _BARRIER_SECONDS
    while len(list(directory.iterdir())) < options.count and time.monotonic() < end:
        time.sleep(0.001)
    yield


def _covered(
    device: Device, options: argparse.Namespace, _: agent.Plan, __: list[Device]
) -> Iterator[Measurement]:
    """Count the SMs on which blocks ran, for an increasing number of blocks."""
    case = replace(reference.CASES[0], rounds=4)
    for per_sm in PER_SM:
        blocks = per_sm * device.sms
        with known_answer.prepared(device, case, options.seed, blocks) as run:
            run.start()
            device.synchronize()
            result = run.read()
        detail = f"{blocks} blocks on SM {min(result.sms)} to {max(result.sms)}; {result.count} threads wrong"
        yield Measurement(f"cover.{per_sm}", device.uuid, "done", float(len(result.sms)), "SMs", detail)


def _compiled(
    device: Device, options: argparse.Namespace, _: agent.Plan, __: list[Device]
) -> Iterator[Measurement]:
    """Time how long the driver takes to compile each module."""
    del options
    for module in MODULES:
        if module == "tc_sm80" and device.capability < (8, 0):
            continue
        began = time.monotonic()
        device.kernel(module, _entry(module))
        yield Measurement(f"jit.{module}", device.uuid, "done", round(time.monotonic() - began, 4), "s")


def _entry(module: str) -> str:
    kernels = [case.kernel for case in (*reference.CASES, *tensor.cases((8, 0))) if case.module == module]
    return kernels[0] if kernels else {"memory": "mem_fill", "tc_sm70": "kat_mma_f16"}[module]


def _held(
    device: Device, options: argparse.Namespace, _: agent.Plan, __: list[Device]
) -> Iterator[Measurement]:
    """Allocate memory and keep it until this process is terminated."""
    free, _total = device.memory()
    remaining, chunk = int(free * options.percent / 100), 1 << 30
    while remaining >= 1 << 24:
        try:
            device.allocate(min(remaining, chunk))
            remaining -= min(remaining, chunk)
        except cuda.OutOfMemoryError:
            break
    now, _total = device.memory()
    yield Measurement(
        "held", device.uuid, "done", float(free - now), "%", f"{free - now} of {free} free bytes"
    )
    (options.scratch / f"held-{options.seed}").touch()
    while True:
        time.sleep(1)


def _faulted(
    device: Device, options: argparse.Namespace, _: agent.Plan, __: list[Device]
) -> Iterator[Measurement]:
    """Make one of our GPU kernels store to an invalid address; report the driver's answer."""
    shipped = cuda.text_of
    cuda.text_of = lambda module: FAULT if module == "fault" else shipped(module)
    kernel = device.kernel("fault", "store")
    address = _NO_MEMORY if options.mode == "fault-address" else device.allocate(1 << 20) + 1
    try:
        device.launch(kernel, 1, [U64(address)])
        device.synchronize()
    except CudaError as error:
        yield Measurement(options.mode, device.uuid, "failed", float(error.result), "error", error.name)
    else:
        yield Measurement(options.mode, device.uuid, "done", 0.0, "error", "the driver saw no error")


_MODES: dict[str, Mode] = {
    "repeat": _repeated,
    "copies": _copied,
    "cover": _covered,
    "jit": _compiled,
    "hold": _held,
    "fault-address": _faulted,
    "fault-alignment": _faulted,
}
