"""Rules about each GPU under load: the samples taken meanwhile, and the results of computing and copying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from image_builder.node.gpu.evidence import (
    Evidence,
    absent,
    bad,
    broken,
    compared,
    doubtful,
    good,
    not_made,
    not_run,
)
from image_builder.node.gpu.model import Check, Gpu, Measurement, Sample, Tier
from image_builder.node.gpu.rules.gpu import Judge
from image_builder.node.gpu.sizes import Floor

# With at least this many GPUs, the node's median shows what a healthy GPU reaches.
_MEDIAN_OF = 4
_HBM_OF_MEDIAN, _MMA_OF_MEDIAN, _MMA_OF_REFERENCE = 0.92, 0.90, 0.85
# How much of the free memory is written and read back, and how much of the part's memory must be free.
TESTED_PERCENT: dict[Tier, float] = {"boot-quick": 25.0, "boot-full": 95.0, "periodic": 95.0}
_FREE_PERCENT = 95.0
# The nvmlClocksEventReasons that are faults. A software power cap (0x4) is how a busy GPU stays within its limit.
THROTTLES = {
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
_MASK = sum(THROTTLES)
_SUSTAINED_SECONDS = 1.0
# Twice the sampling interval (fleet.TICK_SECONDS), and some more for the calls for eight GPUs.
_GAP_SECONDS = 1.5
_MARGIN_FAIL_C, _MARGIN_WARN_C = 3, 8


# -- samples ---------------------------------------------------------------------------------------------------


def _samples(evidence: Evidence, gpu: Gpu) -> list[Sample] | Check:
    """Return the samples of a GPU, or the check that can't be made without them."""
    samples = evidence.samples_of(gpu.uuid)
    if samples:
        return samples
    if evidence.after is None:
        return not_run(evidence, gpu)
    return broken("load.unseen", "the GPU was not sampled under load", gpu.uuid)


def throttle(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
    samples = _samples(evidence, gpu)
    if isinstance(samples, Check):
        yield samples
        return
    readings = [sample for sample in samples if sample.throttle is not None]
    if not readings:
        yield not_made("not-supported", "the GPU doesn't report why its clocks are low", gpu.uuid)
        return
    bits = 0
    for sample in readings:
        bits |= (sample.throttle or 0) & _MASK
    names = ", ".join(name for bit, name in THROTTLES.items() if bits & bit)
    longest = sustained(readings, _MASK)
    numbers = compared(round(longest, 1), "<=", _SUSTAINED_SECONDS, "s")
    if longest > _SUSTAINED_SECONDS:
        yield bad("replace", "throttle.sustained", f"{names}, for {longest:.1f} s", gpu.uuid, **numbers)
    elif bits:
        yield doubtful("throttle.short", names, gpu.uuid, **numbers)
    else:
        yield good(gpu.uuid, **numbers)


def sustained(samples: Sequence[Sample], mask: int) -> float:
    """Return the longest time in seconds during which every sample had one of these bits.

    Samples that are far apart, for example after a slow call, say nothing about the time between them.
    """
    longest, since, last = 0.0, None, 0.0
    for sample in samples:
        if not (sample.throttle or 0) & mask:
            since = None
            continue
        if since is None or sample.seconds - last > _GAP_SECONDS:
            since = sample.seconds
        last = sample.seconds
        longest = max(longest, last - since)
    return longest


def temperature(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
    samples = _samples(evidence, gpu)
    if isinstance(samples, Check):
        yield samples
        return
    margins = [margin for sample in samples if (margin := margin_of(sample, gpu)) is not None]
    if not margins:
        # Newer GPUs and some virtual machines report neither; the throttle check detects slowdown itself.
        yield doubtful(
            "temp.hidden", "the GPU reports neither its margin nor its slowdown threshold", gpu.uuid
        )
        return
    least = min(margins)
    numbers = compared(least, ">=", _MARGIN_FAIL_C, "°C")
    detail = f"{least} °C below slowdown"
    if least < _MARGIN_FAIL_C:
        yield bad("replace", "temp.margin", detail, gpu.uuid, **numbers)
    elif least < _MARGIN_WARN_C:
        yield doubtful("temp.margin", detail, gpu.uuid, **(numbers | {"threshold": _MARGIN_WARN_C}))
    else:
        yield good(gpu.uuid, **numbers)


def margin_of(sample: Sample, gpu: Gpu) -> int | None:
    """Return how many °C a sample is below slowdown: as the GPU reports it, or by its fixed threshold."""
    if sample.temperature_margin_c is not None:
        return sample.temperature_margin_c
    if sample.temperature_c is None or gpu.temperature_slowdown_c is None:
        return None
    return gpu.temperature_slowdown_c - sample.temperature_c


def pcie_link(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
    """Judge the link at the widest and fastest seen: an idle link is slower, and a load has idle moments."""
    size, model = evidence.expected.size, evidence.expected.gpu
    if not size or not model:
        yield absent("the size is unknown", gpu.uuid)
        return
    samples = _samples(evidence, gpu)
    if isinstance(samples, Check):
        yield samples
        return
    width = max((sample.pcie_width or 0 for sample in samples), default=0)
    generation = max((sample.pcie_generation or 0 for sample in samples), default=0)
    measured, threshold = f"{generation}x{width}", f"{model.pcie_generation}x{size.pcie_width}"
    numbers = compared(measured, ">=", threshold)
    if not width or not generation:
        yield doubtful("pcie.hidden", "the platform hides the link", gpu.uuid, **numbers)
    elif width < size.pcie_width:
        yield bad("replace", "pcie.width", f"{width} lanes, {size.pcie_width} expected", gpu.uuid, **numbers)
    elif generation < model.pcie_generation:
        detail = f"generation {generation}, {model.pcie_generation} expected"
        yield bad("replace", "pcie.generation", detail, gpu.uuid, **numbers)
    else:
        yield good(gpu.uuid, **numbers)


# -- measurements ----------------------------------------------------------------------------------------------


def worker_ended(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
    worker = evidence.worker(gpu.uuid)
    if evidence.after is None:
        yield not_run(evidence, gpu)
    elif worker is None:
        yield broken("worker.absent", "no worker tested this GPU", gpu.uuid)
    elif worker.ended == "done":
        yield good(gpu.uuid)
    elif worker.ended.startswith(("killed", "hung")):
        done = ", ".join(measurement.id for measurement in worker.measurements) or "nothing"
        detail = f"{worker.ended}; measured before that: {done}"
        if worker.ended.startswith("hung"):
            yield bad("reboot", "worker.unkillable", detail, gpu.uuid)
        elif len(evidence.workers) > 1:
            yield bad("replace", "worker.late", detail, gpu.uuid)
        else:  # the machine may have been busy; if it is late again, the preflight hands it over
            yield bad("reboot", "worker.late", detail, gpu.uuid)
    elif worker.ended.startswith("crashed"):
        yield bad("replace", "worker.crashed", worker.ended, gpu.uuid)
    else:
        yield broken("worker.error", worker.ended, gpu.uuid)


def answers(id: str) -> Judge:
    """Return the rule that all of a test's answers must be right. A wrong answer is never retried."""

    def judge(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
        results = _measured(evidence, id, gpu)
        if isinstance(results, Check):
            yield results
            return
        wrong = sum(result.measured or 0 for result in results)
        numbers = _numbers(results[-1], wrong, 0.0, "==")
        if wrong:
            details = "; ".join(result.detail for result in results if result.measured)
            yield bad("replace", "answer.wrong", details or f"{wrong:g} wrong answers", gpu.uuid, **numbers)
        elif any(result.measured is None for result in results):
            yield broken("worker.error", "the test finished without a result", gpu.uuid)
        else:
            yield good(gpu.uuid, results[-1].detail, **numbers)

    return judge


def floor(id: str, key: str) -> Judge:
    """Return the rule that a bandwidth must reach its floor; the lowest of several measurements counts."""

    def judge(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
        size = evidence.expected.size
        least: Floor | None = getattr(size, key) if size else None
        if size and least is None:
            yield absent("this size has none", gpu.uuid)
            return
        slowest = _slowest(evidence, id, gpu)
        if isinstance(slowest, Check):
            yield slowest
            return
        result, speed = slowest
        if not least:
            detail = "an unknown size has no floor"
            yield doubtful("floor.unknown", detail, gpu.uuid, **_numbers(result, speed, None, ""))
        elif speed < least.value:
            detail = f"{speed:.4g} {result.unit}, the floor is {least.value:g} ({least.source})"
            numbers = _numbers(result, speed, least.value, ">=")
            yield bad("replace", "bandwidth.low", f"{detail} {result.detail}".rstrip(), gpu.uuid, **numbers)
        else:
            yield good(gpu.uuid, **_numbers(result, speed, least.value, ">="))

    return judge


def links(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
    if not evidence.expected.size and len(evidence.gpus) == 1:
        yield absent("the only GPU", gpu.uuid)
        return
    yield from floor("bw.p2p", "p2p_floor_gbps")(evidence, gpu)


def hbm(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
    verdicts = list(floor("bw.hbm", "hbm_floor_gbps")(evidence, gpu))
    yield from verdicts
    if verdicts[0].status in ("pass", "warn"):
        yield from _median(evidence, gpu, "bw.hbm", _HBM_OF_MEDIAN)


def mma(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
    slowest = _slowest(evidence, "perf.mma", gpu)
    if isinstance(slowest, Check):
        yield slowest
        return
    result, speed = slowest
    reference = evidence.expected.gpu.mma_reference_tflops if evidence.expected.gpu else None
    least = _MMA_OF_REFERENCE * reference.value if reference else None
    numbers = _numbers(result, speed, least, ">=" if reference else "")
    if reference and least is not None and speed < least:
        detail = f"{speed:.4g} TFLOP/s, 0.85 of {reference.value:g} is required ({reference.source})"
        yield bad("replace", "compute.slow", detail, gpu.uuid, **numbers)
    else:
        yield good(gpu.uuid, "" if reference else "this model has no reference yet", **numbers)
    yield from _median(evidence, gpu, "perf.mma", _MMA_OF_MEDIAN)


def _median(evidence: Evidence, gpu: Gpu, id: str, part: float) -> Iterator[Check]:
    """Yield a failure if a GPU is slower than the node's others of its model; with few of them, only a warning."""
    values = {
        other.uuid: min(speeds)
        for other in evidence.gpus
        if other.name == gpu.name
        and (speeds := [m.measured for m in evidence.measurements(id, other.uuid) if m.measured is not None])
    }
    if len(values) < 2 or gpu.uuid not in values:
        return
    middle = median(values.values())
    least, has = part * middle, values[gpu.uuid]
    if has >= least:
        return
    unit = evidence.measurements(id, gpu.uuid)[0].unit
    numbers = compared(has, ">=", round(least, 2), unit)
    detail = f"{has:.4g} {unit}, {part:g} of the node's median {middle:.4g} is required"
    if len(values) >= _MEDIAN_OF:
        yield bad("replace", "below.median", detail, gpu.uuid, **numbers)
    else:
        yield doubtful("below.median", detail, gpu.uuid, **numbers)


def every_sm(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
    worker = evidence.worker(gpu.uuid)
    if worker is None or not worker.sms:
        yield not_run(evidence, gpu, "no worker reported the number of SMs")
        return
    numbers = compared(worker.sms_seen, "==", worker.sms, "SMs")
    if worker.sms_seen < worker.sms:
        detail = f"{worker.sms_seen} of {worker.sms} SMs did work"
        yield broken("coverage.sms", detail, gpu.uuid, **numbers)
    else:
        yield good(gpu.uuid, **numbers)


def enough_memory(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
    worker = evidence.worker(gpu.uuid)
    if worker is None or not worker.memory_bytes:
        yield not_run(evidence, gpu, "no worker reported the free memory")
        return
    total = gpu.memory_total_bytes or 0
    reserved = gpu.memory_reserved_bytes or 0
    usable = max(total - reserved, 1)
    free = 100 * worker.memory_bytes / usable
    if total and free < _FREE_PERCENT:
        numbers = compared(round(free, 1), ">=", _FREE_PERCENT, "%")
        yield broken("coverage.free", f"{free:.1f} % of the GPU's memory was free", gpu.uuid, **numbers)
        return
    tested = 100 * worker.memory_tested_bytes / worker.memory_bytes
    least = TESTED_PERCENT[evidence.tier]
    numbers = compared(round(tested, 1), ">=", least, "%")
    # Chunks don't fill the last percent of memory exactly.
    if tested < least - 0.5:
        yield broken("coverage.memory", f"{tested:.1f} % of the free memory was tested", gpu.uuid, **numbers)
    else:
        yield good(gpu.uuid, **numbers)


def _measured(evidence: Evidence, id: str, gpu: Gpu) -> list[Measurement] | Check:
    """Return the completed measurements of a test, or the check that says why there are none or that it failed."""
    results = evidence.measurements(id, gpu.uuid)
    if evidence.after is None:
        return not_run(evidence, gpu)
    for result in results:
        if result.status == "failed":
            more = (
                _numbers(result, result.measured, 0.0, "==")
                if result.unit == "mismatches"
                else _numbers(result, None, None, "")
            )
            return bad("replace", "answer.wrong", result.detail or "a wrong answer", gpu.uuid, **more)
    for result in results:
        if result.status == "error":
            return broken("worker.error", result.detail or "it could not be run", gpu.uuid, seed=result.seed)
    skipped = [result for result in results if result.status == "skipped"]
    if skipped and len(skipped) == len(results):
        return not_made("worker.skipped", skipped[0].detail or "the worker skipped it", gpu.uuid)
    done = [result for result in results if result.status == "done"]
    if not done:
        return broken("worker.silent", "the worker reported no result", gpu.uuid)
    return done


def _slowest(evidence: Evidence, id: str, gpu: Gpu) -> tuple[Measurement, float] | Check:
    """Return the slowest of a test's measurements with its speed, or the check that says why there is none."""
    results = _measured(evidence, id, gpu)
    if isinstance(results, Check):
        return results
    slowest = min(results, key=lambda result: result.measured or 0.0)
    if slowest.measured is None:
        return broken("worker.error", "the test finished without a result", gpu.uuid)
    return slowest, slowest.measured


def _numbers(result: Measurement, measured: float | None, threshold: float | None, op: str) -> dict[str, Any]:
    return {**compared(measured, op, threshold, result.unit), "seed": result.seed, "seconds": result.seconds}
