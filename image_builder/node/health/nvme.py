"""NVMe drives: the state that the kernel has them in, and what they say of themselves (log page 02h).

The page is what `nvme smart-log` prints, asked for with the same ioctl (linux/nvme_ioctl.h; NVM Express Base
Specification 2.0, figure 207).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

from image_builder.node.health import apart
from image_builder.node.health.model import Finding, Look, Outcome, Sample
from image_builder.node.health.sysfs import text

_NVME_IOCTL_ADMIN_CMD = 0xC0484E41
_GET_LOG_PAGE, _HEALTH, _LENGTH = 0x02, 0x02, 512
_EVERY_NAMESPACE = 0xFFFFFFFF
_TIMEOUT_MS = 5000
# All drives together; a controller that is being reset keeps a question to itself.
_SECONDS = 15.0
# Bits of the critical warning. The read-only one and the first are the end of a drive; heat may pass.
WARNINGS = {
    0: "spare blocks below the threshold",
    1: "temperature out of range",
    2: "reliability degraded by media errors",
    3: "read-only",
    4: "volatile memory backup failed",
    5: "persistent memory region unreliable",
}
_HEAT = 1 << 1


@dataclass(frozen=True)
class Page:
    """What of the page is looked at. ``spare`` and ``used`` are percentages; ``used`` can exceed 100."""

    warning: int
    temperature_c: int
    spare: int
    used: int
    media_errors: int


@dataclass(frozen=True)
class Drive:
    """A controller: ``state`` is the kernel's word, ``page`` None where the drive gives none, as in some VMs."""

    name: str
    state: str
    page: Page | None


def check(look: Look) -> Outcome:
    """Look at every controller; their pages are read in a process that may hang. Raises NodeError."""
    states = {
        entry.name: text(entry / "state") for entry in sorted((look.places.sys / "class/nvme").glob("nvme*"))
    }
    if not states:
        return Outcome()
    findings: list[Finding] = []
    pages: dict[str, list[int] | None] = {}
    process = look.memory.get("hung")
    if not process or apart.started(process[0], look.places.proc) != process[1]:
        process = None
        try:
            pages = apart.run(lambda: _pages(look.places.dev, states), "an NVMe drive", _SECONDS)
        except apart.HungError as error:
            process = list(error.process)
    if process:
        detail = f"a drive does not answer: process {process[0]} waits for it"
        findings.append(Finding("drive.hung", "nvme", "fail", detail, action="reboot"))
    drives = [
        Drive(name, state, Page(*found) if (found := pages.get(name)) else None)
        for name, state in states.items()
    ]
    memory = {"hung": process} if process else {}
    return Outcome((*findings, *rule(drives)), tuple(samples(drives)), memory)


def _pages(devices: Path, names: Iterable[str]) -> dict[str, list[int] | None]:
    found = {name: page(devices / name) for name in names}
    return {name: list(astuple(one)) if one else None for name, one in found.items()}


def page(device: Path) -> Page | None:
    """Ask a drive; None where there is no such device or it can't be asked."""
    data = ctypes.create_string_buffer(_LENGTH)
    # The number of words, counted from 0, stands beside the page's number.
    words = (_LENGTH // 4 - 1) << 16 | _HEALTH
    command = struct.pack(
        "=BBHIIIQQIIIIIIIIII", _GET_LOG_PAGE, 0, 0, _EVERY_NAMESPACE, 0, 0, 0, ctypes.addressof(data), 0, _LENGTH,
        words, 0, 0, 0, 0, 0, _TIMEOUT_MS, 0,
    )  # fmt: skip
    try:
        fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = fcntl.ioctl(fd, _NVME_IOCTL_ADMIN_CMD, bytearray(command))
    except OSError:
        return None
    finally:
        os.close(fd)
    return parse(data.raw) if status == 0 else None


def parse(data: bytes) -> Page:
    """Return what a page says; ``data`` are its 512 bytes."""
    warning, kelvin, spare, _threshold, used = struct.unpack_from("<BHBBB", data)
    media_errors = int.from_bytes(data[160:176], "little")
    return Page(warning, kelvin - 273 if kelvin else 0, spare, used, media_errors)


def rule(drives: Iterable[Drive]) -> list[Finding]:
    """Return what is wrong with drives."""
    found = []
    for one in drives:
        if one.state not in ("live", ""):
            detail = f"{one.name} is {one.state}"
            found.append(Finding("drive.state", one.name, "fail", detail, action="replace", patient=True))
        if one.page and one.page.warning:
            bits = [words for bit, words in WARNINGS.items() if one.page.warning >> bit & 1]
            detail = f"{one.name}: {', '.join(bits) or f'critical warning {one.page.warning:#04x}'}"
            heat_alone = one.page.warning == _HEAT
            found.append(
                Finding("drive.nvme", one.name, "warn", detail, patient=True)
                if heat_alone
                else Finding("drive.nvme", one.name, "fail", detail, action="replace")
            )
    return found


def samples(drives: Iterable[Drive]) -> list[Sample]:
    """Return the metrics of drives."""
    found = []
    for one in drives:
        labels = {"device": one.name}
        found.append(Sample("nvme_live", float(one.state == "live"), labels))
        if one.page:
            found += [
                Sample("nvme_critical_warning", one.page.warning, labels),
                Sample("nvme_available_spare_ratio", one.page.spare / 100, labels),
                Sample("nvme_used_ratio", one.page.used / 100, labels),
                Sample("nvme_temperature_celsius", one.page.temperature_c, labels),
                Sample("nvme_media_errors_total", one.page.media_errors, labels),
            ]
    return found
