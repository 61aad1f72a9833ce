"""The values of the GPU test: readings, measurements, checks and the verdict.

Every dataclass has a JSON form (``asdict``, and back with ``node.decode``), which workers print and recordings contain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from image_builder.node.finding import Action
from image_builder.node.sysfs import Port

Tier = Literal["boot-quick", "boot-full", "periodic"]
TIERS: tuple[Tier, ...] = ("boot-quick", "boot-full", "periodic")
# Drivers of InfiniBand devices; if none is loaded, there are no ports.
INFINIBAND_MODULES = ("mlx5_ib", "mlx4_ib")
DETAIL_CHARACTERS = 512  # the longest detail of a measurement or a check
# By NVML's recovery action. An action that isn't known yet condemns the GPU.
_RECOVERY: Mapping[str, Action] = {
    "none": "none",
    "gpu-reset": "reboot",
    "node-reboot": "reboot",
    "drain-p2p": "reboot",
    "drain-and-reset": "reboot",
    "recover-imex-domain": "config",
    "bus-reset": "reboot",
    "system-reboot": "reboot",
}


@dataclass(frozen=True)
class Measurement:
    """One active test on one GPU, as its worker saw it.

    ``id``: kat.int, kat.ffma, kat.dfma, kat.mma, det.fp32, mem.pattern, bw.hbm, bw.h2d, bw.d2h, bw.p2p, perf.mma.
    ``gpu`` is the UUID. ``status``: ``failed`` is a wrong answer, ``error`` a test that couldn't be run, ``skipped``
    one that doesn't apply to this GPU, with the reason in ``detail``. ``unit``: GB/s (decimal), TFLOP/s, mismatches, %.
    ``detail`` has at most 512 characters: the SM, lane and address, and the expected and actual values.
    """

    id: str
    gpu: str
    status: Literal["done", "failed", "error", "skipped"]
    measured: float | None
    unit: str
    detail: str = ""
    seed: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Worker:
    """The outcome of one GPU's process.

    ``ended``: ``done``, ``killed: deadline``, ``hung: unkillable``, ``crashed: signal 11`` or ``error: …``.
    ``sms`` is how many SMs the GPU has, ``sms_seen`` how many of them computed the known answers. ``memory_bytes`` is
    how much memory was free, ``memory_tested_bytes`` how much of that was written and read back.
    """

    gpu: str
    ended: str
    measurements: tuple[Measurement, ...] = ()
    sms: int = 0
    sms_seen: int = 0
    memory_bytes: int = 0
    memory_tested_bytes: int = 0


@dataclass(frozen=True)
class Process:
    """A process that has a context on a GPU; ``used_bytes`` is None if the driver doesn't report it."""

    pid: int
    used_bytes: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Gpu:
    """NVML's readings of one GPU. None is a missing reading; ``missing`` has the reason under the field's name.

    ``missing``: ``not-supported`` (this GPU or driver doesn't have it), ``no-function`` (this library has no such
    function) or ``error: …`` (it should have answered). ECC error counts are sums over the locations that the GPU
    reports: ``volatile`` since the driver was loaded, ``aggregate`` over the GPU's lifetime. ``remap_histogram`` counts
    the banks with max, high, partial, low and no spare rows. ``nvlinks`` has one state for each link that the GPU has;
    link errors are sums over all links: ``nvlink_errors`` of all kinds, ``nvlink_crc_errors`` of flits and data.
    ``throttle`` has NVML's nvmlClocksEventReasons bits. ``temperature_margin_c`` is the distance to slowdown.
    """

    index: int
    uuid: str = ""
    pci: str = ""
    name: str = ""
    serial: str | None = None
    vbios: str | None = None
    compute_capability: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    ecc_current: bool | None = None
    ecc_pending: bool | None = None
    ecc_volatile_uncorrected: int | None = None
    ecc_volatile_corrected: int | None = None
    ecc_aggregate_uncorrected: int | None = None
    ecc_aggregate_corrected: int | None = None
    ecc_volatile_uncorrected_sram: int | None = None
    ecc_volatile_uncorrected_dram: int | None = None
    ecc_aggregate_uncorrected_sram: int | None = None
    ecc_aggregate_uncorrected_dram: int | None = None
    sram_threshold_exceeded: bool | None = None
    remap_correctable: int | None = None
    remap_uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failure: bool | None = None
    remap_histogram: tuple[int, ...] | None = None
    unrepairable_memory: bool | None = None
    retired_single_bit: int | None = None
    retired_double_bit: int | None = None
    retired_pending: bool | None = None
    inforom_valid: bool | None = None
    recovery_action: str | None = None
    persistence: bool | None = None
    mig_current: bool | None = None
    mig_pending: bool | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_generation_max: int | None = None
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    nvlinks: tuple[bool, ...] | None = None
    nvlink_errors: int | None = None
    nvlink_replays: int | None = None
    nvlink_recoveries: int | None = None
    nvlink_crc_errors: int | None = None
    fabric_state: str | None = None
    fabric_status: str | None = None
    throttle: int | None = None
    temperature_c: int | None = None
    temperature_slowdown_c: int | None = None
    temperature_margin_c: int | None = None
    processes: tuple[Process, ...] | None = None
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def recovery(self) -> Action:
        """Return the action that the driver's recovery action calls for; ``none`` if it has none, or isn't read."""
        return _RECOVERY.get(self.recovery_action or "none", "replace")


@dataclass(frozen=True)
class Nvml:
    """NVML's readings: of the library itself, and of each GPU.

    ``error`` is empty, or says why nothing else is known: ``library: …`` (missing, or it can't be loaded),
    ``mismatch: …`` (it doesn't match the loaded driver), ``init: …``. ``lost`` has the reason for each GPU, by index,
    that the library counts but can't open.
    """

    error: str = ""
    driver: str = ""
    count: int = 0
    gpus: tuple[Gpu, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One look at a GPU under load, ``seconds`` after the load began."""

    gpu: str
    seconds: float
    throttle: int | None = None
    temperature_c: int | None = None
    temperature_margin_c: int | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    utilization_percent: int | None = None


@dataclass(frozen=True)
class Xid:
    """An Xid in the kernel log; ``pci`` is like 0001:00:00. ``monotonic_us`` is CLOCK_MONOTONIC.

    ``switch``: this is an SXid, from the NVSwitch with that name; ``fatal`` is the driver's own rating of SXids.
    """

    number: int
    pci: str
    monotonic_us: int
    raw: str
    switch: str = ""
    fatal: bool = False


@dataclass(frozen=True)
class PciGpu:
    """An NVIDIA display or 3D controller (class 0x0300 or 0x0302, vendor 10de) in /sys; ``device`` is like 2335."""

    address: str
    device: str
    driver: str = ""


@dataclass(frozen=True)
class Machine:
    """The node's readings that don't come from NVML. An empty string means unknown.

    ``driver_loaded`` and ``flavour`` are from /proc/driver/nvidia/version. ``modules`` maps the loaded modules, nouveau
    among them, to their versions. ``libraries`` has versions on disk: libcuda, libnvidia-ml, fabricmanager. ``nodes``
    are names under /dev. ``cdi_gpus`` is None without a CDI spec. ``fabric_manager`` is its unit's state.
    ``journal_error`` says why the Xids are unknown.
    """

    name: str = ""
    boot_id: str = ""
    kernel: str = ""
    vm_size: str = ""
    vm_size_from: str = ""
    vm_id: str = ""
    zone: str = ""
    image: str = ""
    driver_loaded: str = ""
    flavour: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)
    pci: tuple[PciGpu, ...] = ()
    nodes: tuple[str, ...] = ()
    cdi_gpus: int | None = None
    fabric_manager: str = ""
    ports: tuple[Port, ...] = ()
    local_nvme: int = 0
    memory_bytes: int = 0
    journal_error: str = ""


@dataclass(frozen=True)
class Seen:
    """The whole node at one point in time: the content of a recording."""

    machine: Machine = Machine()
    nvml: Nvml = Nvml()
    xids: tuple[Xid, ...] = ()


Status = Literal["pass", "warn", "fail", "skip", "error"]


@dataclass(frozen=True)
class Check:
    """One rule's outcome, for one GPU or (``gpu`` empty) for the node.

    ``error``: the check failed to run. ``skip``: it doesn't apply to this node, isn't supported, or wasn't run;
    ``detail`` says why. ``code`` is a stable identifier of the reason, empty if the status is ``pass``.
    """

    id: str
    gpu: str
    status: Status
    measured: float | str | None = None
    threshold: float | str | None = None
    op: str = ""
    unit: str = ""
    action: Action = "none"
    code: str = ""
    detail: str = ""
    seconds: float = 0.0
    seed: int = 0


# -- the verdict -----------------------------------------------------------------------------------------------

PASS, HARDWARE, REBOOT, INCONCLUSIVE, CONFIGURATION, IMAGE, DEADLINE = 0, 1, 2, 3, 4, 5, 124


@dataclass(frozen=True)
class Ending:
    """The meaning of an exit status. ``code`` is the reason if the document has no better one."""

    status: Literal["pass", "fail", "inconclusive"]
    action: Action
    code: str
    meaning: str


ENDINGS: Mapping[int, Ending] = {
    PASS: Ending("pass", "none", "", "every mandatory check was made, and none failed"),
    HARDWARE: Ending("fail", "replace", "gpu.hardware", "the hardware is faulty: replace the machine"),
    REBOOT: Ending("fail", "reboot", "gpu.reboot", "the GPUs need a reset: reboot once, then replace"),
    INCONCLUSIVE: Ending(
        "inconclusive",
        "none",
        "gpu.inconclusive",
        "a mandatory check could not be made, or the test itself is in doubt: not a pass",
    ),
    CONFIGURATION: Ending(
        "fail", "config", "gpu.config", "the size or the configuration doesn't match the machine"
    ),
    IMAGE: Ending(
        "fail",
        "reimage",
        "gpu.image",
        "the driver or the image is defective: a new machine of this image won't help",
    ),
    DEADLINE: Ending(
        "inconclusive", "reboot", "gpu.deadline", "the test itself didn't end in time: not a pass"
    ),
}


@dataclass(frozen=True)
class Verdict:
    """The result of all checks. Only a node with exit code 0 may take work."""

    exit_code: int
    action: Action
    summary: str
    code: str = ""

    @property
    def status(self) -> str:
        return ENDINGS[self.exit_code].status

    @property
    def retry_after_reboot(self) -> bool:
        """Return whether to retest after a reboot. Not after a wrong answer: the next one may be right by chance."""
        return self.exit_code == REBOOT
