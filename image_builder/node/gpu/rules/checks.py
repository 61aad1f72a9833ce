"""Every check: what it requires, its rule, and the tiers in which it is mandatory. Pure: evidence in, checks out.

A rule judges the node or each GPU, and yields at least one check for the node or per GPU. Anything that can't be
checked is reported as ``skip`` or ``error``, never as a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from image_builder.node.errors import NodeError
from image_builder.node.gpu import settings
from image_builder.node.gpu.evidence import NOT_APPLICABLE, Evidence, broken
from image_builder.node.gpu.model import TIERS, Check, Tier
from image_builder.node.gpu.rules import active, gpu, node, policy
from image_builder.node.gpu.rules.gpu import each

_FULL: tuple[Tier, ...] = ("boot-full", "periodic")


@dataclass(frozen=True)
class Rule:
    """A check. ``asks`` is for the reference page; ``mandatory`` are the tiers that don't pass without it."""

    judge: Callable[[Evidence], Iterable[Check]]
    asks: str
    active: bool = False
    mandatory: tuple[Tier, ...] = TIERS


def _floor(id: str, key: str, asks: str) -> Rule:
    return Rule(each(active.floor(id, key)), asks, active=True)


def _answers(id: str, asks: str) -> Rule:
    return Rule(each(active.answers(id)), asks, active=True)


# In the order of the document.
RULES: Mapping[str, Rule] = {
    "sku.known": Rule(node.sku_known, "the VM size is in the table"),
    "driver.loaded": Rule(node.driver_loaded, "the loaded driver is the baked one: version, flavour, kernel"),
    "driver.match": Rule(
        node.driver_match, "driver, NVML, libcuda, libnvidia-ml and fabric manager have one version"
    ),
    "driver.nouveau": Rule(node.driver_nouveau, "nouveau is not loaded"),
    "dev.nodes": Rule(
        node.dev_nodes,
        "the device nodes exist, and without MIG the CDI specification has the same number of GPUs",
    ),
    "gpu.count": Rule(
        node.gpu_count,
        "NVML and the PCI bus show as many GPUs as the VM size has, of its model and with its memory",
    ),
    "gpu.lost": Rule(node.gpu_lost, "NVML can open every GPU, before and after the load"),
    "gpu.inforom": Rule(each(gpu.inforom), "the InfoROM is valid", mandatory=()),
    "gpu.recovery_action": Rule(
        each(gpu.recovery_action), "the driver doesn't request a recovery (from driver 560)", mandatory=()
    ),
    "ecc.mode": Rule(each(gpu.ecc_mode), "ECC is enabled, also after the next reset"),
    "ecc.uncorrected.volatile": Rule(
        each(gpu.ecc_uncorrected),
        "no uncorrected error since the driver was loaded, the load included",
    ),
    "ecc.sram.aggregate": Rule(
        each(gpu.ecc_sram),
        "uncorrected SRAM errors are below their threshold (one or more: warning)",
        mandatory=(),
    ),
    "ecc.corrected.rate": Rule(
        each(gpu.ecc_corrected), "at most 1000 corrected errors under load (one or more: warning)"
    ),
    "remap": Rule(
        each(gpu.remap),
        "rows (from A100): no remapping failed or waits for a reset, every bank has spare rows (else: warning); "
        "pages (V100, T4): fewer than 60 are retired (15 or more: warning), none waits for a reset",
    ),
    "xid.boot": Rule(node.xid_boot, "no Xid since boot that NVIDIA's catalogue lists as a fault"),
    "pcie.link": Rule(
        each(active.pcie_link), "the link has its full width and generation under load (hidden: warning)"
    ),
    "pcie.replay": Rule(each(gpu.pcie_replay), "at most 80 replays under load (more than 10: warning)"),
    "nvlink.active": Rule(
        each(gpu.nvlink_active),
        "without MIG, as many links are active as the VM size uses, without new errors",
    ),
    "fabric": Rule(
        node.fabric, "the fabric manager is active, and each GPU has joined the fabric (H100, H200)"
    ),
    "persistence": Rule(each(gpu.persistence), "persistence mode is enabled"),
    "mig.mode": Rule(each(gpu.mig_mode), "MIG mode is as the pool's settings say, now and after a reset"),
    "procs": Rule(each(gpu.procs), "no other process uses the GPU, and at most 1 GiB is in use"),
    "throttle": Rule(
        each(active.throttle), "no thermal or power slowdown for more than 1 s under load", active=True
    ),
    "temp": Rule(
        each(active.temperature),
        "at least 3 °C below the slowdown temperature under load (below 8: warning)",
        active=True,
    ),
    "worker": Rule(each(active.worker_ended), "the GPU's test process ended by itself, in time", active=True),
    "kat.int": _answers("kat.int", "integer chains give the known answer"),
    "kat.ffma": _answers("kat.ffma", "single precision gives the known answer"),
    "kat.dfma": _answers("kat.dfma", "double precision gives the known answer"),
    "kat.mma": _answers("kat.mma", "tensor products give the known answer"),
    "det.fp32": _answers("det.fp32", "order-dependent sums equal those of IEEE 754 bit by bit, on each GPU"),
    "cover.sms": Rule(each(active.every_sm), "every SM computed", active=True),
    "mem.pattern": _answers("mem.pattern", "patterns are read back from memory as they were written"),
    "cover.memory": Rule(
        each(active.enough_memory),
        "25 % (boot-quick) or 95 % of the free memory was tested",
        active=True,
    ),
    "bw.hbm": Rule(
        each(active.hbm), "memory bandwidth is at least its floor and 0.92 of the node's median", active=True
    ),
    "bw.h2d": _floor(
        "bw.h2d",
        "h2d_floor_gbps",
        "copies to the GPU, one at a time, from the best NUMA node: at least the floor, and intact",
    ),
    "bw.d2h": _floor(
        "bw.d2h", "d2h_floor_gbps", "copies from the GPU, in the same way: at least the floor, and intact"
    ),
    "bw.p2p": Rule(
        each(active.links),
        "copies between linked GPUs: at least the floor, and intact",
        active=True,
        mandatory=_FULL,
    ),
    "perf.mma": Rule(
        each(active.mma),
        "tensor products: at least 0.90 of the node's median, and 0.85 of the model's reference if it has one",
        active=True,
        mandatory=_FULL,
    ),
    "ib.links": Rule(node.ib_links, "as many InfiniBand ports as the VM size has are up, at their full rate"),
    "nvme.local": Rule(node.nvme_local, "as many local NVMe disks as the VM size has", mandatory=()),
    "mem.host": Rule(
        node.mem_host,
        "the machine has at least 0.90 of the VM size's memory (below 0.97: warning)",
        mandatory=(),
    ),
}


def parse(document: Mapping[str, Any]) -> settings.Settings:
    """Return the GPUs' settings, in which only known checks are waived. Raises NodeError (``gpu.settings``)."""
    parsed = settings.parse(document)
    _require_known(parsed)
    return parsed


def _require_known(given: settings.Settings) -> None:
    if unknown := sorted(set(given.waived) - set(RULES)):
        raise NodeError("gpu.settings", f"waived: unknown check {', '.join(unknown)}")


def judge(evidence: Evidence) -> tuple[Check, ...]:
    """Return all checks. A rule that yields nothing counts as a check that could not be made."""
    _require_known(evidence.expected.settings)
    checks: list[Check] = []
    for name, rule in RULES.items():
        outcomes = list(rule.judge(evidence)) or [broken("rule.silent", "the rule gave no result")]
        checks += [replace(check, id=name) for check in outcomes]
    return tuple(policy.applied(evidence, checks, lambda name: RULES[name].active))


def missing(checks: Sequence[Check], tier: Tier) -> list[Check]:
    """Return the checks that are mandatory in this tier but were not made."""
    return [
        check
        for check in checks
        if (check.status == "error" and (tier in RULES[check.id].mandatory))
        or (check.status == "skip" and check.code != NOT_APPLICABLE and tier in RULES[check.id].mandatory)
    ]
