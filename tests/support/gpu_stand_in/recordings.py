"""Whole nodes built from recorded GPUs, healthy and broken.

NVML's answers are recorded (tests/data/gpu, with the source in each file). One recorded GPU stands for all GPUs of its
node: index, UUID and address are counted up. Only what the recordings lack is made up here: the machine around the
GPUs, links and InfoROM (nvidia-smi -q doesn't print them), and what the workers measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from image_builder.node.decode import decode
from image_builder.node.gpu import xids
from image_builder.node.gpu.evidence import Evidence
from image_builder.node.gpu.machine import Places
from image_builder.node.gpu.model import (
    Gpu,
    Machine,
    Measurement,
    Nvml,
    PciGpu,
    Sample,
    Seen,
    Tier,
    Worker,
)
from image_builder.node.gpu.readings import LINK_ERRORS
from image_builder.node.gpu.settings import Settings
from image_builder.node.gpu.sizes import Size
from image_builder.node.gpu.smoke.command import expectation
from image_builder.node.sysfs import Port

DATA = Path(__file__).resolve().parents[2] / "data/gpu"
BOOT = "0b2ce45c-8c3c-4d2f-8f6f-5a0d6a3f4f11"
BEGAN_US = 60_000_000
CATALOGUE = xids.load()
# The recording, the size that it stands for, and the fields that differ from the recording, with the reason.
NODES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # The recorded node had no persistence daemon.
    "V100": ("v100-pcie-16gb", "Standard_NC6s_v3", {"persistence": True}),
    # A process was running, and there was no persistence daemon.
    "T4": (
        "t4-busy",
        "Standard_NC4as_T4_v3",
        {"persistence": True, "processes": (), "memory_used_bytes": 0},
    ),
    "A100": ("a100-sxm4-80gb-busy", "Standard_ND96amsr_A100_v4", {"processes": (), "memory_used_bytes": 0}),
    "H100": ("h100-sxm5-80gb", "Standard_ND96isr_H100_v5", {}),
    "H200": ("h200-sxm5-141gb", "Standard_ND96isr_H200_v5", {}),
    # Not a recording: the V100 above with another name, more memory and links.
    "V100 SXM2": (
        "v100-pcie-16gb",
        "Standard_ND40rs_v2",
        {"persistence": True, "name": "Tesla V100-SXM2-32GB", "memory_total_bytes": 32768 << 20},
    ),
}
MODELS = tuple(name for name in NODES if name != "V100 SXM2")
ANSWERS = ("kat.int", "kat.ffma", "kat.dfma", "kat.mma", "det.fp32", "mem.pattern")


def recorded(name: str) -> tuple[Gpu, str]:
    """Return a recorded GPU and its driver's version."""
    recording = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return decode(Gpu, recording["gpus"][0]), recording["driver"]


def node(
    model: str,
    tier: Tier = "boot-full",
    settings: Settings = Settings(mode="enforce"),  # noqa: B008 (frozen)
    *,
    calibrated: bool = True,
) -> Evidence:
    """Return one of NODES, healthy and after its load; by default, its size is calibrated."""
    recording, size_name, changes = NODES[model]
    gpu, driver = recorded(recording)
    expected = replace(expectation(settings, size_name), calibrated=calibrated)
    size = expected.size
    assert size
    gpus = tuple(_numbered(_complete(gpu, size, changes), n) for n in range(size.count))
    reading = Seen(_machine(size, driver, gpus, recording), Nvml("", driver, len(gpus), gpus))
    samples = tuple(_sample(gpu, second) for gpu in gpus for second in (0.0, 0.5, 1.0, 1.5))
    workers = tuple(_worker(gpu, size) for gpu in gpus)
    return Evidence(tier, expected, CATALOGUE, reading, reading, samples, workers, BEGAN_US)


def _complete(gpu: Gpu, size: Size, changes: dict[str, Any]) -> Gpu:
    """Return a GPU with healthy answers where the recording has none."""
    fields: dict[str, Any] = {
        "inforom_valid": True,
        "nvlinks": (True,) * size.nvlink_links if size.nvlink_links else None,
        **dict.fromkeys(LINK_ERRORS, 0 if size.nvlink_links else None),
        "compute_capability": "0.0",
    }
    missing = {name: why for name, why in gpu.missing.items() if fields.get(name) is None}
    return (
        replace(gpu, **fields, **changes)
        if not missing
        else replace(gpu, **fields, **changes, missing=missing)
    )


def _numbered(gpu: Gpu, number: int) -> Gpu:
    uuid, pci = gpu.uuid[:-2] + f"{number:02x}", f"{number + 1:08x}:00:00.0"
    return replace(gpu, index=number, uuid=uuid, pci=pci)


def _machine(size: Size, driver: str, gpus: tuple[Gpu, ...], recording: str) -> Machine:
    devices = json.loads((DATA / f"{recording}.json").read_text(encoding="utf-8"))["pci_devices"]
    flavour = "proprietary" if "V100" in gpus[0].name else "open"
    libraries = {"libcuda": driver, "libnvidia-ml": driver}
    return Machine(
        name="node-1",
        boot_id=BOOT,
        kernel="6.1.0-40-amd64",
        vm_size=size.name,
        vm_size_from="platform",
        driver_loaded=driver,
        flavour=flavour,
        modules={"nvidia": driver, "nvidia_uvm": driver} | ({"mlx5_ib": ""} if size.infiniband_ports else {}),
        libraries=libraries | ({"fabricmanager": driver} if size.nvswitch else {}),
        pci=tuple(PciGpu(gpu.pci[4:].lower(), devices[0], "nvidia") for gpu in gpus),
        nodes=(*(f"nvidia{gpu.index}" for gpu in gpus), "nvidiactl", "nvidia-uvm"),
        cdi_gpus=len(gpus),
        fabric_manager="active" if size.nvswitch else "",
        ports=tuple(
            Port(f"mlx5_{n}", 1, "ACTIVE", "LinkUp", size.infiniband_gbit, "InfiniBand")
            for n in range(size.infiniband_ports)
        ),
        local_nvme=size.local_nvme or 0,
        memory_bytes=size.memory_gib << 30,
    )


def _sample(gpu: Gpu, seconds: float) -> Sample:
    return Sample(
        gpu.uuid,
        seconds,
        throttle=0x4,
        temperature_c=60,
        temperature_margin_c=None if gpu.temperature_margin_c is None else 25,
        pcie_generation=gpu.pcie_generation_max,
        pcie_width=gpu.pcie_width,
        utilization_percent=100,
    )


def _worker(gpu: Gpu, size: Size) -> Worker:
    copies = {"bw.hbm": size.hbm_floor_gbps, "bw.h2d": size.h2d_floor_gbps, "bw.d2h": size.d2h_floor_gbps}
    if size.p2p_floor_gbps:
        copies["bw.p2p"] = size.p2p_floor_gbps
    results = [Measurement(name, gpu.uuid, "done", 0.0, "mismatches", seed=7) for name in ANSWERS]
    results += [
        Measurement(name, gpu.uuid, "done", least.value * 1.2, "GB/s") for name, least in copies.items()
    ]
    results += [Measurement("perf.mma", gpu.uuid, "done", 500.0, "TFLOP/s")]
    free = (gpu.memory_total_bytes or 0) - (gpu.memory_reserved_bytes or 0)
    return Worker(gpu.uuid, "done", tuple(results), 108, 108, free, int(free * 0.96))


def places(root: Path) -> Places:
    """Return a node's places below a test's own directory."""
    return Places(root / "root", root / "proc", root / "sys", root / "dev", root / "run", cdi=(root / "cdi",))


# -- one change ------------------------------------------------------------------------------------------------

Change = Callable[[Evidence], Evidence]


def machine(**fields: Any) -> Change:
    """Return a change to the machine, before and after the load."""

    def change(evidence: Evidence) -> Evidence:
        before = replace(evidence.before, machine=replace(evidence.before.machine, **fields))
        after = replace(evidence.after, machine=before.machine) if evidence.after else None
        return replace(evidence, before=before, after=after)

    return change


def library(**fields: Any) -> Change:
    """Return a change to what NVML reports about itself before the load."""

    def change(evidence: Evidence) -> Evidence:
        return replace(
            evidence, before=replace(evidence.before, nvml=replace(evidence.before.nvml, **fields))
        )

    return change


def gpu(number: int = 0, **fields: Any) -> Change:
    """Return a change to one GPU's answers, before and after the load."""

    def change(evidence: Evidence) -> Evidence:
        changed = _with_gpu(evidence.before, number, fields)
        after = _with_gpu(evidence.after, number, fields) if evidence.after else None
        return replace(evidence, before=changed, after=after)

    return change


def later(number: int = 0, **fields: Any) -> Change:
    """Return a change to one GPU's answers, only after the load."""

    def change(evidence: Evidence) -> Evidence:
        assert evidence.after
        return replace(evidence, after=_with_gpu(evidence.after, number, fields))

    return change


def _with_gpu(reading: Seen, number: int, fields: dict[str, Any]) -> Seen:
    gpus = tuple(replace(other, **fields) if other.index == number else other for other in reading.nvml.gpus)
    return replace(reading, nvml=replace(reading.nvml, gpus=gpus))


def samples(*seconds: float, **fields: Any) -> Change:
    """Return a change to the first GPU's samples at these times."""

    def change(evidence: Evidence) -> Evidence:
        uuid = evidence.gpus[0].uuid
        return replace(
            evidence,
            samples=tuple(
                replace(sample, **fields) if sample.gpu == uuid and sample.seconds in seconds else sample
                for sample in evidence.samples
            ),
        )

    return change


def worker(number: int = 0, **fields: Any) -> Change:
    """Return a change to the outcome of one GPU's worker."""

    def change(evidence: Evidence) -> Evidence:
        workers = list(evidence.workers)
        workers[number] = replace(workers[number], **fields)
        return replace(evidence, workers=tuple(workers))

    return change


def measured(id: str, number: int = 0, **fields: Any) -> Change:
    """Return a change to one measurement of one GPU."""

    def change(evidence: Evidence) -> Evidence:
        measurements = evidence.workers[number].measurements
        changed = tuple(
            replace(measurement, **fields) if measurement.id == id else measurement
            for measurement in measurements
        )
        assert changed != measurements
        return worker(number, measurements=changed)(evidence)

    return change


def xid(message: str, at_us: int = 1) -> Change:
    """Return a change that adds a kernel message to the log."""

    def change(evidence: Evidence) -> Evidence:
        xid = xids.parse_message(message, at_us)
        assert xid
        before = replace(evidence.before, xids=(*evidence.before.xids, xid))
        after = replace(evidence.after, xids=before.xids) if evidence.after else None
        return replace(evidence, before=before, after=after)

    return change


def settings(**fields: Any) -> Change:
    def change(evidence: Evidence) -> Evidence:
        expected = evidence.expected
        return replace(evidence, expected=replace(expected, settings=replace(expected.settings, **fields)))

    return change


def together(*changes: Change) -> Change:
    def change(evidence: Evidence) -> Evidence:
        for change in changes:
            evidence = change(evidence)
        return evidence

    return change
