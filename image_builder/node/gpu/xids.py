"""Errors that the driver writes to the kernel log, and what NVIDIA's catalogue says about them (``xids.json``).

Read from the journal, for this boot only: text logs have no year, and keep what a machine logged before its repair.
"""

from __future__ import annotations

import json
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from image_builder.node import settings
from image_builder.node.finding import Action
from image_builder.node.gpu.model import Xid

FORMAT = 1
UNKNOWN, UNREADABLE, NONFATAL = "UNKNOWN", "UNREADABLE", "NVLINK_NONFATAL"
# Messages in the kernel's ring buffer have the domain with four digits or eight, with or without the function.
# With MIG, the GPU and compute instances follow (" GPU-I:01 GPU-CI:02").
_XID = re.compile(r"NVRM:\s*Xid\s*\((?:((?:PCI:)?[0-9a-fA-F:.]+)\b)?[^)]*\)\s*:\s*(\d+)\b")
_ANY_XID = re.compile(r"NVRM:\s*Xid\s*\(")
_UNREADABLE_NUMBER = 0
# NVLink 5 (Blackwell) rates its errors itself: "145, RLW_RXPIPE Nonfatal XC0 i0 Link 05 (0x...)".
_NONFATAL = re.compile(r"\)\s*:\s*\d+,\s*(?:pid=.*?,\s*name=.*?,\s*)?\w+\s+non-?fatal\b", re.IGNORECASE)
_OFF_THE_BUS = re.compile(r"NVRM: (?:GPU (?:at )?((?:PCI:)?[0-9a-fA-F:.]+):? )?.*fallen off the bus")
_FELL_OFF = 79
_SXID = re.compile(
    r"(nvidia-nvswitch\d+): SXid \(((?:PCI:)?[0-9a-fA-F:.]+)\): (\d+), (Fatal|Non-fatal)\b", re.IGNORECASE
)
_NVLINK_5 = range(144, 151)
_RECOVERY_CHANGED = 154
_NO_RECOVERY = re.compile(r"recovery action changed from .+ to 0x0 \(None\)")
# ``unsettled``: not clearly a fault of the GPU, since our own program may have caused it.
Level = Literal["info", "warn", "unsettled", "fail"]


@dataclass(frozen=True)
class XidClass:
    """The meaning of an Xid before our test began, and during it. ``info`` is only for the record."""

    before: Level
    during: Level
    action: Action
    means: str
    name: str = ""


@dataclass(frozen=True)
class Catalogue:
    """NVIDIA's catalogue: classes by name, and the numbers of each."""

    format: int
    version: str
    source: str
    classes: Mapping[str, XidClass]
    xids: Mapping[str, tuple[int, ...]]

    def problems(self) -> Iterator[str]:
        """Yield missing classes, and numbers that are in several classes."""
        if self.format != FORMAT:
            yield f"format must be {FORMAT}, not {self.format}"
        for name in sorted({UNKNOWN, UNREADABLE, NONFATAL, *self.xids} - set(self.classes)):
            yield f"classes.{name} is missing"
        counted = Counter(number for numbers in self.xids.values() for number in numbers)
        yield from (f"xids must have {number} only once" for number, count in counted.items() if count > 1)

    def classify(self, number: int) -> XidClass:
        """Return the class of an Xid, UNKNOWN for one that isn't in the catalogue."""
        return self.classes[next((name for name, numbers in self.xids.items() if number in numbers), UNKNOWN)]

    def class_of(self, xid: Xid) -> XidClass:
        """Return the class of an Xid by its number and, for NVLink errors, by the driver's own rating."""
        if is_unreadable(xid):
            return self.classes[UNREADABLE]
        return self.classes[NONFATAL] if is_nonfatal(xid) else self.classify(xid.number)


def load() -> Catalogue:
    """Return the catalogue that comes with the agent. Raises NodeError (``gpu.xids``)."""
    return parse_catalogue(json.loads(pkgutil.get_data(__package__, "xids.json") or b"{}"))


def parse_catalogue(document: Any) -> Catalogue:
    """Return a catalogue. Raises NodeError (``gpu.xids``), for example for an Xid in two classes, an unknown level."""
    catalogue = settings.parse(Catalogue, document, "xids", code="gpu.xids")
    classes = {name: replace(xid_class, name=name) for name, xid_class in catalogue.classes.items()}
    return replace(catalogue, classes=classes)


def parse_journal(text: str, boot_id: str) -> tuple[Xid, ...]:
    """Return the Xids of one boot, in order, from ``journalctl -k -o json`` (one entry per line).

    ``boot_id`` is the kernel's, with or without dashes; entries of other boots are left out. Raises ValueError if a
    line isn't an entry: a log that can't be read proves nothing.
    """
    boot = boot_id.replace("-", "").lower()
    boot_xids: list[Xid] = []
    for line in text.splitlines():
        if not line.strip():
            continue
        entry = json.loads(line)
        if not isinstance(entry, dict):
            raise ValueError(f"not a journal entry: {line[:80]!r}")
        if str(entry.get("_BOOT_ID", "")).lower() != boot:
            continue
        xid = parse_message(_message(entry.get("MESSAGE")), int(entry.get("__MONOTONIC_TIMESTAMP", 0)))
        boot_xids += [xid] if xid else []
    return tuple(boot_xids)


def parse_message(text: str, monotonic_us: int) -> Xid | None:
    """Return the Xid or SXid in a kernel message, None if it has none.

    A GPU that fell off the bus counts as Xid 79. Of an SXid's several lines, only the one with its severity counts.
    A line that begins like an Xid but can't be parsed is one whose number is unknown (``is_unreadable``).
    """
    sxid = _SXID.search(text)
    if sxid:
        is_fatal = sxid[4].lower() == "fatal"
        return Xid(int(sxid[3]), address(sxid[2]), monotonic_us, text, sxid[1], is_fatal)
    xid = _XID.search(text)
    if xid:
        return Xid(int(xid[2]), address(xid[1] or ""), monotonic_us, text)
    off = _OFF_THE_BUS.search(text)
    if off:
        return Xid(_FELL_OFF, address(off[1] or ""), monotonic_us, text)
    return Xid(_UNREADABLE_NUMBER, "", monotonic_us, text) if _ANY_XID.search(text) else None


def is_unreadable(xid: Xid) -> bool:
    return not xid.switch and xid.number == _UNREADABLE_NUMBER


def is_nonfatal(xid: Xid) -> bool:
    """Return whether the driver itself rates an NVLink error as not fatal."""
    return not xid.switch and xid.number in _NVLINK_5 and bool(_NONFATAL.search(xid.raw))


def needs_nothing(xid: Xid) -> bool:
    """Return whether the driver's message itself says that nothing is to be done, for the record only.

    That is an SXid that isn't fatal, or a recovery action that changed to none.
    """
    if xid.switch:
        return not xid.fatal
    return xid.number == _RECOVERY_CHANGED and bool(_NO_RECOVERY.search(xid.raw))


def _message(value: Any) -> str:
    """Return a message's text: the journal gives one that isn't UTF-8 as a list of bytes."""
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return bytes(value).decode("utf-8", "replace")
    return value if isinstance(value, str) else ""


def address(text: str) -> str:
    """Convert any spelling of a PCI address that the driver, NVML or /sys uses to ``0001:00:00``."""
    parts = text.removeprefix("PCI:").partition(".")[0].split(":")
    if len(parts) == 2:
        parts.insert(0, "0")
    try:
        numbers = [int(part, 16) for part in parts]
    except ValueError:
        return ""
    return "{:04x}:{:02x}:{:02x}".format(*numbers) if len(numbers) == 3 else ""


def is_during(xid: Xid, began_us: int | None) -> bool:
    """Return whether an Xid came after the test began; ``began_us`` is None if it didn't begin."""
    return began_us is not None and xid.monotonic_us >= began_us
