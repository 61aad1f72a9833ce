"""Faults of GPUs: recorded ones, and one field or bit of a healthy node changed at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from image_builder.node.gpu.evidence import Evidence
from image_builder.node.sysfs import Port
from tests.support.gpu_stand_in.recordings import (
    BEGAN_US,
    Change,
    gpu,
    later,
    library,
    machine,
    measured,
    recorded,
    samples,
    settings,
    worker,
    xid,
)

# -- recorded from broken GPUs, or from ones in use --------------------------------------------------------------


def power_brake() -> Change:
    """Slow down the first GPU as recorded from an H100: HW Slowdown and HW Power Brake."""
    bits = recorded("h100-sxm5-80gb-power-brake")[0].throttle
    assert bits == 0x88
    return samples(0.0, 0.5, 1.0, 1.5, throttle=bits)


# https://github.com/stas00/ml-engineering, debugging: an A100-SXM4-80GB after Xid 63.
PENDING = {
    "remap_correctable": 1,
    "remap_uncorrectable": 0,
    "remap_pending": True,
    "remap_failure": False,
    "remap_histogram": (639, 1, 0, 0, 0),
    "ecc_volatile_corrected": 177,
    "ecc_aggregate_corrected": 177,
}
# From the same source, another A100: after Xid 94.
SRAM = {
    "ecc_volatile_uncorrected": 1,
    "ecc_volatile_uncorrected_sram": 1,
    "ecc_aggregate_uncorrected": 5,
    "ecc_aggregate_uncorrected_sram": 5,
}
# https://github.com/Azure/azhpc-diagnostics/issues/73: `nvidia-smi nvlink -s` of GPU 3 of an ND40rs_v2.
LINKS = (True, True, True, False, True, False)
XID_63 = "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate."
XID_74 = (
    "NVRM: Xid (PCI:0000:b9:00): 74, pid=<unknown>, name=<unknown>, NVLink: fatal error detected on link 6"
    "(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)"
)
XID_79 = "NVRM: Xid (PCI:0002:00:00): 79, pid=1582259, name=nvc:[driver], GPU has fallen off the bus."
XID_154 = (
    "NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
)
# The same message, once the action is done.
XID_154_OVER = (
    "NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
)
# As the open driver writes them, taken from other people's logs.
SXID_FATAL = "nvidia-nvswitch0: SXid (PCI:0000:00:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"
SXID = "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)"
XID_31 = "NVRM: Xid (PCI:0001:00:00): 31, pid=7, name=python3, MMU Fault"
XID_999 = "NVRM: Xid (PCI:0001:00:00): 999, pid=7"
XID_95_MIG = "NVRM: Xid (PCI:0001:00:00 GPU-I:05): 95, pid=7062, Uncontained: LTC TAG (0x2,0x1). RST: Yes"
XID_145 = "NVRM: Xid (PCI:0008:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 05 (0x004505c6)"
XID_GARBLED = "NVRM: Xid (PCI:0001:00:00): ?, pid=7"
OFF = "NVRM: GPU 0000:09:00.0: GPU has fallen off the bus."
MIG = recorded("a100-sxm4-80gb-mig")[0]
A100_BUSY = recorded("a100-sxm4-80gb-busy")[0]
T4_BUSY = recorded("t4-busy")[0]
V100 = recorded("v100-pcie-16gb")[0]

# Name: the node, the change, the check that reports it, its status and code, and the exit code.
RECORDED: dict[str, tuple[str, Change, str, str, str, int]] = {
    "power brake": ("H100", power_brake(), "throttle", "fail", "throttle.sustained", 1),
    "row pending": ("A100", gpu(3, **PENDING), "remap", "fail", "remap.pending", 2),
    "SRAM": ("A100", gpu(2, **SRAM), "ecc.uncorrected.volatile", "fail", "ecc.uncorrected", 2),
    "links": ("V100 SXM2", gpu(3, nvlinks=LINKS), "nvlink.active", "fail", "nvlink.down", 1),
    "Xid 74": ("H100", xid(XID_74), "xid.boot", "fail", "xid.74", 2),
    "Xid 79": ("H100", xid(XID_79), "xid.boot", "fail", "xid.79", 1),
    "Xid 154": ("H200", xid(XID_154), "xid.boot", "fail", "xid.154", 2),
    "fell off the bus": ("T4", xid(OFF), "xid.boot", "fail", "xid.79", 1),
    "MIG": (
        "A100",
        gpu(0, mig_current=MIG.mig_current, mig_pending=MIG.mig_pending),
        "mig.mode",
        "fail",
        "mig.mode",
        4,
    ),
    "training": (
        "A100",
        gpu(0, processes=A100_BUSY.processes, memory_used_bytes=A100_BUSY.memory_used_bytes),
        "procs",
        "skip",
        "procs.foreign",
        3,
    ),
    "python": (
        "T4",
        gpu(0, processes=T4_BUSY.processes, memory_used_bytes=T4_BUSY.memory_used_bytes),
        "procs",
        "skip",
        "procs.foreign",
        3,
    ),
    "no daemon": (
        "V100",
        gpu(0, persistence=V100.persistence),
        "persistence",
        "fail",
        "persistence.disabled",
        4,
    ),
}

# -- one field or bit --------------------------------------------------------------------------------------------

DOWN = Port("mlx5_3", 1, "DOWN", "Polling", 400, "InfiniBand")
SLOW = Port("mlx5_3", 1, "ACTIVE", "LinkUp", 200, "InfiniBand")


def port(changed: Port) -> Change:
    def change(evidence: Evidence) -> Evidence:
        ports = list(evidence.before.machine.ports)
        ports[3] = changed
        return machine(ports=tuple(ports))(evidence)

    return change


def libraries(**versions: str) -> Change:
    def change(evidence: Evidence) -> Evidence:
        installed = {**evidence.before.machine.libraries, **versions}
        return machine(libraries={name: version for name, version in installed.items() if version})(evidence)

    return change


def unsized(**fields: Any) -> Change:
    """Return a change to a VM size that isn't in the table."""

    def change(evidence: Evidence) -> Evidence:
        changed = machine(**{"vm_size": "Standard_ND999_X_v9"} | fields)(evidence)
        expected = replace(changed.expected, size=None, gpu=None, count=None)
        return replace(changed, expected=expected)

    return change


def halved(evidence: Evidence) -> Evidence:
    """Give one of eight GPUs 0.9 of the others' memory bandwidth, which is above its floor."""
    return measured("bw.hbm", 5, measured=evidence.workers[5].measurements[6].measured * 0.9)(evidence)  # type: ignore[operator]


FIELDS: dict[str, tuple[str, Change, str, str, str, int]] = {
    "unknown size": ("H100", unsized(), "sku.known", "fail", "sku.unknown", 4),
    "no size": ("H100", unsized(vm_size=""), "sku.known", "error", "sku.unanswered", 3),
    "another version": (
        "H100",
        settings(driver_version="580.159.04"),
        "driver.loaded",
        "fail",
        "driver.version",
        5,
    ),
    "another kernel": (
        "H100",
        settings(kernel="6.1.0-41-amd64"),
        "driver.loaded",
        "fail",
        "driver.kernel",
        5,
    ),
    "another flavour": (
        "H100",
        settings(driver_flavour="proprietary"),
        "driver.loaded",
        "fail",
        "driver.flavour",
        5,
    ),
    "open on Volta": ("V100", machine(flavour="open"), "driver.loaded", "fail", "driver.flavour", 5),
    "no driver": ("H100", machine(driver_loaded=""), "driver.loaded", "fail", "driver.absent", 5),
    "stale module": (
        "H100",
        machine(modules={"nvidia": "1.0"}),
        "driver.loaded",
        "fail",
        "driver.version",
        5,
    ),
    "libcuda": ("H200", libraries(libcuda="550.90.13"), "driver.match", "fail", "driver.mismatch", 5),
    "libnvidia-ml": (
        "H200",
        libraries(**{"libnvidia-ml": "535.1.1"}),
        "driver.match",
        "fail",
        "driver.mismatch",
        5,
    ),
    "fabric manager's version": (
        "A100",
        libraries(fabricmanager="525.60.14"),
        "driver.match",
        "fail",
        "driver.mismatch",
        5,
    ),
    "no libcuda": ("T4", libraries(libcuda=""), "driver.match", "fail", "driver.library", 5),
    "no fabric manager": (
        "A100",
        libraries(fabricmanager=""),
        "driver.match",
        "fail",
        "driver.fabricmanager",
        5,
    ),
    "NVML's version": ("T4", library(driver="515.105.02"), "driver.match", "fail", "driver.mismatch", 5),
    "nouveau": ("T4", machine(modules={"nouveau": ""}), "driver.nouveau", "fail", "driver.nouveau", 5),
    "a node is missing": (
        "A100",
        machine(nodes=("nvidia0", "nvidiactl", "nvidia-uvm")),
        "dev.nodes",
        "fail",
        "dev.nodes",
        4,
    ),
    "no uvm": ("T4", machine(nodes=("nvidia0", "nvidiactl")), "dev.nodes", "fail", "dev.nodes", 4),
    "CDI": ("H100", machine(cdi_gpus=7), "dev.nodes", "fail", "dev.cdi", 4),
    "NVML counts seven": ("H100", library(count=7), "gpu.count", "fail", "gpu.count", 2),
    "another model": ("H100", gpu(6, name="NVIDIA H100 PCIe"), "gpu.count", "fail", "gpu.model", 4),
    "less memory": ("H100", gpu(6, memory_total_bytes=79000 << 20), "gpu.count", "fail", "gpu.memory", 1),
    "lost": ("H100", library(lost={"7": "the GPU is lost (15)"}), "gpu.lost", "fail", "gpu.lost", 2),
    "InfoROM": ("V100", gpu(0, inforom_valid=False), "gpu.inforom", "fail", "gpu.inforom", 1),
    "recovery": (
        "V100",
        gpu(0, recovery_action="gpu-reset"),
        "gpu.recovery_action",
        "fail",
        "gpu.recovery-action",
        2,
    ),
    "ECC pending": ("A100", gpu(1, ecc_pending=False), "ecc.mode", "fail", "ecc.pending", 2),
    "ECC off": ("T4", gpu(0, ecc_current=False, ecc_pending=False), "ecc.mode", "fail", "ecc.disabled", 4),
    "uncorrected under load": (
        "H200",
        later(7, ecc_volatile_uncorrected=1),
        "ecc.uncorrected.volatile",
        "fail",
        "ecc.uncorrected",
        2,
    ),
    "SRAM's threshold": (
        "H100",
        gpu(0, sram_threshold_exceeded=True),
        "ecc.sram.aggregate",
        "fail",
        "ecc.sram-threshold",
        1,
    ),
    "SRAM's life": (
        "H100",
        gpu(0, ecc_aggregate_uncorrected_sram=1),
        "ecc.sram.aggregate",
        "warn",
        "ecc.sram-aggregate",
        0,
    ),
    "corrected": (
        "H100",
        later(0, ecc_volatile_corrected=1001),
        "ecc.corrected.rate",
        "fail",
        "ecc.corrected",
        1,
    ),
    "a few corrected": (
        "H100",
        later(0, ecc_volatile_corrected=1000),
        "ecc.corrected.rate",
        "warn",
        "ecc.corrected",
        0,
    ),
    "row failed": ("H200", gpu(4, remap_failure=True), "remap", "fail", "remap.failure", 1),
    "unrepairable": ("H200", gpu(4, unrepairable_memory=True), "remap", "fail", "remap.unrepairable", 1),
    "no spare row": (
        "H200",
        gpu(4, remap_histogram=(0, 0, 0, 3071, 1)),
        "remap",
        "warn",
        "remap.exhausted",
        0,
    ),
    "pages": ("V100", gpu(0, retired_single_bit=60), "remap", "fail", "remap.retired", 1),
    "some pages": ("V100", gpu(0, retired_single_bit=59), "remap", "warn", "remap.retired", 0),
    "page pending": ("V100", gpu(0, retired_pending=True), "remap", "fail", "remap.pending", 2),
    "narrow": ("H100", samples(0.0, 0.5, 1.0, 1.5, pcie_width=8), "pcie.link", "fail", "pcie.width", 1),
    "old generation": (
        "H100",
        samples(0.0, 0.5, 1.0, 1.5, pcie_generation=4),
        "pcie.link",
        "fail",
        "pcie.generation",
        1,
    ),
    "hidden link": ("H100", samples(0.0, 0.5, 1.0, 1.5, pcie_width=0), "pcie.link", "warn", "pcie.hidden", 0),
    "replays": ("T4", later(0, pcie_replays=81), "pcie.replay", "fail", "pcie.replay", 1),
    "a few replays": ("T4", later(0, pcie_replays=11), "pcie.replay", "warn", "pcie.replay", 0),
    "a replay of links": ("A100", later(3, nvlink_replays=1), "nvlink.active", "fail", "nvlink.errors", 2),
    "a recovery of links": (
        "A100",
        later(3, nvlink_recoveries=1),
        "nvlink.active",
        "fail",
        "nvlink.errors",
        2,
    ),
    # The load of these nodes took 1.5 s.
    "a CRC error of links": ("A100", later(3, nvlink_crc_errors=1), "nvlink.active", "warn", "nvlink.crc", 0),
    "some CRC errors": ("A100", later(3, nvlink_crc_errors=149), "nvlink.active", "warn", "nvlink.crc", 0),
    "CRC errors at a rate": (
        "A100",
        later(3, nvlink_crc_errors=150),
        "nvlink.active",
        "fail",
        "nvlink.crc",
        2,
    ),
    "fabric manager down": (
        "A100",
        machine(fabric_manager="failed"),
        "fabric",
        "fail",
        "fabric.manager",
        2,
    ),
    "not joined": ("H100", gpu(2, fabric_state="in-progress"), "fabric", "fail", "fabric.state", 2),
    "joined badly": (
        "H100",
        gpu(2, fabric_status="unknown error (999)"),
        "fabric",
        "fail",
        "fabric.state",
        2,
    ),
    "MIG pending": ("H100", gpu(0, mig_pending=True), "mig.mode", "fail", "mig.mode", 4),
    "MIG wanted": ("H100", settings(mig="enabled"), "mig.mode", "fail", "mig.mode", 4),
    "MIG wanted, none": ("T4", settings(mig="enabled"), "mig.mode", "skip", "not-supported", 3),
    "memory in use": (
        "T4",
        gpu(0, memory_used_bytes=(1 << 30) + (1 << 20)),
        "procs",
        "skip",
        "procs.memory",
        3,
    ),
    "short throttling": ("T4", samples(0.5, throttle=0x40), "throttle", "warn", "throttle.short", 0),
    "hot": ("H100", samples(1.0, temperature_margin_c=2), "temp", "fail", "temp.margin", 1),
    "warm": ("H100", samples(1.0, temperature_margin_c=7), "temp", "warn", "temp.margin", 0),
    "hot, by its threshold": ("V100", samples(1.0, temperature_c=85), "temp", "fail", "temp.margin", 1),
    "hung": ("H100", worker(3, ended="hung: unkillable"), "worker", "fail", "worker.unkillable", 2),
    "late": ("H100", worker(3, ended="killed: deadline"), "worker", "fail", "worker.late", 1),
    "crashed": ("H100", worker(3, ended="crashed: signal 11"), "worker", "fail", "worker.crashed", 1),
    "worker's error": ("H100", worker(3, ended="error: no CUDA"), "worker", "error", "worker.error", 3),
    "an SM unseen": ("H100", worker(3, sms_seen=107), "cover.sms", "error", "coverage.sms", 3),
    "memory untested": (
        "H100",
        worker(3, memory_tested_bytes=1),
        "cover.memory",
        "error",
        "coverage.memory",
        3,
    ),
    "memory not free": (
        "H100",
        worker(3, memory_bytes=1 << 30, memory_tested_bytes=1 << 30),
        "cover.memory",
        "error",
        "coverage.free",
        3,
    ),
    "slow HBM": ("H200", measured("bw.hbm", 7, measured=2332.9), "bw.hbm", "fail", "bandwidth.low", 1),
    "HBM below the median": ("H200", halved, "bw.hbm", "fail", "below.median", 1),
    "slow h2d": ("H200", measured("bw.h2d", 7, measured=47.9), "bw.h2d", "fail", "bandwidth.low", 1),
    "slow d2h": ("T4", measured("bw.d2h", 0, measured=4.9), "bw.d2h", "fail", "bandwidth.low", 1),
    "slow p2p": ("A100", measured("bw.p2p", 7, measured=237.9), "bw.p2p", "fail", "bandwidth.low", 1),
    "wrong copy": (
        "A100",
        measured("bw.h2d", 7, status="failed", measured=None, detail="byte 5"),
        "bw.h2d",
        "fail",
        "answer.wrong",
        1,
    ),
    "slow tensors": ("A100", measured("perf.mma", 1, measured=89.9), "perf.mma", "fail", "below.median", 1),
    "InfiniBand down": ("H100", port(DOWN), "ib.links", "fail", "ib.down", 2),
    "InfiniBand slow": ("H100", port(SLOW), "ib.links", "fail", "ib.rate", 2),
    "all InfiniBand down": ("H100", machine(ports=(DOWN,) * 8), "ib.links", "error", "ib.down", 3),
    "all InfiniBand slow": ("H100", machine(ports=(SLOW,) * 8), "ib.links", "error", "ib.rate", 3),
    "InfiniBand missing": ("H100", machine(ports=()), "ib.links", "fail", "ib.count", 2),
    "InfiniBand without driver": (
        "H100",
        machine(ports=(), modules={"nvidia_uvm": ""}),
        "ib.links",
        "fail",
        "ib.driver",
        5,
    ),
    "fatal SXid": ("H100", xid(SXID_FATAL), "xid.boot", "fail", "sxid.20034", 2),
    "recovered": ("H200", xid(XID_154_OVER), "xid.boot", "pass", "", 0),
    "SXid": ("H100", xid(SXID), "xid.boot", "pass", "", 0),
    "Xid of an instance": ("H100", xid(XID_95_MIG), "xid.boot", "fail", "xid.95", 2),
    "nonfatal NVLink": ("H200", xid(XID_145), "xid.boot", "warn", "xid.145", 0),
    "unreadable Xid": ("H100", xid(XID_GARBLED), "xid.boot", "error", "xid.unreadable", 3),
    "our own Xid": ("H100", xid(XID_31, BEGAN_US), "xid.boot", "error", "xid.31", 3),
    "an Xid of tomorrow": ("H100", xid(XID_999, BEGAN_US), "xid.boot", "error", "xid.999", 3),
    "NVMe": ("H100", machine(local_nvme=7), "nvme.local", "fail", "nvme.count", 1),
    "memory of the host": ("H100", machine(memory_bytes=1709 << 30), "mem.host", "fail", "mem.host", 1),
    "some memory missing": ("H100", machine(memory_bytes=1800 << 30), "mem.host", "warn", "mem.host", 0),
    "no journal": ("H100", machine(journal_error="no such file"), "xid.boot", "error", "xid.unread", 3),
    **{
        f"wrong {name}": (
            "H100",
            measured(name, 4, status="failed", measured=1.0, detail="SM 7, lane 3"),
            name,
            "fail",
            "answer.wrong",
            1,
        )
        for name in ("kat.int", "kat.ffma", "kat.dfma", "kat.mma", "det.fp32", "mem.pattern")
    },
}
CASES = RECORDED | FIELDS
