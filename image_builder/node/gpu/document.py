"""The result: the verdict on all checks, and one JSON document (docs/reference/gpu-smoke.schema.json) or text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from image_builder.node.finding import ACTIONS, Action
from image_builder.node.gpu import xids
from image_builder.node.gpu.evidence import NOT_APPLICABLE, NOT_RUN, Evidence
from image_builder.node.gpu.model import (
    CONFIGURATION,
    ENDINGS,
    HARDWARE,
    IMAGE,
    INCONCLUSIVE,
    PASS,
    REBOOT,
    Check,
    Gpu,
    Seen,
    Tier,
    Verdict,
    Worker,
    Xid,
)
from image_builder.node.gpu.rules.checks import missing
from image_builder.node.gpu.rules.policy import UNANSWERED

SCHEMA_VERSION = "1.0"
_REPORTED = ("fail", "error", "warn", "skip")
# Worst first: if the driver or the image is defective, its findings about the hardware are in doubt.
_ORDER = (IMAGE, HARDWARE, REBOOT, CONFIGURATION)
_SUMMARY_CHARACTERS = 200


def verdict(checks: Sequence[Check], tier: Tier) -> Verdict:
    """Return the verdict: the worst failure, else inconclusive if a required check was not made, else a pass."""
    failed = [check for check in checks if check.status == "fail"]
    for exit_code in _ORDER:
        action = ENDINGS[exit_code].action
        worst = [check for check in failed if check.action == action]
        if worst:
            return _about(worst, exit_code, action, len(failed))
    if failed:  # a failure without an action still counts
        return _about(failed, HARDWARE, "replace", len(failed))
    # Causes first, then the checks that were not run because of them.
    gaps = sorted(missing(checks, tier), key=lambda check: check.code == NOT_RUN)
    if gaps:
        # A test or a GPU that is itself in doubt comes before checks that merely couldn't be made.
        gaps.sort(key=lambda check: -ACTIONS.index(check.action))
        return _about(gaps, INCONCLUSIVE, gaps[0].action, len(gaps))
    if not checks:
        return Verdict(INCONCLUSIVE, "none", "nothing was checked", "not-run")
    warned = [check for check in checks if check.status == "warn"]
    summary = f"{len(checks)} checks" + (f", {len(warned)} of them warn" if warned else "")
    doubt = next((check for check in warned if check.code in UNANSWERED), None)
    if doubt:
        summary += f": {doubt.id} {doubt.gpu}: {doubt.detail}"
    return Verdict(PASS, "none", summary[:_SUMMARY_CHARACTERS])


def _about(checks: Sequence[Check], exit_code: int, action: Action, count: int) -> Verdict:
    """Return the verdict whose summary describes the first of these checks; ``count`` is the total number."""
    first = checks[0]
    where = f" {first.gpu}" if first.gpu else ""
    others = f" (and {count - 1} more)" if count > 1 else ""
    text = f"{first.id}{where}: {first.detail or first.code}"
    return Verdict(exit_code, action, text[: _SUMMARY_CHARACTERS - len(others)] + others, first.code)


# -- the document ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The run itself: its time, duration and seed. ``started`` is RFC 3339."""

    tool_version: str
    tier: Tier
    started: str
    seconds: float
    seed: int


def document(run: Run, evidence: Evidence, checks: Sequence[Check], verdict: Verdict) -> dict[str, Any]:
    """Return the whole document."""
    return {
        **bare(run, evidence.before.machine.boot_id, verdict),
        "node": _node(evidence),
        "driver": _driver(evidence),
        "expect": {
            "sku_table_version": evidence.expected.table_version,
            "xid_table_version": evidence.catalogue.version,
            "gpu_count": evidence.expected.count,
            "thresholds_overridden": list(evidence.expected.overridden),
            "waived": dict(evidence.expected.settings.waived),
            "mode": "observe" if evidence.expected.observes else "enforce",
            "calibrated": evidence.expected.calibrated,
        },
        "gpus": [_gpu(gpu) for gpu in evidence.gpus],
        "checks": [_check(check) for check in checks],
        "xids": _xids(evidence, evidence.latest),
        "coverage": _coverage(evidence.workers),
    }


def bare(run: Run, boot_id: str, verdict: Verdict) -> dict[str, Any]:
    """Return the document of a run without evidence: its settings are invalid, or it didn't finish."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tool_version": run.tool_version,
        "tier": run.tier,
        "seed": run.seed,
        "boot_id": boot_id,
        "started": run.started,
        "duration_s": round(run.seconds, 3),
        "node": {},
        "driver": {},
        "expect": {},
        "gpus": [],
        "checks": [],
        "xids": [],
        "coverage": _coverage(()),
        "verdict": _verdict(verdict),
    }


def _node(evidence: Evidence) -> dict[str, Any]:
    machine = evidence.before.machine
    return {
        "name": machine.name,
        "vm_size": machine.vm_size,
        "vm_size_from": machine.vm_size_from,
        "vm_id": machine.vm_id,
        "zone": machine.zone,
        "image_version": machine.image,
        "kernel": machine.kernel,
    }


def _driver(evidence: Evidence) -> dict[str, Any]:
    machine = evidence.before.machine
    return {
        "pinned": evidence.expected.settings.driver_version,
        "loaded": machine.driver_loaded,
        "flavour": machine.flavour,
        "nvml": evidence.before.nvml.driver,
        "nvml_error": evidence.before.nvml.error,
        "libcuda": machine.libraries.get("libcuda", ""),
        "libnvidia_ml": machine.libraries.get("libnvidia-ml", ""),
        "fabricmanager": machine.libraries.get("fabricmanager", ""),
    }


def _gpu(gpu: Gpu) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "pci": gpu.pci,
        "serial": gpu.serial,
        "vbios": gpu.vbios,
        "name": gpu.name,
        "not_answered": dict(gpu.missing),
    }


def _check(check: Check) -> dict[str, Any]:
    return {
        "id": check.id,
        "gpu_uuid": check.gpu,
        "status": check.status,
        "measured": check.measured,
        "threshold": check.threshold,
        "op": check.op,
        "unit": check.unit,
        "severity": "warn" if check.status == "warn" else "fail",
        "action": check.action,
        "reason_code": check.code,
        "detail": check.detail,
        "duration_s": check.seconds,
        "seed": check.seed,
    }


def _xids(evidence: Evidence, node: Seen) -> list[dict[str, Any]]:
    return [
        {
            "xid": xid.number,
            "pci": xid.pci,
            "mono_us": xid.monotonic_us,
            "class": _class(evidence, xid),
            "during_test": xids.is_during(xid, evidence.began_us),
            "raw": xid.raw,
        }
        for xid in node.xids
    ]


def _class(evidence: Evidence, xid: Xid) -> str:
    if xid.switch:
        return "SXID_FATAL" if xid.fatal else "SXID"
    return evidence.catalogue.class_of(xid).name


def _coverage(workers: Sequence[Worker]) -> dict[str, Any]:
    def percent(worker: Worker) -> float:
        free = worker.memory_bytes
        return round(100 * worker.memory_tested_bytes / free, 1) if free else 0.0

    return {
        "gpus_tested": sum(worker.ended == "done" for worker in workers),
        "sms_seen": [worker.sms_seen for worker in workers],
        "mem_tested_pct": [percent(worker) for worker in workers],
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "status": verdict.status,
        "exit_code": verdict.exit_code,
        "action": verdict.action,
        "retry_after_reboot": verdict.retry_after_reboot,
        "reason_code": verdict.code,
        "summary": verdict.summary,
    }


def text(document: dict[str, Any]) -> str:
    """Return the result as text: every GPU, every check that isn't a plain pass, and the verdict."""
    return (
        "\n".join([*_gpu_lines(document), *_check_lines(document), *_verdict_lines(document["verdict"])])
        + "\n"
    )


def _gpu_lines(document: dict[str, Any]) -> Iterable[str]:
    node = document["node"]
    if node:
        loaded = document["driver"]["loaded"] or "none"
        yield f"{node['vm_size'] or 'unknown size'}, kernel {node['kernel']}, driver {loaded}"
    for gpu in document["gpus"]:
        yield f"GPU {gpu['index']}  {gpu['name']}  {gpu['pci']}  {gpu['uuid']}"


def _check_lines(document: dict[str, Any]) -> Iterable[str]:
    """Yield one line per reason: many checks on many GPUs can share one."""
    numbers = {gpu["uuid"]: str(gpu["index"]) for gpu in document["gpus"]}
    lines: dict[tuple[str, str, str], tuple[dict[str, None], dict[str, None]]] = {}
    for check in document["checks"]:
        if check["status"] != "pass" and check["reason_code"] != NOT_APPLICABLE:
            key = (check["status"], check["reason_code"], check["detail"])
            names, gpus = lines.setdefault(key, ({}, {}))
            names[check["id"]] = None
            if check["gpu_uuid"]:
                gpus[numbers.get(check["gpu_uuid"], check["gpu_uuid"])] = None
    for status in _REPORTED:
        for (its, code, detail), (names, gpus) in lines.items():
            if its == status:
                where = f" on GPU {', '.join(gpus)}" if gpus else ""
                yield f"{status.upper():5} {', '.join(names)}{where}: {code}{': ' if detail else ''}{detail}"
    passed = sum(check["status"] == "pass" for check in document["checks"])
    if document["checks"]:
        yield f"{passed} of {len(document['checks'])} checks passed"


def _verdict_lines(verdict: dict[str, Any]) -> Iterable[str]:
    action = f", {verdict['action']}" if verdict["action"] != "none" else ""
    yield f"{verdict['status']} (exit {verdict['exit_code']}{action}): {verdict['summary']}"
