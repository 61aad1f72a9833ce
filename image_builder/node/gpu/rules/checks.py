"""Every check: what it asks, what fails it, and in which tiers it must have been made. Pure: evidence in, checks out.

A rule judges the node or each GPU and yields at least one check for what it judges. What can't be checked is reported
as ``skip`` or ``error``, never as a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from image_builder.node.errors import NodeError
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
    "dev.nodes": Rule(node.dev_nodes, "the device nodes are there, a CDI spec names as many GPUs"),
    "gpu.count": Rule(
        node.gpu_count, "NVML and the PCI bus have as many GPUs as the size, of its model and memory"
    ),
    "gpu.lost": Rule(node.gpu_lost, "NVML opens every GPU, and still does after the load"),
    "gpu.inforom": Rule(each(gpu.inforom), "the InfoROM is valid", mandatory=()),
    "gpu.recovery_action": Rule(
        each(gpu.recovery_action), "the driver asks for no recovery (since driver 560)", mandatory=()
    ),
    "ecc.mode": Rule(each(gpu.ecc_mode), "ECC is enabled, and stays so"),
    "ecc.uncorrected.volatile": Rule(
        each(gpu.ecc_uncorrected),
        "no uncorrected error since the driver was loaded, nor after the load",
    ),
    "ecc.sram.aggregate": Rule(
        each(gpu.ecc_sram), "SRAM is below its threshold of uncorrected errors; any warns", mandatory=()
    ),
    "ecc.corrected.rate": Rule(
        each(gpu.ecc_corrected), "no corrected error under load (warns), at most 1000"
    ),
    "remap": Rule(
        each(gpu.remap),
        "rows (from A100): none failed to be remapped, none waits for a reset, no bank without spare rows "
        "(warns); pages (V100, T4): fewer than 60 retired (warns from 15), none waits for a reset",
    ),
    "xid.boot": Rule(node.xid_boot, "no Xid of this boot that NVIDIA's catalogue calls a fault"),
    "pcie.link": Rule(
        each(active.pcie_link), "width and generation of the link under load; a hidden one warns"
    ),
    "pcie.replay": Rule(each(gpu.pcie_replay), "at most 10 replays under load (warns), at most 80"),
    "nvlink.active": Rule(
        each(gpu.nvlink_active), "as many active links as the size uses, no new error on them"
    ),
    "fabric": Rule(node.fabric, "the fabric manager is active, each GPU has joined (H100, H200)"),
    "persistence": Rule(each(gpu.persistence), "persistence mode is enabled"),
    "mig.mode": Rule(each(gpu.mig_mode), "MIG is as the pool says, now and after a reset"),
    "procs": Rule(each(gpu.procs), "no foreign process, at most 1 GiB in use"),
    "throttle": Rule(
        each(active.throttle), "no slowdown by heat or power for over 1 s under load", active=True
    ),
    "temp": Rule(
        each(active.temperature), "at least 3 °C to slowdown under load (warns below 8)", active=True
    ),
    "worker": Rule(each(active.worker_ended), "the GPU's process ended by itself, in time", active=True),
    "kat.int": _answers("kat.int", "integer chains give the known answer"),
    "kat.ffma": _answers("kat.ffma", "single precision gives the known answer"),
    "kat.dfma": _answers("kat.dfma", "double precision gives the known answer"),
    "kat.mma": _answers("kat.mma", "tensor products give the known answer"),
    "det.fp32": _answers("det.fp32", "order-dependent sums are, bit by bit, what IEEE 754 says, on each GPU"),
    "cover.sms": Rule(each(active.every_sm), "every SM computed", active=True),
    "mem.pattern": _answers("mem.pattern", "patterns are read back from memory as they were written"),
    "cover.memory": Rule(
        each(active.enough_memory),
        "25 % (boot-quick) or 95 % of the free memory were tested",
        active=True,
    ),
    "bw.hbm": Rule(
        each(active.hbm), "memory bandwidth: its floor, and 0.92 of the node's median", active=True
    ),
    "bw.h2d": _floor(
        "bw.h2d",
        "h2d_floor_gbps",
        "copies to the GPU, one by one, from the best NUMA node: their floor, and the bytes arrive",
    ),
    "bw.d2h": _floor(
        "bw.d2h", "d2h_floor_gbps", "copies from the GPU, likewise: their floor, and the bytes arrive"
    ),
    "bw.p2p": Rule(
        each(active.links),
        "copies between linked GPUs: their floor, the bytes arrive",
        active=True,
        mandatory=_FULL,
    ),
    "perf.mma": Rule(
        each(active.mma),
        "tensor products: 0.90 of the node's median, 0.85 of the model's reference where it has one",
        active=True,
        mandatory=_FULL,
    ),
    "ib.links": Rule(node.ib_links, "InfiniBand ports: as many as the size has, up, at their rate"),
    "nvme.local": Rule(node.nvme_local, "local NVMe disks: as many as the size has", mandatory=()),
    "mem.host": Rule(
        node.mem_host, "the machine has 0.90 of the size's memory (warns below 0.97)", mandatory=()
    ),
}


def judge(evidence: Evidence) -> tuple[Check, ...]:
    """Return all checks. A rule that yields nothing, or fails itself, is a check that could not be made."""
    unknown = sorted(set(evidence.expected.settings.waived) - set(RULES))
    if unknown:
        raise NodeError("gpu.settings", f"waived: unknown check {', '.join(unknown)}")
    checks: list[Check] = []
    for name, rule in RULES.items():
        outcomes = list(rule.judge(evidence)) or [broken("rule.silent", "the rule gave no result")]
        checks += [replace(check, id=name) for check in outcomes]
    return tuple(policy.applied(evidence, checks, lambda name: RULES[name].active))


def missing(checks: Sequence[Check], tier: Tier) -> list[Check]:
    """Return the checks that this tier doesn't pass without, and that were not made."""
    return [
        check
        for check in checks
        if (check.status == "error" and (tier in RULES[check.id].mandatory))
        or (check.status == "skip" and check.code != NOT_APPLICABLE and tier in RULES[check.id].mandatory)
    ]
