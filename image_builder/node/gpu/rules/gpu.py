"""Rules about each GPU, from NVML's readings at rest and again after the load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

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
    unanswered,
    without_gpus,
)
from image_builder.node.gpu.model import Check, Gpu

# Of the 64 pages that a V100 or T4 can retire; NVIDIA's own tools reject a GPU at 60, and warn at 15.
_RETIRED_FAIL, _RETIRED_WARN = 60, 15
# NVIDIA's DCGM fails a link at this rate of CRC errors, and at the first replay or recovery.
_CRC_PER_SECOND = 100
_IDLE_BYTES = 1 << 30
# If `used` includes the driver's reserved memory (an old NVML), this much more doesn't belong to any process.
_RESERVED_BYTES = 1 << 30


Judge = Callable[[Evidence, Gpu], Iterator[Check]]


def each(judge: Judge) -> Callable[[Evidence], Iterator[Check]]:
    """Return a rule that judges every GPU, or reports that there is none."""

    def rule(evidence: Evidence) -> Iterator[Check]:
        yield from without_gpus(evidence)
        for gpu in evidence.gpus:
            yield from judge(evidence, gpu)

    return rule


def _flag(name: str, failure: Check) -> Judge:
    """Return the rule that a reading must be true; if it isn't, the rule yields ``failure``."""

    def judge(_: Evidence, gpu: Gpu) -> Iterator[Check]:
        gap = unanswered(gpu, name)
        if gap:
            yield gap
        elif getattr(gpu, name):
            yield good(gpu.uuid)
        else:
            yield replace(failure, gpu=gpu.uuid)

    return judge


inforom = _flag("inforom_valid", bad("replace", "gpu.inforom", "the InfoROM is corrupted"))
persistence = _flag("persistence", bad("config", "persistence.disabled", "persistence mode is disabled"))


def recovery_action(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
    now = evidence.later(gpu.uuid) or gpu
    gap = unanswered(now, "recovery_action")
    if gap or now.recovery_action is None:
        yield gap or broken("nvml.error", "recovery_action", gpu.uuid)
    elif now.recovery == "none":
        yield good(gpu.uuid)
    else:
        detail = f"the driver asks for {now.recovery_action}"
        yield bad(
            now.recovery,
            "gpu.recovery-action",
            detail,
            gpu.uuid,
            measured=now.recovery_action,
            threshold="none",
        )


def ecc_mode(_: Evidence, gpu: Gpu) -> Iterator[Check]:
    gap = unanswered(gpu, "ecc_current", "ecc_pending")
    if gap:
        yield gap
    elif gpu.ecc_current and gpu.ecc_pending:
        yield good(gpu.uuid)
    elif gpu.ecc_current != gpu.ecc_pending:
        yield bad("reboot", "ecc.pending", "ECC changes at the next reset", gpu.uuid)
    else:
        yield bad("config", "ecc.disabled", "ECC is disabled", gpu.uuid)


def ecc_uncorrected(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
    name = "ecc_volatile_uncorrected"
    now = evidence.later(gpu.uuid)
    for when, reading in (("before the load", gpu), ("after the load", now)):
        gap = unanswered(reading, name) if reading else None
        if gap:
            yield gap
            return
        count = reading.ecc_volatile_uncorrected if reading else 0
        if reading and count:
            at = f"SRAM {reading.ecc_volatile_uncorrected_sram}, DRAM {reading.ecc_volatile_uncorrected_dram}"
            detail = f"{count} uncorrected errors {when} ({at})"
            numbers = compared(count, "==", 0, "errors")
            yield bad("reboot", "ecc.uncorrected", detail, gpu.uuid, **numbers)
            return
    if evidence.after and not now:
        yield broken("gpu.lost", "the GPU doesn't answer after the load", gpu.uuid)
        return
    yield good(gpu.uuid, **compared(0, "==", 0, "errors"))


def ecc_sram(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
    now = evidence.later(gpu.uuid) or gpu
    count = now.ecc_aggregate_uncorrected_sram
    gap = unanswered(now, "sram_threshold_exceeded")
    if now.sram_threshold_exceeded:
        yield bad("replace", "ecc.sram-threshold", "too many uncorrected SRAM errors", gpu.uuid)
    elif count:
        detail = f"{count} uncorrected SRAM errors in the GPU's lifetime"
        yield doubtful("ecc.sram-aggregate", detail, gpu.uuid, **compared(count, "==", 0, "errors"))
    else:
        yield gap or good(gpu.uuid)


def _delta(evidence: Evidence, gpu: Gpu, name: str) -> int | Check:
    """Return how much a counter grew under load, or the check that can't be made."""
    if not evidence.after:
        return not_run(evidence, gpu)
    now = evidence.later(gpu.uuid)
    if not now:
        return broken("gpu.lost", "the GPU doesn't answer after the load", gpu.uuid)
    gap = unanswered(gpu, name) or unanswered(now, name)
    if gap:
        return gap
    delta = int(getattr(now, name)) - int(getattr(gpu, name))
    # A counter that went backwards was reset, and so was the GPU.
    return delta if delta >= 0 else broken("nvml.error", f"{name} fell by {-delta} under load", gpu.uuid)


def _growth(name: str, code: str, noun: str, unit: str, *, warns: int, fails: int) -> Judge:
    """Return the rule about a counter's growth under load: above ``warns`` it warns, above ``fails`` it fails."""

    def judge(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
        delta = _delta(evidence, gpu, name)
        if isinstance(delta, Check):
            yield delta
            return
        detail = f"{delta} {noun} under load"
        if delta > fails:
            yield bad("replace", code, detail, gpu.uuid, **compared(delta, "<=", fails, unit))
        elif delta > warns:
            yield doubtful(code, detail, gpu.uuid, **compared(delta, "<=", warns, unit))
        else:
            yield good(gpu.uuid, **compared(delta, "<=", warns, unit))

    return judge


ecc_corrected = _growth(
    "ecc_volatile_corrected", "ecc.corrected", "corrected errors", "errors", warns=0, fails=1000
)
pcie_replay = _growth("pcie_replays", "pcie.replay", "replays on PCIe", "replays", warns=10, fails=80)


def remap(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
    model = evidence.expected.gpu
    now = evidence.later(gpu.uuid) or gpu
    has_rows = model.row_remapping if model else now.remap_pending is not None
    yield from (_rows(now) if has_rows else _pages(now))


def _rows(gpu: Gpu) -> Iterator[Check]:
    gap = unanswered(gpu, "remap_failure", "remap_pending")
    if gap:
        yield gap
        return
    counts = (
        f"{gpu.remap_correctable} rows for corrected errors, {gpu.remap_uncorrectable} for uncorrected ones"
    )
    spare = gpu.remap_histogram
    if gpu.unrepairable_memory:
        yield bad("replace", "remap.unrepairable", f"the GPU reports unrepairable memory; {counts}", gpu.uuid)
    elif gpu.remap_failure:
        yield bad("replace", "remap.failure", f"a row could not be remapped; {counts}", gpu.uuid)
    elif gpu.remap_pending:
        yield bad("reboot", "remap.pending", f"a row will be remapped at the next reset; {counts}", gpu.uuid)
    elif spare and spare[-1]:
        yield doubtful("remap.exhausted", f"{spare[-1]} banks have no spare row left", gpu.uuid)
    else:
        yield good(gpu.uuid, counts)


def _pages(gpu: Gpu) -> Iterator[Check]:
    gap = unanswered(gpu, "retired_single_bit", "retired_double_bit", "retired_pending")
    if gap:
        yield gap
        return
    count = (gpu.retired_single_bit or 0) + (gpu.retired_double_bit or 0)
    numbers = compared(count, "<", _RETIRED_WARN, "pages")
    if count >= _RETIRED_FAIL:
        detail, numbers = f"{count} pages are retired, of at most 64", numbers | {"threshold": _RETIRED_FAIL}
        yield bad("replace", "remap.retired", detail, gpu.uuid, **numbers)
    elif gpu.retired_pending:
        yield bad("reboot", "remap.pending", "a page will be retired at the next reset", gpu.uuid)
    elif count >= _RETIRED_WARN or gpu.retired_double_bit:
        detail = f"{count} pages are retired, {gpu.retired_double_bit} for uncorrected errors"
        yield doubtful("remap.retired", detail, gpu.uuid, **numbers)
    else:
        yield good(gpu.uuid, **numbers)


def nvlink_active(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
    size = evidence.expected.size
    if not size or not size.nvlink_links:
        yield absent("no NVLink is used" if size else "the size is unknown", gpu.uuid)
        return
    now = evidence.later(gpu.uuid) or gpu
    if now.mig_current:
        # NVIDIA's guide to the fabric manager: in MIG mode, an A100's links are off. Its parts use none.
        yield absent("the GPU is in MIG mode, which can switch its links off", gpu.uuid)
        return
    gap = unanswered(now, "nvlinks")
    if gap or now.nvlinks is None:
        yield gap or broken("nvml.error", "nvlinks", gpu.uuid)
        return
    active = sum(now.nvlinks)
    numbers = compared(active, "==", size.nvlink_links, "links")
    if active != size.nvlink_links:
        down = ", ".join(str(n) for n, is_up in enumerate(now.nvlinks) if not is_up)
        detail = f"{active} of {size.nvlink_links} links are active; inactive: {down or 'none reported'}"
        yield bad("replace", "nvlink.down", detail, gpu.uuid, **numbers)
    else:
        yield good(gpu.uuid, **numbers)
    yield from _link_errors(evidence, gpu)


def _link_errors(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
    """Yield the faults that the links' counters show. CRC errors are corrected, so only a high rate is a fault."""
    for name in ("nvlink_replays", "nvlink_recoveries", "nvlink_crc_errors"):
        delta = _delta(evidence, gpu, name)
        if isinstance(delta, Check):
            if delta.code == "not-supported":
                yield doubtful("nvlink.uncounted", delta.detail, gpu.uuid)
            else:
                yield delta
            return
        kind = name.removeprefix("nvlink_").replace("_", " ").replace("crc", "CRC")
        detail = f"{delta} {kind} on NVLink under load"
        if name != "nvlink_crc_errors":
            if delta:
                numbers = compared(delta, "==", 0, "errors")
                yield bad("reboot", "nvlink.errors", detail, gpu.uuid, **numbers)
            continue
        rate = delta / max(evidence.load_seconds, 1.0)
        numbers = compared(round(rate, 2), "<", _CRC_PER_SECOND, "errors/s")
        if rate >= _CRC_PER_SECOND:
            yield bad("reboot", "nvlink.crc", detail, gpu.uuid, **numbers)
        elif delta:
            yield doubtful("nvlink.crc", detail, gpu.uuid, **numbers)


def mig_mode(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
    is_enabled = evidence.expected.settings.mig == "enabled"
    if gpu.missing.get("mig_current") == "not-supported" and not is_enabled:
        yield absent("this GPU has no MIG", gpu.uuid)
        return
    gap = unanswered(gpu, "mig_current", "mig_pending")
    if gap:
        yield gap
    elif (gpu.mig_current, gpu.mig_pending) != (is_enabled, is_enabled):
        modes = [("disabled", "enabled")[bool(mode)] for mode in (gpu.mig_current, gpu.mig_pending)]
        detail = f"MIG is {modes[0]} and will be {modes[1]}, {evidence.expected.settings.mig} is configured"
        yield bad(
            "config",
            "mig.mode",
            detail,
            gpu.uuid,
            measured=modes[0],
            threshold=evidence.expected.settings.mig,
        )
    else:
        yield good(gpu.uuid)


def procs(evidence: Evidence, gpu: Gpu) -> Iterator[Check]:
    gap = unanswered(gpu, "processes", "memory_used_bytes")
    if gap or gpu.processes is None or gpu.memory_used_bytes is None:
        yield gap or broken("nvml.error", "processes", gpu.uuid)
        return
    own = evidence.expected.settings.own_processes
    foreign = [process for process in gpu.processes if process.name not in own]
    allowed = _IDLE_BYTES + (0 if gpu.memory_reserved_bytes is not None else _RESERVED_BYTES)
    numbers = compared(gpu.memory_used_bytes >> 20, "<=", allowed >> 20, "MiB")
    if foreign:
        users = ", ".join(f"{process.name or 'process'} ({process.pid})" for process in foreign)
        yield not_made("procs.foreign", f"in use by {users}", gpu.uuid)
    elif gpu.memory_used_bytes > allowed:
        yield not_made(
            "procs.memory", f"{numbers['measured']} MiB are in use by no visible process", gpu.uuid
        )
    else:
        yield good(gpu.uuid, **numbers)
