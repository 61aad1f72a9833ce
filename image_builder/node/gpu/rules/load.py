"""Rules about each GPU under load, from the samples that were taken while the workers ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
from image_builder.node.gpu.model import Check, Gpu, Sample

# nvmlClocksEventReasons: those that are faults. A power cap by software (0x4) is how a busy GPU keeps its limit.
THROTTLES = {
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
_MASK = sum(THROTTLES)
_SUSTAINED_SECONDS = 1.0
# Twice the time between two looks (fleet.TICK_SECONDS), and some more for the calls of eight GPUs.
_GAP_SECONDS = 1.5
_MARGIN_FAIL_C, _MARGIN_WARN_C = 3, 8


def _samples(evidence: Evidence, gpu: Gpu) -> list[Sample] | Check:
    """Return the samples of a GPU, or the check that can't be made without any."""
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

    Samples that are far apart, as a slow call makes them, say nothing of the time between them.
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
        # Newer GPUs and some virtual machines have neither; slowdown itself is seen by the check throttle.
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
    """Return how many °C a sample is from slowdown: as the GPU says, or by its fixed threshold."""
    if sample.temperature_margin_c is not None:
        return sample.temperature_margin_c
    if sample.temperature_c is None or gpu.temperature_slowdown_c is None:
        return None
    return gpu.temperature_slowdown_c - sample.temperature_c


def pcie_link(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
    """Judge the widest and fastest link that was seen: an idle one is slower, and a load has idle moments."""
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
