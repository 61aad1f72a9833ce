"""A look's report to others: the node's condition in Kubernetes, and the metrics. Pure.

The condition is set only when its status or codes change, with growing delays while that fails. The metrics are text
that node-exporter's textfile collector reads (Prometheus' exposition format, version 0.0.4).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from image_builder.node.finding import kubernetes_reason
from image_builder.node.health.alarms import Alarm
from image_builder.node.health.model import Sample

_MESSAGE_BYTES = 1024
# Limits of the wait after a failed attempt, in seconds: the first, and the longest.
FIRST_WAIT, LONGEST_WAIT = 60.0, 1800.0
# How long an unchanged condition isn't sent again, in seconds: a kubelet may start over and over.
RESEND_SECONDS = 600.0
PREFIX = "node_health_"
HELP: Mapping[str, str] = {
    "state": "1 for the state that the node is in, 0 for the others.",
    "finding": "1 for each finding that counts.",
    "check_success": "Whether the check's last look could be made.",
    "check_timestamp_seconds": "Unix time of the check's last look.",
    "check_duration_seconds": "How long that look took.",
    "run_timestamp_seconds": "Unix time of the last run.",
    "run_cpu_seconds": "Processor time that the last run took until now, its children included.",
    "run_peak_memory_bytes": "The most memory that the last run had until now.",
    "condition_failures": "Consecutive failures to set the condition in Kubernetes.",
    "filesystem_used_ratio": "Used part of a filesystem, not counting what is reserved for root.",
    "filesystem_inodes_used_ratio": "Used part of a filesystem's inodes.",
    "filesystem_readonly": "Whether the filesystem itself is read-only.",
    "filesystem_errors_total": "Errors of a filesystem in the kernel's log.",
    "drive_errors_total": "Errors of a drive in the kernel's log.",
    "drive_timeouts_total": "Timeouts of a drive in the kernel's log.",
    "kernel_log_lost_records_total": "Records of the kernel's log that were overwritten before they were read.",
    "md_degraded_devices": "Members that an array lacks.",
    "nvme_live": "Whether the kernel can use the controller.",
    "nvme_critical_warning": "The bits of the drive's critical warning.",
    "nvme_available_spare_ratio": "Spare blocks that are left.",
    "nvme_used_ratio": "Estimated part of the drive's life that is used; may exceed 1.",
    "nvme_temperature_celsius": "The drive's temperature.",
    "nvme_media_errors_total": "Errors of the drive's media, over its life.",
    "network_default_route": "Whether there is a default route.",
    "network_carrier_down_total": "How often a physical link lost its carrier.",
    "dns_lookup_success": "Whether a name has an address.",
    "dns_lookup_duration_seconds": "How long the lookup took.",
    "tcp_connect_success": "Whether the endpoint accepted a connection.",
    "tcp_connect_duration_seconds": "How long that took.",
    "clock_synchronized": "Whether the kernel's clock is synchronized.",
    "clock_offset_seconds": "What the kernel still has to correct.",
    "clock_estimated_error_seconds": "The clock's estimated error.",
    "clock_maximum_error_seconds": "A bound of the clock's error.",
    "maintenance_not_before_timestamp_seconds": "Unix time before which the event does not begin; 0: it has begun.",
    "infiniband_up": "Whether the port is active and its link up.",
    "infiniband_rate_gigabits_per_second": "The port's rate.",
    "infiniband_link_downed_total": "How often the port's link went down.",
    "infiniband_link_error_recovery_total": "How often the port's link recovered from an error.",
    "infiniband_symbol_error_total": "Symbol errors of the port.",
    "infiniband_port_rcv_errors_total": "Packets with errors that the port received.",
    "infiniband_local_link_integrity_errors_total": "How often the port's link had too many errors.",
    "gpu_expected": "GPUs on the PCI bus.",
    "gpu_answering": "GPUs that NVML can open.",
    "gpu_sxid_total": "Fatal SXids in the kernel's log since the boot.",
    "gpu_xid_total": "Xids in the kernel's log since the boot.",
    "gpu_ecc_uncorrected_total": "Uncorrected memory errors since the driver was loaded.",
    "gpu_ecc_corrected_total": "Corrected memory errors since the driver was loaded.",
    "gpu_remap_pending": "Whether a row is to be remapped at the next reset.",
    "gpu_remap_failure": "Whether a row could not be remapped.",
    "gpu_nvlinks_active": "Active NVLinks.",
    "gpu_nvlink_errors_total": "Errors of all NVLinks.",
    "gpu_temperature_celsius": "The GPU's temperature.",
}
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True)
class Condition:
    """A node condition. ``status`` is True or False, as Kubernetes spells them; ``reason`` is one word for programs.

    ``codes`` are those of all failures, sorted, each once.
    """

    status: str
    reason: str
    message: str
    codes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reported:
    """What Kubernetes has: the condition, and the physical host's name. And how often changing it has failed.

    ``not_before`` and ``sent``, when it was last changed, are times of the monotonic clock. ``kubelet`` is the id of
    the kubelet's last known start, ``since`` the condition's time (RFC 3339).
    """

    status: str = ""
    reason: str = ""
    failures: int = 0
    not_before: float = 0.0
    physical_host: str = ""
    codes: tuple[str, ...] = ()
    kubelet: str = ""
    since: str = ""
    sent: float = 0.0


def condition(alarms: Sequence[Alarm], boot_id: str, image: str) -> Condition:
    """Return the condition of a node with these alarms, the worst first. A warning leaves it True."""
    failed = [alarm.finding for alarm in alarms if alarm.finding.severity == "fail"]
    tail = f" (boot {boot_id}{f', image {image}' if image else ''})"
    if not failed:
        return Condition("True", "NodeIsHealthy", f"nothing is wrong{tail}")
    parts = [f"{finding.code}: {finding.detail}" for finding in failed]
    more = f"{len(parts)} findings: " if len(parts) > 1 else ""
    text = f"{more}{'; '.join(parts)}"
    room = _MESSAGE_BYTES - len(tail.encode())
    if len(text.encode()) > room:
        text = text.encode()[: room - 3].decode(errors="ignore") + "..."
    codes = tuple(sorted({finding.code for finding in failed}))
    return Condition("False", kubernetes_reason(failed[0].code), text + tail, codes)


def due(reported: Reported, now: Condition, host: str, kubelet: str, clock: float) -> bool:
    """Return whether something changed, or the kubelet has started again, and that may be reported now.

    Another code is a change, since the gate reads all of them in the message; another detail isn't. A kubelet that
    starts registers its Node if that was deleted: then the condition is gone. ``kubelet`` is empty while none is
    running or starting. Each attempt of one that can't start has a new id, so only changes are reported within
    ``RESEND_SECONDS`` of the last report.
    """
    is_new = bool(kubelet) and kubelet != reported.kubelet and clock >= reported.sent + RESEND_SECONDS
    before = (reported.status, reported.reason, reported.codes, reported.physical_host)
    has_changed = before != (now.status, now.reason, now.codes, host)
    return (is_new or has_changed) and clock >= reported.not_before


def since(reported: Reported, now: Condition, stamp: str) -> str:
    """Return the condition's time: ``stamp``, or the earlier one if it has the same status and no further code.

    The gate compares it with a person's admission, which holds for all codes of its time.
    """
    is_same = reported.status == now.status and set(now.codes) <= set(reported.codes)
    return (is_same and reported.since) or stamp


def after_success(now: Condition, host: str, kubelet: str, since: str, clock: float) -> Reported:
    """Return what to remember after the condition was set."""
    return Reported(
        now.status, now.reason, physical_host=host, codes=now.codes, kubelet=kubelet, since=since, sent=clock
    )


def after_failure(reported: Reported, clock: float, wait: float) -> Reported:
    """Return what to remember after a failed attempt: the next one is in ``wait`` seconds."""
    return replace(reported, failures=reported.failures + 1, not_before=clock + wait)


# -- metrics ---------------------------------------------------------------------------------------------------


def metrics(samples: Iterable[Sample]) -> str:
    """Return the file's content: each metric's samples together, after its help and its type.

    Raises KeyError for a metric without help. If several samples have the same labels, the last one counts: the
    collector rejects a file with duplicates.
    """
    groups: dict[str, dict[str, float]] = {}
    for sample in samples:
        groups.setdefault(sample.name, {})[_labels(sample.labels)] = sample.value
    lines = []
    for name, values in sorted(groups.items()):
        full = PREFIX + name
        lines.append(f"# HELP {full} {HELP[name]}")
        lines.append(f"# TYPE {full} {'counter' if name.endswith('_total') else 'gauge'}")
        lines += [f"{full}{labels} {_number(value)}" for labels, value in values.items()]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    parts = [f'{name}="{str(value).translate(_ESCAPES)}"' for name, value in labels.items()]
    return f"{{{','.join(parts)}}}" if parts else ""


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
