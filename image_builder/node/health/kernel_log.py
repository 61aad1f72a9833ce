"""The kernel's log since the last look: I/O errors, filesystem failures, Xids.

Read from /dev/kmsg, record by record, up to its end. The number of the last record is remembered. Records that were
overwritten between two looks are counted as lost.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from image_builder.node import files, mounts
from image_builder.node.finding import Action
from image_builder.node.gpu import xids
from image_builder.node.health import storage
from image_builder.node.health.model import Finding, Look, Outcome, Sample, Severity

_RECORD_BYTES = 8192  # the longest that the kernel returns
_KERNEL = 0  # syslog's facility for the kernel's own records, never for a program's
_DETAIL = 200
# How many troubles are remembered, and how long each counts after it was last seen.
_MOST = 64
_HOLD_SECONDS: Mapping[str, float] = {
    "drive.io-errors": 3600.0,
    "drive.timeouts": 3600.0,
    "filesystem.error": 86400.0,
}
# Devices for which such lines are harmless: they have no medium, or their backing file was removed.
_HARMLESS = re.compile(r"(?:fd|sr|loop|nbd|zram)\d+")
_DEVICE = r"([a-z][\w-]*)"
_TROUBLES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "drive.io-errors",
        re.compile(
            rf"(?:I/O|critical \w+|critical space allocation) error, dev {_DEVICE},"
            # Drives and hypervisors refuse a DISCARD or WRITE_ZEROES that they announced, and the filesystem goes on:
            # only what moves data says anything about the drive. Old kernels don't name the operation.
            r"(?!.* op 0x\w+:\((?!READ\)|WRITE\)|FLUSH\)))"
        ),
    ),
    ("drive.io-errors", re.compile(rf"Buffer I/O error on (?:dev|device) {_DEVICE},")),
    ("drive.io-errors", re.compile(r"nvme (nvme\d+): (?:Device not ready|Removing after)")),
    ("drive.timeouts", re.compile(r"nvme (nvme\d+): I/O .*timeout")),
    ("drive.io-errors", re.compile(rf"md/raid[^:]*: Disk failure on {_DEVICE}[, ]")),
    ("filesystem.error", re.compile(rf"EXT4-fs error \(device {_DEVICE}\)")),
    (
        "filesystem.error",
        re.compile(rf"EXT4-fs \({_DEVICE}\): (?:Remounting filesystem read-only|.*aborted)"),
    ),
    ("filesystem.error", re.compile(rf"Aborting journal on device {_DEVICE}-\d+")),
    (
        "filesystem.error",
        re.compile(
            rf"XFS \({_DEVICE}\): (?:Corruption |Metadata corruption|metadata I/O error|log I/O error"
            r"|.*[Ss]hutting down filesystem|.*xfs_do_force_shutdown|Internal error)"
        ),
    ),
    ("filesystem.error", re.compile(rf"BTRFS (?:error|critical) \(device {_DEVICE}")),
)


@dataclass(frozen=True)
class Record:
    """One record: ``seconds`` since boot, on the monotonic clock. Programs can write to the log as well."""

    number: int
    seconds: float
    text: str
    is_kernels: bool = True


@dataclass(frozen=True)
class Trouble:
    """A problem of one device in the log: seen ``count`` times, the last time ``last`` seconds after boot."""

    code: str
    subject: str
    count: int
    last: float
    detail: str


Verdict = tuple[Severity | None, Action]
# The catalogue's levels for an Xid that wasn't provoked by our test.
_LEVELS: Mapping[str, Severity | None] = {"info": None, "warn": "warn", "unsettled": "warn", "fail": "fail"}
Judge = Callable[[str], Verdict]
"""What the Xid in a line means: None is nothing to worry about."""


def check(look: Look, judge: Judge) -> Outcome:
    """Read the new records, and judge them together with earlier troubles. Raises OSError."""
    last = int(look.memory.get("number", -1))
    records, lost = collect(read(look.places.dev / "kmsg"), last)
    earlier = [Trouble(**item) for item in look.memory.get("troubles", [])]
    troubles = merge(earlier, find(records))
    lost += int(look.memory.get("lost", 0))
    own = own_devices(look)
    return Outcome(
        tuple(rule(troubles, look.now, own, judge)),
        tuple(samples(troubles, lost)),
        {
            "number": records[-1].number if records else last,
            "troubles": [asdict(trouble) for trouble in troubles],
            "lost": lost,
        },
    )


def own_devices(look: Look) -> frozenset[str]:
    """Return the devices that hold the configured paths: the node's own, not the volumes of pods."""
    mounted = mounts.listed(look.places.proc)
    holders = [storage.containing(os.path.realpath(path), mounted) for path in look.settings.paths]
    return storage.disks_below({mount.device for mount in holders if mount}, look.places.sys)


def read(path: Path) -> Iterator[bytes]:
    """Yield the contents of the kernel's buffer, one record at a time. Raises OSError."""
    with files.descriptor(path, os.O_NONBLOCK) as fd:
        while True:
            try:
                record = os.read(fd, _RECORD_BYTES)
            except BlockingIOError:
                return  # the end
            except OSError as error:
                if error.errno == errno.EPIPE:
                    continue  # it was overwritten before it could be read: the next one is available
                raise
            if not record:
                return
            yield record


def collect(raw: Iterable[bytes], last: int) -> tuple[list[Record], int]:
    """Return the records after number ``last``, and how many of those were overwritten before they could be read."""
    records: list[Record] = []
    for line in raw:
        head, _, rest = line.partition(b";")
        fields = head.split(b",")
        if len(fields) < 3 or not (fields[0].isdigit() and fields[1].isdigit()):
            continue
        number = int(fields[1])
        if number <= last:
            continue
        text = rest.partition(b"\n")[0].decode(errors="replace")
        records.append(Record(number, int(fields[2]) / 1e6, text, int(fields[0]) >> 3 == _KERNEL))
    lost = records[0].number - last - 1 if records and last >= 0 else 0
    return records, lost


def find(records: Iterable[Record]) -> list[Trouble]:
    """Return the troubles in the log, one for each record that reports one; ``count`` 0: one is over."""
    troubles = []
    for record in records:
        if not record.is_kernels:
            continue
        if named := trouble(record.text):
            troubles.append(Trouble(*named, 1, record.seconds, record.text[:_DETAIL]))
        elif subject := recovered(record.text):
            troubles.append(Trouble("gpu.xid", subject, 0, record.seconds, record.text[:_DETAIL]))
    return troubles


def recovered(text: str) -> str:
    """Return the subject of the Xid 154 that a line ends: the GPU needs no recovery any more. Empty for other lines."""
    xid = xids.parse_message(text, 0) if "NVRM:" in text else None
    return f"{xid.number} {xid.pci}" if xid and not xid.switch and xids.needs_nothing(xid) else ""


def trouble(text: str) -> tuple[str, str] | None:
    """Return code and subject of a line; for ``gpu.xid`` and ``gpu.sxid`` the subject is number and PCI address.

    A nonfatal error of NVLink has a subject of its own, and so has a line whose number can't be read.

    SXids that aren't fatal are no trouble: they occur on every boot of a machine with NVSwitches. Neither is an Xid 154
    that says that no recovery is needed any more.
    """
    if "NVRM:" in text or "SXid" in text:
        xid = xids.parse_message(text, 0)
        if xid is None or xids.needs_nothing(xid):
            return None
        if xids.is_unreadable(xid):
            return "gpu.xid", "unreadable"
        number = f"{xid.number}-nonfatal" if xids.is_nonfatal(xid) else str(xid.number)
        return ("gpu.sxid" if xid.switch else "gpu.xid", f"{number} {xid.pci}".rstrip())
    if not any(word in text for word in ("rror", "Remount", "abort", "Abort", "XFS", "nvme", "failure")):
        return None
    for code, pattern in _TROUBLES:
        if match := pattern.search(text):
            return None if _HARMLESS.match(match[1]) else (code, match[1])
    return None


def merge(earlier: Iterable[Trouble], new: Iterable[Trouble]) -> list[Trouble]:
    """Return all troubles that aren't over, one for each code and subject; if there are too many, only the latest."""
    troubles = {(trouble.code, trouble.subject): trouble for trouble in earlier}
    for trouble in new:
        if not trouble.count:
            troubles.pop((trouble.code, trouble.subject), None)
            continue
        before = troubles.get((trouble.code, trouble.subject))
        count = trouble.count + (before.count if before else 0)
        troubles[trouble.code, trouble.subject] = replace(trouble, count=count)
    return sorted(troubles.values(), key=lambda trouble: trouble.last)[-_MOST:]


def rule(troubles: Iterable[Trouble], now: float, own: frozenset[str], judge: Judge) -> list[Finding]:
    """Return what is wrong. A device that isn't one of the node's ``own`` is some pod's volume, and only warns.

    An Xid counts until the next boot, with the severity of its class, and so does a fatal SXid.
    """
    findings = []
    for trouble in troubles:
        severity: Severity | None
        action: Action
        if trouble.code == "gpu.xid":
            severity, action = judge(trouble.detail)
        elif trouble.code == "gpu.sxid":
            severity, action = "fail", "reboot"
        elif now - trouble.last > _HOLD_SECONDS[trouble.code]:
            continue
        elif trouble.code != "drive.timeouts" and is_own(trouble.subject, own):
            severity, action = "fail", "replace"
        else:
            severity, action = "warn", "none"  # the drive may have answered later
        if severity:
            detail = f"{trouble.count} times, last: {trouble.detail}" if trouble.count > 1 else trouble.detail
            findings.append(Finding(trouble.code, trouble.subject, severity, detail, action))
    return findings


def is_own(device: str, own: frozenset[str]) -> bool:
    """Return whether a device is one of the node's own, or the controller of one."""
    return device in own or any(re.fullmatch(rf"{re.escape(device)}n\d+(?:p\d+)?", name) for name in own)


def samples(troubles: Iterable[Trouble], lost: int) -> list[Sample]:
    """Return the metrics of the log, counted since the boot."""
    names = {
        "drive.io-errors": "drive_errors_total",
        "drive.timeouts": "drive_timeouts_total",
        "filesystem.error": "filesystem_errors_total",
    }
    values = [Sample("kernel_log_lost_records_total", lost)]
    for trouble in troubles:
        if trouble.code in ("gpu.xid", "gpu.sxid"):
            xid, _, pci = trouble.subject.partition(" ")
            values.append(
                Sample(f"gpu_{trouble.code[4:]}_total", trouble.count, {trouble.code[4:]: xid, "pci": pci})
            )
        else:
            values.append(Sample(names[trouble.code], trouble.count, {"device": trouble.subject}))
    return values


def catalogue() -> Judge:
    """Return a judge of Xids that uses NVIDIA's catalogue. Raises NodeError (``gpu.xids``)."""
    entries = xids.load()

    def judge(line: str) -> Verdict:
        xid = xids.parse_message(line, 0)
        entry = entries.class_of(xid) if xid else entries.classes[xids.UNREADABLE]
        return _LEVELS[entry.before], entry.action

    return judge
