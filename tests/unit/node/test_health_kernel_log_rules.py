"""A look's findings in the kernel log: which lines mean trouble, and how severe it is."""

from __future__ import annotations

import pytest

from image_builder.node.health import kernel_log
from tests.unit.node.health_findings import codes

# Lines of real kernels, from public reports of failing machines (Crucible 1844, Node Problem Detector 845, Garden
# Linux 263, NVSentinel 155, Longhorn 6650, Bumblebee 677).
LINES = {
    "I/O error, dev nvme0n1, sector 131209936 op 0x0:(READ) flags 0x80700 phys_seg 25 prio class 0": (
        "drive.io-errors",
        "nvme0n1",
    ),
    "blk_update_request: I/O error, dev sda, sector 106553248": ("drive.io-errors", "sda"),
    "Buffer I/O error on device nvme0n1p1, logical block 1066386": ("drive.io-errors", "nvme0n1p1"),
    "Aborting journal on device nvme0n1p1-8.": ("filesystem.error", "nvme0n1p1"),
    "EXT4-fs error (device nvme19n1): ext4_wait_block_bitmap:517: comm etcd: Cannot read block bitmap": (
        "filesystem.error",
        "nvme19n1",
    ),
    "EXT4-fs (sda1): Remounting filesystem read-only": ("filesystem.error", "sda1"),
    "XFS (dm-4): Corruption detected. Unmount and run xfs_repair": ("filesystem.error", "dm-4"),
    "XFS (dm-4): I/O Error Detected. Shutting down filesystem": ("filesystem.error", "dm-4"),
    "XFS (dm-4): xfs_do_force_shutdown(0x1) called from line 1788 of file fs/xfs/xfs_inode.c.": (
        "filesystem.error",
        "dm-4",
    ),
    "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus": ("gpu.xid", "79 0000:44:00"),
    "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up": (
        "gpu.sxid",
        "20034 0000:c1:00",
    ),
    "NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)": (
        "gpu.xid",
        "154 0008:01:00",
    ),
    "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 95, pid=7062, Uncontained: LTC TAG": ("gpu.xid", "95 0000:01:00"),
    "NVRM: Xid (PCI:0000:01:00): 145, RLW_RXPIPE Nonfatal XC0": ("gpu.xid", "145-nonfatal 0000:01:00"),
    "NVRM: Xid (PCI:0000:01:00): ?": ("gpu.xid", "unreadable"),
    "md/raid0md127: Disk failure on nvme1n1 detected, failing array.": ("drive.io-errors", "nvme1n1"),
    "critical medium error, dev nvme0n1, sector 8 op 0x1:(WRITE) flags 0x0 phys_seg 1": (
        "drive.io-errors",
        "nvme0n1",
    ),
    "I/O error, dev sdb, sector 0 op 0x2:(FLUSH) flags 0x0 phys_seg 0 prio class 0": (
        "drive.io-errors",
        "sdb",
    ),
    "NVRM: Xid (PCI:0000:01:00): 32, Channel ID 00000000 intr 00004000": ("gpu.xid", "32 0000:01:00"),
}
HARMLESS = (
    "I/O error, dev fd0, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 0",
    "I/O error, dev loop3, sector 0 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2",
    # What a drive refuses says nothing about it.
    "critical target error, dev nvme0n1, sector 2048 op 0x3:(DISCARD) flags 0x800 phys_seg 1 prio class 2",
    "I/O error, dev nvme0n1, sector 0 op 0x9:(WRITE_ZEROES) flags 0x0 phys_seg 0 prio class 2",
    "blk_update_request: I/O error, dev sda, sector 8 op 0x5:(SECURE_ERASE) flags 0x0 phys_seg 1",
    "I/O error, dev sdb, sector 0 op 0x23:(DRV_OUT) flags 0x0 phys_seg 0 prio class 0",
    "EXT4-fs (vda2): mounted filesystem with ordered data mode. Opts: . Quota mode: disabled.",
    "XFS (nvme0n1): Mounting V5 Filesystem 6a2c9b57-7f1c-4f5c-8e0f-0f9d1c2f4a11",
    "XFS (nvme0n1): Ending clean mount",
    "nvme nvme0: 4/0/0 default/read/poll queues",
    "SGI XFS with ACLs, security attributes, no debug enabled",
    "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.158.01  Release Build",
    "NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
    # NVSwitches log such lines at every boot.
    "nvidia-nvswitch3: SXid (PCI:0000:0a:00.0): 22013, Non-fatal, Link 55 Minion Link DLREQ interrupt",
    "nvidia-nvswitch3: SXid (PCI:0000:0a:00.0): 22013, Severity 0 Engine instance 55 Sub-engine instance 00",
    "mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link ACTIVE",
)


@pytest.mark.parametrize(("line", "wanted"), LINES.items())
def test_kernel_s_lines_of_trouble(line: str, wanted: tuple[str, str]) -> None:
    assert kernel_log.trouble(line) == wanted


@pytest.mark.parametrize("line", HARMLESS)
def test_kernel_s_other_lines(line: str) -> None:
    assert kernel_log.trouble(line) is None


def raw(number: int, text: str, seconds: float = 1.0) -> bytes:
    return f"3,{number},{int(seconds * 1e6)},-;{text}\n SUBSYSTEM=block\n".encode()


def test_log_is_read_on_from_where_it_was() -> None:
    lines = [raw(n, f"line {n}") for n in (5, 6, 9, 10)]
    found, lost = kernel_log.collect(lines, 6)
    assert [one.number for one in found] == [9, 10] and lost == 2
    assert found[0] == kernel_log.Record(9, 1.0, "line 9")
    assert kernel_log.collect(lines, -1)[1] == 0  # the first look can't have lost anything
    assert kernel_log.collect([b"", b"nonsense\n", b"6,x,1,-;y\n"], 0) == ([], 0)


def test_what_a_program_writes_to_the_log_is_not_believed() -> None:
    line = raw(1, "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus").replace(b"3,", b"11,", 1)
    records, _ = kernel_log.collect([line, raw(2, "I/O error, dev sda, sector 1")], -1)
    assert [one.subject for one in kernel_log.find(records)] == ["sda"] and records[-1].number == 2


def test_errors_of_the_node_s_own_drive_fail_it_and_others_are_warnings() -> None:
    own = frozenset({"nvme0n1", "nvme0n1p1"})
    text = [
        (1, "I/O error, dev nvme0n1, sector 1"),
        (2, "I/O error, dev sdc, sector 1"),
        (3, "nvme nvme0: Device not ready; aborting reset"),
        (3, "nvme nvme0: I/O 12 QID 3 timeout, aborting"),
        (4, "I/O error, dev nvme0n1, sector 9"),
    ]
    records, _ = kernel_log.collect([raw(n, line, n) for n, line in text], -1)
    troubles = kernel_log.merge([], kernel_log.find(records))
    found = kernel_log.rule(troubles, 10.0, own, kernel_log.catalogue())
    assert set(codes(found)) == {
        ("drive.io-errors", "nvme0n1", "fail"),
        ("drive.io-errors", "sdc", "warn"),
        ("drive.io-errors", "nvme0", "fail"),
        ("drive.timeouts", "nvme0", "warn"),
    }
    assert next(one for one in found if one.subject == "nvme0n1").detail.startswith("2 times, last: ")
    # An hour after the last error, it no longer counts.
    assert kernel_log.rule(troubles, 3605.0, own, kernel_log.catalogue()) == []


@pytest.mark.parametrize(
    ("xid", "severity", "action"),
    [
        ("79", "fail", "replace"),
        ("48", "fail", "reboot"),
        ("31", "warn", None),
        ("145, RLW_RXPIPE Nonfatal XC0", "warn", "none"),
        ("145, RLW_RXPIPE Fatal XC0", "fail", "reboot"),
        ("?", "warn", "none"),
    ],
)
def test_xids_are_judged_by_the_catalogue(xid: str, severity: str, action: str | None) -> None:
    line = f"NVRM: Xid (PCI:0001:00:00): {xid}, pid=1234, name=python3"
    records, _ = kernel_log.collect([raw(1, line)], -1)
    troubles = kernel_log.merge([], kernel_log.find(records))
    # It counts until the next boot, however long that takes.
    (found,) = kernel_log.rule(troubles, 1e7, frozenset(), kernel_log.catalogue())
    assert (found.code, found.severity) == ("gpu.xid", severity)
    assert action is None or found.action == action


def test_a_fatal_sxid_counts_until_the_next_boot() -> None:
    line = "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"
    records, _ = kernel_log.collect([raw(1, line)], -1)
    troubles = kernel_log.merge([], kernel_log.find(records))
    (found,) = kernel_log.rule(troubles, 1e7, frozenset(), kernel_log.catalogue())
    assert (found.code, found.severity, found.action) == ("gpu.sxid", "fail", "reboot")
    [_, counted] = kernel_log.samples(troubles, 0)
    assert (counted.name, counted.labels) == ("gpu_sxid_total", {"sxid": "20034", "pci": "0000:c1:00"})


def test_xid_for_the_record_is_no_finding() -> None:
    records, _ = kernel_log.collect([raw(1, "NVRM: Xid (PCI:0001:00:00): 63, Row Remapper: New row")], -1)
    troubles = kernel_log.merge([], kernel_log.find(records))
    assert kernel_log.rule(troubles, 1.0, frozenset(), kernel_log.catalogue()) == []
    assert [one.name for one in kernel_log.samples(troubles, 0)] == [
        "kernel_log_lost_records_total",
        "gpu_xid_total",
    ]


def test_what_the_log_tells_is_bounded() -> None:
    lines = [raw(n, f"I/O error, dev sd{n}x, sector 1", n) for n in range(500)]
    lines = [
        line.replace(b"sd%dx" % n, b"sd" + bytes([97 + n // 26, 97 + n % 26])) for n, line in enumerate(lines)
    ]
    records, _ = kernel_log.collect(lines, -1)
    assert len(kernel_log.merge([], kernel_log.find(records))) == 64


NEEDS_RESET = (
    "NVRM: Xid (PCI:{}): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
)
NEEDS_NOTHING = (
    "NVRM: Xid (PCI:{}): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
)
ONE, OTHER = "0008:01:00", "0009:01:00"


@pytest.mark.parametrize(
    ("looks", "left"),
    [
        ([[NEEDS_RESET.format(ONE), NEEDS_NOTHING.format(ONE)]], []),
        ([[NEEDS_RESET.format(ONE)], [NEEDS_NOTHING.format(ONE)]], []),
        ([[NEEDS_RESET.format(ONE)], [NEEDS_NOTHING.format(OTHER)]], [ONE]),
        ([[NEEDS_NOTHING.format(ONE)], [NEEDS_RESET.format(ONE)]], [ONE]),
        ([[NEEDS_RESET.format(ONE), NEEDS_RESET.format(OTHER)], [NEEDS_NOTHING.format(ONE)]], [OTHER]),
    ],
)
def test_a_gpu_that_was_reset_needs_no_recovery_any_more(looks: list[list[str]], left: list[str]) -> None:
    troubles: list[kernel_log.Trouble] = []
    for texts in looks:
        records, _ = kernel_log.collect([raw(number, text) for number, text in enumerate(texts)], -1)
        troubles = kernel_log.merge(troubles, kernel_log.find(records))
    assert [trouble.subject for trouble in troubles] == [f"154 {pci}" for pci in left]
