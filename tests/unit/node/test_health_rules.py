"""What a look finds, by each rule on facts: none of them does any I/O."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import imds, mounts
from image_builder.node.errors import NodeError
from image_builder.node.gpu.model import Gpu, Nvml
from image_builder.node.health import (
    arrays,
    clock,
    connect,
    dns,
    filesystems,
    flaps,
    gpu,
    infiniband,
    kernel_log,
    maintenance,
    network,
    nvme,
)
from image_builder.node.health.filesystems import Usage
from image_builder.node.health.model import Finding, Look, Places
from image_builder.node.health.settings import Settings

SETTINGS = Settings()


def codes(findings: list[Finding] | tuple[Finding, ...]) -> list[tuple[str, str, str]]:
    return [(one.code, one.subject, one.severity) for one in findings]


def mounted(target: str, device: str, kind: str, *, read_only: bool) -> mounts.Mount:
    return mounts.Mount(device, "/", target, kind, "", read_only)


def usage(free: int, inodes: int = 50, *, kind: str = "ext4", read_only: bool = False) -> Usage:
    return Usage("/data", mounted("/data", "8:1", kind, read_only=read_only), 100, free, 100, inodes)


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (usage(11), []),
        (usage(10), [("filesystem.full", "/data", "warn")]),
        (usage(3), [("filesystem.full", "/data", "fail")]),
        (usage(50, 2), [("filesystem.inodes", "/data", "fail")]),
        (usage(50, read_only=True), [("filesystem.read-only", "/data", "fail")]),
        (usage(50, kind="erofs", read_only=True), []),
        # btrfs and vfat have no limit of inodes.
        (replace(usage(50), total_inodes=0, free_inodes=0), []),
    ],
)
def test_filesystems(seen: Usage, wanted: list[tuple[str, str, str]]) -> None:
    assert codes(filesystems.rule([seen], SETTINGS)) == wanted


def test_path_lies_on_the_mount_with_the_longest_target_and_of_these_the_last() -> None:
    root, data, again = (
        mounted("/", "8:1", "ext4", read_only=False),
        mounted("/mnt/local", "8:2", "xfs", read_only=False),
        mounted("/mnt/local", "8:3", "xfs", read_only=True),
    )
    every = [root, data, again]
    assert filesystems.containing("/mnt/local/docker", every) == again
    assert filesystems.containing("/mnt/localother", every) == root
    assert filesystems.containing("/mnt/local", [root, data]) == data


def test_mountinfo_tells_the_filesystem_s_own_state(tmp_path: Path) -> None:
    """A service with ProtectSystem sees every mount read-only (first column); the filesystem is not."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text(
        "36 35 98:0 / / ro,noatime shared:2 - ext4 /dev/root rw,errors=remount-ro\n"
        "37 36 98:1 / /a\\040b rw - xfs /dev/x ro,attr2\n"
    )
    assert mounts.listed(tmp_path) == [
        mounts.Mount("98:0", "/", "/", "ext4", "/dev/root", read_only=False),
        mounts.Mount("98:1", "/", "/a b", "xfs", "/dev/x", read_only=True),
    ]


def test_disks_below_a_filesystem_are_all_that_it_is_made_of(tmp_path: Path) -> None:
    """An array of a partition and a disk, as /sys has them: links that lead to the devices."""
    devices = tmp_path / "devices"
    for name in ("md127", "sda/sda1", "nvme0n1"):
        (devices / name).mkdir(parents=True)
    (devices / "sda/sda1/partition").write_text("1\n")
    (devices / "md127/slaves").mkdir()
    (devices / "md127/slaves/sda1").symlink_to(devices / "sda/sda1")
    (devices / "md127/slaves/nvme0n1").symlink_to(devices / "nvme0n1")
    (tmp_path / "dev/block").mkdir(parents=True)
    (tmp_path / "dev/block/9:127").symlink_to(devices / "md127")
    found = filesystems.disks_below(["9:127", "0:25"], tmp_path)
    assert found == {"md127", "sda1", "sda", "nvme0n1"}


def test_arrays(tmp_path: Path) -> None:
    for name, files in {
        "md0": {"array_state": "active\n", "degraded": "1\n"},
        "md1": {"array_state": "clean\n", "degraded": "0\n"},
        "md127": {"array_state": "broken\n"},
        "md2": {"array_state": "clear\n"},
    }.items():
        (tmp_path / "block" / name / "md").mkdir(parents=True)
        for file, text in files.items():
            (tmp_path / "block" / name / "md" / file).write_text(text)
    found = arrays.read(tmp_path)
    assert codes(arrays.rule(found)) == [
        ("array.degraded", "md0", "fail"),
        ("array.degraded", "md127", "fail"),
    ]


def page(warning: int = 0, *, kelvin: int = 310, media: int = 0) -> bytes:
    """A health page, laid out by the specification: no drive was asked for it."""
    head = struct.pack("<BHBBB", warning, kelvin, 100, 10, 3)
    return head + bytes(160 - len(head)) + media.to_bytes(16, "little") + bytes(336)


def test_nvme_page() -> None:
    found = nvme.parse(page(0b101, media=7))
    assert found == nvme.Page(0b101, 37, 100, 3, 7)


@pytest.mark.parametrize(
    ("state", "warning", "wanted"),
    [
        ("live", 0, []),
        ("live", 0b1, [("drive.nvme", "nvme0", "fail")]),
        ("live", 0b1000, [("drive.nvme", "nvme0", "fail")]),
        ("live", 0b10, [("drive.nvme", "nvme0", "warn")]),
        ("live", 0b11, [("drive.nvme", "nvme0", "fail")]),
        ("dead", 0, [("drive.state", "nvme0", "fail")]),
    ],
)
def test_nvme(state: str, warning: int, wanted: list[tuple[str, str, str]]) -> None:
    drive = nvme.Drive("nvme0", state, nvme.parse(page(warning)))
    assert codes(nvme.rule([drive])) == wanted
    assert codes(nvme.rule([replace(drive, page=None)])) == [one for one in wanted if one[0] == "drive.state"]


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
    "NVRM: Xid (PCI:0000:01:00): 32, Channel ID 00000000 intr 00004000": ("gpu.xid", "32 0000:01:00"),
}
HARMLESS = (
    "I/O error, dev fd0, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 0",
    "I/O error, dev loop3, sector 0 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2",
    "EXT4-fs (vda2): mounted filesystem with ordered data mode. Opts: . Quota mode: disabled.",
    "XFS (nvme0n1): Mounting V5 Filesystem 6a2c9b57-7f1c-4f5c-8e0f-0f9d1c2f4a11",
    "XFS (nvme0n1): Ending clean mount",
    "nvme nvme0: 4/0/0 default/read/poll queues",
    "SGI XFS with ACLs, security attributes, no debug enabled",
    "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.158.01  Release Build",
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
    assert kernel_log.collect(lines, -1)[1] == 0  # the first look loses nothing that it was to have
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
    # An hour after the last one it is over.
    assert kernel_log.rule(troubles, 3605.0, own, kernel_log.catalogue()) == []


@pytest.mark.parametrize(
    ("xid", "severity", "action"), [(79, "fail", "replace"), (48, "fail", "reboot"), (31, "warn", None)]
)
def test_xids_are_judged_by_the_catalogue(xid: int, severity: str, action: str | None) -> None:
    line = f"NVRM: Xid (PCI:0001:00:00): {xid}, pid=1234, name=python3"
    records, _ = kernel_log.collect([raw(1, line)], -1)
    troubles = kernel_log.merge([], kernel_log.find(records))
    # Until the next boot, however long that takes.
    (found,) = kernel_log.rule(troubles, 1e7, frozenset(), kernel_log.catalogue())
    assert (found.code, found.severity) == ("gpu.xid", severity)
    assert action is None or found.action == action


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


def facts(**changes: Any) -> network.Facts:
    good = network.Facts(
        routes=("eth0",),
        answers={"registry.test": dns.Answer("registry.test", ("192.0.2.1",))},
        registries=("registry.test:443",),
        api_servers=("192.0.2.2:6443",),
        connected={"registry.test:443": connect.Connected(), "192.0.2.2:6443": connect.Connected()},
    )
    return replace(good, **changes)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, []),
        ({"routes": ()}, [("network.route", "default", "fail")]),
        (
            {"connected": {"192.0.2.2:6443": connect.Connected("Connection refused")}},
            [("network.api", "192.0.2.2:6443", "warn")],
        ),
        (
            {"connected": {"registry.test:443": connect.Connected("no answer within 3 s")}},
            [("network.registry", "registry.test:443", "warn")],
        ),
        (
            # No address, no connection: one cause, one finding.
            {"answers": {"registry.test": dns.Answer("registry.test", error="no answer")}, "connected": {}},
            [("network.dns", "registry.test", "warn")],
        ),
    ],
)
def test_network(changes: dict[str, Any], wanted: list[tuple[str, str, str]]) -> None:
    assert codes(network.rule(facts(**changes))) == wanted


def test_default_routes(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    eth0 = "eth0\t{}\t0100A8C0\t0003\t0\t0\t100\t{}\t0\t0\t0\n"
    route = tmp_path / "net/route"
    route.write_text(head + eth0.format("0000A8C0", "00FFFFFF"))
    reject = (
        "00000000000000000000000000000000 00 00000000000000000000000000000000 00 "
        "00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo\n"
    )
    (tmp_path / "net/ipv6_route").write_text(reject)
    assert network.default_routes(tmp_path) == []
    route.write_text(head + eth0.format("00000000", "00000000"))
    assert network.default_routes(tmp_path) == ["eth0"]
    (tmp_path / "net/ipv6_route").write_text(
        reject.replace("00200200       lo", "00000003     eth1").replace("ffffffff", "00000400")
    )
    assert network.default_routes(tmp_path) == ["eth0", "eth1"]


def test_flaps_count_within_their_window() -> None:
    seen: dict[str, Any] = {}
    for now, count in ((0, 5), (60, 6), (120, 8)):
        seen = json.loads(json.dumps(flaps.observe(seen, {"eth0": count}, now, 600)))
    # What was before the first look is not this machine's trouble now.
    assert flaps.too_many(seen, 3) == [("eth0", 3)] and flaps.too_many(seen, 4) == []
    assert flaps.too_many(flaps.observe(seen, {"eth0": 8}, 700, 600), 1) == [("eth0", 2)]
    assert flaps.too_many(flaps.observe(seen, {"eth0": 8}, 800, 600), 1) == []
    # Another device of the same name: its counter starts over.
    assert flaps.too_many(flaps.observe(seen, {"eth0": 1}, 130, 600), 1) == []
    assert codes(network.flap_rule(seen, SETTINGS)) == [("network.flaps", "eth0", "warn")]
    assert codes(infiniband.flap_rule(seen, SETTINGS)) == [("infiniband.flaps", "eth0", "fail")]


def timex(*, status: int = 0, offset: int = 0, worst: int = 500, error: int = 100) -> bytes:
    return struct.pack("=I4xqqqqi4x", 0, offset, 0, worst, error, status) + bytes(208 - 48)


@pytest.mark.parametrize(
    ("data", "state", "uptime", "wanted"),
    [
        (timex(), 0, 9999.0, []),
        (timex(status=0x40, error=16_000_000), 5, 9999.0, [("clock.unsynchronized", "clock", "warn")]),
        (timex(status=0x40), 5, 30.0, []),  # it has just come up
        (timex(), 5, 9999.0, [("clock.unsynchronized", "clock", "warn")]),
        (timex(error=1_500_000), 0, 9999.0, [("clock.off", "clock", "fail")]),
        (timex(offset=-1_200_000), 0, 9999.0, [("clock.off", "clock", "fail")]),
        (timex(offset=-1_200_000, status=0x2000), 0, 9999.0, []),  # nanoseconds
    ],
)
def test_clock(data: bytes, state: int, uptime: float, wanted: list[tuple[str, str, str]]) -> None:
    assert codes(clock.rule(clock.parse(data, state, uptime), SETTINGS)) == wanted


# The metadata service's answer as Microsoft's documentation shows it (articles on Spot VMs, `az vm simulate-eviction`).
PREEMPT = (
    b'{"DocumentIncarnation":1,"Events":[{"EventId":"A123BC45-1234-5678-AB90-ABCDEF123456","EventStatus":"Scheduled",'
    b'"EventType":"Preempt","ResourceType":"VirtualMachine","Resources":["myspotvm"],'
    b'"NotBefore":"Tue, 16 Mar 2021 00:58:46 GMT","Description":"","EventSource":"Platform"}]}'
)


def test_maintenance() -> None:
    (event,) = maintenance.parse(imds.Said(200, PREEMPT))
    assert event.not_before == 1615856326 and event.resources == ("myspotvm",)
    (found,) = maintenance.rule([event])
    assert (found.code, found.subject, found.severity) == ("maintenance.scheduled", "Preempt", "fail")
    assert "2021-03-16T00:58:46Z" in found.detail
    assert codes(maintenance.rule([replace(event, kind="Freeze")]))[0][2] == "warn"
    assert maintenance.rule([replace(event, status="Completed")]) == []
    begun = maintenance.parse(imds.Said(200, PREEMPT.replace(b"Tue, 16 Mar 2021 00:58:46 GMT", b"")))
    assert "not before now" in maintenance.rule(begun)[0].detail
    assert maintenance.parse(imds.Said(200, b'{"DocumentIncarnation":1,"Events":[]}')) == []


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b"Not found"),
        (500, b""),
        (200, b""),
        (200, b"{}"),
        (200, b'{"Events": {}'),
        (200, b'{"Events": [{"EventId": "x"}]}'),
        (200, PREEMPT.replace(b"16 Mar", b"no date")),
    ],
)
def test_answers_that_are_no_events_are_neither_good_nor_bad(status: int, body: bytes) -> None:
    with pytest.raises(NodeError) as caught:
        maintenance.parse(imds.Said(status, body))
    assert caught.value.code == "health.imds"


HEALTHY = Gpu(0, uuid="GPU-1", pci="0001:00:00", ecc_volatile_uncorrected=0, nvlinks=(True,) * 18)


@pytest.mark.parametrize(
    ("changes", "code", "action"),
    [
        ({"ecc_volatile_uncorrected": 1}, "gpu.ecc", "reboot"),
        ({"sram_threshold_exceeded": True}, "gpu.sram", "replace"),
        ({"remap_failure": True}, "gpu.remap-failure", "replace"),
        ({"remap_pending": True}, "gpu.remap-pending", "reboot"),
        ({"retired_pending": True}, "gpu.remap-pending", "reboot"),
        ({"inforom_valid": False}, "gpu.inforom", "replace"),
        ({"recovery_action": "drain-and-reset"}, "gpu.recovery", "reboot"),
        ({"nvlinks": (True,) * 17 + (False,)}, "gpu.nvlink", "replace"),
    ],
)
def test_gpu(changes: dict[str, Any], code: str, action: str) -> None:
    best = {"GPU-1": 18}
    assert gpu.rule(Nvml(count=1, gpus=(HEALTHY,)), 1, best) == []
    found = gpu.rule(Nvml(count=1, gpus=(replace(HEALTHY, **changes),)), 1, best)
    assert [(one.code, one.action, one.severity) for one in found] == [(code, action, "fail")]


def test_gpu_that_can_t_say_is_neither_good_nor_bad() -> None:
    silent = Gpu(0, uuid="GPU-1", missing={"ecc_volatile_uncorrected": "not-supported"})
    assert gpu.rule(Nvml(count=1, gpus=(silent,)), 1, {}) == []
    names = {one.name for one in gpu.samples(Nvml(count=1, gpus=(silent,)), 1)}
    assert names == {"gpu_expected", "gpu_answering"}


def test_gpus_that_don_t_answer() -> None:
    mismatch = Nvml(error="mismatch: driver and library differ in version")
    assert [one.code for one in gpu.rule(mismatch, 8, {})] == ["gpu.driver"]
    lost = Nvml(count=2, gpus=(HEALTHY,), lost={"1": "the GPU is lost"})
    (found,) = gpu.rule(lost, 2, {})
    assert found.code == "gpu.lost" and "1 of 2" in found.detail and "the GPU is lost" in found.detail
    assert [one.code for one in gpu.rule(Nvml(count=1, gpus=(HEALTHY,)), 2, {})] == ["gpu.lost"]


def port_files(root: Path, state: str, physical: str, rate: str, downed: int) -> None:
    port = root / "class/infiniband/mlx5_0/ports/1"
    (port / "counters").mkdir(parents=True, exist_ok=True)
    files = {"link_layer": "InfiniBand", "state": state, "phys_state": physical, "rate": rate}
    for name, text in files.items():
        (port / name).write_text(f"{text}\n")
    (port / "counters/link_downed").write_text(f"{downed}\n")


def test_infiniband(tmp_path: Path) -> None:
    """Files as a ConnectX-7 has them."""
    look = Look(SETTINGS, Places(sys=tmp_path), 0.0)
    port_files(tmp_path, "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)", 0)
    first = infiniband.check(look)
    assert first.findings == () and first.memory["best"] == {"mlx5_0/1": 400.0}
    port_files(tmp_path, "1: DOWN", "2: Polling", "10 Gb/sec (4X SDR)", 1)
    down = infiniband.check(replace(look, now=60.0, memory=first.memory))
    assert codes(down.findings) == [("infiniband.down", "mlx5_0/1", "fail")]
    port_files(tmp_path, "4: ACTIVE", "5: LinkUp", "200 Gb/sec (4X HDR)", 4)
    slow = infiniband.check(replace(look, now=120.0, memory=down.memory))
    assert {one.code for one in slow.findings} == {"infiniband.slow", "infiniband.flaps"}
    for path in sorted((tmp_path / "class/infiniband").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    gone = infiniband.check(replace(look, now=180.0, memory=slow.memory))
    assert "infiniband.down" in {one.code for one in gone.findings}


def test_dns_messages() -> None:
    query = dns.question(b"\x12\x34", "registry.test.", 1)
    assert query[:2] == b"\x12\x34" and query.endswith(b"\x08registry\x04test\0\0\x01\0\x01")
    address = struct.pack(">HHHIH", 0xC00C, 1, 1, 60, 4) + bytes([192, 0, 2, 1])
    alias = struct.pack(">HHHIH", 0xC00C, 5, 1, 60, 2) + b"\xc0\x0c"
    answer = query[:2] + struct.pack(">HHHHH", 0x8180, 1, 2, 0, 0) + query[12:] + alias + address
    assert dns.parse(answer) == (["192.0.2.1"], "")
    for code, words in ((2, "SERVFAIL"), (3, "NXDOMAIN"), (5, "REFUSED"), (9, "code 9")):
        said = query[:2] + struct.pack(">HHHHH", 0x8180 | code, 1, 0, 0, 0) + query[12:]
        assert dns.parse(said) == ([], words)
    assert dns.parse(query[:2] + struct.pack(">HHHHH", 0x8180, 1, 0, 0, 0) + query[12:]) == (
        [],
        "no addresses",
    )
    for cut in range(len(answer)):
        assert dns.parse(answer[:cut])[0] == []
